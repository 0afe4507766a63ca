"""One injected fault: what must hold after it, and its row in the table of docs/fault-drill.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drilled_run import (
    GO_ON_SECONDS,
    ORPHAN_SECONDS,
    RUN_SECONDS,
    SEED,
    UNREACHABLE_ORPHAN_SECONDS,
    DrilledRun,
    Moment,
    drilled_config,
)
from run_states import assert_same_run

# One JSON object a line; docs/generate_fault_drill.py makes the table of them.
OUTCOMES = Path(os.environ.get("HACRL_DRILL_OUTCOMES", "build/drill/outcomes.jsonl"))


class Drill:
    """One fault: makes runs, judges them, and writes the row of the table."""

    def __init__(self, name: str, models: dict[str, Path], folder: Path, undisturbed: Callable[..., Path]) -> None:
        self.name = name
        self._models, self._folder, self._undisturbed = models, folder, undisturbed
        self.runs: list[DrilledRun] = []

    def run(self, output: Path | None = None, *, machine: Any = None, **changes: Any) -> DrilledRun:
        """A run with these changes to `drilled_config`, started."""
        if "learning_rates" not in changes:
            # Made first: it must not compute beside the disturbed one.
            self._reference = self._undisturbed(changes)
        config = drilled_config(self._models, output or self._folder / "run", **changes)
        run = DrilledRun(config=config, machine=machine)
        self.runs.append(run)
        run.start()
        return run

    def goes_on(self, run: DrilledRun, moment: Moment, *, says: str = "", within_s: float = GO_ON_SECONDS) -> None:
        """It must go on by itself to the end, without a pause longer than `within_s`, and be the undisturbed run."""
        self.reaches_its_end(run, moment, says=says, within_s=within_s)
        self.is_the_undisturbed_run(run, moment)

    def is_the_undisturbed_run(self, run: DrilledRun, moment: Moment) -> None:
        run.assert_kept(moment)
        assert_same_run(run.folder, self._reference)

    def reaches_its_end(
        self, run: DrilledRun, moment: Moment, *, says: str = "", within_s: float = GO_ON_SECONDS
    ) -> None:
        """The same of a run that cannot be the undisturbed one."""
        orphans = ORPHAN_SECONDS if run.machine is None else UNREACHABLE_ORPHAN_SECONDS
        status = run.wait(moment, within_s=RUN_SECONDS + within_s, go_on_within_s=within_s, orphans_within_s=orphans)
        assert status == 0, run.printed()
        assert says in run.printed(), run.printed()
        run.assert_kept(moment)
        assert len(run.metrics()) == run.config["steps"]

    def ends(self, run: DrilledRun, moment: Moment, *, status: int, says: str, within_s: float = GO_ON_SECONDS) -> None:
        """It must end with this status and these words, and lose nothing."""
        found = run.wait(moment, within_s=RUN_SECONDS + within_s, go_on_within_s=within_s)
        assert found == status, f"ended with {found}:\n{run.printed()}"
        assert says in run.printed(), run.printed()
        run.assert_kept(moment)

    def started_again(self, run: DrilledRun, *, after: int | None = None) -> None:
        """With the same command it must come to the undisturbed run's end; from the step `after` on, where that is not
        the latest one that was saved."""
        paused, limit = run.paused_s, run.limit_s
        run.start()
        moment = run.now("started again", saved=after)
        assert run.wait(moment) == 0, run.printed()
        run.assert_kept(moment)
        assert_same_run(run.folder, self._reference)
        run.paused_s, run.limit_s = paused, limit  # the table tells of the fault, not of the second start

    def row(self, run: DrilledRun, moment: Moment, fault: str, outcome: str) -> None:
        """For the table."""
        row = {
            "test": self.name,
            "seed": SEED,
            "fault": fault,
            "moment": moment.told,
            "outcome": outcome,
            "seconds": round(run.paused_s, 1),
            "limit": run.limit_s,
            "again": moment.recorded - moment.saved,
        }
        OUTCOMES.parent.mkdir(parents=True, exist_ok=True)
        with OUTCOMES.open("a") as file:
            file.write(json.dumps(row) + "\n")
