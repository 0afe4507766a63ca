"""The demo over several seeds: held-out accuracy of HACPO and of GSPO with as many rollouts, and their difference.

python benchmarks/demo_seeds.py --seeds 5 --output runs/demo-seeds --results benchmarks/results/demo_seeds.json

A run that is finished is not made again. The unit of the interval is the seed (Student's t): one number per seed, the
mean over both agents of the final avg@4.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hacrl.config import load_config
from hacrl.demo.run import train_side_by_side
from hacrl.demo.settings import METHODS, demo_config
from hacrl.progress import RunHistory

# Two-sided 95 % quantile of Student's t by degrees of freedom.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 .. N - 1")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--output", type=Path, default=Path("runs/demo-seeds"))
    parser.add_argument("--results", type=Path, default=None, help="JSON file to write")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    configs = {
        f"{method}-{seed}": load_config(
            demo_config(method, output=options.output / f"{method}-{seed}", seed=seed), options.overrides
        )
        for seed in seeds
        for method in METHODS
    }
    for event in train_side_by_side(configs):
        if event.done:
            print(f"{event.method} finished", flush=True)
    results = summarise({name: read(Path(config.output), config) for name, config in configs.items()}, seeds)
    print(markdown(results))
    if options.results is not None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")


def read(folder: Path, config: Any) -> dict[str, tuple[float, float]]:
    """Each agent's held-out accuracy before and after."""
    history = RunHistory(config)
    history.read(folder)
    return {
        agent.name: (history.held_out(agent.name)[0][1], history.held_out(agent.name)[-1][1]) for agent in config.agents
    }


def summarise(runs: dict[str, dict[str, tuple[float, float]]], seeds: Sequence[int]) -> dict[str, Any]:
    agents = list(next(iter(runs.values())))
    rows = []
    for seed in seeds:
        for agent in agents:
            scores = {method: runs[f"{method}-{seed}"][agent] for method in METHODS}
            rows.append({"seed": seed, "agent": agent, "start": scores[METHODS[0]][0]}
                        | {method: end for method, (_, end) in scores.items()})  # fmt: skip
    by_agent: dict[str, Any] = {}
    for name in [*agents, "mean"]:
        chosen = {
            seed: [row for row in rows if row["seed"] == seed and name in (row["agent"], "mean")] for seed in seeds
        }

        def per_seed(key: str, chosen: dict[int, list[Any]] = chosen) -> list[float]:
            return [statistics.fmean(row[key] for row in found) for found in chosen.values()]

        gains = {method: _difference(per_seed(method), per_seed("start")) for method in METHODS}
        by_agent[name] = {
            "start": statistics.fmean(per_seed("start")),
            **{method: statistics.fmean(per_seed(method)) for method in METHODS},
            **{f"{method}_minus_start": mean_with_interval(gain) for method, gain in gains.items()},
            "least_hacpo_gain": min(gains["hacpo"]),
            "hacpo_minus_gspo": mean_with_interval(_difference(per_seed("hacpo"), per_seed("gspo"))),
        }
    return {"seeds": list(seeds), "agents": by_agent, "runs": rows}


def _difference(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def mean_with_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and half width of its 95 % interval over seeds; no width for a single seed."""
    if len(values) < 2:
        return {"mean": values[0]}
    half = T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": statistics.fmean(values), "interval_95": half}


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "| agent | start | HACPO | GSPO | HACPO gain (least) | HACPO - GSPO |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results["agents"].items():
        gain, difference = row["hacpo_minus_start"], row["hacpo_minus_gspo"]
        lines.append(
            f"| {name} | {row['start']:.3f} | {row['hacpo']:.3f} | {row['gspo']:.3f} | {_shown(gain)} "
            f"({100 * row['least_hacpo_gain']:+.1f}) | {_shown(difference)} |"
        )
    return "\n".join(lines)


def _shown(value: dict[str, float]) -> str:
    half = f" ± {100 * value['interval_95']:.1f}" if "interval_95" in value else ""
    return f"{100 * value['mean']:+.1f}{half}"


if __name__ == "__main__":
    main()
