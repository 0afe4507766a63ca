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

    All workers of a sharded policy do so at the same time, each for its own engine.

    An adapter is merged into a copy of its base, sum in float32. The engine then needs to know nothing of adapters:
    any rank and any target module goes the one way of full weights, and no base weights can be left in by mistake.
    """
    from transformers.utils import logging

    model: Any = policy.causal_lm
    stored, noisy = model.config.dtype, logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # transformers has rank 0 alone write where there are several workers, but each has an engine of its own.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        with policy.gathered():
            model.save_pretrained(folder, state_dict=merged_weights(policy))
    finally:
        # Saving notes the type of the trained weights in the live configuration; exports use the type that stood there.
        model.config.dtype = stored
        del model.should_save_on_this_rank
        if noisy:
            logging.enable_progress_bar()


@torch.no_grad()
def merged_weights(policy: Policy) -> dict[str, Tensor]:
    """Every weight by its name in the plain model, in main memory and in the compute type; tied ones share storage.

    A sharded policy must be `gathered`, and stay so while the result is used.
    """
    deltas = {} if policy.adapter is None else _adapter_deltas(policy)
    converted: dict[tuple[int, torch.Size], Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in _state(policy.causal_lm).items():
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


def _state(model: Any) -> dict[str, Tensor]:
    """What `state_dict` gives, which a sharded model must not be asked for: it would share out its weights again."""
    return dict(model.named_parameters(remove_duplicate=False)) | {
        name: buffer
        for place, module in model.named_modules()
        for name, buffer in module.named_buffers(place, recurse=False)
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set
    }


def _adapter_deltas(policy: Policy) -> dict[str, Tensor]:
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.weight": module.get_delta_weight(policy.adapter)
        for name, module in policy.causal_lm.named_modules()
        if isinstance(module, LoraLayer) and policy.adapter in (*module.lora_A, *module.lora_embedding_A)
    }
