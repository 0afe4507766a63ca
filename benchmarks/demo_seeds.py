"""The demo over several seeds: held-out accuracy of HACPO and of GSPO with as many rollouts, and their difference.

python benchmarks/demo_seeds.py --seeds 5 --output runs/demo-seeds

`hacrl compare` on the demo's configuration: it goes on where it was, and writes comparison.json and comparison.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from hacrl.compare.comparison import compare_methods
from hacrl.compare.table import renderables
from hacrl.demo.settings import METHODS, demo_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 .. N - 1")
    parser.add_argument("--jobs", type=int, default=None, help="runs at a time; one per core if left out")
    parser.add_argument("--output", type=Path, default=Path("runs/demo-seeds"))
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_args()
    found = compare_methods(
        demo_config(METHODS[0], output=options.output, seed=0),
        options.overrides,
        methods=METHODS,
        seeds=options.seeds,
        jobs=options.jobs,
        output=options.output,
    )
    Console(highlight=False).print(*renderables(found))


if __name__ == "__main__":
    main()
