"""What runs inside a scoring process. It must stay light: every worker imports this file before anything else."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import numbers
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hacrl.rewards.completion import as_completion, as_prompt
from hacrl.rewards.reward import Reward
from hacrl.rewards.reward_set import load_payload
from hacrl.types import Prompt

DETAIL_CHARS = 2000


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of one reward function: some texts for one task."""

    reward: int
    prompt: Prompt
    texts: tuple[str, ...]
    columns: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a call.

    `scored`: `scores` (and `answers`, where the function tells them) have one entry per text, `scores` perhaps NaN.
    `exception`, `timeout`, `crash`: this call gave nothing. `contract`: the function breaks the rules, whatever the
    text. `load`: the function or the task's columns could not
    be loaded in the worker. `detail` says more for all but `scored`.
    """

    kind: Literal["scored", "exception", "timeout", "crash", "contract", "load"]
    scores: tuple[float | None, ...] = ()
    answers: tuple[str | None, ...] | None = None
    detail: str = ""


class ContractError(Exception):
    """A reward function returned something that is not one score per text."""


# A worker serves one reward set for its whole life and the pool's initialiser has no other way to hand it over.
_loaded: tuple[Reward, ...] | str = "the worker was not started by a Verifier"


def start(payload: bytes, parent: int) -> None:
    """Runs once in each new worker: ties its life to the parent's, then loads the reward functions."""
    global _loaded
    # The default action, since a handler in Python would wait for C code (a huge power, a regex) that never ends.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    # One thread each: several workers with spinning thread pools are many times slower than with one.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        rewards = load_payload(payload)
        for reward in rewards:
            if reward.prepare is not None:
                reward.prepare()
    except BaseException:
        _loaded = traceback.format_exc()[-DETAIL_CHARS:]
    else:
        _loaded = rewards


def loading_error() -> str | None:
    """Why this worker has no reward functions; None where it has."""
    return _loaded if isinstance(_loaded, str) else None


def run(message: bytes) -> Outcome:
    """Makes a pickled call. Every outcome comes back as plain data, since an exception might not survive pickling."""
    if isinstance(_loaded, str):
        return Outcome(kind="load", detail=_loaded)
    try:
        call: Call = pickle.loads(message)
    except Exception:
        return Outcome(kind="load", detail=traceback.format_exc()[-DETAIL_CHARS:])
    reward = _loaded[call.reward]
    count = len(call.texts)
    arguments = {
        "prompts": [as_prompt(call.prompt) for _ in call.texts],
        "completions": [as_completion(call.prompt, text) for text in call.texts],
        **{name: [value] * count for name, value in call.columns.items()},
    }
    try:
        scores = as_scores(_settled(reward.call(reward.function, arguments)), count)
        answers = None
        if reward.answers is not None:
            answers = as_answers(_settled(reward.call(reward.answers, arguments)), count)
    except ContractError as error:
        return Outcome(kind="contract", detail=str(error))
    except BaseException:
        return Outcome(kind="exception", detail=traceback.format_exc()[-DETAIL_CHARS:])
    return Outcome(kind="scored", scores=scores, answers=answers)


def as_scores(returned: Any, count: int) -> tuple[float | None, ...]:
    """The scores as plain floats, None kept. Nothing is broadcast.

    Raises:
        ContractError: not a sequence of `count` numbers or Nones.
    """
    items = _items(returned, count, "scores")
    return tuple(_as_score(item, position) for position, item in enumerate(items))


def as_answers(returned: Any, count: int) -> tuple[str | None, ...]:
    """The extracted answers. Raises ContractError where they are not `count` strings or Nones."""
    items = _items(returned, count, "answers")
    for position, item in enumerate(items):
        if item is not None and not isinstance(item, str):
            raise ContractError(f"answer {position} is a {type(item).__name__}, expected a string or None")
    return tuple(items)


def _items(returned: Any, count: int, what: str) -> Sequence[Any]:
    tolist = getattr(returned, "tolist", None)
    items = tolist() if callable(tolist) else returned
    if not isinstance(items, (list, tuple)):
        raise ContractError(f"returned {_describe(returned)}, expected a list of {count} {what}")
    if len(items) != count:
        raise ContractError(f"returned {len(items)} {what}, expected {count}")
    return items


def _as_score(item: Any, position: int) -> float | None:
    if item is None:
        return None
    if not isinstance(item, numbers.Number):
        scalar = getattr(item, "item", None)
        item = scalar() if callable(scalar) and getattr(item, "ndim", None) == 0 else item
    if not isinstance(item, numbers.Real):
        raise ContractError(f"score {position} is {_describe(item)}, expected a number or None")
    try:
        return float(item)
    except OverflowError:
        return math.inf


def _describe(value: Any) -> str:
    return f"a {type(value).__name__} ({repr(value)[:80]})"


def _settled(value: Any) -> Any:
    async def result(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    return asyncio.run(result(value)) if inspect.isawaitable(value) else value
