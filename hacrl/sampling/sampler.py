"""What a sampling engine must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hacrl.types import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """One sampled answer: ids, stop id included when it ended by itself, with their log-probabilities in nats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


class Sampler(Protocol):
    """Samples answers from an agent's current weights."""

    def sample(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        answers: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
    ) -> list[list[SampledTokens]]:
        """`answers` answers for each prompt, in the order of the prompts.

        Log-probabilities belong to the distribution that was sampled from: logits divided by `temperature`, cut to
        the nucleus `top_p`. Temperature 0 is greedy. The result is a function of the weights and the arguments.
        """
        ...
