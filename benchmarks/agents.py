"""What a step costs with more agents, by phase: HACPO with n equal tiny agents in one process.

python benchmarks/agents.py --results benchmarks/results/speed/agents.json

`coordination` is the step's time outside sampling, verifying and updating: drawing tasks, credit, metrics, records on
disk. Every learner trains on every agent's rollouts, so sampling grows with n and updating with n squared.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path

from speed.measure import Side, write
from speed.work import Work, tiny_model

PHASES = ("sample", "verify", "update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="1,2,4,8")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps, after one to warm up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    sizes = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = tiny_model(folder / "tiny")
        for agents in map(int, options.agents.split(",")):
            work = Work(
                kind="sums",
                models=(str(model),) * agents,
                method="hacpo",
                prompts=options.prompts,
                answers=options.answers,
                tokens=options.tokens,
                updates=agents,
                learning_rate=1e-6,
                steps=options.rounds + 2,
                batch_rows=options.prompts * options.answers,
            )
            with Side("hacrl_side.py", work, threads=options.threads, log=folder / "hacrl.log") as side:
                seen = [side.step() for _ in range(options.rounds + 1)][1:]
            rounds = []
            for step in seen:
                phases = {phase: step["metrics"][f"time/{phase}"] for phase in PHASES}
                # `seconds` is measured around the whole step, writing its records included.
                rest = step["seconds"] - sum(phases.values())
                rounds.append({**phases, "coordination": rest, "seconds": step["seconds"]})
            medians = {name: statistics.median(entry[name] for entry in rounds) for name in rounds[0]}
            share = statistics.median(entry["coordination"] / entry["seconds"] for entry in rounds)
            sizes.append({"agents": agents, **medians, "coordination_share": share, "rounds": rounds})
        result = {"threads": options.threads, "work": {**dataclasses.asdict(work), "models": ["tiny"]}, "sizes": sizes}
    write(result, options.results)


if __name__ == "__main__":
    main()
