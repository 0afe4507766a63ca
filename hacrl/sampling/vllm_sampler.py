"""The sampler outside: a vLLM engine in its own process, given the agent's weights before it samples."""

from __future__ import annotations

import math
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from hacrl.config import VllmConfig
from hacrl.errors import SamplerError
from hacrl.metrics import Metrics
from hacrl.policy import Policy
from hacrl.sampling.engine_process import EngineProcess
from hacrl.sampling.handover import write_weights
from hacrl.sampling.sampler import SampledTokens
from hacrl.seeds import derive_seed

WORKER = Path(__file__).with_name("vllm.py")

# Answers of each call that the learner's policy is asked about, too.
COMPARED_ANSWERS = 4

# Mean difference in nats per token that rounding may cause. Stale or misplaced weights give more, except just after
# updates so small that the old weights are as good.
LIMIT_FLOAT32 = 1e-3
LIMIT_HALF = 0.05


class VllmSampler:
    """Samples as `Sampler` says, from weights handed over where they changed since the last call.

    The engine starts at the first call, so its first weights are those that a resumed run has loaded by then. In
    every call, the log-probabilities of a few answers are compared with the policy's own: `mismatch_mean` and
    `mismatch_max` of the last call are in `metrics`.
    """

    def __init__(
        self,
        agent: str,
        policy: Policy,
        settings: VllmConfig,
        *,
        stop_token_ids: Sequence[int],
        batch_rows: int,
        longest_row: int,
        log: Path | None,
        worker: Path = WORKER,
    ) -> None:
        self.agent = agent
        self.policy = policy
        self.settings = settings
        self.stop_token_ids = list(stop_token_ids)
        self.batch_rows = batch_rows
        self.longest_row = longest_row
        self.log = log
        self.worker = worker
        self.metrics = Metrics()
        self._engine: EngineProcess | None = None
        self._stale = True
        self._sleeps = settings.sleep and policy.device.type == "cuda"

    def weights_changed(self) -> None:
        """Hand the weights over before the next answer."""
        self._stale = True

    def sample(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        places: Sequence[int],
        answers: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """See `Sampler.sample`; the engine answers once, so all prompts come together at the end.

        Raises SamplerError where the engine cannot be started, dies, or gives other log-probabilities than the policy.
        """
        if not prompts or answers == 0:
            yield from ((index, []) for index in range(len(prompts)))
            return
        engine = self._ready_engine()
        groups = engine.call(
            "sample",
            prompts=[list(prompt) for prompt in prompts],
            # One seed for each answer: which rows are computed together then has no influence on what is drawn.
            seeds=[
                [derive_seed(seed, place, answer) for answer in range(answers)]
                for _, place in zip(prompts, places, strict=True)
            ],
            stop_token_ids=self.stop_token_ids,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
        )
        if self._sleeps:
            engine.call("sleep")
        sampled = [
            [
                SampledTokens(
                    token_ids=tuple(ids), logprobs=tuple(logprobs), finish_reason="stop" if ended else "length"
                )
                for ids, logprobs, ended in group
            ]
            for group in groups
        ]
        rows = [(prompt, answer) for prompt, group in zip(prompts, sampled, strict=True) for answer in group]
        self._compare(rows[:: math.ceil(len(rows) / COMPARED_ANSWERS)], temperature, top_p)
        yield from enumerate(sampled)

    def close(self) -> None:
        """End the engine's process."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._stale = True

    # ------------------------------------------------------------ weights

    def _ready_engine(self) -> EngineProcess:
        if self._engine is None:
            self._engine = self._start()
        elif self._sleeps:
            self._engine.call("wake")
        if self._stale:
            weights = self._engine.folder / "weights"
            write_weights(self.policy, weights)
            self._engine.call("reload", folder=str(weights))
            shutil.rmtree(weights)
            self._stale = False
        return self._engine

    def _start(self) -> EngineProcess:
        settings = self.settings
        engine = EngineProcess(
            self.agent,
            python=settings.python or sys.executable,
            worker=self.worker,
            environment=_environment(self.policy.device, settings.tensor_parallel_size),
            log=self.log,
            bytes_needed=2 * sum(tensor.numel() * tensor.element_size() for tensor in self.policy.model.parameters()),
        )
        try:
            model = engine.folder / "model"
            write_weights(self.policy, model)
            device = engine.call(
                "load",
                model=str(model),
                # Ids in, ids out; and nothing of a generation_config.json, such as a hidden top-k.
                skip_tokenizer_init=True,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                dtype=str(self.policy.compute_dtype).removeprefix("torch."),
                max_model_len=self.longest_row,
                max_num_seqs=self.batch_rows,
                gpu_memory_utilization=settings.memory_share,
                tensor_parallel_size=settings.tensor_parallel_size,
                enforce_eager=settings.enforce_eager,
                enable_sleep_mode=self._sleeps,
                seed=0,
            )
            shutil.rmtree(model)
            if device != self.policy.device.type:
                raise SamplerError(
                    f"agent {self.agent}: its device is {self.policy.device}, but this vLLM is built for {device}; set "
                    f"agents.{self.agent}.device, or sampling.vllm.python to an environment with vLLM for "
                    f"{self.policy.device.type}"
                )
        except BaseException:
            engine.close()
            raise
        self._stale = False
        return engine

    # ------------------------------------------------------------ comparison

    def _compare(self, rows: list[tuple[tuple[int, ...], SampledTokens]], temperature: float, top_p: float) -> None:
        """Mean and largest distance, in nats per token, between the engine's and the policy's log-probabilities."""
        theirs = torch.tensor([value for _, answer in rows for value in answer.logprobs])
        ours = policy_logprobs(self.policy, rows, temperature=temperature or 1.0)
        # The policy's are of the whole distribution. A nucleus holds between top_p and all of it, so the engine's may
        # be higher by up to -log(top_p); what is beyond that is a difference.
        distance = theirs - ours
        distance = distance - distance.clamp(min=0.0, max=-math.log(top_p))
        self.metrics = Metrics()
        self.metrics.mean("sampler/mismatch_mean", float(distance.abs().mean()), len(distance))
        self.metrics.maximum("sampler/mismatch_max", float(distance.abs().max()))
        mean = float(distance.abs().mean())
        limit = self.settings.mismatch_limit
        if limit is None:
            limit = LIMIT_FLOAT32 if self.policy.compute_dtype is torch.float32 else LIMIT_HALF
        if mean <= limit:  # false for NaN, too
            return
        message = (
            f"agent {self.agent}: vLLM's log-probabilities are {mean:.3g} nats per token away from the learner's over "
            f"{len(rows)} answers (largest {float(distance.abs().max()):.3g}); the limit is {limit:g} "
            f"(sampling.vllm.mismatch_limit). Many times the limit means other weights or another model: use "
            f"sampling.engine: transformers for this agent, or another version of vLLM. Little above it is rounding: "
            f"use dtype: float32, set sampler_correction, or raise the limit"
        )
        if self.settings.on_mismatch == "error":
            self.close()
            raise SamplerError(message)
        warnings.warn(message, stacklevel=2)


@torch.no_grad()
def policy_logprobs(
    policy: Policy, rows: Sequence[tuple[tuple[int, ...], SampledTokens]], *, temperature: float
) -> torch.Tensor:
    """Log-probabilities of all answers' tokens under the policy, one answer behind the other, in main memory."""
    ids = [torch.tensor(prompt + answer.token_ids) for prompt, answer in rows]
    attention = [torch.ones_like(row) for row in ids]
    answers = [torch.arange(len(row)) >= len(prompt) for row, (prompt, _) in zip(ids, rows, strict=True)]
    input_ids_BT, attention_mask_BT, mask_BT = (
        pad_sequence(part, batch_first=True).to(policy.device) for part in (ids, attention, answers)
    )
    with policy.active():
        logprobs_BT, _ = policy.token_logprobs(input_ids_BT, attention_mask_BT, mask_BT, temperature=temperature)
    return logprobs_BT[mask_BT].cpu()


def _environment(device: torch.device, gpus: int) -> dict[str, str]:
    """What the engine's process needs to be told beside this one's environment."""
    environment = {
        # The process is the engine's own already; a second one would only hide its errors.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # its model is a local folder
        "PYTHONUNBUFFERED": "1",
    }
    if device.type == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
        # Even an eager engine compiles a few helpers at the first answer, for 10 s and with a C++ compiler.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    else:
        first = device.index or 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + gpus])
    return environment
