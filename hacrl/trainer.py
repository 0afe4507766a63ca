"""The loop: tasks go out to every agent, completions come back and are verified once, credit says what each rollout
is worth to each learner, each learner updates itself."""

from __future__ import annotations

import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
from hacrl.rewards import Verifier
from hacrl.run_directory import RunDirectory
from hacrl.run_state import RunState
from hacrl.step_metrics import execution_metrics, rollout_rows, step_metrics, timeline_rows
from hacrl.stop import StopRequest
from hacrl.trackers import RunTrackers
from hacrl.types import RolloutGroup, StepRecord


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
    sample, verify, update, save, export; at the first `sample` the records are those of the state to go on from.

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
            yield from _training_steps(config, prepared, stop, clock, restarts=restarts, last=restarts == most)
            return
        except AgentLostError as error:
            if restarts == most or stop.requested:
                raise
            restarts += 1
            warnings.warn(
                f"{error}\nrestart {restarts} of {most} (execution.restarts), from the last checkpoint", stacklevel=2
            )


def _training_steps(
    config: RunConfig, prepared: Prepared, stop: StopRequest, clock: Clock, *, restarts: int, last: bool
) -> Iterator[StepRecord]:
    """Open everything, go on from the latest checkpoint, close everything; whatever happened before. `last`: there is
    no further restart."""
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
            fleet = build_fleet(config, prepared, algorithm, directory.path, last_start=last)
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
                for name in fleet.absent:
                    warnings.warn(
                        f"agent {name} was let go and is not exported; `hacrl export {directory.path} --agent {name}` "
                        f"writes it from its last saved state",
                        stacklevel=2,
                    )
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
    state = RunState(config, prepared.train, fleet, capability, verifier)
    first = state.restore(directory)
    if first == 1 and config.evaluation.at_start and prepared.evaluation:
        with clock.phase("evaluate"):
            directory.record_start(evaluate_fleet(fleet, verifier, prepared.evaluation, step=0))
    clock.lap()
    clock.spans()
    fleet.lap()
    for step in range(first, config.steps + 1):
        if stop.requested:
            break
        state.sample_until(step + config.max_staleness)
        with clock.phase("sample"):
            state.ahead[0].sampling.wait()
        with clock.phase("verify"):
            groups = state.ahead[0].scoring.groups(fleet.names)
        if stop.requested:
            break
        state.ahead.popleft()
        groups, stale, staleness = without_stale(groups, fleet.weights_versions, most=config.max_staleness)
        rewards_PAG = reward_tensor(groups, fleet.names)
        capability.observe(rewards_PAG)
        credit = algorithm.credit(rewards_PAG, capability.estimate(), allowed_LA)
        with clock.phase("update"):
            updating = fleet.update(groups, credit, step=step)
            saves = step % config.checkpoint.every == 0 or step == config.steps or _evaluates_after(config, step)
            if not saves and not stop.requested:
                # Each agent goes on to this when it has been updated, and does not wait for the others to be.
                state.sample_until(step + 1 + config.max_staleness)
            updates = updating.wait()
        evaluation: list[dict[str, Any]] = []
        if _evaluates_after(config, step):
            with clock.phase("evaluate"):
                evaluation = evaluate_fleet(fleet, verifier, prepared.evaluation, step=step)
        seconds, lap = clock.lap(), fleet.lap()
        record = StepRecord(
            step=step,
            steps=config.steps,
            metrics=step_metrics(config, groups, credit, capability.estimate(), updates, seconds, tracker_failures)
            | execution_metrics(config, lap, restarts=restarts, stale=stale, staleness=staleness)
            | memory_metrics(),
            rollouts=tuple(rollout_rows(groups, fleet.names, credit, updates)),
            evaluation=tuple(evaluation),
            timeline=tuple(timeline_rows(lap, clock.spans())),
        )
        directory.record(record)
        if saves:
            with clock.phase("save"):
                state.save(directory, step, mean_score(evaluation))
            state.take_back_absent(step)
        yield record
    if stop.requested:
        # Weights and window are those of the last recorded step: nothing of the one in progress has been applied.
        with clock.phase("save"):
            state.save(directory, directory.recorded_steps, None)


def _evaluates_after(config: RunConfig, step: int) -> bool:
    every = config.evaluation.every
    return (every > 0 and step % every == 0) or (config.evaluation.at_end and step == config.steps)


# ---------------------------------------------------------------- stages


def without_stale(
    groups: Sequence[RolloutGroup], versions: Mapping[str, int], *, most: int
) -> tuple[list[RolloutGroup], dict[str, int], dict[str, float]]:
    """The groups without rollouts from weights that are more than `most` updates older than their author's (or newer,
    of an author that has gone back to an earlier state); how many were dropped, and the mean age of the rest."""
    stale, ages = dict.fromkeys(versions, 0), dict[str, list[int]]()
    fresh = []
    for group in groups:
        kept = []
        for rollout in group.rollouts:
            author = rollout.completion.author
            age = versions[author] - rollout.completion.weights_version
            if 0 <= age <= most:
                kept.append(rollout)
                ages.setdefault(author, []).append(age)
            else:
                stale[author] += 1
        fresh.append(dataclasses.replace(group, rollouts=tuple(kept)))
    return fresh, stale, {author: statistics.fmean(values) for author, values in ages.items()}


def reward_tensor(groups: Sequence[RolloutGroup], names: Sequence[str]) -> Tensor:
    """rewards_PAG in float64; NaN = no such rollout, or not scored."""
    place = {name: index for index, name in enumerate(names)}
    largest = max((rollout.completion.index + 1 for group in groups for rollout in group.rollouts), default=1)
    rewards_PAG = np.full((len(groups), len(names), largest), math.nan)
    for prompt, group in enumerate(groups):
        for rollout in group.rollouts:
            if rollout.verdict.reward is not None:
                rewards_PAG[prompt, place[rollout.completion.author], rollout.completion.index] = rollout.verdict.reward
    return torch.from_numpy(rewards_PAG)


# ---------------------------------------------------------------- parts from the configuration


def build_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm that the configuration names, hyper-parameters bound."""
    settings = config.algorithm
    if isinstance(settings, HacpoConfig):
        return Hacpo(**settings.model_dump(exclude={"name", "window", "score", "floor"}))
    kinds: dict[str, Callable[..., Algorithm]] = {"gspo": Gspo, "grpo": Grpo, "naive": Naive}
    return kinds[settings.name](**settings.model_dump(exclude={"name"}))


def build_fleet(
    config: RunConfig, prepared: Prepared, algorithm: Algorithm, directory: Path, *, last_start: bool = True
) -> Fleet:
    """The agents, loaded, where the configuration wants them; `directory` is the run's. `last_start`: an agent that is
    lost is not started anew with all the others."""
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
            restarted=not last_start,
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
    used = [set(config.authors_for(learner)) for learner in config.agents]
    return torch.tensor([[author.name in names for author in config.agents] for names in used])
