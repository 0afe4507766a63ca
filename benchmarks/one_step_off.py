"""One-step-off sampling against synchronous steps: steps per second of the demo's agents, one thread a process.

python benchmarks/one_step_off.py --results benchmarks/results/one_step_off.json

The same work by turns: synchronous in one process and on Ray, and on Ray with `max_staleness=1`. Each figure is the
mean over a run's steps after the second; the ratios are medians over the turns. `--seeds N` adds N whole runs of the
demo each way, and the difference of their final held-out accuracy with its 95 % interval over seeds and tasks. (These
are made in one process: what Ray gives is the same, bit for bit.)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

import hacrl
from hacrl.compare.statistics import interval
from hacrl.demo.settings import demo_config
from hacrl.durable_files import write_json

SIDES = {
    "local": ["execution=local"],
    "ray": ["execution=ray"],
    "ahead": ["execution=ray", "max_staleness=1"],
}


def step_seconds(side: str, output: Path, overrides: list[str]) -> dict[str, Any]:
    """Mean seconds of a step, and of each agent's idle time as a share of it."""
    settings = ["evaluation.at_start=false", "evaluation.at_end=false", "evaluation.every=0", "export=none"]
    config = demo_config("hacpo", output=output, seed=0)
    records = list(hacrl.training_steps(config, [*SIDES[side], *settings, *overrides]))[2:]
    total = statistics.fmean(record.metrics["time/total"] for record in records)
    idle = {
        agent["name"]: statistics.fmean(record.metrics[f"agent/{agent['name']}/time/wait"] for record in records)
        / total
        for agent in config["agents"]
    }
    return {"seconds": total, "idle": idle}


def accuracies(seed: int, staleness: int, output: Path) -> list[float]:
    """Final avg@k of every held-out task, both agents."""
    settings = ["evaluation.at_start=false", "evaluation.every=0", "evaluation.k=8", "export=none"]
    config = demo_config("hacpo", output=output, seed=seed)
    last = list(hacrl.training_steps(config, [*settings, f"max_staleness={staleness}"]))[-1]
    return [score for entry in last.evaluation for score in entry["per_task"]["avg@k"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps per second with rollouts sampled one step ahead.")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=0, help="whole runs each way, for the final accuracy")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("overrides", nargs="*", default=["steps=20", "checkpoint.every=20"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            turns.append(
                {side: step_seconds(side, Path(folder) / f"{side}-{turn}", options.overrides) for side in SIDES}
            )
            print(json.dumps(turns[-1]), flush=True)
    found: dict[str, Any] = {"overrides": options.overrides, "turns": turns}
    for side in ("local", "ray") if turns else ():
        found[f"{side}_over_ahead"] = statistics.median(
            turn[side]["seconds"] / turn["ahead"]["seconds"] for turn in turns
        )
        print(f"{side} / ahead: {found[f'{side}_over_ahead']:.2f}")
    if options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            scores = [
                [accuracies(seed, staleness, Path(folder) / f"{staleness}-{seed}") for staleness in (0, 1)]
                for seed in range(1, options.seeds + 1)
            ]
        synchronous, ahead = np.array(scores).transpose(1, 0, 2)
        found["accuracy"] = {
            name: dataclasses.asdict(interval(values))
            for name, values in (
                ("synchronous", synchronous),
                ("ahead", ahead),
                ("ahead_minus_synchronous", ahead - synchronous),
            )
        }
        found["by_seed"] = {"synchronous": synchronous.mean(1).tolist(), "ahead": ahead.mean(1).tolist()}
        print(json.dumps(found["accuracy"], indent=1))
    if options.results:
        write_json(options.results, found)


if __name__ == "__main__":
    main()
