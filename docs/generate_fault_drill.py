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

<!-- Written by docs/generate_fault_drill.py; `make drill` injects the faults and writes this page anew. -->

Each line of the table is a fault that was injected into a run on Ray: `hacrl train`, started as a user starts it, with
two tiny agents of different families, ten steps, a checkpoint every second step, and `execution.watchdog_s: 20` where
the table does not say otherwise. `make drill` does it all again, and with `HACRL_DRILL_SEED=1` at other moments
([tests/drill](../tests/drill)); on two cores it should take about an hour. The rows
below were made in several sittings, and not by one call. This must hold after every fault, and is checked:

- **Nothing that was recorded is lost.** Lines of `metrics.jsonl` up to the last checkpoint stay byte for byte as they
  were; at the end every step is there once.
- **The same run.** Where the table says so, metrics, rollouts, evaluations, weights and optimizers are bit for bit
  those of a run without a fault.
- **No hang.** The pause, which is the longest time after the fault without a new step, or up to the run's end, stays
  below the limit: the watchdog's time, and what a new start may take on a busy machine; more where a machine is lost,
  for Ray gives it up only after half a minute.
- **No orphans.** When the run has ended, its agents and the process of its rewards are gone at once, and within a
  minute and a half Ray's own processes as well. On a machine that cannot be reached, its part of Ray ends them.
- **The words.** The exit status, and the message that names place and remedy, are those of
  [Agents on Ray](ray.md#faults).

*Again* is how many recorded steps were behind the last checkpoint, and were made again. Machines are network namespaces
of one computer; that one is cut off means that its cable was pulled. {count} faults; the longest pause was
{longest:.0f} s.

| Fault | Moment | What happened | Pause, s | Limit, s | Again |
|---|---|---|---:|---:|---:|
"""


def page(rows: list[Mapping[str, Any]]) -> str:
    lines = [
        f"| {row['fault']} | {row['moment']} | {row['outcome']} |"
        f" {row['seconds']:.0f} | {row['limit']:.0f} | {row['again']} |"
        for row in rows
    ]
    head = HEAD.format(count=len(rows), longest=max(row["seconds"] for row in rows))
    return head + "\n".join(lines) + "\n"


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    # A fault that was injected again counts once, as it went the last time.
    latest = {row["test"]: row for row in rows}
    PAGE.write_text(page(sorted(latest.values(), key=lambda row: (row["fault"].casefold(), row["test"]))))


if __name__ == "__main__":
    main()
