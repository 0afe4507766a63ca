"""The data that moves through one training step, one type per stage, each complete when built.

    Task -> Completion -> Rollout (a verified completion) -> RolloutGroup -> TrainingSample -> StepRecord

Between processes a learner is given a SharedGroup: of others' completions only what it can use.

Nothing is filled in later: a new stage makes a new type. No tensor library is needed to import this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length"]


class Message(TypedDict):
    """One turn of a conversation, in the form chat templates take."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem: what the agents are asked, and what a verifier needs to judge an answer.

    `id` is unique within its source and stable between runs, e.g. `train/17`. `columns` is handed to reward
    functions as keyword arguments (one list per column); by convention the reference is in `answer`.
    """

    id: str
    prompt: Prompt
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What one agent (the author) answered to one task.

    `token_ids` are the sampled ids in the author's vocabulary, the end-of-sequence id included when
    `finish_reason` is `stop`; `logprobs` are their log-probabilities (natural log) under the author's policy at
    sampling time, already divided by its temperature; both have the same length. `text` leaves special tokens out.
    """

    task_id: str
    author: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weights_version: int

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"completion {self.index} of {self.author} for {self.task_id}: {len(self.token_ids)} token ids but "
                f"{len(self.logprobs)} log-probabilities"
            )

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def mean_logprob(self) -> float:
        """Mean over the author's own tokens, in nats; what the sequence ratio compares against."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else 0.0


def completion_from_json(row: Mapping[str, Any]) -> Completion:
    """A completion from its fields as JSON gives them back."""
    return Completion(**{**row, "token_ids": tuple(row["token_ids"]), "logprobs": tuple(row["logprobs"])})


UnscoredCause = Literal["none", "nan", "exception", "timeout", "crash"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verifier's judgement of one text.

    `reward` is the weighted sum of the scores that were given; None means not scored, and such a rollout enters
    no statistic and no gradient. `scores` holds each reward function's own score. `answer` is the extracted final
    answer where the verifier can name it (used by maj@k and the parse-failure rate); `parsed` is False when it
    looked for one and found none, None when it does not extract. `unscored` names, per function, why a score is
    missing; `detail` is the worker's message for it.
    """

    reward: float | None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    answer: str | None = None
    parsed: bool | None = None
    unscored: Mapping[str, UnscoredCause] = field(default_factory=dict)
    detail: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A completion together with its verdict: the unit that agents share."""

    completion: Completion
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All rollouts of all authors for one task (the joint group), in author order, then index order."""

    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def completions(self) -> tuple[Completion, ...]:
        return tuple(rollout.completion for rollout in self.rollouts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedCompletion:
    """What another agent's learner needs of a completion; see there. `tokens` is their number.

    `token_ids` are there for a learner with an identical tokenizer, and None for any other.
    """

    task_id: str
    author: str
    index: int
    text: str
    tokens: int
    token_ids: tuple[int, ...] | None
    mean_logprob: float
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedGroup:
    """What one learner is given of a `RolloutGroup`: its own completions whole, in the same order."""

    task: Task
    completions: tuple[Completion | SharedCompletion, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """One row of one learner's update: a completion in the learner's own vocabulary.

    `prompt_ids` and `completion_ids` are learner ids; `author_mean_logprob` is the author's (not the learner's)
    mean log-probability in nats; `author_logprobs` the per-token ones, only for own rows, else None.
    `ratio` is capability(author) / capability(learner) and 1 for own rows.
    """

    task_id: str
    author: str
    index: int
    own: bool
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    author_mean_logprob: float
    author_logprobs: tuple[float, ...] | None
    advantage: float
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """Everything one step of the loop leaves behind; JSONL, the live view, trackers and checkpoints consume it.

    `step` counts from 1. `metrics` are flat, `a/b/c` -> number. `rollouts` are the rows of the rollout file.
    `evaluation` holds one entry per evaluated split and agent, empty when this step was not evaluated. `timeline` tells
    when each process of each agent, and the loop, were at work on what.
    """

    step: int
    steps: int
    metrics: Mapping[str, float]
    rollouts: tuple[Mapping[str, Any], ...]
    evaluation: tuple[Mapping[str, Any], ...] = ()
    timeline: tuple[Mapping[str, Any], ...] = ()
