"""What `RunTrackers` asks of a tracking library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """One run in one tracking library. Any method may raise anything: `RunTrackers` deals with it."""

    def begin(self) -> int:
        """Called before the first `log`: take up the run of an earlier start, and return the first step to send.

        Steps before it are in the library already. Called again where it has raised.
        """
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take over one step; steps come in order, each once."""
        ...

    def close(self, *, failed: bool) -> None:
        """Send what is left; `failed` where the run ends with an error."""
        ...
