"""Where tasks come from: a dataset row, a generator's item or a user's function becomes a `Task`."""

from __future__ import annotations

from hacrl.tasks.batch import batch
from hacrl.tasks.loading import load_tasks
from hacrl.tasks.overlap import overlap

__all__ = ["batch", "load_tasks", "overlap"]
