"""A run's configuration on disk, and which of its keys may differ when the run goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import yaml

from hacrl.config import RunConfig

# These do not alter what a run computes. The last three do not alter it either but for the rounding of sums; they are
# what a person has to change after running out of memory or moving to other hardware.
_FREE_KEYS = re.compile(
    r"output|export|checkpoint\..+|trackers(\..+)?|verification\.workers|execution\..+|agents\.\d+\.resources\..+"
    r"|(agents\.\d+\.)?sampling\.vllm\.(python|memory_share|sleep|mismatch_limit|on_mismatch)"
    r"|agents\.\d+\.(device|micro_batch_tokens|gradient_checkpointing)"
)


def config_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.dump(_escaped(config.model_dump()), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes every text but plain words. PyYAML would write `1e-6` or a lone U+0085 in a way that OmegaConf, which
    reads more things as numbers, reads back as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        plain = re.fullmatch(r"[A-Za-z/][\w/. -]*", text, re.ASCII)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def _escaped(value: Any) -> Any:
    """Keep OmegaConf from reading `${` in a text, such as a chat template, as a reference."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list):
        return [_escaped(item) for item in cast(list[Any], value)]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def differences(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, each with the old and the new one."""
    old, new = (dict(_flat(config.model_dump(), "")) for config in (before, now))
    missing = "(not set)"
    return {
        key: (old.get(key, missing), new.get(key, missing))
        for key in [*old, *(key for key in new if key not in old)]
        if key not in old or key not in new or old[key] != new[key]
    }


def _flat(value: Any, place: str) -> Iterable[tuple[str, Any]]:
    # An empty mapping or list is a value of its own, so that filling or emptying one is seen as a change.
    if isinstance(value, dict) and value:
        for key, item in cast(dict[str, Any], value).items():
            yield from _flat(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(cast(list[Any], value)):
            yield from _flat(item, f"{place}.{index}")
    else:
        yield place, value


def altering_changes(before: RunConfig, now: RunConfig, *, done: int) -> dict[str, tuple[Any, Any]]:
    """Those of `differences` with which a run of which `done` steps are made may not go on."""
    return {key: values for key, values in differences(before, now).items() if not is_free(key, before, now, done=done)}


def listed(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Changes for a message, one on a line."""
    return "\n".join(f"  {key}: was {short(was)}, now {short(now)}" for key, (was, now) in changes.items())


def is_free(key: str, before: RunConfig, now: RunConfig, *, done: int) -> bool:
    """Whether a run of which `done` steps are made may go on with `key` changed: it alters no result."""
    if key == "steps":
        # Only a constant learning rate is the same at each step whatever the number of steps.
        constant = all(agent.schedule.name == "constant" for agent in now.agents if agent.role != "author")
        return constant and now.steps >= done
    if key.endswith(".device"):
        # cuda:0 -> cuda:1 is the same arithmetic, cpu -> cuda is not.
        index = int(key.split(".")[1])
        kinds = [
            config.agents[index].device.partition(":")[0] for config in (before, now) if index < len(config.agents)
        ]
        return len(kinds) == 2 and kinds[0] == kinds[1]
    return _FREE_KEYS.fullmatch(key) is not None


def short(value: Any) -> str:
    """A value on one line, for a message."""
    text = json.dumps(value, ensure_ascii=False) if value != "(not set)" else value
    return text if len(text) <= 100 else f"{text[:97]}..."
