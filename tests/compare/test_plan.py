"""Methods and seeds become configurations: the method's own settings, an equal budget, everything else in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hacrl.compare.plan import Plan, make_plan, read_methods, rollouts_per_step, updates_per_step
from hacrl.config import RunConfig
from hacrl.errors import ConfigError

BASE: dict[str, Any] = {
    "agents": [{"name": "a", "model": "one", "learning_rate": 1e-4}, {"name": "b", "model": "two"}],
    "tasks": {
        "train": {"dataset": "train.jsonl", "limit": "${seed}"},
        "eval": {"dataset": "eval.jsonl"},
    },
    "reward": "exact",
    "steps": 12,
    "prompts_per_step": 4,
    "prompts_per_minibatch": 2,
    "group_size": 4,
    "seed": 3,
    "algorithm": {"name": "hacpo", "alpha": 2, "clip_high": 0.5},
    "output": "runs/x",
}


def plan(methods: str = "hacpo,gspo", overrides: tuple[str, ...] = (), **options: Any) -> Plan:
    return make_plan(BASE, overrides, methods=methods, **options)


def config(made: Plan, method: str) -> RunConfig:
    return next(run.config for run in made.runs if run.method == method)


def problems(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*arguments, **options)
    return "\n".join(caught.value.problems)


# ---------------------------------------------------------------- methods


def test_text_gives_methods_with_overrides_of_their_own() -> None:
    found = read_methods("hacpo, hacpo:alpha=3,delta=0.4,gspo:agents.*.learning_rate=2e-4,naive")
    assert [(method.name, method.algorithm, method.overrides) for method in found] == [
        ("hacpo", "hacpo", ()),
        ("hacpo:alpha=3,delta=0.4", "hacpo", ("algorithm.alpha=3", "algorithm.delta=0.4")),
        ("gspo:agents.*.learning_rate=2e-4", "gspo", ("agents.*.learning_rate=2e-4",)),
        ("naive", "naive", ()),
    ]
    assert [method.folder for method in found][1:3] == ["hacpo_alpha=3,delta=0.4", "gspo_agents._.learning_rate=2e-4"]


def test_a_file_gives_methods_with_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "methods.yaml"
    path.write_text("gspo:\nwide: {algorithm: hacpo, delta: 0.5, agents.*.learning_rate: 2e-4}\n")
    made = make_plan(BASE, methods=path, seeds=1)
    assert config(made, "gspo").algorithm.name == "gspo"
    wide = config(made, "wide")
    assert (wide.algorithm.name, wide.algorithm.delta) == ("hacpo", 0.5)  # type: ignore[union-attr]
    assert [agent.learning_rate for agent in wide.agents] == [2e-4, 2e-4]
    assert wide.output == "runs/x-compare/runs/wide/seed-3"


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("hapco", "methods: 'hapco': the algorithm is 'hapco', must be one of hacpo, gspo, gspo-x2, grpo, naive"),
        ("gspo,gspo", "methods: 'gspo' and 'gspo' have the same folder; rename one"),
        ("", "methods: none given"),
        ("no.yaml", "methods: no.yaml: cannot be read as YAML"),
        ("gspo:alpha=3", "method gspo:alpha=3: alpha: unknown option"),
        ("hacpo:alpha=-1", "method hacpo:alpha=-1: algorithm.alpha: got -1"),
    ],
)
def test_faulty_methods(methods: str, message: str) -> None:
    assert message in problems(methods)


@pytest.mark.parametrize(
    "override", ["agents.0.model=other", "tasks.eval.dataset=other.jsonl", "evaluation.k=9", "seed=8", "reward=math"]
)
def test_what_is_compared_by_cannot_be_a_methods_own(override: str) -> None:
    assert "is the same for every method" in problems(f"hacpo,gspo:{override}")
    plan("hacpo,gspo", (override,))


def test_each_method_keeps_the_settings_that_mean_the_same() -> None:
    made = plan("hacpo,gspo,grpo,gspo-x2,naive:clip_high=0.1", seeds=1)
    assert config(made, "hacpo").algorithm.alpha == 2  # type: ignore[union-attr]
    clips = {run.method: run.config.algorithm.clip_high for run in made.runs}
    # GRPO clips ratios of tokens: another quantity with its own default.
    assert clips == {"hacpo": 0.5, "gspo": 0.5, "grpo": 0.28, "gspo-x2": 0.5, "naive:clip_high=0.1": 0.1}


def test_ablations_switch_off_one_thing_each_and_leave_out_the_configurations_own() -> None:
    made = plan("hacpo,gspo", ablations=True, seeds=1)
    assert [method.name for method in made.methods] == [
        "hacpo",
        "gspo",
        "hacpo:capability_advantage=false",
        "hacpo:capability_coefficient=false",
        "hacpo:alpha=0",
        "hacpo:alpha=1",
        "hacpo:alpha=3",
        "hacpo:clipping=fixed",
        "hacpo:clipping=none",
        "hacpo:clipping=truncated",
    ]
    full = config(made, "hacpo").algorithm.model_dump()
    for run in made.runs[2:]:
        changed = run.config.algorithm.model_dump()
        assert sum(full[key] != changed[key] for key in full) == 1


# ---------------------------------------------------------------- seeds, common settings


def test_runs_go_seed_by_seed_and_references_follow_the_seed() -> None:
    made = plan(seeds=2, output="out")
    assert [run.name for run in made.runs] == ["hacpo/seed-3", "gspo/seed-3", "hacpo/seed-4", "gspo/seed-4"]
    for run in made.runs:
        assert run.config.seed == run.seed == run.config.tasks.train.limit
        assert run.config.output == f"out/runs/{run.name}"


def test_runs_keep_little_on_disk_unless_asked() -> None:
    frugal = config(plan(), "gspo")
    assert (frugal.export, frugal.checkpoint.keep_last, frugal.checkpoint.keep_best) == ("none", 1, False)
    assert config(plan("gspo", ("export=merged",)), "gspo").export == "merged"


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ((), {"axis": "flops"}, "axis: got 'flops', must be one of rollouts, updates, tokens, seconds"),
        ((), {"seeds": 0}, "seeds: got 0"),
        (("tasks.eval={}",), {}, "tasks.eval: no held-out tasks"),
        (("evaluation.at_end=false",), {}, "evaluation.at_end: false"),
        ((), {"axis": "tokens"}, "evaluation.every: 0, but with axis tokens"),
    ],
)
def test_comparisons_that_cannot_work(overrides: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    assert message in problems("hacpo", overrides, **options)


# ---------------------------------------------------------------- budgets


def test_equal_rollouts_set_the_steps() -> None:
    made = plan("hacpo,gspo,gspo:group_size=8,gspo:group_size=3", seeds=1)
    steps = {run.method: run.config.steps for run in made.runs}
    # 12 steps x 4 prompts x 2 agents x 4 answers = 384 rollouts; with 3 answers a step has 24.
    assert steps == {"hacpo": 12, "gspo": 12, "gspo:group_size=8": 6, "gspo:group_size=3": 16}
    assert {run.config.steps * rollouts_per_step(run.config) for run in made.runs} == {384}


def test_equal_updates_set_the_steps() -> None:
    made = plan("hacpo,gspo,gspo:prompts_per_minibatch=1", axis="updates", seeds=1)
    # Of each agent's rows, 8 a minibatch: 16 own and 16 foreign under HACPO, 16 own under GSPO.
    assert updates_per_step(config(made, "hacpo")) == 8
    assert updates_per_step(config(made, "gspo")) == 4
    steps = {run.method: run.config.steps for run in made.runs}
    assert steps == {"hacpo": 12, "gspo": 24, "gspo:prompts_per_minibatch=1": 12}


def test_gspo_x2_and_methods_with_steps_of_their_own_keep_them() -> None:
    made = plan("gspo-x2,gspo-x2:steps=6,gspo:steps=20,hacpo,naive:group_size=8", seeds=1)
    steps = {run.method: run.config.steps for run in made.runs}
    # The first method that is fitted gives the budget, wherever it stands.
    assert steps == {"gspo-x2": 12, "gspo-x2:steps=6": 6, "gspo:steps=20": 20, "hacpo": 12, "naive:group_size=8": 6}
    doubled, full = config(made, "gspo-x2"), config(made, "hacpo")
    assert rollouts_per_step(doubled) == 2 * rollouts_per_step(full)
    assert config(made, "gspo-x2:steps=6").steps * rollouts_per_step(doubled) == 12 * rollouts_per_step(full)


def test_budgets_known_only_afterwards_leave_the_steps() -> None:
    made = plan("hacpo,gspo:group_size=8", ("evaluation.every=1",), axis="tokens", seeds=1)
    assert {run.config.steps for run in made.runs} == {12}
