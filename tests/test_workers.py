"""Several workers for one agent: what they compute together is what one computes alone."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import build, sampled_rows, with_still_rows
from tiny_runs import run_config, tasks
from worker_group import WorkerGroup

from hacrl.agent import Agent, AgentUpdate
from hacrl.config import load_config
from hacrl.encode import Encoder
from hacrl.errors import ModelError, NonFiniteError, RunDirectoryError
from hacrl.metrics import Metrics
from hacrl.policy import load_policies
from hacrl.sampling.handover import write_weights
from hacrl.trainer import build_algorithm
from hacrl.types import Rollout, RolloutGroup, TrainingSample, Verdict
from hacrl.workers import Workers, whole


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    processes = WorkerGroup(3)
    yield processes
    processes.close()


@pytest.fixture
def model(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["qwen"]


@pytest.fixture(scope="module")
def untied(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("untied")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        Qwen3ForCausalLM(
            Qwen3Config.from_pretrained(tiny_models["qwen"], tie_word_embeddings=False)
        ).save_pretrained(folder)  # fmt: skip
    return folder


# See `assert_close`.
SMOOTH: dict[str, Any] = {"optimizer": {"eps": 1e-3}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What rank 0 knows after some steps."""

    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    ratios: list[dict[Any, float]]
    still_share: dict[str, float]


def train(
    workers: Workers, model: Path, folder: Path, rows: list[TrainingSample], *, steps: int = 1, **options: Any
) -> Outcome:
    learner = build(model, folder, workers=workers, **options)
    gradients: list[dict[str, torch.Tensor]] = []

    def keep(*_: Any) -> None:
        gradients.append({
            name: whole(parameter.grad).clone()
            for name, parameter in learner.policy.trained_parameters().items()
            if parameter.grad is not None
        })  # fmt: skip

    learner.optimizer.register_step_pre_hook(keep)
    told = []
    for step in range(1, steps + 1):
        update = learner.update(rows, step=step)
        parts = workers.gather((update.metrics, update.ratios))
        metrics = Metrics()
        for part, _ in parts:
            metrics.merge(part)
        told.append((metrics.values(), {key: value for _, ratios in parts for key, value in ratios.items()}))
    weights = {name: whole(value.detach()).clone() for name, value in learner.policy.trained_parameters().items()}
    return Outcome(
        gradients=gradients, weights=weights, metrics=[m for m, _ in told], ratios=[ratios for _, ratios in told],
        still_share=dict(learner.still_share),
    )  # fmt: skip


def assert_close(several: Outcome, one: Outcome, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Equal up to the order in which float32 sums are made: a sum over k workers is k sums and their sum.

    AdamW divides a gradient by its size and so enlarges rounding, too, up to 1 / eps: `SMOOTH` keeps that small.
    """
    assert len(several.gradients) == len(one.gradients)
    assert max(float(gradient.abs().max()) for update in one.gradients for gradient in update.values()) > 1e-3
    for left, right in zip(several.gradients, one.gradients, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    for name in one.weights:
        torch.testing.assert_close(several.weights[name], one.weights[name], rtol=rtol, atol=atol)
    for left_ratios, right_ratios in zip(several.ratios, one.ratios, strict=True):
        assert left_ratios == pytest.approx(right_ratios, rel=1e-4)
    for left_metrics, right_metrics in zip(several.metrics, one.metrics, strict=True):
        # How much is padded depends on which rows lie side by side.
        assert_metrics(*({**values, "padding_share": 0.0} for values in (left_metrics, right_metrics)))
    assert several.still_share == one.still_share


def assert_metrics(several: dict[str, float], one: dict[str, float]) -> None:
    # `own_ratio_error` is the size of what rounding leaves.
    assert several == pytest.approx(one, rel=1e-4, abs=3e-6)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {"minibatch_rows": 5, "micro_batch_tokens": 20, "steps": 3},
        {"minibatch_rows": 1},  # one worker has the row, the others have none
        {"minibatch_rows": 5, "old_logprobs": "learner", "gradient_checkpointing": True, "max_grad_norm": 0.1},
        {"minibatch_rows": 5, "kl_coefficient": 0.5, "steps": 2, "learning_rate": 1e-2},
        {
            "minibatch_rows": 5,
            "kl_coefficient": 0.5,
            "steps": 2,
            "learning_rate": 1e-2,
            "lora": {"rank": 2},
            "gradient_checkpointing": True,
        },
        {"minibatch_rows": 5, "steps": 2, "untied": True},
    ],
    ids=["full", "single-rows", "old-logprobs", "kl", "lora-kl", "untied"],
)
def test_several_workers_do_what_one_does(
    group: WorkerGroup, tiny_models: dict[str, Path], untied: Path, tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    options = {**SMOOTH, **options}
    model = untied if options.pop("untied", False) else tiny_models["qwen"]
    rows = sampled_rows(build(model, tmp_path))
    if options.get("old_logprobs") == "learner":
        rows = [dataclasses.replace(row, author_mean_logprob=-1.0) if row.own else row for row in rows]
    rows += [dataclasses.replace(row, advantage=0.0, index=row.index + 100) for row in rows[:3]]
    one = train(Workers.alone(), model, tmp_path, rows, **options)
    several = group(size, train, model, tmp_path, rows, **options)
    assert_close(several[0], one)
    assert several[1].metrics == [{}] * options.get("steps", 1)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_found_still_count_once(group: WorkerGroup, model: Path, tmp_path: Path, size: int) -> None:
    """All workers ask first where most rows of a kind were still, also the one that has no such row."""
    rows = with_still_rows(sampled_rows(build(model, tmp_path), own=6, foreign=14))
    options = {**SMOOTH, "steps": 2, "minibatch_rows": 7}
    one = train(Workers.alone(), model, tmp_path, rows, **options)
    assert one.metrics[1]["rows_still"] > 0
    assert 0 < one.still_share["foreign"] < 1
    several = group(size, train, model, tmp_path, rows, **options)
    assert_close(several[0], one)
    assert all(each.still_share == one.still_share for each in several)


def test_the_gradient_is_the_same_however_six_rows_are_split(group: WorkerGroup, model: Path, tmp_path: Path) -> None:
    """1 x 6, 2 x 3 and 3 x 2 rows, in one micro-batch each or in one for each row."""
    rows = sampled_rows(build(model, tmp_path), own=3, foreign=3)
    assert len({len(row.completion_ids) for row in rows}) > 1
    one = train(Workers.alone(), model, tmp_path, rows, minibatch_order="mixed", **SMOOTH)
    for size in (2, 3):
        for tokens in (1, 10_000):
            options = {"minibatch_order": "mixed", "micro_batch_tokens": tokens, **SMOOTH}
            assert_close(group(size, train, model, tmp_path, rows, **options)[0], one)


def test_means_are_over_everything_and_not_over_workers(group: WorkerGroup, model: Path, tmp_path: Path) -> None:
    """One worker has a row of 1 token, the other one of 9."""
    row = max(sampled_rows(build(model, tmp_path)), key=lambda row: len(row.completion_ids))
    assert len(row.completion_ids) == 9
    assert row.own
    short = dataclasses.replace(
        row, index=50, completion_ids=row.completion_ids[:1], author_logprobs=row.author_logprobs[:1]
    )
    rows = [row, short]
    means = [
        train(Workers.alone(), model, tmp_path, [each], **SMOOTH).metrics[0]["entropy"] for each in rows
    ]  # fmt: skip
    assert abs(means[0] - means[1]) > 1e-3
    several = group(2, train, model, tmp_path, rows, **SMOOTH)[0]
    assert several.metrics[0]["entropy"] == pytest.approx((9 * means[0] + means[1]) / 10, rel=1e-5)
    assert several.metrics[0]["tokens_trained"] == 10
    assert_close(several, train(Workers.alone(), model, tmp_path, rows, **SMOOTH))


def test_bfloat16_arithmetic_is_that_of_one_worker(group: WorkerGroup, model: Path, tmp_path: Path) -> None:
    """Layers hold their weights in bfloat16 where one worker's autocast converts them; between them all is float32."""
    rows = sampled_rows(build(model, tmp_path))
    one = train(Workers.alone(), model, tmp_path, rows, dtype="bfloat16", **SMOOTH)
    several = group(2, train, model, tmp_path, rows, dtype="bfloat16", **SMOOTH)[0]
    assert {weight.dtype for weight in several.weights.values()} == {torch.float32}
    errors = {
        name: float((several.gradients[0][name] - gradient).norm() / gradient.norm())
        for name, gradient in one.gradients[0].items()
    }
    # What leaves the last layer is the same; on the way back, gradients of weights are sums in bfloat16.
    assert errors.pop("model.norm.weight") < 1e-5
    assert max(errors.values()) < 0.02


def fail(workers: Workers, model: Path, folder: Path, rows: list[TrainingSample]) -> str:
    learner = build(model, folder, workers=workers)
    before = [whole(parameter.detach()).clone() for parameter in learner.parameters]
    with pytest.raises(NonFiniteError) as caught:
        learner.update(rows, step=7)
    assert all(torch.equal(whole(now), then) for now, then in zip(learner.parameters, before, strict=True))
    return str(caught.value)


def test_a_nan_on_one_worker_stops_all_of_them(group: WorkerGroup, model: Path, tmp_path: Path) -> None:
    rows = sampled_rows(build(model, tmp_path), own=6, foreign=0)
    rows[0] = dataclasses.replace(rows[0], author_mean_logprob=math.nan)
    messages = group(2, fail, model, tmp_path, rows)
    assert messages[0] == messages[1]
    assert "agent qwen, step 7: loss is nan" in messages[0]
    (dump,) = (tmp_path / "dumps").iterdir()
    assert str(dump) in messages[0]
    assert any(math.isnan(row["author_mean_logprob"]) for row in json.loads(dump.read_text()))


def talk(workers: Workers) -> dict[str, Any]:
    def refuse() -> None:
        raise RunDirectoryError(f"no room, says {workers.rank}")

    with pytest.raises(RunDirectoryError) as caught:
        workers.on_first(refuse)
    workers.barrier()
    return {
        "sums": workers.sums([1.0, workers.rank]),
        "maximum": workers.maximum(-workers.rank),
        "gather": workers.gather(f"from {workers.rank}"),
        "exchange": workers.exchange(workers.rank),
        "error": str(caught.value),
    }


def test_what_workers_tell_each_other(group: WorkerGroup) -> None:
    first, _, third = group(3, talk)
    assert first == {
        "sums": [3.0, 3.0], "maximum": 0.0, "gather": ["from 0", "from 1", "from 2"], "exchange": [0, 1, 2],
        "error": "no room, says 0",
    }  # fmt: skip
    assert third == {**first, "gather": []}
    assert talk(Workers.alone()) == {
        "sums": [1.0, 0.0], "maximum": 0.0, "gather": ["from 0"], "exchange": [0], "error": "no room, says 0"
    }  # fmt: skip


# ---------------------------------------------------------------- agents


def build_agent(workers: Workers, models: dict[str, Path], folder: Path, **options: Any) -> Agent:
    run = run_config(models, folder)
    run["agents"][0] |= options
    config = load_config(run)
    return Agent(
        config,
        config.agents[0],
        load_policies([config.agents[0]], seed=config.seed)["qwen"],
        Encoder.from_config(config.agents[0]),
        build_algorithm(config),
        dump_directory=folder / "nonfinite",
        workers=workers,
    )


def groups_of(agent: Agent) -> list[RolloutGroup]:
    """Sampled answers of the agent itself, judged by their place in the group."""
    asked = tasks(first=0, count=3)
    by_task: dict[str, list[Rollout]] = {}
    for completion in (completion for part in agent.sample(asked, step=1) for completion in part):
        rollout = Rollout(completion=completion, verdict=Verdict(reward=float(completion.index % 2)))
        by_task.setdefault(completion.task_id, []).append(rollout)
    return [RolloutGroup(task=task, rollouts=tuple(by_task[task.id])) for task in asked]


def sampled(agent: Agent, prompts: Sequence[tuple[int, ...]], *, answers: int, new: int, seed: int) -> list[list[Any]]:
    """What the agent's sampler answers to each prompt."""
    found = dict(
        agent.sampler.sample(
            prompts,
            places=range(len(prompts)),
            answers=answers,
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=new,
            seed=seed,
        )
    )
    return [found[number] for number in range(len(prompts))]


def updated(agent: Agent, groups: list[RolloutGroup], *, step: int) -> AgentUpdate:
    advantages = {"qwen": [[1.0, -0.5, 0.8, -1.2]] * len(groups)}
    return agent.update(groups, advantages, {"qwen": 1.0}, {"qwen": agent.encoder.fingerprint}, step=step)


def go(
    workers: Workers,
    models: dict[str, Path],
    folder: Path,
    groups: list[RolloutGroup],
    *,
    steps: Sequence[int],
    load: Path | None = None,
    weights_only: bool = False,
    save: dict[int, Path] | None = None,
    export: Path | None = None,
    **options: Any,
) -> tuple[list[AgentUpdate], dict[str, Any], int]:
    agent = build_agent(workers, models, folder, **options)
    if load is not None:
        # A pass before must not leave weights behind that are no longer those of the model.
        sampled(agent, [(5, 6)], answers=1, new=2, seed=1)
        agent.load(load, weights_only=weights_only)
    updates = []
    for step in steps:
        updates.append(updated(agent, groups, step=step))
        if save is not None and step in save:
            agent.save(save[step])
    if export is not None:
        agent.export(export, card="about", as_adapter=False)
    return updates, agent.trained_weights(), agent.weights_version


def assert_weights(left: dict[str, Any], right: dict[str, Any], *, exactly: bool) -> None:
    assert left.keys() == right.keys()
    for name in left:
        if exactly:
            assert np.array_equal(left[name], right[name]), name
        else:
            np.testing.assert_allclose(left[name], right[name], rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 2}, marks=pytest.mark.slow)])
def test_a_checkpoint_is_read_by_any_number_of_workers(
    group: WorkerGroup, tiny_models: dict[str, Path], tmp_path: Path, lora: Any
) -> None:
    options = {"lora": lora, "schedule": {"name": "cosine", "warmup_steps": 2}, **SMOOTH}
    groups = groups_of(build_agent(Workers.alone(), tiny_models, tmp_path, **options))
    arguments = (tiny_models, tmp_path, groups)
    two, one = tmp_path / "two", tmp_path / "one"
    (updates, expected, version), other = group(2, go, *arguments, steps=[1, 2], save={1: two}, **options)
    assert (other[0][-1].metrics, other[1]) == ({}, {})
    alone = go(Workers.alone(), *arguments, steps=[1, 2], save={1: one}, **options)
    assert version == alone[2] == 2
    assert sorted(path.name for path in two.iterdir()) == ["agent.json", "learner.pt", "shards"]
    assert sorted(path.name for path in one.iterdir()) == ["agent.json", "learner.pt", "weights.safetensors"]
    moved = max(float(np.abs(alone[1][name] - value).max()) for name, value in go(
        Workers.alone(), *arguments, steps=[], load=one, **options)[1].items())  # fmt: skip
    assert moved > 1e-4  # so that a next step which starts anew would be seen
    for source in (one, two):
        for size in (1, 2, 3):
            result = (
                go(Workers.alone(), *arguments, steps=[2], load=source, **options)
                if size == 1
                else group(size, go, *arguments, steps=[2], load=source, **options)[0]
            )
            assert result[2] == 2
            written_by = {one: 1, two: 2}[source]
            reference = {1: alone[1], 2: expected}[written_by]
            assert_weights(result[1], reference, exactly=size == written_by)
            assert_metrics(*({**step.metrics, "padding_share": 0.0} for step in (result[0][0], updates[1])))


# ---------------------------------------------------------------- a sharded agent as a whole one


def sample_and_learn(
    workers: Workers, models: dict[str, Path], folder: Path, groups: list[RolloutGroup], options: dict[str, Any]
) -> dict[str, Any]:
    """Every worker samples as many prompts as it has a rank, then all learn, then all hand their weights over."""
    agent = build_agent(workers, models, folder, **options)
    seen: dict[str, Any] = {}
    for when in ("before", "after"):
        prompts = [(5, 6, 7, 8 + number) for number in range(workers.rank)]
        with agent.policy.gathered():
            answers = sampled(agent, prompts, answers=2, new=4 + workers.rank, seed=3)
        again = sampled(agent, [(9, 8)], answers=1, new=2, seed=1)
        assert len(again[0][0].token_ids) in (1, 2)  # sharded again, and all workers together
        seen[f"sampled {when}"] = answers
        if when == "before":
            seen["metrics"] = updated(agent, groups, step=1).metrics
    write_weights(agent.policy, folder / f"engine-{workers.rank}")
    seen["weights"] = agent.trained_weights()
    agent.export(folder / "exported", card="about", as_adapter=False)
    if agent.policy.adapter is not None:
        agent.export(folder / "adapter", card="about", as_adapter=True)
    return seen


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 2}, marks=pytest.mark.slow)])
def test_a_sharded_agent_samples_hands_over_and_exports_what_it_has_learned(
    group: WorkerGroup, tiny_models: dict[str, Path], tmp_path: Path, lora: Any
) -> None:
    options = {"lora": lora, "learning_rate": 1e-2, **SMOOTH}
    copy = build_agent(Workers.alone(), tiny_models, tmp_path, **options)
    several = group(2, sample_and_learn, tiny_models, tmp_path, groups_of(copy), options)
    weights = several[0]["weights"]
    assert several[1]["weights"] == {}
    prompts = [(5, 6, 7, 8)]
    for when in ("before", "after"):
        expected = sampled(copy, prompts, answers=2, new=5, seed=3)
        assert several[0][f"sampled {when}"] == []
        for ours, theirs in zip(expected[0], several[1][f"sampled {when}"][0], strict=True):
            assert theirs.token_ids == ours.token_ids
            assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
        if when == "before":
            start = copy.trained_weights()
            for array in weights.values():
                array.setflags(write=False)  # as arrays are that processes share
            copy.take_weights(weights, 1)
            assert copy.weights_version == 1
            assert max(float(np.abs(start[name] - array).max()) for name, array in weights.items()) > 1e-3
    for name, array in copy.trained_weights().items():
        assert np.array_equal(array, weights[name])
    copy.export(tmp_path / "plain", card="about", as_adapter=False)
    write_weights(copy.policy, tmp_path / "engine-plain")
    pairs = [("exported", "plain"), ("engine-0", "engine-plain"), ("engine-1", "engine-plain")]
    if lora is not None:
        copy.export(tmp_path / "adapter-plain", card="about", as_adapter=True)
        pairs.append(("adapter", "adapter-plain"))
    for left, right in pairs:
        files = sorted(path.name for path in (tmp_path / right).iterdir())
        assert sorted(path.name for path in (tmp_path / left).iterdir()) == files
        for name in files:
            if name == "adapter_config.json":  # it holds a set
                ours, theirs = (json.loads((tmp_path / side / name).read_text()) for side in (left, right))
                assert sorted(ours.pop("target_modules")) == sorted(theirs.pop("target_modules"))
                assert ours == theirs
            elif name.endswith(".safetensors") or not left.startswith("engine"):
                assert (tmp_path / left / name).read_bytes() == (tmp_path / right / name).read_bytes(), (left, name)


def test_a_copy_that_is_not_trained_takes_weights_in_its_own_type(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    trained = build_agent(Workers.alone(), tiny_models, tmp_path)
    with torch.no_grad():
        for parameter in trained.policy.trained_parameters().values():
            parameter.add_(torch.randn_like(parameter))
    copy = build_agent(Workers.alone(), tiny_models, tmp_path, role="author", dtype="bfloat16")
    told = []
    copy.engine = types.SimpleNamespace(weights_changed=lambda: told.append(copy.weights_version))  # type: ignore[assignment]
    copy.take_weights(trained.trained_weights(), 7)
    assert told == [7]
    for name, parameter in copy.policy.own_parameters().items():
        assert torch.equal(parameter, trained.policy.trained_parameters()[name].bfloat16())


def held(
    workers: Workers, models: dict[str, Path], folder: Path, groups: list[RolloutGroup], options: Any
) -> list[int]:
    """Elements of weights, gradients' moments and reference that this worker has, and that there are."""
    agent = build_agent(workers, models, folder, **options)
    updated(agent, groups, step=1)
    learner = agent.learner
    assert learner is not None
    tensors = list(agent.policy.model.parameters())
    tensors += [value for state in learner.optimizer.state.values() for value in state.values() if value.dim() > 0]
    tensors += [] if learner.reference is None else list(learner.reference.model.parameters())
    return [
        sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).numel() for tensor in tensors),
        sum(tensor.numel() for tensor in tensors),
    ]


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 2}, marks=pytest.mark.slow)])
def test_each_worker_holds_its_part_alone(
    group: WorkerGroup, tiny_models: dict[str, Path], tmp_path: Path, lora: Any
) -> None:
    options = {"lora": lora, "kl_coefficient": 0.1}
    groups = groups_of(build_agent(Workers.alone(), tiny_models, tmp_path))
    (first, total), (second, _) = group(2, held, tiny_models, tmp_path, groups, options)
    assert first + second == total == held(Workers.alone(), tiny_models, tmp_path, groups, options)[1]
    assert first == pytest.approx(second, rel=0.05)


def spoil(workers: Workers, models: dict[str, Path], folder: Path, other: Path) -> list[str]:
    agent = build_agent(workers, models, folder)
    messages = []
    for place, error in (
        (folder / "missing", RunDirectoryError),
        (folder / "cut", RunDirectoryError),
        (other, ModelError),
    ):
        with pytest.raises(error) as caught:
            agent.load(place)
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_loaded_is_told_by_all_workers(
    group: WorkerGroup, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    groups = groups_of(build_agent(Workers.alone(), tiny_models, tmp_path))
    group(2, go, tiny_models, tmp_path, groups, steps=[1], save={1: tmp_path / "cut"})
    group(2, go, tiny_models, tmp_path, groups, steps=[1], save={1: tmp_path / "other"}, lora={"rank": 2})
    (tmp_path / "cut/shards/__1_0.distcp").unlink()
    (tmp_path / "missing").mkdir()
    for messages in (*group(2, spoil, tiny_models, tmp_path, tmp_path / "other"), spoil(
        Workers.alone(), tiny_models, tmp_path, tmp_path / "other")):  # fmt: skip
        assert "missing: agent.json of agent qwen is missing" in messages[0]
        assert "cut/shards: cannot be read" in messages[1]
        assert "__1_0.distcp" in messages[1]
        assert "saved weights do not fit the model" in messages[2]
    (tmp_path / "cut/shards/.metadata").unlink()
    with pytest.raises(RunDirectoryError, match="metadata of agent qwen is missing"):
        go(Workers.alone(), tiny_models, tmp_path, groups, steps=[], load=tmp_path / "cut")
