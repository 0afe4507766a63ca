"""Runs that differ in nothing but their seed are one method: their curves are averaged, with a band over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hacrl.report.runs import Run

# Keys that do not make a run another method.
FREE = {"output", "seed", "steps", "checkpoint", "export", "execution", "verification"}
FREE_OF_AGENTS = {"device", "resources", "micro_batch_tokens", "gradient_checkpointing"}
# Beyond this many, the keys in which two variants of an algorithm differ say less than a number does.
MOST_KEYS = 3
MOST_CHARACTERS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """Runs of one configuration; `shares` where some learner had rows of another author."""

    name: str
    runs: tuple[Run, ...]
    shares: bool

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for run in self.runs for name in run.agents))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys(pair for run in self.runs for pair in run.pairs()))

    @property
    def algorithm(self) -> Mapping[str, Any]:
        return self.runs[0].config["algorithm"]


def group_runs(runs: Sequence[Run]) -> list[Method]:
    """Methods in the order in which to show them: those that share first, each kind in the order of the runs.

    A method is named after its algorithm; several variants of one algorithm have the options in which they differ
    behind it. A comparison's runs keep its names.
    """
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        algorithm = run.method or str(run.config["algorithm"]["name"])
        setting = "" if run.method else json.dumps([run.agents, _settings(run)], sort_keys=True)
        grouped.setdefault((algorithm, setting), []).append(run)
    named: dict[str, list[Run]] = {}
    for (algorithm, _), found in grouped.items():
        variants = [others[0] for (name, _), others in grouped.items() if name == algorithm]
        name = shown = algorithm + _difference(found[0], variants)
        while shown in named:
            # Variants that differ in nothing that is shown still need names of their own.
            shown = f"{name} #{1 + sum(other.startswith(name) for other in named)}"
        named[shown] = found
    methods = [
        Method(name=name, runs=tuple(found), shares=any(run.pairs() for run in found)) for name, found in named.items()
    ]
    return sorted(methods, key=lambda method: not method.shares)


def control_of(methods: Sequence[Method], agents: Sequence[str]) -> Method | None:
    """The method in which all of `agents` learn alone, to compare those that share with.

    Of several, the one with the most equal number of their own answers, for GSPO with twice the rollouts is no fair
    control; of those, the first.
    """
    alone = [method for method in methods if not method.shares and set(agents) <= set(method.agents)]
    sharing = next((method for method in methods if method.shares), None)
    budget = 0.0 if sharing is None else _answers(sharing, agents)
    if budget == 0:
        return next(iter(alone), None)
    return min(alone, key=lambda method: round(abs(_answers(method, agents) / budget - 1), 2), default=None)


def _answers(method: Method, agents: Sequence[str]) -> float:
    """How many answers `agents` sampled in a run of the method, on average; 0 where no record tells."""
    return statistics.fmean(
        sum(sum(run.column(f"agent/{agent}/reward/texts").values()) for agent in agents) for run in method.runs
    )


def _settings(run: Run) -> dict[str, str]:
    config = {key: value for key, value in run.config.items() if key not in FREE and key != "agents"}
    agents = {
        f"{agent['name']}.{key}": value
        for agent in run.config["agents"]
        for key, value in agent.items()
        if key not in FREE_OF_AGENTS | {"name"}
    }
    # Tasks may have seeds of their own, which go with the run's.
    return {key: value for key, value in _flatten({**config, **agents}, "") if not key.endswith("seed")}


def _flatten(value: Any, prefix: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        return [pair for key, item in value.items() for pair in _flatten(item, f"{prefix}.{key}" if prefix else key)]
    return [(prefix, json.dumps(value, default=str))]


def _difference(run: Run, variants: Sequence[Run]) -> str:
    """In what `run` differs from the variants of its algorithm: ` (key=value, ...)`, empty where it is the only one."""
    if len(variants) == 1:
        return ""
    parts = [" + ".join(run.agents)] if len({variant.agents for variant in variants}) > 1 else []
    settings = [_settings(variant) for variant in variants]
    own = _settings(run)
    # An option that only some of the variants have belongs to an agent or section that others lack.
    names = [name for name in own if len({setting.get(name, own[name]) for setting in settings}) > 1]
    parts += [f"{name}={own[name][:MOST_CHARACTERS]}" for name in names]
    return f" ({', '.join(parts[:MOST_KEYS])})" if parts else ""
