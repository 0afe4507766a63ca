"""From the records of a comparison's runs to its figures: `comparison.json` (docs/compare.md explains each field)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hacrl.compare.plan import Method, Plan, Run
from hacrl.compare.statistics import first_reached, interval
from hacrl.errors import HacrlError
from hacrl.progress import RunHistory

FORMAT = 1
COSTS = ("rollouts", "updates", "tokens", "seconds")
METRICS = ("avg@k", "best@k", "maj@k")
MEAN = "mean"

TaskScores = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """What one finished run left.

    `spent`: what was spent up to each step, evaluation left out; `scores`: step -> (source, agent, metric) -> task id
    -> score; `k`: answers per task.
    """

    spent: Mapping[int, Mapping[str, float]]
    scores: Mapping[int, Mapping[tuple[str, str, str], TaskScores]]
    k: int

    def read_at(self, axis: str, budget: float | None) -> int:
        """The step of the last evaluation, or of the last one for which `budget` is enough."""
        steps = [step for step in self.scores if budget is None or self.spent[step][axis] <= budget]
        if not steps:
            raise HacrlError(f"no evaluation within {budget:.4g} {axis}; evaluate more often, or evaluation.at_start")
        return max(steps)


def read_records(run: Run) -> Records:
    """Raises HacrlError where evaluations lack scores of single tasks, as an older version wrote them."""
    history = RunHistory(run.config)
    history.read(Path(run.config.output))
    scores: dict[int, dict[tuple[str, str, str], TaskScores]] = {}
    for entry in history.evaluations:
        tasks = entry.get("per_task")
        if tasks is None:
            raise HacrlError(
                f"{run.config.output}: its evaluations hold no scores of single tasks (an older version wrote them); "
                f"remove the folder to have the run made again"
            )
        for metric in METRICS:
            found = dict(zip(tasks["id"], tasks[metric], strict=True))
            scores.setdefault(entry["step"], {})[entry["split"], entry["agent"], metric] = found
    total = dict.fromkeys(COSTS, 0.0)
    spent = {0: dict(total)}
    for step, metrics in history.metrics:
        total["rollouts"] += metrics["rollouts"]
        total["tokens"] += metrics["tokens_sampled"]
        total["updates"] += sum(metrics.get(f"agent/{agent.name}/updates", 0.0) for agent in run.config.agents)
        total["seconds"] += metrics["time/total"] - metrics.get("time/evaluate", 0.0)
        spent[step] = dict(total)
    return Records(spent=spent, scores=scores, k=run.config.evaluation.k)


def comparison(plan: Plan, records: Mapping[str, Records]) -> dict[str, Any]:
    """All figures from the records of the runs that are finished, by the runs' names."""
    config = plan.runs[0].config
    agents = [agent.name for agent in config.agents if agent.role != "author"]
    finished = {
        method.name: {
            run.seed: records[run.name] for run in plan.runs if run.method == method.name and run.name in records
        }
        for method in plan.methods
    }
    budget = _budget(plan.axis, plan.methods, finished)
    methods = {
        method.name: _MethodRuns(
            runs=finished[method.name],
            read_at={
                seed: found.read_at(plan.axis, None if method.keeps_steps else budget)
                for seed, found in finished[method.name].items()
            },
            agents=agents,
        )
        for method in plan.methods
        if finished[method.name]
    }
    results = []
    for source in config.tasks.eval:
        for agent in [*agents, MEAN] if len(agents) > 1 else agents:
            for metric in METRICS:
                results += _results(methods, source, agent, metric)
    return {
        "format": FORMAT,
        "axis": plan.axis,
        "axis_budget": {name: runs.cost()[plan.axis] for name, runs in methods.items()},
        "agents": agents,
        "methods": [method.name for method in plan.methods],
        "seeds": list(plan.seeds),
        "runs": {run.name: f"runs/{run.name}" for run in plan.runs if run.name in records},
        "results": results,
    }


def _budget(axis: str, methods: Sequence[Method], finished: Mapping[str, Mapping[int, Records]]) -> float | None:
    """The least that any run spent, on the axes where that is known only afterwards."""
    if axis not in ("tokens", "seconds"):
        return None
    spent = [
        found.spent[max(found.spent)][axis]
        for method in methods
        if not method.keeps_steps
        for found in finished[method.name].values()
    ]
    return min(spent, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _MethodRuns:
    """The finished runs of one method by seed, and the step at which each is read."""

    runs: Mapping[int, Records]
    read_at: Mapping[int, int]
    agents: Sequence[str]

    def cost(self) -> dict[str, float]:
        """Mean over seeds of what was spent until the run is read."""
        return {
            name: statistics.fmean(found.spent[self.read_at[seed]][name] for seed, found in self.runs.items())
            for name in COSTS
        }

    def scores(self, key: tuple[str, str, str], step: int | None = None) -> dict[int, TaskScores]:
        """Seed -> task -> score, where the runs are read or at one step; empty where a run has none."""
        source, agent, metric = key
        found: dict[int, TaskScores] = {}
        for seed, run in self.runs.items():
            at = run.scores.get(self.read_at[seed] if step is None else step, {})
            parts = [at.get((source, name, metric), {}) for name in (self.agents if agent == MEAN else [agent])]
            found[seed] = {task: _mean([part.get(task) for part in parts]) for task in parts[0]}
        return found

    def curve(self, key: tuple[str, str, str]) -> tuple[list[float], list[float]]:
        """Rollouts and score, means over seeds, at the evaluations that all runs have, until they are read."""
        last = min(self.read_at.values())
        steps = sorted(set.intersection(*(set(run.scores) for run in self.runs.values())))
        points = []
        for step in steps:
            scores = _matrix([self.scores(key, step)])[0]
            if step <= last and scores.size:
                rollouts = statistics.fmean(run.spent[step]["rollouts"] for run in self.runs.values())
                points.append((rollouts, float(scores.mean())))
        return [x for x, _ in points], [y for _, y in points]


def _results(methods: Mapping[str, _MethodRuns], source: str, agent: str, metric: str) -> list[dict[str, Any]]:
    key = (source, agent, metric)
    results = []
    for name, runs in methods.items():
        own = runs.scores(key)
        (scores_ST,) = _matrix([own])
        if not scores_ST.size:  # maj@k where the rewards extract no answer
            continue
        curve = runs.curve(key)
        differences: dict[str, Any] = {}
        to_reach: dict[str, Any] = {}
        for other, others in methods.items():
            if other == name:
                continue
            theirs = others.scores(key)
            seeds = [seed for seed in own if seed in theirs]
            left_ST, right_ST = _matrix([{seed: scores[seed] for seed in seeds} for scores in (own, theirs)])
            if left_ST.size:
                differences[other] = dataclasses.asdict(interval(left_ST - right_ST))
            (target_ST,) = _matrix([theirs])
            reached = first_reached(*curve, float(target_ST.mean())) if target_ST.size else None
            spent = others.cost()["rollouts"]
            to_reach[other] = {"rollouts": reached, "share": reached / spent if reached is not None else None}
        start = _matrix([runs.scores(key, 0)])[0]
        k = next(iter(runs.runs.values())).k
        results.append(
            {
                "agent": agent,
                "method": name,
                "metric": metric.replace("@k", f"@{k}"),
                "source": source,
                **dataclasses.asdict(interval(scores_ST)),
                "start": float(start.mean()) if start.size else None,
                "runs": len(own),
                "tasks": scores_ST.shape[1],
                "tasks_left_out": max(len(tasks) for tasks in own.values()) - scores_ST.shape[1],
                "differences": differences,
                "to_reach": to_reach,
                "cost": runs.cost(),
            }
        )
    return results


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _matrix(groups: Sequence[Mapping[int, TaskScores]]) -> list[NDArray[np.float64]]:
    """scores_ST of each group, of the tasks that every seed of every group has a score for; the same in all."""
    runs = [tasks for group in groups for tasks in group.values()]
    common = [task for task in (runs[0] if runs else ()) if all(tasks.get(task) is not None for tasks in runs)]
    return [
        np.array([[tasks[task] for task in common] for tasks in group.values()], dtype=np.float64) for group in groups
    ]
