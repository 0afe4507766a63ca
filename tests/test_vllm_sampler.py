"""The client of an engine process, against one without vLLM: hand-over, comparison, failures, and no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import run_config

from hacrl.config import AgentConfig, LoraConfig, RunConfig, VllmConfig, load_config
from hacrl.config.combinations import impossible_combinations
from hacrl.errors import ConfigError, SamplerError
from hacrl.policy import Policy, load_policies
from hacrl.preflight import prepare
from hacrl.sampling.handover import merged_weights, write_weights
from hacrl.sampling.vllm_sampler import VllmSampler, _environment

HERE = Path(__file__).parent
FAKE = HERE / "fake_engine.py"
PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13)]


@pytest.fixture
def uniform_policy(tiny_models: dict[str, Path]) -> Policy:
    """All weights zero: every id has the same probability."""
    policy = load_policies([AgentConfig(name="a", model=str(tiny_models["qwen"]))], seed=0)["a"]
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
    return policy


@pytest.fixture
def sampler(uniform_policy: Policy, tmp_path: Path) -> Iterator[VllmSampler]:
    sampler = build(uniform_policy, tmp_path)
    yield sampler
    sampler.close()


def build(policy: Policy, folder: Path, **settings: Any) -> VllmSampler:
    return VllmSampler(
        "a",
        policy,
        VllmConfig(**settings),
        stop_token_ids=(2,),
        batch_rows=8,
        longest_row=40,
        log=folder / "a.log",
        worker=FAKE,
    )


def ask(sampler: VllmSampler, **changes: Any) -> Any:
    arguments = {"answers": 2, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 5, "seed": 1, **changes}
    groups = dict(sampler.sample(PROMPTS, places=range(len(PROMPTS)), **arguments))
    return [groups[index] for index in range(len(PROMPTS))]


def log(sampler: VllmSampler) -> list[str]:
    assert sampler.log is not None
    return sampler.log.read_text().splitlines()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Any, what: str) -> None:
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"not within 10 s: {what}")


# ---------------------------------------------------------------- answers


def test_answers_come_in_the_order_of_the_prompts_and_are_a_function_of_the_seed(sampler: VllmSampler) -> None:
    groups = ask(sampler)
    assert [len(group) for group in groups] == [2, 2, 2]
    assert {len(answer.token_ids) for group in groups for answer in group} == {5}
    assert {answer.finish_reason for group in groups for answer in group} <= {"stop", "length"}
    assert ask(sampler) == groups
    assert ask(sampler, seed=2) != groups
    assert len({answer.token_ids for group in groups for answer in group}) == 6


def test_answers_belong_to_the_place_of_the_prompt_in_the_whole(sampler: VllmSampler) -> None:
    whole = ask(sampler)
    arguments = {"answers": 2, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 5, "seed": 1}
    part = dict(sampler.sample([PROMPTS[2], PROMPTS[0]], places=[2, 0], **arguments))  # type: ignore[arg-type]
    assert part == {0: whole[2], 1: whole[0]}
    assert list(sampler.sample([], places=[], **arguments)) == []  # type: ignore[arg-type]


def test_the_engine_gets_ids_limits_and_no_hidden_defaults(sampler: VllmSampler) -> None:
    ask(sampler)
    settings = json.loads(log(sampler)[0].partition("] ")[2])
    assert settings["generation_config"] == "vllm"
    assert settings["logprobs_mode"] == "processed_logprobs"
    assert settings["skip_tokenizer_init"]
    assert (settings["max_model_len"], settings["max_num_seqs"], settings["dtype"]) == (40, 8, "float32")
    assert not settings["enable_sleep_mode"]


# ---------------------------------------------------------------- hand-over


def test_weights_are_handed_over_when_they_changed_and_only_then(sampler: VllmSampler) -> None:
    ask(sampler)
    ask(sampler)
    assert [line.split()[0] for line in log(sampler)] == ["load"]
    sampler.weights_changed()
    ask(sampler)
    ask(sampler)
    assert [line.split()[0] for line in log(sampler)] == ["load", "reload"]
    assert "model.safetensors" in log(sampler)[1]


def test_nothing_of_the_weights_stays_on_disk(sampler: VllmSampler) -> None:
    ask(sampler)
    sampler.weights_changed()
    ask(sampler)
    assert sampler._engine is not None
    folder = sampler._engine.folder
    assert list(folder.iterdir()) == []
    sampler.close()
    assert not folder.exists()


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_written_weights_are_the_policy(
    kind: str, lora: LoraConfig | None, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    policy = load_policies([AgentConfig(name="a.b", model=str(tiny_models[kind]), lora=lora)], seed=0)["a.b"]
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    stored = policy.config.dtype = torch.bfloat16
    write_weights(policy, tmp_path / "w")
    assert policy.config.dtype is stored
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad(), policy.active():
        expected = policy.causal_lm(input_ids=ids).logits
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "w", dtype=torch.float32)
    assert torch.allclose(written(input_ids=ids).logits, expected, atol=1e-4)


def test_another_agents_adapter_on_the_same_base_is_left_out(tiny_models: dict[str, Path]) -> None:
    agents = [AgentConfig(name=name, model=str(tiny_models["qwen"]), lora=LoraConfig(rank=2)) for name in ("a", "b")]
    policies = load_policies(agents, seed=0)
    before = {name: tensor.clone() for name, tensor in merged_weights(policies["a"]).items()}
    with torch.no_grad():
        for parameter in policies["b"].trained_parameters().values():
            parameter.add_(1.0)
    after = merged_weights(policies["a"])
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(
        torch.equal(before[name], merged_weights(policies["b"])[name]) for name in before if "q_proj" in name
    )


# ---------------------------------------------------------------- comparison


def test_equal_log_probabilities_give_no_mismatch(sampler: VllmSampler) -> None:
    ask(sampler, temperature=0.7)
    assert sampler.metrics.values()["sampler/mismatch_mean"] < 1e-5
    assert sampler.metrics.values()["sampler/mismatch_max"] < 1e-5


@pytest.mark.parametrize("change", ["before", "after"])
def test_an_engine_with_other_weights_ends_the_run(sampler: VllmSampler, uniform_policy: Policy, change: str) -> None:
    if change == "after":
        ask(sampler)
    with torch.no_grad():
        for parameter in uniform_policy.model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    sampler.weights_changed()
    with pytest.raises(
        SamplerError, match=r"agent a: .* nats per token .* limit is 0.001 \(sampling.vllm.mismatch_limit"
    ):
        ask(sampler)


def test_a_warning_in_place_of_the_error(uniform_policy: Policy, tmp_path: Path) -> None:
    with torch.no_grad():
        for parameter in uniform_policy.model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    sampler = build(uniform_policy, tmp_path, on_mismatch="warn")
    with pytest.warns(UserWarning, match="nats per token"):
        assert len(ask(sampler)) == 3
    assert sampler.metrics.values()["sampler/mismatch_mean"] > 0.1
    sampler.close()
    sampler = build(uniform_policy, tmp_path, mismatch_limit=1e6)
    ask(sampler)
    sampler.close()


def test_within_a_nucleus_log_probabilities_may_be_higher_by_its_mass_alone(
    uniform_policy: Policy, tmp_path: Path
) -> None:
    sampler = build(uniform_policy, tmp_path, on_mismatch="warn")
    ask(sampler, top_p=0.5)
    assert sampler.metrics.values()["sampler/mismatch_max"] < 1e-5
    sampler.close()


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("die", r"agent a: the engine was ended by SIGKILL(.|\n)*a\.log(.|\n)*out of memory, or so"),
        ("exit", r"agent a: the engine ended with exit code 3"),
        ("error", r"agent a: the engine failed at 'sample': ValueError: no such head size"),
    ],
)
def test_a_dead_engine_says_why(
    sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", fault)
    with pytest.raises(SamplerError, match=message):
        ask(sampler)
    assert sampler._engine is not None
    assert not sampler._engine.folder.exists()
    with pytest.raises(SamplerError, match="has been closed"):
        ask(sampler)


def test_an_engine_that_was_killed_between_two_calls(sampler: VllmSampler) -> None:
    ask(sampler)
    assert sampler._engine is not None
    assert sampler._engine.pid is not None
    os.kill(sampler._engine.pid, signal.SIGKILL)
    with pytest.raises(SamplerError, match="was ended by SIGKILL"):
        ask(sampler)


def test_an_interpreter_that_cannot_be_started(uniform_policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match="cannot be started with /no/such/python"):
        ask(build(uniform_policy, tmp_path, python="/no/such/python"))


def test_an_engine_for_another_device(sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DEVICE", "cuda")
    with pytest.raises(SamplerError, match="its device is cpu, but this vLLM is built for cuda"):
        ask(sampler)
    assert sampler._engine is None


def test_each_engine_sees_the_gpus_from_its_device_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert _environment(torch.device("cuda:1"), 2)["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert _environment(torch.device("cuda"), 1)["CUDA_VISIBLE_DEVICES"] == "4"
    assert "CUDA_VISIBLE_DEVICES" not in _environment(torch.device("cpu"), 1)


# ---------------------------------------------------------------- no orphans

PARENT = """
import signal
import sys
from pathlib import Path
from hacrl.sampling.engine_process import EngineProcess

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background may have it ignored
engine = EngineProcess(
    "a", python=sys.executable, worker=Path(sys.argv[1]), environment={}, log=Path(sys.argv[2]), bytes_needed=0
)
engine.call("load", model=sys.argv[3])
print(engine.pid, engine.folder, flush=True)
if sys.argv[4] == "leave":
    sys.exit()
engine.call("sample", prompts=[[1]], seeds=[[1]], max_new_tokens=1)
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize(
    ("end", "fault"),
    [
        (signal.SIGKILL, "hang"),
        (signal.SIGTERM, "hang"),
        (signal.SIGINT, "hang"),
        (signal.SIGKILL, "work"),
        ("leave", "work"),
    ],
)
def test_no_process_and_no_folder_outlives_its_parent(
    end: Any, fault: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    arguments = [str(FAKE), str(tmp_path / "log"), str(tiny_models["qwen"]), "leave" if end == "leave" else fault]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "FAKE_ENGINE": fault},
    )
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    if fault == "hang" and end != "leave":
        wait_until(lambda: "hangs" in (tmp_path / "log").read_text(), "the call begins")
    if end != "leave" and parent.poll() is None:
        parent.send_signal(end)
    parent.wait(60)
    wait_until(lambda: not alive(int(pid)), "the engine ends")
    wait_until(lambda: not Path(folder).exists(), "its folder goes")


# ---------------------------------------------------------------- configuration


def configured(tiny_models: dict[str, Path], *changes: str) -> RunConfig:
    return load_config(run_config(tiny_models, Path("run")), changes)


def test_an_agent_departs_from_the_runs_engine_and_inherits_the_rest(tiny_models: dict[str, Path]) -> None:
    config = configured(
        tiny_models,
        "sampling.engine=vllm",
        "sampling.vllm.python=/a/python",
        "sampling.vllm.memory_share=0.5",
        "agents.qwen.sampling.vllm.memory_share=0.2",
        "agents.llama.sampling.engine=transformers",
    )
    qwen, llama = (config.sampling_of(agent) for agent in config.agents)
    assert (qwen.engine, qwen.vllm.memory_share, qwen.vllm.python) == ("vllm", 0.2, "/a/python")
    assert (llama.engine, llama.vllm.memory_share) == ("transformers", 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["sampling.temperature=0.005"], "sampling.temperature is 0.005, and vLLM samples at 0.01"),
        (["evaluation.temperature=0.005"], "evaluation.temperature is 0.005, and vLLM samples at 0.01"),
        (["agents.0.trust_remote_code=true"], r"agents.0 \(qwen\): trust_remote_code"),
        (["agents.0.sampler_correction=2", "agents.0.old_logprobs=sampler"], "use old_logprobs: auto or learner"),
        (["agents.0.sampler_correction=2", "agents.0.role=author"], "so sampler_correction has no effect"),
    ],
)
def test_what_cannot_work_together(tiny_models: dict[str, Path], changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(tiny_models, "sampling.engine=vllm", *changes)


def test_the_same_is_fine_without_vllm(tiny_models: dict[str, Path]) -> None:
    changes = ["sampling.temperature=0.005", "evaluation.temperature=0.005", "agents.0.trust_remote_code=true"]
    assert impossible_combinations(configured(tiny_models, *changes)) == []


@pytest.mark.parametrize(
    ("python", "message"), [("/no/such/python", "is no program that can be run"), (sys.executable, "has no vLLM")]
)
def test_a_missing_engine_is_told_before_a_model_loads(
    tiny_models: dict[str, Path], tmp_path: Path, python: str, message: str
) -> None:
    config = load_config(
        run_config(tiny_models, tmp_path, sampling={"engine": "vllm", "vllm": {"python": python}, "max_new_tokens": 8})
    )
    with pytest.raises(ConfigError, match=f"sampling.vllm.python: .*{message}"):
        prepare(config)
