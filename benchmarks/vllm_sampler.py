"""Tokens per second of vLLM against the sampler in process, on one model: many answers at the same time, in turns.

python benchmarks/vllm_sampler.py MODEL --python .venv-vllm/bin/python --results benchmarks/results/vllm_sampler.json

Both sample the same prompts at temperature 1 without a stop, so that each answer has the full length. The time of
vLLM is what training sees: ids sent to its process, log-probabilities back, and the comparison with the policy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from hacrl.config import AgentConfig, VllmConfig
from hacrl.policy import load_policies
from hacrl.sampling.transformers import TransformersSampler
from hacrl.sampling.vllm_sampler import VllmSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or folder")
    parser.add_argument("--python", required=True, help="interpreter of the environment with vLLM")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8, help="for each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="length of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--results", type=Path, default=None, help="JSON file to write")
    options = parser.parse_args()

    policy = load_policies([AgentConfig(name="agent", model=options.model, dtype=options.dtype)], seed=0)["agent"]
    rows = options.prompts * options.answers
    in_process = TransformersSampler(policy, stop_token_ids=(), pad_token_id=0, batch_rows=rows)
    vllm = VllmSampler(
        "agent",
        policy,
        VllmConfig(python=options.python),
        stop_token_ids=(),
        batch_rows=rows,
        longest_row=options.prompt_tokens + options.tokens,
        log=None,
    )
    generator = torch.Generator().manual_seed(0)
    shape = (options.prompts, options.prompt_tokens)
    prompts = [tuple(row) for row in torch.randint(policy.vocabulary, shape, generator=generator).tolist()]

    def seconds(sampler: Any, round_: int) -> float:
        start = time.perf_counter()
        for _ in sampler.sample(
            prompts,
            places=range(len(prompts)),
            answers=options.answers,
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=options.tokens,
            seed=round_,
        ):
            pass
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"transformers": [], "vllm": []}
    handovers = []
    try:
        starting = time.perf_counter()
        list(vllm.sample(prompts[:1], places=[0], answers=1, temperature=1.0, top_p=1.0, max_new_tokens=1, seed=0))
        starting = time.perf_counter() - starting
        for round_ in range(options.rounds + 1):  # the first one warms up
            for name, sampler in (("transformers", in_process), ("vllm", vllm)):
                times[name].append(seconds(sampler, round_))
            vllm.weights_changed()
            start = time.perf_counter()
            vllm._ready_engine()
            handovers.append(time.perf_counter() - start)
        mismatch = vllm.metrics.values()
    finally:
        vllm.close()
    speeds = {name: [rows * options.tokens / value for value in found[1:]] for name, found in times.items()}
    results = {
        "model": Path(options.model).name,
        "dtype": str(policy.compute_dtype).removeprefix("torch."),
        "concurrent_answers": rows,
        "prompt_tokens": options.prompt_tokens,
        "answer_tokens": options.tokens,
        "machine": {
            "processor": platform.machine(),
            "device": str(policy.device),
            "cores": len(os.sched_getaffinity(0)),
        },
        "tokens_per_s": speeds,
        "median_tokens_per_s": {name: statistics.median(found) for name, found in speeds.items()},
        "start_s": starting,
        "handover_s": handovers[1:],
        "median_handover_s": statistics.median(handovers[1:]),
        "mismatch": mismatch,
    }
    print(json.dumps(results, indent=1))
    if options.results is not None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
