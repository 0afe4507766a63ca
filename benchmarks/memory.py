"""Peak memory of a run against what it cannot do without: weights, gradients, optimizer state, one micro-batch.

python benchmarks/memory.py examples/smollm2-gemma3.yaml --results benchmarks/results/speed/memory.json

Three processes one after the other, each with its own peak: the libraries alone; for each model one bare forward and
backward pass over a micro-batch of the run's size; and two steps of the run itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from speed.measure import environment, write

from hacrl import load_config
from hacrl.preflight import prepare

LIBRARIES = """
import json, resource
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
import hacrl.trainer, hacrl.execution.local
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
"""

MICRO_BATCH = """
import json, resource, sys
import torch
from transformers import AutoModelForCausalLM
folder, rows, prompt, answer = sys.argv[1], *map(int, sys.argv[2:5])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
parameters = sum(parameter.numel() for parameter in model.parameters())
torch.manual_seed(0)
ids = torch.randint(10, 1000, (rows, prompt + answer))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[:, prompt - 1 : -1].flatten(0, 1)
head = model.get_output_embeddings()
targets = ids[:, prompt:].reshape(-1)
# The vocabulary in chunks, as no one would do without.
size = max(1, 2**24 // head.weight.shape[0])
def part(hidden, targets):
    return -torch.nn.functional.cross_entropy(head(hidden).float(), targets, reduction="sum")
chunks = zip(hidden.split(size), targets.split(size))
total = sum(torch.utils.checkpoint.checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks)
total.backward()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"parameters": parameters, "peak": peak, "before": before}))
"""

RUN = """
import json, resource, sys
from hacrl import train
train(sys.argv[1], json.loads(sys.argv[2]))
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
"""


def measured(code: str, *arguments: str, threads: int) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(threads),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a configuration; its agents train all their weights in float32")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    config = load_config(options.config)
    prepared = prepare(config)
    libraries = measured(LIBRARIES, threads=options.threads)
    agents = []
    for agent in config.agents:
        limits = config.sampling_of(agent)
        # The run's own micro-batch: all rows of a minibatch, as far as micro_batch_tokens lets them, no longer than
        # its tasks make them.
        prompt = max(len(prepared.encoders[agent.name].prompt_ids(task.prompt)) for task in prepared.train)
        rows = max(1, min(config.minibatch_rows(agent), agent.micro_batch_tokens // (prompt + limits.max_new_tokens)))
        seen = measured(
            MICRO_BATCH, agent.model, str(rows), str(prompt), str(limits.max_new_tokens), threads=options.threads
        )
        weights = 4 * seen["parameters"]
        agents.append(
            {
                "agent": agent.name,
                "parameters": seen["parameters"],
                "weights": weights,
                "gradients": weights,
                "optimizer": 2 * weights,
                "micro_batch": seen["peak"] - libraries - 2 * weights,
                "micro_batch_shape": [rows, prompt + limits.max_new_tokens],
            }
        )
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"steps={options.steps}", f"output={folder}/run", "evaluation.at_start=false",
                     "evaluation.at_end=false", "export=none"]  # fmt: skip
        peak = measured(RUN, options.config, json.dumps(overrides), threads=options.threads)
    needed = sum(agent["weights"] + agent["gradients"] + agent["optimizer"] for agent in agents)
    needed += max(agent["micro_batch"] for agent in agents)
    result = {
        "config": options.config,
        "steps": options.steps,
        "libraries": libraries,
        "agents": agents,
        "needed": needed,
        "peak": peak,
        "ratio": peak / needed,
        "ratio_with_libraries": peak / (needed + libraries),
    }
    write(result, options.results)


if __name__ == "__main__":
    main()
