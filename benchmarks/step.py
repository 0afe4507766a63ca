"""One step of GSPO: hacrl against TRL on the same work, and against the bare calls of the model.

python benchmarks/step.py --model tiny --results benchmarks/results/speed/step_tiny.json
python benchmarks/step.py --model models/SmolLM2-135M-Instruct --prompts 4 --answers 4 \\
    --results benchmarks/results/speed/step_smollm2.json

Needs `pip install -e '.[bench]'` (TRL). The sides take turns, step by step. Before the timing TRL trains on what hacrl
sampled, for a few steps at a learning rate that moves the weights: loss and gradient norm must agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any

from speed.measure import Side, write
from speed.work import Work, model_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="`tiny`, `demo` or a folder")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each side, after one to warm up")
    parser.add_argument("--same-steps", type=int, default=5, help="steps whose updates are compared number by number")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kind, model = model_folder(options.model, folder)
        work = Work(
            kind=kind,
            models=(str(model),),
            method="gspo",
            prompts=options.prompts,
            answers=options.answers,
            tokens=options.tokens,
            updates=1,
            learning_rate=1e-6,
            steps=options.rounds + 1,
            batch_rows=options.prompts * options.answers,
        )
        moving = dataclasses.replace(
            work, steps=options.same_steps, learning_rate=1e-4 if options.model in ("tiny", "demo") else 1e-5
        )
        result = {
            "model": model.name if options.model not in ("tiny", "demo") else options.model,
            "threads": options.threads,
            "work": {**dataclasses.asdict(work), "models": [model.name]},
            "same_updates": same_updates(moving, options.threads, folder),
            **timed(work, options.threads, folder),
        }
    write(result, options.results)


def same_updates(work: Work, threads: int, folder: Path) -> list[dict[str, float]]:
    """Both sides train on the same answers; their losses and gradient norms, step by step."""
    steps = []
    with (
        Side("hacrl_side.py", work, "record", threads=threads, log=folder / "hacrl.log") as ours,
        Side("trl_side.py", work, threads=threads, log=folder / "trl.log") as theirs,
    ):
        for _ in range(work.steps):
            mine = ours.step()
            peer = theirs.step(completions=mine["sampled"]["agent0"])
            (log,) = peer["logs"]
            steps.append(
                {
                    "reward": mine["metrics"]["agent/agent0/reward/mean"],
                    "reward_trl": log["reward"],
                    "loss": mine["metrics"]["agent/agent0/loss_sum"],
                    "loss_trl": log["loss"],
                    "grad_norm": mine["metrics"]["agent/agent0/grad_norm"],
                    "grad_norm_trl": log["grad_norm"],
                }
            )
    return steps


def timed(work: Work, threads: int, folder: Path) -> dict[str, Any]:
    rounds = []
    with (
        Side("hacrl_side.py", work, "record", threads=threads, log=folder / "hacrl.log") as ours,
        Side("trl_side.py", work, threads=threads, log=folder / "trl.log") as theirs,
        Side("bare_side.py", work, threads=threads, log=folder / "bare.log") as limit,
    ):
        for round_ in range(work.steps):
            mine, peer = ours.step(), theirs.step()
            bare = limit.step(completions=mine["sampled"]["agent0"])
            if round_ == 0:
                continue  # first touch of memory, lazy imports, loading
            rounds.append(
                {
                    "hacrl": mine["seconds"],
                    "trl": peer["seconds"],
                    "bare": bare["seconds"],
                    "hacrl_tokens": mine["tokens"],
                    "trl_tokens": peer["tokens"],
                    "hacrl_sample": mine["metrics"]["time/sample"],
                    "hacrl_update": mine["metrics"]["time/update"],
                    "trl_sample": peer["where"]["sample"],
                    "bare_sample": bare["where"]["sample"],
                    "bare_update": bare["where"]["update"],
                    "hacrl_peak_bytes": mine["peak_bytes"],
                    "trl_peak_bytes": peer["peak_bytes"],
                }
            )

    def median(name: str) -> float:
        return statistics.median(entry[name] for entry in rounds)

    def ratio(above: str, below: str) -> float:
        return statistics.median(entry[above] / entry[below] for entry in rounds)

    return {
        "medians": {name: median(name) for name in rounds[0]},
        "trl_over_hacrl": ratio("trl", "hacrl"),
        "hacrl_over_bare": ratio("hacrl", "bare"),
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
