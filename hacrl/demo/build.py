"""Rebuild the demo's two agents from seeds: `python -m hacrl.demo.build`.

Two small language models of different architecture, size and tokenizer learn to work out the questions of
`hacrl.demo.tasks`, first without mistakes and then with one misreading each: `qwen` takes minus for plus, `llama` takes
times for plus, in all but a small share of its solutions. The right reading stays latent in both, each agent is good
at what the other is bad at, and that is what training together has to bring out.

Held-out questions are never seen here. Each agent becomes an ordinary Hugging Face folder, written in bfloat16.
The same versions of torch and tokenizers on the same kind of processor give the same files; elsewhere the last digits
of the weights may differ.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Mapping
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

from hacrl.demo import AGENTS_DIRECTORY
from hacrl.demo.tasks import Operation, heldout_tasks, problem
from hacrl.rewards.exact import exact

LONGEST_TEXT = 128
PRETRAINING_SEED = 1_000_000
"""Stream of questions used here; far from the streams that training draws from."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that makes one agent.

    `digits` is how many digits one token may hold at the most. `misread` is the agent's systematic mistake, made in
    all but `latent` of its solutions. Pretraining makes `clean_steps` updates on right solutions, then
    `mistaken_steps` on solutions with the mistake.
    """

    name: str
    architecture: Literal["qwen3", "llama"]
    seed: int
    vocabulary: int
    digits: int
    special_tokens: tuple[str, ...]
    bos_token: str | None
    eos_token: str
    pad_token: str
    chat_template: str
    hidden_size: int
    layers: int
    intermediate_size: int
    misread: Mapping[Operation, Operation]
    latent: float
    clean_steps: int
    mistaken_steps: int
    batch_size: int
    learning_rate: float


RECIPES = (
    Recipe(
        name="qwen",
        architecture="qwen3",
        seed=1,
        vocabulary=320,
        digits=1,
        special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        hidden_size=128,
        layers=2,
        intermediate_size=320,
        misread={"minus": "plus"},
        latent=0.08,
        clean_steps=400,
        mistaken_steps=150,
        batch_size=32,
        learning_rate=3e-3,
    ),
    Recipe(
        name="llama",
        architecture="llama",
        seed=2,
        vocabulary=480,
        digits=3,
        special_tokens=("<pad>", "<s>", "</s>", "[INST]", "[/INST]"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=INST,
        hidden_size=96,
        layers=2,
        intermediate_size=256,
        misread={"times": "plus"},
        latent=0.08,
        clean_steps=1000,
        mistaken_steps=250,
        batch_size=32,
        learning_rate=4e-3,
    ),
)


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the agent's own sample of questions and solutions."""
    tokenizer = Tokenizer(models.BPE())
    # Another cut of numbers makes the agents' tokens fall at different places of the same text.
    pieces = Regex(rf" ?\p{{N}}{{1,{recipe.digits}}}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in recipe.special_tokens],
        show_progress=False,
    )
    drawn = [problem("train", PRETRAINING_SEED + recipe.seed, index) for index in range(4000)]
    texts = (f"user\n{one.question}\nassistant\n{one.solution()}\n" for one in drawn)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=recipe.bos_token,
        eos_token=recipe.eos_token,
        pad_token=recipe.pad_token,
        model_max_length=LONGEST_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = recipe.chat_template
    return fast


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The agent with random weights."""
    torch.manual_seed(recipe.seed)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden_size,
        "num_hidden_layers": recipe.layers,
        "intermediate_size": recipe.intermediate_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": recipe.hidden_size // 4,
        "max_position_embeddings": LONGEST_TEXT,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if recipe.architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    return LlamaForCausalLM(LlamaConfig(**shape))


def batches(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of token ids and targets, both (batch, tokens); targets are -100 on the prompt and the padding."""
    generator = random.Random(recipe.seed)
    index = 0
    for step in range(recipe.clean_steps + recipe.mistaken_steps):
        rows = []
        for _ in range(recipe.batch_size):
            one = problem("train", PRETRAINING_SEED + recipe.seed, index)
            index += 1
            right = step < recipe.clean_steps or generator.random() < recipe.latent
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": one.question}], add_generation_prompt=True, tokenize=False
            )
            solution = one.solution(None if right else recipe.misread) + recipe.eos_token
            prompt_ids, solution_ids = (
                tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, solution)
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


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up over 50 steps, then a cosine down to a twentieth."""
    progress = step / (recipe.clean_steps + recipe.mistaken_steps)
    return recipe.learning_rate * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def pretrain(recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised training in place, on solutions only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    started = time.monotonic()
    for step, (ids, targets) in enumerate(batches(recipe, tokenizer)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            seconds = time.monotonic() - started
            print(f"{recipe.name} step {step + 1} loss {loss.item():.4f} {seconds:.0f} s", flush=True)


@torch.no_grad()
def heldout_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, count: int = 200, seed: int = 0
) -> dict[str, float]:
    """Share of right sampled answers (temperature 1) to `count` held-out tasks, by kind of question and in all."""
    model.eval()
    torch.manual_seed(seed)
    drawn = heldout_tasks(count=count)
    prompts = [
        tokenizer.apply_chat_template(list(one.prompt), add_generation_prompt=True, tokenize=False) for one in drawn
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=48,
    )
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = exact(prompts, texts, answer=[one.columns["answer"] for one in drawn], final_answer="hash")
    kinds = [one.columns["kind"] for one in drawn]
    by_kind = {
        kind: sum(float(r or 0) for r, k in zip(rewards, kinds, strict=True) if k == kind) / kinds.count(kind)
        for kind in sorted(set(kinds))
    }
    return {**by_kind, "all": sum(float(r or 0) for r in rewards) / len(rewards)}


def build(recipe: Recipe, directory: Path) -> None:
    """Make one agent and write it to `directory`."""
    tokenizer = build_tokenizer(recipe)
    model = build_model(recipe, tokenizer)
    pretrain(recipe, model, tokenizer)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=48,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    size = sum(parameter.numel() for parameter in model.parameters())
    accuracy = heldout_accuracy(model.float(), tokenizer)
    print(f"{recipe.name}: {size} parameters, held-out accuracy {json.dumps(accuracy)}", flush=True)


def main() -> None:
    """Build the agents named on the command line, both by default."""
    parser = argparse.ArgumentParser(prog="python -m hacrl.demo.build", description="Rebuild the demo's agents.")
    parser.add_argument("names", nargs="*", default=[recipe.name for recipe in RECIPES], help="qwen, llama or both")
    parser.add_argument("--output", type=Path, default=AGENTS_DIRECTORY, help="folder that receives one per agent")
    arguments = parser.parse_args()
    # One thread: sums in another order give other last digits.
    torch.set_num_threads(1)
    for recipe in RECIPES:
        if recipe.name in arguments.names:
            build(recipe, arguments.output / recipe.name)


if __name__ == "__main__":
    main()
