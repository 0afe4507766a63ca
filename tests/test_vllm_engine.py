"""vLLM itself as an agent's sampler. Needs an environment that has it: `make vllm` makes one and runs these tests.

HACRL_VLLM_PYTHON names another interpreter than `.venv-vllm/bin/python`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_states import differs_by_nature

from hacrl.config import AgentConfig, LoraConfig, VllmConfig
from hacrl.demo.settings import demo_config
from hacrl.policy import Policy, load_policies
from hacrl.sampling.interpreter import missing_vllm
from hacrl.sampling.sampler import SampledTokens
from hacrl.sampling.transformers import TransformersSampler
from hacrl.sampling.vllm_sampler import VllmSampler, policy_logprobs
from hacrl.trainer import train, training_steps

PYTHON = os.environ.get("HACRL_VLLM_PYTHON") or str(Path(__file__).parents[1] / ".venv-vllm/bin/python")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(missing_vllm(PYTHON) is not None, reason=f"{PYTHON} has no vLLM; `make vllm` sets it up"),
]

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13, 14, 15, 16), (17,)]
VOCABULARY = 320
OWN_EOS = 7
STOPS = tuple(identity for identity in range(0, VOCABULARY, 30) if identity != OWN_EOS)


def save_model(kind: str, folder: Path) -> None:
    """Random weights. What stands in config and generation config (an end, a penalty, a top-k) must not be heeded."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "eos_token_id": OWN_EOS,
        "bos_token_id": 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = (
            LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
            if kind == "untied"
            else Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
        )
    model.generation_config = GenerationConfig(
        eos_token_id=OWN_EOS, do_sample=True, top_k=2, repetition_penalty=1.9, temperature=0.1
    )
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=["tied", "untied", "lora"])
def sampler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder / "model")
    lora = LoraConfig(rank=3) if request.param == "lora" else None
    agent = AgentConfig(name="a", model=str(folder / "model"), lora=lora, dtype="float32", device="cpu")
    sampler = VllmSampler(
        "a",
        load_policies([agent], seed=0)["a"],
        VllmConfig(python=PYTHON),
        stop_token_ids=STOPS,
        batch_rows=128,
        longest_row=64,
        log=folder / "engine.log",
    )
    yield sampler
    sampler.close()


def ask(sampler: Any, prompts: Any = PROMPTS, **changes: Any) -> list[list[SampledTokens]]:
    arguments = {"answers": 4, "temperature": 0.8, "top_p": 1.0, "max_new_tokens": 12, "seed": 1, **changes}
    groups = dict(sampler.sample(prompts, places=range(len(prompts)), **arguments))
    return [groups[index] for index in range(len(prompts))]


def furthest(sampler: VllmSampler, groups: list[list[SampledTokens]], *, temperature: float) -> float:
    """Largest distance of any answer's log-probability from the policy's."""
    rows = [(prompt, answer) for prompt, group in zip(PROMPTS, groups, strict=True) for answer in group]
    theirs = torch.tensor([value for _, answer in rows for value in answer.logprobs])
    return float((theirs - policy_logprobs(sampler.policy, rows, temperature=temperature)).abs().max())


def change_weights(policy: Policy, size: float) -> None:
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=size)


def test_logprobs_are_the_policys_before_and_after_updates(sampler: VllmSampler) -> None:
    before = ask(sampler)
    assert furthest(sampler, before, temperature=0.8) < 1e-4
    for _ in range(2):
        change_weights(sampler.policy, 0.1)
        sampler.weights_changed()
        after = ask(sampler)
        assert furthest(sampler, after, temperature=0.8) < 1e-4
        assert sampler.metrics.values()["sampler/mismatch_max"] < 1e-4
        assert [answer.token_ids for group in after for answer in group] != [
            answer.token_ids for group in before for answer in group
        ]
        before = after


def test_an_update_that_is_not_handed_over_shows(sampler: VllmSampler) -> None:
    sampler.settings = sampler.settings.model_copy(update={"on_mismatch": "warn"})
    weights = {name: value.clone() for name, value in sampler.policy.trained_parameters().items()}
    try:
        change_weights(sampler.policy, 0.05)
        with pytest.warns(UserWarning, match="nats per token"):
            ask(sampler)
    finally:
        with torch.no_grad():
            for name, parameter in sampler.policy.trained_parameters().items():
                parameter.copy_(weights[name])
        sampler.settings = sampler.settings.model_copy(update={"on_mismatch": "error"})


def test_greedy_is_that_of_the_sampler_in_process(sampler: VllmSampler) -> None:
    other = TransformersSampler(sampler.policy, stop_token_ids=STOPS, pad_token_id=0, batch_rows=64)
    ours, theirs = (ask(one, answers=1, temperature=0.0) for one in (sampler, other))
    for (mine,), (expected,) in zip(ours, theirs, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert mine.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_nucleus_logprobs_are_of_the_nucleus(sampler: VllmSampler) -> None:
    from transformers import TopPLogitsWarper

    cut = False
    for prompt, group in zip(PROMPTS, ask(sampler, temperature=0.6, top_p=0.7), strict=True):
        for answer in group:
            ids = torch.tensor([prompt + answer.token_ids])
            with torch.no_grad(), sampler.policy.active():
                logits = sampler.policy.causal_lm(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.6
            nucleus = TopPLogitsWarper(0.7)(None, logits).log_softmax(-1)
            expected = nucleus.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
            assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
            cut |= bool((nucleus == -torch.inf).any())
    assert cut


def test_answers_end_at_the_given_stops_and_at_no_other(sampler: VllmSampler) -> None:
    answers = [answer for group in ask(sampler, answers=40, temperature=2.0, max_new_tokens=30) for answer in group]
    for answer in answers:
        assert not set(STOPS) & set(answer.token_ids[:-1])
        assert (answer.finish_reason == "stop") == (answer.token_ids[-1] in STOPS)
        assert answer.finish_reason == "stop" or len(answer.token_ids) == 30
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert any(OWN_EOS in answer.token_ids[:-1] for answer in answers)


def test_a_call_is_a_function_of_its_seed(sampler: VllmSampler) -> None:
    first = ask(sampler, seed=5)
    assert ask(sampler, seed=5) == first
    assert ask(sampler, seed=6) != first
    assert all(len({answer.token_ids for answer in group}) == 4 for group in first)


def test_more_prompt_tokens_than_vllm_computes_at_a_time(sampler: VllmSampler) -> None:
    """100 x 50 tokens against 4,096; cut prompts would need random numbers taken back, which a CPU cannot."""
    prompt = tuple(range(5, 55))
    (group,) = ask(sampler, [prompt], answers=100, max_new_tokens=2)
    assert len(group) == 100
    rows = [(prompt, answer) for answer in group]
    theirs = torch.tensor([value for answer in group for value in answer.logprobs])
    assert float((theirs - policy_logprobs(sampler.policy, rows, temperature=0.8)).abs().max()) < 1e-4


def test_frequencies_follow_the_tempered_distribution(sampler: VllmSampler) -> None:
    """Chi-square over 2,000 first tokens, the most likely ids apart, the rest together: no hidden cut or penalty."""
    (group,) = ask(sampler, [(5, 6, 7)], answers=2000, temperature=0.7, max_new_tokens=1, seed=0)
    with torch.no_grad(), sampler.policy.active():
        logits = sampler.policy.causal_lm(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7
    top = logits.softmax(-1).topk(8)
    counts = torch.tensor([sum(answer.token_ids[0] == token for answer in group) for token in top.indices.tolist()])
    observed = torch.cat([counts, 2000 - counts.sum()[None]]).double()
    expected = torch.cat([top.values, 1 - top.values.sum()[None]]).double() * 2000
    assert float(((observed - expected) ** 2 / expected).sum()) < 26.1  # 99.9 % quantile for 8 degrees of freedom


# ---------------------------------------------------------------- whole runs


def run(folder: Path) -> dict[str, Any]:
    """The demo's qwen alone (vLLM's CPU attention does not know llama's head of 24), learning fast."""
    config = demo_config("gspo", output=folder, seed=0)
    config["agents"] = [{**config["agents"][0], "learning_rate": 3e-3, "sampler_correction": 1.5}]
    config["tasks"]["eval"]["arguments"]["count"] = 4
    config["sampling"] |= {"engine": "vllm", "vllm": {"python": PYTHON}, "batch_rows": 64}
    return {
        **config,
        "steps": 2,
        "prompts_per_step": 4,
        "evaluation": {"k": 2, "top_p": 0.9, "temperature": 0.7, "max_new_tokens": 50},
        "export": "none",
    }


def test_a_resumed_run_hands_its_weights_over_first(tmp_path: Path) -> None:
    """Were the first rollouts those of the base model, the comparison would end the run; and all records are equal."""
    train(run(tmp_path / "whole"))
    steps = training_steps(run(tmp_path / "parts"))
    next(steps)
    steps.close()
    train(run(tmp_path / "parts"))
    whole, parts = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert len(whole) == len(parts) == 2
    for expected, found in zip(whole, parts, strict=True):
        for name, value in expected.items():
            if not differs_by_nature(name):
                assert found[name] == value, name
    assert whole[1]["agent/qwen/sampler/mismatch_mean"] < 1e-4
    assert whole[1]["agent/qwen/own_ratio_error"] == 0
    assert 0.9 < whole[1]["agent/qwen/sampler/weight_mean"] < 1.1
    for name in ("whole", "parts"):
        assert "vllm" in (tmp_path / name / "engines/qwen.log").read_text().lower()
