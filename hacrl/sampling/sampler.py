"""What a sampling engine must do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        places: Sequence[int],
        answers: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Pairs (index into `prompts`, its `answers` answers): each prompt once, as soon as all its answers are there.

        Log-probabilities belong to the distribution that was sampled from: logits divided by `temperature`, cut to
        the nucleus `top_p`. Temperature 0 is greedy.

        `places[i]` is the place of prompt i in the whole of which `prompts` may be a part. The random numbers of an
        answer are a function of `seed`, that place, the answer's number and the token's position alone. So the result
        is a function of the weights and the arguments, and, up to the rounding of logits, the same whatever is computed
        together with it. Only its order is free.

        The weights must stay as they are until the iterator is at its end. It may be left before.
        """
        ...
