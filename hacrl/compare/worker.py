"""One training run in a process of its own: `python -m hacrl.compare.worker PARENT_PID`, started by `execute.py`.

The configuration comes on standard input. Standard output carries one JSON line for each phase that begins and each
step that is on disk; whatever else is written, by libraries and reward functions too, goes to standard error, which is
the run's log. SIGTERM ends the run with a checkpoint. A parent that is gone ends it at once: nothing is lost but the
steps since the last checkpoint, and its folder is free for the next one that wants it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from hacrl.config import RunConfig
from hacrl.errors import HacrlError
from hacrl.stop import StopRequest


def main() -> int:
    """Train; the exit status is that of the `hacrl` command."""
    reports = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def tell(**what: Any) -> None:
        reports.write(json.dumps(what) + "\n")

    threading.Thread(target=_end_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    config = RunConfig.model_validate_json(sys.stdin.read())
    stop = StopRequest()
    with stop.on_signals():
        # By its environment, for datasets takes long to import and few task sources need it.
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        import torch
        import transformers

        from hacrl.trainer import training_steps

        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        try:
            for record in training_steps(config, stop=stop, on_phase=lambda phase: tell(phase=phase)):
                tell(step=record.step)
        except HacrlError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
    return 0 if stop.signal is None else 128 + stop.signal


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
