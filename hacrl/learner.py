"""One agent's training: rows -> optimizer minibatches -> micro-batches -> backward -> step."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor

from hacrl.algorithms.algorithm import Algorithm, LossBatch, LossOutput
from hacrl.algorithms.ops import k3_kl, truncated_importance
from hacrl.config import AgentConfig
from hacrl.encode import Batch, collate, micro_batches
from hacrl.errors import NonFiniteError
from hacrl.metrics import Metrics
from hacrl.optimizer import build_optimizer, build_scheduler, stepping
from hacrl.policy import Policy
from hacrl.seeds import derive_seed
from hacrl.types import TrainingSample
from hacrl.workers import Workers, whole

# Share of still rows (without gradient although their advantage is not 0) from which asking first saves time.
PROBE_SHARE = 0.5

RolloutKey = tuple[str, str, int]
"""Task id, author and index: what names a rollout within a step."""


RowKind = Literal["own", "foreign"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one step did to one learner: metrics, and the sequence ratio s of every row that was computed.

    Of several workers, each tells of its own rows; what all know alike is told by the first one.
    """

    metrics: Metrics
    ratios: dict[RolloutKey, float]


class Learner:
    """Updates one policy by one algorithm.

    A step's rows are cut into optimizer minibatches of `minibatch_rows` (the last may be smaller); each is divided
    by its own number of rows, rows without gradient included, so neither micro-batches nor dropped rows change it.

    With several workers, each computes every `size`-th row of each minibatch, and the policy is sharded among them.
    They are given the same rows, and decide alike: every pass over a sharded model is one of all workers.
    """

    def __init__(
        self,
        policy: Policy,
        agent: AgentConfig,
        algorithm: Algorithm,
        *,
        temperature: float,
        pad_token_id: int,
        steps: int,
        minibatch_rows: int,
        minibatch_order: Literal["own_first", "mixed"],
        seed: int,
        dump_directory: Path,
        workers: Workers | None = None,
    ) -> None:
        self.workers = workers or Workers.alone()
        self.policy = policy
        self.agent = agent
        self.algorithm = algorithm
        self.temperature = temperature
        self.pad_token_id = pad_token_id
        self.minibatch_rows = minibatch_rows
        self.minibatch_order = minibatch_order
        self.seed = seed
        self.dump_directory = dump_directory
        # A LoRA policy finds its starting weights by switching the adapter off; a full one needs a copy.
        self.reference = self._frozen_copy() if agent.kl_coefficient > 0 and policy.adapter is None else None
        if self.workers.size > 1:
            policy.shard(self.workers)
            if self.reference is not None:
                self.reference.shard(self.workers)
        self.parameters = list(policy.trained_parameters().values())
        self.optimizer = build_optimizer(self.parameters, agent)
        warmup = agent.schedule.warmup_steps
        self.scheduler = build_scheduler(self.optimizer, agent, steps=steps)
        if warmup > 0:
            # Its warm-up begins at 0, and a step whose rollouts move nothing would be wasted.
            self._advance_schedule()
        self.recomputes_old_logprobs = agent.old_logprobs == "learner" or (
            agent.old_logprobs == "auto"
            and (policy.compute_dtype is not torch.float32 or agent.sampler_correction is not None)
        )
        # Of the rows with an advantage, the share that a band or clip kept still when last seen.
        self.still_share: dict[RowKind, float] = {"own": 0.0, "foreign": 0.0}
        self._seen_still: dict[RowKind, list[bool]] = {}

    def update(self, samples: Sequence[TrainingSample], *, step: int) -> Update:
        """One training step.

        Raises NonFiniteError, the faulty minibatch dumped and not applied, for a NaN or infinite loss or gradient.
        """
        metrics = Metrics()
        # What every worker knows alike must count once when their metrics are put together.
        shared = metrics if self.workers.rank == 0 else Metrics()
        ratios: dict[RolloutKey, float] = {}
        minibatches = self._minibatches(samples, step)
        # Fixed before any pass, which may change what is known of a row.
        shares = [minibatch[self.workers.rank :: self.workers.size] for minibatch in minibatches]
        if self.recomputes_old_logprobs:
            shares = self._with_own_logprobs(samples, shares, metrics)
        shared.total("rows", len(samples))
        metrics.total("rows_still", 0)
        updates = 0
        with self.policy.training(), torch.random.fork_rng(devices=self._cuda_devices()):
            torch.manual_seed(derive_seed(self.seed, "update", self.agent.name, step, *self._worker_name()))
            for minibatch, share in zip(minibatches, shares, strict=True):
                rows = [sample for sample in share if self._carries_gradient(sample)]
                metrics.total("rows_zero_advantage", len(share) - len(rows))
                if not self.workers.maximum(len(rows)):
                    shared.total("updates_skipped", 1)
                    continue
                self._seen_still = {"own": [], "foreign": []}
                moving = self._without_still_rows(rows, updates, minibatch, metrics, ratios)
                self._backward(moving, updates, minibatch, metrics, ratios, step)
                self._remember_still_rows()
                self._optimizer_step(rows, shared, step)
                updates += 1
        shared.total("updates", updates)
        shared.mean("learning_rate", float(self.optimizer.param_groups[0]["lr"]))
        self._advance_schedule()
        return Update(metrics=metrics, ratios=ratios)

    def _worker_name(self) -> list[int]:
        """What tells this worker's random numbers and files from those of the others; nothing for one alone."""
        return [self.workers.rank] if self.workers.size > 1 else []

    def _remember_still_rows(self) -> None:
        kinds = list(self._seen_still)
        counts = [count for kind in kinds for count in (sum(self._seen_still[kind]), len(self._seen_still[kind]))]
        totals = self.workers.sums(counts)
        for kind, still, seen in zip(kinds, totals[::2], totals[1::2], strict=True):
            if seen:
                self.still_share[kind] = still / seen

    def _advance_schedule(self) -> None:
        with warnings.catch_warnings():
            # A step without any gradient makes no optimizer step, which torch takes for a wrong order of calls.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            self.scheduler.step()

    def _minibatches(self, samples: Sequence[TrainingSample], step: int) -> list[list[TrainingSample]]:
        """Shuffled rows in minibatches: own rows first, or all mixed. The shuffle is a function of seed and step."""
        shuffled = list(samples)
        Random(derive_seed(self.seed, "minibatches", self.agent.name, step)).shuffle(shuffled)
        parts = [shuffled]
        if self.minibatch_order == "own_first":
            parts = [[row for row in shuffled if row.own], [row for row in shuffled if not row.own]]
        size = self.minibatch_rows
        return [part[first : first + size] for part in parts for first in range(0, len(part), size)]

    def _passes(
        self, rows: Sequence[TrainingSample], among: Sequence[TrainingSample], *, at_least: int = 0
    ) -> list[tuple[list[TrainingSample], bool]]:
        """This worker's micro-batches, each with True, and as many stand-ins, with False, as another one has more.

        A stand-in, the shortest row of `among`, is computed for the other workers' sake, or to make up `at_least`
        passes of each, and counts for nothing.
        """
        parts = micro_batches(rows, max_tokens=self.agent.micro_batch_tokens, share_prompts=self.policy.shares_prompts)
        missing = max(int(self.workers.maximum(len(parts))), at_least) - len(parts)
        stand_ins = [min(among, key=lambda row: len(row.prompt_ids) + len(row.completion_ids))] * missing
        return [(part, True) for part in parts] + [([row], False) for row in stand_ins]

    def _carries_gradient(self, sample: TrainingSample) -> bool:
        return sample.advantage != 0 or (sample.own and self.agent.kl_coefficient > 0)

    def _backward(
        self,
        rows: list[TrainingSample],
        update_index: int,
        minibatch: Sequence[TrainingSample],
        metrics: Metrics,
        ratios: dict[RolloutKey, float],
        step: int,
    ) -> None:
        normaliser = len(minibatch)
        fault: tuple[str, list[TrainingSample]] | None = None
        self.optimizer.zero_grad(set_to_none=True)
        # A step with a zero gradient is a step all the same, in which the weights move by momentum.
        for micro, counts in self._passes(rows, minibatch, at_least=1):
            batch, logprobs_BT, entropy_BT = self._forward(micro)
            reference_BT = self._reference_logprobs(batch) if self.agent.kl_coefficient > 0 else None
            if not counts:
                (logprobs_BT.sum() * 0).backward()
                continue
            output = self._loss(batch, logprobs_BT, update_index, normaliser)
            loss = output.loss
            if reference_BT is not None:
                kl_B = torch.where(batch.own_B, k3_kl(logprobs_BT, reference_BT, batch.mask_BT), 0.0)
                loss = loss + self.agent.kl_coefficient * kl_B.sum() / normaliser
                own = int(batch.own_B.sum())
                metrics.mean("kl", float(kl_B.detach().sum()) / max(own, 1), own)
            if fault is None and not torch.isfinite(loss):
                # Told after the last pass: other workers count on this one until then.
                fault = f"loss is {float(loss.detach())}", micro
            loss.backward()
            metrics.total("loss_sum", float(loss.detach()))
            metrics.total("tokens_trained", int(batch.mask_BT.sum()))
            self._record(micro, batch, entropy_BT, output, update_index, metrics, ratios)
        self._stop_if_non_finite(fault, step)

    def _forward(self, micro: list[TrainingSample]) -> tuple[Batch, Tensor, Tensor]:
        """A micro-batch's tensors, and log-probability and entropy of its tokens."""
        batch = collate(micro, pad_token_id=self.pad_token_id, device=self.policy.device)
        logprobs_BT, entropy_BT = self.policy.token_logprobs(
            batch.input_ids_BT, batch.attention_mask_BT, batch.mask_BT, temperature=self.temperature
        )
        return batch, logprobs_BT, entropy_BT

    def _loss(self, batch: Batch, logprobs_BT: Tensor, update_index: int, normaliser: int) -> LossOutput:
        return self.algorithm.loss(
            LossBatch(
                logprobs_BT=logprobs_BT,
                mask_BT=batch.mask_BT,
                author_logprobs_BT=batch.author_logprobs_BT,
                author_mean_logprob_B=batch.author_mean_logprob_B,
                advantage_B=batch.advantage_B,
                own_B=batch.own_B,
                ratio_B=batch.ratio_B,
            ),
            update_index=update_index,
            normaliser=normaliser,
        )

    @torch.no_grad()
    def _without_still_rows(
        self,
        rows: list[TrainingSample],
        update_index: int,
        minibatch: Sequence[TrainingSample],
        metrics: Metrics,
        ratios: dict[RolloutKey, float],
    ) -> list[TrainingSample]:
        """Leave out rows whose gradient is exactly 0 because a band or clip stops it, found by a forward pass.

        The pass costs about a third of what each row left out saves, so it is made where most rows of a kind, own or
        foreign, were still when last seen.
        """
        normaliser = len(minibatch)
        asks = any(share > PROBE_SHARE for share in self.still_share.values())
        if not asks or (self.agent.lora is not None and self.agent.lora.dropout > 0):
            return rows
        asked = [row for row in rows if self.still_share[_kind(row)] > PROBE_SHARE]
        still: list[TrainingSample] = []
        for micro, counts in self._passes(asked, minibatch):
            batch, logprobs_BT, entropy_BT = self._forward(micro)
            if not counts:
                continue
            weights = self._loss(batch, logprobs_BT, update_index, normaliser).metrics["weight"].tolist()
            places = [
                place
                for place, (row, weight) in enumerate(zip(micro, weights, strict=True))
                if weight == 0 and not (row.own and self.agent.kl_coefficient > 0)
            ]
            if places:
                found = [micro[place] for place in places]
                batch = batch.select(places)
                output = self._loss(batch, logprobs_BT[places], update_index, normaliser)
                metrics.total("loss_sum", float(output.loss))
                self._record(found, batch, entropy_BT[places], output, update_index, metrics, ratios)
                still += found
        metrics.total("rows_still", len(still))
        left_out = set(map(id, still))
        return [row for row in rows if id(row) not in left_out]

    def _record(
        self,
        rows: Sequence[TrainingSample],
        batch: Batch,
        entropy_BT: Tensor,
        output: LossOutput,
        update_index: int,
        metrics: Metrics,
        ratios: dict[RolloutKey, float],
    ) -> None:
        for row, weight in zip(rows, output.metrics["weight"].tolist(), strict=True):
            self._seen_still[_kind(row)].append(weight == 0)
        _record_rows(rows, batch, entropy_BT, output, update_index, metrics, ratios)

    def _optimizer_step(self, rows: list[TrainingSample], metrics: Metrics, step: int) -> None:
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.agent.max_grad_norm)))
        # Which rows are to blame is known of a loss alone: here each worker writes down its own ones.
        self._stop_if_non_finite(None if math.isfinite(norm) else (f"gradient norm is {norm}", rows), step)
        metrics.mean("grad_norm", norm)
        metrics.maximum("grad_norm_max", norm)
        metrics.mean("grad_clipped", float(norm > self.agent.max_grad_norm))
        with stepping(self.policy.device):
            self.optimizer.step()
        # Autocast would go on with its copies of the weights as they were.
        torch.clear_autocast_cache()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _with_own_logprobs(
        self, samples: Sequence[TrainingSample], shares: list[list[TrainingSample]], metrics: Metrics
    ) -> list[list[TrainingSample]]:
        """Replace own rows' old log-probabilities by the learner's, so that rounding does not look like a ratio.

        With `sampler_correction` a row is also weighed by how likely the learner finds it against its sampler. Every
        objective is proportional to the advantage, for weights above 0 also through `min()`, so the advantage takes it.
        """
        result = {id(sample): sample for share in shares for sample in share}
        own = [sample for sample in samples if id(sample) in result and sample.own and self._carries_gradient(sample)]
        with self.policy.active():
            for micro, counts in self._passes(own, samples):
                batch, logprobs_BT, _ = self._forward(micro)
                if not counts:
                    continue
                weight_B = torch.ones(len(micro))
                if (cap := self.agent.sampler_correction) is not None:
                    weight_B = truncated_importance(logprobs_BT, batch.author_logprobs_BT, batch.mask_BT, cap=cap)
                    metrics.mean("sampler/weight_mean", float(weight_B.mean()), len(micro))
                    metrics.mean("sampler/capped_share", float((weight_B >= cap).float().mean()), len(micro))
                for sample, values, mask, weight in zip(
                    micro, logprobs_BT, batch.mask_BT, weight_B.tolist(), strict=True
                ):
                    logprobs = values[mask].tolist()
                    result[id(sample)] = dataclasses.replace(
                        sample,
                        author_logprobs=tuple(logprobs),
                        author_mean_logprob=sum(logprobs) / len(logprobs),
                        advantage=sample.advantage * weight,
                    )
        return [[result[id(sample)] for sample in share] for share in shares]

    @torch.no_grad()
    def _reference_logprobs(self, batch: Batch) -> Tensor:
        policy = self.reference or self.policy
        with policy.active() if self.reference is not None else policy.without_adapter():
            return policy.token_logprobs(
                batch.input_ids_BT, batch.attention_mask_BT, batch.mask_BT, temperature=self.temperature
            )[0]

    def _frozen_copy(self) -> Policy:
        model = copy.deepcopy(self.policy.model).to(self.policy.compute_dtype).requires_grad_(False).eval()
        return Policy(
            model,
            adapter=None,
            trains=False,
            device=self.policy.device,
            compute_dtype=self.policy.compute_dtype,
        )

    def _cuda_devices(self) -> list[torch.device]:
        return [self.policy.device] if self.policy.device.type == "cuda" else []

    def _stop_if_non_finite(self, fault: tuple[str, Sequence[TrainingSample]] | None, step: int) -> None:
        """Raise NonFiniteError in all workers if one has a fault: what it is, and the rows, which are dumped."""
        if not self.workers.maximum(fault is not None):
            return
        told = None
        if fault is not None:
            what, rows = fault
            self.dump_directory.mkdir(parents=True, exist_ok=True)
            name = "-worker-".join([f"step-{step:06d}-{self.agent.name}", *map(str, self._worker_name())])
            path = self.dump_directory / f"{name}.json"
            path.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
            told = (
                f"agent {self.agent.name}, step {step}: {what}; the {len(rows)} rows of this batch are in {path}. The "
                f"last checkpoint is from before this step: look at the rows' log-probabilities and lengths, lower "
                f"learning_rate, or use dtype: float32"
            )
        raise NonFiniteError(next(message for message in self.workers.exchange(told) if message is not None))

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "still_share": dict(self.still_share),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        # Checkpoints of earlier versions have none: then nothing is asked first, as it was then.
        self.still_share |= state.get("still_share", {})


def _kind(row: TrainingSample) -> RowKind:
    return "own" if row.own else "foreign"


def _record_rows(
    rows: Sequence[TrainingSample],
    batch: Batch,
    entropy_BT: Tensor,
    output: LossOutput,
    update_index: int,
    metrics: Metrics,
    ratios: dict[RolloutKey, float],
) -> None:
    """Sum what happened to each row, under its author's name and for the learner as a whole."""
    tokens = int(batch.mask_BT.sum())
    metrics.mean("entropy", float(entropy_BT.sum()) / tokens, tokens)
    places = batch.input_ids_BT.numel()
    metrics.mean("padding_share", 1 - int(batch.attention_mask_BT.sum()) / places, places)
    outcome = {name: values.tolist() for name, values in output.metrics.items()}
    for position, row in enumerate(rows):
        ratio, weight, band = (outcome[name][position] for name in ("ratio", "weight", "band"))
        ratios[row.task_id, row.author, row.index] = ratio
        pair = f"author/{row.author}"
        metrics.mean(f"{pair}/s_mean", ratio)
        metrics.minimum(f"{pair}/s_min", ratio)
        metrics.maximum(f"{pair}/s_max", ratio)
        metrics.total(f"{pair}/weight", weight)
        if not math.isnan(band):
            for name, value in (("below", -1), ("inside", 0), ("above", 1)):
                metrics.mean(f"{pair}/{name}_share", float(band == value))
        if "clipped_fraction" in outcome:
            metrics.mean(f"{pair}/clipped_fraction", outcome["clipped_fraction"][position])
        if not row.own and "importance" in outcome:
            importance = outcome["importance"][position]
            if not math.isnan(importance):  # only HACPO weighs foreign rows
                metrics.total(f"{pair}/importance_sum", importance)
                metrics.total(f"{pair}/importance_square_sum", importance**2)
        if row.own and update_index == 0:
            metrics.maximum("own_ratio_error", abs(ratio - 1))
