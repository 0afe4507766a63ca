"""Run directories as training leaves them, with chosen numbers and texts and without training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hacrl.config import load_config
from hacrl.config_changes import config_yaml
from hacrl.durable_files import json_lines

Text = Callable[[int, str, int], str]
AT = 1_796_106_000.0
Row = dict[str, Any]


def write_run(
    path: Path,
    *,
    algorithm: Any = "hacpo",
    seed: int = 0,
    steps: int = 6,
    planned: int | None = None,
    agents: Sequence[str] = ("qwen", "llama"),
    tasks: int = 2,
    group: int = 2,
    every: int | None = 2,
    score: float = 0.5,
    text: Text = lambda step, author, index: f"answer {index} of {author} at step {step}",
    prompt: Any = "What is 1 + 1?",
    task_id: str = "train",
    detail: str | None = None,
) -> Path:
    """One run: each agent's held-out accuracy and reward go from `score` up by 0.01 a step, llama 0.1 above the others.

    Foreign rows exist under algorithms that share; of these 0.5 are inside the band, and s is 0.9, own s 1.
    """
    config = load_config(
        {
            "agents": [{"name": name, "model": "m", "learning_rate": 1e-6} for name in agents],
            "tasks": {"train": {"function": "f:g"}, "eval": {"function": "f:g"}},
            "reward": "exact",
            "algorithm": algorithm,
            "steps": planned or steps,
            "prompts_per_step": tasks,
            "group_size": group,
            "seed": seed,
            "output": str(path),
        }
    )
    shares = config.algorithm.name in ("hacpo", "naive")
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config_yaml(config), encoding="utf-8")
    start = {"time": "2026-11-30T20:49:55+00:00", "packages": {"hacrl": "0.1.0"}}
    (path / "environment.json").write_text(json.dumps({"format": 1, "run_id": "r", "seed": seed, "starts": [start]}))
    stamp = {"run_id": "r"}
    metrics, evaluations = [], []
    for step in range(steps + 1):
        level = {name: score + 0.01 * step + (0.1 if name == "llama" else 0.0) for name in agents}
        if every and step % every == 0:
            evaluations += [
                stamp
                | {"step": step, "split": "eval", "agent": name, "k": 4, "tasks": 64}
                | {"avg@k": level[name], "avg@k_stderr": 0.03}
                for name in agents
            ]
        if step:
            metrics.append(stamp | {"step": step, "time": 1.0e9 + step} | _metrics(level, shares, tasks * group))
    (path / "metrics.jsonl").write_bytes(json_lines(metrics))
    if evaluations:
        (path / "evaluations.jsonl").write_bytes(json_lines(evaluations))
    (path / "rollouts").mkdir()
    for step in range(1, steps + 1):
        rows = [
            stamp
            | {"step": step, "task_id": f"{task_id}/{step * tasks + task}", "author": author, "index": index}
            | {"prompt": prompt, "text": text(step, author, index), "finish_reason": "stop", "tokens": 20 + index}
            | {"mean_logprob": -0.1, "weights_version": step - 1, "reward": float(index % 2), "parsed": True}
            | {"scores": {"exact": float(index % 2)}, "answer": str(index), "unscored": {}, "detail": detail}
            | _worth(author, agents, shares, step=step, index=index)
            for task in range(tasks)
            for author in agents
            for index in range(group)
        ]
        (path / "rollouts" / f"step-{step:06d}.jsonl").write_bytes(json_lines(rows))
    return path


def _metrics(level: dict[str, float], shares: bool, texts: int) -> dict[str, float]:
    metrics: dict[str, float] = {"rollouts": texts * len(level), "tokens_sampled": 20.0 * texts * len(level)}
    for name, value in level.items():
        metrics |= {
            f"agent/{name}/{key}": number
            for key, number in {
                "reward/mean": value,
                "reward/texts": float(texts),
                "capability": value,
                "completion_tokens_mean": 20.0,
                "zero_variance_share": 0.2 if shares else 0.6,
                "entropy": 0.4,
                "truncated_rate": 0.01,
                "grad_norm": 1.0,
                "updates": 2.0,
            }.items()
        }
        metrics |= {f"pair/{name}/{name}/rows": float(texts), f"pair/{name}/{name}/inside_share": 0.75}
        for author in level.keys() - {name}:
            pair = f"pair/{name}/{author}"
            metrics |= {f"{pair}/rows": float(texts if shares else 0), f"{pair}/round_trip_failures": float(shares)}
            if shares:
                metrics |= {
                    f"{pair}/{key}": number
                    for key, number in {
                        "omega": level[author] / value,
                        "s_mean": 0.9,
                        "below_share": 0.3,
                        "inside_share": 0.5,
                        "above_share": 0.2,
                        "weight_share": 0.4,
                        "effective_sample_size": 1.5,
                        "length_change_mean": 3.0,
                        "dropped/too_long": 0.0,
                    }.items()
                }
    return metrics | {"time/sample": 2.0, "time/verify": 0.1, "time/update": 3.0, "time/total": 6.0}


def _worth(author: str, agents: Sequence[str], shares: bool, *, step: int, index: int) -> dict[str, Any]:
    learners = list(agents) if shares else [author]
    # One group stands out, in the third step.
    size = 7.0 if step == 3 else 1.0
    return {
        "advantages": dict.fromkeys(learners, size if index % 2 else -size),
        "ratios": {learner: 1.0 if learner == author else 0.9 for learner in learners},
    }


def write_comparison(path: Path, *, methods: Sequence[str] = ("hacpo", "gspo"), seeds: int = 2, **run: Any) -> Path:
    """A compare output directory: its runs and a `comparison.json` whose figures are unlike those of the runs."""
    names = {f"{method}/seed-{seed}": (method, seed) for method in methods for seed in range(seeds)}
    for name, (method, seed) in names.items():
        write_run(path / name, algorithm=method, seed=seed, **run)
    results = [
        {
            "agent": agent,
            "method": "hacpo",
            "metric": "avg@4",
            "source": "eval",
            "mean": 0.7,
            "low": 0.65,
            "high": 0.75,
            "start": 0.5,
            "runs": seeds,
            "differences": {"gspo": {"mean": 0.123, "low": 0.1, "high": 0.146}},
            "to_reach": {"gspo": {"rollouts": 12, "share": 0.5}},
            "cost": {"rollouts": 24, "updates": 12, "tokens": 480, "seconds": 36.0},
        }
        for agent in ("qwen", "llama", "mean")
    ]
    content = {
        "format": 1,
        "axis": "rollouts",
        "axis_budget": {"hacpo": 24, "gspo": 24},
        "agents": ["qwen", "llama"],
        "methods": list(methods),
        "seeds": list(range(seeds)),
        "runs": {name: name for name in names},
        "results": results,
    }
    (path / "comparison.json").write_text(json.dumps(content))
    return path


def row(step: int, agent: str | None, process: str, phase: str, begin: float, end: float) -> Row:
    """A line of the file, with times in seconds since `AT`."""
    return {
        "run_id": "r",
        "step": step,
        "agent": agent,
        "process": process,
        "phase": phase,
        "begin": AT + begin,
        "end": AT + end,
    }


def step_rows(step: int, begin: float, agents: Sequence[str] = ("qwen", "llama")) -> Iterator[Row]:
    """A step of 10 seconds: all sample for 4 and update for 4, the first agent in half the time."""
    yield row(step, None, "loop", "sample", begin, begin + 5)
    yield row(step, None, "loop", "update", begin + 5, begin + 10)
    for place, agent in enumerate(agents):
        yield row(step, agent, f"{agent}.sampler-0", "sample", begin, begin + (4 if place else 2))
        yield row(step, agent, agent, "update", begin + 5, begin + (9 if place else 7))


def with_timeline(run: Path, rows: Sequence[Row], *, behind: bytes = b"") -> Path:
    (run / "timeline.jsonl").write_bytes(json_lines(rows) + behind)
    return run


def with_metrics(path: Path, *by_step: dict[str, float]) -> Path:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    changed = [line | values for line, values in zip(lines, by_step, strict=True)]
    (path / "metrics.jsonl").write_bytes(json_lines(changed))
    return path
