"""The process of an engine without vLLM: every id is as likely as any other. Run by path, in place of sampling/vllm.py.

FAKE_ENGINE tells how it misbehaves at `sample`: die, exit, error, hang. Calls are printed, so they stand in the log.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

spec = importlib.util.spec_from_file_location("worker", Path(__file__).parents[1] / "hacrl/sampling/vllm.py")
assert spec is not None
assert spec.loader is not None
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)


class UniformEngine:
    def load(self, *, model: str, **settings: Any) -> str:
        self.vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        print("load", sorted(path.name for path in Path(model).iterdir()), json.dumps(settings, sort_keys=True))
        return os.environ.get("FAKE_DEVICE", "cpu")

    def reload(self, *, folder: str) -> None:
        print("reload", sorted(path.name for path in Path(folder).iterdir()))

    def sample(self, *, prompts: list[list[int]], seeds: list[list[int]], max_new_tokens: int, **_: Any) -> Any:
        match os.environ.get("FAKE_ENGINE"):
            case "die":
                print("out of memory, or so", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "error":
                raise ValueError("no such head size")
            case "hang":
                print("hangs", flush=True)
                time.sleep(1000)
        return [
            [
                (
                    [(seed + place) % self.vocabulary for place in range(max_new_tokens)],
                    [-math.log(self.vocabulary)] * max_new_tokens,
                    seed % 2 == 0,
                )
                for seed in own
            ]
            for own in seeds
        ]


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    worker.main(UniformEngine())
