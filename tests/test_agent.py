"""What an agent hands out while it samples: finished groups, its own share, and nothing that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import run_config

from hacrl.agent import Agent
from hacrl.config import load_config
from hacrl.encode import Encoder
from hacrl.errors import ModelError, RunDirectoryError
from hacrl.policy import load_policies
from hacrl.trainer import build_algorithm
from hacrl.types import Completion, Task

TASKS = [Task(id=f"t{number}", prompt=f"{number} plus {number}?" + " And then?" * (5 - number)) for number in range(5)]


@pytest.fixture
def agent_of(tiny_models: dict[str, Path], tmp_path: Path) -> Callable[..., Agent]:
    def build(**changes: Any) -> Agent:
        config = load_config(run_config(tiny_models, tmp_path / "run", **changes))
        own = config.agents[0]
        policy = load_policies([own], seed=0)[own.name]
        encoder = Encoder.from_config(own)
        return Agent(config, own, policy, encoder, build_algorithm(config), dump_directory=tmp_path)

    return build


def in_task_order(parts: Iterable[Sequence[Completion]]) -> list[Completion]:
    completions = [completion for part in parts for completion in part]
    return sorted(completions, key=lambda completion: (completion.task_id, completion.index))


def tasks_of(completions: Sequence[Completion]) -> list[str]:
    return list(dict.fromkeys(completion.task_id for completion in completions))


def test_parts_are_whole_groups_and_come_while_others_are_sampled(agent_of: Callable[..., Agent]) -> None:
    agent = agent_of(sampling={"batch_rows": 4, "max_new_tokens": 6})
    parts = agent.sample(TASKS, step=1)
    assert isinstance(parts, Iterator)
    first = next(parts)
    assert torch.is_grad_enabled()
    found = [first, *parts]
    assert len(found) > 1
    assert [[completion.index for completion in part] for part in found] == [[0, 1, 2, 3]] * 5
    assert sorted(tasks_of([completion for part in found for completion in part])) == [task.id for task in TASKS]


def test_shares_of_all_processes_together_are_what_one_process_samples(agent_of: Callable[..., Agent]) -> None:
    agent = agent_of()
    whole = in_task_order(agent.sample(TASKS, step=1))
    evaluated = agent.sample_evaluation(TASKS)
    assert tasks_of(evaluated) == [task.id for task in TASKS]
    shares, evaluated_shares = [], []
    for rank in range(2):
        agent.share = (rank, 2)
        mine = [completion for part in agent.sample(TASKS, step=1) for completion in part]
        assert set(tasks_of(mine)) == {task.id for task in TASKS[rank::2]}
        shares.append(mine)
        evaluated_shares.append(agent.sample_evaluation(TASKS))
        assert tasks_of(evaluated_shares[-1]) == [task.id for task in TASKS[rank::2]]
    assert texts_of(in_task_order(shares)) == texts_of(whole)
    assert texts_of(in_task_order(evaluated_shares)) == texts_of(evaluated)
    agent.share = (6, 7)
    assert list(agent.sample(TASKS, step=1)) == []


def test_another_step_samples_other_answers(agent_of: Callable[..., Agent]) -> None:
    agent = agent_of()
    one, two = (in_task_order(agent.sample(TASKS, step=step)) for step in (1, 2))
    assert texts_of(one) != texts_of(two)


def test_probabilities_that_are_not_finite_are_an_error(agent_of: Callable[..., Agent]) -> None:
    agent = agent_of()
    with torch.no_grad():
        next(agent.policy.model.parameters()).fill_(float("nan"))
    with pytest.raises(ModelError, match=r"agent qwen, task t\d: a sampled token's log-probability is not finite"):
        next(agent.sample(TASKS, step=1))


def texts_of(completions: Sequence[Completion]) -> list[tuple[str, int, str, tuple[int, ...]]]:
    return [(item.task_id, item.index, item.text, item.token_ids) for item in completions]


def test_an_agent_that_was_lost_before_its_first_state_begins_anew(
    agent_of: Callable[..., Agent], tmp_path: Path
) -> None:
    agent = agent_of()
    folder = tmp_path / "state"
    folder.mkdir()
    with pytest.raises(RunDirectoryError, match=r"agent\.json of agent qwen is missing"):
        agent.load(folder)
    (folder / "absent.json").write_text("{}")
    agent.load(folder)
    assert agent.weights_version == 0
