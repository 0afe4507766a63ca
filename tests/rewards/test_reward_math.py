"""The built-in `math`: what is right, and the known ways in which a wrong answer passes for a right one."""

from __future__ import annotations

import threading
import time

import pytest

from hacrl.rewards import RewardSpec, Verifier, gold_scores, load_rewards
from hacrl.rewards.math import answers, gold, math, prepare
from hacrl.types import Task

RIGHT = [
    # Final-answer rules.
    ("Final Answer: **73**", "73"),
    ("**Final Answer:** 73", "73"),
    ("**Answer**: 73.", "73"),
    ("2 + 3 = 5\n#### 5", "5"),
    ("The answer is 5", "5"),
    ("The answer is 5.\nI checked 6 ways.", "5"),
    ("The answer is: $\\boxed{5}$. I hope it is correct.", "5"),
    ("The answer is $5$ because $2+4=6$", "5"),
    ("The answer is 5 apples", "5"),
    ("The answer is $x=1$ and $x=2$.", "1,2"),
    ("Final answer:\n\n12", "12"),
    ("She pays $1,080.", "1080"),
    ("so 3 + 4 = 7", "7"),
    ("the rest is 10-7", "7"),
    ("which gives -7", "-7"),
    ("Therefore $x = \\frac{1}{2}$.", "\\frac12"),
    (r"\boxed{840} .. \boxed{840}", "840"),
    (r"\boxed{1} no \boxed{2}", "2"),
    (r"\boxed{840} then \boxed{84", "840"),
    ("... #### 72", "She sold 48/2 = 24, so 72.\n#### 72"),
    (r"\boxed{72}", r"We find $\boxed{72}$ and no 73."),
    # Notation.
    (r"\boxed{4y+3x=-14}", "3x+4y+14=0"),
    ("The answer is 3x+4y+14=0", "3x+4y+14=0"),
    (r"\boxed{\frac{1}{2004!}}", "1/2004!"),
    (r"\boxed{3,2,1}", r"\{1,2,3\}"),
    (r"\boxed{2, 1}", "1 and 2"),
    (r"\boxed{1,2}", "(1,2)"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{5}", "x=5"),
    (r"\boxed{0.333333}", "1/3"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{10!}", "3628800"),
    (r"\boxed{2**10}", "1024"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{3 4/5}", "19/5"),
    (r"\boxed{1 000}", "1000"),
    (r"\boxed{1e-3}", "0.001"),
    (r"\boxed{2pi}", r"2\pi"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{\$1,080}", "1080"),
    (r"\boxed{18.90}", r"\$18.90"),
    (r"\boxed{**73**}", "73"),
    (r"\boxed{12\text{ cm}^2}", "12"),
    (r"\boxed{3<x}", "x>3"),
    (r"\boxed{\text{Tuesday}}", "tuesday"),
    (r"\boxed{\text{(C)}}", "C"),
    (r"\boxed{5}", 5),
    (r"\boxed{0.5}", 0.5),
    (r"\boxed{2}", ["1", "2"]),
]

WRONG = [
    # An equation without LaTeX was read as its last number, so that 0 was compared with 0.
    (r"\boxed{3*x-1*y+13=0}", "3x+4y+14=0"),
    ("The answer is 3*x-1*y+13=0", "3x+4y+14=0"),
    (r"\boxed{0}", "3x+4y+14=0"),
    (r"\boxed{1=1}", "0=0"),
    # Both are 0 to any fixed number of decimals.
    (r"\boxed{1/2006!}", "1/2004!"),
    (r"\boxed{10^{-21}}", "10^{-20}"),
    (r"\boxed{0.0000002}", "0.0000001"),
    (r"\boxed{1,10^{-21}}", "1,10^{-20}"),
    # Sets must agree in full, and a part of an answer or a choice of several is not the answer.
    (r"\boxed{\{2,3,4\}}", "{1,2,3}"),
    (r"\boxed{{2,3,4}}", "{1,2,3}"),
    (r"\boxed{\{1,2\}}", "{1,2,3}"),
    (r"\boxed{1}", "1,2"),
    (r"\boxed{1,2}", "1"),
    (r"\boxed{1 or 2}", "1"),
    (r"\boxed{x=1 \text{ or } x=2}", "1"),
    ("The answer is $x=1$ and $x=2$", "1"),
    ("The answer is 5 or 6", "5"),
    (r"\boxed{(1,2)}", r"\{1,2\}"),
    (r"\boxed{\{1,2\}}", "(1,2)"),
    (r"\boxed{(2,1)}", "(1,2)"),
    # Huge numbers are compared by form only.
    (r"\boxed{1000000!}", "5"),
    (r"\boxed{9^{9^{9^9}}}", "5"),
    (r"\boxed{(7!)!}", "(8!)!"),
    (r"\boxed{9^{9^9}+1}", "9^{9^9}"),
    # Words are no products, digits side by side no sums.
    (r"\boxed{pots}", "stop"),
    (r"\boxed{1 2}", "3"),
    (r"\boxed{D}", "C"),
    # Plainly wrong.
    (r"\boxed{1} no \boxed{2}", "1"),
    (r"\boxed{0.33}", "1/3"),
    (r"\boxed{10^{20}+1}", "10^{20}"),
    (r"\boxed{1/0}", "5"),
    (r"\boxed{x<3}", "x>3"),
    ("so 3 + 4 = 7", "3"),
    ("= 10-7", "-7"),
    ("gibberish", "5"),
    ("", "5"),
    ("((((((..^9^9^9", "5"),
]


@pytest.fixture(scope="module", autouse=True)
def _prepared():
    prepare()


@pytest.mark.parametrize(("text", "reference"), RIGHT)
def test_right(text, reference):
    assert math([None], [text], answer=[reference]) == [1.0]
    assert answers([text], answer=[reference]) != [None]


@pytest.mark.parametrize(("text", "reference"), WRONG)
def test_wrong(text, reference):
    assert math([None], [text], answer=[reference]) == [0.0]


def test_every_reference_is_right_when_it_is_the_answer():
    for _, reference in RIGHT + WRONG:
        assert math([None], [gold(answer=reference)], answer=[reference]) == [1.0], reference


def test_one_score_per_text_with_unreadable_ones_between_and_none_without_reference():
    texts = [r"\boxed{5}", r"\boxed{5 +}", "", r"\boxed{5}", r"\boxed{5}"]
    assert math([None] * 5, texts, answer=["5", "5", "5", "6", None]) == [1.0, 0.0, 0.0, 0.0, None]


def test_answers_tell_what_cannot_be_read():
    texts = [r"\boxed{5}", r"\boxed{5 +}", "no idea", "", r"\boxed{even}", r"\boxed{" + "9" * 5000 + "}"]
    assert answers(texts, answer=["5"] * 6) == ["5", None, None, None, None, None]
    assert answers([r"\boxed{even}"], answer=["odd"]) == ["even"]


def test_the_answer_may_be_looked_for_elsewhere():
    text = r"\boxed{4} #### 5"
    assert math([None], [text], answer=["5"]) == [0.0]
    assert math([None], [text], answer=["5"], final_answer="hash") == [1.0]
    assert answers(["5"], answer=["5"], final_answer="hash") == [None]


ALL = [
    (["$2$", "$\\frac{1}{2}$"], r"\boxed{\frac12, 2}", 1.0),
    (["$2$", "$\\frac{1}{2}$"], r"\boxed{2, 0.5}", 1.0),
    (["$2$", "$\\frac{1}{2}$"], r"\boxed{2}", 0.0),
    (["$2$", "$\\frac{1}{2}$"], r"\boxed{2, \frac{1}{2}, 3}", 0.0),
    # Several answers in one entry.
    (["$(1,8,19), (2,7,13), (4,5,7)$"], r"\boxed{(4,5,7), (1,8,19), (2,7,13)}", 1.0),
    (["$(1,8,19), (2,7,13), (4,5,7)$"], r"\boxed{(1,8,19), (2,7,13)}", 0.0),
    (["$(1,8,19), (2,7,13), (4,5,7)$"], r"\boxed{(8,1,19), (2,7,13), (4,5,7)}", 0.0),
    (["$1,-1$"], r"\boxed{\pm 1}", 1.0),
    (["3"], r"\boxed{3}", 1.0),
    ([], r"\boxed{3}", None),
]


@pytest.mark.parametrize(("reference", "text", "score"), ALL)
def test_all_entries_of_a_list_may_be_asked_for(reference, text, score):
    assert math([None], [text], answer=[reference], answer_list="all") == [score]
    right = gold(answer=reference, answer_list="all")
    assert right is None or math([None], [right], answer=[reference], answer_list="all") == [1.0]


def test_messages_are_read_too():
    completion = [{"role": "assistant", "content": r"\boxed{5}"}]
    assert math([None], [completion], answer=["5"]) == [1.0]


def test_not_strict_takes_what_math_verify_takes():
    text = r"It is \boxed{1} or $2$"
    assert math([None], [text], answer=["1"], strict=False) == [1.0]
    assert math([None], ["is -7"], answer=["5"], strict=False) == [0.0]


def test_an_unreadable_reference_is_an_error_not_a_wrong_answer():
    with pytest.raises(ValueError, match="zoo"):
        math([None], [r"\boxed{5}"], answer=["1/0"])


@pytest.mark.parametrize(
    "part",
    ["a", "(", "1,", r"\boxed{", "$", "answer is ", " ", "9^", "-", "1", r"\(", r"\[", "$x ", "A. ", "((((((..^9^9^9"],
)
def test_degenerate_texts_of_50000_characters_are_judged_quickly(part):
    text = part * (50_000 // len(part))
    begun = time.process_time()
    for variant in (text, rf"\boxed{{{text}}}"):
        assert math([None], [variant], answer=["5"]) == [0.0]
    assert time.process_time() - begun < 2.0


def test_in_the_pool_from_a_thread_with_a_hang_and_gold_checked_first():
    hang = r"\boxed{\binom{10^9}{500000000}}"
    right = Task(id="a", prompt="?", columns={"answer": "1/3"})
    broken = Task(id="b", prompt="?", columns={"answer": "1/0"})
    tasks = [right, right, Task(id="h", prompt="?", columns={"answer": "1/3"}), right, right]
    texts = [r"\boxed{1/3}", "((((((..^9^9^9" * 3000, hang, r"\boxed{2}", "#### 1/3"]
    found = []
    with Verifier(load_rewards([RewardSpec(function="math")]), workers=1, time_limit_s=2.0) as verifier:
        worker = threading.Thread(target=lambda: found.extend(verifier.verify(tasks, texts)))
        worker.start()
        worker.join()
        checked = gold_scores(verifier, [right, broken, Task(id="c", prompt="?", columns={"answer": None})], 3)
    assert [verdict.reward for verdict in found] == [1.0, 0.0, None, 0.0, 1.0]
    assert found[2].unscored == {"math": "timeout"}
    assert [verdict.answer for verdict in found][::3] == ["1/3", "2"]
    assert [(score.task_id, score.full) for score in checked] == [("a", True), ("b", True)]
