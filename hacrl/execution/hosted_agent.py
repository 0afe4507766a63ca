"""One agent in a process of its own, as a fleet of processes asks it. Knows nothing of what carries the calls."""

from __future__ import annotations

import faulthandler
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl.process import keep_freed_memory, use_passive_threads

# Nothing here may load torch before `__init__` has said how many threads it is to have.
if TYPE_CHECKING:
    from hacrl.agent import Agent
    from hacrl.algorithms.algorithm import Algorithm
    from hacrl.config import EvaluationConfig, RunConfig
    from hacrl.types import RolloutGroup, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a call gave, how many seconds it took, and the warnings that it gave rise to."""

    value: Any
    seconds: float
    warnings: tuple[str, ...]


class HostedAgent:
    """An `Agent` and the process around it. Every method that works answers with an `Answer`.

    Only text, ids, numbers and settings go in and out: models, tokenizers and checkpoints are read and written here.
    """

    def __init__(self, name: str, *, folder: str, log: str, threads: int) -> None:
        """`folder` is what relative paths are relative to; all that the process prints is appended to `log`."""
        self.name = name
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

    def start(self, run: RunConfig, algorithm: Algorithm, dump_directory: Path, log_directory: Path | None) -> Answer:
        """Load the agent. Answers with its tokenizer's fingerprint."""

        def load() -> str:
            import torch
            import transformers

            from hacrl.agent import Agent
            from hacrl.encode import Encoder
            from hacrl.policy import load_policies

            transformers.utils.logging.disable_progress_bar()  # the log is for what matters when a process dies
            torch.set_num_threads(self.threads)
            keep_freed_memory()
            config = run.agent(self.name)
            encoder = Encoder.from_config(config)
            policy = load_policies([config], seed=run.seed)[self.name]
            self.agent = Agent(
                run, config, policy, encoder, algorithm, dump_directory=dump_directory, log_directory=log_directory
            )
            return encoder.fingerprint

        return self._answer(load)

    def sample(self, tasks: Sequence[Task], step: int) -> Answer:
        return self._answer(lambda: self._loaded.sample(tasks, step=step))

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig | None) -> Answer:
        return self._answer(lambda: self._loaded.sample_evaluation(tasks, settings))

    def update(
        self,
        groups: Sequence[RolloutGroup],
        advantages: Mapping[str, Sequence[Sequence[float]]],
        ratio: Mapping[str, float],
        fingerprints: Mapping[str, str],
        step: int,
    ) -> Answer:
        return self._answer(lambda: self._loaded.update(groups, advantages, ratio, fingerprints, step=step))

    def save(self, folder: Path) -> Answer:
        return self._answer(lambda: self._loaded.save(folder))

    def load(self, folder: Path, weights_only: bool) -> Answer:
        return self._answer(lambda: self._loaded.load(folder, weights_only=weights_only))

    def export(self, folder: Path, card: str, as_adapter: bool) -> Answer:
        return self._answer(lambda: self._loaded.export(folder, card=card, as_adapter=as_adapter))

    def close(self) -> None:
        """End what the agent has started. The process itself is ended by whoever started it."""
        if self.agent is not None:
            self.agent.close()

    @property
    def _loaded(self) -> Agent:
        assert self.agent is not None, "start() comes first"
        return self.agent

    def _answer(self, call: Callable[[], Any]) -> Answer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for noise in (FutureWarning, DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.filterwarnings("ignore", category=noise)
            begin = time.perf_counter()
            value = call()
            seconds = time.perf_counter() - begin
        return Answer(value=value, seconds=seconds, warnings=tuple(str(item.message) for item in caught))
