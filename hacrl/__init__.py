"""hacrl: train different language models together and share verified rollouts.

    config = hacrl.load_config("run.yaml", ["algorithm.alpha=3"])
    for record in hacrl.training_steps(config):
        print(record.step, record.metrics["agent/qwen/reward_mean"])
    hacrl.evaluate(config.output)

Names are imported when they are first used: `import hacrl` alone loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacrl.compare.comparison import compare_methods
    from hacrl.config import RunConfig, load_config
    from hacrl.errors import (
        ConfigError,
        HacrlError,
        ModelError,
        NonFiniteError,
        RewardError,
        RunDirectoryError,
        TaskError,
    )
    from hacrl.saved_run import evaluate
    from hacrl.stop import StopRequest
    from hacrl.trainer import train, training_steps
    from hacrl.types import Message, StepRecord, Task, Verdict

_HOMES = {
    "ConfigError": "hacrl.errors",
    "HacrlError": "hacrl.errors",
    "Message": "hacrl.types",
    "ModelError": "hacrl.errors",
    "NonFiniteError": "hacrl.errors",
    "RewardError": "hacrl.errors",
    "RunConfig": "hacrl.config",
    "RunDirectoryError": "hacrl.errors",
    "StepRecord": "hacrl.types",
    "StopRequest": "hacrl.stop",
    "Task": "hacrl.types",
    "TaskError": "hacrl.errors",
    "Verdict": "hacrl.types",
    "compare_methods": "hacrl.compare.comparison",
    "evaluate": "hacrl.saved_run",
    "load_config": "hacrl.config",
    "train": "hacrl.trainer",
    "training_steps": "hacrl.trainer",
}

__all__ = [
    "ConfigError",
    "HacrlError",
    "Message",
    "ModelError",
    "NonFiniteError",
    "RewardError",
    "RunConfig",
    "RunDirectoryError",
    "StepRecord",
    "StopRequest",
    "Task",
    "TaskError",
    "Verdict",
    "__version__",
    "compare_methods",
    "evaluate",
    "load_config",
    "train",
    "training_steps",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hacrl")
    if name not in _HOMES:
        raise AttributeError(f"module 'hacrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
