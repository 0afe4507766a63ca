"""Rows of local datasets become tasks; every faulty row or column is told by place, value and remedy."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hacrl.config import DatasetConfig
from hacrl.errors import TaskError
from hacrl.tasks import load_tasks
from hacrl.types import Task


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write rows as JSONL and load them with the given options."""

    def from_rows(rows: Sequence[dict[str, Any]], **options: Any) -> list[Task]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_tasks(DatasetConfig(dataset=str(path), **options), name="train")

    return from_rows


ROWS = [{"question": f"What is {i}+{i}?", "solution": str(2 * i), "level": i} for i in range(6)]


def test_row_becomes_task_with_all_columns(load: Any) -> None:
    tasks = load(ROWS, prompt="question", answer="solution")
    assert len(tasks) == 6
    assert tasks[3] == Task(id="train/3", prompt="What is 3+3?", columns={"solution": "6", "level": 3, "answer": "6"})


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv"])
def test_every_local_form_gives_the_same_tasks(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["question", "solution", "level"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        path.write_text(json.dumps(ROWS) if suffix == ".json" else "\n".join(map(json.dumps, ROWS)))
    source = DatasetConfig(dataset=str(path), split="test", prompt="question", answer="solution")
    tasks = load_tasks(source, name="math")
    assert [task.id for task in tasks] == [f"math/{i}" for i in range(6)]
    assert tasks[5].prompt == "What is 5+5?"
    # CSV has no types of its own: the reader takes digits for numbers.
    assert str(tasks[5].columns["answer"]) == "10"
    assert tasks[5].columns["level"] == 5


def test_folder_splits_are_told_apart(tmp_path: Path) -> None:
    for split, rows in (("train", ROWS[:4]), ("test", ROWS[4:])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = load_tasks(DatasetConfig(dataset=str(tmp_path), split="test", prompt="question"), name="eval")
    assert [task.prompt for task in tasks] == ["What is 4+4?", "What is 5+5?"]
    with pytest.raises(TaskError, match=r"split 'dev'.*cannot be loaded.*dev"):
        load_tasks(DatasetConfig(dataset=str(tmp_path), split="dev", prompt="question"), name="eval")


def test_saved_dataset_folder(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "saved"))
    source = DatasetConfig(dataset=str(tmp_path / "saved"), prompt="question")
    assert len(load_tasks(source, name="train")) == 6
    with pytest.raises(TaskError, match=r"no split 'test'; it has train"):
        load_tasks(source.model_copy(update={"split": "test"}), name="train")


def test_split_may_be_a_slice(load: Any) -> None:
    assert [task.prompt for task in load(ROWS, prompt="question", split="train[2:4]")] == [
        "What is 2+2?",
        "What is 3+3?",
    ]


def test_verl_rows(load: Any) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
    }
    (task,) = load([row], answer="reward_model.ground_truth", columns={"number": "extra_info.index"})
    assert task.prompt == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})
    assert task.columns == {
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
        "answer": "2",
        "number": 7,
    }


def test_conversational_prompt_keeps_earlier_turns(load: Any) -> None:
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "plus {1}?"},
    ]
    (task,) = load([{"messages": turns}], prompt="messages", template="Q: {prompt} {x}", system="S")
    assert task.prompt == (
        {"role": "system", "content": "S"},
        *turns[:2],
        {"role": "user", "content": "Q: plus {1}? {x}"},
    )
    assert task.columns == {}


def test_template_and_system_around_text(load: Any) -> None:
    (task,) = load([{"prompt": r"Find \frac{1}{2}"}], template="{prompt}\nPut it in \\boxed{}.", system="Think.")
    assert task.prompt == (
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "Find \\frac{1}{2}\nPut it in \\boxed{}."},
    )


def test_template_without_place_for_the_prompt(load: Any) -> None:
    with pytest.raises(TaskError, match=r"template 'Solve: \{question\}' has no \{prompt\}"):
        load(ROWS, prompt="question", template="Solve: {question}")


def test_limit_and_shuffle_keep_row_numbers(load: Any) -> None:
    shuffled = load(ROWS, prompt="question", shuffle_seed=1)
    assert [task.id for task in shuffled] != [f"train/{i}" for i in range(6)]
    assert sorted(task.id for task in shuffled) == [f"train/{i}" for i in range(6)]
    assert all(task.prompt == f"What is {task.id[6:]}+{task.id[6:]}?" for task in shuffled)
    limited = load(ROWS, prompt="question", shuffle_seed=1, limit=2)
    assert limited == shuffled[:2]
    assert load(ROWS, prompt="question", shuffle_seed=2) != shuffled
    assert [task.id for task in load(ROWS, prompt="question", limit=2)] == ["train/0", "train/1"]
    assert len(load(ROWS, prompt="question", limit=99)) == 6


def test_missing_column_lists_the_available_ones(load: Any) -> None:
    rows = [{"question": "a?", "reward_model": {"ground_truth": "b", "style": "rule"}}]
    with pytest.raises(TaskError) as error:
        load(rows)  # the default column is `prompt`
    assert "no column 'prompt' (option `prompt`)" in str(error.value)
    assert "question, reward_model, reward_model.ground_truth, reward_model.style" in str(error.value)
    with pytest.raises(
        TaskError, match=r"'reward_model.groundtruth' \(option `answer`\).*did you mean 'reward_model.gro"
    ):
        load(rows, prompt="question", answer="reward_model.groundtruth")
    with pytest.raises(TaskError, match=r"'question.text' \(option `prompt`\)"):
        load(rows, prompt="question.text")
    with pytest.raises(TaskError, match=r"no column 'levl' \(option `level`\)"):
        load(rows, prompt="question", columns={"level": "levl"})


def test_column_name_with_a_dot_goes_before_nesting(load: Any) -> None:
    (task,) = load([{"prompt": "a?", "meta.answer": "flat", "meta": {"answer": "nested"}}], answer="meta.answer")
    assert task.columns["answer"] == "flat"


def test_columns_move_to_their_new_name(load: Any) -> None:
    (task,) = load(
        [{"prompt": "a?", "completions": "x", "answer": "long", "short": "s"}],
        answer="short",
        columns={"reference": "answer", "old": "completions"},
    )
    assert task.columns == {"answer": "s", "short": "s", "reference": "long", "old": "x"}


def test_name_collisions(load: Any) -> None:
    with pytest.raises(
        TaskError, match=r"'short' would be given to rewards as 'answer'.*another column.*dataset_answer"
    ):
        load([{"prompt": "a?", "answer": "long", "short": "s"}], answer="short")
    with pytest.raises(TaskError, match=r"given to rewards as 'completions'.*dataset_completions: completions"):
        load([{"prompt": "a?", "completions": "x"}])
    with pytest.raises(TaskError, match=r"'prompts', a name that rewards use"):
        load([{"prompt": "a?", "x": "x"}], columns={"prompts": "x"})
    with pytest.raises(TaskError, match=r"`answer` is 'x' and columns.answer is 'y'"):
        load([{"prompt": "a?", "x": "x", "y": "y"}], answer="x", columns={"answer": "y"})


USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, r"the prompt is None \(NoneType\); it must be text or a list"),
        ("  \n", r"the prompt is empty"),
        (17, r"the prompt is 17 \(int\)"),
        ([], r"the list of messages is empty"),
        (["hello"], r"message 0 is 'hello' \(str\); it must be \{role, content\}"),
        (
            [{"role": "human", "content": "hello"}],
            r"message 0 has role 'human'; known roles are system, user, assistant",
        ),
        ([{"role": "user", "content": None}], r"message 0 has content None \(NoneType\); only text"),
        ([{"role": "user", "content": " "}], r"message 0 \(user\) has empty content"),
        ([USER, {"role": "assistant", "content": "Sure"}], r"ends with a message of the assistant.*cannot be begun"),
        ([{"role": "system", "content": "Be brief"}], r"ends with a message of the system"),
        ([USER, {"role": "system", "content": "x"}, USER], r"message 1 is a system message.*only stand first"),
    ],
)
def test_faulty_prompts_are_told_with_their_row(load: Any, prompt: Any, message: str) -> None:
    rows = [{"prompt": prompt}]
    # The row number counts in the source; the faulty row is alone of its type, so it gets a file of its own.
    with pytest.raises(TaskError, match=r"train: row 0 of .*rows.jsonl: column 'prompt'.*" + message):
        load(rows)


def test_faulty_row_number_counts_in_the_source(load: Any) -> None:
    rows = [{"prompt": "fine"}, {"prompt": "fine"}, {"prompt": None}]
    with pytest.raises(TaskError, match=r"row 2 of"):
        load(rows, shuffle_seed=5)
    assert len(load(rows, limit=2)) == 2


def test_empty_reference(load: Any) -> None:
    with pytest.raises(TaskError, match=r"row 1 of .*column 'solution' is empty, so no answer could be right"):
        load([{"prompt": "a?", "solution": "1"}, {"prompt": "b?", "solution": None}], answer="solution")


def test_absent_nested_value(load: Any) -> None:
    with pytest.raises(TaskError, match=r"row 1 of .* has nothing under 'info.gold': no 'gold' in None"):
        load([{"prompt": "a?", "info": {"gold": "1"}}, {"prompt": "b?", "info": None}], answer="info.gold")


def test_two_system_messages(load: Any) -> None:
    rows = [{"prompt": [{"role": "system", "content": "mine"}, USER]}]
    with pytest.raises(TaskError, match=r"has its own system message 'mine', and the option `system` is set"):
        load(rows, system="yours")


def test_empty_dataset(tmp_path: Path, load: Any) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    with pytest.raises(TaskError, match=r"train: .*rows.csv \(split 'train'\) has no rows"):
        load_tasks(DatasetConfig(dataset=str(tmp_path / "rows.csv")), name="train")
    with pytest.raises(TaskError, match=r"train: .*rows.jsonl \(split 'train\[:0\]'\) has no rows"):
        load(ROWS, prompt="question", split="train[:0]")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("nowhere/rows.jsonl", r"no such file or folder"),
        ("./nowhere", r"no such file or folder"),
        ("nobody/nothing", r"nobody/nothing \(split 'train'\) cannot be loaded"),
    ],
)
def test_absent_source(dataset: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_tasks(DatasetConfig(dataset=dataset), name="train")


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("hello")
    with pytest.raises(TaskError, match=r"ends with '.txt'; readable are .parquet, .jsonl"):
        load_tasks(DatasetConfig(dataset=str(tmp_path / "rows.txt")), name="train")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"')
    with pytest.raises(TaskError, match=r"rows.jsonl \(split 'train'\) cannot be loaded"):
        load_tasks(DatasetConfig(dataset=str(tmp_path / "rows.jsonl")), name="train")


def test_a_misspelt_answer_is_told_as_such_even_where_another_column_is_called_answer(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    config = DatasetConfig(dataset=str(file), prompt="question", answer="answr")
    with pytest.raises(TaskError, match=r"no column 'answr' \(option `answer`\).*did you mean 'answer'"):
        load_tasks(config, name="train")
