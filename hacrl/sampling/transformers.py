"""The sampler in process: transformers' model, batched continuously.

All answers to one prompt share its prefill. Rows that have ended give their places to waiting ones; when none wait,
they leave the batch. At these exchanges it is looked which prompts have all their answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hacrl.policy import Policy
from hacrl.sampling.sampler import SampledTokens
from hacrl.seeds import derive_seed

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
        """See `Sampler.sample`."""
        if answers == 0:
            yield from ((index, []) for index in range(len(prompts)))
            return
        # Prompts of like length need little padding. Row r is an answer to prompt order[r // answers].
        order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
        decoding = _Decoding(
            self,
            [prompts[index] for index in order for _ in range(answers)],
            [derive_seed(seed, places[index], answer) for index in order for answer in range(answers)],
            answers,
            temperature,
            top_p,
            max_new_tokens,
        )
        while finished := self._advance(decoding):
            for number in finished:
                yield order[number], decoding.answers_to(number)

    @torch.no_grad()
    def _advance(self, decoding: _Decoding) -> list[int]:
        # Apart from `sample`, since gradient mode and autocast belong to the thread: left open at a `yield`, they would
        # hold for the caller as well, and another policy may have made its own adapter the active one meanwhile.
        with self.policy.active():
            return decoding.advance()


class _Decoding:
    """One call of `sample`: the rows in the batch (R), and what all rows (N) have been given so far.

    number_R     which of the N rows stands at each place of the batch; N itself where the row has ended.
    count_R      tokens chosen for it.
    chosen_R     its newest token, which is not in the cache yet.
    position_R   that token's position.
    attention_RC which columns of the cache belong to the row.
    uniform_RT   its random numbers, one for each token that it may have.
    """

    def __init__(
        self,
        sampler: TransformersSampler,
        prompts: list[tuple[int, ...]],
        seeds: list[int],
        answers: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
    ) -> None:
        """`prompts` and `seeds` have an entry for each row; `answers` rows in a row belong to one prompt."""
        device = sampler.policy.device
        self.sampler, self.prompts, self.seeds, self.answers, self.device = sampler, prompts, seeds, answers, device
        self.temperature, self.top_p, self.max_new_tokens = temperature, top_p, max_new_tokens
        self.generator = torch.Generator()
        total = len(prompts)
        # One place more than rows: what ended rows are still given goes there.
        self.tokens = torch.full((total + 1, max_new_tokens), sampler.pad_token_id, dtype=torch.long, device=device)
        self.logprobs = torch.zeros((total + 1, max_new_tokens), dtype=torch.float32, device=device)
        self.lengths = torch.zeros(total + 1, dtype=torch.long, device=device)
        self.stopped = torch.zeros(total + 1, dtype=torch.bool, device=device)
        self.waiting = 0  # the first row that has not been in the batch
        self.open: list[int] = []  # rows that were in the batch when it was last looked for finished prompts
        self.missing = [answers] * (total // answers)  # answers that each prompt still had to get then
        self.cache: Any = None
        self.number_R = self.count_R = self.chosen_R = self.position_R = torch.empty(0, dtype=torch.long, device=device)
        self.attention_RC = torch.empty(0, 0, dtype=torch.long, device=device)
        self.uniform_RT = torch.empty(0, max_new_tokens, dtype=torch.float64, device=device)

    def advance(self) -> list[int]:
        """Decode until prompts are found that have all their answers; their numbers, none when all is done."""
        total = len(self.prompts)
        while True:
            ended_R = self.number_R == total
            ended, rows = int(ended_R.sum()), len(self.number_R)
            if ended >= TURNOVER_SHARE * rows and (finished := self._finished()):
                return finished
            if ended == rows:
                if self.waiting == total:
                    return []
                self._begin()
                continue
            if ended >= TURNOVER_SHARE * rows:
                if self.waiting < total and self._takes_rows:
                    self._exchange(ended_R.nonzero().squeeze(1)[: total - self.waiting])
                    continue  # a new row may have ended with its first token
                self._drop(~ended_R)
            self._step()

    def _finished(self) -> list[int]:
        """Prompts whose last answer has ended since this was last asked."""
        rows = set(self.number_R.tolist())
        ended = [row for row in self.open if row not in rows]
        self.open = [row for row in self.open if row in rows]
        for row in ended:
            self.missing[row // self.answers] -= 1
        return [number for number in dict.fromkeys(row // self.answers for row in ended) if self.missing[number] == 0]

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
        self.uniform_RT = self._enter(rows)
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
        self.uniform_RT[slots_M] = self._enter(len(slots_M))
        self._choose(slots_M, logits_MV)

    def _enter(self, rows: int) -> Tensor:
        """Note that the last `rows` rows before the waiting ones are in the batch now; their random numbers."""
        entered = range(self.waiting - rows, self.waiting)
        self.open += entered
        uniform_MT = torch.empty(rows, self.max_new_tokens, dtype=torch.float64)
        for row, uniform_T in zip(entered, uniform_MT, strict=True):
            uniform_T.uniform_(generator=self.generator.manual_seed(self.seeds[row]))
        return uniform_MT.to(self.device)

    def _drop(self, keep_R: Tensor) -> None:
        """Ended rows leave the batch."""
        keep = keep_R.nonzero().squeeze(1)
        self.cache.reorder_cache(keep)
        self.number_R, self.count_R, self.chosen_R = self.number_R[keep], self.count_R[keep], self.chosen_R[keep]
        self.position_R, self.attention_RC = self.position_R[keep], self.attention_RC[keep]
        self.uniform_RT = self.uniform_RT[keep]

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
        number_M, count_M = self.number_R[slots], self.count_R[slots]
        uniform_M = self.uniform_RT[slots].gather(1, count_M[:, None]).squeeze(1)
        chosen_M, logprob_M = _draw(logits_MV, uniform_M, self.temperature, self.top_p)
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

    def answers_to(self, number: int) -> list[SampledTokens]:
        """The answers of one finished prompt."""
        rows = slice(number * self.answers, (number + 1) * self.answers)
        lengths = self.lengths[rows].tolist()
        columns = slice(max(lengths))
        return [
            SampledTokens(
                token_ids=tuple(tokens[:length]),
                logprobs=tuple(logprobs[:length]),
                finish_reason="stop" if stopped else "length",
            )
            for tokens, logprobs, length, stopped in zip(
                self.tokens[rows, columns].tolist(),
                self.logprobs[rows, columns].tolist(),
                lengths,
                self.stopped[rows].tolist(),
                strict=True,
            )
        ]


def _draw(logits_MV: Tensor, uniform_M: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """One id per row and its log-probability under the distribution it was drawn from."""
    if temperature == 0:
        best_M, ids_M = logits_MV.max(-1)
        return ids_M, best_M - logits_MV.logsumexp(-1)
    logits_MV = logits_MV / temperature
    if top_p < 1:
        from transformers import TopPLogitsWarper

        logits_MV = TopPLogitsWarper(top_p)(None, logits_MV)
    # The inverse of the distribution function, with one uniform number per row: torch.multinomial draws one per entry
    # of the vocabulary, which for 262,144 entries takes as long as the output layer itself.
    highest_M1 = logits_MV.max(-1, keepdim=True).values
    mass_MV = (logits_MV - highest_M1).exp().cumsum(-1, dtype=torch.float64)
    total_M1 = mass_MV[:, -1:]
    # `right`: an entry without mass is never chosen, not even by a draw of exactly 0.
    ids_M1 = torch.searchsorted(mass_MV, uniform_M[:, None] * total_M1, right=True).clamp(max=logits_MV.shape[1] - 1)
    log_normaliser_M1 = highest_M1 + total_M1.log().float()
    return ids_M1.squeeze(1), (logits_MV.gather(1, ids_M1) - log_normaliser_M1).squeeze(1)
