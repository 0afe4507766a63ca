"""The test-bed's tasks and worked solutions (`benchmarks/testbed/skills.py`)."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from reasoning_gym.factory import create_dataset

from hacrl.compare.plan import make_plan, rollouts_per_step
from hacrl.rewards.reasoning_gym import reasoning_gym

TESTBED = Path(__file__).parents[1] / "benchmarks" / "testbed"
NAMES = ("chain_sum", "gcd", "simple_equations")


@pytest.fixture(scope="module")
def skills() -> ModuleType:
    spec = importlib.util.spec_from_file_location("testbed_skills", TESTBED / "skills.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_the_right_method_is_right_and_the_wrong_one_or_slips_often_not(skills: ModuleType, name: str) -> None:
    entries = list(itertools.islice(create_dataset(name, size=100, seed=3, **skills.SKILLS[name]), 100))

    def score(*, right: bool, slips: float) -> float:
        rewards = reasoning_gym(
            [""] * len(entries),
            [skills.solution(name, entry, right, slips, random.Random(place)) for place, entry in enumerate(entries)],
            answer=[entry["answer"] for entry in entries],
            metadata=[entry["metadata"] for entry in entries],
            final_answer="hash",
        )
        return sum(float(reward or 0) for reward in rewards) / len(entries)

    assert score(right=True, slips=0.0) == 1
    assert 0.1 < score(right=True, slips=0.5) < 0.8
    assert score(right=False, slips=0.0) < 0.5


def test_skills_come_equally_often_and_by_the_right_method_as_often_as_asked(skills: ModuleType) -> None:
    drawn = list(itertools.islice(skills.examples({"gcd": 0.8, "chain_sum": 0.0}, slips=0.0, seed=0), 400))
    divisors = [example.solution for example in drawn if "%" in example.solution]
    assert 170 < len(divisors) < 230
    # Euclid goes on until nothing remains.
    whole = [solution for solution in divisors if "= 0\n####" in solution]
    assert 0.7 < len(whole) / len(divisors) < 0.95
    assert not any(" - " in example.solution for example in drawn if "%" not in example.solution)


def test_training_and_heldout_questions_are_disjoint_and_repeatable(skills: ModuleType) -> None:
    heldout = skills.tasks(split="heldout", count=42, seed=0)
    train = skills.tasks(split="train", count=200, seed=0)
    assert not {task.prompt[0]["content"] for task in heldout} & {task.prompt[0]["content"] for task in train}
    assert skills.tasks(split="heldout", count=42, seed=0) == heldout
    assert skills.tasks(split="train", count=200, seed=1) != train
    by_skill = [task.columns["metadata"]["source_dataset"] for task in heldout]
    # In turn, but for the few questions that came before.
    assert all(12 <= by_skill.count(name) <= 16 for name in NAMES)
    drawn = itertools.islice(skills.examples({"gcd": 0.5}, slips=0.1, seed=0), 200)
    assert not {example.question for example in drawn} & {task.prompt[0]["content"] for task in heldout}


@pytest.mark.parametrize("name", ["state", "size", "model", "three"])
def test_every_configuration_takes_the_chosen_settings_of_every_method_at_equal_rollouts(name: str) -> None:
    made = make_plan(TESTBED / f"{name}.yaml", methods=TESTBED / "methods.yaml", seeds=1)
    assert [method.name for method in made.methods] == ["truncated", "hacpo", "naive", "gspo-x2", "gspo"]
    rollouts = {run.method: run.config.steps * rollouts_per_step(run.config) for run in made.runs}
    assert rollouts == dict.fromkeys(rollouts, rollouts["gspo"]) | {"gspo-x2": 2 * rollouts["gspo"]}
