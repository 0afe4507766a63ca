"""Reading a configuration: short forms, overrides, every fault told at once with its place and remedy."""

# ruff: noqa: E501 - one line for each message

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hacrl.config import (
    DatasetConfig,
    FunctionTasksConfig,
    GrpoConfig,
    GspoConfig,
    HacpoConfig,
    LocalConfig,
    RayConfig,
    ReasoningGymConfig,
    RunConfig,
    load_config,
)
from hacrl.config_changes import altering_changes, differences
from hacrl.errors import ConfigError

BASE: dict[str, Any] = {
    "agents": [{"name": "qwen", "model": "Qwen/Qwen3-1.7B-Base"}, {"name": "llama", "model": "models/llama"}],
    "tasks": {"train": {"dataset": "openai/gsm8k", "prompt": "question", "answer": "answer"}},
    "reward": "math",
    "steps": 60,
    "prompts_per_step": 128,
    "output": "runs/test",
}


def config_with(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(BASE), **changes}


def agents_with(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The two agents of BASE with changes, then any further ones whole."""
    base = copy.deepcopy(BASE["agents"])
    return [{**(base[index] if index < len(base) else {}), **change} for index, change in enumerate(changes)]


def problems(data: Any, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(data, overrides)
    return caught.value.problems


def problem(data: Any, overrides: tuple[str, ...] = ()) -> str:
    (only,) = problems(data, overrides)
    return only


# ---------------------------------------------------------------- what a good file means


def test_documented_example_reads_as_written(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        """
        agents:
          - {name: qwen, model: Qwen/Qwen3-1.7B-Base, learning_rate: 1e-6}
          - {name: llama, model: meta-llama/Llama-3.2-1B-Instruct, learning_rate: 1e-6, lora: {rank: 32}}
        tasks:
          train: {dataset: openai/gsm8k, config: main, split: train, prompt: question, answer: answer}
          eval:  {dataset: openai/gsm8k, config: main, split: test, prompt: question, answer: answer, limit: 200}
        reward: math
        algorithm: {name: hacpo, alpha: 1.0, delta: 0.2, delta_step: 0.025}
        steps: 60
        prompts_per_step: 128
        group_size: 8
        output: runs/gsm8k-hacpo
        """
    )
    config = load_config(path)
    assert config.agents[0].learning_rate == 1e-6
    assert config.agents[1].lora is not None
    assert config.agents[1].lora.rank == 32
    assert isinstance(config.tasks.train, DatasetConfig)
    assert config.tasks.eval["eval"].limit == 200
    assert [reward.function for reward in config.reward] == ["math"]
    assert config.algorithm == HacpoConfig()


def test_defaults_are_the_papers_setting() -> None:
    algorithm = load_config(BASE).algorithm
    assert isinstance(algorithm, HacpoConfig)
    assert (algorithm.alpha, algorithm.delta, algorithm.delta_step, algorithm.window) == (1.0, 0.2, 0.025, 5)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.epsilon) == (3e-4, 4e-4, 1e-6)
    assert algorithm.score == "positive_rate"
    grpo = load_config(BASE, ["algorithm=grpo"]).algorithm
    assert isinstance(grpo, GrpoConfig)
    assert (grpo.clip_low, grpo.clip_high) == (0.2, 0.28)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("math", [("math", 1.0)]),
        ({"function": "exact", "weight": 2}, [("exact", 2.0)]),
        (["math", {"function": "my.py:score", "weight": 0.5}], [("math", 1.0), ("my.py:score", 0.5)]),
    ],
)
def test_reward_short_forms(reward: Any, expected: list[tuple[str, float]]) -> None:
    config = load_config(config_with(reward=reward))
    assert [(item.function, item.weight) for item in config.reward] == expected


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("gspo", GspoConfig()),
        ({"name": "gspo"}, GspoConfig()),
        ({"alpha": 3}, HacpoConfig(alpha=3)),
        ({"name": "hacpo", "clipping": "none"}, HacpoConfig(clipping="none")),
    ],
)
def test_algorithm_short_forms(algorithm: Any, expected: Any) -> None:
    assert load_config(config_with(algorithm=algorithm)).algorithm == expected


def test_task_sources_are_told_apart_by_their_option() -> None:
    tasks = {
        "train": {"reasoning_gym": "chain_sum", "size": 10},
        "eval": {"easy": {"function": "my.py:tasks"}, "hard": {"dataset": "test.jsonl"}},
    }
    config = load_config(config_with(tasks=tasks)).tasks
    assert isinstance(config.train, ReasoningGymConfig)
    assert isinstance(config.eval["easy"], FunctionTasksConfig)
    assert isinstance(config.eval["hard"], DatasetConfig)


def test_one_eval_source_is_called_eval_and_its_options_keep_their_places() -> None:
    tasks = {"train": {"dataset": "a"}, "eval": {"dataset": "b", "split": "test"}}
    assert list(load_config(config_with(tasks=tasks)).tasks.eval) == ["eval"]
    tasks["eval"]["splt"] = "test"
    assert problem(config_with(tasks=tasks)) == "tasks.eval.splt: unknown option; did you mean 'split'?"


def test_agents_inherit_sampling_and_group_size() -> None:
    config = load_config(
        config_with(
            group_size=4,
            sampling={"temperature": 0.8, "max_new_tokens": 64},
            agents=agents_with({"group_size": 2, "sampling": {"temperature": 0.5}}, {}),
        )
    )
    first, second = config.agents
    assert (config.group_size_of(first), config.group_size_of(second)) == (2, 4)
    assert (config.sampling_of(first).temperature, config.sampling_of(first).max_new_tokens) == (0.5, 64)
    assert config.sampling_of(second).temperature == 0.8


def test_who_uses_whose_rollouts() -> None:
    agents = agents_with(
        {"learns_from": ["teacher"]},
        {},
        {"name": "teacher", "model": "t", "role": "author"},
        {"name": "pupil", "model": "p", "role": "learner"},
    )
    config = load_config(config_with(agents=agents))
    used = {agent.name: config.authors_for(agent) for agent in config.agents}
    assert used == {
        "qwen": ["qwen", "teacher"],
        "llama": ["qwen", "llama", "teacher"],
        "teacher": [],
        "pupil": ["qwen", "llama", "teacher"],
    }
    own_only = load_config(config_with(agents=agents[:3], algorithm="gspo"))
    assert [own_only.authors_for(agent) for agent in own_only.agents] == [["qwen"], ["llama"], []]


def test_updates_per_step() -> None:
    config = load_config(config_with(prompts_per_minibatch=64, agents=agents_with({"group_size": 4}, {})))
    # 512 own rows in minibatches of 256, then 1024 foreign ones; the other way round for the second agent.
    assert config.updates_per_step(config.agents[0]) == (2, 4)
    assert config.updates_per_step(config.agents[1]) == (2, 1)
    mixed = load_config(config, ["minibatch_order=mixed"])
    assert mixed.updates_per_step(mixed.agents[0]) == (0, 6)


def test_gspo_x2_doubles_rollouts_and_updates_in_minibatches_of_the_same_size() -> None:
    agents = agents_with({"group_size": 4}, {})
    once = load_config(config_with(algorithm="gspo", agents=agents, prompts_per_minibatch=64))
    twice = load_config(
        config_with(algorithm={"name": "gspo-x2", "clip_low": 0.1}, agents=agents, prompts_per_minibatch=64)
    )
    assert twice.algorithm == GspoConfig(clip_low=0.1)
    assert (twice.group_size, twice.agents[0].group_size, twice.agents[1].group_size) == (16, 8, None)
    for before, after in zip(once.agents, twice.agents, strict=True):
        assert twice.group_size_of(after) == 2 * once.group_size_of(before)
        assert twice.minibatch_rows(after) == once.minibatch_rows(before)
        assert twice.updates_per_step(after)[0] == 2 * once.updates_per_step(before)[0]


def test_gspo_x2_halves_a_step_that_was_one_minibatch_and_respects_overrides() -> None:
    config = load_config(BASE, ["algorithm=gspo-x2", "group_size=4"])
    assert (config.group_size, config.prompts_per_minibatch) == (8, 64)


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("algorithm.alpha=3", lambda config: config.algorithm.alpha == 3.0),
        ("agents.0.learning_rate=5e-7", lambda config: config.agents[0].learning_rate == 5e-7),
        ("agents.llama.learning_rate=5e-7", lambda config: config.agents[1].learning_rate == 5e-7),
        ("agents.llama.lora.rank=8", lambda config: config.agents[1].lora.rank == 8),
        ("agents.qwen.learns_from=[llama]", lambda config: config.agents[0].learns_from == ["llama"]),
        ("agents.1={name: gemma, model: m}", lambda config: config.agents[1].name == "gemma"),
        ("evaluation.at_start=false", lambda config: config.evaluation.at_start is False),
        ("tasks.eval={dataset: d, limit: 3}", lambda config: config.tasks.eval["eval"].limit == 3),
        ("reward=[math, exact]", lambda config: len(config.reward) == 2),
        ("output=runs/a=b", lambda config: config.output == "runs/a=b"),
        ("prompts_per_minibatch=null", lambda config: config.prompts_per_minibatch is None),
        ("sampling.temperature=.5", lambda config: config.sampling.temperature == 0.5),
    ],
)
def test_override(override: str, read: Any) -> None:
    assert read(load_config(BASE, [override]))


def test_algorithm_given_by_name_can_be_overridden_inside() -> None:
    assert load_config(config_with(algorithm="hacpo"), ["algorithm.alpha=3"]).algorithm == HacpoConfig(alpha=3)


def test_an_option_that_is_null_can_be_overridden_inside() -> None:
    resolved = load_config(BASE)
    assert resolved.agents[0].lora is None
    assert load_config(resolved, ["agents.0.lora.rank=8"]).agents[0].lora is not None


def test_an_override_of_every_entry_of_a_list() -> None:
    config = load_config(BASE, ["agents.*.learning_rate=5e-4", "agents.*.lora.rank=4", "agents.1.learning_rate=1e-5"])
    assert [agent.learning_rate for agent in config.agents] == [5e-4, 1e-5]
    assert [agent.lora.rank for agent in config.agents if agent.lora] == [4, 4]


def test_later_overrides_win_and_the_callers_mapping_stays_as_it_was() -> None:
    data = config_with()
    assert load_config(data, ["steps=5", "steps=7", "agents.0.model=other"], output="elsewhere").steps == 7
    assert data == BASE


def test_references_see_overrides() -> None:
    data = config_with(evaluation={"every": "${steps}"}, tasks={"train": {"dataset": "a"}, "eval": {"dataset": "b"}})
    assert load_config(data, ["steps=7"]).evaluation.every == 7
    assert load_config(BASE, ["group_size=${steps}"]).group_size == 60


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "override 'steps': expected key=value, e.g. algorithm.alpha=3"),
        ("=3", "override '=3': expected key=value, e.g. algorithm.alpha=3"),
        ("agents.2.model=x", "override 'agents.2.model=x': agents has 2 entries, none is '2'"),
        ("agents.gemma.model=x", "override 'agents.gemma.model=x': agents has 2 entries, none is 'gemma'"),
        ("agents.-1.model=x", "override 'agents.-1.model=x': agents has 2 entries, none is '-1'"),
        ("steps.x=3", "override 'steps.x=3': steps is 60, which has no options inside"),
        ("reward.weight=2", "override 'reward.weight=2': reward is 'math', which has no options inside"),
        ("algorithm.alpa=3", "algorithm.alpa: unknown option; did you mean 'alpha'?"),
    ],
)
def test_faulty_override(override: str, message: str) -> None:
    assert problem(BASE, (override,)) == message


def test_override_that_is_no_yaml() -> None:
    line = problem(BASE, ("steps=[",))
    assert line.startswith("override 'steps=[': the value is not YAML: ")
    assert "\n" not in line


# ---------------------------------------------------------------- round trip


def test_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    agents = agents_with(
        {"lora": {"rank": 4}, "chat_template_arguments": {"enable_thinking": False}}, {"role": "author"}
    )
    data = config_with(
        agents=agents,
        tasks={"train": {"reasoning_gym": "gcd"}, "eval": {"a": {"dataset": "d"}, "b": {"function": "f:g"}}},
        reward=["math", {"function": "f:g", "weight": 0.1}],
        algorithm={"name": "hacpo", "epsilon": 1e-7},
    )
    config = load_config(data)
    assert load_config(config) == config
    assert load_config(config.model_dump()) == config
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(config.model_dump())))
    assert load_config(path) == config


def test_a_configuration_cannot_be_changed_after_validation() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(BASE).steps = 3  # type: ignore[misc]


# ---------------------------------------------------------------- unknown options, at every level


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sted": 1}, "sted: unknown option; did you mean 'seed'?"),
        ({"temperature": 1}, "temperature: unknown option; did you mean 'sampling.temperature'?"),
        ({"agents": agents_with({"learnig_rate": 1}, {})}, "agents.0.learnig_rate: unknown option; did you mean 'learning_rate'?"),
        ({"agents": agents_with({}, {"max_new_tokens": 1})}, "agents.1.max_new_tokens: unknown option; did you mean 'sampling.max_new_tokens'?"),
        ({"agents": agents_with({"lora": {"rank": 2, "drop_out": 0}}, {})}, "agents.0.lora.drop_out: unknown option; did you mean 'dropout'?"),
        ({"agents": agents_with({"optimizer": {"weigth_decay": 0}}, {})}, "agents.0.optimizer.weigth_decay: unknown option; did you mean 'weight_decay'?"),
        ({"agents": agents_with({"schedule": {"warmup": 0}}, {})}, "agents.0.schedule.warmup: unknown option; did you mean 'warmup_steps'?"),
        ({"agents": agents_with({"sampling": {"temprature": 1}}, {})}, "agents.0.sampling.temprature: unknown option; did you mean 'temperature'?"),
        ({"tasks": {"train": {"dataset": "d"}, "evals": {}}}, "tasks.evals: unknown option; did you mean 'eval'?"),
        ({"tasks": {"train": {"dataset": "d", "promt": "q"}}}, "tasks.train.promt: unknown option; did you mean 'prompt'?"),
        ({"tasks": {"train": {"reasoning_gym": "gcd", "sizes": 1}}}, "tasks.train.sizes: unknown option; did you mean 'size'?"),
        ({"tasks": {"train": {"function": "f:g", "argments": {}}}}, "tasks.train.argments: unknown option; did you mean 'arguments'?"),
        ({"tasks": {"train": {"dataset": "d"}, "eval": {"x": {"dataset": "d", "spilt": "q"}}}}, "tasks.eval.x.spilt: unknown option; did you mean 'split'?"),
        ({"reward": [{"function": "math", "wieght": 1}]}, "reward.0.wieght: unknown option; did you mean 'weight'?"),
        ({"algorithm": {"name": "hacpo", "alfa": 1}}, "algorithm.alfa: unknown option; did you mean 'alpha'?"),
        ({"algorithm": {"name": "gspo", "alpha": 1}}, "algorithm.alpha: unknown option; known here: clip_high, clip_low, epsilon, name"),
        ({"sampling": {"top_p": 1}}, "sampling.top_p: unknown option; known here: batch_rows, engine, max_new_tokens, max_prompt_tokens, temperature, vllm"),
        ({"exchange": {"to_long": "drop"}}, "exchange.to_long: unknown option; did you mean 'too_long'?"),
        ({"verification": {"time_limit": 1}}, "verification.time_limit: unknown option; did you mean 'time_limit_s'?"),
        ({"evaluation": {"evry": 1}}, "evaluation.evry: unknown option; did you mean 'every'?"),
        ({"checkpoint": {"keep": 1}}, "checkpoint.keep: unknown option; did you mean 'keep_last'?"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_unknown_option(changes: dict[str, Any], message: str) -> None:
    assert problem(config_with(**changes)) == message


def test_two_kinds_of_source_in_one() -> None:
    tasks = {"train": {"dataset": "d", "reasoning_gym": "gcd"}}
    assert problem(config_with(tasks=tasks)) == (
        "tasks.train.reasoning_gym: a source is one of dataset, reasoning_gym, function; take out all but one"
    )


def test_misspelt_source() -> None:
    assert problems(config_with(tasks={"train": {"reasoning_gim": "gcd"}})) == (
        "tasks.train.dataset: required and not given",
        "tasks.train.reasoning_gim: unknown option; did you mean 'reasoning_gym'?",
    )


# ---------------------------------------------------------------- types and ranges


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": "many"}, "steps: got 'many'; input should be a valid integer, unable to parse string as an integer"),
        ({"steps": 0}, "steps: got 0; input should be greater than or equal to 1"),
        ({"group_size": 1.5}, "group_size: got 1.5; input should be a valid integer, got a number with a fractional part"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature: got nan; input should be a finite number"),
        ({"algorithm": {"delta": 1.5}}, "algorithm.delta: got 1.5; input should be less than or equal to 1"),
        ({"tasks": "gsm8k"}, "tasks: got 'gsm8k'; must be a mapping of options"),
        ({"tasks": {"train": "gsm8k"}}, "tasks.train: got 'gsm8k'; must be a mapping of options"),
        ({"tasks": {"train": {"dataset": "d"}, "eval": [1]}}, "tasks.eval: got [1]; must be a mapping of options"),
        ({"agents": []}, "agents: got []; list should have at least 1 item after validation, not 0"),
        ({"agents": ["qwen"]}, "agents.0: got 'qwen'; must be a mapping of options"),
        ({"reward": 3}, "reward: got 3; input should be a valid list"),
        ({"algorithm": 3}, "algorithm: got 3; must be a mapping of options"),
        ({"minibatch_order": "own-first"}, "minibatch_order: got 'own-first', must be one of 'own_first' or 'mixed'; did you mean 'own_first'?"),
        ({"algorithm": "gsopo"}, "algorithm.name: got 'gsopo', must be one of 'hacpo', 'gspo', 'grpo', 'naive', 'gspo-x2'; did you mean 'gspo'?"),
        ({"agents": agents_with({"learns_from": "llama"}, {})}, "agents.0.learns_from: got 'llama'; input should be a valid list"),
        ({"agents": agents_with({"lora": {"rank": 1, "target_modules": 3}}, {})}, "agents.0.lora.target_modules: got 3; input should be a valid string"),
        ({"agents": agents_with({"name": "a/b"}, {})}, "agents.0.name: got 'a/b'; string should match pattern '^[A-Za-z0-9][A-Za-z0-9_.-]*$'"),
        ({"tasks": {"train": {"dataset": ""}}}, "tasks.train.dataset: got ''; string should have at least 1 character"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_wrong_value(changes: dict[str, Any], message: str) -> None:
    assert problem(config_with(**changes)) == message


@pytest.mark.parametrize("option", ["agents", "tasks", "reward", "steps", "prompts_per_step", "output"])
def test_required_option(option: str) -> None:
    data = config_with()
    del data[option]
    assert problem(data) == f"{option}: required and not given"


def test_all_faults_are_told_at_once() -> None:
    """Wrong types, unknown options and impossible combinations, in one message with one line each."""
    told = problems(
        config_with(
            agents=agents_with(
                {"learning_rate": "x", "learns_from": ["lama"]},
                {"role": "teacher", "sampling": {"temperature": 0}},
            ),
            seeed=1,
            group_size="eight",
            evaluation={"k": 0, "every": 5},
        )
    )
    assert [line.split(":")[0] for line in told] == [
        "agents.0.learning_rate",
        "agents.1.role",
        "group_size",
        "evaluation.k",
        "seeed",
        "agents.0 (qwen)",
        "agents.1 (llama)",
        "evaluation.every",
    ]
    with pytest.raises(ConfigError, match=r"^2 problems\n  1\. evaluation\.k: .*\n  2\. seeed: "):
        load_config(config_with(seeed=1, evaluation={"k": 0}))


def test_a_fault_inside_a_required_section_is_told_once() -> None:
    assert problems(config_with(tasks={"train": {"dataset": 3, "limit": 0}}, steps="x")) == (
        "tasks.train.limit: got 0; input should be greater than or equal to 1",
        "tasks.train.dataset: got 3; input should be a valid string",
        "steps: got 'x'; input should be a valid integer, unable to parse string as an integer",
    )


# ---------------------------------------------------------------- combinations that cannot work


def test_one_rollout_per_prompt_and_nobody_to_learn_from() -> None:
    (line,) = problems(config_with(agents=agents_with({}), group_size=1))
    assert "agents.0 (qwen): its joint group has 1 rollout(s) per prompt" in line
    assert "use group_size >= 2" in line
    alone = problems(config_with(group_size=1, algorithm="gspo"))
    assert [line.split(":")[0] for line in alone] == ["agents.0 (qwen)", "agents.1 (llama)"]
    load_config(config_with(group_size=1))  # two agents that share make a joint group of two


@pytest.mark.parametrize("temperature", [0, -1])
def test_temperature_that_cannot_sample(temperature: float) -> None:
    (line,) = problems(config_with(agents=agents_with({"sampling": {"temperature": temperature}}, {})))
    assert line.startswith(f"agents.0 (qwen): sampling temperature is {temperature}; ")
    assert "must be above 0" in line


def test_temperature_matters_to_an_agent_that_never_samples() -> None:
    # Its log-probabilities are divided by it as well.
    line = problem(config_with(agents=agents_with({"role": "learner", "sampling": {"temperature": 0}}, {})))
    assert line.startswith("agents.0 (qwen): sampling temperature is 0; ")


@pytest.mark.parametrize("role", ["author", "learner"])
def test_kl_needs_own_rows_that_are_trained_on(role: str) -> None:
    line = problem(config_with(agents=agents_with({"role": role, "kl_coefficient": 0.1}, {})))
    assert line.startswith(f"agents.0 (qwen): role is {role}, so kl_coefficient has no effect")


def test_leaving_out_trained_questions_is_for_held_out_sources() -> None:
    line = problem(config_with(), ("tasks.train.trained_questions=drop",))
    assert line.startswith("tasks.train.trained_questions: drop is for held-out sources")


def test_closing_band_is_refused_with_the_arithmetic() -> None:
    told = problems(config_with(prompts_per_minibatch=16))
    assert [line.split(":")[0] for line in told] == ["agents.0 (qwen)", "agents.1 (llama)"]
    # 128 prompts in minibatches of 16: 8 updates on own rows, 8 on foreign ones, the last with m = 15.
    for part in (
        "up to 16 updates (8 on own rows first), the last with m = 15",
        "the band [1 - 0.2 + m x 0.025, 1] closes at m = 8",
        "set algorithm.delta_step to at most 0.0125",
        "use algorithm.clipping: fixed",
    ):
        assert part in told[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.delta_step=0.0125"],
        ["algorithm.delta_step=0"],
        ["algorithm.delta=0.5"],
        ["algorithm.clipping=fixed"],
        ["algorithm.clipping=none"],
        ["algorithm=naive"],
        ["algorithm=gspo"],
        ["prompts_per_minibatch=32"],
        ["agents.0.learns_from=[]", "agents.1.learns_from=[]"],
    ],
)
def test_remedies_for_a_closing_band(overrides: list[str]) -> None:
    load_config(config_with(prompts_per_minibatch=16), overrides)


@pytest.mark.parametrize(("updates", "closes"), [(8, False), (9, True), (10, True)])
def test_band_closes_exactly_at_delta_over_delta_step(updates: int, closes: bool) -> None:
    # The first agent's minibatch holds 2 rows of 2 * updates. 8 x 0.025 is not 0.2 in binary, and still closes the band.
    agents = agents_with({"group_size": 2}, {"group_size": 2 * updates - 2})
    data = config_with(agents=agents, prompts_per_step=1, minibatch_order="mixed", group_size=2)
    config = load_config({**data, "algorithm": {"clipping": "fixed"}})
    assert config.updates_per_step(config.agents[0]) == (0, updates)
    if closes:
        assert f"up to {updates} updates" in problem(data)
    else:
        load_config(data)


def test_agents_of_one_name() -> None:
    assert problem(config_with(agents=agents_with({}, {"name": "qwen"}))) == (
        "agents.1 (qwen): the name is used twice; give every agent its own name"
    )


def test_learning_from_nobody_known() -> None:
    assert problem(config_with(agents=agents_with({"learns_from": ["lama"]}, {}))) == (
        "agents.0 (qwen): learns_from names 'lama', which is no agent; did you mean 'llama'?"
    )
    assert problem(config_with(agents=agents_with({"learns_from": ["zzz"]}, {}))).endswith("agents are qwen, llama")
    assert "whose role is learner: it samples nothing" in problem(
        config_with(agents=agents_with({"learns_from": ["llama"]}, {"role": "learner"}))
    )


def test_nobody_learns() -> None:
    assert problem(config_with(agents=agents_with({"role": "author"}, {"role": "author"}))).startswith(
        "agents: every role is author, so nobody learns"
    )


def test_nobody_samples() -> None:
    told = problems(config_with(agents=agents_with({"role": "learner"}, {"role": "learner"})))
    assert all("its joint group has 0 rollout(s)" in line for line in told)


@pytest.mark.parametrize("option", [{"lora": {"rank": 4}}, {"learns_from": ["llama"]}])
def test_an_author_is_never_trained(option: dict[str, Any]) -> None:
    line = problem(config_with(agents=agents_with({"role": "author", **option}, {})))
    assert line.startswith("agents.0 (qwen): role is author, so ")
    assert next(iter(option)) in line


@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "gspo-x2"])
def test_learner_needs_an_algorithm_that_shares(algorithm: str) -> None:
    line = problem(config_with(algorithm=algorithm, agents=agents_with({}, {"role": "learner"})))
    assert line.startswith("agents.1 (llama): role is learner, but g")
    assert line.endswith("use hacpo or naive")


def test_minibatch_larger_than_the_step() -> None:
    assert problem(config_with(prompts_per_minibatch=256)).startswith(
        "prompts_per_minibatch: 256 is more than prompts_per_step (128)"
    )


def test_evaluation_without_tasks() -> None:
    assert problem(config_with(evaluation={"every": 5})).startswith(
        "evaluation.every: got 5, but there are no held-out"
    )


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"agents: [", "cannot be read as YAML"),
        (b"\xff\xfe\x00", "cannot be read as YAML"),
        (b"steps: 1\nsteps: 2", "found duplicate key steps"),
        (b"- steps", "holds list; a configuration is a mapping of options"),
    ],
)
def test_file_that_is_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    line = problem(path)
    assert line.startswith(f"{path}: ")
    assert message in line
    assert "\n" not in line


def test_missing_file(tmp_path: Path) -> None:
    assert problem(tmp_path / "run.yaml") == (
        f"{tmp_path / 'run.yaml'}: no such file; give the path of a YAML configuration, or preset:NAME"
    )


def test_reference_to_nothing_and_value_that_is_no_data() -> None:
    assert "Interpolation key 'stepz' not found" in problem(config_with(group_size="${stepz}"))
    assert "give names and numbers, not objects" in problem(config_with(reward=print))


def test_reading_a_configuration_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(BASE)) + "seeed: 1\n")
    program = (
        "import sys\n"
        "from hacrl.config import load_config\n"
        "from hacrl.errors import ConfigError\n"
        "import hacrl.types\n"
        "try:\n    load_config(sys.argv[1])\n"
        "except ConfigError as error:\n    print(error)\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'peft', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "seeed: unknown option; did you mean 'seed'?\n[]\n"


def test_run_config_can_be_built_in_python() -> None:
    config = RunConfig.model_validate(BASE)
    assert load_config(config) == config


def test_the_error_survives_a_process_border() -> None:
    error = ConfigError(["steps: required and not given", "output: required and not given"])
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems
    assert str(again) == str(error)


# ---------------------------------------------------------------- execution


def test_short_forms_of_execution() -> None:
    assert load_config(BASE).execution == LocalConfig()
    assert load_config(config_with(execution="local")).execution == LocalConfig()
    assert load_config(config_with(execution="ray")).execution == RayConfig()
    assert load_config(BASE, ["execution=ray", "execution.restarts=5"]).execution == RayConfig(restarts=5)
    address = {"name": "ray", "address": "auto"}
    assert load_config(config_with(execution=address)).execution == RayConfig(address="auto")
    assert load_config(BASE, ["agents.*.resources.cpus=2"]).agents[1].resources.cpus == 2


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"execution": "slurm"}, "execution.name: got 'slurm', must be one of 'local', 'ray'"),
        ({"execution": {"address": "auto"}}, "execution.name: required and not given"),
        ({"execution": {"name": "local", "restarts": 1}}, "execution.restarts: unknown option; known here: name"),
        ({"execution": {"name": "ray", "addres": "auto"}}, "execution.addres: unknown option; did you mean 'address'?"),
        ({"execution": {"name": "ray", "address": "ray://head:10001"}}, "execution.address: ray://head:10001 is that of a Ray client; start the run on a machine of the cluster, with address: auto"),
        ({"execution": "ray", "agents": agents_with({"resources": {"gpus": 1.5}})}, "agents.0 (qwen): resources.gpus is 1.5; above 1 it must be a whole number"),
        ({"agents": agents_with({"resources": {"workers": 2}})}, "agents.0 (qwen): resources.workers is 2, but execution: local has one process; use execution: ray, or leave workers out"),
        ({"execution": "ray", "agents": agents_with({"optimizer": {"states": "int8"}, "resources": {"workers": 2}})}, "agents.0 (qwen): resources.workers is 2, and states of 8 bits cannot be shared out; use optimizer.states: float32, of which each worker holds its part, or leave workers out"),
        ({"execution": "ray", "agents": [BASE["agents"][0] | {"role": "author", "resources": {"samplers": 1}}, BASE["agents"][1]]}, "agents.0 (qwen): role is author, so resources.samplers has no effect, for they sample from weights that workers train; leave it out"),
        ({"execution": {"name": "ray", "on_agent_failure": "ignore"}}, "execution.on_agent_failure: got 'ignore', must be one of 'stop' or 'continue_without'"),
        ({"execution": {"name": "ray", "peer_timeout": 0}}, "execution.peer_timeout: got 0; input should be greater than 0"),
        ({"max_staleness": -1}, "max_staleness: got -1; input should be greater than or equal to 0"),
        ({"max_staleness": 1, "agents": agents_with({"old_logprobs": "learner"})}, "agents.0 (qwen): old_logprobs: learner recomputes them with newer weights than those that sampled, under max_staleness: 1; use old_logprobs: auto or sampler"),
        ({"max_staleness": 1, "agents": agents_with({"sampler_correction": 2.0})}, "agents.0 (qwen): sampler_correction compares a sampler and a learner of the same weights, which max_staleness: 1 does not give; leave one of them out"),
        ({"execution": "ray", "agents": agents_with({"device": "cpu", "resources": {"gpus": 1}})}, "agents.0 (qwen): resources.gpus is 1, but device is cpu; leave one of them out"),
        ({"execution": "ray", "agents": agents_with({"device": "cuda:1", "resources": {"gpus": 0}})}, "agents.0 (qwen): resources.gpus is 0, but device is cuda:1; leave one out, or use device: cpu"),
    ],
)  # fmt: skip
def test_faults_of_execution(changes: dict[str, Any], line: str) -> None:
    assert problem(config_with(**changes)) == line


def test_how_old_rollouts_may_be_is_another_run() -> None:
    before, now = load_config(config_with()), load_config(config_with(max_staleness=1))
    assert set(altering_changes(before, now, done=1)) == {"max_staleness"}


def test_who_samples_is_an_option_and_follows_staleness() -> None:
    def samplers(first: dict[str, Any], **changes: Any) -> int:
        agents = [BASE["agents"][0] | first, BASE["agents"][1]]
        run = load_config(config_with(execution="ray", agents=agents, **changes))
        return run.samplers_of(run.agents[0])

    assert samplers({}) == 0
    assert samplers({}, max_staleness=1) == 1
    assert samplers({"resources": {"samplers": 0}}, max_staleness=1) == 0
    assert samplers({"resources": {"samplers": 3}}) == 3
    assert samplers({"role": "author"}, max_staleness=1) == 0


def test_where_agents_live_is_no_other_run() -> None:
    before = load_config(config_with(execution="local"))
    now = load_config(config_with(execution={"name": "ray", "address": "auto"}), ["agents.0.resources.cpus=2"])
    assert set(differences(before, now)) == {
        "execution.name", "execution.address", "execution.restarts", "execution.wait_s", "execution.on_agent_failure",
        "execution.rejoin_every", "execution.peer_timeout", "execution.watchdog_s", "agents.0.resources.cpus",
    }  # fmt: skip
    assert altering_changes(before, now, done=1) == {}
    assert altering_changes(now, before, done=1) == {}
