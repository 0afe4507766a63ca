"""The answer at the top: whether sharing helped, by how much, why, and what to mistrust."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hacrl.report.intervals import Interval
from hacrl.report.methods import Method
from hacrl.report.rollouts import Sample
from hacrl.report.runs import Comparison, number
from hacrl.report.scores import LAST_STEPS, Measure
from hacrl.report.tables import DROPS, PairMeans

Tone = Literal["good", "bad", "plain", "warn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One agent's result in large print; `agent` is None for the mean."""

    agent: str | None
    value: str
    verdict: str
    detail: str
    tone: Tone


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One sentence with the metric behind it."""

    text: str
    key: str
    tone: Tone


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    headline: str
    detail: str
    cards: list[Card]
    why: list[Line]
    checks: list[Line]


def summarise(
    methods: Sequence[Method], comparisons: Sequence[Comparison], measure: Measure, sample: Sample
) -> Summary:
    """The first sharing method against each agent's control; a comparison's own figures where it has them."""
    sharing = next((method for method in methods if method.shares), None)
    controls = {agent: measure.control(methods, agent) for agent in measure.agents}
    checks = [*_checks(methods, sample)]
    if sharing is None or not any(controls.values()):
        missing = (
            "None of these runs shares rollouts, so there is nothing to compare: add a run with algorithm=hacpo."
            if sharing is None
            else "Whether sharing helped cannot be told: none of these runs trains the same agents alone. "
            "Add a run with algorithm=gspo."
        )
        only = sharing or methods[0]
        return Summary(
            headline=missing,
            detail=f"{measure.name} of {only.name} at the end.",
            cards=[*_plain_cards(only, measure)],
            why=[*_why(sharing, {})] if sharing else [],
            checks=checks,
        )
    cards = [
        _card(agent, gain, sharing, control, comparisons, measure)
        for agent, control in controls.items()
        if control and (gain := _gain(agent, sharing, control, comparisons, measure)) is not None
    ]
    names = list(dict.fromkeys(control.name for control in controls.values() if control))
    return Summary(
        headline=_headline(cards, sharing),
        detail=f"{measure.name}: {sharing.name} against {' and '.join(names)} (each agent alone)."
        + (" Intervals are at 95 %." if any("interval" in card.detail for card in cards) else ""),
        cards=cards,
        why=[*_why(sharing, controls)],
        checks=checks,
    )


def _headline(cards: Sequence[Card], sharing: Method) -> str:
    if not cards:
        return f"{sharing.name} and the runs alone have no agent and no score in common to compare."
    overall = next((card for card in cards if card.agent is None), cards[0] if len(cards) == 1 else None)
    if overall is None:
        return "; ".join(f"{card.agent}: {card.verdict} ({card.value})" for card in cards) + "."
    if overall.verdict == "one seed":
        return f"Too few seeds to tell whether sharing helped: {overall.value} with {sharing.name}."
    if overall.tone in ("good", "bad"):
        told = "Sharing helped" if overall.tone == "good" else "Sharing did harm"
        alone = [card for card in cards if card.agent is not None]
        who = " and ".join(str(card.agent) for card in alone if card.tone == overall.tone)
        if len(alone) < 2:
            return f"{told}: {overall.value}."
        if all(card.tone == overall.tone for card in alone):
            return f"{told}: {overall.value} on average, and clearly for each agent."
        return f"{told}: {overall.value} on average; " + (
            f"clearly for {who}." if who else "for no agent alone is it clear."
        )
    clear = [card for card in cards if card.tone in ("good", "bad")]
    also = "; ".join(f"{card.agent}: {card.verdict}" for card in clear)
    return "No difference shown between sharing and training alone on average." + (f" But {also}." if also else "")


def _gain(
    agent: str | None, sharing: Method, control: Method, comparisons: Sequence[Comparison], measure: Measure
) -> Interval | None:
    if (result := _compared(agent, sharing, comparisons, measure)) is not None:
        difference = (result.get("differences") or {}).get(control.name) or {}
        mean, low, high = (number(difference.get(key)) for key in ("mean", "low", "high"))
        runs = number(result.get("runs")) or 0
        if mean is not None:
            # Of one seed it is the interval over tasks, which says nothing of other seeds.
            over = f"{runs:.0f} seeds and the held-out tasks"
            return Interval(mean=mean, low=low, high=high, over=over) if runs > 1 else Interval(mean=mean)
    return measure.gain(sharing, control, agent)


def _compared(
    agent: str | None, method: Method, comparisons: Sequence[Comparison], measure: Measure
) -> Mapping[str, Any] | None:
    """A comparison's own avg@k result; None where there is none, or several held-out sources have one each."""
    found = [
        result
        for comparison in comparisons
        for result in comparison.results
        if (result.get("agent"), result.get("method")) == (agent or "mean", method.name)
        and str(result.get("metric")).startswith("avg@")
    ]
    return found[0] if measure.held_out and len(found) == 1 else None


def _card(
    agent: str | None,
    gain: Interval,
    sharing: Method,
    control: Method,
    comparisons: Sequence[Comparison],
    measure: Measure,
) -> Card:
    tone: Tone = "plain"
    verdict = "no difference shown"
    if gain.low is None or gain.high is None:
        verdict = "one seed"
    elif gain.low > 0:
        tone, verdict = "good", "sharing helped"
    elif gain.high < 0:
        tone, verdict = "bad", "sharing did harm"
    factor, digits, unit = (100, 1, " points") if measure.percent else (1, 3, "")
    ends = []
    for method in (sharing, control):
        result = _compared(agent, method, comparisons, measure) or {}
        own = measure.end(method, agent)
        score = number(result.get("mean"))
        score = own.mean if score is None and own else score
        ends.append("?" if score is None else f"{factor * score:.{digits}f}")
    percent = " %" if measure.percent else ""
    detail = " against ".join(
        f"{end}{percent} with {method.name}" for end, method in zip(ends, (sharing, control), strict=True)
    )
    if gain.low is not None and gain.high is not None:
        detail += f"; interval {factor * gain.low:+.{digits}f} to {factor * gain.high:+.{digits}f} over {gain.over}"
    elif (error := measure.task_error((sharing, control), agent)) is not None:
        detail += f"; the held-out tasks alone leave ±{factor * error:.{digits}f}"
    value = f"{factor * gain.mean:+.{digits}f}{unit}"
    return Card(agent=agent, value=value, verdict=verdict, detail=detail, tone=tone)


def _plain_cards(method: Method, measure: Measure) -> Iterator[Card]:
    for agent in measure.agents:
        end, start = measure.end(method, agent), measure.start([method], agent)
        if end is not None:
            percent = " %" if measure.percent else ""
            detail = f"from {measure.shown(start)}{percent}" if start else ""
            yield Card(
                agent=agent, value=measure.shown(end) + percent, verdict="at the end", detail=detail, tone="plain"
            )


def _why(sharing: Method, controls: Mapping[str | None, Method | None]) -> Iterator[Line]:
    for learner, author in sharing.pairs:
        pair = PairMeans(sharing, learner, author)
        inside, weight, omega = (pair.of(key) for key in ("inside_share", "weight_share", "omega"))
        below, above = pair.of("below_share") or 0.0, pair.of("above_share") or 0.0
        words = []
        if inside is not None:
            words.append(f"{learner} could use {_percent(inside)} of {author}'s answers")
            if inside < 0.3:
                side = "unlikely" if below >= above else "likely"
                words[-1] += f" ({_percent(max(below, above))} were too {side} for it)"
        if weight is not None:
            words.append(f"{author}'s answers made {_percent(weight)} of {learner}'s gradient")
        if omega is not None:
            words.append(f"{author} was {'as' if 0.95 < omega < 1.05 else f'{omega:.2f} times as'} strong")
        if words:
            little = (weight is not None and weight < 0.05) or (inside is not None and inside < 0.1)
            yield Line(
                text="; ".join(words) + "." + (" Little was shared in effect." if little else ""),
                key=f"pair/{learner}/{author}/...",
                tone="warn" if little else "plain",
            )
    for agent, control in controls.items():
        metric = f"agent/{agent}/zero_variance_share"
        shares = [mean for method in (sharing, control) if method and (mean := _over_run(method, metric)) is not None]
        if len(shares) == 2:
            yield Line(
                text=f"{_percent(shares[0])} of {agent}'s tasks taught nothing with sharing, {_percent(shares[1])} "
                "alone.",
                key=metric,
                tone="plain",
            )


def _over_run(method: Method, metric: str, last: int | None = None) -> float | None:
    """A metric's mean over the steps of a run (its `last` ones), averaged over runs."""
    columns = [list(run.column(metric).values()) for run in method.runs if run.column(metric)]
    means = [statistics.fmean(values if last is None else values[-last:]) for values in columns]
    return statistics.fmean(means) if means else None


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _checks(methods: Sequence[Method], sample: Sample) -> Iterator[Line]:
    for method in methods:
        unfinished = [run for run in method.runs if run.done < run.planned]
        if unfinished:
            names = ", ".join(f"{run.name} ({run.done} of {run.planned} steps)" for run in unfinished[:4])
            more = f" and {len(unfinished) - 4} more" if len(unfinished) > 4 else ""
            yield Line(text=f"Unfinished: {names}{more}.", key="metrics.jsonl", tone="warn")
        for run in method.runs:
            for note in run.notes:
                yield Line(text=f"{run.name}: {note}.", key="", tone="warn")
        for agent in method.agents:
            yield from _agent_checks(method, agent)
        for learner, author in method.pairs:
            pair = PairMeans(method, learner, author)
            prefix = f"pair/{learner}/{author}"
            rows = pair.total("rows") or 0.0
            for keys, what in (
                ([f"dropped/{cause}" for cause in DROPS], "were dropped"),
                (["round_trip_failures"], f"read differently after {learner}'s tokenizer"),
                (["truncated"], f"were cut to {learner}'s limit"),
            ):
                if lost := pair.total(*keys):
                    yield Line(
                        text=f"{method.name}: {lost:,.0f} of {rows:,.0f} answers of {author} {what}.",
                        key=f"{prefix}/{keys[0] if len(keys) == 1 else 'dropped/...'}",
                        tone="warn" if lost > 0.01 * rows else "plain",
                    )
    budgets = {
        method.name: statistics.fmean(sum(run.column("rollouts").values()) for run in method.runs) for method in methods
    }
    known = {name: count for name, count in budgets.items() if count}
    if known and max(known.values()) > 1.02 * min(known.values()):
        told = ", ".join(f"{name} {count:,.0f}" for name, count in known.items())
        yield Line(
            text=f"Runs were given different numbers of rollouts ({told}): compare the curves against rollouts, not "
            "the ends.",
            key="rollouts",
            tone="warn",
        )
    if sample.unreadable:
        yield Line(
            text=f"{sample.unreadable:,} lines of rollout files could not be read.", key="rollouts/", tone="warn"
        )


# metric; the limit it should not be above; over the whole run (else its last steps); what to say
LIMITS = (
    ("reward/unscored", 0.0, True, "{} answers per step got no score: see the causes reward/unscored/..."),
    ("truncated_rate", 0.05, False, "{} of the last answers were cut off by the length limit: raise max_new_tokens"),
    ("reward/parse_failure_rate", 0.05, False, "{} of the last answers held no final answer: ask for it in the prompt"),
    ("zero_variance_share", 0.5, True, "{} of the tasks taught nothing, for all answers were equally good"),
    ("baseline_fell_back_share", 0.2, True, "{} of the baselines were replaced, for capabilities differ much"),
    ("own_ratio_error", 0.01, True, "s of own answers is off by {}: sampler and learner disagree; set old_logprobs"),
    ("updates_skipped", 0.0, True, "on average {} of a step's updates had no row with a gradient and were skipped"),
)

# metrics that count what was lost over a run; what to say
LOSSES = (
    (("absent",), "{} steps were made without it, for it had been let go"),
    (("steps_missed",), "{} steps went by while it was still at work on earlier ones"),
    (("sample_late", "update_late"), "{} times it was not waited for"),
    (("rollouts_late",), "{} answers came too late and were not used"),
    (("rollouts_stale",), "{} answers were too old and were not used"),
)


def _agent_checks(method: Method, agent: str) -> Iterator[Line]:
    for metric, limit, whole, words in LIMITS:
        mean = _over_run(method, f"agent/{agent}/{metric}", None if whole else LAST_STEPS)
        if mean is not None and mean > limit:
            shown = _percent(mean) if metric.endswith(("rate", "share")) else f"{mean:.2g}"
            yield Line(
                text=f"{method.name}, {agent}: {words.format(shown)}.", key=f"agent/{agent}/{metric}", tone="warn"
            )
    for keys, words in LOSSES:
        count = sum(sum(run.column(f"agent/{agent}/{key}").values()) for run in method.runs for key in keys)
        if count:
            yield Line(
                text=f"{method.name}, {agent}: {words.format(f'{count:,.0f}')}.",
                key=f"agent/{agent}/{keys[0]}",
                tone="warn",
            )
