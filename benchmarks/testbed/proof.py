"""Does sharing pay on the test-bed? `python benchmarks/testbed/proof.py`; needs the agents of `build.py`.

Every configuration, every method of `methods.yaml` (settings by `tune.py`), five seeds that the tuning did not use: one
`hacrl compare` for each configuration, then what holds over all of them. Runs that are finished are not made again.

The mean over configurations is taken seed by seed and task by task (all have the same seeds and held-out tasks), so its
interval is that of `hacrl compare`: for other seeds and other tasks, of these four pairs of agents.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skills import tasks

import hacrl
from hacrl.compare.statistics import first_reached, interval
from hacrl.durable_files import write_json

HERE = Path(__file__).parent
CONFIGURATIONS = ("state", "size", "model", "three")


def read_scores(output: Path, comparison: Mapping[str, Any]) -> dict[tuple[str, str, int], NDArray[np.float64]]:
    """(method, agent, step) -> held-out avg@k, seeds x tasks."""
    rows: dict[tuple[str, str, int], list[list[float]]] = {}
    for method in comparison["methods"]:
        for seed in comparison["seeds"]:
            folder = output / comparison["runs"][f"{method}/seed-{seed}"]
            for line in (folder / "evaluations.jsonl").read_text().splitlines():
                entry = json.loads(line)
                rows.setdefault((method, entry["agent"], entry["step"]), []).append(entry["per_task"]["avg@k"])
    return {key: np.array(found, dtype=np.float64) for key, found in rows.items()}


def mean_of(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.mean(np.stack(parts), axis=0)


def told(scores_ST: NDArray[np.float64]) -> dict[str, float]:
    """Mean and 95 % interval in points."""
    found = interval(scores_ST)
    return {"mean": 100 * found.mean, "low": 100 * found.low, "high": 100 * found.high}


class Setting:
    """One configuration's comparison: its scores, by method, agent, step and skill."""

    def __init__(self, name: str, output: Path, methods: Path, seeds: int, jobs: int | None) -> None:
        self.output = output / name
        self.comparison = hacrl.compare_methods(
            HERE / f"{name}.yaml", methods=methods, seeds=seeds, jobs=jobs, output=self.output
        )
        self.agents: list[str] = self.comparison["agents"]
        self.scores = read_scores(self.output, self.comparison)
        self.steps = sorted({step for _, _, step in self.scores})

    def at(self, method: str, step: int, agent: str | None = None) -> NDArray[np.float64]:
        """Seeds x tasks, of one agent or the mean over agents."""
        return mean_of([self.scores[method, name, step] for name in ([agent] if agent else self.agents)])

    def end(self, method: str, agent: str | None = None) -> NDArray[np.float64]:
        return self.at(method, self.steps[-1], agent)

    def sharing(self, method: str) -> dict[str, float]:
        """Means over seeds, steps and pairs of what became of foreign rows; empty for a method that shares nothing."""
        found: dict[str, list[float]] = {}
        for seed in self.comparison["seeds"]:
            folder = self.output / self.comparison["runs"][f"{method}/seed-{seed}"]
            for line in (folder / "metrics.jsonl").read_text().splitlines():
                for name, value in json.loads(line).items():
                    match name.split("/"):
                        case ["pair", learner, author, key] if learner != author and key in SHARING:
                            found.setdefault(key, []).append(value)
                        case ["agent", _, key] if key in LEARNING:
                            found.setdefault(key, []).append(value)
        return {key: statistics.fmean(values) for key, values in found.items()}


SHARING = ("s_mean", "below_share", "inside_share", "above_share", "weight_share", "omega")
LEARNING = ("zero_variance_share", "baseline_fell_back_share", "updates")


def overall(settings: Mapping[str, Setting], methods: Sequence[str]) -> dict[str, Any]:
    """What holds over all configurations: ends, differences, rollouts to reach, agents improved, accuracy by skill."""
    ends = {method: mean_of([setting.end(method) for setting in settings.values()]) for method in methods}
    starts = mean_of([setting.at(methods[0], 0) for setting in settings.values()])
    steps = next(iter(settings.values())).steps
    # (step, seed): mean over configurations, agents and tasks.
    curves = {
        method: np.array(
            [mean_of([setting.at(method, step) for setting in settings.values()]).mean(axis=1) for step in steps]
        )
        for method in methods
    }
    names = [str(task.columns["metadata"]["source_dataset"]) for task in tasks(split="heldout", count=96, seed=0)]
    skills = {skill: np.array([name == skill for name in names]) for skill in sorted(set(names))}
    return {
        "start": told(starts),
        "end": {method: told(end) for method, end in ends.items()},
        "differences": {
            one: {other: told(ends[one] - ends[other]) for other in methods if other != one} for one in methods
        },
        "agents": {
            name: {
                agent: {
                    "start": told(setting.at(methods[0], 0, agent)),
                    **{method: told(setting.end(method, agent)) for method in methods},
                    "differences": {
                        one: {
                            other: told(setting.end(one, agent) - setting.end(other, agent))
                            for other in methods
                            if other != one
                        }
                        for one in methods
                    },
                }
                for agent in setting.agents
            }
            for name, setting in settings.items()
        },
        "settings": {
            name: {
                one: {other: told(setting.end(one) - setting.end(other)) for other in methods if other != one}
                for one in methods
            }
            for name, setting in settings.items()
        },
        "rollouts_to_reach": {
            one: {other: _to_reach(steps, curves, one, other) for other in methods if other != one} for one in methods
        },
        "by_skill": {
            skill: {
                "start": 100 * float(starts[:, mask].mean()),
                **{method: 100 * float(end[:, mask].mean()) for method, end in ends.items()},
            }
            for skill, mask in skills.items()
        },
        "sharing": {
            method: {name: setting.sharing(method) for name, setting in settings.items()} for method in methods
        },
    }


def _to_reach(
    steps: Sequence[int], curves: Mapping[str, NDArray[np.float64]], one: str, other: str
) -> dict[str, float | list[float | None] | None]:
    """Share of `other`'s rollouts with which `one` is where `other` ends: by the mean over seeds, and seed by seed."""
    # GSPOx2 samples twice as much in a step as the others.
    per_step = {method: 2 if method == "gspo-x2" else 1 for method in (one, other)}

    def share(curve: NDArray[np.float64], target: float) -> float | None:
        reached = first_reached(steps, curve.tolist(), target)
        return None if reached is None else reached * per_step[one] / (steps[-1] * per_step[other])

    return {
        "mean": share(curves[one].mean(axis=1), float(curves[other][-1].mean())),
        "seeds": [share(curves[one][:, seed], float(end)) for seed, end in enumerate(curves[other][-1])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare methods on the whole test-bed.")
    parser.add_argument("--methods", type=Path, default=HERE / "methods.yaml", help="methods and their settings")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=None, help="runs at a time; one per core if left out")
    parser.add_argument("--output", type=Path, default=Path("runs/testbed"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=None, help="folder that receives the figures as JSON")
    parser.add_argument("--settings", default=",".join(CONFIGURATIONS), help="configurations, by comma")
    options = parser.parse_args()
    settings: dict[str, Setting] = {}
    for name in options.settings.split(","):
        settings[name] = Setting(name, options.output, options.methods, options.seeds, options.jobs)
        print(f"{name}: done", flush=True)
    methods = next(iter(settings.values())).comparison["methods"]
    found = overall(settings, methods)
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        write_json(options.results / "overall.json", found)
        for name, setting in settings.items():
            write_json(options.results / f"{name}.json", setting.comparison)
    print(markdown(found, methods))


def markdown(found: Mapping[str, Any], methods: Sequence[str]) -> str:
    """The tables of benchmarks/README.md."""
    lines = ["| setting | agent | start | " + " | ".join(methods) + " |", "|" + "---|" * (3 + len(methods))]
    for setting, agents in found["agents"].items():
        for agent, row in agents.items():
            figures = [f"{row[method]['mean']:.1f}" for method in methods]
            lines.append(f"| {setting} | `{agent}` | {row['start']['mean']:.1f} | {' | '.join(figures)} |")
    means = [f"{found['end'][method]['mean']:.1f}" for method in methods]
    lines.append(f"| mean | | {found['start']['mean']:.1f} | {' | '.join(means)} |")
    lines += ["", "| method | minus | all | " + " | ".join(found["settings"]) + " | share of its rollouts needed |"]
    lines.append("|" + "---|" * (4 + len(found["settings"])))
    for one in methods:
        for other in methods:
            if one != other:
                parts = [found["settings"][name][one][other] for name in found["settings"]]
                reach = found["rollouts_to_reach"][one][other]["mean"]
                cells = [_signed(found["differences"][one][other]), *map(_signed, parts)]
                share = "never" if reach is None else f"{100 * reach:.0f} %"
                lines.append(f"| {one} | {other} | {' | '.join(cells)} | {share} |")
    lines += ["", "| skill | start | " + " | ".join(methods) + " |", "|" + "---|" * (2 + len(methods))]
    for skill, row in found["by_skill"].items():
        lines.append(f"| {skill} | {row['start']:.1f} | {' | '.join(f'{row[method]:.1f}' for method in methods)} |")
    lines += ["", "| method | setting | " + " | ".join((*SHARING, *LEARNING)) + " |", "|" + "---|" * 11]
    for method in methods:
        for setting, row in found["sharing"][method].items():
            cells = [f"{row[key]:.2f}" if key in row else "" for key in (*SHARING, *LEARNING)]
            lines.append(f"| {method} | {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _signed(found: Mapping[str, float]) -> str:
    return f"{found['mean']:+.1f} [{found['low']:+.1f}, {found['high']:+.1f}]"


if __name__ == "__main__":
    main()
