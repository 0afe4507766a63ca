"""Seconds from a command to what a user waits for: `hacrl --help`, and the first training step of `hacrl demo`.

python benchmarks/startup.py --results benchmarks/results/speed/startup.json

The first step of the demo is over when its record is on disk, after the evaluation of the untrained agents; `--help`
when the process has ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from speed.measure import write

from hacrl.demo.settings import AGENTS

HACRL = str(Path(sys.executable).with_name("hacrl"))


def help_seconds() -> float:
    start = time.perf_counter()
    subprocess.run([HACRL, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def floor_seconds() -> float:
    """A process that imports torch and transformers and loads one of the demo's agents, and nothing else."""
    code = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(AGENTS / 'qwen')!r})"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def demo_seconds() -> tuple[float, float]:
    """Until the evaluation before training is on disk, and until the first step is."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            [HACRL, "demo", "--output", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        evaluated = stepped = 0.0
        while not stepped:
            time.sleep(0.02)
            if process.poll() is not None:
                raise RuntimeError(f"hacrl demo ended with status {process.returncode}")
            now = time.perf_counter() - start
            evaluated = evaluated or (now if any(map(_written, Path(folder).rglob("evaluations.jsonl"))) else 0.0)
            stepped = now if any(map(_written, Path(folder).rglob("metrics.jsonl"))) else 0.0
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return evaluated, stepped


def _written(path: Path) -> bool:
    return path.stat().st_size > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    help_seconds()  # compiled files and the disk's cache
    demo = [demo_seconds() for _ in range(options.rounds)]
    result = {
        "help": statistics.median(help_seconds() for _ in range(options.rounds)),
        "libraries_and_one_model": statistics.median(floor_seconds() for _ in range(options.rounds)),
        "demo_evaluated": statistics.median(evaluated for evaluated, _ in demo),
        "demo_first_step": statistics.median(stepped for _, stepped in demo),
        "rounds": demo,
    }
    write(result, options.results)


if __name__ == "__main__":
    main()
