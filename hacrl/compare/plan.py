"""What a comparison runs: each method's configuration for each seed, with the budget made equal on one axis.

rollouts   the number of steps of each method is set so that all methods sample as many rollouts in training as the
           first one. Evaluation does not count.
updates    the same with optimizer updates, summed over learners, as many as the rows of a step can make at the most:
           a sharing method makes more of them from the same rollouts.
tokens     tokens sampled in training; seconds: time spent in training. Both are known only afterwards. Every method
           makes the configured steps, and each run is read at its last evaluation within the budget, which is the
           least that any run used.

`gspo-x2` is by definition twice the rollouts and updates over the same steps (the paper's Table 1), and a method whose
own overrides name `steps` has said how long it runs. Neither is fitted to the budget nor limits it; what they spent
stands in the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel

from hacrl.config import GrpoConfig, GspoConfig, HacpoConfig, NaiveConfig, RunConfig, load_config
from hacrl.config_changes import differences, short
from hacrl.errors import ConfigError

Axis = Literal["rollouts", "updates", "tokens", "seconds"]
AXES: tuple[Axis, ...] = get_args(Axis)

ALGORITHMS: dict[str, type[BaseModel]] = {
    "hacpo": HacpoConfig,
    "gspo": GspoConfig,
    "gspo-x2": GspoConfig,
    "grpo": GrpoConfig,
    "naive": NaiveConfig,
}
DEFAULT_METHODS = "hacpo,gspo,gspo-x2,grpo,naive"
ABLATIONS = (
    "hacpo:capability_advantage=false",
    "hacpo:capability_coefficient=false",
    *(f"hacpo:alpha={alpha}" for alpha in range(4)),
    "hacpo:clipping=fixed",
    "hacpo:clipping=none",
    "hacpo:clipping=truncated",
)

# A comparison keeps one checkpoint of a run, from which it goes on if it was interrupted, and no exported models.
FRUGAL = ("export=none", "checkpoint.keep_last=1", "checkpoint.keep_best=false")
# What has to be the same for every method, or the difference would not be the method's.
_COMMON = re.compile(r"agents\.\d+\.(name|model|gguf_file|revision|tokenizer)|(tasks|reward|evaluation|seed)(\..+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One method: an algorithm and what it changes in the common configuration, in the form of overrides."""

    name: str
    algorithm: str
    overrides: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9._=,+-]", "_", self.name)

    @property
    def keeps_steps(self) -> bool:
        """Whether it makes the steps it says, whatever the others spend."""
        return self.algorithm == "gspo-x2" or any(override.startswith("steps=") for override in self.overrides)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run of a comparison; `config.output` is its run directory."""

    method: str
    seed: int
    name: str
    config: RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A whole comparison. `runs` go seed by seed, so that what is there after a while can be compared already."""

    output: Path
    axis: Axis
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]


def make_plan(
    source: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    methods: str | Path | Sequence[str] = DEFAULT_METHODS,
    seeds: int = 5,
    axis: str = "rollouts",
    ablations: bool = False,
    output: str | Path | None = None,
) -> Plan:
    """Everything that a comparison runs, checked; nothing heavy is loaded and nothing is written.

    `methods` is what `read_methods` takes. Seeds are the configuration's own and the `seeds - 1` numbers after it.
    `ablations` adds those of `ABLATIONS` that differ from the configuration's own HACPO. `output` is the
    configuration's with `-compare` behind if left out.

    Raises ConfigError with the faults of all methods.
    """
    problems = [f"axis: got {axis!r}, must be one of {', '.join(AXES)}"] if axis not in AXES else []
    if seeds < 1:
        problems.append(f"seeds: got {seeds}; at least one is needed, and five or more to tell a difference from luck")
    chosen = read_methods(methods)
    base = load_config(source, overrides)
    if not base.tasks.eval:
        problems.append("tasks.eval: no held-out tasks, so there is nothing to compare by; name a source there")
    if not base.evaluation.at_end:
        problems.append("evaluation.at_end: false, but methods are compared by their last evaluation; leave it out")
    if axis in ("tokens", "seconds") and base.evaluation.every == 0:
        problems.append(
            f"evaluation.every: 0, but with axis {axis} runs are read at their last evaluation within the budget; set "
            f"it to a tenth of the steps or so"
        )
    if problems:
        raise ConfigError(problems)
    output = Path(output) if output is not None else Path(f"{base.output}-compare")
    if ablations:
        full, *others = read_methods(["hacpo", *ABLATIONS])
        configs = _configs(source, overrides, [full, *others], base, output)
        own = configs[full.name].algorithm
        chosen += [other for other in others if other not in chosen and configs[other.name].algorithm != own]
    numbers = range(base.seed, base.seed + seeds)
    steps = _fitted_steps(chosen, _configs(source, overrides, chosen, base, output), base.steps, axis)
    runs = []
    for seed in numbers:
        configs = _configs(source, [*overrides, f"seed={seed}"], chosen, base, output, steps=steps)
        runs += [
            Run(method=method.name, seed=seed, name=f"{method.folder}/seed-{seed}", config=configs[method.name])
            for method in chosen
        ]
    return Plan(output=output, axis=axis, methods=tuple(chosen), seeds=tuple(numbers), runs=tuple(runs))  # type: ignore[arg-type]


# ---------------------------------------------------------------- methods


def read_methods(methods: str | Path | Sequence[str]) -> list[Method]:
    """Methods from text, from a list of texts, or from a YAML file.

    Text: names separated by commas, each with overrides of its own after a colon, e.g.
    `hacpo,hacpo:alpha=3,delta=0.4,gspo:agents.*.learning_rate=2e-4`. An option of the algorithm needs no `algorithm.`
    before it. YAML: a mapping of any names to their overrides, `algorithm` among them where the name is none:

        gspo: {agents.*.learning_rate: 2e-4}
        hacpo-wide: {algorithm: hacpo, delta: 0.5}

    Raises ConfigError.
    """
    if isinstance(methods, Path) or (isinstance(methods, str) and methods.endswith((".yaml", ".yml"))):
        found = _methods_of_file(Path(methods))
    else:
        text = methods if isinstance(methods, str) else ",".join(methods)
        found = [_method_of_text(part) for part in _split(text)]
    problems: list[str] = []
    if not found:
        problems.append(f"methods: none given; name some of {', '.join(ALGORITHMS)}")
    names: dict[str, str] = {}
    for method in found:
        if method.algorithm not in ALGORITHMS:
            problems.append(
                f"methods: {method.name!r}: the algorithm is {method.algorithm!r}, must be one of "
                f"{', '.join(ALGORITHMS)}"
            )
        if method.folder in names:
            problems.append(f"methods: {method.name!r} and {names[method.folder]!r} have the same folder; rename one")
        names[method.folder] = method.name
    if problems:
        raise ConfigError(problems)
    return found


def _split(text: str) -> list[str]:
    # A comma also separates overrides: a part without a colon before its `=` goes on with the method before it.
    parts: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        head = part.partition("=")[0]
        if parts and "=" in part and ":" not in head:
            parts[-1] += f",{part}"
        elif part:
            parts.append(part)
    return parts


def _method_of_text(text: str) -> Method:
    algorithm, _, rest = text.partition(":")
    overrides = tuple(_full_key(part, algorithm) for part in rest.split(",") if part)
    return Method(name=text, algorithm=algorithm, overrides=overrides)


def _methods_of_file(path: Path) -> list[Method]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # Read as configurations are, where 2e-4 is a number.
        data: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"methods: {path}: cannot be read as YAML: {' '.join(str(error).split())}"]) from error
    found = []
    for name, options in data.items() if isinstance(data, dict) else ():
        if not isinstance(options, Mapping | None):
            raise ConfigError(
                [f"methods: {path}: {name}: got {options!r}; must be a mapping of options, {{}} for none"]
            )
        own: dict[str, Any] = {str(key): value for key, value in (options or {}).items()}
        algorithm = str(own.pop("algorithm", name))
        overrides = tuple(_full_key(f"{key}={json.dumps(value)}", algorithm) for key, value in own.items())
        found.append(Method(name=str(name), algorithm=algorithm, overrides=overrides))
    return found


def _full_key(override: str, algorithm: str) -> str:
    section = ALGORITHMS.get(algorithm)
    key = override.partition("=")[0].partition(".")[0]
    return f"algorithm.{override}" if section is not None and key in section.model_fields else override


# ---------------------------------------------------------------- configurations


def _configs(
    source: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str],
    methods: Sequence[Method],
    base: RunConfig,
    output: Path,
    *,
    steps: Mapping[str, int] | None = None,
) -> dict[str, RunConfig]:
    """Each method's configuration, read anew from the source so that references such as ${seed} are followed."""
    problems: list[str] = []
    configs: dict[str, RunConfig] = {}
    common = load_config(source, overrides, output=str(output))
    for method in methods:
        given = [*FRUGAL, *overrides, *_algorithm(method, base), *method.overrides]
        if steps and method.name in steps:
            given.append(f"steps={steps[method.name]}")
        try:
            config = load_config(source, given)
        except ConfigError as error:
            problems += [f"method {method.name}: {problem}" for problem in error.problems]
            continue
        place = output / "runs" / method.folder / f"seed-{config.seed}"
        config = config.model_copy(update={"output": str(place)})
        problems += [
            f"method {method.name}: {key} is {short(now)} where the others have {short(was)}; what a comparison "
            f"compares by is the same for every method, so give it as an override of them all"
            for key, (was, now) in differences(common, config).items()
            if _COMMON.fullmatch(key)
        ]
        configs[method.name] = config
    if problems:
        raise ConfigError(problems)
    return configs


def _fitted_steps(methods: Sequence[Method], configs: Mapping[str, RunConfig], steps: int, axis: str) -> dict[str, int]:
    """The steps of each method that is fitted to the budget of the first such method; none on the other axes."""
    fitted = [method.name for method in methods if not method.keeps_steps]
    if axis not in ("rollouts", "updates") or not fitted:
        return {}
    per_step = rollouts_per_step if axis == "rollouts" else updates_per_step
    budget = steps * per_step(configs[fitted[0]])
    return {name: max(1, round(budget / per_step(configs[name]))) for name in fitted}


def rollouts_per_step(config: RunConfig) -> int:
    """Rollouts of one step, all agents together."""
    return config.prompts_per_step * sum(config.group_size_of(agent) for agent in config.agents)


def updates_per_step(config: RunConfig) -> int:
    """Most optimizer updates of one step, summed over learners."""
    return sum(sum(config.updates_per_step(agent)) for agent in config.agents if agent.role != "author")


def _algorithm(method: Method, base: RunConfig) -> list[str]:
    """The override that selects the method's algorithm.

    The configuration's own settings stay where it is the same algorithm. Where it is another, those settings that mean
    the same in both go over: the clip of own rows unless one of them is GRPO, whose clip is one of tokens.
    """
    algorithm = "gspo" if method.algorithm == "gspo-x2" else method.algorithm
    own: dict[str, Any] = base.algorithm.model_dump()
    if own["name"] == algorithm:
        shared = own
    else:
        same = {"epsilon"} if "grpo" in (own["name"], algorithm) else {"epsilon", "clip_low", "clip_high"}
        shared = {key: value for key, value in own.items() if key in same}
    return [f"algorithm={json.dumps(shared | {'name': method.algorithm})}"]
