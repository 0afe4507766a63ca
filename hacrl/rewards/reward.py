"""One reward function: how it is named in a configuration, and what it becomes once loaded."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from hacrl.errors import RewardError

BUILT_INS = ("math", "reasoning_gym", "exact", "multiple_choice")


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """A reward function as asked for.

    `function` is the name of a built-in, `module:function`, `path/to/file.py:function` or a callable. `weight` scales
    its scores in the sum. `arguments` are constant keyword arguments; they win over a column of the same name.
    `name` is the key of its scores and metrics; left out, it is taken from the function.
    """

    function: str | Callable[..., Any]
    weight: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A loaded reward function.

    A function, partial or callable object may carry any of these attributes (for a built-in they are functions of its
    module), each called with those keyword arguments that its own signature names:

    - `answers(prompts, completions, **columns) -> list[str | None]`: the final answer of each completion, None where
      none was found; gives maj@k and the parse-failure rate.
    - `gold(**row) -> str`: a completion that must get the full score, from one row's columns; used by `hacrl check`.
    - `prepare() -> None`: called once in each worker before any clock runs, e.g. for slow imports.
    """

    spec: RewardSpec
    name: str
    function: Callable[..., Any]
    answers: Callable[..., Any] | None
    gold: Callable[..., str] | None
    prepare: Callable[[], None] | None

    @property
    def weight(self) -> float:
        return self.spec.weight

    @property
    def options(self) -> frozenset[str]:
        """Parameters that constant arguments alone may fill: those of a built-in that have a default. Data sets have
        columns of such names, e.g. OlympiadBench a `final_answer`."""
        if self.spec.function not in BUILT_INS:
            return frozenset()
        parameters = _parameters(self.function)
        return frozenset(p.name for p in parameters if p.default is not inspect.Parameter.empty)

    def missing_columns(self, columns: frozenset[str]) -> list[str]:
        """Parameters without a default that neither `columns` nor the constant arguments provide, in order."""
        given = columns | set(self.spec.arguments) | {"prompts", "completions"}
        parameters = [parameter for parameter in _parameters(self.function) if parameter.kind in _NAMED]
        return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.name not in given]

    def used_columns(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that the function, or its `answers`, can take; constant arguments left out."""
        accepted = _accepts(self.function)
        if self.answers is not None and accepted is not None:
            more = _accepts(self.answers)
            accepted = None if more is None else accepted | more
        hidden = {*self.spec.arguments, *self.options}
        return {k: v for k, v in columns.items() if k not in hidden and (accepted is None or k in accepted)}

    def call(self, target: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Calls `target` (the function or one of its attributes) with those of the arguments that it can take."""
        accepted = _accepts(target)
        columns = {name: value for name, value in arguments.items() if name not in self.options}
        everything = {**columns, **self.spec.arguments}
        return target(**{k: v for k, v in everything.items() if accepted is None or k in accepted})


def load_reward(spec: RewardSpec) -> Reward:
    """Finds and checks the function of a spec.

    Raises:
        RewardError: it cannot be found or imported, cannot be called, or cannot take `completions` or the arguments.
    """
    place = f"reward {spec.function!r}" if isinstance(spec.function, str) else "reward"
    if isinstance(spec.function, str):
        spec, function, name = _find(spec, place)
    else:
        function, name = spec.function, _callable_name(spec.function)
    if not callable(function):
        raise RewardError(f"{place}: {type(function).__name__} cannot be called; name a function")
    if isinstance(spec.weight, bool) or not isinstance(spec.weight, (int, float)) or not math.isfinite(spec.weight):
        raise RewardError(f"{place}: weight is {spec.weight!r}; give a finite number")
    name = spec.name or name
    _check_signature(function, spec, f"reward {name!r}")
    # A built-in's companions stand beside it in its file.
    companions = sys.modules[f"hacrl.rewards.{spec.function}"] if spec.function in BUILT_INS else function
    return Reward(
        spec=spec,
        name=name,
        function=function,
        answers=_attribute(companions, "answers"),
        gold=_attribute(companions, "gold"),
        prepare=_attribute(companions, "prepare"),
    )


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _find(spec: RewardSpec, place: str) -> tuple[RewardSpec, Any, str]:
    source = str(spec.function)
    if source in BUILT_INS:
        if source == "reasoning_gym" and importlib.util.find_spec(source) is None:
            raise RewardError(
                f"{place}: the reasoning-gym package is not installed; pip install 'hacrl[reasoning-gym]'"
            )
        module = importlib.import_module(f"hacrl.rewards.{source}")
        return spec, getattr(module, source), source
    module_name, colon, attribute = source.rpartition(":")
    if not colon or not module_name or not attribute:
        raise RewardError(
            f"{place}: neither a built-in ({', '.join(BUILT_INS)}) nor of the form module:function or "
            "path/to/file.py:function"
        )
    if module_name.endswith(".py"):
        path = Path(module_name).expanduser().resolve()
        # Workers load it again, perhaps from another folder, so the absolute path travels.
        spec = replace(spec, function=f"{path}:{attribute}")
        module = _import_file(path, place)
    else:
        module = _import_module(module_name, place)
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            raise RewardError(
                f"{place}: {module_name} has no {attribute!r}; callables there: {', '.join(names) or 'none'}"
            ) from None
    return spec, found, attribute.rpartition(".")[2]


def _import_module(name: str, place: str) -> ModuleType:
    # A console script does not put the working folder on the path, and that is where a user's module lies.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise RewardError(
            f"{place}: importing {name!r} failed with {type(error).__name__}: {error}; install it, or start from the "
            "folder that holds it"
        ) from error


def _import_file(path: Path, place: str) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"{place}: there is no file {path}; give the path from the working folder")
    known = sys.modules.get(str(path))
    if known is not None:
        return known
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Under its path, not its stem: a file called json.py must not replace a library.
    module_spec = importlib.util.spec_from_file_location(str(path), path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[str(path)] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[str(path)]
        raise RewardError(
            f"{place}: running {path} failed with {type(error).__name__}: {error}; mend the file"
        ) from error
    return module


def _callable_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return name.strip("<>")


def _attribute(function: Any, name: str) -> Callable[..., Any] | None:
    """The attribute of a function, bound method, callable object or the function within a partial."""
    while True:
        found = getattr(function, name, None)
        if callable(found):
            return found
        if not isinstance(function, functools.partial):
            return None
        function = function.func


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        # Some callables written in C tell nothing about their parameters: they get everything.
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _accepts(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names that can be passed by keyword; None where any can."""
    parameters = _parameters(function)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind in _NAMED)


def _check_signature(function: Callable[..., Any], spec: RewardSpec, place: str) -> None:
    parameters = _parameters(function)
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and parameter.default is inspect.Parameter.empty:
            raise RewardError(f"{place}: parameter {parameter.name!r} is positional-only; let it be passed by keyword")
    named = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
    open_ended = _accepts(function) is None
    if "completions" not in named and not open_ended:
        raise RewardError(
            f"{place}: takes ({', '.join(p.name for p in parameters)}) but no `completions`; write it as "
            "(prompts, completions, **columns)"
        )
    # A built-in takes **columns only to pass over columns; an argument that lands there is a slip of the pen.
    if not open_ended or spec.function in BUILT_INS:
        unknown = sorted(set(spec.arguments) - named)
        if unknown:
            options = sorted(named - {"prompts", "completions"})
            raise RewardError(
                f"{place}: unknown argument {', '.join(unknown)}; it takes {', '.join(options) or 'none'}"
            )
