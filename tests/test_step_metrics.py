"""Rows of the rollout file: each number at the right rollout, and none where there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import run_config

from hacrl.agent import AgentUpdate
from hacrl.algorithms.algorithm import Credit
from hacrl.config import load_config
from hacrl.step_metrics import rollout_rows, step_metrics
from hacrl.types import Completion, Rollout, RolloutGroup, Task, Verdict

NAMES = ["qwen", "llama", "writer"]
# By task: the authors' numbers of the rollouts that are there.
THERE = {"first": [("qwen", 0), ("qwen", 1), ("writer", 0)], "second": [], "third": [("llama", 1), ("writer", 1)]}


def groups() -> list[RolloutGroup]:
    return [
        RolloutGroup(
            task=Task(id=task, prompt="2 + 2?"),
            rollouts=tuple(
                Rollout(
                    completion=Completion(
                        task_id=task,
                        author=author,
                        index=index,
                        text="4",
                        token_ids=(1, 2),
                        logprobs=(-0.5, -1.5),
                        finish_reason="stop",
                        weights_version=0,
                    ),
                    verdict=Verdict(reward=1.0),
                )
                for author, index in keys
            ),
        )
        for task, keys in THERE.items()
    ]


def credit() -> Credit:
    """Of L, P, A, G: a number that tells its place. llama does not learn from the writer, who learns from nobody."""
    values_LPAG = torch.tensor(
        [
            [[[1000 * learner + 100 * p + 10 * a + g for g in range(2)] for a in range(3)] for p in range(3)]
            for learner in range(3)
        ],
        dtype=torch.float64,
    )
    values_LPAG[1, :, 2] = math.nan
    values_LPAG[2] = math.nan
    values_LPAG[0, 0, 0, 1] = math.nan
    return Credit(
        advantages_LPAG=values_LPAG,
        ratio_LA=torch.tensor([[1.0, 2.0, 3.0], [0.5, 1.0, 4.0], [1.0, 1.0, 1.0]], dtype=torch.float64),
        baselines_LP=torch.zeros(3, 3),
        fell_back_LP=torch.zeros(3, 3, dtype=torch.bool),
    )


def updates() -> dict[str, Any]:
    """llama is late and has told nothing; qwen's table for the writer holds an infinite ratio."""
    tables = {author: np.full((3, 2), math.nan) for author in NAMES}
    tables["qwen"][0, 0] = 0.9
    tables["writer"][0, 0], tables["writer"][2, 1] = math.inf, 1.1
    nothing = AgentUpdate(metrics={}, ratios={})
    return {"qwen": AgentUpdate(metrics={}, ratios=tables), "llama": nothing, "writer": nothing}


def test_each_row_has_what_its_rollout_was_worth_to_each_learner() -> None:
    rows = list(rollout_rows(groups(), NAMES, credit(), updates()))
    assert [(row["task_id"], row["author"], row["index"]) for row in rows] == [
        (task, author, index) for task, keys in THERE.items() for author, index in keys
    ]
    assert [row["advantages"] for row in rows] == [
        {"qwen": 0.0, "llama": 1000.0},
        {"llama": 1001.0},
        {"qwen": 20.0},
        {"qwen": 211.0, "llama": 1211.0},
        {"qwen": 221.0},
    ]
    assert [row["ratios"] for row in rows] == [{"qwen": 0.9}, {}, {"qwen": math.inf}, {}, {"qwen": 1.1}]
    assert {(row["tokens"], row["mean_logprob"]) for row in rows} == {(2, -1.0)}


@pytest.mark.parametrize("algorithm", ["hacpo", "gspo"])
def test_pairs_are_told_of_where_a_learner_uses_an_author(tmp_path: Path, algorithm: str) -> None:
    settings = run_config({"qwen": tmp_path, "llama": tmp_path}, tmp_path, algorithm=algorithm)
    settings["agents"][1]["learns_from"] = []
    settings["agents"].append({"name": "writer", "model": str(tmp_path), "role": "author"})
    metrics = step_metrics(load_config(settings), groups(), credit(), torch.full((3,), 0.5), updates(), {}, {})
    pairs = {name: value for name, value in metrics.items() if name.endswith("/omega")}
    assert pairs == ({"pair/qwen/llama/omega": 2.0, "pair/qwen/writer/omega": 3.0} if algorithm == "hacpo" else {})
    assert (metrics["rollouts"], metrics["tokens_sampled"]) == (5, 10)
    assert metrics["agent/writer/completion_tokens_mean"] == 2.0
