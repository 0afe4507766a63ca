"""Rows of a Hugging Face dataset, from the hub or from local files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from hacrl.config import DatasetConfig
from hacrl.errors import TaskError

READERS: Mapping[str, str] = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
RESERVED = ("prompts", "completions")
"""Reward functions get these by themselves; a column of this name would be passed twice."""


class DatasetRows:
    """The rows of one split, as (prompt, reward columns).

    All columns are kept for rewards under their own names, except the one that is the prompt; `answer` and the entries
    of `columns` come on top, and a column named in `columns` moves to its new name.
    """

    def __init__(self, config: DatasetConfig, *, name: str) -> None:
        self._name = name
        self._config = config
        self.origin = f"{config.dataset} (split {config.split!r})"
        self._dataset = _load(config, name=name)
        features = cast(Mapping[str, Any], self._dataset.features)
        self._available = list(_dotted_names(features))
        # A column that does not exist comes first: what it would collide with is beside the point.
        named = {"prompt": config.prompt, **config.columns, **({"answer": config.answer} if config.answer else {})}
        for option, column in named.items():
            self._check_column(column, option=option, features=features)
        self._kept, self._extra = self._plan(list(features))

    def __len__(self) -> int:
        return len(self._dataset)

    def place(self, index: int) -> str:
        return f"{self._name}: row {index} of {self._config.dataset}: column {self._config.prompt!r}"

    def row(self, index: int) -> tuple[object, Mapping[str, Any]]:
        row = cast(Mapping[str, Any], self._dataset[index])
        columns = {column: row[column] for column in self._kept}
        for argument, column in self._extra.items():
            columns[argument] = self._reach(row, column, index=index)
        if self._config.answer is not None and columns["answer"] is None:
            raise TaskError(
                f"{self._name}: row {index} of {self._config.dataset}: column {self._config.answer!r} is empty, so no "
                f"answer could be right; remove the row or name another column as `answer`"
            )
        return self._reach(row, self._config.prompt, index=index), columns

    def _plan(self, names: list[str]) -> tuple[list[str], dict[str, str]]:
        """Which columns keep their name, and which reward arguments are made from which column."""
        config, name = self._config, self._name
        extra = dict(config.columns)
        if config.answer is not None:
            if "answer" in extra:
                raise TaskError(
                    f"{name}: `answer` is {config.answer!r} and columns.answer is {extra['answer']!r}; both would be "
                    f"given to rewards as `answer`: leave one out"
                )
            extra["answer"] = config.answer
        moved = {column for column in config.columns.values() if column in names}
        kept = [column for column in names if column != config.prompt and column not in moved]
        for argument, column in extra.items():
            if argument in kept and argument != column:
                raise TaskError(
                    f"{name}: {column!r} would be given to rewards as {argument!r}, but {config.dataset} has another "
                    f"column of that name; move that one with columns: {{dataset_{argument}: {argument}}}"
                )
        for argument in (*kept, *extra):
            if argument in RESERVED:
                raise TaskError(
                    f"{name}: a column of {config.dataset} would be given to rewards as {argument!r}, a name that "
                    f"rewards use already; move it with columns: {{dataset_{argument}: {argument}}}"
                )
        return kept, extra

    def _check_column(self, column: str, *, option: str, features: Mapping[str, Any]) -> None:
        if column in features:
            return
        node: Any = features
        for part in column.split("."):
            if not isinstance(node, Mapping):
                if type(node).__name__ == "Json":  # free-form: only the rows can tell
                    return
                node = None
                break
            node = cast(Mapping[str, Any], node).get(part)
            if node is None:
                break
        if node is None:
            close = difflib.get_close_matches(column, self._available, n=1)
            raise TaskError(
                f"{self._name}: {self._config.dataset} has no column {column!r} (option `{option}`); available: "
                f"{', '.join(self._available)}" + (f"; did you mean {close[0]!r}?" if close else "")
            )

    def _reach(self, row: Mapping[str, Any], column: str, *, index: int) -> Any:
        if column in row:
            return row[column]
        node: Any = row
        for part in column.split("."):
            if not isinstance(node, Mapping) or part not in node:
                raise TaskError(
                    f"{self._name}: row {index} of {self._config.dataset} has nothing under {column!r}: no {part!r} in "
                    f"{node!r:.80}"
                )
            node = cast(Mapping[str, Any], node)[part]
        return node


def _dotted_names(features: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, feature in features.items():
        yield prefix + key
        if isinstance(feature, Mapping):
            yield from _dotted_names(cast(Mapping[str, Any], feature), f"{prefix}{key}.")


def _load(config: DatasetConfig, *, name: str) -> Any:
    import datasets as library

    datasets = cast(Any, library)
    path = Path(config.dataset).expanduser()
    split = config.split
    try:
        if path.is_file():
            reader = READERS.get(path.suffix.lower())
            if reader is None:
                raise TaskError(
                    f"{name}: {config.dataset} ends with {path.suffix!r}; readable are {', '.join(READERS)} and folders"
                )
            # A file is one split, whatever the split is called; the rest of `split` may be a slice such as train[:100].
            base = re.split(r"[\[+]", split)[0] or "train"
            return datasets.load_dataset(reader, data_files={base: str(path)}, split=split)
        if path.is_dir():
            if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
                return _saved(datasets.load_from_disk(str(path)), config, name=name)
            return datasets.load_dataset(str(path), name=config.config, split=split)
        if path.suffix.lower() in READERS or path.is_absolute() or config.dataset.startswith((".", "~")):
            raise TaskError(f"{name}: {config.dataset}: no such file or folder; give a path or a hub id")
        return datasets.load_dataset(config.dataset, name=config.config, split=split, revision=config.revision)
    except TaskError:
        raise
    except Exception as error:  # the library raises anything from OSError to ArrowInvalid
        cause = error.__cause__ or error
        if "corresponds to no data" in str(cause):
            raise TaskError(f"{name}: {config.dataset} (split {split!r}) has no rows; check file and split") from error
        raise TaskError(
            f"{name}: {config.dataset} (split {split!r}) cannot be loaded: {type(cause).__name__}: "
            f"{' '.join(str(cause).split())}"
        ) from error


def _saved(loaded: Any, config: DatasetConfig, *, name: str) -> Any:
    if not isinstance(loaded, Mapping):
        return loaded
    splits = cast(Mapping[str, Any], loaded)
    if config.split not in splits:
        raise TaskError(f"{name}: {config.dataset} has no split {config.split!r}; it has {', '.join(splits)}")
    return splits[config.split]
