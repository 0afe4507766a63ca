"""The loop: tasks go out to every agent, completions come back and are verified once, credit says what each rollout
is worth to each learner, each learner updates itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hacrl.algorithms.algorithm import Algorithm
from hacrl.algorithms.capability import CapabilityTracker
from hacrl.algorithms.grpo import Grpo
from hacrl.algorithms.gspo import Gspo
from hacrl.algorithms.hacpo import Hacpo
from hacrl.algorithms.naive import Naive
from hacrl.clock import Clock
from hacrl.config import HacpoConfig, RayConfig, RunConfig, load_config
from hacrl.errors import AgentLostError
from hacrl.evaluation import evaluate_fleet, mean_score
from hacrl.execution.fleet import Fleet
from hacrl.execution.local import LocalFleet
from hacrl.export import model_card
from hacrl.preflight import Prepared, prepare
from hacrl.process import memory_metrics
from hacrl.rewards import Verifier, check_any_scored
from hacrl.run_directory import RunDirectory
from hacrl.step_metrics import execution_metrics, rollout_rows, step_metrics
from hacrl.stop import StopRequest
from hacrl.tasks import batch
from hacrl.trackers import RunTrackers
from hacrl.types import Completion, Rollout, RolloutGroup, StepRecord, Task


def train(source: str | Path | Mapping[str, Any] | RunConfig, overrides: Sequence[str] = ()) -> Path:
    """Run, or continue, a training run to its end and return its run directory. See `training_steps`."""
    config = load_config(source, overrides)
    for _ in training_steps(config):
        pass
    return Path(config.output)


def training_steps(
    source: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    stop: StopRequest | None = None,
    on_phase: Callable[[str], None] | None = None,
) -> Iterator[StepRecord]:
    """The records of a run, one per step, each yielded once it is on disk and with the configured trackers.

    A run directory that holds an unfinished run of the same configuration is continued from its latest checkpoint,
    exactly as if it had not been interrupted. `stop` ends the run at the next safe point, with a checkpoint. Closing
    the generator early leaves a run that can be continued. `on_phase` is told what begins: prepare, load, evaluate,
    sample, verify, update, export; at the first `sample` the records are those of the state to go on from.

    Raises: ConfigError for every fault that shows before a model loads; RunDirectoryError, ModelError, RewardError,
    NonFiniteError as they are described in `hacrl.errors`; under `execution: ray` also ClusterError, AgentError, and
    AgentLostError once `execution.restarts` are used up. After a restart steps behind the last checkpoint are made, and
    yielded, again.
    """
    config = load_config(source, overrides)
    clock = Clock(on_phase)
    with clock.phase("prepare"):
        prepared = prepare(config)
    for name, count in prepared.dropped_tasks.items():
        if count:
            warnings.warn(f"tasks.{name}: {count} task(s) left out (long_prompts, trained_questions)", stacklevel=2)
    stop = stop or StopRequest()
    restarts, most = 0, config.execution.restarts if isinstance(config.execution, RayConfig) else 0
    while True:
        try:
            yield from _training_steps(config, prepared, stop, clock, restarts=restarts)
            return
        except AgentLostError as error:
            if restarts == most or stop.requested:
                raise
            restarts += 1
            warnings.warn(
                f"{error}\nrestart {restarts} of {most} (execution.restarts), from the last checkpoint", stacklevel=2
            )


def _training_steps(
    config: RunConfig, prepared: Prepared, stop: StopRequest, clock: Clock, *, restarts: int
) -> Iterator[StepRecord]:
    """Open everything, go on from the latest checkpoint, close everything; whatever happened before."""
    algorithm = build_algorithm(config)
    with (
        RunDirectory.open(config.output, config) as directory,
        Verifier(
            prepared.rewards,
            workers=config.verification.workers,
            time_limit_s=config.verification.time_limit_s,
        ) as verifier,
        RunTrackers.open(config, directory) as trackers,
    ):
        with clock.phase("load"):
            fleet = build_fleet(config, prepared, algorithm, directory.path)
        try:
            made = False
            steps = _steps(
                config, prepared, directory, verifier, fleet, algorithm, stop, clock, trackers.failures, restarts
            )
            for record in steps:
                made = True
                trackers.record(record)
                yield record
            trackers.catch_up()
            exported = directory.path / "agents"
            # A finished run that is started again keeps what it exported, unless a kill left some of it out.
            missing = any(agent.role != "author" and not (exported / agent.name).exists() for agent in config.agents)
            if config.export != "none" and not stop.requested and (made or missing):
                with clock.phase("export"):
                    fleet.export(exported, {agent.name: model_card(config, agent) for agent in config.agents})
        finally:
            fleet.close()


def _steps(
    config: RunConfig,
    prepared: Prepared,
    directory: RunDirectory,
    verifier: Verifier,
    fleet: Fleet,
    algorithm: Algorithm,
    stop: StopRequest,
    clock: Clock,
    tracker_failures: Mapping[str, int],
    restarts: int,
) -> Iterator[StepRecord]:
    capability = build_capability_tracker(config)
    allowed_LA = allowed_authors(config)
    first = _restore(config, prepared, directory, verifier, fleet, capability, clock)
    clock.lap()
    fleet.lap()
    for step in range(first, config.steps + 1):
        if stop.requested:
            break
        tasks = batch(prepared.train, step=step, prompts_per_step=config.prompts_per_step, seed=config.seed)
        with clock.phase("sample"):
            completions = fleet.sample(tasks, step=step)
        with clock.phase("verify"):
            groups = verify(tasks, completions, verifier)
        if stop.requested:
            break
        rewards_PAG = reward_tensor(groups, fleet.names)
        capability.observe(rewards_PAG)
        credit = algorithm.credit(rewards_PAG, capability.estimate(), allowed_LA)
        with clock.phase("update"):
            updates = fleet.update(groups, credit, step=step)
        evaluation: list[dict[str, Any]] = []
        if _evaluates_after(config, step):
            with clock.phase("evaluate"):
                evaluation = evaluate_fleet(fleet, verifier, prepared.evaluation, step=step)
        record = StepRecord(
            step=step,
            steps=config.steps,
            metrics=step_metrics(config, groups, credit, capability.estimate(), updates, clock.lap(), tracker_failures)
            | execution_metrics(config, fleet.lap(), restarts=restarts)
            | memory_metrics(),
            rollouts=tuple(rollout_rows(groups, fleet.names, credit, updates)),
            evaluation=tuple(evaluation),
        )
        directory.record(record)
        if step % config.checkpoint.every == 0 or step == config.steps or evaluation:
            _save(directory, step, fleet, capability, mean_score(evaluation))
        yield record
    if stop.requested:
        # Weights and window are those of the last recorded step: nothing of the one in progress has been applied.
        _save(directory, directory.recorded_steps, fleet, capability, None)


def _restore(
    config: RunConfig,
    prepared: Prepared,
    directory: RunDirectory,
    verifier: Verifier,
    fleet: Fleet,
    capability: CapabilityTracker,
    clock: Clock,
) -> int:
    """Bring everything to the state after the latest checkpoint; returns the step to make next."""
    checkpoint = directory.resume_from
    if checkpoint is not None:
        fleet.load(checkpoint.path / "agents")
        capability.load_state_dict(checkpoint.state["capability"])
    # After loading: a load that fails must not have cost the records of later steps.
    directory.rewind(checkpoint)
    if checkpoint is not None:
        return checkpoint.step + 1
    if config.evaluation.at_start and prepared.evaluation:
        with clock.phase("evaluate"):
            directory.record_start(evaluate_fleet(fleet, verifier, prepared.evaluation, step=0))
    return 1


def _save(directory: RunDirectory, step: int, fleet: Fleet, capability: CapabilityTracker, score: float | None) -> None:
    directory.save(
        step,
        lambda folder: fleet.save(folder / "agents"),
        state={"capability": capability.state_dict()},
        score=score,
    )


def _evaluates_after(config: RunConfig, step: int) -> bool:
    every = config.evaluation.every
    return (every > 0 and step % every == 0) or (config.evaluation.at_end and step == config.steps)


# ---------------------------------------------------------------- stages


def verify(tasks: Sequence[Task], completions: Sequence[Completion], verifier: Verifier) -> list[RolloutGroup]:
    """Score every completion once, and gather the rollouts of all authors by task, in the order of the tasks."""
    by_task: dict[str, list[Completion]] = {task.id: [] for task in tasks}
    for completion in completions:
        by_task[completion.task_id].append(completion)
    flat = [(task, completion) for task in tasks for completion in by_task[task.id]]
    verdicts = verifier.verify([task for task, _ in flat], [completion.text for _, completion in flat])
    check_any_scored(verdicts)
    rollouts: dict[str, list[Rollout]] = {task.id: [] for task in tasks}
    for (task, completion), verdict in zip(flat, verdicts, strict=True):
        rollouts[task.id].append(Rollout(completion=completion, verdict=verdict))
    return [RolloutGroup(task=task, rollouts=tuple(rollouts[task.id])) for task in tasks]


def reward_tensor(groups: Sequence[RolloutGroup], names: Sequence[str]) -> Tensor:
    """rewards_PAG in float64; NaN = no such rollout, or not scored."""
    place = {name: index for index, name in enumerate(names)}
    largest = max((rollout.completion.index + 1 for group in groups for rollout in group.rollouts), default=1)
    rewards_PAG = torch.full((len(groups), len(names), largest), math.nan, dtype=torch.float64)
    for prompt, group in enumerate(groups):
        for rollout in group.rollouts:
            if rollout.verdict.reward is not None:
                rewards_PAG[prompt, place[rollout.completion.author], rollout.completion.index] = rollout.verdict.reward
    return rewards_PAG


# ---------------------------------------------------------------- parts from the configuration


def build_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm that the configuration names, hyper-parameters bound."""
    settings = config.algorithm
    if isinstance(settings, HacpoConfig):
        return Hacpo(**settings.model_dump(exclude={"name", "window", "score", "floor"}))
    kinds: dict[str, Callable[..., Algorithm]] = {"gspo": Gspo, "grpo": Grpo, "naive": Naive}
    return kinds[settings.name](**settings.model_dump(exclude={"name"}))


def build_fleet(config: RunConfig, prepared: Prepared, algorithm: Algorithm, directory: Path) -> Fleet:
    """The agents, loaded, where the configuration wants them; `directory` is the run's."""
    batches, engine_logs = directory / "nonfinite", directory / "engines"
    if isinstance(config.execution, RayConfig):
        from hacrl.execution.ray_fleet import RayFleet

        return RayFleet(
            config,
            config.execution,
            algorithm,
            dump_directory=batches,
            log_directory=directory / "processes",
            engine_log_directory=engine_logs,
        )
    return LocalFleet(config, prepared.encoders, algorithm, dump_directory=batches, log_directory=engine_logs)


def build_capability_tracker(config: RunConfig) -> CapabilityTracker:
    """Capability is measured under every algorithm, so that runs can be compared; only HACPO uses it."""
    settings = config.algorithm if isinstance(config.algorithm, HacpoConfig) else HacpoConfig()
    return CapabilityTracker(
        [agent.name for agent in config.agents],
        window=settings.window,
        score=settings.score,
        floor=settings.floor,
    )


def allowed_authors(config: RunConfig) -> Tensor:
    """allowed_LA (bool): may learner l use rollouts of author a."""
    return torch.tensor(
        [[author.name in config.authors_for(learner) for author in config.agents] for learner in config.agents]
    )
