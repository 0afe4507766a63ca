"""The README's figure: held-out accuracy of the demo's agents over training, mean and 95 % interval over seeds.

python benchmarks/demo_seeds.py --seeds 5
python benchmarks/demo_figure.py runs/demo-seeds docs/demo.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from hacrl.compare.statistics import interval
from hacrl.config import load_config
from hacrl.demo.run import COLORS, NAMES
from hacrl.demo.settings import METHODS
from hacrl.progress import RunHistory

mpl.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs of demo_seeds.py")
    parser.add_argument("image", type=Path, help="PNG to write")
    options = parser.parse_args()
    histories = {
        method: [read(path) for path in sorted((options.runs / "runs" / method).glob("seed-*"))] for method in METHODS
    }
    config = histories[METHODS[0]][0].config
    figure, axes = plt.subplots(1, len(config.agents), figsize=(9, 3.4), sharey=True, layout="constrained")
    for place, (agent, panel) in enumerate(zip(config.agents, axes, strict=True)):
        for method, runs in histories.items():
            curve(panel, runs, agent.name, method)
        panel.set_title(f"{agent.name} agent", fontsize=11)
        panel.set_xlabel("rollouts sampled per agent")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if place == 0:
            panel.set_ylabel("held-out accuracy in %")
            panel.legend(frameon=False)
    figure.savefig(options.image, dpi=160)


def read(path: Path) -> RunHistory:
    history = RunHistory(load_config(path / "config.yaml"))
    history.read(path)
    return history


def curve(panel: Any, runs: list[RunHistory], agent: str, method: str) -> None:
    by_step: dict[int, list[list[float]]] = {}
    for run in runs:
        for entry in run.evaluations:
            if entry["agent"] == agent:
                by_step.setdefault(entry["step"], []).append(entry["per_task"]["avg@k"])
    found = [interval(100 * np.array(scores)) for scores in by_step.values()]
    config = runs[0].config
    rollouts = [step * config.prompts_per_step * config.group_size for step in by_step]
    panel.plot(rollouts, [value.mean for value in found], color=COLORS[method], linewidth=2.2, label=NAMES[method])
    low, high = [value.low for value in found], [value.high for value in found]
    panel.fill_between(rollouts, low, high, color=COLORS[method], alpha=0.18, linewidth=0)


if __name__ == "__main__":
    main()
