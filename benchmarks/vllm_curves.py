"""The demo with its agents sampled by vLLM and in process, over seeds: do they learn the same?

python benchmarks/vllm_curves.py --python .venv-vllm/bin/python --seeds 3 --results benchmarks/results/vllm_curves.json

Everything but `sampling.engine` is the same; the random numbers are each engine's own, so single runs differ as two
seeds do. `--agents` names those whom vLLM samples: its CPU attention does not know every head size (the demo's llama
has 24). A run that is finished is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from hacrl.config import RunConfig, load_config
from hacrl.demo.run import train_side_by_side
from hacrl.demo.settings import demo_config
from hacrl.progress import RunHistory

ENGINES = ("transformers", "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the environment with vLLM")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 .. N - 1")
    parser.add_argument("--agents", nargs="*", default=["qwen"], help="agents that vLLM samples")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--output", type=Path, default=Path("runs/vllm-curves"))
    parser.add_argument("--results", type=Path, default=None, help="JSON file to write")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_args()
    configs = {}
    for seed in range(options.seeds):
        for engine in ENGINES:
            name = f"{engine}-{seed}"
            settings = demo_config("hacpo", output=options.output / name, seed=seed)
            settings["sampling"]["vllm"] = {"python": options.python}
            for agent in settings["agents"]:
                if agent["name"] in options.agents:
                    agent["sampling"] = {"engine": engine}
            configs[name] = load_config(settings, options.overrides)
    for event in train_side_by_side(configs, processes=options.processes):
        if event.done:
            print(f"{event.method} finished", flush=True)
    results = {"vllm_agents": options.agents, **summarise(configs, options.seeds)}
    print(json.dumps(results, indent=1))
    if options.results is not None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")


def summarise(configs: dict[str, RunConfig], seeds: int) -> dict[str, Any]:
    """Held-out curves of each agent, and vLLM minus in process, seed by seed."""
    runs = {}
    for name, config in configs.items():
        history = RunHistory(config)
        history.read(Path(config.output))
        lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        runs[name] = {
            "held_out": {agent.name: history.held_out(agent.name) for agent in config.agents},
            "reward": {
                agent.name: [step[f"agent/{agent.name}/reward/mean"] for step in steps] for agent in config.agents
            },
            "mismatch_mean": [value for step in steps for key, value in step.items() if key.endswith("mismatch_mean")],
            "mismatch_max": [value for step in steps for key, value in step.items() if key.endswith("mismatch_max")],
        }
    agents = next(iter(runs.values()))["held_out"]
    differences = {}
    for agent in agents:
        by_engine = {
            engine: [
                statistics.fmean(score for _, score in runs[f"{engine}-{seed}"]["held_out"][agent])
                for seed in range(seeds)
            ]
            for engine in ENGINES
        }
        ends = {
            engine: [runs[f"{engine}-{seed}"]["held_out"][agent][-1][1] for seed in range(seeds)] for engine in ENGINES
        }
        differences[agent] = {
            "curve_mean": by_engine,
            "end": ends,
            "curve_mean_vllm_minus_transformers": _paired(by_engine),
            "end_vllm_minus_transformers": _paired(ends),
        }
    return {"seeds": seeds, "agents": differences, "runs": runs}


def _paired(values: dict[str, list[float]]) -> dict[str, float]:
    found = [ours - theirs for theirs, ours in zip(*(values[engine] for engine in ENGINES), strict=True)]
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return {"mean": statistics.fmean(found), "standard_error": error}


if __name__ == "__main__":
    main()
