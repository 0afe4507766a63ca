"""Tasks from generators and from a user's own function."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hacrl.config import FunctionTasksConfig, ReasoningGymConfig
from hacrl.errors import TaskError
from hacrl.tasks import load_tasks
from hacrl.types import Task


def test_generator_items() -> None:
    source = ReasoningGymConfig(reasoning_gym="chain_sum", arguments={"max_terms": 2}, size=5, seed=40)
    tasks = load_tasks(source, name="train")
    assert [task.id for task in tasks] == [f"train/{i}" for i in range(5)]
    columns = tasks[2].columns
    assert tasks[2].prompt == columns["entry"]["question"]
    assert columns["answer"] == columns["entry"]["answer"]
    assert columns["reasoning_gym"] == "chain_sum"
    assert columns["metadata"]["num_terms"] == 2
    assert load_tasks(source, name="train") == tasks
    # Item i hangs on seed + i alone, so a later start meets the same items.
    later = load_tasks(source.model_copy(update={"seed": 42, "size": 3}), name="train")
    assert [task.prompt for task in later] == [task.prompt for task in tasks[2:]]


def test_generator_takes_template_system_and_limit() -> None:
    source = ReasoningGymConfig(
        reasoning_gym="gcd", size=5, limit=1, template="{prompt} Answer only.", system="S", shuffle_seed=1
    )
    (task,) = load_tasks(source, name="train")
    assert [message["role"] for message in task.prompt] == ["system", "user"]  # type: ignore[index]
    assert task.prompt[1]["content"] == task.columns["entry"]["question"] + " Answer only."  # type: ignore[index]


def test_composite_names_the_generator_of_each_item() -> None:
    parts = [{"name": "gcd", "weight": 1, "config": {}}, {"name": "chain_sum", "weight": 1, "config": {}}]
    source = ReasoningGymConfig(reasoning_gym="composite", arguments={"datasets": parts}, size=12)
    tasks = load_tasks(source, name="train")
    assert {task.columns["reasoning_gym"] for task in tasks} == {"gcd", "chain_sum"}
    assert all("Greatest Common" in str(task.prompt) for task in tasks if task.columns["reasoning_gym"] == "gcd")


@pytest.mark.parametrize(
    ("generator", "arguments", "message"),
    [
        ("chainsum", {}, r"no generator 'chainsum'; did you mean 'chain_sum'"),
        ("zzz", {}, r"no generator 'zzz'; known: .*gcd"),
        ("chain_sum", {"max_term": 2}, r"chain_sum has no argument 'max_term'; did you mean 'max_terms'"),
        ("chain_sum", {"seed": 2}, r"arguments.seed is 2; set `seed` beside"),
        ("chain_sum", {"min_terms": 0}, r"chain_sum refuses the arguments \{'min_terms': 0\}: AssertionError"),
        ("chain_sum", {"min_terms": "two"}, r"chain_sum refuses the arguments .*TypeError.*settings are .*max_terms"),
        ("composite", {"datasets": [{"nam": "gcd"}]}, r"composite refuses the arguments"),
    ],
)
def test_faulty_generators(generator: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_tasks(ReasoningGymConfig(reasoning_gym=generator, arguments=arguments, size=2), name="train")


def test_extra_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match=r"'gcd' needs the reasoning-gym package.*pip install 'hacrl\[reasoning-gym\]'"):
        load_tasks(ReasoningGymConfig(reasoning_gym="gcd"), name="train")


MODULE = """
from hacrl.types import Task

def sums(count=2):
    return [Task(id=f"mine-{i}", prompt=f"{i}+{i}?", columns={"answer": str(2 * i)}) for i in range(count)]

def one_at_a_time():
    yield from sums(3)

def nothing(): return []
def text(): return "abc"
def pairs(): return [("1+1?", "2")]
def fails(): raise RuntimeError("no disk")
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "my_tasks.py"
    path.write_text(MODULE)
    return str(path)


def test_function_from_file(module: str) -> None:
    source = FunctionTasksConfig(function=f"{module}:sums", arguments={"count": 4}, template="Q: {prompt}")
    tasks = load_tasks(source, name="eval")
    assert tasks[3] == Task(id="eval/3", prompt="Q: 3+3?", columns={"answer": "6"})
    assert len(load_tasks(FunctionTasksConfig(function=f"{module}:one_at_a_time"), name="eval")) == 3


def test_function_from_module(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(module).parent))
    assert len(load_tasks(FunctionTasksConfig(function="my_tasks:sums"), name="train")) == 2
    monkeypatch.delitem(sys.modules, "my_tasks")


def test_function_from_a_module_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks_of_this_folder.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    # As in a console script.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert len(load_tasks(FunctionTasksConfig(function="tasks_of_this_folder:sums"), name="train")) == 2
    monkeypatch.delitem(sys.modules, "tasks_of_this_folder")


def test_a_file_of_tasks_may_hold_dataclasses_and_import_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_tasks.py").write_text(MODULE)
    (tmp_path / "with_dataclass.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour_of_tasks import sums\n"
        "@dataclass\nclass Sum:\n    left: int\n"
    )
    assert len(load_tasks(FunctionTasksConfig(function=f"{tmp_path}/with_dataclass.py:sums"), name="train")) == 2


def test_a_column_cannot_take_the_place_of_the_completions(tmp_path: Path) -> None:
    (tmp_path / "taken.py").write_text(
        "from hacrl.types import Task\ndef f(): return [Task(id='0', prompt='?', columns={'completions': 1})]\n"
    )
    with pytest.raises(TaskError, match="column 'completions', a name that rewards use already"):
        load_tasks(FunctionTasksConfig(function=f"{tmp_path}/taken.py:f"), name="train")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("sum", {}, r"has no function 'sum'; it has .*sums"),
        ("sums", {"n": 1}, r"sums failed with arguments \{'n': 1\}: TypeError"),
        ("fails", {}, r"fails failed .*RuntimeError: no disk"),
        ("nothing", {}, r"nothing has no rows"),
        ("text", {}, r"text returned str; return a list of hacrl.Task"),
        ("pairs", {}, r"task 0 of .*pairs is \('1\+1\?', '2'\) \(tuple\); return hacrl.Task"),
    ],
)
def test_faulty_functions(module: str, function: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_tasks(FunctionTasksConfig(function=f"{module}:{function}", arguments=arguments), name="train")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_colon", r"function 'no_colon' must be module:function or file.py:function"),
        ("nowhere.py:f", r"nowhere.py cannot be imported: FileNotFoundError"),
        ("no_such_module_here:f", r"no_such_module_here cannot be imported: ModuleNotFoundError"),
    ],
)
def test_function_not_found(function: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_tasks(FunctionTasksConfig(function=function), name="train")
