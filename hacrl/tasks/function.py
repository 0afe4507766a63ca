"""Tasks made by a user's own function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from hacrl.config import FunctionTasksConfig
from hacrl.errors import TaskError
from hacrl.tasks.dataset import RESERVED
from hacrl.types import Task


class FunctionRows:
    """What the function returned: `hacrl.Task` objects. Their ids are replaced by `name/<position>`."""

    def __init__(self, config: FunctionTasksConfig, *, name: str) -> None:
        self._name = name
        self.origin = config.function
        function = _load(config.function, name=name)
        try:
            result = function(**config.arguments)
        except Exception as error:  # the user's own code
            raise TaskError(
                f"{name}: {config.function} failed with arguments {config.arguments}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
            raise TaskError(
                f"{name}: {config.function} returned {type(cast(object, result)).__name__}; return a list of hacrl.Task"
            )
        self._tasks = list(cast(Iterable[object], result))

    def __len__(self) -> int:
        return len(self._tasks)

    def place(self, index: int) -> str:
        return f"{self._name}: task {index} of {self.origin}"

    def row(self, index: int) -> tuple[object, Mapping[str, Any]]:
        task = self._tasks[index]
        if not isinstance(task, Task):
            raise TaskError(f"{self.place(index)} is {task!r:.60} ({type(task).__name__}); return hacrl.Task objects")
        for column in RESERVED:
            if column in task.columns:
                raise TaskError(f"{self.place(index)} has a column {column!r}, a name that rewards use already; rename")
        return task.prompt, task.columns


def _load(reference: str, *, name: str) -> Callable[..., object]:
    module_name, separator, function_name = reference.rpartition(":")
    if not separator or not module_name or not function_name:
        raise TaskError(f"{name}: function {reference!r} must be module:function or file.py:function")
    try:
        if module_name.endswith(".py"):
            module = _module_from_file(Path(module_name).expanduser().resolve())
        else:
            # A console script does not put the working folder on the path, and that is where a user's module lies.
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.append(str(Path.cwd()))
            module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's own code
        raise TaskError(f"{name}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise TaskError(f"{name}: {module_name} has no function {function_name!r}; it has {', '.join(names) or 'none'}")
    return function


def _module_from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Under a name of its own, so that no library is replaced; dataclasses look their module up there.
    name = f"tasks of {path}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
