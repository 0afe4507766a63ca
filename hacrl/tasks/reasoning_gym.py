"""Items of a reasoning-gym generator."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, cast

from hacrl.config import ReasoningGymConfig
from hacrl.errors import TaskError


class ReasoningGymRows:
    """The items of one generator. Item i is a function of `seed + i` and the generator's arguments only.

    Columns for rewards: `answer`, `metadata`, `entry` (the whole item, which the generator's own scorer wants) and
    `reasoning_gym` (the generator's name; for a composite the one that made this item).
    """

    def __init__(self, config: ReasoningGymConfig, *, name: str) -> None:
        self._name = name
        self._generator = config.reasoning_gym
        self._size = config.size
        self._dataset = _create(config, name=name)

    @property
    def origin(self) -> str:
        return f"reasoning-gym {self._generator}"

    def __len__(self) -> int:
        return self._size

    def place(self, index: int) -> str:
        return f"{self._name}: item {index} of {self.origin}"

    def row(self, index: int) -> tuple[object, Mapping[str, Any]]:
        try:
            entry: dict[str, Any] = self._dataset[index]
        except Exception as error:  # generators have no common error type; some settings leave nothing to draw
            raise TaskError(
                f"{self.place(index)} cannot be made: {type(error).__name__}: {error}; change the arguments"
            ) from error
        metadata: dict[str, Any] = entry.get("metadata") or {}
        generator = metadata.get("source_dataset") if self._generator == "composite" else None
        columns: dict[str, Any] = {
            "answer": entry.get("answer"),
            "metadata": metadata,
            "entry": entry,
            "reasoning_gym": generator or self._generator,
        }
        return entry.get("question"), columns


def _create(config: ReasoningGymConfig, *, name: str) -> Any:
    try:
        from reasoning_gym import composite, factory
    except ImportError as error:
        raise TaskError(
            f"{name}: the generator {config.reasoning_gym!r} needs the reasoning-gym package ({error}); "
            f"pip install 'hacrl[reasoning-gym]'"
        ) from error
    known_generators = cast(Mapping[str, tuple[Any, Any]], cast(Any, factory).DATASETS)
    generator, arguments = config.reasoning_gym, dict(config.arguments)
    if generator not in known_generators:
        close = difflib.get_close_matches(generator, known_generators, n=3)
        remedy = (
            f"did you mean {' or '.join(map(repr, close))}?"
            if close
            else f"known: {', '.join(sorted(known_generators))}"
        )
        raise TaskError(f"{name}: reasoning-gym has no generator {generator!r}; {remedy}")
    known = sorted({field.name for field in dataclasses.fields(known_generators[generator][1])} - {"size", "seed"})
    for key in arguments:
        if key in ("size", "seed"):
            raise TaskError(
                f"{name}: arguments.{key} is {arguments[key]!r}; set `{key}` beside `reasoning_gym` instead"
            )
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise TaskError(f"{name}: {generator} has no argument {key!r}; {remedy}")
    try:
        if generator == "composite":
            parts = cast(list[dict[str, Any]], arguments.get("datasets") or [])
            arguments["datasets"] = [composite.DatasetSpec(**part) for part in parts]
        return cast(Any, factory).create_dataset(generator, **arguments, size=config.size, seed=config.seed)
    except Exception as error:  # wrong values surface as assertions, type, value or attribute errors
        raise TaskError(
            f"{name}: {generator} refuses the arguments {config.arguments}: {type(error).__name__}: {error}; its "
            f"settings are {', '.join(known)}"
        ) from error
