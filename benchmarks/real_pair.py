"""Two real models together and alone: held-out accuracy before and after, foreign ratios, re-tokenisation drift.

hacrl train examples/smollm2-gemma3.yaml
hacrl train examples/smollm2-gemma3.yaml algorithm=gspo output=runs/smollm2-gemma3-gspo
python benchmarks/real_pair.py runs/smollm2-gemma3 runs/smollm2-gemma3-gspo --results benchmarks/results/smollm2_gemma3

Copies both runs' metrics and evaluations to the results folder and prints the tables as Markdown. Intervals are 95 %,
1.96 standard errors over held-out tasks: they tell how well one run's accuracy is known, not how it would vary over
training seeds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAIR_MEANS = (
    "s_mean",
    "below_share",
    "inside_share",
    "above_share",
    "weight_share",
    "omega",
    "length_change_mean",
)
FILES = ("config.yaml", "environment.json", "evaluations.jsonl", "metrics.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("together", type=Path, help="run directory with sharing")
    parser.add_argument("alone", type=Path, help="run directory of the same agents by GSPO")
    parser.add_argument("--results", type=Path, default=None, help="folder for copies of metrics and the tables")
    options = parser.parse_args()
    runs = {"HACPO": options.together, "GSPO alone": options.alone}
    text = accuracy_table(runs) + "\n\n" + pair_table(lines(options.together / "metrics.jsonl"))
    print(text)
    if options.results is not None:
        for name, run in (("hacpo", options.together), ("gspo", options.alone)):
            folder = options.results / name
            folder.mkdir(parents=True, exist_ok=True)
            for file in FILES:
                shutil.copy(run / file, folder / file)
        (options.results / "tables.md").write_text(text + "\n")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def accuracy_table(runs: dict[str, Path]) -> str:
    evaluations = {name: lines(run / "evaluations.jsonl") for name, run in runs.items()}
    agents = list(dict.fromkeys(entry["agent"] for entry in evaluations["HACPO"]))
    head = ["agent", "start", *(f"{name} after {found[-1]['step']} steps" for name, found in evaluations.items())]
    rows = [head, ["---"] * len(head)]
    for agent in agents:
        mine = {name: [entry for entry in found if entry["agent"] == agent] for name, found in evaluations.items()}
        rows.append([agent, _accuracy(mine["HACPO"][0]), *(_accuracy(found[-1]) for found in mine.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _accuracy(entry: dict[str, Any]) -> str:
    return f"{entry['avg@k']:.3f} ± {1.96 * entry['avg@k_stderr']:.3f}"


def pair_table(metrics: Sequence[dict[str, Any]]) -> str:
    """Per learner and author: means over the first and the last five steps."""
    pairs = sorted({name.rsplit("/", 1)[0] for name in metrics[-1] if name.endswith("/omega")})
    rows = [["learner <- author", "steps", "s", "below", "inside", "above", "weight share", "omega", "length change",
             "round-trip failures", "dropped"]]  # fmt: skip
    rows.append(["---"] * len(rows[0]))
    for pair in pairs:
        _, learner, author = pair.split("/")
        rows += [
            [
                f"{learner} <- {author}",
                f"{part[0]['step']}-{part[-1]['step']}",
                *(_mean(part, f"{pair}/{name}") for name in PAIR_MEANS),
                *(_total(part, pair, name) for name in ("round_trip_failures", "dropped/")),
            ]
            for part in (metrics[:5], metrics[-5:])
        ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _mean(part: Sequence[dict[str, Any]], name: str) -> str:
    values = [line[name] for line in part if line.get(name) is not None]
    return f"{statistics.fmean(values):.2f}" if values else ""


def _total(part: Sequence[dict[str, Any]], pair: str, name: str) -> str:
    found = sum(value or 0 for line in part for key, value in line.items() if key.startswith(f"{pair}/{name}"))
    return f"{found:.0f} of {sum(line[f'{pair}/rows'] for line in part):.0f}"


if __name__ == "__main__":
    main()
