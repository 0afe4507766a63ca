"""The same things on a GPU, wherever there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hacrl import train
from hacrl.config import AgentConfig
from hacrl.policy import Policy, load_policies
from hacrl.sampling.transformers import TransformersSampler
from tests.tiny_runs import run_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13, 14, 15, 16)]


def policy(model: Path, device: str, **options: Any) -> Policy:
    return load_policies([AgentConfig(name="a", model=str(model), device=device, **options)], seed=0)["a"]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_sampled_logprobs_are_the_policys_own(tiny_models: dict[str, Path], dtype: str, tolerance: float) -> None:
    """Through exchanged rows; the policy's numbers come from whole rows, one by one, on the CPU."""
    gpu, cpu = policy(tiny_models["qwen"], "cuda", dtype=dtype), policy(tiny_models["qwen"], "cpu", dtype="float32")
    sampler = TransformersSampler(gpu, stop_token_ids=range(0, 300, 5), pad_token_id=0, batch_rows=4)
    groups = sampler.sample(PROMPTS, places=range(3), answers=9, temperature=0.8, top_p=1.0, max_new_tokens=12, seed=3)
    for prompt, group in ((PROMPTS[index], group) for index, group in groups):
        assert len(group) == 9
        for answer in group:
            ids = torch.tensor([prompt + answer.token_ids])
            with torch.no_grad():
                logits = cpu.causal_lm(input_ids=ids).logits / 0.8
            expected = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, len(prompt) - 1 :, 0]
            assert answer.logprobs == pytest.approx(expected.tolist(), abs=tolerance)


def test_gradients_equal_those_of_the_cpu(tiny_models: dict[str, Path]) -> None:
    ids = torch.randint(5, 200, (6, 12), generator=torch.Generator().manual_seed(0))
    ids[3] = ids[0]
    attention = torch.ones_like(ids)
    mask = torch.arange(12).expand(6, 12) >= 4
    results = []
    for device in ("cpu", "cuda"):
        current = policy(tiny_models["llama"], device, dtype="float32")
        with current.training():
            logprobs, _ = current.token_logprobs(ids.to(device), attention.to(device), mask.to(device), temperature=0.9)
        (logprobs * torch.arange(6.0, device=device)[:, None]).sum().backward()
        results.append({name: p.grad.cpu() for name, p in current.trained_parameters().items() if p.grad is not None})
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_trains_resumes_and_exports(tiny_models: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    """On as many GPUs as there are, up to two; a full agent beside a LoRA."""
    config = run_config(tiny_models, tmp_path / "run", steps=2)
    last = torch.cuda.device_count() - 1
    config["agents"][0] |= {"dtype": dtype, "device": "cuda:0"}
    config["agents"][1] |= {"dtype": dtype, "device": f"cuda:{min(1, last)}", "lora": {"rank": 4}}
    train(config)
    before = load_file(tmp_path / "run" / "agents" / "qwen" / "model.safetensors")
    train({**config, "steps": 3})
    after = load_file(tmp_path / "run" / "agents" / "qwen" / "model.safetensors")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["agent/qwen/own_ratio_error"] < 1e-3 for line in lines)
    assert any(not torch.equal(before[name], after[name]) for name in before)
