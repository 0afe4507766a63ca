"""Making tiny language models from seeds: tokenizer, random weights, supervised training on worked solutions.

The demo's agents (`hacrl.demo.build`) and those of the test-bed (`benchmarks/testbed/build.py`) are made by this. The
same versions of torch and tokenizers on the same kind of processor give the same files, with one thread; elsewhere the
last digits of the weights may differ.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What models of one family have in common. `digits` is how many digits one token may hold at the most."""

    architecture: Literal["qwen3", "llama"]
    digits: int
    special_tokens: tuple[str, ...]
    bos_token: str | None
    eos_token: str
    pad_token: str
    chat_template: str


QWEN = Family(
    architecture="qwen3",
    digits=1,
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos_token=None,
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
    chat_template=(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
)
LLAMA = Family(
    architecture="llama",
    digits=3,
    special_tokens=("<pad>", "<s>", "</s>", "[INST]", "[/INST]"),
    bos_token="<s>",
    eos_token="</s>",
    pad_token="<pad>",
    chat_template=(
        "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
        "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Size of a model."""

    hidden_size: int
    layers: int
    intermediate_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A question and the solution to learn."""

    question: str
    solution: str


def build_tokenizer(
    family: Family, examples: Iterable[Example], *, vocabulary: int, longest: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on questions and solutions; `longest`: tokens of the longest text."""
    tokenizer = Tokenizer(models.BPE())
    # Another cut of numbers makes the families' tokens fall at different places of the same text.
    pieces = Regex(rf" ?\p{{N}}{{1,{family.digits}}}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in family.special_tokens],
        show_progress=False,
    )
    texts = (f"user\n{example.question}\nassistant\n{example.solution}\n" for example in examples)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos_token,
        eos_token=family.eos_token,
        pad_token=family.pad_token,
        model_max_length=longest,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = family.chat_template
    return fast


def build_model(
    family: Family, shape: Shape, tokenizer: PreTrainedTokenizerFast, *, seed: int, longest: int
) -> PreTrainedModel:
    """A model with random weights, for texts of up to `longest` tokens."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": shape.hidden_size // 4,
        "max_position_embeddings": longest,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family.architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**settings))
    return LlamaForCausalLM(LlamaConfig(**settings))


def batches(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerFast, *, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of token ids and targets, both (batch, tokens); targets are -100 on the prompt and the padding."""
    source = iter(examples)
    while group := list(itertools.islice(source, batch_size)):
        rows = []
        for example in group:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": example.question}], add_generation_prompt=True, tokenize=False
            )
            prompt_ids, solution_ids = (
                tokenizer(text, add_special_tokens=False)["input_ids"]
                for text in (prompt, example.solution + tokenizer.eos_token)
            )
            rows.append((prompt_ids, solution_ids))
        width = max(len(prompt_ids) + len(solution_ids) for prompt_ids, solution_ids in rows)
        ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        targets = torch.full((len(rows), width), -100)
        for row, (prompt_ids, solution_ids) in enumerate(rows):
            end = len(prompt_ids) + len(solution_ids)
            ids[row, :end] = torch.tensor(prompt_ids + solution_ids)
            targets[row, len(prompt_ids) : end] = torch.tensor(solution_ids)
        yield ids, targets


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Iterable[Example],
    *,
    name: str,
    steps: int,
    batch_size: int,
    learning_rate: float,
) -> None:
    """Supervised training in place, on solutions only: `steps` updates on `steps * batch_size` examples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    started = time.monotonic()
    drawn = itertools.islice(examples, steps * batch_size)
    for step, (ids, targets) in enumerate(batches(drawn, tokenizer, batch_size=batch_size)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _schedule(step, steps)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            seconds = time.monotonic() - started
            print(f"{name} step {step + 1} loss {loss.item():.4f} {seconds:.0f} s", flush=True)


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over 50 steps, then a cosine down to a twentieth."""
    return min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


@torch.no_grad()
def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    seed: int,
) -> list[str]:
    """One answer to each rendered prompt, at temperature 1."""
    model.eval()
    torch.manual_seed(seed)
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=max_new_tokens,
    )
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path, *, max_new_tokens: int) -> None:
    """An ordinary Hugging Face folder, in bfloat16; the model is bfloat16 afterwards."""
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=max_new_tokens,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
