"""The reward of all drilled runs, which follows orders: a file that says what is to go wrong, and how often."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

ORDERS = "HACRL_DRILL_ORDERS"


def obedient(completions: list[str], **_: Any) -> list[float]:
    """Whether a text has an even number of letters, but for what is ordered: `hang once`, `kill once`, `raise once` at
    the next call; `hang`, `kill`, `raise` for every text with a q."""
    order = Path(os.environ[ORDERS])
    told = order.read_text() if order.exists() else ""
    act, _, once = told.partition(" ")
    if act and (once or any("q" in text.lower() for text in completions)):
        if once:
            order.unlink(missing_ok=True)
        if act == "hang":
            time.sleep(3600)
        elif act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif act == "raise":
            raise ValueError("as ordered")
    return [float(sum(character.isalpha() for character in text) % 2 == 0) for text in completions]
