"""What a person sees of a run while it goes on, and at its end. Everything shown comes from step records and files.

history = RunHistory(config)
with Progress(console, history, mode="live") as progress:
    for record in training_steps(config, on_phase=progress.phase):
        progress.step(record)
console.print(closing_table(history))
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hacrl.config import RunConfig
from hacrl.run_directory import recorded
from hacrl.stop import StopRequest
from hacrl.types import StepRecord

Mode = Literal["live", "plain", "quiet"]
Evaluation = Mapping[str, Any]

PHASES = {
    "prepare": "reading tasks, rewards and tokenizers",
    "load": "loading models",
    "evaluate": "evaluating",
    "sample": "sampling",
    "verify": "verifying",
    "update": "updating",
    "save": "saving",
    "export": "exporting",
}
BARS = "▁▂▃▄▅▆▇█"
# Width from which the live view also shows what matters second, and below which it shows the most important alone.
WIDE = 100
NARROW = 76
# An ETA from one slow first step would be far off; one from all steps would miss that answers grow longer.
ETA_STEPS = 20
MOST_PAIRS = 12


class RunHistory:
    """What is known of a run so far: metrics of its steps and its evaluations, those before a resumption included."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.metrics: list[tuple[int, Mapping[str, float]]] = []
        self.evaluations: list[Evaluation] = []
        self.made_here = 0

    def read(self, directory: Path) -> None:
        """Take over what the run directory holds: everything before the step that comes next."""
        lines, evaluations = recorded(directory)
        self.metrics = [(line["step"], line) for line in lines]
        self.evaluations = list(evaluations)

    def add(self, record: StepRecord) -> None:
        # After a restart, steps behind the last checkpoint are made again.
        if self.metrics and self.metrics[-1][0] >= record.step:
            self.metrics = [line for line in self.metrics if line[0] < record.step]
            self.evaluations = [entry for entry in self.evaluations if entry["step"] < record.step]
        self.metrics.append((record.step, record.metrics))
        self.evaluations += [{"step": record.step, **entry} for entry in record.evaluation]
        self.made_here += 1

    @property
    def done(self) -> int:
        return self.metrics[-1][0] if self.metrics else 0

    @property
    def latest(self) -> Mapping[str, float]:
        return self.metrics[-1][1] if self.metrics else {}

    def series(self, name: str) -> list[float]:
        """One metric over the steps; steps that lack it are left out."""
        values = (metrics.get(name) for _, metrics in self.metrics)
        return [value for value in values if value is not None]

    def held_out(self, agent: str) -> list[tuple[int, float]]:
        """(step, avg@k) of every evaluation of an agent, the mean over splits where there are several."""
        by_step: dict[int, list[float]] = {}
        for entry in self.evaluations:
            if entry["agent"] == agent and entry["avg@k"] is not None:
                by_step.setdefault(entry["step"], []).append(entry["avg@k"])
        return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]

    def pairs(self) -> list[tuple[str, str]]:
        """(learner, author) of every pair that shares rollouts."""
        return [
            (learner.name, author)
            for learner in self.config.agents
            for author in self.config.authors_for(learner)
            if author != learner.name
        ]

    def seconds_left(self) -> float | None:
        """By the mean of the latest steps made here; evaluations that fell into them count with them."""
        recent = [metrics["time/total"] for _, metrics in self.metrics[-min(self.made_here, ETA_STEPS) :]]
        if not self.made_here:
            return None
        return statistics.fmean(recent) * (self.config.steps - self.done)


class Progress:
    """Shows a run: a live view on a terminal, one line per step elsewhere, or nothing."""

    def __init__(self, console: Console, history: RunHistory, *, mode: Mode, stop: StopRequest | None = None) -> None:
        self.console = console
        self.history = history
        self.mode = mode
        self._view = LiveView(history, stop)
        self._live: Live | None = None
        self._known = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._view.phase = None
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """A phase begins."""
        if name == "sample" and not self._known:
            self._known = True
            self.history.read(Path(self.history.config.output))
            self._told_before()
        self._view.begin(name)
        if self.mode == "live" and self._live is None:
            if name in ("sample", "evaluate"):
                # Not before models are there: downloads and warnings of libraries would break into the view.
                self._live = Live(self._view, console=self.console, refresh_per_second=4)
                self._live.start()
            else:
                self._line(f"{PHASES.get(name, name)} ...")
        elif self.mode == "plain" and name in ("prepare", "load", "export"):
            self._line(f"{PHASES[name]} ...")

    def step(self, record: StepRecord) -> None:
        """A step has been made."""
        self.history.add(record)
        if self.mode == "plain":
            self._line(plain_line(self.history))
        elif self._live is not None:
            self._live.refresh()

    def _told_before(self) -> None:
        if self.mode == "quiet":
            return
        if self.history.done:
            self._line(f"resumed after step {self.history.done} of {self.history.config.steps}")
        elif self.mode == "plain" and self.history.evaluations:
            scores = [
                f"{agent.name} {_number(found[0][1])}"
                for agent in self.history.config.agents
                if (found := self.history.held_out(agent.name))
            ]
            self._line("held-out before training  " + "  ".join(scores))

    def _line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


# ---------------------------------------------------------------- one line per step


def plain_line(history: RunHistory) -> str:
    """The latest step on one line."""
    metrics, config = history.latest, history.config
    parts = [f"step {history.done}/{config.steps}"]
    for agent in config.agents:
        reward = metrics.get(f"agent/{agent.name}/reward/mean")
        text = f"{agent.name} {_number(reward)}"
        if unscored := metrics.get(f"agent/{agent.name}/reward/unscored"):
            text += f" ({unscored:.0f} unscored)"
        evaluated = history.held_out(agent.name)
        if evaluated and evaluated[-1][0] == history.done:
            text += f" (held-out {_number(evaluated[-1][1])})"
        parts.append(text)
    for learner, author in history.pairs()[:MOST_PAIRS]:
        mean, inside = (metrics.get(f"pair/{learner}/{author}/{name}") for name in ("s_mean", "inside_share"))
        if mean is not None:
            parts.append(f"{learner}<-{author} s {_number(mean)}" + (f" in {inside:.0%}" if inside is not None else ""))
    parts.append(f"{metrics['time/total']:.1f} s")
    if (rate := metrics.get("time/tokens_sampled_per_s")) is not None:
        parts.append(f"{rate:.0f} tokens/s")
    if (left := history.seconds_left()) is not None:
        parts.append(f"ETA {clock_time(left)}")
    return "  ".join(parts)


# ---------------------------------------------------------------- the live view


class LiveView:
    """The run as it stands now, drawn anew at every refresh to the width of the terminal."""

    def __init__(self, history: RunHistory, stop: StopRequest | None = None) -> None:
        self.history = history
        self.stop = stop
        self.phase: str | None = None
        self._since = time.monotonic()

    def begin(self, phase: str) -> None:
        self.phase, self._since = phase, time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield Text()
        yield self._head(width)
        yield self._agents(width)
        pairs = self.history.pairs()
        if pairs and self.history.metrics:
            yield self._pairs(pairs, width)
        yield from self._foot()
        if self.stop is not None and self.stop.requested and self.phase is not None:
            yield Text(
                "Stopping: what is in progress is finished and saved. Once more ends the run at once.", style="yellow"
            )

    def _head(self, width: int) -> RenderableType:
        history, config = self.history, self.history.config
        left = history.seconds_left()
        title = Text.assemble(("hacrl ", "bold"), config.algorithm.name, (f"  {config.output}", "dim"))
        steps = Text(f"step {history.done}/{config.steps}")
        eta = Text(f"ETA {clock_time(left)}" if left is not None else "")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, overflow="ellipsis", max_width=max(16, width - 52))
        grid.add_column(no_wrap=True)
        grid.add_column(width=16)
        grid.add_column(no_wrap=True)
        grid.add_row(title, steps, ProgressBar(total=config.steps, completed=history.done, width=16), eta)
        return grid

    def _agents(self, width: int) -> RenderableType:
        wide = width >= WIDE
        trend = 20 if wide else 10
        several = len({entry["split"] for entry in self.history.evaluations}) > 1
        table = _table()
        table.add_column("agent", no_wrap=True, overflow="ellipsis", max_width=24 if wide else 14)
        table.add_column("reward", justify="right")
        table.add_column("", no_wrap=True)
        table.add_column("held-out (mean of splits)" if several and wide else "held-out", no_wrap=True)
        if width >= NARROW:
            table.add_column("tokens", justify="right")
            table.add_column("cut off", justify="right")
        if wide:
            for name in ("entropy", "grad norm", "learning rate"):
                table.add_column(name, justify="right")
        latest = self.history.latest
        for agent in self.history.config.agents:
            own = f"agent/{agent.name}"
            row = [
                Text(agent.name),
                Text(_number(latest.get(f"{own}/reward/mean")), style="bold"),
                Text(sparkline(self.history.series(f"{own}/reward/mean"), trend), style="cyan"),
                _held_out(self.history.held_out(agent.name)),
            ]
            if width >= NARROW:
                row += [
                    Text(_number(latest.get(f"{own}/completion_tokens_mean"), "{:.0f}")),
                    Text(_number(latest.get(f"{own}/truncated_rate"), "{:.0%}")),
                ]
            if wide:
                row += [
                    Text(_number(latest.get(f"{own}/entropy"), "{:.2f}")),
                    Text(_number(latest.get(f"{own}/grad_norm"), "{:.3g}")),
                    Text(_number(latest.get(f"{own}/learning_rate"), "{:.1e}")),
                ]
            table.add_row(*row)
        return table

    def _pairs(self, pairs: Sequence[tuple[str, str]], width: int) -> RenderableType:
        table = _table()
        table.add_column("learner ← author", no_wrap=True, overflow="ellipsis", max_width=44 if width >= WIDE else 22)
        columns = {
            "ratio s": ("s_mean", "{:.3f}"),
            "in band": ("inside_share", "{:.0%}"),
            "omega": ("omega", "{:.2f}"),
        }
        if width >= NARROW:
            columns = {"rows": ("rows", "{:.0f}"), "dropped": ("dropped", "{:.0f}"), **columns}
            columns |= {"weight": ("weight_share", "{:.0%}")}
        if width >= WIDE:
            columns |= {
                "below": ("below_share", "{:.0%}"),
                "above": ("above_share", "{:.0%}"),
                "eff. rows": ("effective_sample_size", "{:.0f}"),
            }
        for name in columns:
            table.add_column(name, justify="right")
        for learner, author in pairs[:MOST_PAIRS]:
            values = self._pair(learner, author)
            figures = (_number(values.get(name), form) for name, form in columns.values())
            table.add_row(Text(f"{learner} ← {author}"), *figures)
        if len(pairs) > MOST_PAIRS:
            table.add_row(Text(f"and {len(pairs) - MOST_PAIRS} more pairs", style="dim"))
        return table

    def _pair(self, learner: str, author: str) -> dict[str, float]:
        """The pair's latest metrics by their last part; `dropped` is the sum over causes."""
        start = f"pair/{learner}/{author}/"
        values = {
            name.removeprefix(start): value for name, value in self.history.latest.items() if name.startswith(start)
        }
        drops = [value for name, value in values.items() if name.startswith("dropped/")]
        return {**values, **({"dropped": sum(drops)} if drops else {})}

    def _foot(self) -> Iterator[RenderableType]:
        latest = self.history.latest
        if latest:
            phases = [
                f"{name} {latest[f'time/{name}']:.1f} s"
                for name in ("sample", "verify", "update", "evaluate")
                if f"time/{name}" in latest
            ]
            rates = [
                f"{latest[name]:,.0f} {word} tokens/s"
                for name, word in (
                    ("time/tokens_sampled_per_s", "sampled"),
                    ("time/tokens_trained_per_s", "trained"),
                )
                if name in latest
            ]
            yield Text(f" last step {latest['time/total']:.1f} s: " + ", ".join(phases), style="dim")
            if rates:
                yield Text(" " + ", ".join(rates), style="dim")
            unscored = {
                agent.name: latest.get(f"agent/{agent.name}/reward/unscored") for agent in self.history.config.agents
            }
            told = [f"{name} {count:.0f}" for name, count in unscored.items() if count]
            if told:
                yield Text(f" answers without a score: {', '.join(told)}", style="yellow")
        if self.phase is not None:
            begun = self.history.done + 1
            where = {"evaluate": f"after step {self.history.done}", "export": ""}.get(self.phase, f"step {begun}")
            if self.phase == "evaluate" and self.history.metrics:
                where = f"after step {begun}"
            elif self.phase == "evaluate":
                where = "before training"
            seconds = time.monotonic() - self._since
            yield Text(f" {PHASES.get(self.phase, self.phase)} {where}".rstrip() + f" · {seconds:.0f} s")


def _held_out(evaluated: Sequence[tuple[int, float]]) -> Text:
    if not evaluated:
        return Text("-", style="dim")
    first, last = evaluated[0], evaluated[-1]
    if first[0] == last[0]:
        return Text(f"{_number(last[1])} (step {last[0]})")
    change = last[1] - first[1]
    style = "green" if change > 0 else "red" if change < 0 else ""
    return Text.assemble(f"{_number(first[1])} → ", (_number(last[1]), style), (f" ({last[0]})", "dim"))


def sparkline(values: Sequence[float], width: int) -> str:
    """A series as `width` bars at most; more values than bars are averaged in groups."""
    if not values:
        return ""
    groups = min(width, len(values))
    edges = [round(index * len(values) / groups) for index in range(groups + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * groups
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in means)


# ---------------------------------------------------------------- the end


def closing_table(history: RunHistory) -> RenderableType:
    """Held-out accuracy at start and end, per agent and split; training scores where nothing was evaluated."""
    splits = list(dict.fromkeys(entry["split"] for entry in history.evaluations))
    if not splits:
        return _training_table(history)
    k = history.evaluations[-1]["k"]
    table = Table(title=f"Held-out avg@{k} with 95 % intervals over tasks", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("agent", no_wrap=True, overflow="ellipsis")
    if len(splits) > 1:
        table.add_column("tasks")
    for name in ("start", "end", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for agent in history.config.agents:
        for split in splits:
            entries = [
                entry for entry in history.evaluations if (entry["agent"], entry["split"]) == (agent.name, split)
            ]
            entries.sort(key=lambda entry: entry["step"])
            start = next((entry for entry in entries if entry["step"] == 0), None)
            end = entries[-1] if entries and entries[-1]["step"] > 0 else None
            row = [Text(agent.name), *([Text(split)] if len(splits) > 1 else [])]
            table.add_row(*row, _accuracy(start), _accuracy(end), _change(start, end))
    return table


def _training_table(history: RunHistory) -> RenderableType:
    table = Table(title="Mean training reward (nothing was held out)", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("agent", "first step", "last step"):
        table.add_column(name, justify="left" if name == "agent" else "right")
    for agent in history.config.agents:
        values = history.series(f"agent/{agent.name}/reward/mean")
        ends = (values[0], values[-1]) if values else (None, None)
        table.add_row(Text(agent.name), *(Text(_number(value)) for value in ends))
    return table


def evaluation_table(entries: Sequence[Evaluation]) -> RenderableType:
    """Every figure of one evaluation; accuracies with their 95 % intervals over tasks."""
    several = len({entry["split"] for entry in entries}) > 1
    unscored = any(entry["unscored"] for entry in entries)
    counts = {entry["k"] for entry in entries}
    k = str(counts.pop()) if len(counts) == 1 else "k"
    # Of one answer, the best and the most frequent are the same.
    accuracies = ["avg@k"] if k == "1" else ["avg@k", "best@k", "maj@k"]
    title = "k answers to each task" if k == "k" else f"{k} answer{'s' if k != '1' else ''} to each task"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("agent", no_wrap=True, overflow="ellipsis", max_width=24)
    if several:
        table.add_column("source", no_wrap=True, overflow="ellipsis", max_width=16)
    names = ["tasks", *(["k"] if k == "k" else []), *(name.replace("@k", f"@{k}") for name in accuracies)]
    names += ["cut off", "no answer", "tokens", *(["unscored"] if unscored else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=name.startswith("avg"))
    for entry in entries:
        cells: list[Text | str] = [
            str(entry["tasks"]),
            *([str(entry["k"])] if k == "k" else []),
            *(_accuracy(entry, name) for name in accuracies),
            _number(entry["truncated_rate"], "{:.0%}"),
            _number(entry["parse_failure_rate"], "{:.0%}"),
            _number(entry["mean_tokens"], "{:.0f}"),
            *([str(entry["unscored"])] if unscored else []),
        ]
        head = [Text(entry["agent"]), *([Text(entry["split"])] if several else [])]
        table.add_row(*head, *cells)
    return table


def _accuracy(entry: Evaluation | None, name: str = "avg@k") -> Text:
    if entry is None or entry[name] is None:
        return Text("-")
    # Runs of earlier versions have no error of best@k and maj@k.
    error = entry.get(f"{name}_stderr")
    return Text(_number(entry[name]) + (f" ± {_number(1.96 * error)}" if error is not None else ""))


def _change(start: Evaluation | None, end: Evaluation | None) -> Text:
    if start is None or end is None or start["avg@k"] is None or end["avg@k"] is None:
        return Text("-")
    change = end["avg@k"] - start["avg@k"]
    return Text(f"{change:+.3f}", style="green" if change > 0 else "red" if change < 0 else "")


# ---------------------------------------------------------------- words and numbers


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=True)


def _number(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def clock_time(seconds: float) -> str:
    """A duration as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
