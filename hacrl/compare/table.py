"""A comparison for people: on the terminal, as Markdown, as CSV. All of it from the content of `comparison.json`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

Comparison = Mapping[str, Any]
Rows = tuple[list[str], list[list[str]]]

# A budget that steps cannot meet more closely is not worth a mark.
_EQUAL = 0.02


def renderables(found: Comparison) -> list[RenderableType]:
    """The two tables and how to read them."""
    title = f"Held-out accuracy, means over {_seeds(found)} with 95 % intervals over seeds and tasks"
    parts: list[RenderableType] = [_table(title, score_rows(found, beside=False), sections=True)]
    parts.append(_table("Spent per run until it is read, all agents together", cost_rows(found), sections=False))
    parts.append(Text(notes(found), style="dim"))
    return parts


def markdown(found: Comparison) -> str:
    """The same as one page."""
    parts = [_markdown_table(score_rows(found)), _markdown_table(cost_rows(found)), notes(found)]
    return "\n\n".join(["# Comparison", *parts]) + "\n"


def csv_text(found: Comparison) -> str:
    """One line per agent, method, metric and source, and one for each method it is compared against."""
    file = io.StringIO()
    columns = ["agent", "method", "source", "metric", "against", "mean", "low", "high", "start", "runs"]
    columns += ["rollouts_to_reach", "share_to_reach", *(f"cost_{name}" for name in _cost_names(found))]
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in found["results"]:
        own = {name: row[name] for name in ("agent", "method", "source", "metric")}
        figures = {name: row[name] for name in ("mean", "low", "high", "start", "runs")}
        writer.writerow(own | figures | {f"cost_{name}": value for name, value in row["cost"].items()})
        for other, reach in row["to_reach"].items():
            reached = {"rollouts_to_reach": reach["rollouts"], "share_to_reach": reach["share"]}
            writer.writerow(own | {"against": other} | row["differences"].get(other, {}) | reached)
    return file.getvalue()


def score_rows(found: Comparison, *, beside: bool = True) -> Rows:
    """Agent x method: where each ended, what the first method is above it, and when the first one got there.

    `beside`: best@k and maj@k as well.
    """
    main = [row for row in found["results"] if row["metric"].startswith("avg@")]
    others = [row for row in found["results"] if beside and not row["metric"].startswith("avg@")]
    side = list(dict.fromkeys(row["metric"] for row in others))
    values = {(row["agent"], row["method"], row["source"], row["metric"]): row["mean"] for row in others}
    several = len({row["source"] for row in main}) > 1
    first = _first(found)
    metric = main[0]["metric"] if main else "avg@k"
    header = ["agent", *(["source"] if several else []), "method", "start", f"{metric} [95 %]"]
    header += [f"{first} - it [95 %]", f"{first} gets there at", *side]
    own = {(row["agent"], row["source"]): row for row in main if row["method"] == first}
    rows = []
    for row in main:
        lead = own.get((row["agent"], row["source"]), {"differences": {}, "to_reach": {}})
        difference = lead["differences"].get(row["method"])
        reach = lead["to_reach"].get(row["method"])
        rows.append(
            [
                row["agent"],
                *([row["source"]] if several else []),
                row["method"] + _mark(found, row["method"]),
                _number(row["start"]),
                _interval(row, ".3f"),
                _interval(difference, "+.3f") if difference else "",
                _reached(reach) if reach else "",
                *(_number(values.get((row["agent"], row["method"], row["source"], name))) for name in side),
            ]
        )
    return header, rows


def cost_rows(found: Comparison) -> Rows:
    """What each method spent, and on how many runs its figures rest."""
    names = _cost_names(found)
    rows = []
    for method in found["methods"]:
        row = next((row for row in found["results"] if row["method"] == method), None)
        cells = [f"{row['cost'][name]:,.0f}" for name in names] if row else ["-"] * len(names)
        rows.append([method + _mark(found, method), *cells, f"{row['runs'] if row else 0}/{len(found['seeds'])}"])
    return ["method", *names, "runs"], rows


def notes(found: Comparison) -> str:
    """How to read the tables."""
    axis, first = found["axis"], _first(found)
    equal = {
        "rollouts": "Every method samples as many rollouts in training; steps are set to that.",
        "updates": "Every method makes as many optimizer updates at the most; steps are set to that.",
        "tokens": "Each run is read at its last evaluation within the least number of tokens that any run sampled.",
        "seconds": "Each run is read at its last evaluation within the least training time that any run took.",
    }[axis]
    marked = [method for method in found["axis_budget"] if _mark(found, method)]
    lines = [f"Budget: {axis}. {equal}"]
    if marked:
        lines.append(
            f"Marked x: that many times the {axis} of {first}, by definition (gspo-x2), by its own `steps`, or since "
            f"steps and evaluations fall no closer."
        )
    lines.append(
        f'Differences are paired by seed and task. "{first} gets there at": rollouts, on the straight lines between '
        f"evaluations of its mean curve, until it is where the other method ends; in brackets the share of what that "
        f"one spent."
    )
    return "\n".join(lines)


# ---------------------------------------------------------------- cells


def _first(found: Comparison) -> str:
    """The method that the others are held against: the first one of which a run is finished."""
    return next((method for method in found["methods"] if method in found["axis_budget"]), found["methods"][0])


def _mark(found: Comparison, method: str) -> str:
    budget = found["axis_budget"]
    if method not in budget or not budget[_first(found)]:
        return ""
    share = budget[method] / budget[_first(found)]
    return f" (x {share:.2g})" if abs(share - 1) > _EQUAL else ""


def _cost_names(found: Comparison) -> list[str]:
    return list(found["results"][0]["cost"]) if found["results"] else []


def _seeds(found: Comparison) -> str:
    count = len(found["seeds"])
    return f"{count} seeds" if count > 1 else "one seed"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(value: Mapping[str, Any], form: str) -> str:
    return f"{value['mean']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"


def _reached(reach: Mapping[str, Any]) -> str:
    return "never" if reach["rollouts"] is None else f"{reach['rollouts']:,.0f} ({reach['share']:.0%})"


def _table(title: str, content: Rows, *, sections: bool) -> Table:
    header, rows = content
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(header):
        words = name in ("agent", "source", "method")
        table.add_column(Text(name), justify="left" if words else "right", no_wrap=place < 2 or "[" in name)
    before: str | None = None
    for row in rows:
        if sections and before is not None and row[0] != before:
            table.add_section()
        shown = ["" if sections and row[0] == before else row[0], *row[1:]]
        table.add_row(*map(Text, shown))
        before = row[0]
    return table


def _markdown_table(content: Rows) -> str:
    header, rows = content
    return "\n".join(_markdown_lines(header, rows))


def _markdown_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
