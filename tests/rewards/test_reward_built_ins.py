"""`reasoning_gym`, `exact` and `multiple_choice`, and the check of references by `gold_scores`."""

from __future__ import annotations

import json

import pytest

from hacrl.errors import RewardError
from hacrl.rewards import RewardSpec, Verifier, exact, gold_scores, load_rewards, multiple_choice, reasoning_gym
from hacrl.types import Task

CHAIN = {"answer": "46", "metadata": {"source_dataset": "chain_sum", "source_index": 0}}
FACTORS = {"answer": "2 × 3", "metadata": {"source_dataset": "prime_factorization", "number": 6, "factors": [2, 3]}}


def gym(text: str, entry: dict, **arguments):
    columns = {name: [value] for name, value in entry.items()}
    return reasoning_gym.reasoning_gym([None], [text], **columns, **arguments)[0]


@pytest.mark.parametrize(
    "text", [r"\boxed{46}", "<answer>46</answer>", "40 + 6 = 46\n#### 46", "so\n46", r"#### 1 \boxed{46}"]
)
def test_gym_finds_the_answer(text):
    assert gym(text, CHAIN) == 1.0
    assert gym(text, {**CHAIN, "metadata": json.dumps(CHAIN["metadata"])}) == 1.0


def test_gym_gives_nothing_for_nearly_right_unless_asked():
    assert gym("the answer is 46", CHAIN) == 0.0
    assert 0.0 < gym("the answer is 46", CHAIN, partial_credit=True) < 1.0
    assert gym("0", FACTORS) == 0.0
    assert gym("0", FACTORS, partial_credit=True) == 0.01


def test_gym_without_an_answer_is_wrong_and_unparsed():
    assert gym("46", CHAIN, final_answer="hash") == 0.0
    assert gym("#### 46", CHAIN, final_answer="hash") == 1.0
    assert gym("", FACTORS) == 0.0
    assert reasoning_gym.answers(["46", "#### 46"], final_answer="hash") == [None, "46"]


def test_gym_scorer_that_raises_is_reported_unless_it_is_told_to_be_wrong():
    with pytest.raises(ValueError, match="garbage"):
        gym("garbage", FACTORS)
    assert gym("garbage", FACTORS, scorer_errors="wrong") == 0.0
    # A scorer that cannot even read its own answer is at fault itself.
    with pytest.raises(ValueError, match="garbage"):
        gym("garbage", {**FACTORS, "answer": "garbage"}, scorer_errors="wrong")
    with pytest.raises(ValueError, match="scorer_errors"):
        gym("6", FACTORS, scorer_errors="ignore")


def test_gym_generators_score_their_own_answers_in_the_pool():
    import reasoning_gym as library

    names = ["chain_sum", "gcd", "prime_factorization", "spell_backward", "letter_counting", "sudoku", "graph_color"]
    tasks = []
    for name in names:
        entry = library.create_dataset(name, size=1, seed=7)[0]
        tasks.append(Task(id=name, prompt=entry["question"], columns=entry))
    wrong = Task(id="wrong", prompt="?", columns={**tasks[0].columns, "answer": None})
    odd = Task(id="odd", prompt="?", columns={"answer": "Z"})
    rewards = load_rewards(["reasoning_gym", RewardSpec(function="multiple_choice", weight=0.0)])
    with Verifier(load_rewards(["reasoning_gym"]), workers=1, time_limit_s=5) as verifier:
        checked = gold_scores(verifier, [*tasks, wrong], 100)
        # graph_color has many right answers and names none.
        assert [score.task_id for score in checked] == names[:-1]
        assert all(score.full for score in checked)
        first, second, third = verifier.verify([tasks[2]] * 3, [checked[2].completion, "garbage", "0"])
        assert (first.reward, second.reward, third.reward) == (1.0, None, 0.0)
        assert second.unscored == {"reasoning_gym": "exception"}
        assert gold_scores(verifier, tasks, 1) == checked[:1]
    assert rewards.rewards[1].gold is not None
    with pytest.raises(ValueError, match="'Z'"):
        rewards.rewards[1].call(rewards.rewards[1].gold, odd.columns)


def test_gold_that_cannot_be_right_is_reported():
    letters = [Task(id=name, prompt="?", columns={"answer": answer}) for name, answer in [("a", "C"), ("b", "Z")]]
    lines = [Task(id="c", prompt="?", columns={"answer": "two\nlines"})]
    with Verifier(load_rewards(["multiple_choice"]), workers=1, time_limit_s=5) as verifier:
        good, bad = sorted(gold_scores(verifier, letters, 2), key=lambda score: score.task_id)
    assert (good.full, bad.full, bad.cause) == (True, False, "exception")
    assert "'Z'" in str(bad.detail)
    with Verifier(load_rewards(["exact"]), workers=1, time_limit_s=5) as verifier:
        (score,) = gold_scores(verifier, lines, 1)
    assert (score.full, score.score, score.cause) == (False, 0.0, None)


def test_gym_not_installed_is_told_at_load(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"pip install 'hacrl\[reasoning-gym\]'"):
        load_rewards(["reasoning_gym"])


def test_exact():
    texts = ["Blue", "so\nblue ", r"\boxed{blue}", "the blue", "", "blue"]
    assert exact.exact([None] * 6, texts, answer=["blue"] * 5 + [None]) == [0.0, 1.0, 1.0, 0.0, 0.0, None]
    assert exact.exact([None], ["Blue"], answer=["blue"], ignore_case=True) == [1.0]
    assert exact.exact([None], ["5"], answer=[5]) == [1.0]
    assert exact.exact([None], ["x #### 5\ny"], answer=["5"], final_answer="hash") == [1.0]
    assert exact.answers(["", "a\nb"]) == [None, "b"]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("C", "C"),
        ("(C)", "C"),
        ("The answer is (C).", "C"),
        ("**Answer: C**", "C"),
        ("Answer: **C**", "C"),
        (r"The answer is $\text{(C)}$", "C"),
        ("#### C", "C"),
        ("Option C is right", "C"),
        ("A. one\nB. two\nI choose C.", "C"),
        (r"A or B? \boxed{C}", "C"),
        (r"\boxed{\text{C}}", "C"),
        ("<answer>C) Paris</answer>", "C"),
        ("The answer is B. No: the answer is C.", "C"),
        ("The answer is a good one", None),
        (r"\boxed{A, C}", None),
        ("I cannot say", None),
        ("", None),
    ],
)
def test_multiple_choice(text, chosen):
    assert multiple_choice.answers([text]) == [chosen]
    assert multiple_choice.multiple_choice([None], [text], answer=["C"]) == [float(chosen == "C")]


def test_multiple_choice_references():
    texts = [r"\boxed{C}"] * 5
    answer = ["(C)", "c", 2, 1, None]
    assert multiple_choice.multiple_choice([None] * 5, texts, answer=answer) == [1.0, 1.0, 1.0, 0.0, None]
    for reference in ("Paris", 12, True, "K"):
        with pytest.raises(ValueError, match="neither a letter"):
            multiple_choice.letter(reference)
