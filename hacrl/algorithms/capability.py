"""How strong each agent is now, and the ratio between two agents (HACPO Eq. 6-7)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, Self, TypedDict, cast

import torch
from torch import Tensor

from hacrl.algorithms.ops import check_rewards, check_shape

Score = Literal["positive_rate", "mean"]


class CapabilityState(TypedDict):
    """A tracker's memory in JSON types: the step scores of each agent, oldest first."""

    score: str
    history: dict[str, list[float]]


class CapabilityTracker:
    """A moving estimate of each agent's capability.

        P_hat[k] = max(floor, mean over the last `window` steps, the current one included, of agent k's score)

    agents  names, in the order of the author axis.
    window  steps that count (K in the paper); a step where an agent has no scored rollout is none of its steps.
    score   `positive_rate`: share of its rewards above 0; `mean`: its mean reward.
    floor   lower limit of the estimate, so that an agent that fails everything has a ratio at all.
    Raises  ValueError for no or repeated agents, a window below 1, an unknown score or a floor not above 0.
    Source  HACPO Eq. 6-7 (arXiv 2603.02604); the floor is from the authors' program.
    """

    def __init__(self, agents: Sequence[str], *, window: int, score: Score, floor: float) -> None:
        if not agents or len(set(agents)) != len(agents):
            raise ValueError(f"agents: expected one or more different names, got {list(agents)}")
        if window < 1:
            raise ValueError(f"window: expected at least 1 step, got {window}")
        if score not in ("positive_rate", "mean"):
            raise ValueError(f"score: expected positive_rate or mean, got {score!r}")
        if not 0 < floor < math.inf:
            raise ValueError(f"floor: expected a number above 0, got {floor}")
        self._score: Score = score
        self._floor = floor
        self._history = {agent: deque[float](maxlen=window) for agent in agents}

    def observe(self, rewards_PAG: Tensor) -> Self:
        """Add one training step. rewards_PAG (P, A, G), NaN = missing; raises ValueError if A is not the agents'."""
        check_rewards(rewards_PAG)
        check_shape("rewards_PAG", rewards_PAG, (rewards_PAG.shape[0], len(self._history), rewards_PAG.shape[2]))
        rewards_APG = rewards_PAG.double().transpose(0, 1)
        for history, rewards_PG in zip(self._history.values(), rewards_APG, strict=True):
            scored = rewards_PG[~rewards_PG.isnan()]
            if scored.numel() > 0:
                score = (scored > 0).double() if self._score == "positive_rate" else scored
                history.append(float(score.mean()))
        return self

    def estimate(self) -> Tensor:
        """Capability of each agent, (A,) float64; NaN for an agent without history."""
        return torch.tensor(
            [
                max(self._floor, math.fsum(history) / len(history)) if history else math.nan
                for history in self._history.values()
            ],
            dtype=torch.float64,
        )

    def state_dict(self) -> CapabilityState:
        """The memory as JSON types, so that a resumed run estimates what an unbroken one would."""
        return {"score": self._score, "history": {agent: list(history) for agent, history in self._history.items()}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over a stored memory; of a longer one the newest `window` steps.

        Raises ValueError, and changes nothing, if it belongs to other agents or to another score.
        """
        score = state.get("score")
        stored = cast("Mapping[str, Sequence[float]] | None", state.get("history"))
        if score != self._score:
            raise ValueError(f"stored capability: kept by score {score!r}, but this run uses {self._score!r}")
        if not isinstance(stored, Mapping) or set(stored) != set(self._history):
            raise ValueError(f"stored capability: expected agents {sorted(self._history)}, got {stored!r}")
        for agent, history in self._history.items():
            history.clear()
            history.extend(float(value) for value in stored[agent])


def capability_ratios(capability_A: Tensor, *, ratio_min: float, ratio_max: float) -> Tensor:
    """Capability of each author relative to each learner (HACPO Eq. 7).

        ratio[learner, author] = clamp(P_hat[author] / P_hat[learner], ratio_min, ratio_max)

    capability_A          (A,) float, not negative; NaN = no history yet.
    ratio_min, ratio_max  limits, with 0 < ratio_min <= 1 <= ratio_max; from the authors' program.
    Returns               (L, A) with L = A; 1 on the diagonal and where either of the two has no history.
    Raises                ValueError for another shape, a negative or infinite capability, or limits not around 1.
    """
    if capability_A.dim() != 1 or not capability_A.is_floating_point():
        raise ValueError(
            f"capability_A: expected a floating tensor of one axis, "
            f"got {capability_A.dtype} {tuple(capability_A.shape)}"
        )
    if bool((capability_A < 0).any()) or bool(capability_A.isinf().any()):
        raise ValueError(f"capability_A: expected finite numbers of at least 0, got {capability_A}")
    if not 0 < ratio_min <= 1 <= ratio_max:
        raise ValueError(f"expected 0 < ratio_min <= 1 <= ratio_max, got ratio_min={ratio_min}, ratio_max={ratio_max}")
    ratio_LA = (capability_A.unsqueeze(0) / capability_A.unsqueeze(1)).clamp(ratio_min, ratio_max)
    return torch.where(ratio_LA.isnan(), 1.0, ratio_LA)
