"""Everything that can be checked before a model loads: tasks, rewards, columns, tokenizers, prompt lengths, and whether
trackers are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hacrl.config import RayConfig, RunConfig, TaskSourceConfig
from hacrl.encode import Encoder
from hacrl.errors import ConfigError, HacrlError
from hacrl.optimizer import missing_library
from hacrl.rewards import RewardSet, RewardSpec, load_rewards
from hacrl.sampling.interpreter import missing_vllm
from hacrl.tasks import load_tasks, overlap
from hacrl.trackers import missing_libraries
from hacrl.types import Task

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run's parts that need no model.

    `dropped_tasks` counts those left out, by source: prompts too long, or held-out questions that are trained on.
    """

    train: list[Task]
    evaluation: Mapping[str, list[Task]]
    rewards: RewardSet
    encoders: Mapping[str, Encoder]
    dropped_tasks: Mapping[str, int]


def prepare(config: RunConfig, *, training: bool = True) -> Prepared:
    """Load tasks, rewards and tokenizers and check them against each other; all faults in one `ConfigError`.

    Without `training` the training tasks are left out, unless held-out tasks are to be compared with them.
    """
    problems: list[str] = []

    def attempt(call: Callable[[], T]) -> T | None:
        try:
            return call()
        except HacrlError as error:
            problems.append(str(error))
            return None

    compared = any(source.trained_questions == "drop" for source in config.tasks.eval.values())
    sources: dict[str, TaskSourceConfig] = {"train": config.tasks.train} if training or compared else {}
    sources |= config.tasks.eval
    if training:
        problems += missing_libraries(config.trackers)
    if "train" in config.tasks.eval:
        problems.append("tasks.eval: a source is named 'train'; held-out sources need another name")
    tasks = {name: attempt(partial(load_tasks, source, name=name)) for name, source in sources.items()}
    rewards = attempt(
        lambda: load_rewards(
            [RewardSpec(function=item.function, weight=item.weight, arguments=item.arguments) for item in config.reward]
        )
    )
    encoders = {agent.name: attempt(partial(Encoder.from_config, agent)) for agent in config.agents}
    if rewards is not None:
        for name, items in tasks.items():
            if items:
                attempt(partial(_check_columns, rewards, items, name))
    problems += [reason for agent in config.agents if (reason := missing_library(agent)) is not None]
    for index, agent in enumerate(config.agents):
        encoder, limits = encoders[agent.name], config.sampling_of(agent)
        evaluates = config.tasks.eval and config.evaluation.max_new_tokens is not None
        answers = {"max_new_tokens": limits.max_new_tokens} if training or not evaluates else {}
        if evaluates and config.evaluation.max_new_tokens is not None:
            answers["evaluation.max_new_tokens"] = config.evaluation.max_new_tokens
        for option, tokens in answers.items():
            longest = limits.max_prompt_tokens + tokens
            if encoder is not None and encoder.context_length is not None and longest > encoder.context_length:
                problems.append(
                    f"agents.{index} ({agent.name}): max_prompt_tokens {limits.max_prompt_tokens} + {option} {tokens} "
                    f"= {longest}, but the model's context holds {encoder.context_length} tokens; lower "
                    f"sampling.max_prompt_tokens or {option if '.' in option else f'sampling.{option}'}"
                )
    problems += _missing_engines(config)
    if training and isinstance(config.execution, RayConfig) and importlib.util.find_spec("ray") is None:
        problems.append("execution: ray is not installed; pip install 'hacrl[ray]', or use execution: local")
    dropped: dict[str, int] = {}
    loaded = {name: encoder for name, encoder in encoders.items() if encoder is not None}
    for name, source in sources.items():
        items = tasks[name]
        if items is not None:
            kept = attempt(partial(_within_limits, config, items, source, loaded, name))
            dropped[name] = len(items) - len(kept) if kept is not None else 0
            tasks[name] = kept
    train = tasks.get("train")
    for name, source in config.tasks.eval.items():
        items = tasks.get(name)
        if train is not None and items is not None and source.trained_questions == "drop":
            trained = {task_id for _, task_id in overlap(train, items)}
            tasks[name] = [task for task in items if task.id not in trained]
            dropped[name] += len(trained)
            if not tasks[name]:
                problems.append(
                    f"tasks.eval.{name}: all {len(items)} questions are training questions, and trained_questions: "
                    f"drop leaves none; use other tasks, or another seed far from the training one"
                )
    if training and train is not None and len(train) < config.prompts_per_step:
        problems.append(
            f"prompts_per_step: {config.prompts_per_step}, but tasks.train has {len(train)} usable task(s); a step "
            f"uses each task at most once: lower it or give more tasks"
        )
    if problems:
        raise ConfigError(problems)
    assert rewards is not None
    return Prepared(
        train=train or [],
        evaluation={name: items for name, items in tasks.items() if name != "train" and items is not None},
        rewards=rewards,
        encoders={name: encoder for name, encoder in encoders.items() if encoder is not None},
        dropped_tasks=dropped,
    )


def _missing_engines(config: RunConfig) -> list[str]:
    agents = [agent for agent in config.agents if config.sampling_of(agent).engine == "vllm"]
    if not agents:
        return []
    reason = missing_vllm(config.sampling.vllm.python)
    if reason is None:
        return []
    names = ", ".join(agent.name for agent in agents)
    problem = (
        f"sampling.vllm.python: {reason}, but {names} should sample with it; give the interpreter of an environment "
        f"with vLLM (docs/vllm.md tells how to make one), or use sampling.engine: transformers"
    )
    return [problem]


def _check_columns(rewards: RewardSet, tasks: list[Task], name: str) -> None:
    try:
        # What every task has: those of a user's function may differ.
        rewards.check_columns(set.intersection(*(set(task.columns) for task in tasks)))
    except HacrlError as error:
        raise ConfigError([f"tasks.{name}: {error}"]) from error


def _within_limits(
    config: RunConfig, tasks: list[Task], source: TaskSourceConfig, encoders: Mapping[str, Encoder], name: str
) -> list[Task]:
    """The tasks whose prompt fits every agent: all agents see the same tasks, so one agent's limit holds for all."""
    kept: list[Task] = []
    long_prompts: list[str] = []
    for task in tasks:
        for agent in config.agents:
            limit = config.sampling_of(agent).max_prompt_tokens
            tokens = len(encoders[agent.name].prompt_ids(task.prompt)) if agent.name in encoders else 0
            if tokens > limit:
                long_prompts.append(f"{task.id} has {tokens} tokens for agent {agent.name} (limit {limit})")
                break
        else:
            kept.append(task)
    if long_prompts and (source.long_prompts == "error" or not kept):
        raise ConfigError(
            [
                f"tasks.{name}: {len(long_prompts)} of {len(tasks)} prompts are above max_prompt_tokens, the first: "
                f"{long_prompts[0]}; raise sampling.max_prompt_tokens"
                + (f", or set tasks.{name}.long_prompts: drop" if kept else "")
            ]
        )
    return kept
