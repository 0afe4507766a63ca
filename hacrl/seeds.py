"""Seeds for everything that draws random numbers, as a pure function of the run's seed and what is drawn.

No random state outlives a step, so a resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. `derive_seed(config.seed, "sample", agent, step)`."""
    digest = hashlib.sha256("/".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
