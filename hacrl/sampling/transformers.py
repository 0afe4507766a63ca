"""The sampler in process: transformers' model and KV cache, batched by prompt length.

All answers to one prompt share its prefill; rows that have ended leave the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hacrl.policy import Policy
from hacrl.sampling.sampler import SampledTokens

# Rows leave the batch once this share of it has ended: copying the cache costs about one decode step.
COMPACT_SHARE = 0.25


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
        generator = torch.Generator(self.policy.device)
        generator.manual_seed(seed)
        # Whole groups stay together so that they share a prefill; a group larger than the batch is cut into parts.
        per_group = min(answers, self.batch_rows)
        parts = [
            (prompt, min(per_group, answers - first))
            for prompt in range(len(prompts))
            for first in range(0, answers, per_group)
        ]
        parts.sort(key=lambda part: (-part[1], len(prompts[part[0]]), part[0]))
        sampled: list[list[SampledTokens]] = [[] for _ in prompts]
        while parts:
            copies = parts[0][1]
            same = [part for part in parts if part[1] == copies][: max(1, self.batch_rows // copies)]
            parts = parts[len(same) :]
            rows = self._decode(
                [prompts[prompt] for prompt, _ in same], copies, temperature, top_p, max_new_tokens, generator
            )
            for position, (prompt, _) in enumerate(same):
                sampled[prompt] += rows[position * copies : (position + 1) * copies]
        return sampled

    def _decode(
        self,
        prompts: list[tuple[int, ...]],
        copies: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        generator: torch.Generator,
    ) -> list[SampledTokens]:
        from transformers import DynamicCache

        device = self.policy.device
        longest = max(map(len, prompts))
        input_ids = torch.full((len(prompts), longest), self.pad_token_id, dtype=torch.long)
        attention = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            input_ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
            attention[row, longest - len(prompt) :] = 1
        input_ids, attention = input_ids.to(device), attention.to(device)

        total = len(prompts) * copies
        tokens = torch.full((total, max_new_tokens), self.pad_token_id, dtype=torch.long, device=device)
        logprobs = torch.zeros((total, max_new_tokens), dtype=torch.float32, device=device)
        lengths = torch.zeros(total, dtype=torch.long, device=device)
        rows = torch.arange(total, device=device)  # the original row of each row still in the batch
        ended = torch.zeros(total, dtype=torch.bool, device=device)  # of the rows in the batch
        stopped = torch.zeros(total, dtype=torch.bool, device=device)  # of the original rows

        cache: Any = DynamicCache(config=self.policy.config)
        with self.policy.active():
            position_ids = (attention.cumsum(1) - 1).clamp(min=0)
            logits = self.policy.decode_step(input_ids, attention, position_ids, cache)
            if copies > 1:
                cache.batch_repeat_interleave(copies)
            logits, attention = logits.repeat_interleave(copies, 0), attention.repeat_interleave(copies, 0)
            positions = attention.sum(1)
            for step in range(max_new_tokens):
                chosen, chosen_logprobs = _choose(logits, temperature, top_p, generator)
                live = rows[~ended]
                tokens[live, step] = chosen[~ended]
                logprobs[live, step] = chosen_logprobs[~ended]
                lengths[live] += 1
                ended = ended | torch.isin(chosen, self.stop_token_ids)
                stopped[rows[ended]] = True
                if step + 1 == max_new_tokens or bool(ended.all()):
                    break
                if float(ended.float().mean()) >= COMPACT_SHARE:
                    keep = (~ended).nonzero().squeeze(1)
                    cache.batch_select_indices(keep)
                    rows, ended, chosen = rows[keep], ended[keep], chosen[keep]
                    attention, positions = attention[keep], positions[keep]
                attention = torch.cat([attention, attention.new_ones(len(rows), 1)], 1)
                logits = self.policy.decode_step(chosen[:, None], attention, positions[:, None], cache)
                positions = positions + 1
        return [
            SampledTokens(
                token_ids=tuple(row_tokens[:length]),
                logprobs=tuple(row_logprobs[:length]),
                finish_reason="stop" if stop else "length",
            )
            for row_tokens, row_logprobs, length, stop in zip(
                tokens.tolist(), logprobs.tolist(), lengths.tolist(), stopped.tolist(), strict=True
            )
        ]


def _choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
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
