"""The sampler in process: transformers' model, batched continuously.

All answers to one prompt share its prefill. Rows that have ended give their places to waiting ones; when none wait,
they leave the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hacrl.policy import Policy
from hacrl.sampling.sampler import SampledTokens

# Ended rows are exchanged once they are this share of the batch: a prefill, or a copy of the cache, costs about as
# much as one decode step.
TURNOVER_SHARE = 0.25


class TransformersSampler:
    """Samples from a `Policy`'s current weights; `batch_rows` bounds the rows decoded at the same time."""

    def __init__(self, policy: Policy, *, stop_token_ids: Sequence[int], pad_token_id: int, batch_rows: int) -> None:
        self.policy = policy
        self.stop_token_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.long, device=policy.device)
        self.pad_token_id = pad_token_id
        self.batch_rows = batch_rows

    @torch.no_grad()
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
        """See `Sampler.sample`."""
        # Prompts of like length need little padding. Row r answers prompt order[r // answers].
        order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
        decoding = _Decoding(
            self, [prompts[index] for index in order for _ in range(answers)], temperature, top_p, max_new_tokens, seed
        )
        with self.policy.active():
            decoding.run()
        rows = decoding.sampled()
        sampled: list[list[SampledTokens]] = [[] for _ in prompts]
        for place, index in enumerate(order):
            sampled[index] = rows[place * answers : (place + 1) * answers]
        return sampled


class _Decoding:
    """One call of `sample`: the rows in the batch (R), and what all rows (N) have been given so far.

    number_R     which of the N rows stands at each place of the batch; N itself where the row has ended.
    count_R      tokens chosen for it.
    chosen_R     its newest token, which is not in the cache yet.
    position_R   that token's position.
    attention_RC which columns of the cache belong to the row.
    """

    def __init__(
        self,
        sampler: TransformersSampler,
        prompts: list[tuple[int, ...]],
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        device = sampler.policy.device
        self.sampler, self.prompts, self.device = sampler, prompts, device
        self.temperature, self.top_p, self.max_new_tokens = temperature, top_p, max_new_tokens
        self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)
        total = len(prompts)
        # One place more than rows: what ended rows are still given goes there.
        self.tokens = torch.full((total + 1, max_new_tokens), sampler.pad_token_id, dtype=torch.long, device=device)
        self.logprobs = torch.zeros((total + 1, max_new_tokens), dtype=torch.float32, device=device)
        self.lengths = torch.zeros(total + 1, dtype=torch.long, device=device)
        self.stopped = torch.zeros(total + 1, dtype=torch.bool, device=device)
        self.waiting = 0  # the first row that has not been in the batch
        self.cache: Any = None
        self.number_R = self.count_R = self.chosen_R = self.position_R = torch.empty(0, dtype=torch.long, device=device)
        self.attention_RC = torch.empty(0, 0, dtype=torch.long, device=device)

    def run(self) -> None:
        total = len(self.prompts)
        while True:
            ended_R = self.number_R == total
            ended, rows = int(ended_R.sum()), len(self.number_R)
            if ended == rows:
                if self.waiting == total:
                    return
                self._begin()
                continue
            if ended >= TURNOVER_SHARE * rows:
                if self.waiting < total and self._takes_rows:
                    self._exchange(ended_R.nonzero().squeeze(1)[: total - self.waiting])
                    continue  # a new row may have ended with its first token
                self._drop(~ended_R)
            self._step()

    @property
    def _takes_rows(self) -> bool:
        from hacrl.sampling.row_cache import RowCache

        return isinstance(self.cache, RowCache)

    def _begin(self) -> None:
        """A new batch of waiting rows."""
        from hacrl.sampling.row_cache import RowCache

        prefilled, logits_RV, attention_RC, prompt_of_row_R = self._prefill(self.sampler.batch_rows)
        if RowCache.holds(prefilled):
            self.cache = RowCache(prefilled, prompt_of_row_R)
        else:
            self.cache = prefilled
            self.cache.reorder_cache(prompt_of_row_R)
        rows = len(prompt_of_row_R)
        self.number_R = torch.arange(self.waiting - rows, self.waiting, device=self.device)
        self.count_R = torch.zeros_like(self.number_R)
        self.attention_RC = attention_RC
        self.position_R = attention_RC.sum(1)
        self.chosen_R = torch.empty_like(self.number_R)
        self._choose(torch.arange(rows, device=self.device), logits_RV)

    def _exchange(self, slots_M: Tensor) -> None:
        """Waiting rows take the places of ended ones."""
        prefilled, logits_MV, attention_MC, prompt_of_row_M = self._prefill(len(slots_M))
        live_R = self.number_R < len(self.prompts)
        live_R[slots_M] = False
        unused = int(self.attention_RC[live_R].any(0).long().argmax())
        # Moving what is kept pays once it halves the columns that every step attends to.
        if unused >= self.attention_RC.shape[1] // 2:
            self.cache.trim(unused)
            self.attention_RC = self.attention_RC[:, unused:]
        self.cache.replace(slots_M, prefilled, prompt_of_row_M)
        columns = self.cache.length
        self.attention_RC = torch.nn.functional.pad(self.attention_RC, (columns - self.attention_RC.shape[1], 0))
        self.attention_RC[slots_M] = torch.nn.functional.pad(attention_MC, (columns - attention_MC.shape[1], 0))
        self.number_R[slots_M] = torch.arange(self.waiting - len(slots_M), self.waiting, device=self.device)
        self.count_R[slots_M] = 0
        self.position_R[slots_M] = attention_MC.sum(1)
        self._choose(slots_M, logits_MV)

    def _drop(self, keep_R: Tensor) -> None:
        """Ended rows leave the batch."""
        keep = keep_R.nonzero().squeeze(1)
        self.cache.reorder_cache(keep)
        self.number_R, self.count_R, self.chosen_R = self.number_R[keep], self.count_R[keep], self.chosen_R[keep]
        self.position_R, self.attention_RC = self.position_R[keep], self.attention_RC[keep]

    def _step(self) -> None:
        """One more token for every row of the batch."""
        self.attention_RC = torch.nn.functional.pad(self.attention_RC, (0, 1), value=1)
        logits_RV = self.sampler.policy.decode_step(
            self.chosen_R[:, None], self.attention_RC, self.position_R[:, None], self.cache
        )
        self.position_R = self.position_R + 1
        self._choose(slice(None), logits_RV)

    def _choose(self, slots: Tensor | slice, logits_MV: Tensor) -> None:
        """Draw the next token of the rows at `slots`, and write it down."""
        chosen_M, logprob_M = _draw(logits_MV, self.temperature, self.top_p, self.generator)
        number_M, count_M = self.number_R[slots], self.count_R[slots]
        self.tokens[number_M, count_M] = chosen_M
        self.logprobs[number_M, count_M] = logprob_M
        count_M = count_M + 1
        self.lengths[number_M] = count_M
        stop_M = torch.isin(chosen_M, self.sampler.stop_token_ids)
        self.stopped[number_M] = stop_M
        ended_M = stop_M | (count_M == self.max_new_tokens) | (number_M == len(self.prompts))
        self.chosen_R[slots] = chosen_M
        self.number_R[slots] = torch.where(ended_M, len(self.prompts), number_M)
        # An ended row goes on until it is exchanged: its count must stay a place in `tokens`, and its position one that
        # the model knows.
        self.count_R[slots] = torch.where(ended_M, 0, count_M)
        self.position_R[slots] = torch.where(ended_M, 0, self.position_R[slots])

    def _prefill(self, rows: int) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Compute the prompts of the next `rows` waiting rows, each different one once, padded on the left.

        Returns their cache, and for each row the logits, the columns that its prompt takes, and which prompt it has.
        """
        from transformers import DynamicCache

        first, self.waiting = self.waiting, min(self.waiting + rows, len(self.prompts))
        number: dict[tuple[int, ...], int] = {}
        prompt_of_row = [number.setdefault(prompt, len(number)) for prompt in self.prompts[first : self.waiting]]
        longest = max(map(len, number))
        input_ids = torch.full((len(number), longest), self.sampler.pad_token_id, dtype=torch.long)
        attention = torch.zeros((len(number), longest), dtype=torch.long)
        for row, prompt in enumerate(number):
            input_ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            attention[row, longest - len(prompt) :] = 1
        input_ids, attention = input_ids.to(self.device), attention.to(self.device)
        cache = DynamicCache(config=self.sampler.policy.config)
        position_ids = (attention.cumsum(1) - 1).clamp(min=0)
        logits = self.sampler.policy.decode_step(input_ids, attention, position_ids, cache)
        prompt_of_row_R = torch.tensor(prompt_of_row, device=self.device)
        return cache, logits[prompt_of_row_R], attention[prompt_of_row_R], prompt_of_row_R

    def sampled(self) -> list[SampledTokens]:
        rows = zip(
            self.tokens.tolist(), self.logprobs.tolist(), self.lengths.tolist(), self.stopped.tolist(), strict=True
        )
        return [
            SampledTokens(
                token_ids=tuple(tokens[:length]),
                logprobs=tuple(logprobs[:length]),
                finish_reason="stop" if stopped else "length",
            )
            for tokens, logprobs, length, stopped in list(rows)[: len(self.prompts)]
        ]


def _draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One id per row and its log-probability under the distribution it was drawn from."""
    if temperature == 0:
        best, ids = logits.max(-1)
        return ids, best - logits.logsumexp(-1)
    logits = logits / temperature
    if top_p < 1:
        from transformers import TopPLogitsWarper

        logits = TopPLogitsWarper(top_p)(None, logits)
    # The inverse of the distribution function, with one uniform number per row: torch.multinomial draws one per entry
    # of the vocabulary, which for 262,144 entries takes as long as the output layer itself.
    highest = logits.max(-1, keepdim=True).values
    mass = (logits - highest).exp().cumsum(-1, dtype=torch.float64)
    total = mass[:, -1:]
    uniform = torch.rand(total.shape, generator=generator, dtype=torch.float64, device=logits.device)
    # `right`: an entry without mass is never chosen, not even by a draw of exactly 0.
    ids = torch.searchsorted(mass, uniform * total, right=True).clamp(max=logits.shape[1] - 1)
    log_normaliser = highest + total.log().float()
    return ids.squeeze(1), (logits.gather(1, ids) - log_normaliser).squeeze(1)
