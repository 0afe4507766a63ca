"""Choose each method's settings with equal effort: `python benchmarks/testbed/tune.py`; writes `methods.yaml`.

Every method is tried with every setting of one grid, on the same two configurations and one seed; the best of each are
tried again with another seed. Means over agents, configurations and seeds decide. None of the seeds is one of the final
table's. Runs that are there already are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import hacrl

HERE = Path(__file__).parent
METHODS: Mapping[str, Mapping[str, Any]] = {
    "truncated": {"algorithm": "hacpo", "clipping": "truncated"},
    "hacpo": {"algorithm": "hacpo"},
    "naive": {"algorithm": "naive"},
    "gspo-x2": {"algorithm": "gspo-x2"},
    "gspo": {"algorithm": "gspo"},
}
LEARNING_RATES = (6e-5, 1.2e-4)
# GSPO's clip as published, for learning rates of 1e-6, and one hundred times as wide.
NARROW, WIDE = (3e-4, 4e-4), (3e-2, 4e-2)
CLIPS_AND_PROMPTS = ((NARROW, 8), (WIDE, 8), (WIDE, 4), (WIDE, 2))
GRID = [
    {
        "agents.*.learning_rate": rate,
        "clip_low": low,
        "clip_high": high,
        "prompts_per_minibatch": prompts,
    }
    for rate, ((low, high), prompts) in itertools.product(LEARNING_RATES, CLIPS_AND_PROMPTS)
]
CONFIGURATIONS = ("state", "model")
FIRST_SEED = 101
LATER_SEEDS = 1
FINALISTS = 2


def settings_of(candidate: str) -> dict[str, Any]:
    """`hacpo-3` is HACPO with GRID[3]."""
    method, _, place = candidate.rpartition("-")
    return {**METHODS[method], **GRID[int(place)]}


def scores(candidates: Sequence[str], *, first_seed: int, seeds: int, output: Path) -> dict[str, float]:
    """Mean held-out avg@k of each candidate over configurations, agents and seeds."""
    settings = {name: settings_of(name) for name in candidates}
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for configuration in CONFIGURATIONS:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(settings, file)
            file.flush()
            comparison = hacrl.compare_methods(
                HERE / f"{configuration}.yaml",
                [f"seed={first_seed}"],
                methods=file.name,
                seeds=seeds,
                output=output / configuration / f"from-{first_seed}",
            )
        for result in comparison["results"]:
            if result["agent"] == "mean" and result["metric"].startswith("avg@"):
                found[result["method"]].append(result["mean"])
    return {name: statistics.fmean(values) for name, values in found.items()}


def best(found: Mapping[str, float], method: str, count: int) -> list[str]:
    own = {name: score for name, score in found.items() if name.rpartition("-")[0] == method}
    return sorted(own, key=own.__getitem__, reverse=True)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose each method's settings with equal effort.")
    parser.add_argument("--output", type=Path, default=Path("runs/testbed-tuning"), help="folder of the runs")
    options = parser.parse_args()
    everything = [f"{method}-{place}" for method in METHODS for place in range(len(GRID))]
    first = scores(everything, first_seed=FIRST_SEED, seeds=1, output=options.output)
    finalists = [name for method in METHODS for name in best(first, method, FINALISTS)]
    later = scores(finalists, first_seed=FIRST_SEED + 1, seeds=LATER_SEEDS, output=options.output)
    seeds = 1 + LATER_SEEDS
    final = {name: (first[name] + LATER_SEEDS * later[name]) / seeds for name in finalists}
    chosen = {method: best(final, method, 1)[0] for method in METHODS}
    methods = {method: settings_of(name) for method, name in chosen.items()}
    header = "# Each method's settings, chosen by tune.py on seeds that the final table does not use.\n"
    (HERE / "methods.yaml").write_text(header + yaml.safe_dump(methods, sort_keys=False))
    report = {
        "grid": GRID,
        "first_seed": first,
        "all_seeds": final,
        "chosen": chosen,
    }
    (HERE / "tuning.json").write_text(json.dumps(report, indent=2) + "\n")
    for method, name in chosen.items():
        print(f"{method}: {methods[method]} ({100 * final[name]:.1f} %)")


if __name__ == "__main__":
    main()
