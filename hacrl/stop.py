"""Ending a run from outside without losing anything."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Tells the loop to save and end at the next safe point: after verification, or after the update in progress.

    `signal` is the number of the signal that asked for it, None where it was the program itself.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal: int | None = None

    def request(self) -> None:
        self.requested = True

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[StopRequest]:
        """SIGTERM and Ctrl-C request a stop; the second one ends the process the usual way. Main thread only."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def handle(number: int, _: FrameType | None) -> None:
            self.signal = number
            self.request()
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)

        for number in previous:
            signal.signal(number, handle)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
