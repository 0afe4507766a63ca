"""An agent's present weights as an ordinary model folder: what an engine in another process starts from and reloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hacrl.policy import Policy


@torch.no_grad()
def write_weights(policy: Policy, folder: Path) -> None:
    """Write config.json and safetensors to `folder`, in the compute type and under the names of the hub's checkpoints.

    An adapter is merged into a copy of its base, sum in float32. The engine then needs to know nothing of adapters:
    any rank and any target module goes the one way of full weights, and no base weights can be left in by mistake.
    """
    from transformers.utils import logging

    model: Any = policy.causal_lm
    stored, noisy = model.config.dtype, logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=merged_weights(policy))
    finally:
        # Saving notes the type of the trained weights in the live configuration; exports use the type that stood there.
        model.config.dtype = stored
        if noisy:
            logging.enable_progress_bar()


@torch.no_grad()
def merged_weights(policy: Policy) -> dict[str, Tensor]:
    """Every weight by its name in the plain model, in main memory and in the compute type; tied ones share storage."""
    deltas = {} if policy.adapter is None else _adapter_deltas(policy)
    converted: dict[tuple[int, torch.Size], Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in policy.causal_lm.state_dict().items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        dtype = policy.compute_dtype if tensor.is_floating_point() else tensor.dtype
        if plain in deltas:
            weights[plain] = (tensor.float() + deltas[plain].float()).to("cpu", dtype)
            continue
        key = (tensor.data_ptr(), tensor.shape)
        if key not in converted:
            converted[key] = tensor.to("cpu", dtype)
        weights[plain] = converted[key]
    return weights


def _adapter_deltas(policy: Policy) -> dict[str, Tensor]:
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.weight": module.get_delta_weight(policy.adapter)
        for name, module in policy.causal_lm.named_modules()
        if isinstance(module, LoraLayer) and policy.adapter in (*module.lora_A, *module.lora_embedding_A)
    }
