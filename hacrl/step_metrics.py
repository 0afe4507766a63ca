"""What one step leaves behind: flat metrics (docs/metrics.md explains each) and the rows of the rollout file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hacrl.agent import AgentUpdate
from hacrl.algorithms.algorithm import Credit
from hacrl.config import RayConfig, RunConfig
from hacrl.execution.timeline import Lap
from hacrl.rewards import verdict_metrics
from hacrl.types import Rollout, RolloutGroup


def step_metrics(
    config: RunConfig,
    groups: Sequence[RolloutGroup],
    credit: Credit,
    capability_A: Tensor,
    updates: Mapping[str, AgentUpdate],
    seconds: Mapping[str, float],
    tracker_failures: Mapping[str, int],
) -> dict[str, float]:
    """Names: `agent/<name>/...`, `pair/<learner>/<author>/...`, `trackers/<name>/...`, `time/...`, and totals of the
    step."""
    by_author: dict[str, list[Rollout]] = {agent.name: [] for agent in config.agents}
    for group in groups:
        for rollout in group.rollouts:
            by_author[rollout.completion.author].append(rollout)
    tokens = sum(rollout.completion.tokens for mine in by_author.values() for rollout in mine)
    metrics: dict[str, float] = {"rollouts": sum(map(len, by_author.values())), "tokens_sampled": tokens}
    for position, agent in enumerate(config.agents):
        own = f"agent/{agent.name}"
        mine = by_author[agent.name]
        if mine:
            metrics |= {f"{own}/{name}": value for name, value in _author_metrics(mine).items()}
            capability = float(capability_A[position])
            if not math.isnan(capability):
                metrics[f"{own}/capability"] = capability
        if agent.role != "author":
            metrics |= {f"{own}/{name}": value for name, value in _credit_metrics(credit, position).items()}
        metrics |= _update_metrics(agent.name, updates[agent.name].metrics)
    place = {agent.name: position for position, agent in enumerate(config.agents)}
    for agent, ratio_A in zip(config.agents, credit.ratio_LA.tolist(), strict=True):
        for name in config.authors_for(agent):
            if name != agent.name:
                metrics[f"pair/{agent.name}/{name}/omega"] = ratio_A[place[name]]
    metrics |= {f"trackers/{name}/failures": count for name, count in tracker_failures.items()}
    metrics |= {f"time/{name}": value for name, value in seconds.items()}
    if seconds.get("sample"):
        metrics["time/tokens_sampled_per_s"] = tokens / seconds["sample"]
    if seconds.get("update"):
        trained = sum(update.metrics.get("tokens_trained", 0.0) for update in updates.values())
        metrics["time/tokens_trained_per_s"] = trained / seconds["update"]
    return metrics


def execution_metrics(
    config: RunConfig, lap: Lap, *, restarts: int, stale: Mapping[str, int], staleness: Mapping[str, float]
) -> dict[str, float]:
    """`agent/<name>/time/<phase>`, and what was late, stale or absent; on Ray, how often agents were started anew."""
    metrics: dict[str, float] = {
        f"agent/{name}/time/{phase}": value for name, phases in lap.seconds.items() for phase, value in phases.items()
    }
    metrics |= {f"agent/{name}/{what}": value for name, counts in lap.counts.items() for what, value in counts.items()}
    if config.max_staleness > 0:
        metrics |= {f"agent/{name}/staleness": value for name, value in staleness.items()}
    metrics |= {
        f"agent/{name}/rollouts_stale": count for name, count in stale.items() if count or config.max_staleness > 0
    }
    if isinstance(config.execution, RayConfig):
        metrics["execution/restarts"] = restarts
    return metrics


def timeline_rows(lap: Lap, loop: Sequence[tuple[str, float, float]]) -> Iterator[dict[str, Any]]:
    """One JSON-able row per span of work: of the agents' processes, and of the loop itself (`agent` is null)."""
    for phase, begin, end in loop:
        yield {"agent": None, "process": "loop", "phase": phase, "begin": begin, "end": end}
    for span in lap.spans:
        yield dataclasses.asdict(span)


def _author_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = [rollout.verdict.reward for rollout in rollouts if rollout.verdict.reward is not None]
    lengths = [rollout.completion.tokens for rollout in rollouts]
    metrics = {
        "completion_tokens_mean": sum(lengths) / len(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated_rate": sum(rollout.completion.finish_reason == "length" for rollout in rollouts) / len(rollouts),
        "mean_logprob": sum(rollout.completion.mean_logprob for rollout in rollouts) / len(rollouts),
    }
    if rewards:
        metrics["positive_rate"] = sum(reward > 0 for reward in rewards) / len(rewards)
    return metrics | verdict_metrics([rollout.verdict for rollout in rollouts])


def _credit_metrics(credit: Credit, learner: int) -> dict[str, float]:
    values_PAG = credit.advantages_LPAG[learner]
    present_PAG = ~values_PAG.isnan()
    prompts_P = present_PAG.any(dim=(1, 2))
    if not bool(prompts_P.any()):
        return {}
    zero_P = torch.where(present_PAG, values_PAG, 0.0).eq(0).all(dim=(1, 2))
    return {
        "zero_variance_share": float(zero_P[prompts_P].double().mean()),
        "baseline_fell_back_share": float(credit.fell_back_LP[learner][prompts_P].double().mean()),
        "advantage_abs_mean": float(values_PAG[present_PAG].abs().mean()),
    }


def _update_metrics(learner: str, raw: Mapping[str, float]) -> dict[str, float]:
    """Give an update's metrics their public names, and derive shares and effective sample size from its sums."""
    metrics: dict[str, float] = {}
    weights = {name: value for name, value in raw.items() if name.endswith("/weight")}
    total = sum(weights.values())
    for name, value in raw.items():
        if not name.startswith("author/"):
            metrics[f"agent/{learner}/{name}"] = value
            continue
        author, _, key = name.removeprefix("author/").rpartition("/")
        pair = f"pair/{learner}/{author}"
        if key == "weight":
            metrics[f"{pair}/weight_share"] = value / total if total else 0.0
        elif key == "importance_sum":
            squares = raw[f"author/{author}/importance_square_sum"]
            metrics[f"{pair}/effective_sample_size"] = value**2 / squares if squares else 0.0
        elif key != "importance_square_sum":
            metrics[f"{pair}/{key}"] = value
    return metrics


def rollout_rows(
    groups: Sequence[RolloutGroup], names: Sequence[str], credit: Credit, updates: Mapping[str, AgentUpdate]
) -> Iterator[dict[str, Any]]:
    """One JSON-able row per rollout: what was said, how it was judged, what it was worth to each learner."""
    advantages = _advantages(names, credit)
    ratios = _ratios(names, updates, shape_PG=(len(groups), credit.advantages_LPAG.shape[-1]))
    for prompt, group in enumerate(groups):
        authors = dict.fromkeys(rollout.completion.author for rollout in group.rollouts)
        told = {author: (advantages[author].of(prompt), ratios[author].of(prompt)) for author in authors}
        for rollout in group.rollouts:
            completion, verdict = rollout.completion, rollout.verdict
            advantages_G, ratios_G = told[completion.author]
            yield {
                "task_id": completion.task_id,
                "author": completion.author,
                "index": completion.index,
                "prompt": group.task.prompt,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "tokens": completion.tokens,
                "mean_logprob": completion.mean_logprob,
                "weights_version": completion.weights_version,
                "reward": verdict.reward,
                "scores": dict(verdict.scores),
                "answer": verdict.answer,
                "parsed": verdict.parsed,
                "unscored": dict(verdict.unscored),
                "detail": verdict.detail,
                "advantages": advantages_G[completion.index],
                "ratios": ratios_G[completion.index],
            }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Worth:
    """A number of each of one author's rollouts for each learner that uses them; NaN = none."""

    learners: Sequence[str]
    values_PGL: np.ndarray

    def of(self, prompt: int) -> list[dict[str, float]]:
        """By number of the rollout: learner to value."""
        return [
            {learner: value for learner, value in zip(self.learners, values_L, strict=True) if not math.isnan(value)}
            for values_L in self.values_PGL[prompt].tolist()
        ]


def _advantages(names: Sequence[str], credit: Credit) -> dict[str, _Worth]:
    values_LPAG = credit.advantages_LPAG.numpy()
    uses_LA = ~np.isnan(values_LPAG).all(axis=(1, 3))
    return {
        author: _Worth(
            learners=[name for name, uses in zip(names, uses_LA[:, place], strict=True) if uses],
            values_PGL=np.moveaxis(values_LPAG[uses_LA[:, place], :, place], 0, -1),
        )
        for place, author in enumerate(names)
    }


def _ratios(
    names: Sequence[str], updates: Mapping[str, AgentUpdate], *, shape_PG: tuple[int, int]
) -> dict[str, _Worth]:
    worth = {}
    for author in names:
        learners = [learner for learner, update in updates.items() if author in update.ratios]
        values = [updates[learner].ratios[author] for learner in learners]
        worth[author] = _Worth(
            learners=learners, values_PGL=np.stack(values, axis=-1) if values else np.empty((*shape_PG, 0))
        )
    return worth
