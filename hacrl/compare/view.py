"""What a person sees of a comparison while its runs go on: a table on a terminal, a line per run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hacrl.compare.execute import Event
from hacrl.compare.plan import Plan, Run
from hacrl.progress import PHASES, clock_time
from hacrl.stop import StopRequest

STYLES = {"done": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}


class View:
    """Shows where each run of a plan is. `left` are the runs that are still to be made."""

    def __init__(self, console: Console, plan: Plan, left: Sequence[Run], stop: StopRequest) -> None:
        self.console = console
        self.plan = plan
        self.stop = stop
        names = {run.name for run in left}
        self._state = {run.name: "waiting" if run.name in names else "done" for run in plan.runs}
        self._steps: dict[str, int] = {}
        self._began: dict[str, float] = {}
        self._made = 0
        self._since = time.monotonic()
        self._live = Live(self, console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> Self:
        done = sum(state == "done" for state in self._state.values())
        if done:
            self._line(f"{done} of {len(self._state)} runs were finished before and are used as they are")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, event: Event) -> None:
        """Something happened to a run."""
        name = event.run
        if name not in self._began:
            self._began[name] = time.monotonic()
            self._line(f"{name}: begins")
        if event.phase is not None:
            self._state[name] = event.phase
        if event.step is not None:
            self._steps[name] = event.step
            self._made += 1
        if event.ended is not None:
            self._state[name] = event.ended
            ended = sum(state in ("done", "failed") for state in self._state.values())
            seconds = time.monotonic() - self._began[name]
            self._line(f"{name}: {event.ended} after {seconds:.0f} s  ({ended} of {len(self._state)} runs)")
            if event.error:
                self._line("\n".join(f"    {line}" for line in event.error.splitlines()))

    def _line(self, text: str) -> None:
        if self._live is None:
            self.console.print(Text(text), soft_wrap=True)

    # ------------------------------------------------------------ the live table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
        table.add_column("method", no_wrap=True, overflow="ellipsis", max_width=40)
        for seed in self.plan.seeds:
            table.add_column(f"seed {seed}", no_wrap=True)
        for method in self.plan.methods:
            cells = [self._cell(run) for run in self.plan.runs if run.method == method.name]
            table.add_row(Text(method.name), *cells)
        yield table
        yield Text(f" {self._foot()}", style="dim")
        if self.stop.requested:
            yield Text("Stopping: runs under way are saved. Once more ends them at once.", style="yellow")

    def _cell(self, run: Run) -> Text:
        state = self._state[run.name]
        if state in STYLES:
            return Text(state, style=STYLES[state])
        step = self._steps.get(run.name)
        return Text(f"{step}/{run.config.steps}" if step is not None else PHASES.get(state, state).partition(" ")[0])

    def _foot(self) -> str:
        ended = sum(state in ("done", "failed") for state in self._state.values())
        seconds = time.monotonic() - self._since
        text = f"{ended} of {len(self._state)} runs · {clock_time(seconds)}"
        if self._made:
            # Steps that a continued run had made before are seen once it tells its next one.
            left = sum(
                run.config.steps - self._steps.get(run.name, 0)
                for run in self.plan.runs
                if self._state[run.name] not in STYLES or self._state[run.name] == "waiting"
            )
            text += f" · about {clock_time(seconds / self._made * left)} left"
        return text
