r"""The built-in reward `math`: the final answer must be mathematically equal to the reference.

Reading and comparing expressions is math-verify's work. What is added here is which part of a text counts as the
answer, that this part is read as ONE expression from end to end, and guards where math-verify says yes too easily.
Time limits are the caller's: math-verify's own ones need the main thread, and none stops code written in C.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from typing import Any, Literal

from hacrl.rewards import final_answer as extraction
from hacrl.rewards.completion import completion_text

AnswerList = Literal["any", "all"]

# No sensible final answer is longer, and parsing time grows faster than length.
MAX_ANSWER_CHARS = 1000
# Above these an exact value costs too much, and a rounded one says nothing about equality.
MAX_FACTORIAL = 1000
MAX_DIGITS = 5000
# Relative difference allowed where a decimal fraction is involved (0.333333 for 1/3), and where none is.
DECIMAL_TOLERANCE = 1e-5
EXACT_TOLERANCE = 1e-12

_MARKER = re.compile(r"####|\banswer[*_]{0,2}\s{0,2}(?:is|:|=)\s{0,2}:?[*_]{0,2}", re.IGNORECASE)
# A formula ends where the next one opens, so that delimiters never closed do not cost a search to the text's end each.
_MATH_SPAN = re.compile(
    r"\$\$?([^$]{1,1000})\$\$?|\\\(((?:(?!\\\().){1,1000}?)\\\)|\\\[((?:(?!\\\[).){1,1000}?)\\\]", re.DOTALL
)
_JOINED = re.compile(r"(?:\s|,|;|\band\b|\bor\b)*\.?\s*")
_SENTENCE_END = re.compile(r"[.?;](?=\s|$)|,?\s(?:because|since|so|as|where|which|for)\b", re.IGNORECASE)
_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?"
_LAST_NUMBER = re.compile(rf"(?<![\w.])(?:(?<![)\]}}])-)?{_NUMBER.removeprefix('-?')}")
_NUMBER_THEN_WORDS = re.compile(rf"[$€£]?\s?({_NUMBER})(?=\s)[^\d\\=+*/^]*")

_SYMBOLS = str.maketrans(
    {"−": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge "}
)
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
_SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)[eE]\+?(-?\d+)")
_MIXED = re.compile(r"(-?\d+)\s+(?:(\d+)/(\d+)|\\[dt]?frac\{(\d+)\}\{(\d+)\})")
_SPACED_THOUSANDS = re.compile(r"-?\d{1,3}(?:(?:\s|\\,)\d{3})+(?:\.\d+)?")
_SPACED_DIGITS = re.compile(r"(?<![_^\d])\d+\s+\d")
_WORD = re.compile(r"[A-Za-z]{3,}")
_FUNCTION = re.compile(r"\\[A-Za-z]+|(?:sqrt|sin|cos|tan|log|exp|and|pi)(?![a-z])|\bor\b")


def math(
    prompts: Sequence[Any],  # noqa: ARG001  (TRL's signature)
    completions: Sequence[Any],
    *,
    answer: Sequence[Any],
    answer_list: AnswerList = "any",
    final_answer: extraction.FinalAnswer = "auto",
    strict: bool = True,
    **_columns: Any,
) -> list[float | None]:
    r"""1.0 where the final answer equals the reference, else 0.0.

    Args:
        answer: reference per completion: an expression, a number, or a solution that holds it in `\boxed{}` or after
            `####`. None gives None (not scored).
        answer_list: what a reference that is a list means: `any` of its entries is right, or `all` have to be given,
            in any order.
        final_answer: `auto` takes the last complete `\boxed{}`, else what follows the last `Final answer:`,
            `The answer is` or `####`, else the last formula or number. The other rules are those of
            `hacrl.rewards.final_answer`.
        strict: compare the whole answer with the whole reference: all of a set, both sides of an equation, words
            letter by letter; relative tolerance 1e-5 where a decimal fraction occurs. False leaves finding and
            comparing to math-verify's defaults, which accept more.

    Raises:
        Exception: whatever the comparison raises; it is not taken for a wrong answer.
    """
    texts = [completion_text(completion) for completion in completions]
    if not strict:
        return [_lenient(text, _references(right, answer_list)) for text, right in zip(texts, answer, strict=True)]
    found = [_find(text, final_answer) for text in texts]
    return [_score(text, _references(right, answer_list)) for text, right in zip(found, answer, strict=True)]


def answers(
    completions: Sequence[Any],
    *,
    answer: Sequence[Any],
    answer_list: AnswerList = "any",
    final_answer: extraction.FinalAnswer = "auto",
) -> list[str | None]:
    """The final answer of each completion; None where there is none, or none that can be read as the reference can."""
    found = [_find(completion_text(completion), final_answer) for completion in completions]
    return [
        text if _readable(text, _references(right, answer_list)) else None
        for text, right in zip(found, answer, strict=True)
    ]


def gold(*, answer: Any, answer_list: AnswerList = "any", final_answer: extraction.FinalAnswer = "auto") -> str | None:
    """A completion that must get 1.0; None where the reference is missing."""
    references = _references(answer, answer_list)
    if not references:
        return None
    return extraction.written(references[0], "boxed" if final_answer == "auto" else final_answer)


def prepare() -> None:
    """Loads math-verify and its grammar, which takes longer than judging an answer."""
    # It warns that its own time limits are off, once in each process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    equal("x = 1", "x = 2")


@functools.lru_cache(maxsize=4096)
def equal(reference: str, answer: str) -> bool:
    """Whether two expressions, each read from end to end, are mathematically equal. Not symmetric for `x = 5` and 5.

    Raises:
        ValueError: the reference is not a number, e.g. 1/0.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    reference, answer = clean(reference), clean(answer)
    if not reference:
        return False
    if reference == answer:
        return True
    if _is_words(reference) or _is_words(answer):
        return _as_words(reference) == _as_words(answer)
    # A set has braces and a point or an interval has none; math-verify takes one for the other.
    if _is_braced(reference) != _is_braced(answer) and (_is_braced(answer) or _is_parenthesised(answer)):
        return False
    right, given = _parsed(reference), _parsed(answer)
    if right is None or given is None:
        return False
    if right == given:
        return True
    # Beyond this point things are evaluated, and an equation without a variable says no more than 0 = 0.
    if _too_large(right) or _too_large(given) or _is_bare_equation(right) or _is_bare_equation(given):
        return False
    from math_verify import verify

    if not verify(right, given, timeout_seconds=None, raise_on_error=True):
        return False
    return _close(right, given)


def clean(text: str) -> str:
    """An answer in LaTeX spelling, without what does not belong to it: markup, delimiters, full stop, percent sign."""
    text = text.translate(_SYMBOLS).strip().strip("*_`").strip()
    wrapped = _MATH_SPAN.fullmatch(text)
    if wrapped:
        text = next(group for group in wrapped.groups() if group is not None).strip()
    text = text.rstrip(".,;:").removeprefix("=").strip().removeprefix("\\$")
    for percent in ("\\%", "%"):
        text = text.removesuffix(percent).strip()
    text = text.replace("**", "^")
    if _SPACED_THOUSANDS.fullmatch(text):
        text = re.sub(r"\s|\\,", "", text)
    text = _MIXED.sub(lambda m: rf"{m[1]}\frac{{{m[2] or m[4]}}}{{{m[3] or m[5]}}}", text)
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text) if _SCIENTIFIC.fullmatch(text) else text
    return re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text)


def _find(text: str, final_answer: extraction.FinalAnswer) -> str | None:
    if final_answer != "auto":
        return extraction.rule(final_answer)(text)
    boxed = extraction.last_boxed(text)
    if boxed is not None:
        return boxed
    marker = extraction.last_match(_MARKER, text)
    if marker is not None:
        line = text[marker.end() :].strip().strip("*_").strip().partition("\n")[0]
        if line:
            return _statement(line)
    return _last_expression(text)


def _statement(line: str) -> str | None:
    """The answer in the rest of a line, which may go on in prose."""
    spans = list(_MATH_SPAN.finditer(line))
    if spans:
        # Several formulas with only `and` between them are one answer; otherwise the first is the answer.
        parts = [next(group for group in span.groups() if group is not None) for span in spans]
        return ", ".join(parts) if _JOINED.fullmatch(_MATH_SPAN.sub(" ", line)) else parts[0]
    end = _SENTENCE_END.search(line)
    line = line[: end.start()] if end else line
    counted = _NUMBER_THEN_WORDS.fullmatch(line)
    return counted.group(1) if counted else line.strip().strip("*_").strip() or None


def _last_expression(text: str) -> str | None:
    """The formula or number that ends last."""
    span = extraction.last_match(_MATH_SPAN, text)
    number = extraction.last_match(_LAST_NUMBER, text)
    if span is not None and (number is None or span.end() >= number.end()):
        return next(group for group in span.groups() if group is not None).strip() or None
    return number.group() if number is not None else None


def _references(answer: Any, answer_list: AnswerList) -> list[str]:
    """The reference expressions of a row's `answer`, each of which is right."""
    if answer is None:
        return []
    if isinstance(answer, (list, tuple)):
        references = [reference for one in answer for reference in _references(one, "any")]
        return [", ".join(map(clean, references))] if answer_list == "all" and references else references
    text = str(answer)
    return [extraction.last_boxed(text) or extraction.last_hash(text) or text.strip()]


def _score(found: str | None, references: list[str]) -> float | None:
    if not references:
        return None
    return float(found is not None and any(equal(reference, found) for reference in references))


def _lenient(text: str, references: list[str]) -> float | None:
    from math_verify import parse, verify

    if not references:
        return None
    given = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return float(
        any(
            verify(parse(f"${reference}$", parsing_timeout=None), given, timeout_seconds=None)  # pyright: ignore[reportArgumentType]
            for reference in references
        )
    )


def _readable(found: str | None, references: list[str]) -> bool:
    if found is None or len(found) > MAX_ANSWER_CHARS or not clean(found):
        return False
    if any(_is_words(clean(reference)) or _parsed(clean(reference)) is None for reference in references):
        return True
    return not _is_words(clean(found)) and _parsed(clean(found)) is not None


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    """The expression that the whole of a cleaned text stands for; None where it is not one."""
    from math_verify import LatexExtractionConfig, parse

    # Digits with blanks between them would be multiplied or added up.
    if not text or "$" in text or _SPACED_DIGITS.search(text):
        return None
    parsed = parse(
        f"${text}$",
        [LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
    return parsed[0] if parsed and not isinstance(parsed[0], str) else None


def _is_words(text: str) -> bool:
    """Prose rather than a formula: as a product of its letters, `stop` would equal `pots`."""
    unwrapped = _WRAPPED.sub(r"\1", text)
    if re.search(r"\d", unwrapped):
        return False
    return _WORD.search(_FUNCTION.sub(" ", unwrapped)) is not None or bool(re.fullmatch(r"\(?[A-Z]\)?", unwrapped))


def _as_words(text: str) -> str:
    unwrapped = _WRAPPED.sub(r"\1", text)
    choice = re.fullmatch(r"\(?([A-Z])\)?", unwrapped)
    # A letter is a choice or a variable, whose case matters.
    return choice.group(1) if choice else " ".join(unwrapped.casefold().split()).strip(" .")


def _is_braced(text: str) -> bool:
    return text.startswith(("\\{", "{", "\\left\\{"))


def _is_parenthesised(text: str) -> bool:
    return text.startswith(("(", "[", "\\left(", "\\left["))


def _is_bare_equation(expression: Any) -> bool:
    from sympy import Eq

    return isinstance(expression, Eq) and not expression.free_symbols


def _too_large(expression: Any) -> bool:
    """Whether evaluating the expression could take for ever: a huge factorial or power anywhere in it."""
    from sympy import Pow, factorial, preorder_traversal

    if not hasattr(expression, "args"):
        return False
    for node in preorder_traversal(expression):
        if node.free_symbols:
            continue
        if isinstance(node, factorial) and _size(node.args[0]) > MAX_FACTORIAL:
            return True
        if isinstance(node, Pow) and _digits(node) > MAX_DIGITS:
            return True
    return False


def _digits(expression: Any) -> float:
    """About the largest that |log10| of a number can be; infinite where a tower of powers leaves no bound."""
    from math import inf, log10

    from sympy import Pow, factorial

    if isinstance(expression, factorial):
        count = _size(expression.args[0])
        return max(_digits(expression.args[0]), 1.0) * count if count < inf else inf
    if isinstance(expression, Pow):
        base, exponent = expression.args
        power = _size(exponent)
        return max(_digits(base), 1.0) * power if power < inf else inf
    if expression.is_Rational:
        return max(_integer_digits(expression.p), _integer_digits(expression.q))
    if expression.is_Float:
        return abs(log10(abs(float(expression)))) if expression else 0.0
    return sum((_digits(argument) for argument in expression.args), 1.0)


def _size(expression: Any) -> float:
    """An upper bound of the absolute value of an exponent; infinite above 10^6."""
    from math import inf

    digits = _digits(expression)
    return 10.0**digits if digits <= 6 else inf


def _integer_digits(value: int) -> float:
    return abs(int(value)).bit_length() * 0.30103


def _close(right: Any, given: Any) -> bool:
    """Whether numbers that math-verify finds equal are so relative to their size, entry by entry in sets and points."""
    from sympy import Eq, Expr, Float, Tuple
    from sympy import FiniteSet as Finite

    if isinstance(given, Eq) and not isinstance(right, Eq):
        given = given.rhs
    if isinstance(right, Eq) and not isinstance(given, Eq):
        right = right.rhs
    if isinstance(right, (Finite, Tuple)) and isinstance(given, (Finite, Tuple)):
        pairs = [(a, b) for a in right.args for b in given.args if _close(a, b)]
        return len({a for a, _ in pairs}) == len(right.args) and len({b for _, b in pairs}) == len(given.args)
    if not (isinstance(right, Expr) and isinstance(given, Expr)) or right.free_symbols or given.free_symbols:
        return True
    a: Any = right.evalf(30)
    b: Any = given.evalf(30)
    scale: Any = max(abs(a), abs(b))
    if not (scale.is_number and scale.is_finite) or scale == 0:
        return True
    tolerance = DECIMAL_TOLERANCE if right.has(Float) or given.has(Float) else EXACT_TOLERANCE
    return bool(abs(a - b) <= tolerance * scale)
