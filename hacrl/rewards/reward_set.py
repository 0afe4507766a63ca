"""The reward functions of a run, loaded and checked together."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hacrl.errors import RewardError
from hacrl.rewards.reward import Reward, RewardSpec, load_reward


@dataclass(frozen=True, kw_only=True)
class RewardSet:
    """Loaded reward functions in the order given, with unique names; `payload` lets a worker load the same ones."""

    rewards: tuple[Reward, ...]
    payload: bytes

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises RewardError if a function needs a parameter that is not among the columns of the tasks."""
        available = frozenset(columns)
        problems = [
            f"reward {reward.name!r} needs {', '.join(missing)}"
            for reward in self.rewards
            if (missing := reward.missing_columns(available))
        ]
        if problems:
            raise RewardError(
                f"{'; '.join(problems)}; available columns: {', '.join(sorted(available)) or 'none'}. Map a column to "
                "that name, give the value as an argument, or give the parameter a default"
            )


def load_rewards(specs: Sequence[RewardSpec | str | Callable[..., Any]]) -> RewardSet:
    """Loads and validates reward functions; a bare name or callable stands for a spec of weight 1.

    A name that occurs again gets a number: `math`, `math-2`.

    Raises:
        RewardError: there is none, one cannot be loaded or sent to a worker process, or all weights are 0.
    """
    given = [spec if isinstance(spec, RewardSpec) else RewardSpec(function=spec) for spec in specs]
    if not given:
        raise RewardError("rewards: none given; name at least one, e.g. math")
    loaded = [load_reward(spec) for spec in given]
    if all(reward.weight == 0 for reward in loaded):
        raise RewardError("rewards: every weight is 0, so nothing would be learned; give one a weight")
    unique: list[Reward] = []
    for reward in loaded:
        names, name, number = {r.name for r in unique}, reward.name, 2
        while name in names:
            name, number = f"{reward.name}-{number}", number + 1
        unique.append(replace(reward, name=name))
    return RewardSet(rewards=tuple(unique), payload=_payload(unique))


def load_payload(payload: bytes) -> tuple[Reward, ...]:
    """The rewards of a `RewardSet.payload`, in a worker process."""
    return tuple(load_reward(spec) for spec in pickle.loads(payload))


def _payload(rewards: Sequence[Reward]) -> bytes:
    specs = [replace(r.spec, name=r.name, arguments=dict(r.spec.arguments)) for r in rewards]
    if all(isinstance(spec.function, str) for spec in specs):
        return pickle.dumps(specs)
    # dill rather than pickle: it also carries lambdas, closures and functions of a script or notebook.
    import dill

    for spec in specs:
        try:
            dill.dumps(spec, recurse=True)
        except Exception as error:
            raise RewardError(
                f"reward {spec.name!r}: it cannot be sent to a worker process ({type(error).__name__}: {error}); make "
                "it a module-level function that opens files, locks and models itself, and name it module:function"
            ) from error
    return dill.dumps(specs, recurse=True)
