"""The optimizer and the schedule of its learning rate that an agent's configuration names."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hacrl.config import AgentConfig


def missing_library(agent: AgentConfig) -> str | None:
    """Why the agent's optimizer cannot be built here, with the remedy; None if it can."""
    if agent.role == "author" or agent.optimizer.states == "float32" or importlib.util.find_spec("torchao"):
        return None
    return (
        f"agent {agent.name}: optimizer.states is {agent.optimizer.states}, which needs torchao: "
        f"pip install 'hacrl[torchao]', or use float32"
    )


def build_optimizer(parameters: Iterable[nn.Parameter], agent: AgentConfig) -> torch.optim.Optimizer:
    """AdamW over float32 weights, its two states in float32 or, in blocks of 256, in 8 bits (torchao; Dettmers et al.,
    arXiv 2110.02861). States of fewer than 4,096 elements stay float32."""
    settings = agent.optimizer
    arguments: dict[str, Any] = {
        "lr": agent.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.states == "int8":
        from torchao.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **arguments)
        return optimizer
    return torch.optim.AdamW(parameters, **arguments)


def build_scheduler(
    optimizer: torch.optim.Optimizer, agent: AgentConfig, *, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate over `steps` training steps, as the agent's `schedule` says."""
    schedule = agent.schedule
    if schedule.name == "constant" and schedule.warmup_steps == 0:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    # Here, for with it comes peft, which few runs with a plain constant rate need.
    from transformers import get_scheduler

    scheduler: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
        # transformers' plain `constant` knows no warm-up.
        "constant_with_warmup" if schedule.name == "constant" else schedule.name,
        optimizer,
        num_warmup_steps=schedule.warmup_steps,
        num_training_steps=steps,
    )
    return scheduler


def stepping(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Surrounds an optimizer's step: torchao compiles it for each shape, which on a CPU costs more than it gains."""
    return torch.compiler.set_stance("force_eager") if device.type == "cpu" else contextlib.nullcontext()
