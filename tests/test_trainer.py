"""Whole runs: exchange between agents, resume, kill, export, three agents of all kinds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run_states import assert_identical, final_state, metric_lines, rollout_lines
from safetensors.torch import load_file
from tiny_runs import run_config, three_agents

from hacrl.errors import ConfigError, RewardError, RunDirectoryError
from hacrl.run_directory import saved_checkpoints
from hacrl.stop import StopRequest
from hacrl.trainer import train, training_steps


@pytest.fixture(scope="module")
def finished(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of three steps."""
    return train(run_config(tiny_models, tmp_path_factory.mktemp("run") / "run"))


def test_a_run_leaves_its_documented_files(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {"config.yaml", "environment.json", "metrics.jsonl", "rollouts", "evaluations.jsonl", "checkpoints"}
    assert [line["step"] for line in metric_lines(finished)] == [1, 2, 3]
    assert len(rollout_lines(finished)) == 3 * 3 * 2 * 4
    evaluations = [json.loads(line) for line in (finished / "evaluations.jsonl").read_text().splitlines()]
    assert [(row["step"], row["agent"], row["k"], row["tasks"]) for row in evaluations] == [
        (3, "qwen", 2, 3),
        (3, "llama", 2, 3),
    ]


def test_every_verified_rollout_reaches_every_learner(finished: Path) -> None:
    rows = rollout_lines(finished)
    assert {row["author"] for row in rows} == {"qwen", "llama"}
    assert all(row["advantages"].keys() == {"qwen", "llama"} for row in rows)
    # Rows are computed where they carry advantage; s of foreign rows is away from 1, of own rows it is not.
    foreign = [(row, s) for row in rows for learner, s in row["ratios"].items() if learner != row["author"]]
    own = [s for row in rows for learner, s in row["ratios"].items() if learner == row["author"]]
    assert len(foreign) > 10
    assert max(abs(s - 1) for s in own) < 1e-4
    assert sum(abs(s - 1) > 1e-3 for _, s in foreign) > len(foreign) / 2
    metrics = metric_lines(finished)[0]
    for learner, author in (("qwen", "llama"), ("llama", "qwen")):
        pair = f"pair/{learner}/{author}"
        shares = [metrics[f"{pair}/{name}_share"] for name in ("below", "inside", "above")]
        assert sum(shares) == pytest.approx(1)
        assert {f"{pair}/{name}" for name in ("omega", "s_mean", "effective_sample_size", "weight_share")} <= set(
            metrics
        )
        assert metrics[f"{pair}/rows"] == 12


def test_agents_that_take_turns_wait_for_each_other(finished: Path) -> None:
    for line in map(json.loads, (finished / "metrics.jsonl").read_text().splitlines()):
        phases = [name for name in ("sample", "update", "evaluate") if f"time/{name}" in line]
        busy = {agent: sum(line[f"agent/{agent}/time/{name}"] for name in phases) for agent in ("qwen", "llama")}
        for agent, other in (("qwen", "llama"), ("llama", "qwen")):
            assert line[f"agent/{agent}/time/wait"] >= busy[other] > 0


def test_both_agents_learned_something(finished: Path, tiny_models: dict[str, Path]) -> None:
    for agent, state in final_state(finished).items():
        if agent in tiny_models:
            start = load_file(tiny_models[agent] / "model.safetensors")
            moved = [name for name, weight in state["weights"].items() if not torch.equal(weight, start[name])]
            assert len(moved) == len(state["weights"])


def test_the_same_run_twice_is_the_same(finished: Path, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    again = train(run_config(tiny_models, tmp_path / "again"))
    assert metric_lines(again) == metric_lines(finished)
    assert rollout_lines(again) == rollout_lines(finished)
    assert_identical(final_state(again), final_state(finished))


def test_a_run_that_was_left_continues_exactly(finished: Path, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "left")
    steps = training_steps(config)
    assert next(steps).step == 1
    steps.close()
    assert [record.step for record in training_steps(config)] == [2, 3]
    assert metric_lines(tmp_path / "left") == metric_lines(finished)
    assert rollout_lines(tmp_path / "left") == rollout_lines(finished)
    assert_identical(final_state(tmp_path / "left"), final_state(finished))


def test_a_finished_run_is_not_run_again(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "run", steps=1)
    train(config)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "agents" / "qwen" / "README.md").write_text("kept")
    assert list(training_steps(config)) == []
    assert (tmp_path / "run" / "agents" / "qwen" / "README.md").read_text() == "kept"
    shutil.rmtree(tmp_path / "run" / "agents" / "llama")
    assert list(training_steps(config)) == []
    assert (tmp_path / "run" / "agents" / "llama" / "model.safetensors").exists()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_stop_request_saves_the_last_finished_step(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "run", checkpoint={"every": 100})
    stop = StopRequest()
    steps = training_steps(config, stop=stop)
    next(steps)
    stop.request()
    assert list(steps) == []
    assert final_state(tmp_path / "run")["step"] == "step-000001"
    assert not (tmp_path / "run" / "agents").exists()
    assert [record.step for record in training_steps(config)] == [2, 3]


def test_every_evaluated_step_is_saved_so_that_the_best_one_can_be_kept(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    changes = {"checkpoint": {"every": 100, "keep_last": 3}, "evaluation": {"every": 2, "k": 1, "at_start": False}}
    run = train(run_config(tiny_models, tmp_path / "run", **changes))
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
    best = saved_checkpoints(run).best()
    assert best is not None
    assert best.score is not None


def test_a_change_that_alters_results_is_refused_by_name(finished: Path, tiny_models: dict[str, Path]) -> None:
    changed = run_config(tiny_models, finished, group_size=6, seed=9)
    with pytest.raises(RunDirectoryError) as caught:
        next(training_steps(changed))
    assert "group_size: was 4, now 6" in str(caught.value)
    assert "seed: was 0, now 9" in str(caught.value)


def test_exported_agents_run_in_a_process_without_hacrl(finished: Path) -> None:
    program = """
import sys
sys.modules["hacrl"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "2 + 3?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    print("tokens", model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] - ids.shape[1])
"""
    folders = [str(finished / "agents" / name) for name in ("qwen", "llama")]
    done = subprocess.run([sys.executable, "-c", program, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens ") == 2


def test_exported_weights_are_the_trained_ones(finished: Path) -> None:
    state = final_state(finished)
    for name in ("qwen", "llama"):
        exported = load_file(finished / "agents" / name / "model.safetensors")
        for key, weight in exported.items():
            assert torch.equal(weight, state[name]["weights"][key])
        card = (finished / "agents" / name / "README.md").read_text()
        assert "HACPO" in card
        assert ("llama" if name == "qwen" else "qwen") in card


def test_three_agents_of_all_kinds_run_resume_and_export(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    whole = train(three_agents(tiny_models, tmp_path / "whole"))
    rows = rollout_lines(whole)
    counts = {name: sum(row["author"] == name for row in rows) for name in ("first", "second", "writer")}
    assert counts == {"first": 27, "second": 36, "writer": 18}
    assert all(row["advantages"].keys() == {"first", "second"} for row in rows)
    metrics = metric_lines(whole)[0]
    assert metrics["pair/first/second/passed_on_share"] == 1  # the same tokenizer
    assert metrics["pair/first/writer/passed_on_share"] == 0
    steps = training_steps(three_agents(tiny_models, tmp_path / "left"))
    next(steps)
    steps.close()
    list(training_steps(three_agents(tiny_models, tmp_path / "left")))
    assert metric_lines(tmp_path / "left") == metric_lines(whole)
    assert_identical(final_state(tmp_path / "left"), final_state(whole))
    assert {path.name for path in (whole / "agents").iterdir()} == {"first", "second"}


def test_lora_exports_merged_and_as_adapter_agree(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = train(three_agents(tiny_models, tmp_path / "merged"))
    adapter = train(three_agents(tiny_models, tmp_path / "adapter", export="adapter"))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tiny_models["qwen"])
        start = base(ids).logits
        for name in ("first", "second"):
            whole = AutoModelForCausalLM.from_pretrained(merged / "agents" / name)(ids).logits
            base = AutoModelForCausalLM.from_pretrained(tiny_models["qwen"])
            parts = PeftModel.from_pretrained(base, str(adapter / "agents" / name))(ids).logits
            torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-4)
            assert (whole - start).abs().max() > 1e-3


def test_a_learner_learns_only_from_those_it_names(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config = three_agents(tiny_models, tmp_path / "run", steps=1, evaluation={"k": 1, "at_start": False})
    config["agents"][0]["learns_from"] = ["writer"]
    config["agents"][1]["learns_from"] = []
    rows = rollout_lines(train(config))
    learners = {author: {k for row in rows if row["author"] == author for k in row["advantages"]} for author in
                ("first", "second", "writer")}  # fmt: skip
    assert learners == {"first": {"first"}, "second": {"second"}, "writer": {"first"}}


@pytest.mark.parametrize("name", ["gspo", "grpo", "naive", "gspo-x2"])
def test_every_baseline_trains(tiny_models: dict[str, Path], tmp_path: Path, name: str) -> None:
    config = run_config(tiny_models, tmp_path / "run", steps=1, algorithm=name, prompts_per_step=4)
    rows = rollout_lines(train(config))
    assert len(rows) == 4 * 2 * (8 if name == "gspo-x2" else 4)
    own_only = {frozenset(row["advantages"]) for row in rows} == {frozenset({"qwen"}), frozenset({"llama"})}
    assert own_only == (name != "naive")
    updates = metric_lines(tmp_path / "run")[0]["agent/qwen/updates"]
    assert updates == {"gspo": 1, "grpo": 1, "naive": 2, "gspo-x2": 2}[name]


def test_faults_of_tasks_rewards_and_tokenizers_are_told_together(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "empty").mkdir()
    config = run_config(tiny_models, tmp_path / "run", reward="no_such_module:function")
    config["tasks"]["train"] = {"dataset": str(tmp_path / "data.jsonl"), "prompt": "prompt"}
    config["agents"][1]["model"] = str(tmp_path / "empty")
    with pytest.raises(ConfigError) as caught:
        next(training_steps(config))
    text = str(caught.value)
    assert "question" in text  # the columns that are there
    assert "no_such_module" in text
    assert "llama" in text
    assert not (tmp_path / "run").exists()


def test_a_prompt_above_the_limit_is_refused_or_dropped_and_counted(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = run_config(tiny_models, tmp_path / "run", steps=1, sampling={"max_new_tokens": 4, "max_prompt_tokens": 5})
    with pytest.raises(ConfigError, match="max_prompt_tokens"):
        next(training_steps(config))


def test_dropped_prompts_are_told(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    questions = ["1 + 1?", "2 + 2?", "What is " + "1 + " * 60 + "1?"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    config = run_config(tiny_models, tmp_path / "run", steps=1, prompts_per_step=2)
    config["tasks"] = {"train": {"dataset": str(tmp_path / "data.jsonl"), "long_prompts": "drop"}}
    with pytest.warns(UserWarning, match="tasks.train: 1 task.* left out"):
        train(config)


def test_columns_are_checked_in_every_task(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from hacrl.types import Task\n"
        "def tasks():\n"
        "    return [Task(id=str(n), prompt=f'{n}?', columns={'gold': n} if n < 3 else {}) for n in range(4)]\n"
        "def reward(completions, gold):\n    return [0.0 for _ in completions]\n"
    )
    config = run_config(tiny_models, tmp_path / "run", reward=f"{tmp_path}/mine.py:reward")
    config["tasks"] = {"train": {"function": f"{tmp_path}/mine.py:tasks"}}
    with pytest.raises(ConfigError, match="needs gold"):
        next(training_steps(config))


def test_a_step_without_any_score_ends_the_run(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def hangs(completions):\n    while True:\n        pass\n")
    config = run_config(
        tiny_models, tmp_path / "run", reward=f"{tmp_path}/mine.py:hangs", prompts_per_step=1, group_size=1,
        verification={"time_limit_s": 0.2},
    )  # fmt: skip
    with pytest.raises(RewardError, match=r"'hangs': none of the 2 answers .*timeout 2.*time_limit_s"):
        next(training_steps(config))


def test_limits_beyond_the_models_context_are_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "run", sampling={"max_new_tokens": 10**6, "max_prompt_tokens": 64})
    with pytest.raises(ConfigError, match=r"agents.0 \(qwen\): max_prompt_tokens 64 .* context holds"):
        next(training_steps(config))
    config = run_config(tiny_models, tmp_path / "run", evaluation={"max_new_tokens": 10**6})
    with pytest.raises(
        ConfigError, match=r"max_prompt_tokens 64 \+ evaluation.max_new_tokens 1000000 .* context holds"
    ):
        next(training_steps(config))


def start_run(config_path: Path) -> subprocess.Popen[str]:
    program = (
        "import sys\nfrom hacrl.trainer import training_steps\nif __name__ == '__main__':\n"
        "    for record in training_steps(sys.argv[1]):\n        print(record.step, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(config_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


@pytest.mark.slow
def test_kill_at_ten_random_moments_changes_nothing(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """kill -9 while starting, sampling, verifying, updating, recording or saving: each time the run goes on as if
    nothing had been, and ends with the same metrics, rollouts, weights, optimizers and capability window."""
    import random

    import yaml

    changes: dict[str, Any] = {"steps": 60, "evaluation": {"every": 20, "k": 1}}
    whole = train(run_config(tiny_models, tmp_path / "whole", **changes))
    killed = tmp_path / "killed"
    config_path = tmp_path / "config.yaml"
    config_path.write_text(yaml.safe_dump(run_config(tiny_models, killed, **changes)))
    random_moment = random.Random(20260)
    kills = 0
    while kills < 10:
        process = start_run(config_path)
        assert process.stdout is not None
        # Some die before their first step, most somewhere within the one or two steps after it.
        if random_moment.random() < 0.8:
            process.stdout.readline()
        time.sleep(random_moment.uniform(0.0, 0.5))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        else:
            pytest.fail(f"the run ended after {kills} kills: it needs more steps")
        process.wait()
    done = start_run(config_path)
    _, errors = done.communicate()
    assert done.returncode == 0, errors
    assert metric_lines(killed) == metric_lines(whole)
    assert rollout_lines(killed) == rollout_lines(whole)
    assert_identical(final_state(killed), final_state(whole))
    evaluations = [
        [{k: v for k, v in json.loads(line).items() if k not in ("time", "run_id")} for line in
         (run / "evaluations.jsonl").read_text().splitlines()] for run in (killed, whole)
    ]  # fmt: skip
    assert evaluations[0] == evaluations[1]
