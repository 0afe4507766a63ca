"""A benchmark's definition, and a configuration that evaluates on it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from hacrl.config import DatasetConfig, EvaluationConfig, RewardConfig
from hacrl.errors import ConfigError

_DEFINITIONS = Path(__file__).with_name("definitions.yaml")
_INSTRUCTION = "{prompt} Let's think step by step and output the final answer within \\boxed{}."
# Longer than any prompt of these benchmarks; whether it leaves room in a model's context is checked before it loads.
_MAX_PROMPT_TOKENS = 2048
_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


class Benchmark(BaseModel):
    """One entry of `definitions.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    source: str = Field(description="Where it is published, and by whom.")
    tasks: DatasetConfig
    size: int = Field(description="Tasks that it is known to have.")
    evaluation: EvaluationConfig
    reward: RewardConfig = RewardConfig(function="math")

    def found_in(self, data: Path) -> Benchmark:
        """The same with tasks from a file `data/<name>.jsonl` (.parquet, .json, .csv) or a folder `data/<name>`.

        Raises: ConfigError where there is neither.
        """
        for path in (*(data / f"{self.name}{suffix}" for suffix in _SUFFIXES), data / self.name):
            if path.exists():
                return self.model_copy(update={"tasks": self.tasks.model_copy(update={"dataset": str(path)})})
        problem = (
            f"benchmark {self.name}: {data} holds no file {self.name} ({', '.join(_SUFFIXES)}) and no folder of that "
            f"name; put the split {self.tasks.split!r} of {self.tasks.dataset} there"
        )
        raise ConfigError([problem])

    def applied_to(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """A run's configuration with these tasks, this reward and these settings in place of its own."""
        tasks = self.tasks.model_dump()
        agents = [
            {**agent, "sampling": {**(agent.get("sampling") or {}), "max_prompt_tokens": None}}
            for agent in run["agents"]
        ]
        return {
            **run,
            "agents": agents,
            # Nothing is trained, so the first source is never read.
            "tasks": {"train": tasks, "eval": {self.name: tasks}},
            "reward": [self.reward.model_dump()],
            "sampling": {**(run.get("sampling") or {}), "max_prompt_tokens": _MAX_PROMPT_TOKENS},
            "evaluation": self.evaluation.model_dump(),
        }


def load_benchmarks(names: Sequence[str]) -> list[Benchmark]:
    """The benchmarks of these names. Raises ConfigError for every name that is none, with those there are."""
    entries: dict[str, Any] = yaml.safe_load(_DEFINITIONS.read_text(encoding="utf-8"))
    problems = []
    for name in names:
        if name not in entries:
            close = difflib.get_close_matches(name, entries, n=1)
            remedy = f"did you mean {close[0]!r}? T" if close else "t"
            problems.append(f"benchmark {name!r}: there is none of this name; {remedy}here are {', '.join(entries)}")
    if problems:
        raise ConfigError(problems)
    return [_benchmark(name, entries[name]) for name in dict.fromkeys(names)]


def _benchmark(name: str, entry: Mapping[str, Any]) -> Benchmark:
    evaluation = {"k": 1, "temperature": 0.0, "max_new_tokens": 4096, **entry.get("evaluation", {})}
    tasks = {"template": _INSTRUCTION, **entry["tasks"]}
    return Benchmark.model_validate({**entry, "name": name, "tasks": tasks, "evaluation": evaluation})
