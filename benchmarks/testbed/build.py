"""Build the test-bed's agents from seeds: `python benchmarks/testbed/build.py`.

Four tiny models learn worked solutions of three reasoning-gym generators (`skills.py`): sums, equations and divisors.
They differ as real ones do, by how much they hold, how they are made, and by their habits. Each is pretrained in two
parts: first on solutions by the right methods, so that it knows them; then, for a short time, on solutions of which a
share, another one for each skill, goes by a wrong method. What it rarely does it can still do: that is what
reinforcement learning finds again, and what another agent's answers may show it.

    base    Qwen3; good at sums, rarely right at divisors
    tuned   `base` trained further until it is good at divisors and rarely right at sums: the same shape, other weights
    large   Qwen3, the same tokenizer as `base`, more parameters, better than `base` in everything
    llama   Llama with a tokenizer of its own; good at divisors, rarely right at sums

state.yaml pairs base with tuned, size.yaml base with large, model.yaml base with llama; three.yaml holds base, large
and llama. Questions of the held-out tasks are never seen here. Every agent is an ordinary Hugging Face folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from skills import SKILLS, examples, tasks
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl.demo import pretraining
from hacrl.demo.pretraining import LLAMA, QWEN, Family, Shape
from hacrl.rewards.reasoning_gym import reasoning_gym
from hacrl.types import Task

HERE = Path(__file__).parent
LONGEST_TEXT = 192
LONGEST_ANSWER = 64
VOCABULARY_TEXTS = 3000
PRETRAINING_SEED, HABIT_SEEDS = 1000, 100
HELDOUT = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that makes one agent.

    `steps`, `learning_rate`: of the first part, on right methods; an agent with an `origin` has none and starts from
    that agent's weights and tokenizer. `habits`: of the second part, the share of solutions by the right method, for
    each skill. `tokenizer_of`: the agent whose tokenizer it shares.
    """

    name: str
    family: Family
    shape: Shape
    seed: int
    habits: Mapping[str, float]
    steps: int = 0
    learning_rate: float = 0.0
    vocabulary: int = 448
    origin: str | None = None
    tokenizer_of: str | None = None


SMALL = Shape(hidden_size=128, layers=2, intermediate_size=320)
LARGE = Shape(hidden_size=192, layers=2, intermediate_size=512)
SLIPS = 0.05
RIGHT = {"chain_sum": 1.0, "simple_equations": 1.0, "gcd": 1.0}
HABIT_STEPS, HABIT_LEARNING_RATE = 200, 1e-3

RECIPES = (
    Recipe(
        name="base",
        family=QWEN,
        shape=SMALL,
        seed=1,
        habits={"chain_sum": 0.8, "simple_equations": 0.5, "gcd": 0.05},
        steps=1000,
        learning_rate=3e-3,
    ),
    Recipe(
        name="tuned",
        family=QWEN,
        shape=SMALL,
        seed=2,
        habits={"chain_sum": 0.05, "simple_equations": 0.5, "gcd": 0.8},
        origin="base",
    ),
    Recipe(
        name="large",
        family=QWEN,
        shape=LARGE,
        seed=3,
        habits={"chain_sum": 0.9, "simple_equations": 0.6, "gcd": 0.4},
        steps=1200,
        learning_rate=2e-3,
        tokenizer_of="base",
    ),
    Recipe(
        name="llama",
        family=LLAMA,
        shape=SMALL,
        seed=4,
        habits={"chain_sum": 0.05, "simple_equations": 0.5, "gcd": 0.8},
        steps=1500,
        learning_rate=3e-3,
        vocabulary=640,
    ),
)
BATCH_SIZE = 32


def build(recipe: Recipe, directory: Path, heldout: list[Task]) -> None:
    """Make one agent in `directory / name`, and tell how it does on the held-out tasks."""
    drawn = examples(RIGHT, slips=SLIPS, seed=PRETRAINING_SEED + recipe.seed)
    shared = recipe.origin or recipe.tokenizer_of
    if shared is not None:
        tokenizer = AutoTokenizer.from_pretrained(directory / shared)
    else:
        tokenizer = pretraining.build_tokenizer(
            recipe.family,
            itertools.islice(drawn, VOCABULARY_TEXTS),
            vocabulary=recipe.vocabulary,
            longest=LONGEST_TEXT,
        )
    if recipe.origin is not None:
        model = AutoModelForCausalLM.from_pretrained(directory / recipe.origin, dtype=torch.float32)
    else:
        model = pretraining.build_model(recipe.family, recipe.shape, tokenizer, seed=recipe.seed, longest=LONGEST_TEXT)
    habits = examples(recipe.habits, slips=SLIPS, seed=PRETRAINING_SEED + HABIT_SEEDS + recipe.seed)
    for part, steps, learning_rate in (
        (drawn, recipe.steps, recipe.learning_rate),
        (habits, HABIT_STEPS, HABIT_LEARNING_RATE),
    ):
        pretraining.pretrain(
            model,
            tokenizer,
            part,
            name=recipe.name,
            steps=steps,
            batch_size=BATCH_SIZE,
            learning_rate=learning_rate,
        )
    pretraining.save(model, tokenizer, directory / recipe.name, max_new_tokens=LONGEST_ANSWER)
    size = sum(parameter.numel() for parameter in model.parameters())
    accuracy = heldout_accuracy(model.float(), tokenizer, heldout)
    print(f"{recipe.name}: {size} parameters, held-out accuracy {json.dumps(accuracy)}", flush=True)


def heldout_accuracy(model: torch.nn.Module, tokenizer: AutoTokenizer, heldout: list[Task]) -> dict[str, float]:
    """Share of right sampled answers by skill and in all."""
    prompts = [
        tokenizer.apply_chat_template(list(task.prompt), add_generation_prompt=True, tokenize=False) for task in heldout
    ]
    texts = pretraining.sample_answers(model, tokenizer, prompts, max_new_tokens=LONGEST_ANSWER, seed=0)
    columns = {name: [task.columns[name] for task in heldout] for name in ("answer", "metadata")}
    rewards = reasoning_gym(prompts, texts, **columns, final_answer="hash", scorer_errors="wrong")
    names = [str(task.columns["metadata"]["source_dataset"]) for task in heldout]
    by_skill = {
        name: [float(reward or 0) for reward, of in zip(rewards, names, strict=True) if of == name] for name in SKILLS
    }
    by_skill["all"] = [float(reward or 0) for reward in rewards]
    return {name: round(sum(found) / len(found), 3) for name, found in by_skill.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the test-bed's agents.")
    parser.add_argument("names", nargs="*", default=[recipe.name for recipe in RECIPES], help="agents; all by default")
    parser.add_argument("--output", type=Path, default=HERE / "agents", help="folder that receives one per agent")
    options = parser.parse_args()
    # One thread: sums in another order give other last digits.
    torch.set_num_threads(1)
    heldout = tasks(split="heldout", count=HELDOUT, seed=0)
    for recipe in RECIPES:
        if recipe.name in options.names:
            build(recipe, options.output, heldout)


if __name__ == "__main__":
    main()
