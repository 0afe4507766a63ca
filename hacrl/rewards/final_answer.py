"""Where in a completion the final answer stands. Every rule runs in time linear in the text's length."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Literal

FinalAnswer = Literal["auto", "boxed", "tag", "hash", "last_line", "whole"]

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"\\boxed\s+([^\s{$][^$]*)")


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of a pattern in a text."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}` or `\fbox{...}`; of nested boxes the inner one.

    Where there is none, what follows `\boxed ` up to the next dollar sign, as some of MATH's solutions write it; None
    where there is no such thing either.
    """
    open_braces: list[int | None] = []
    best: tuple[int, int] | None = None
    for found in _BRACES.finditer(text):
        token = found.group()
        if token.endswith("{") and len(token) > 2:
            open_braces.append(found.end())
        elif token == "{":
            open_braces.append(None)
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (best is None or start > best[0]):
                best = (start, found.start())
    if best is None:
        bare = last_match(_UNBRACED, text)
        return bare.group(1).strip() if bare else None
    return text[best[0] : best[1]].strip()


def last_tag(text: str) -> str | None:
    """Content of the last complete `<answer>...</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def last_hash(text: str) -> str | None:
    """The rest of the line after the last `####`; None where nothing follows it."""
    _, mark, rest = text.rpartition("####")
    return (rest.strip().partition("\n")[0].strip() or None) if mark else None


def last_line(text: str) -> str | None:
    """The last line that is not blank, stripped."""
    return text.strip().rpartition("\n")[2].strip() or None


def whole(text: str) -> str | None:
    """The whole text, stripped; None where it is blank."""
    return text.strip() or None


def auto(text: str) -> str | None:
    r"""The first of these that the text holds: `\boxed{}`, `<answer>`, `####`, its last line."""
    for extract in (last_boxed, last_tag, last_hash, last_line):
        found = extract(text)
        if found is not None:
            return found
    return None


def rule(name: FinalAnswer) -> Callable[[str], str | None]:
    """The extraction rule of that name.

    Raises:
        ValueError: the name is not one of the rules.
    """
    rules: dict[str, Callable[[str], str | None]] = {
        "auto": auto,
        "boxed": last_boxed,
        "tag": last_tag,
        "hash": last_hash,
        "last_line": last_line,
        "whole": whole,
    }
    if name not in rules:
        raise ValueError(f"final_answer: {name!r} is no rule; choose one of {', '.join(rules)}")
    return rules[name]


def written(answer: str, name: FinalAnswer) -> str:
    """A completion that states `answer` in the way the rule of that name looks for."""
    forms = {"boxed": f"\\boxed{{{answer}}}", "tag": f"<answer>{answer}</answer>", "hash": f"#### {answer}"}
    return forms.get(name, answer)
