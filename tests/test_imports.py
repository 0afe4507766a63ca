"""Import rules that import-linter cannot express: which outside libraries a part of the package may use, and where."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hacrl"


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_algorithms_need_torch_and_themselves_only() -> None:
    for path in (PACKAGE / "algorithms").glob("*.py"):
        for name in imported_modules(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top == "torch" or name.startswith("hacrl.algorithms"), (path, name)


@pytest.mark.parametrize("library", ["ray", "vllm", "wandb", "trackio", "tensorboard", "torch.utils.tensorboard"])
def test_an_optional_library_is_imported_in_at_most_one_file(library: str) -> None:
    using = [
        path
        for path in PACKAGE.rglob("*.py")
        if any(name == library or name.startswith(f"{library}.") for name in imported_modules(path))
    ]
    assert len(using) <= 1
    assert all(path.stem in (library.split(".")[-1], f"{library}_cluster") for path in using)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("hacrl", {"torch", "transformers", "datasets", "peft", "pydantic"}),
        ("hacrl.config", {"torch", "transformers", "datasets", "peft"}),
        ("hacrl.compare.plan", {"torch", "transformers", "datasets", "peft", "numpy"}),
        ("hacrl.cli", {"torch", "transformers", "datasets", "peft"}),
        ("hacrl.report.page", {"torch", "transformers", "datasets", "peft", "numpy"}),
        ("hacrl.algorithms.hacpo", {"transformers", "datasets", "peft", "pydantic", "hacrl.config"}),
    ],
)
def test_a_light_module_loads_nothing_heavy(module: str, unwanted: set[str]) -> None:
    program = f"import sys, {module}; print(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
