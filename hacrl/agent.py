"""One agent: a policy with its tokenizer, its sampler and, unless it is author only, its learner."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hacrl.agent_state import load_state, save_state, told_refusal
from hacrl.algorithms.algorithm import Algorithm
from hacrl.config import AgentConfig, EvaluationConfig, RunConfig
from hacrl.encode import Encoder, training_samples
from hacrl.errors import ModelError, RunDirectoryError
from hacrl.export import export_agent
from hacrl.learner import Learner, RolloutKey
from hacrl.metrics import Metrics
from hacrl.policy import Policy, load_policies, load_trained_weights, trained_weights
from hacrl.sampling.sampler import SampledTokens, Sampler
from hacrl.sampling.transformers import TransformersSampler
from hacrl.sampling.vllm_sampler import VllmSampler
from hacrl.seeds import derive_seed
from hacrl.types import Completion, RolloutGroup, SharedGroup, Task
from hacrl.workers import Workers, whole

# In a checkpoint, beside the last state of an agent that had been let go; alone where none of its states was saved.
ABSENT = "absent.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentUpdate:
    """One agent's part of a step's update: flat metrics, and the ratio s of each row that was computed.

    `ratios[author]` is P x G, NaN = not computed; authors whose rollouts the agent does not use are left out.
    """

    metrics: Mapping[str, float]
    ratios: Mapping[str, np.ndarray]


class Agent:
    """Everything one agent owns. Only text, numbers and ids of an identical tokenizer come in from others.

    An agent may be made of several workers, each an `Agent` in a process of its own: all are called at the same time
    with the same arguments, and rank 0 answers for all.
    """

    def __init__(
        self,
        run: RunConfig,
        config: AgentConfig,
        policy: Policy,
        encoder: Encoder,
        algorithm: Algorithm,
        *,
        dump_directory: Path,
        log_directory: Path | None = None,
        workers: Workers | None = None,
        learns: bool = True,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`log_directory` keeps what the agent's engine prints; without one it goes with the engine. `learns`: False
        for a process that only samples, with weights that others train. `share` (i, n): of all tasks this process
        answers number i and every n-th after it."""
        self.run = run
        self.config = config
        self.name = config.name
        self.workers = workers or Workers.alone()
        self.policy = policy
        self.encoder = encoder
        self.limits = run.sampling_of(config)
        self.weights_version = 0
        self.share = share
        self.engine = self._build_engine(log_directory) if self.limits.engine == "vllm" else None
        self.sampler: Sampler = self.engine or TransformersSampler(
            policy,
            stop_token_ids=encoder.stop_token_ids,
            pad_token_id=encoder.pad_token_id,
            batch_rows=self.limits.batch_rows,
        )
        self._sampling_metrics = Metrics()
        if run.max_staleness > 0 and config.old_logprobs == "auto":
            # Weights have moved on since: only the sampler knows them.
            config = config.model_copy(update={"old_logprobs": "sampler"})
        elif self.engine is not None and config.old_logprobs == "auto":
            # Another program's rounding, even in float32: it would look like a ratio.
            config = config.model_copy(update={"old_logprobs": "learner"})
        self.learner = (
            None
            if config.role == "author" or not learns
            else Learner(
                policy,
                config,
                algorithm,
                temperature=self.limits.temperature,
                pad_token_id=encoder.pad_token_id,
                steps=run.steps,
                minibatch_rows=run.minibatch_rows(config),
                minibatch_order=run.minibatch_order,
                seed=run.seed,
                dump_directory=dump_directory,
                workers=self.workers,
            )
        )

    def _build_engine(self, log_directory: Path | None) -> VllmSampler:
        evaluated = self.run.evaluation.max_new_tokens or 0
        return VllmSampler(
            self.name,
            self.policy,
            self.limits.vllm,
            stop_token_ids=self.encoder.stop_token_ids,
            batch_rows=self.limits.batch_rows,
            longest_row=self.limits.max_prompt_tokens + max(self.limits.max_new_tokens, evaluated),
            log=log_directory / f"{self.name}.log" if log_directory is not None else None,
        )

    def sample(self, tasks: Sequence[Task], *, step: int) -> Iterator[list[Completion]]:
        """This process's share of the step's answers, in parts: a part holds all answers to one task or to several.

        Parts come as soon as their answers are finished, in any order; none for a learner-only agent. The weights must
        stay as they are until the last part has come.
        """
        answers = self.run.group_size_of(self.config)
        if answers == 0:
            return
        for _, completions in self._complete(
            tasks,
            answers=answers,
            temperature=self.limits.temperature,
            top_p=1.0,
            max_new_tokens=self.limits.max_new_tokens,
            seed=derive_seed(self.run.seed, "sample", self.name, step),
        ):
            yield completions
        if self.engine is not None:
            self._sampling_metrics = self.engine.metrics

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig | None = None) -> list[Completion]:
        """This process's share of answers to held-out tasks, in the order of the tasks.

        Sampled by these settings, the run's own if left out; with the same seed at every evaluation.
        """
        evaluation = settings or self.run.evaluation
        groups = dict(
            self._complete(
                tasks,
                answers=evaluation.k,
                temperature=evaluation.temperature,
                top_p=evaluation.top_p,
                max_new_tokens=evaluation.max_new_tokens or self.limits.max_new_tokens,
                seed=derive_seed(self.run.seed, "evaluate", self.name),
            )
        )
        return [completion for place in sorted(groups) for completion in groups[place]]

    def _complete(
        self,
        tasks: Sequence[Task],
        *,
        answers: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """The place of each task of this process's share, and all answers to it."""
        places = range(self.share[0], len(tasks), self.share[1])
        with self.policy.gathered():
            for share_index, group in self.sampler.sample(
                [self.encoder.prompt_ids(tasks[place].prompt) for place in places],
                places=places,
                answers=answers,
                temperature=temperature,
                top_p=top_p,
                max_new_tokens=max_new_tokens,
                seed=seed,
            ):
                place = places[share_index]
                yield place, [self._completion(tasks[place], index, answer) for index, answer in enumerate(group)]

    def _completion(self, task: Task, index: int, answer: SampledTokens) -> Completion:
        if not all(map(math.isfinite, answer.logprobs)):
            raise ModelError(
                f"agent {self.name}, task {task.id}: a sampled token's log-probability is not finite; the model's "
                f"weights or dtype ({self.policy.compute_dtype}) give NaN logits"
            )
        return Completion(
            task_id=task.id,
            author=self.name,
            index=index,
            text=self.encoder.decode(answer.token_ids),
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            weights_version=self.weights_version,
        )

    def update(
        self,
        groups: Sequence[RolloutGroup | SharedGroup],
        advantages: Mapping[str, Sequence[Sequence[float]]],
        ratio: Mapping[str, float],
        fingerprints: Mapping[str, str],
        *,
        step: int,
    ) -> AgentUpdate:
        """Learn from one step's rollouts.

        `advantages[author]` is P x G for this learner, NaN = no such row; `ratio[author]` is the author's capability
        over this learner's; `fingerprints[author]` tells which authors share this agent's tokenizer.
        """
        if self.learner is None:
            return AgentUpdate(metrics=self._told_by_all(self._sampling_metrics, {})[0], ratios={})
        encoded = training_samples(
            groups,
            learner=self.name,
            advantages=advantages,
            ratio=ratio,
            encoder=self.encoder,
            fingerprints=fingerprints,
            max_new_tokens=self.limits.max_new_tokens,
            exchange=self.run.exchange,
        )
        update = self.learner.update(encoded.samples, step=step)
        self.weights_version += 1
        self._weights_changed()
        metrics = Metrics()
        metrics.merge(self._sampling_metrics)
        if self.workers.rank == 0:  # every worker has encoded all rows
            for author in encoded.exchange:
                metrics.merge(encoded.exchange[author].metrics(), prefix=f"author/{author}/")
        metrics.merge(update.metrics)
        values, ratios = self._told_by_all(metrics, update.ratios)
        tables = {author: np.full(np.shape(table), math.nan) for author, table in advantages.items()}
        place = {group.task.id: number for number, group in enumerate(groups)}
        for (task_id, author, index), s in ratios.items():
            tables[author][place[task_id], index] = s
        return AgentUpdate(metrics=values, ratios=tables)

    def _told_by_all(
        self, metrics: Metrics, ratios: Mapping[RolloutKey, float]
    ) -> tuple[dict[str, float], dict[RolloutKey, float]]:
        """All workers' metrics and ratios on rank 0, nothing elsewhere."""
        together, joined = Metrics(), dict[RolloutKey, float]()
        for part, part_ratios in self.workers.gather((metrics, ratios)):
            together.merge(part)
            joined.update(part_ratios)
        return together.values(), joined

    # ------------------------------------------------------------ state

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs: trained weights, optimizer, schedule, version; no frozen weights.

        Raises RunDirectoryError where the disk refuses.
        """
        self.workers.on_first(lambda: self._save_version(folder))
        if self.learner is not None:
            save_state(folder, self.policy, self.learner, self.workers)

    def _save_version(self, folder: Path) -> None:
        version = json.dumps({"name": self.name, "weights_version": self.weights_version})
        with told_refusal(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "agent.json").write_text(version)

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Take over a saved state, of however many workers; nothing where the agent was lost before its first one.

        Raises RunDirectoryError for a missing file, ModelError for another model's weights.
        """
        if (folder / ABSENT).exists() and not (folder / "agent.json").exists():
            return
        try:
            self.weights_version = json.loads((folder / "agent.json").read_text())["weights_version"]
            if self.learner is not None:
                load_state(folder, self.policy, self.learner, self.workers, weights_only=weights_only)
                self._weights_changed()
        except FileNotFoundError as error:
            raise RunDirectoryError(
                f"{folder}: {Path(error.filename or '').name} of agent {self.name} is missing, so the run cannot go on "
                f"from this checkpoint"
            ) from error

    def trained_weights(self) -> dict[str, Any]:
        """What training has changed, whole, as numpy arrays by name; on rank 0 alone."""
        weights = {}
        for name, tensor in trained_weights(self.policy).items():
            tensor = whole(tensor)
            if self.workers.rank == 0:
                weights[name] = tensor.cpu().numpy().copy()  # may be the weights themselves
        return weights

    def take_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Go on with what another copy of this agent has learned, as its `trained_weights` gave it."""
        with warnings.catch_warnings():
            # Arrays that several processes share are not writable. They are only read here.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            load_trained_weights(self.policy, {name: torch.from_numpy(array) for name, array in weights.items()})
        self.weights_version = version
        self._weights_changed()

    def _weights_changed(self) -> None:
        if self.engine is not None:
            self.engine.weights_changed()

    def export(self, folder: Path, *, card: str, as_adapter: bool) -> None:
        """Write the agent as an ordinary Hugging Face folder; see `export_agent`."""
        if self.workers.size == 1:
            export_agent(self.policy, self.encoder, folder, card=card, as_adapter=as_adapter)
            return
        weights = self.trained_weights()
        self.workers.on_first(lambda: self._export_whole(weights, folder, card, as_adapter))

    def _export_whole(self, weights: Mapping[str, Any], folder: Path, card: str, as_adapter: bool) -> None:
        # A sharded model can be neither copied nor saved as one: the weights go into one that is loaded anew, in main
        # memory, where the whole of it has room.
        dtype = "bfloat16" if self.policy.compute_dtype is torch.bfloat16 else "float32"
        config = self.config.model_copy(update={"device": "cpu", "dtype": dtype, "attention": None})
        policy = load_policies([config], seed=self.run.seed)[self.name]
        load_trained_weights(policy, {name: torch.from_numpy(array) for name, array in weights.items()})
        export_agent(policy, self.encoder, folder, card=card, as_adapter=as_adapter)

    def close(self) -> None:
        """End the engine's process, where there is one."""
        if self.engine is not None:
            self.engine.close()
