"""An estimate of memory, from each model's configuration alone: nothing is loaded.

What stays (weights, gradients, optimizer states) is counted exactly from the shapes of the weights. What comes and goes
(activations of one micro-batch, logits, KV cache) is counted for the longest rows that the limits allow, by the tensors
that a decoder layer keeps for its backward pass; architectures differ, so that part is right to about a third.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hacrl.config import AgentConfig, RunConfig
from hacrl.errors import ModelError
from hacrl.policy import (
    LOGIT_CHUNK_ELEMENTS,
    add_adapter,
    base_key,
    pretrained_arguments,
    resolve_device,
    resolve_dtype,
)

FLOAT32 = 4
# Logits, their scaled copy, softmax and gradient exist together; while sampling a running sum in float64 does, too.
LOGIT_COPIES = 6
# Rows of unlike ages share their columns, and there is spare room behind them.
CACHE_COLUMNS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentMemory:
    """One agent's memory in bytes. `shares_base_with` is the earlier agent that its frozen base is counted under."""

    agent: str
    device: str
    parameters: int
    trained: int
    shares_base_with: str | None
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    logits: int
    kv_cache: int
    checkpoint: int

    @property
    def stays(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def comes_and_goes(self) -> int:
        """The larger of an update and of sampling: they do not happen at the same time."""
        return self.logits + max(self.activations, self.kv_cache)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Estimated peak of one device in bytes, all its agents together, and what it has (None where unknown)."""

    device: str
    peak: int
    available: int | None


def estimate_memory(config: RunConfig) -> tuple[list[AgentMemory], list[DeviceMemory]]:
    """Per agent, and per device. Raises ModelError for a configuration that no model can be built from."""
    bases: dict[tuple[Any, ...], str] = {}
    agents = [_estimate(config, agent, bases) for agent in config.agents]
    devices = []
    for device in dict.fromkeys(memory.device for memory in agents):
        here = [memory for memory in agents if memory.device == device]
        # Agents take turns, so only one of them is sampling or updating at any time.
        peak = sum(memory.stays for memory in here) + max(memory.comes_and_goes for memory in here)
        devices.append(DeviceMemory(device=device, peak=peak, available=_available(device)))
    return agents, devices


def _estimate(config: RunConfig, agent: AgentConfig, bases: dict[tuple[Any, ...], str]) -> AgentMemory:
    device = resolve_device(agent)
    dtype = resolve_dtype(agent, device)
    half = dtype.itemsize
    model = _empty_model(agent)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained, shares_with = parameters, None
    if agent.role == "author":
        trained, weights = 0, parameters * half
    elif agent.lora is not None:
        with torch.device("meta"):
            adapted = add_adapter(model, agent)
        trained = sum(parameter.numel() for name, parameter in adapted.named_parameters() if "lora_" in name)
        shares_with = bases.setdefault(base_key(agent, device, dtype), agent.name)
        weights = trained * FLOAT32 + (parameters * half if shares_with == agent.name else 0)
        shares_with = None if shares_with == agent.name else shares_with
    else:
        weights = parameters * FLOAT32
    state = FLOAT32 if agent.optimizer.states == "float32" else 1
    sizes = _Sizes(model.config.get_text_config())
    limits = config.sampling_of(agent)
    longest = limits.max_prompt_tokens + limits.max_new_tokens
    rows_asked = config.prompts_per_step * config.group_size_of(agent)
    rows = min(limits.batch_rows, rows_asked) if rows_asked else limits.batch_rows
    if limits.engine == "vllm":
        rows = 0  # decoded by another process, in the share of memory that it is given
    # A row above the budget is a micro-batch of its own.
    tokens = max(agent.micro_batch_tokens, longest)
    # Under autocast, half precision copies of the weights in use are kept until the backward pass is over.
    copies = trained * half if half != FLOAT32 else 0
    vocabulary_rows = max(rows * sizes.vocabulary, min(LOGIT_CHUNK_ELEMENTS, tokens * sizes.vocabulary))
    return AgentMemory(
        agent=agent.name,
        device=str(device),
        parameters=parameters,
        trained=trained,
        shares_base_with=shares_with,
        weights=weights,
        gradients=trained * FLOAT32,
        optimizer=2 * trained * state,
        reference=parameters * half if agent.kl_coefficient > 0 and agent.lora is None and trained else 0,
        activations=copies + sizes.activations(tokens, half, checkpointing=agent.gradient_checkpointing)
        if trained
        else 0,
        logits=vocabulary_rows * FLOAT32 * LOGIT_COPIES,
        kv_cache=sizes.kv_cache(rows, CACHE_COLUMNS * longest, half),
        checkpoint=trained * (FLOAT32 + 2 * state),
    )


def _empty_model(agent: AgentConfig) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        model_config = AutoConfig.from_pretrained(agent.model, **pretrained_arguments(agent))
        if hasattr(model_config, "quantization_config"):
            del model_config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=agent.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"agent {agent.name}: no model can be built from the configuration of {agent.model!r}: {error}"
        ) from error
    model.tie_weights()
    return model


class _Sizes:
    """The widths of a decoder, as its configuration names them."""

    def __init__(self, config: Any) -> None:
        self.vocabulary = int(config.vocab_size)
        self.hidden = int(config.hidden_size)
        self.layers = int(config.num_hidden_layers)
        self.heads = int(getattr(config, "num_attention_heads", None) or 1)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        self.head = int(getattr(config, "head_dim", None) or self.hidden // self.heads)
        experts = int(getattr(config, "num_experts_per_tok", None) or 1)
        inner = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
        self.inner = int(inner or getattr(config, "intermediate_size", None) or 4 * self.hidden) * experts
        self.kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * self.layers)
        self.window = getattr(config, "sliding_window", None)

    def activations(self, tokens: int, width: int, *, checkpointing: bool) -> int:
        """Bytes kept for the backward pass of one micro-batch."""
        # Queries, keys, values (rotated, repeated), attention's result; gate, up, activation, product.
        inner = 5 * self.heads * self.head + 4 * self.kv_heads * self.head + 4 * self.inner
        # Norms work in float32 whatever the type of the rest.
        layer = 8 * self.hidden * FLOAT32 + inner * width
        kept = self.layers * self.hidden * FLOAT32 + layer if checkpointing else self.layers * layer
        return tokens * kept

    def kv_cache(self, rows: int, longest: int, width: int) -> int:
        per_token = 2 * self.kv_heads * self.head * width
        lengths = {"full_attention": longest, "sliding_attention": min(longest, self.window or longest)}
        return rows * per_token * sum(lengths.get(kind, 0) for kind in self.kinds)


def _available(device: str) -> int | None:
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[1]
    figures = [_read_number(Path("/sys/fs/cgroup/memory.max"))]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines: Mapping[str, str] = dict(
            line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line
        )
        figures.append(int(lines["MemTotal"].split()[0]) * 1024 if "MemTotal" in lines else None)
    known = [figure for figure in figures if figure is not None]
    return min(known) if known else None


def _read_number(path: Path) -> int | None:
    """A cgroup's limit; None where there is none (`max`) or no such file."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
