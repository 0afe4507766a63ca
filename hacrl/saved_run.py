"""Agents evaluated, as a run's checkpoint has them or as they are; and a run's agents written out."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hacrl.benchmarks import load_benchmarks
from hacrl.checkpoint import Checkpoint
from hacrl.config import RunConfig, load_config
from hacrl.encode import Encoder
from hacrl.environment import versions
from hacrl.errors import ConfigError, RunDirectoryError
from hacrl.evaluation import evaluate_fleet
from hacrl.execution.local import LocalFleet
from hacrl.export import model_card
from hacrl.preflight import Prepared, prepare
from hacrl.rewards import Verifier, gold_scores
from hacrl.run_directory import saved_checkpoints
from hacrl.trainer import build_algorithm
from hacrl.types import Task

CheckpointName = Literal["best", "last"] | int


def evaluate(
    source: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    checkpoint: CheckpointName | None = None,
    benchmarks: Sequence[str] = (),
    data: str | Path | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Accuracy of every agent on held-out tasks: one entry per source of tasks and agent.

    `source` is a run's folder, evaluated with its own configuration and the weights of `checkpoint` (`last` if left
    out, `best`, or a step); a configuration, whose models are evaluated as they are; or, with `benchmarks`, also a
    model: its folder or hub id. `benchmarks` names sets of `hacrl.benchmarks` to take the place of the configuration's
    held-out tasks, evaluation settings and reward; their tasks come from the hub, or from files in the folder `data`.
    `limit` uses that many tasks of each source. `overrides` change whatever results for this evaluation alone, e.g.
    `evaluation.k=16`. Nothing is written.

    An entry has the fields of `evaluations.jsonl` and, so that it can be read by itself: `tasks_from` (the source's
    options), `sampling`, `reward`, and `grader` (versions of what judges).

    Raises: ConfigError, RunDirectoryError where there is no such checkpoint, and what the models and rewards raise.
    """
    chosen = [item if data is None else item.found_in(Path(data)) for item in load_benchmarks(benchmarks)]
    if data is not None and not chosen:
        raise ConfigError([f"data {str(data)!r}: it holds benchmarks; name them, e.g. --benchmark math500"])
    config, found, alone = _subject(source, checkpoint, benchmarks=bool(chosen))
    configs = [load_config(item.applied_to(config.model_dump()), overrides) for item in chosen]
    configs = [_limited(item, limit) for item in configs or [load_config(config, overrides)]]
    if not configs[0].tasks.eval:
        raise ConfigError(
            ["tasks.eval: no held-out tasks, so there is nothing to evaluate on; name a source there, or a benchmark"]
        )
    prepared = _prepared(configs, hint=_DATA_HINT if chosen and data is None else None)
    entries: list[dict[str, Any]] = []
    for benchmark, parts in zip(chosen, prepared, strict=False):
        tasks = len(parts.evaluation[benchmark.name])
        if limit is None and tasks != benchmark.size:
            warnings.warn(
                f"{benchmark.name}: {tasks} tasks here, and the benchmark is known to have {benchmark.size}; compare "
                f"figures on the same tasks only",
                RuntimeWarning,
                stacklevel=2,
            )
    with _fleet(configs[0], prepared[0].encoders, found, alone=alone) as fleet:
        for item, parts in zip(configs, prepared, strict=True):
            with Verifier(
                parts.rewards, workers=item.verification.workers, time_limit_s=item.verification.time_limit_s
            ) as verifier:
                _tell_unscorable(verifier, parts.evaluation)
                step = found.step if found is not None else 0
                made = evaluate_fleet(fleet, verifier, parts.evaluation, step=step, settings=item.evaluation)
            entries += [{**entry, **_circumstances(item, entry)} for entry in made]
    return entries


_DATA_HINT = "benchmarks come from the Hugging Face hub; without it, name a folder with their files: --data DIR"
# What decides whether an answer is right.
_GRADER = ("hacrl", "math-verify", "latex2sympy2-extended", "sympy", "antlr4-python3-runtime")


def _subject(
    source: str | Path | Mapping[str, Any] | RunConfig, checkpoint: CheckpointName | None, *, benchmarks: bool
) -> tuple[RunConfig, Checkpoint | None, bool]:
    """The configuration whose agents are evaluated, the checkpoint with their weights, and whether it is a model alone,
    which needs benchmarks to be evaluated on."""
    directory = run_directory_of(source)
    if directory is not None and (directory / "config.yaml").is_file():
        found = find_checkpoint(directory, "last" if checkpoint is None else checkpoint)
        return load_config(directory / "config.yaml"), found, False
    if checkpoint is not None:
        raise ConfigError([f"checkpoint {checkpoint!r}: only the folder of a run has checkpoints, not {source}"])
    if directory is not None and not (directory / "config.json").is_file():
        raise ConfigError([f"{directory}: holds neither a run (config.yaml) nor a model (config.json)"])
    if directory is not None and not benchmarks:
        raise ConfigError([f"{directory}: a model alone has no held-out tasks; name a benchmark, e.g. math500"])
    if directory is not None or (benchmarks and isinstance(source, str | Path) and _is_hub_id(str(source))):
        return _model_config(str(source)), None, True
    return load_config(source), None, False


def _is_hub_id(source: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and Path(source).suffix not in (".yaml", ".yml")


def _model_config(model: str) -> RunConfig:
    """A configuration around one model, for evaluation alone."""
    name = re.sub(r"[^\w.-]|^[^A-Za-z0-9]+", "", Path(model).absolute().name) or "model"
    return load_config(
        {
            "agents": [{"name": name, "model": model}],
            "tasks": {"train": {"dataset": "none"}},
            "reward": "math",
            "algorithm": "gspo",
            "steps": 1,
            "prompts_per_step": 1,
            "output": "none",
        }
    )


def _limited(config: RunConfig, limit: int | None) -> RunConfig:
    if limit is None:
        return config
    sources = {name: source.model_copy(update={"limit": limit}) for name, source in config.tasks.eval.items()}
    return config.model_copy(update={"tasks": config.tasks.model_copy(update={"eval": sources})})


def _prepared(configs: Sequence[RunConfig], *, hint: str | None) -> list[Prepared]:
    """Everything that needs no model, of all configurations; their faults are told together."""
    prepared: list[Prepared] = []
    problems: list[str] = []
    for config in configs:
        try:
            prepared.append(prepare(config, training=False))
        except ConfigError as error:
            problems += error.problems
    if problems:
        if hint is not None and any("cannot be loaded" in problem for problem in problems):
            problems.append(hint)
        raise ConfigError(list(dict.fromkeys(problems)))
    return prepared


def _tell_unscorable(verifier: Verifier, splits: Mapping[str, Sequence[Task]]) -> None:
    for name, tasks in splits.items():
        failed = [score for score in gold_scores(verifier, tasks, len(tasks)) if not score.full]
        if failed:
            warnings.warn(
                f"{name}: {len(failed)} of {len(tasks)} references do not get the full score as answers, so no answer "
                f"to these can be right; the first is {failed[0].task_id}: {failed[0].completion!r:.80}",
                RuntimeWarning,
                stacklevel=3,
            )


def _circumstances(config: RunConfig, entry: Mapping[str, Any]) -> dict[str, Any]:
    settings, agent = config.evaluation, config.agent(entry["agent"])
    return {
        "tasks_from": config.tasks.eval[entry["split"]].model_dump(exclude_none=True),
        "sampling": {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_new_tokens": settings.max_new_tokens or config.sampling_of(agent).max_new_tokens,
        },
        "reward": [reward.model_dump() for reward in config.reward],
        "grader": versions(_GRADER),
    }


def export(
    directory: str | Path,
    *,
    checkpoint: CheckpointName = "last",
    agents: Sequence[str] = (),
    adapter: bool = False,
    output: str | Path | None = None,
) -> list[Path]:
    """Write a run's learners as ordinary Hugging Face folders `output/<name>/`, and return these folders.

    `agents` names those to write, all learners if left out; `adapter` writes LoRA agents as peft adapters instead of
    merged into their base; `output` is the run's own `agents/` if left out.

    Raises: RunDirectoryError, ConfigError for a name that is no learner of the run, ModelError.
    """
    directory = Path(directory)
    config = load_config(directory / "config.yaml")
    found = find_checkpoint(directory, checkpoint)
    learners = [agent for agent in config.agents if agent.role != "author"]
    known = ", ".join(agent.name for agent in learners)
    problems = [
        f"agent {name!r}: no agent of this run that was trained; learners are {known}"
        for name in agents
        if name not in {agent.name for agent in learners}
    ]
    if problems:
        raise ConfigError(problems)
    # The card tells of the steps behind the weights, which may be fewer than the run was to make.
    done = config.model_copy(update={"steps": found.step})
    cards = {agent.name: model_card(done, agent) for agent in learners}
    if agents:
        learners = [agent for agent in learners if agent.name in agents]
    # Validated as a whole above; a part of the agents need not make a run.
    config = config.model_copy(update={"agents": learners, "export": "adapter" if adapter else "merged"})
    folder = Path(output) if output is not None else directory / "agents"
    encoders = {agent.name: Encoder.from_config(agent) for agent in learners}
    with _fleet(config, encoders, found) as fleet:
        fleet.export(folder, cards)
    return [folder / agent.name for agent in learners]


def find_checkpoint(directory: Path, checkpoint: CheckpointName) -> Checkpoint:
    """The checkpoint `last`, `best` or of a step. Raises RunDirectoryError where there is none."""
    store = saved_checkpoints(directory)
    if isinstance(checkpoint, int):
        return store.at(checkpoint)
    found = store.best() if checkpoint == "best" else store.latest()
    if found is None:
        wanted = "no checkpoint has a held-out score" if checkpoint == "best" and store.steps() else "no checkpoint"
        raise RunDirectoryError(
            f"{store.path}: {wanted}; " + ("use --checkpoint last" if store.steps() else "train the run first")
        )
    return found


def run_directory_of(source: str | Path | Mapping[str, Any] | RunConfig) -> Path | None:
    """The run's folder that `source` names, None where it is a configuration."""
    return Path(source) if isinstance(source, str | Path) and Path(source).is_dir() else None


@contextlib.contextmanager
def _fleet(
    config: RunConfig, encoders: Mapping[str, Encoder], checkpoint: Checkpoint | None, *, alone: bool = False
) -> Iterator[LocalFleet]:
    # Nothing is trained here, so no agent needs a copy of its starting weights, and a model alone no learner either.
    changes: dict[str, Any] = {"kl_coefficient": 0.0} | ({"role": "author"} if alone else {})
    agents = [agent.model_copy(update=changes) for agent in config.agents]
    config = config.model_copy(update={"agents": agents})
    fleet = LocalFleet(config, encoders, build_algorithm(config), dump_directory=Path(config.output) / "nonfinite")
    try:
        if checkpoint is not None:
            fleet.load(checkpoint.path / "agents", weights_only=True)
        yield fleet
    finally:
        fleet.close()
