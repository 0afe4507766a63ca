"""What the loop holds between two steps, and what a checkpoint keeps of it."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl.algorithms.capability import CapabilityTracker
from hacrl.checkpoint import step_name
from hacrl.config import RayConfig, RunConfig
from hacrl.execution.fleet import Fleet, Sampling
from hacrl.rewards import Scoring, Verifier
from hacrl.run_directory import RunDirectory
from hacrl.tasks import batch
from hacrl.types import Task, completion_from_json

# In a checkpoint: rollouts of later steps, sampled with the weights that `max_staleness` gives them.
_AHEAD = "ahead"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """A step whose rollouts are being sampled, and scored as they arrive."""

    step: int
    sampling: Sampling
    scoring: Scoring


class RunState:
    """`ahead` are the steps that have been begun and not been learned from, in order."""

    def __init__(
        self,
        config: RunConfig,
        tasks: Sequence[Task],
        fleet: Fleet,
        capability: CapabilityTracker,
        verifier: Verifier,
    ) -> None:
        self.ahead: deque[Ahead] = deque()
        self._config = config
        self._tasks = tasks
        self._fleet = fleet
        self._capability = capability
        self._verifier = verifier
        self._next_sampled = 1
        self._saved_agents: Path | None = None
        self._absent_since: int | None = None

    def sample_until(self, step: int) -> None:
        """Begin to sample all steps up to this one that have not been begun, as far as the run has so many."""
        while self._next_sampled <= min(step, self._config.steps):
            tasks = self._tasks_of(self._next_sampled)
            scoring = Scoring(self._verifier, tasks)
            sampling = self._fleet.sample(tasks, step=self._next_sampled, deliver=scoring.add)
            self.ahead.append(Ahead(step=self._next_sampled, sampling=sampling, scoring=scoring))
            self._next_sampled += 1

    def restore(self, directory: RunDirectory) -> int:
        """Bring agents, capability and records to the state after the latest checkpoint; returns the step to make
        next."""
        checkpoint = directory.resume_from
        if checkpoint is not None:
            self._saved_agents = checkpoint.path / "agents"
            self._fleet.load(self._saved_agents)
            self._capability.load_state_dict(checkpoint.state["capability"])
        # After loading: a load that fails must not have cost the records of later steps.
        directory.rewind(checkpoint)
        if checkpoint is None:
            return 1
        self._next_sampled = checkpoint.step + 1
        for file in sorted((checkpoint.path / _AHEAD).glob("step-*.jsonl")):
            self.ahead.append(self._sampled_before(file))
            self._next_sampled += 1
        return checkpoint.step + 1

    def save(self, directory: RunDirectory, step: int, score: float | None) -> None:
        """A checkpoint of the state after `step`. Rollouts are kept where no later weights could sample them again."""

        def write(folder: Path) -> None:
            self._fleet.save(folder / "agents", before=self._saved_agents)
            for item in self.ahead if self._config.max_staleness > 0 else ():
                item.sampling.wait()
                (folder / _AHEAD).mkdir(exist_ok=True)
                lines = [json.dumps(dataclasses.asdict(completion)) + "\n" for completion in item.scoring.completions]
                (folder / _AHEAD / f"{step_name(item.step)}.jsonl").write_text("".join(lines), encoding="utf-8")

        state = {"capability": self._capability.state_dict()}
        self._saved_agents = directory.save(step, write, state=state, score=score).path / "agents"

    def take_back_absent(self, step: int) -> None:
        """Every `execution.rejoin_every` steps, try to start absent agents from what has just been saved of them."""
        absent = dict(self._fleet.absent)
        if not absent:
            self._absent_since = None
            return
        if self._absent_since is None:
            self._absent_since = step
        execution = self._config.execution
        every = execution.rejoin_every if isinstance(execution, RayConfig) else 0
        if every == 0 or step - self._absent_since < every or self._saved_agents is None:
            return
        self._absent_since = step
        for name in self._fleet.rejoin(self._saved_agents):
            warnings.warn(f"agent {name} is back, from its last saved state", stacklevel=2)
        for name, reason in self._fleet.absent.items():
            warnings.warn(f"agent {name} is not back: {reason.removeprefix(absent[name]).strip()}", stacklevel=2)

    def _tasks_of(self, step: int) -> Sequence[Task]:
        return batch(self._tasks, step=step, prompts_per_step=self._config.prompts_per_step, seed=self._config.seed)

    def _sampled_before(self, file: Path) -> Ahead:
        step = int(file.stem.removeprefix("step-"))
        scoring = Scoring(self._verifier, self._tasks_of(step))
        lines = file.read_text(encoding="utf-8").splitlines()
        if lines:
            scoring.add([completion_from_json(json.loads(line)) for line in lines])
        return Ahead(step=step, sampling=_Over(), scoring=scoring)


class _Over:
    """Sampling of which nothing is left to wait for."""

    def wait(self) -> None: ...
