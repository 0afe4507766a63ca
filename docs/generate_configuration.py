"""Write docs/configuration.md from the models in hacrl/config/options.py: `python docs/generate_configuration.py`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hacrl.config import RunConfig

PAGE = Path(__file__).with_name("configuration.md")

HEAD = """\
# Configuration

<!-- Written by docs/generate_configuration.py from hacrl/config/options.py; change those, then run `make docs`. -->

A run is one YAML file. Any option can be overridden behind it on the command line, with list entries addressed by
number and agents also by name:

    hacrl train run.yaml algorithm.alpha=3 agents.0.learning_rate=5e-7 agents.llama.group_size=4

`hacrl check run.yaml` tells every fault at once (unknown options with the nearest known one, wrong types, settings that
cannot work together) and prints what the run would do, before a model is loaded. In Python, `hacrl.load_config` takes
the path or a dictionary, and the same overrides. `preset:NAME` in place of a path starts from one of the files in
`hacrl/presets`. YAML is read through OmegaConf, so `${...}` refers to other options and `${oc.env:NAME}` to the
environment. The resolved configuration, every default included, is `config.yaml` in the run directory.

Smallest useful file:

    agents:
      - {name: qwen, model: Qwen/Qwen3-1.7B-Base}
      - {name: llama, model: meta-llama/Llama-3.2-1B-Instruct}
    tasks:
      train: {dataset: openai/gsm8k, config: main, prompt: question, answer: answer}
    reward: math
    steps: 60
    prompts_per_step: 128
    output: runs/gsm8k

Short forms: `reward: math` is a list of one reward function; `algorithm: gspo` is `algorithm: {name: gspo}`, and an
`algorithm` without a name is hacpo; `tasks.eval` takes one source (then called `eval`) or several by name.
`trackers: [tensorboard, wandb]` is a list of sections with these names, all else at its default (docs/trackers.md).
`algorithm: gspo-x2` is read as `gspo` with every group size doubled and prompts_per_minibatch halved: twice the
rollouts and twice the updates in minibatches of the same size.

"""


def page() -> str:
    sections = "\n".join(_section(heading, model) for heading, model in _sections())
    return HEAD + sections


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every model once, outermost first, under the first place in the configuration where it stands."""
    seen: set[type[BaseModel]] = set()
    waiting: list[tuple[str, type[BaseModel]]] = [("", RunConfig)]
    while waiting:
        place, model = waiting.pop(0)
        if model in seen:
            continue
        seen.add(model)
        yield place, model
        inner: list[tuple[str, type[BaseModel]]] = []
        for name, field in model.model_fields.items():
            for branch, found in _models(field):
                container = typing.get_origin(_without_none(field.annotation))
                below = f"{place}.{name}".strip(".") + {list: "[]", dict: ".NAME"}.get(container, "")
                inner.append((f"{below} ({branch})" if branch else below, found))
        waiting = inner + waiting


def _models(field: FieldInfo) -> list[tuple[str, type[BaseModel]]]:
    """Models in a field's type; those of a union are told apart by the option that selects them."""
    found = list(_models_in(field.annotation))
    return [(_selector(model) if len(found) > 1 else "", model) for model in found]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)


def _selector(model: type[BaseModel]) -> str:
    name = model.model_fields.get("name")
    return f"name: {name.default}" if name is not None else next(iter(_own_first(model)))


def _own_first(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """A model's fields, those that its kind has in common with others last."""
    shared = {option for base in model.__mro__[1:] for option in getattr(base, "model_fields", {})}
    return dict(sorted(model.model_fields.items(), key=lambda item: item[0] in shared))


def _section(place: str, model: type[BaseModel]) -> str:
    heading = f"## `{place}`" if place else "## The whole run"
    meaning = inspect.cleandoc(model.__dict__.get("__doc__") or "")
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field)} | {_escape(field.description or 'Selects this section.')} |"
        for name, field in _own_first(model).items()
    ]
    return "\n".join(
        [heading, "", meaning, "", "| option | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _type(field: FieldInfo) -> str:
    limits = [text for item in field.metadata if (text := _limit(item))]
    return _escape(", ".join([_type_name(_without_none(field.annotation)), *limits]))


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (Union, UnionType):
        parts = tuple(part for part in typing.get_args(annotation) if part is not type(None))
        return Union[parts]  # noqa: UP007 - the parts are only known here
    return annotation


def _type_name(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(parts[0])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type_name(part) for part in parts))
    if origin is list:
        return f"list of {_type_name(parts[0])}"
    if origin is dict:
        return f"mapping of {_type_name(parts[1])}"
    if annotation is Any:
        return "anything"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    return {"bool": "true, false", "int": "integer", "float": "number", "str": "text"}[annotation.__name__]


def _limit(item: Any) -> str | None:
    if isinstance(item, annotated_types.Interval):
        return ", ".join(text for part in item if (text := _limit(part)))
    signs = {annotated_types.Ge: ">=", annotated_types.Gt: ">", annotated_types.Le: "<=", annotated_types.Lt: "<"}
    for kind, sign in signs.items():
        if isinstance(item, kind):
            return f"{sign} {getattr(item, kind.__name__.lower()):g}"
    if isinstance(item, annotated_types.MinLen):
        return None if item.min_length == 0 else "not empty"
    pattern = getattr(item, "pattern", None)
    return f"`{pattern}`" if pattern else None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None:
        return ""
    if isinstance(default, BaseModel):
        return f"`{_selector(type(default))}`" if len(_models(field)) > 1 else "its defaults"
    return f"`{_yaml(default)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and 0 < abs(value) < 1e-2 else str(value)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
