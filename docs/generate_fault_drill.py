"""Write docs/fault-drill.md from the outcomes of a drill: `python docs/generate_fault_drill.py OUTCOMES`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("fault-drill.md")

HEAD = """\
# Fault drill

<!-- Written by docs/generate_fault_drill.py; `make drill` injects the faults and writes it anew. -->

Each line of the table is a fault that was injected into a run on Ray: `hacrl train`, started as a user starts it, with two
tiny agents of different families, {steps} steps, a checkpoint every second step, and `execution.watchdog_s` at 20 s where
the table does not say otherwise. `make drill` does it all again (`HACRL_DRILL_SEED=1` at other moments;
[tests/drill](../tests/drill)). After every one of them this must hold, and is checked:

- **Nothing that was recorded is lost.** Lines of `metrics.jsonl` up to the last checkpoint stay byte for byte; at the end
  every step is there once.
- **The same run.** Where the table says so, metrics, rollouts, evaluations, weights and optimizers are bit for bit those of
  a run without a fault.
- **No hang.** The run goes on, or ends, within the watchdog's limit and {start:.0f} s for a new start; where a machine is lost,
  {lost:.0f} s more, for Ray takes about a minute to give a machine up.
- **No orphans.** Once the run has ended, none of its processes is left ({orphan:.0f} s are allowed; on a machine that cannot
  be reached its own Ray ends them).
- **The words.** Exit status and message are those of [Agents on Ray](ray.md#faults).

*Pause* is the longest time after the fault without a new step, or until the end. *Again* is the number of recorded steps
behind the last checkpoint, which are made again. Moments are drawn at random from a seed.

{count} faults; the longest pause was {longest:.0f} s. Machines are network namespaces of one computer, and "cut off" means that
their cable was pulled.

| Fault | Moment | What happened | Pause, s | Again |
|---|---|---|---:|---:|
"""


def page(rows: list[Mapping[str, Any]], **limits: float) -> str:
    lines = [
        f"| {row['fault']} | {row['moment']} | {row['outcome']} | {row['seconds']:.0f} | {row['again']} |"
        for row in rows
    ]
    head = HEAD.format(count=len(rows), longest=max(row["seconds"] for row in rows), **limits)
    return head + "\n".join(lines) + "\n"


def main() -> None:
    sys.path[:0] = [str(PAGE.parent.parent / "tests"), str(PAGE.parent.parent / "tests" / "drill")]
    from drilled_run import LOST_SECONDS, ORPHAN_SECONDS, START_SECONDS, STEPS

    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    # A fault that was injected again counts once, as it went the last time.
    latest = {row["test"]: row for row in rows}
    text = page(list(latest.values()), steps=STEPS, start=START_SECONDS, lost=LOST_SECONDS, orphan=ORPHAN_SECONDS)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
