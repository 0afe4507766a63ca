"""How often the 95 % interval of `hacrl compare` covers the truth, beside a plain bootstrap of seeds and tasks.

python benchmarks/interval_coverage.py

Each world is drawn as score = seed effect + task effect + noise of the answers, all normal, with a true mean of 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hacrl.compare.statistics import interval

WORLDS = 400
DRAWS = 1000
TASKS = 64


def main() -> None:
    print("| seeds | sd of seeds | sd of tasks | sd of answers | hacrl compare | plain bootstrap |")
    print("|---|---|---|---|---|---|")
    for seeds, *spreads in ((5, 0.1, 0.0, 0.05), (5, 0.05, 0.3, 0.2), (5, 0.0, 0.3, 0.2), (5, 0.05, 0.0, 0.3),
                            (3, 0.05, 0.1, 0.2), (2, 0.05, 0.1, 0.2)):  # fmt: skip
        generator = np.random.default_rng(0)
        worlds = [world(generator, seeds, *spreads) for _ in range(WORLDS)]
        ours = np.mean([found.low <= 0 <= found.high for found in (interval(one, draws=DRAWS) for one in worlds)])
        plain = np.mean([covers(generator, one) for one in worlds])
        print(f"| {seeds} | {' | '.join(map(str, spreads))} | {ours:.0%} | {plain:.0%} |", flush=True)


def world(
    generator: np.random.Generator, seeds: int, seed_sd: float, task_sd: float, answer_sd: float
) -> NDArray[np.float64]:
    return (
        generator.normal(0, seed_sd, (seeds, 1))
        + generator.normal(0, task_sd, (1, TASKS))
        + generator.normal(0, answer_sd, (seeds, TASKS))
    )


def covers(generator: np.random.Generator, scores_ST: NDArray[np.float64]) -> bool:
    """Seeds and tasks resampled independently, percentile interval."""
    seeds, tasks = scores_ST.shape
    weights_DS = generator.multinomial(seeds, [1 / seeds] * seeds, DRAWS) / seeds
    weights_DT = generator.multinomial(tasks, [1 / tasks] * tasks, DRAWS) / tasks
    low, high = np.quantile(((weights_DS @ scores_ST) * weights_DT).sum(axis=1), (0.025, 0.975))
    return bool(low <= 0 <= high)


if __name__ == "__main__":
    main()
