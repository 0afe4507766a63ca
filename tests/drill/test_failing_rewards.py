"""A reward function that hangs, kills its process, or raises: once, or for some texts always."""

from __future__ import annotations

import pytest
from drill import Drill

COUNTED = {"hang": "timeout", "kill": "crash", "raise": "exception"}
TOLD = {"hang": "hangs", "kill": "kills its process", "raise": "raises"}


@pytest.mark.parametrize("act", ["hang", "kill", "raise"])
def test_once(drill: Drill, act: str) -> None:
    run = drill.run()
    moment = run.wait_for_random_moment(drill.name)
    run.order(f"{act} once")
    drill.goes_on(run, moment)
    assert not (run.aside / "orders").exists()
    drill.row(
        run, moment, f"a reward function {TOLD[act]} once", "each of the call's texts is scored alone; the same run"
    )


@pytest.mark.parametrize("act", ["hang", "kill", "raise"])
def test_for_some_texts(drill: Drill, act: str) -> None:
    run = drill.run(verification={"time_limit_s": 0.5})
    moment = run.wait_for_random_moment(drill.name)
    run.order(act)
    drill.reaches_its_end(run, moment)
    counts = [line[f"reward/unscored/{COUNTED[act]}"] for line in run.metrics()]
    assert sum(counts[: moment.recorded]) == 0
    assert sum(counts) > 0
    what = f"those texts ({sum(counts):.0f}) are unscored and counted; the run goes on"
    drill.row(run, moment, f"a reward function {TOLD[act]} for every text with a q", what)
