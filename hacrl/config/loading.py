"""A configuration from YAML, overrides and short forms, and what to say where it is faulty.

Reading one needs neither torch nor transformers, so faults are told before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from hacrl.config.combinations import impossible_combinations
from hacrl.config.options import SOURCES, RunConfig
from hacrl.errors import ConfigError


def load_config(
    source: str | Path | Mapping[str, Any] | RunConfig, overrides: Sequence[str] = (), *, output: str | None = None
) -> RunConfig:
    """Read, override and validate a run's configuration.

    `source` is a YAML path, `preset:NAME` for one of the paper's pairs, a mapping or a finished `RunConfig`; each
    override is `dotted.key=value` with the value read as YAML, list entries addressed by number, agents by name, all
    entries by `*` (`agents.0.learning_rate=5e-7`, `agents.*.learning_rate=5e-7`). All faults are collected and raised
    as one `ConfigError`. Nothing heavier than pydantic is imported.
    """
    data = _read(source)
    for override in overrides:
        _apply_override(data, override)
    if output is not None:
        data["output"] = output
    # References such as ${steps} are looked up last, so that they see what the overrides have set.
    try:
        return _validate(_mapping(OmegaConf.to_container(OmegaConf.create(data), resolve=True)))
    except OmegaConfBaseException as error:
        raise ConfigError([f"configuration: {_one_line(error)}"]) from error


def _read(source: str | Path | Mapping[str, Any] | RunConfig) -> dict[str, Any]:
    if isinstance(source, RunConfig):
        return source.model_dump()
    if isinstance(source, Mapping):
        try:
            return _mapping(OmegaConf.to_container(OmegaConf.create(dict(source))))
        except OmegaConfBaseException as error:
            raise ConfigError([f"configuration: {_one_line(error)}; give names and numbers, not objects"]) from error
    path = _preset(str(source).removeprefix(_PRESET)) if str(source).startswith(_PRESET) else Path(source)
    if not path.is_file():
        raise ConfigError([f"{path}: no such file; give the path of a YAML configuration, or {_PRESET}NAME"])
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read as YAML: {_one_line(error)}"]) from error
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: holds {type(data).__name__}; a configuration is a mapping of options"])
    return _mapping(data)


def _mapping(data: Any) -> dict[str, Any]:
    return typing.cast(dict[str, Any], data)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_PRESET = "preset:"


def _preset(name: str) -> Path:
    folder = Path(__file__).parents[1] / "presets"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
        raise ConfigError([f"{_PRESET}{name}: no such preset; {remedy}"])
    return folder / f"{name}.yaml"


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError([f"override {override!r}: expected key=value, e.g. algorithm.alpha=3"])
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index, call-overload]
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError([f"override {override!r}: the value is not YAML: {_one_line(error)}"]) from error
    _set(data, key.split("."), value, override, where="")


def _set(node: Any, parts: Sequence[str], value: Any, override: str, *, where: str) -> None:
    """Put `value` at the place that `parts` name below `node`; `*` stands for every entry of a list."""
    part, rest = parts[0], parts[1:]
    if isinstance(node, list):
        names = [item.get("name") if isinstance(item, Mapping) else None for item in node]
        index = names.index(part) if part in names else int(part) if part.isdigit() else -1
        if part != "*" and not 0 <= index < len(node):
            raise ConfigError([f"override {override!r}: {where} has {len(node)} entries, none is {part!r}"])
        for place in range(len(node)) if part == "*" else [index]:
            if rest:
                _set(node[place], rest, value, override, where=f"{where}.{place}")
            else:
                node[place] = value
    elif isinstance(node, dict):
        if not rest:
            node[part] = value
            return
        if isinstance(node.get(part), str) and part in ("algorithm", "execution"):
            node[part] = {"name": node[part]}
        if node.get(part) is None:
            node[part] = {}
        _set(node[part], rest, value, override, where=f"{where}.{part}".lstrip("."))
    else:
        raise ConfigError([f"override {override!r}: {where} is {node!r}, which has no options inside"])


def _validate(data: dict[str, Any]) -> RunConfig:
    problems: list[str] = []
    told: set[str] = set()
    # Faulty optional entries are told, then taken out, so that the checks of combinations still run.
    while True:
        try:
            config = RunConfig.model_validate(data)
        except ValidationError as error:
            faults = [(_data_path(item, data), item) for item in error.errors()]
            for path, item in faults:
                if _dotted(path) not in told:
                    told.add(_dotted(path))
                    problems.append(_problem(_dotted(path) or "configuration", item))
            # Without a required option its whole section goes; what was taken out is not told again as missing.
            outs = [path[:-1] if item["type"] == "missing" else path for path, item in faults]
            told.update(map(_dotted, outs))
            taken_out = [_take_out(data, path) for path in sorted(outs, key=len, reverse=True)]
            if not any(taken_out):
                raise ConfigError(problems) from None
        else:
            problems += impossible_combinations(config)
            if problems:
                raise ConfigError(problems)
            return config


def _take_out(data: Any, path: Sequence[str | int]) -> bool:
    """Delete an option; an entry of a list stays, since its neighbours are addressed by number."""
    for key in path[:-1]:
        data = data[key]
    if not path or not isinstance(data, dict) or path[-1] not in data:
        return False
    del data[path[-1]]
    return True


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _data_path(item: Any, data: Any) -> list[str | int]:
    """Where in the data a fault stands: pydantic's location without the parts that name a union's branch."""
    path: list[str | int] = []
    node = data
    loc = item["loc"]
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        # A tag such as `dataset` can also be a key: it is the branch when the location goes on behind it.
        is_key = isinstance(node, Mapping) and part in node and (last or part not in _BRANCHES)
        if is_key or (isinstance(node, list) and isinstance(part, int) and part < len(node)):
            node = node[part]
            path.append(part)
        elif last and item["type"] == "missing":
            path.append(part)
    return path


_BRANCHES = {"hacpo", "gspo", "grpo", "naive", "tensorboard", "wandb", "trackio", "local", "ray", *SOURCES}


def _problem(place: str, item: Any) -> str:
    kind, given = item["type"], item["input"]
    if kind == "extra_forbidden":
        return f"{place}: {_unknown_option(item['loc'])}"
    if kind == "missing":
        return f"{place}: required and not given"
    if kind == "union_tag_not_found":
        return f"{place}.name: required and not given"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{place}: got {given!r}; must be a mapping of options"
    if kind in ("union_tag_invalid", "literal_error"):
        expected = item["ctx"].get("expected_tags") or item["ctx"].get("expected")
        if kind == "union_tag_invalid":
            place, given = f"{place}.name", given.get("name") if isinstance(given, Mapping) else given
        if place == "algorithm.name":
            expected = f"{expected}, 'gspo-x2'"
        close = difflib.get_close_matches(
            str(given), [part.strip(" '") for part in str(expected).replace(" or ", ",").split(",")], n=1
        )
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{place}: got {given!r}, must be one of {expected}{hint}"
    if kind == "value_error":
        return f"{place}: {item['ctx']['error']}"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{place}: got {given!r}; {message}"


def _unknown_option(loc: Sequence[str | int]) -> str:
    option, model = str(loc[-1]), _model_at(RunConfig, loc[:-1])
    if model is None:
        return "unknown option"
    known = {name: name for name in model.model_fields}
    if model in SOURCES.values():
        if option in SOURCES:
            return f"a source is one of {', '.join(SOURCES)}; take out all but one"
        known |= {kind: kind for kind in SOURCES}
    # An option that stands one section deeper is found too.
    for name, field in model.model_fields.items():
        if typing.get_origin(field.annotation) not in (list, dict):
            for inner in _models_in(field.annotation):
                known = {deeper: f"{name}.{deeper}" for deeper in inner.model_fields} | known
    close = difflib.get_close_matches(option, known, n=1)
    if close:
        return f"unknown option; did you mean {known[close[0]]!r}?"
    return f"unknown option; known here: {', '.join(sorted(model.model_fields))}"


def _model_at(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel] | None:
    """The model whose fields stand at a pydantic location; union branches are part of such a location."""
    candidates: list[type[BaseModel]] = [model]
    for part in loc:
        branch = [item for item in candidates if part in (_tag(item), _KINDS.get(item))]
        if len(candidates) > 1 and branch:
            candidates = branch
            continue
        if isinstance(part, int) or not any(part in item.model_fields for item in candidates):
            continue
        annotation = next(item.model_fields[part].annotation for item in candidates if part in item.model_fields)
        candidates = list(_models_in(annotation))
    return candidates[0] if candidates else None


_KINDS: dict[type[BaseModel], str] = {model: kind for kind, model in SOURCES.items()}


def _tag(model: type[BaseModel]) -> Any:
    name = model.model_fields.get("name")
    return name.default if name is not None else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and not isinstance(annotation, types.GenericAlias)
    ):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models_in(part)]
