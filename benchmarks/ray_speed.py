"""Agents on Ray against agents in one process: seconds of a step, and how long each agent waits for the other.

python benchmarks/ray_speed.py --results benchmarks/results/ray_speed.json
python benchmarks/ray_speed.py --equal --results benchmarks/results/ray_speed_equal.json

The demo's two agents, one thread each, the same run by turns under `execution: local` and `execution: ray`. Each figure
is the median over a run's steps after the first; the ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import hacrl
from hacrl.demo.settings import demo_config
from hacrl.durable_files import write_json


def step_seconds(execution: str, output: Path, overrides: list[str], *, equal: bool) -> dict[str, Any]:
    """Median seconds of a step, and of each agent's waiting as a share of it."""
    settings = [f"execution={execution}", "evaluation.at_start=false", "evaluation.at_end=false", "evaluation.every=0"]
    config = demo_config("hacpo", output=output, seed=0)
    if equal:
        config["agents"][1]["model"] = config["agents"][0]["model"]
    records = list(hacrl.training_steps(config, [*settings, "export=none", *overrides]))[1:]
    total = statistics.median(record.metrics["time/total"] for record in records)
    idle = {
        agent["name"]: statistics.median(record.metrics[f"agent/{agent['name']}/time/wait"] for record in records)
        / total
        for agent in config["agents"]
    }
    return {"seconds": total, "idle": idle}


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of a step under Ray and in one process.")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--equal", action="store_true", help="two copies of the first agent, which have equal work")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("overrides", nargs="*", default=["steps=8", "prompts_per_step=16", "group_size=8"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            sides = {
                execution: step_seconds(
                    execution, Path(folder) / f"{execution}-{turn}", options.overrides, equal=options.equal
                )
                for execution in ("local", "ray")
            }
            turns.append(sides | {"ratio": sides["local"]["seconds"] / sides["ray"]["seconds"]})
            print(json.dumps(turns[-1]), flush=True)
    found = {
        "overrides": options.overrides,
        "equal": options.equal,
        "turns": turns,
        "local_over_ray": statistics.median(turn["ratio"] for turn in turns),
    }
    print(f"local / ray: {found['local_over_ray']:.2f}")
    if options.results:
        write_json(options.results, found)


if __name__ == "__main__":
    main()
