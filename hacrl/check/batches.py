"""Batch arithmetic: how many rows and optimizer updates a step makes, and the band at each update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hacrl.config import AgentConfig, HacpoConfig, RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchArithmetic:
    """One learner's step, if every rollout is scored and none is dropped.

    `rows` by author; `updates_own` come first, then `updates_foreign` (all under `mixed`). `band` holds (m, lower
    bound) of each update that foreign rows take part in; None where the algorithm has no band.
    """

    learner: str
    rows: Mapping[str, int]
    minibatch_rows: int
    updates_own: int
    updates_foreign: int
    band: tuple[tuple[int, float], ...] | None


def batch_arithmetic(config: RunConfig) -> list[BatchArithmetic]:
    """One entry per learner."""
    return [_arithmetic(config, agent) for agent in config.agents if agent.role != "author"]


def _arithmetic(config: RunConfig, learner: AgentConfig) -> BatchArithmetic:
    own, foreign = config.updates_per_step(learner)
    authors = config.authors_for(learner)
    settings = config.algorithm
    band = None
    if (
        isinstance(settings, HacpoConfig)
        and settings.clipping in ("stepwise", "fixed")
        and set(authors) - {learner.name}
    ):
        step = settings.delta_step if settings.clipping == "stepwise" else 0.0
        band = tuple((m, min(1.0, 1 - settings.delta + m * step)) for m in range(own, own + foreign))
    return BatchArithmetic(
        learner=learner.name,
        rows={name: config.prompts_per_step * config.group_size_of(config.agent(name)) for name in authors},
        minibatch_rows=config.minibatch_rows(learner),
        updates_own=own,
        updates_foreign=foreign,
        band=band,
    )
