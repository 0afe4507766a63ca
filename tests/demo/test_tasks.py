"""The demo's tasks and reward."""

from __future__ import annotations

import pytest

from hacrl.demo.tasks import KINDS, Problem, heldout_tasks, problem, split_of, task, train_tasks
from hacrl.rewards.exact import exact


def test_a_task_is_a_pure_function_of_split_seed_and_index() -> None:
    assert task("train", 3, 17) == task("train", 3, 17)
    # A pinned value: random streams must not change between versions of Python or of this file unnoticed, since the
    # shipped agents were trained on them.
    assert problem("train", 3, 17).question == "Start with 6, times 2, plus 6, plus 3."


def test_training_and_heldout_questions_are_disjoint() -> None:
    train = {problem("train", seed, index).question for seed in (0, 1, 1_000_001) for index in range(3000)}
    heldout = {problem("heldout", seed, index).question for seed in (0, 1) for index in range(3000)}
    assert not train & heldout
    assert {split_of(question) for question in train} == {"train"}
    assert {split_of(question) for question in heldout} == {"heldout"}


def test_tasks_do_not_repeat_a_question() -> None:
    drawn = heldout_tasks(count=300)
    assert len(drawn) == 300
    assert len({one.prompt[0]["content"] for one in drawn}) == 300
    assert len({one.id for one in drawn}) == 300
    assert heldout_tasks(count=10) == drawn[:10]
    assert train_tasks(count=10, seed=1) != train_tasks(count=10, seed=2)


def test_every_kind_is_drawn_about_equally_often() -> None:
    kinds = [problem("train", 0, index).kind for index in range(3000)]
    assert set(kinds) == set(KINDS)
    assert all(abs(kinds.count(kind) / 3000 - 1 / 3) < 0.05 for kind in KINDS)


def test_worked_solution_and_answer() -> None:
    one = Problem(kind="both", start=12, steps=(("minus", 5), ("plus", 9), ("times", 2)))
    assert one.question == "Start with 12, minus 5, plus 9, times 2."
    assert one.solution() == "12 - 5 = 7\n7 + 9 = 16\n16 * 2 = 32\n#### 32"
    assert one.answer == 32
    assert one.solution({"minus": "plus"}) == "12 - 5 = 17\n17 + 9 = 26\n26 * 2 = 52\n#### 52"
    assert one.solution({"times": "plus"}) == "12 - 5 = 7\n7 + 9 = 16\n16 * 2 = 18\n#### 18"


@pytest.mark.parametrize("index", range(50))
def test_right_solutions_earn_the_reward_and_misread_ones_do_not(index: int) -> None:
    one = problem("heldout", 0, index)
    assert exact([""], [one.solution()], answer=[str(one.answer)], final_answer="hash") == [1.0]
    misread = one.solution({"minus": "plus", "times": "plus"})
    assert exact([""], [misread], answer=[str(one.answer)], final_answer="hash") == [float(misread == one.solution())]
