"""One process of one agent, as a fleet of processes asks it. Knows nothing of what carries the calls."""

from __future__ import annotations

import faulthandler
import math
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hacrl.process import keep_freed_memory, use_passive_threads

# Nothing here may load torch before `__init__` has said how many threads it is to have.
if TYPE_CHECKING:
    import numpy as np

    from hacrl.agent import Agent
    from hacrl.algorithms.algorithm import Algorithm
    from hacrl.config import EvaluationConfig, RunConfig
    from hacrl.execution.exchange import Told
    from hacrl.types import Completion, Task

# Answers are passed on as they are done, but not more often than this: each time costs about a millisecond.
PART_SECONDS = 0.05
# How long a worker waits for its agent's others in one exchange. Whoever watches the processes has shorter limits.
WORKERS_SECONDS = 3600.0

STACK_FRAMES = 12

Kind = Literal["worker", "sampler"]
"""A worker trains, and samples where the agent has no samplers; a sampler only samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a call gave, when it was at work (seconds since 1970), the agent's weights, and warnings that it gave rise
    to."""

    value: Any
    begin: float
    end: float
    weights_version: int
    warnings: tuple[str, ...]


class HostedAgent:
    """An `Agent`, or the part of one that this process is for. Every method that works ends with an `Answer`.

    Only text, ids, numbers and settings go in and out; weights go from an agent's workers to its own samplers. Models,
    tokenizers and checkpoints are read and written here.
    """

    def __init__(self, name: str, *, kind: Kind, rank: int, size: int, folder: str, log: str, threads: int) -> None:
        """Number `rank` of the agent's `size` processes of this kind. `folder` is what relative paths are relative to;
        all that the process prints is appended to `log`."""
        self.name = name
        self.kind, self.rank, self.size = kind, rank, size
        self.threads = threads
        self.agent: Agent | None = None
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        use_passive_threads()
        if os.path.isdir(folder):
            os.chdir(folder)
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        faulthandler.enable()

    def where(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()}"

    def rendezvous(self) -> str:
        """Where the agent's workers are to meet: the first of them is asked."""
        from hacrl.workers import rendezvous

        return rendezvous()

    def start(
        self,
        run: RunConfig,
        algorithm: Algorithm,
        dump_directory: Path,
        log_directory: Path | None,
        rendezvous: str | None,
    ) -> Answer:
        """Load the agent. Answers with its tokenizer's fingerprint."""

        def load() -> str:
            import torch
            import transformers

            from hacrl.agent import Agent
            from hacrl.encode import Encoder
            from hacrl.policy import load_policies, resolve_device
            from hacrl.workers import Workers

            transformers.utils.logging.disable_progress_bar()  # the log is for what matters when a process dies
            torch.set_num_threads(self.threads)
            keep_freed_memory()
            config = run.agent(self.name)
            workers = None
            if rendezvous is not None:
                workers = Workers.join(
                    rank=self.rank,
                    size=self.size,
                    rendezvous=rendezvous,
                    device=resolve_device(config),
                    timeout_s=WORKERS_SECONDS,
                )
            encoder = Encoder.from_config(config)
            policy = load_policies([config], seed=run.seed)[self.name]
            self.agent = Agent(
                run,
                config,
                policy,
                encoder,
                algorithm,
                dump_directory=dump_directory,
                log_directory=log_directory,
                workers=workers,
                learns=self.kind == "worker",
                share=(self.rank, self.size),
            )
            return encoder.fingerprint

        return self._answer(load)

    def sample(self, tasks: Sequence[Task], step: int) -> Iterator[Any]:
        """Parts of this process's share as they are done, lists of completions, and at last an `Answer`."""
        with _Warnings() as caught:
            begin = told = time.time()
            part: list[Completion] = []
            for completions in self._loaded.sample(tasks, step=step):
                part += completions
                if time.time() - told > PART_SECONDS:
                    yield part
                    told, part = time.time(), []
            if part:
                yield part
        yield self._answered(None, begin, caught.texts())

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig | None) -> Answer:
        return self._answer(lambda: self._loaded.sample_evaluation(tasks, settings))

    def update(
        self,
        tasks: Sequence[Task],
        advantages_PAG: np.ndarray,
        ratio: Mapping[str, float],
        fingerprints: Mapping[str, str],
        step: int,
        *told: Told,
    ) -> Answer:
        """`told` is what `Exchange.told` gave."""
        from hacrl.execution.exchange import shared_groups
        from hacrl.execution.fleet import advantages_by_author

        groups = shared_groups(tasks, told)
        advantages = advantages_by_author(advantages_PAG, list(ratio))
        return self._answer(lambda: self._loaded.update(groups, advantages, ratio, fingerprints, step=step))

    def trained_weights(self) -> tuple[int, Mapping[str, np.ndarray]]:
        """For `take_weights` of a sampler: the version, and what training has made of the weights."""
        return self._loaded.weights_version, self._loaded.trained_weights()

    def take_weights(self, versioned: tuple[int, Mapping[str, np.ndarray]]) -> Answer:
        version, weights = versioned
        return self._answer(lambda: self._loaded.take_weights(weights, version))

    def save(self, folder: Path) -> Answer:
        return self._answer(lambda: self._loaded.save(folder))

    def load(self, folder: Path, weights_only: bool) -> Answer:
        return self._answer(lambda: self._loaded.load(folder, weights_only=weights_only))

    def export(self, folder: Path, card: str, as_adapter: bool) -> Answer:
        return self._answer(lambda: self._loaded.export(folder, card=card, as_adapter=as_adapter))

    def pulse(self) -> tuple[int, float]:
        """Numbers that grow while the agent is at work, asked for from another thread: passes through the model, and
        seconds of processor time of this process and those it started."""
        import psutil

        process = psutil.Process()
        times = [process.cpu_times()]
        for child in process.children(recursive=True):
            try:
                times.append(child.cpu_times())
            except psutil.Error:
                continue
        passes = self.agent.policy.passes if self.agent is not None else 0
        # Whole seconds: what asking costs is no work.
        return passes, math.floor(sum(item.user + item.system for item in times))

    def stack(self) -> str:
        """Where the threads of this process are now, the one that answers calls among them."""
        own = sys._getframe()
        frames = [frame for frame in sys._current_frames().values() if frame is not own]
        stacks = ["".join(traceback.format_stack(frame)[-STACK_FRAMES:]) for frame in frames]
        own_work = [stack for stack in stacks if f"{os.sep}hacrl{os.sep}" in stack]
        return "\n".join(own_work or stacks)

    def close(self) -> None:
        """End what the agent has started. The process itself is ended by whoever started it."""
        if self.agent is not None:
            self.agent.close()

    @property
    def _loaded(self) -> Agent:
        assert self.agent is not None, "start() comes first"
        return self.agent

    def _answer(self, call: Callable[[], Any]) -> Answer:
        with _Warnings() as caught:
            begin = time.time()
            value = call()
        return self._answered(value, begin, caught.texts())

    def _answered(self, value: Any, begin: float, texts: tuple[str, ...]) -> Answer:
        version = self.agent.weights_version if self.agent is not None else 0
        return Answer(value=value, begin=begin, end=time.time(), weights_version=version, warnings=texts)


class _Warnings:
    """Catches warnings that are for users."""

    def __enter__(self) -> _Warnings:
        self._catching = warnings.catch_warnings(record=True)
        self._caught = self._catching.__enter__()
        warnings.simplefilter("default")
        for noise in (FutureWarning, DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.filterwarnings("ignore", category=noise)
        return self

    def __exit__(self, *error: Any) -> None:
        self._catching.__exit__(*error)

    def texts(self) -> tuple[str, ...]:
        return tuple(str(item.message) for item in self._caught or ())
