"""Errors a user can act on: each names the place, the value that was given and the remedy."""

from __future__ import annotations

from collections.abc import Sequence


class HacrlError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(HacrlError):
    """One or more faults in a run's configuration, all told at once.

    `problems` holds one line per fault, each in the form `place: what was given; what to do`.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
            super().__init__(f"{len(self.problems)} problems\n{lines}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        # Errors cross process borders; pickle would rebuild this one from its message.
        return type(self), (self.problems,)


class TaskError(HacrlError):
    """A dataset row or generator cannot be turned into a `Task`."""


class RewardError(HacrlError):
    """A reward function cannot be loaded, breaks its contract, or fails for every text of a step."""


class ModelError(HacrlError):
    """A model, tokenizer or chat template cannot be used as an agent."""


class RunDirectoryError(HacrlError):
    """The output folder holds another run, or a run that cannot be continued with this configuration."""


class NonFiniteError(HacrlError):
    """A loss or gradient was NaN or infinite; the batch has been written to the path in the message."""


class SamplerError(HacrlError):
    """A sampling engine cannot be started, died, or gives other log-probabilities than the learner's policy."""


class ClusterError(HacrlError):
    """A cluster cannot be reached, or cannot hold a run's agents."""


class AgentLostError(HacrlError):
    """The process of an agent, or the machine it was on, has died."""


class AgentError(HacrlError):
    """An agent in a process of its own raised what is none of these errors; the message holds its traceback."""
