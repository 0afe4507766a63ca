"""Rebuild the demo's two agents from seeds: `python -m hacrl.demo.build`.

Two small language models of different architecture, size and tokenizer learn to work out the questions of
`hacrl.demo.tasks`, first without mistakes and then with one misreading each: `qwen` takes minus for plus, `llama` takes
times for plus, in all but a small share of its solutions. The right reading stays latent in both, each agent is good
at what the other is bad at, and that is what training together has to bring out.

Held-out questions are never seen here. Each agent becomes an ordinary Hugging Face folder, written in bfloat16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hacrl.demo import AGENTS_DIRECTORY, pretraining
from hacrl.demo.pretraining import LLAMA, QWEN, Example, Family, Shape
from hacrl.demo.tasks import Operation, heldout_tasks, problem
from hacrl.rewards.exact import exact

LONGEST_TEXT = 128
LONGEST_ANSWER = 48
PRETRAINING_SEED = 1_000_000
"""Stream of questions used here; far from the streams that training draws from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that makes one agent.

    `misread` is the agent's systematic mistake, made in all but `latent` of its solutions. Pretraining makes
    `clean_steps` updates on right solutions, then `mistaken_steps` on solutions with the mistake.
    """

    name: str
    family: Family
    shape: Shape
    seed: int
    vocabulary: int
    misread: Mapping[Operation, Operation]
    latent: float
    clean_steps: int
    mistaken_steps: int
    batch_size: int
    learning_rate: float


RECIPES = (
    Recipe(
        name="qwen",
        family=QWEN,
        shape=Shape(hidden_size=128, layers=2, intermediate_size=320),
        seed=1,
        vocabulary=320,
        misread={"minus": "plus"},
        latent=0.08,
        clean_steps=400,
        mistaken_steps=150,
        batch_size=32,
        learning_rate=3e-3,
    ),
    Recipe(
        name="llama",
        family=LLAMA,
        shape=Shape(hidden_size=96, layers=2, intermediate_size=256),
        seed=2,
        vocabulary=480,
        misread={"times": "plus"},
        latent=0.08,
        clean_steps=1000,
        mistaken_steps=250,
        batch_size=32,
        learning_rate=4e-3,
    ),
)


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the agent's own sample of questions and right solutions."""
    drawn = (problem("train", PRETRAINING_SEED + recipe.seed, index) for index in range(4000))
    examples = (Example(question=one.question, solution=one.solution()) for one in drawn)
    return pretraining.build_tokenizer(recipe.family, examples, vocabulary=recipe.vocabulary, longest=LONGEST_TEXT)


def examples(recipe: Recipe) -> Iterator[Example]:
    """What the agent learns from, in order: right solutions, then such with its mistake."""
    generator = random.Random(recipe.seed)
    for index in itertools.count():
        one = problem("train", PRETRAINING_SEED + recipe.seed, index)
        right = index < recipe.clean_steps * recipe.batch_size or generator.random() < recipe.latent
        yield Example(question=one.question, solution=one.solution(None if right else recipe.misread))


def heldout_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, count: int = 200, seed: int = 0
) -> dict[str, float]:
    """Share of right sampled answers (temperature 1) to `count` held-out tasks, by kind of question and in all."""
    drawn = heldout_tasks(count=count)
    prompts = [
        tokenizer.apply_chat_template(list(one.prompt), add_generation_prompt=True, tokenize=False) for one in drawn
    ]
    texts = pretraining.sample_answers(model, tokenizer, prompts, max_new_tokens=LONGEST_ANSWER, seed=seed)
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
    model = pretraining.build_model(recipe.family, recipe.shape, tokenizer, seed=recipe.seed, longest=LONGEST_TEXT)
    pretraining.pretrain(
        model,
        tokenizer,
        examples(recipe),
        name=recipe.name,
        steps=recipe.clean_steps + recipe.mistaken_steps,
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
    )
    pretraining.save(model, tokenizer, directory, max_new_tokens=LONGEST_ANSWER)
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
