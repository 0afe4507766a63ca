"""The limit: the same forward, backward and decode calls that a step of hacrl makes, with nothing around them.

An order holds what hacrl sampled in a step. The calls have the same shapes; no token is drawn, no text is made,
nothing is verified, encoded, measured or written.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DynamicCache
from work import Driver, Work

from hacrl.encode import micro_batches
from hacrl.sampling.transformers import TURNOVER_SHARE
from hacrl.types import TrainingSample


def main() -> None:
    driver = Driver()
    work = Work.from_json(sys.argv[1])
    (folder,) = work.models
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.learning_rate, weight_decay=0.0)
    while (order := driver.order()) is not None:
        rows = [(tuple(prompt), tuple(answer)) for prompt, answer in order["completions"]]
        start = time.perf_counter()
        model.eval()
        with torch.no_grad():
            for first in range(0, len(rows), work.batch_rows):
                decode(model, rows[first : first + work.batch_rows], work.answers)
        sampled = time.perf_counter()
        model.train()
        update(model, optimizer, rows)
        end = time.perf_counter()
        driver.tell({"seconds": end - start, "where": {"sample": sampled - start, "update": end - sampled}})


def decode(model: torch.nn.Module, rows: list[tuple[tuple[int, ...], tuple[int, ...]]], answers: int) -> None:
    prompts = [prompt for prompt, _ in rows[::answers]]
    lengths = torch.tensor([len(answer) for _, answer in rows])
    longest = max(map(len, prompts))
    ids = torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt in prompts])
    attention = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache = DynamicCache(config=model.config)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    call = {"cache": cache, "use_cache": True, "logits_to_keep": 1}
    model(input_ids=ids, attention_mask=attention, position_ids=positions, **call)
    cache.batch_repeat_interleave(answers)
    attention = attention.repeat_interleave(answers, 0)
    positions = attention.sum(1)
    tokens = torch.tensor([answer + (0,) * (int(lengths.max()) - len(answer)) for _, answer in rows])
    for step in range(int(lengths.max()) - 1):
        ended = lengths <= step + 1
        if float(ended.float().mean()) >= TURNOVER_SHARE:
            keep = (~ended).nonzero().squeeze(1)
            cache.batch_select_indices(keep)
            lengths, tokens, attention, positions = lengths[keep], tokens[keep], attention[keep], positions[keep]
        attention = torch.cat([attention, attention.new_ones(len(attention), 1)], 1)
        model(input_ids=tokens[:, step : step + 1], attention_mask=attention, position_ids=positions[:, None], **call)
        positions = positions + 1


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Mean log-probability of all answer tokens, prompts computed once, backward, clip, AdamW."""
    samples = [
        TrainingSample(
            task_id="", author="", index=0, own=True, prompt_ids=prompt, completion_ids=answer, advantage=1.0,
            author_mean_logprob=0.0, author_logprobs=None, ratio=1.0,
        )
        for prompt, answer in rows
    ]  # fmt: skip
    optimizer.zero_grad(set_to_none=True)
    for micro in micro_batches(samples, max_tokens=2**20, share_prompts=True):
        prompts = sorted({sample.prompt_ids for sample in micro}, key=len)
        place = torch.tensor([prompts.index(sample.prompt_ids) for sample in micro])
        longest = max(map(len, prompts))
        ids = torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt in prompts])
        attention = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        lengths = torch.tensor([len(sample.completion_ids) for sample in micro])
        most = int(lengths.max())
        answers = torch.tensor([sample.completion_ids + (0,) * (most - len(sample.completion_ids)) for sample in micro])
        mask = torch.arange(most) < lengths[:, None]
        cache = DynamicCache(config=model.config)
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        before = decoder(
            input_ids=ids, attention_mask=attention, position_ids=(attention.cumsum(1) - 1).clamp(min=0), cache=cache,
            use_cache=True,
        ).last_hidden_state  # fmt: skip
        cache.batch_select_indices(place)
        whole = torch.cat([attention[place], mask.long()], 1)
        after = decoder(
            input_ids=answers[:, :-1], attention_mask=whole[:, :-1], cache=cache, use_cache=True,
            position_ids=(whole.cumsum(1) - 1)[:, longest:-1],
        ).last_hidden_state  # fmt: skip
        hidden = torch.cat([before[:, -1:][place], after], 1)[mask]
        (cross_entropy(head(hidden), answers[mask], reduction="sum") / len(rows)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


if __name__ == "__main__":
    main()
