"""Runs in, one HTML file out. It needs no network and no other file.

Everything that a model may have written reaches the page as base64 of compressed JSON, which no HTML parser can take
for markup, and the page's program puts it into text nodes alone. A content security policy allows the page's own two
programs by their hashes, no other, and no connection at all.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from hacrl.durable_files import write_atomically
from hacrl.errors import RunDirectoryError
from hacrl.report.figures import band, charts
from hacrl.report.methods import Method, group_runs
from hacrl.report.rollouts import RULE, Sample, sample
from hacrl.report.runs import Comparison, read_runs
from hacrl.report.scores import Measure
from hacrl.report.series import AXES, costs
from hacrl.report.summary import summarise
from hacrl.report.tables import comparison_table, pair_table, results_table, runs_table, time_table

# Compressed rollouts of at most this size keep the page under 5 MB: plotly.js takes 1.5 MB, and base64 adds a third.
MOST_ROLLOUT_BYTES = 1_500_000
DIGITS = 5


def write_report(paths: Sequence[str | Path], output: str | Path) -> Path:
    """Write the report of run directories or compare output directories to `output`.

    Raises RunDirectoryError where a path holds no run, or `output` cannot be written.
    """
    page = report([Path(path) for path in paths])
    output = Path(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, page.encode())
    except OSError as error:
        raise RunDirectoryError(f"{output}: cannot be written: {error}; choose another --output") from error
    return output


def report(paths: Sequence[Path]) -> str:
    """The whole page as HTML."""
    runs, comparisons = read_runs(paths)
    methods = group_runs(runs)
    runs = [run for method in methods for run in method.runs]
    found = sample(methods)
    rollouts = _packed(found.groups)
    while len(rollouts) > MOST_ROLLOUT_BYTES and len(found.groups) > 1:
        # A little less than what would fit by proportion, for groups differ in size.
        found = found.thinned(max(1, int(0.9 * len(found.groups) * MOST_ROLLOUT_BYTES / len(rollouts))))
        rollouts = _packed(found.groups)
    return _html(_packed(_content(methods, comparisons, found)), rollouts)


def _content(methods: Sequence[Method], comparisons: Sequence[Comparison], found: Sample) -> dict[str, Any]:
    measure = Measure(methods)
    agents = list(dict.fromkeys(agent for method in methods for agent in method.agents))
    pairs, time = pair_table(methods), time_table(methods)
    tables = [
        results_table(methods, measure),
        *(comparison_table(comparison, place) for place, comparison in enumerate(comparisons)),
        *([pairs] if pairs else []),
        *([time] if time else []),
        runs_table(methods),
    ]
    return {
        "agents": agents,
        "methods": [
            {"name": method.name, "shares": method.shares, "runs": len(method.runs), "band": band(method)}
            for method in methods
        ],
        "axes": list(AXES),
        "costs": {
            method.name: {name or "": costs(method, name) for name in [*method.agents, None]} for method in methods
        },
        "summary": asdict(summarise(methods, comparisons, measure, found)),
        "tables": {table.id: asdict(table) for table in tables},
        "charts": [asdict(chart) for chart in charts(methods, found)],
        "runs": [{"name": run.name, "method": method.name} for method in methods for run in method.runs],
        "rollouts": {"rule": RULE, "shown": found.shown, "total": found.total},
        "version": version("hacrl"),
    }


def _html(data: bytes, rollouts: bytes) -> str:
    from plotly.offline import get_plotlyjs

    here = files("hacrl.report")
    style, program, page = (
        (here / "template" / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "page.html")
    )
    plotly: str = get_plotlyjs()
    parts = {
        "policy": f"{_hash(program)} {_hash(plotly)}",
        "style": style,
        "program": program,
        "plotly": _base64(gzip.compress(plotly.encode(), 9, mtime=0)),
        "data": _base64(data),
        "rollouts": _base64(rollouts),
    }
    # One pass over the template's own placeholders: what is put in is not looked at again.
    pieces = page.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


def _hash(program: str) -> str:
    return f"'sha256-{_base64(hashlib.sha256(program.encode()).digest())}'"


def _packed(content: Any) -> bytes:
    # ASCII, so that lone surrogates of a text are escapes and never bytes.
    text = json.dumps(_rounded(content), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return gzip.compress(text.encode("ascii"), 9, mtime=0)


def _rounded(value: Any) -> Any:
    """Numbers with the digits that a chart can show; those that are not finite become null."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
