"""Two agents by HACPO against two GSPOx2 runs of TRL: the same number of optimizer updates and of rows in each.

python benchmarks/pair.py --model tiny --results benchmarks/results/speed/pair_tiny.json

A step of HACPO: both agents sample P x G answers, and each makes one update on its own and one on the other's. A step
of TRL's GSPOx2: P x 2G answers and two updates, once for each agent. Needs `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path

from speed.measure import Side, write
from speed.work import Work, model_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="`tiny`, `demo` or a folder")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each side, after one to warm up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kind, model = model_folder(options.model, folder)
        together = Work(
            kind=kind,
            models=(str(model),) * 2,
            method="hacpo",
            prompts=options.prompts,
            answers=options.answers,
            tokens=options.tokens,
            updates=2,
            learning_rate=1e-6,
            steps=options.rounds + 1,
            batch_rows=options.prompts * options.answers,
        )
        alone = dataclasses.replace(
            together,
            models=together.models[:1],
            method="gspo",
            answers=2 * options.answers,
            steps=2 * together.steps,
        )
        rounds = []
        with (
            Side("hacrl_side.py", together, threads=options.threads, log=folder / "hacrl.log") as ours,
            Side("trl_side.py", alone, threads=options.threads, log=folder / "trl.log") as theirs,
        ):
            for round_ in range(together.steps):
                mine = ours.step()
                # One process stands for both agents: they are the same work, done one after the other.
                peers = [theirs.step() for _ in range(2)]
                if round_ == 0:
                    continue
                updates = sum(mine["metrics"][f"agent/agent{index}/updates"] for index in range(2))
                rounds.append(
                    {
                        "hacrl": mine["seconds"],
                        "hacrl_updates": updates,
                        "trl": sum(peer["seconds"] for peer in peers),
                        "trl_updates": 2 * alone.updates,
                    }
                )
    result = {
        "model": model.name if options.model not in ("tiny", "demo") else options.model,
        "threads": options.threads,
        "work": {**dataclasses.asdict(together), "models": [model.name] * 2},
        "hacrl_over_trl": statistics.median(entry["hacrl"] / entry["trl"] for entry in rounds),
        "medians": {name: statistics.median(entry[name] for entry in rounds) for name in rounds[0]},
        "rounds": rounds,
    }
    write(result, options.results)


if __name__ == "__main__":
    main()
