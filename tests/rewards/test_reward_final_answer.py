"""Where the final answer of a text stands."""

from __future__ import annotations

import time

import pytest

from hacrl.rewards import final_answer


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{840} .. \boxed{840}", "840"),
        (r"\boxed{1}, no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"first \boxed{7}, then \boxed{8", "7"),
        (r"\boxed{7", None),
        (r"so \fbox{$\frac{1}{2}$}.", r"$\frac{1}{2}$"),
        (r"so $\boxed 7$ is it", "7"),
        (r"so $\boxed \frac{1}{2}$.", r"\frac{1}{2}"),
        (r"$\boxed 7$, no, $\boxed{8}$", "8"),
        (r"\boxed {7", None),
        (r"\{ not a box \}", None),
        ("} 7 {", None),
        ("", None),
    ],
)
def test_last_complete_box(text, found):
    assert final_answer.last_boxed(text) == found


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("auto", "<answer>1</answer> #### 2", "1"),
        ("auto", "3 + 4 = 7\n#### 7\n", "7"),
        ("auto", "so it is\n\n blue \n\n", "blue"),
        ("auto", "  ", None),
        ("tag", "<answer>1</answer><answer> 2\n3 </answer> <answer>", "2\n3"),
        ("tag", "1</answer>", None),
        ("hash", "#### 1\n#### 5 \nmore", "5"),
        ("hash", "####\n5", "5"),
        ("hash", "5 ####", None),
        ("hash", "5", None),
        ("last_line", "a\nb", "b"),
        ("whole", " a\nb ", "a\nb"),
        ("boxed", "#### 1", None),
    ],
)
def test_rules(name, text, found):
    assert final_answer.rule(name)(text) == found


def test_an_unknown_rule_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'bxed' is no rule; choose one of auto, boxed"):
        final_answer.rule("bxed")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["auto", "boxed", "tag", "hash", "last_line", "whole"])
def test_what_is_written_for_a_rule_is_found_by_it(name):
    assert final_answer.rule(name)(final_answer.written("a b", name)) == "a b"


@pytest.mark.parametrize("part", [r"\boxed{", "{", "<answer>", "</answer>", "#### ", "\n", "(", "a", "1 "])
def test_degenerate_texts_of_50000_characters_take_linear_time(part):
    text = part * (50_000 // len(part))
    begun = time.process_time()
    for name in ("auto", "boxed", "tag", "hash", "last_line"):
        final_answer.rule(name)(text)
    assert time.process_time() - begun < 1.0
