"""From what reward functions said about a text to one verdict, and from verdicts to metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from hacrl.errors import RewardError
from hacrl.rewards.reward import Reward
from hacrl.rewards.worker import Outcome
from hacrl.types import UnscoredCause, Verdict


def build_verdict(rewards: Sequence[Reward], outcomes: Sequence[Outcome]) -> Verdict:
    """The verdict on one text: reward = sum of weight * score over the functions that scored.

    It is None where no function with a weight other than 0 scored: the sum would be an empty one, and a reward of 0
    would say that the answer is wrong. The answer is that of the first function that extracts answers.
    """
    scores: dict[str, float | None] = {}
    unscored: dict[str, UnscoredCause] = {}
    details: list[str] = []
    total, counted = 0.0, False
    extracted: list[str | None] = []
    for reward, outcome in zip(rewards, outcomes, strict=True):
        score, cause = _score(outcome)
        scores[reward.name] = score
        if cause is not None:
            unscored[reward.name] = cause
            if outcome.detail:
                details.append(f"{reward.name}: {outcome.detail}")
        elif score is not None and reward.weight != 0:
            total, counted = total + reward.weight * score, True
        if outcome.answers is not None:
            extracted.append(outcome.answers[0])
    answer = extracted[0] if extracted else None
    return Verdict(
        reward=total if counted else None,
        scores=scores,
        answer=answer,
        parsed=answer is not None if extracted else None,
        unscored=unscored,
        detail="\n".join(details) or None,
    )


def check_any_returned(verdicts: Sequence[Verdict]) -> None:
    """Raise RewardError if a function raised an exception for every single text: then the fault lies in the function.

    `verdicts` are all that belong together, those of a step or of an evaluation, however many calls they come from.
    """
    for name in verdicts[-1].unscored if verdicts else ():
        if all(verdict.unscored.get(name) == "exception" for verdict in verdicts):
            raise RewardError(
                f"reward {name!r} raised an exception for every one of {len(verdicts)} texts, so the fault lies in the "
                f"function; the last one:\n{verdicts[-1].detail}"
            )


def check_any_scored(verdicts: Sequence[Verdict]) -> None:
    """Raise RewardError if every single verdict of a step lacks a reward and none of them on purpose (None).

    Nothing could be learned from such a step, and a run of them would end as if all were well. `check_any_returned` is
    asked first.
    """
    check_any_returned(verdicts)
    causes = Counter(cause for verdict in verdicts for cause in verdict.unscored.values())
    if not verdicts or "none" in causes or any(verdict.reward is not None for verdict in verdicts):
        return
    functions = ", ".join(sorted({repr(name) for verdict in verdicts for name in verdict.unscored}))
    counts = ", ".join(f"{cause} {count}" for cause, count in causes.items())
    raise RewardError(
        f"reward {functions}: none of the {len(verdicts)} answers of this step got a score ({counts}); mend the "
        f"function, or raise verification.time_limit_s where it is only slow; the first one:\n{verdicts[0].detail}"
    )


def verdict_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Counts and means over verdicts; a mean over nothing is left out.

    - `reward/texts`, `reward/scored`, `reward/unscored`: verdicts in all, with and without a reward
    - `reward/partial`: verdicts with a reward although some function gave no score
    - `reward/unscored/<cause>`: scores missing for that cause, over all functions
    - `reward/mean`: mean reward, the quantity that is trained on
    - `reward/function/<name>`, `reward/function/<name>/scored`: mean score of one function, unweighted, and its count
    - `reward/extracted`, `reward/parse_failures`, `reward/parse_failure_rate`: verdicts of a verifier that looked for
      a final answer, those where it found none, and their ratio
    """
    causes = Counter(cause for verdict in verdicts for cause in verdict.unscored.values())
    rewards = [verdict.reward for verdict in verdicts if verdict.reward is not None]
    metrics = {
        "reward/texts": float(len(verdicts)),
        "reward/scored": float(len(rewards)),
        "reward/unscored": float(len(verdicts) - len(rewards)),
        "reward/partial": float(sum(1 for v in verdicts if v.reward is not None and v.unscored)),
        **{f"reward/unscored/{cause}": float(causes[cause]) for cause in get_args(UnscoredCause)},
    }
    if rewards:
        metrics["reward/mean"] = math.fsum(rewards) / len(rewards)
    for name in dict.fromkeys(name for verdict in verdicts for name in verdict.scores):
        scores = [score for verdict in verdicts if (score := verdict.scores.get(name)) is not None]
        metrics[f"reward/function/{name}/scored"] = float(len(scores))
        if scores:
            metrics[f"reward/function/{name}"] = math.fsum(scores) / len(scores)
    looked = [verdict for verdict in verdicts if verdict.parsed is not None]
    if looked:
        failures = sum(1 for verdict in looked if not verdict.parsed)
        metrics["reward/extracted"] = float(len(looked))
        metrics["reward/parse_failures"] = float(failures)
        metrics["reward/parse_failure_rate"] = failures / len(looked)
    return metrics


def _score(outcome: Outcome) -> tuple[float | None, UnscoredCause | None]:
    if outcome.kind == "exception" or outcome.kind == "timeout" or outcome.kind == "crash":
        return None, outcome.kind
    score = outcome.scores[0]
    if score is None:
        return None, "none"
    return (score, None) if math.isfinite(score) else (None, "nan")
