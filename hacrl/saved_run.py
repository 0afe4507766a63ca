"""A run's folder after training: its agents as they were at a checkpoint, evaluated or written out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hacrl.checkpoint import Checkpoint
from hacrl.config import RunConfig, load_config
from hacrl.encode import Encoder
from hacrl.errors import ConfigError, RunDirectoryError
from hacrl.evaluation import evaluate_fleet
from hacrl.execution.local import LocalFleet
from hacrl.export import model_card
from hacrl.preflight import prepare
from hacrl.rewards import Verifier
from hacrl.run_directory import saved_checkpoints
from hacrl.trainer import build_algorithm

CheckpointName = Literal["best", "last"] | int


def evaluate(
    source: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    checkpoint: CheckpointName | None = None,
) -> list[dict[str, Any]]:
    """Held-out accuracy of every agent: one entry per split and agent, as in `evaluations.jsonl`.

    A run's folder is evaluated with its own configuration and the weights of `checkpoint` (`last` if left out, `best`,
    or a step); anything else is a configuration whose models are evaluated as they are. `overrides` change the
    configuration for this evaluation alone, e.g. `evaluation.k=16`. Nothing is written.

    Raises: ConfigError, RunDirectoryError where there is no such checkpoint, and what the models and rewards raise.
    """
    directory = run_directory_of(source)
    if directory is None:
        if checkpoint is not None:
            raise ConfigError([f"checkpoint {checkpoint!r}: only the folder of a run has checkpoints, not {source}"])
        config, found = load_config(source, overrides), None
    else:
        config = load_config(directory / "config.yaml", overrides)
        found = find_checkpoint(directory, "last" if checkpoint is None else checkpoint)
    if not config.tasks.eval:
        raise ConfigError(["tasks.eval: no held-out tasks, so there is nothing to evaluate on; name a source there"])
    prepared = prepare(config)
    with (
        Verifier(
            prepared.rewards,
            workers=config.verification.workers,
            time_limit_s=config.verification.time_limit_s,
        ) as verifier,
        _fleet(config, prepared.encoders, found) as fleet,
    ):
        return evaluate_fleet(fleet, verifier, prepared.evaluation, step=found.step if found is not None else 0)


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
def _fleet(config: RunConfig, encoders: Mapping[str, Encoder], checkpoint: Checkpoint | None) -> Iterator[LocalFleet]:
    # Nothing is trained here, so no agent needs a copy of its starting weights.
    agents = [agent.model_copy(update={"kl_coefficient": 0.0}) for agent in config.agents]
    config = config.model_copy(update={"agents": agents})
    fleet = LocalFleet(config, encoders, build_algorithm(config), dump_directory=Path(config.output) / "nonfinite")
    try:
        if checkpoint is not None:
            fleet.load(checkpoint.path / "agents", weights_only=True)
        yield fleet
    finally:
        fleet.close()
