"""An agent as an ordinary Hugging Face folder that loads and runs without hacrl."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from hacrl.config import AgentConfig, RunConfig
from hacrl.encode import Encoder
from hacrl.policy import Policy


def export_agent(policy: Policy, encoder: Encoder, folder: Path, *, card: str, as_adapter: bool) -> None:
    """Write weights (safetensors), tokenizer, chat template, generation config and model card to `folder`.

    A LoRA policy is merged into a copy of its base model, or written as a peft adapter where `as_adapter`; a fully
    trained one is always written whole. An existing folder is replaced only once the new one is complete.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    building.chmod(0o755)
    try:
        if policy.adapter is not None and as_adapter:
            _save_adapter(policy, building)
        else:
            _save_model(policy, encoder, building)
        encoder.tokenizer.save_pretrained(building)
        (building / "README.md").write_text(card, encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _save_model(policy: Policy, encoder: Encoder, folder: Path) -> None:
    model: Any = policy.causal_lm
    if policy.adapter is not None:
        # Merging in place would change the base model that other agents may be using.
        merged: Any = copy.deepcopy(policy.model)
        merged.set_adapter(policy.adapter)
        model = merged.merge_and_unload(adapter_names=[policy.adapter])
    stored: Any = policy.config.dtype
    if isinstance(stored, torch.dtype) and stored != model.dtype:
        model = copy.deepcopy(model).to(stored)
    generation = copy.deepcopy(model.generation_config)
    generation.eos_token_id = list(encoder.stop_token_ids)
    generation.pad_token_id = encoder.pad_token_id
    model.generation_config = generation
    model.save_pretrained(folder)


def _save_adapter(policy: Policy, folder: Path) -> None:
    model: Any = policy.model
    model.save_pretrained(folder, selected_adapters=[policy.adapter])
    # peft puts every adapter but one named "default" into a folder of its own.
    nested = folder / str(policy.adapter)
    if nested.is_dir():
        for file in nested.iterdir():
            file.rename(folder / file.name)
        nested.rmdir()


def model_card(config: RunConfig, agent: AgentConfig) -> str:
    """How one agent was trained, and with whom, in the form the hub shows."""
    peers = [name for name in config.authors_for(agent) if name != agent.name]
    weights = f"LoRA of rank {agent.lora.rank}" if agent.lora else "all weights"
    learned_from = (
        f"It also learned from verified rollouts of: {', '.join(peers)}. Nothing of them is needed to run it."
        if peers
        else "It learned from its own rollouts only."
    )
    return f"""---
library_name: transformers
base_model: {agent.model}
tags: [reinforcement-learning, hacrl]
---

# {agent.name}

Trained from `{agent.model}` by hacrl with {config.algorithm.name.upper()} (arXiv 2603.02604).
{learned_from}

| setting | value |
|---|---|
| steps | {config.steps} |
| prompts per step | {config.prompts_per_step} |
| own answers per prompt | {config.group_size_of(agent)} |
| temperature | {config.sampling_of(agent).temperature:g} |
| learning rate | {agent.learning_rate:g} |
| trained | {weights} |
| reward | {", ".join(item.function for item in config.reward)} |
| seed | {config.seed} |
"""
