"""A comparison from beginning to end: what is to do, the runs, the figures, the files."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hacrl.compare.execute import Event, execute
from hacrl.compare.plan import DEFAULT_METHODS, Plan, Run, make_plan
from hacrl.config import RunConfig, load_config
from hacrl.config_changes import altering_changes, listed
from hacrl.durable_files import write_atomically, write_json
from hacrl.errors import HacrlError, RunDirectoryError
from hacrl.progress import RunHistory
from hacrl.stop import StopRequest


def compare_methods(
    source: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    methods: str | Path | Sequence[str] = DEFAULT_METHODS,
    seeds: int = 5,
    axis: str = "rollouts",
    ablations: bool = False,
    jobs: int | None = None,
    output: str | Path | None = None,
) -> dict[str, Any]:
    """Run a comparison, or what is left of it, and return the content of its `comparison.json`.

    The arguments are those of `make_plan`; `jobs` runs go on at a time, one per core if left out. Raises ConfigError
    and RunDirectoryError before anything is run, and HacrlError when runs failed: the others have been finished by then
    and their figures written.
    """
    plan = make_plan(source, overrides, methods=methods, seeds=seeds, axis=axis, ablations=ablations, output=output)
    failed = {event.run: event.error for event in run_all(plan, jobs=jobs) if event.ended == "failed"}
    found = write_results(plan)
    if failed:
        raise HacrlError(told_failures(plan, failed))
    return found


def run_all(plan: Plan, *, jobs: int | None = None, stop: StopRequest | None = None) -> Generator[Event]:
    """Make every run that is not finished; see `execute`. Finished ones are left alone.

    Raises RunDirectoryError, before anything is run, where a folder holds a run of another configuration.
    """
    waiting = {run.name: run.config for run in unfinished(plan)}
    yield from execute(waiting, logs=plan.output / "logs", jobs=jobs, stop=stop)


def unfinished(plan: Plan) -> list[Run]:
    """The runs that are still to be made or continued. Raises RunDirectoryError as `run_all` does."""
    problems: list[str] = []
    left: list[Run] = []
    for run in plan.runs:
        folder = Path(run.config.output)
        history = RunHistory(run.config)
        history.read(folder)
        if (folder / "config.yaml").is_file():
            before = load_config(folder / "config.yaml")
            if changes := altering_changes(before, run.config, done=history.done):
                problems.append(f"{run.name}\n{listed(changes)}")
        if not _finished(run, history):
            left.append(run)
    if problems:
        raise RunDirectoryError(
            f"{plan.output}: runs there were started with another configuration, and these changes alter their "
            f"results:\n" + "\n".join(problems) + "\nput them back, choose another --output, or remove those runs"
        )
    return left


def _finished(run: Run, history: RunHistory) -> bool:
    folder = Path(run.config.output)
    exported = run.config.export == "none" or all(
        (folder / "agents" / agent.name).is_dir() for agent in run.config.agents if agent.role != "author"
    )
    return history.done >= run.config.steps and exported


def write_results(plan: Plan) -> dict[str, Any]:
    """Figures of all finished runs as comparison.json, .md and .csv; returns the first one's content."""
    from hacrl.compare.results import comparison, read_records
    from hacrl.compare.table import csv_text, markdown

    left = {run.name for run in unfinished(plan)}
    found = comparison(plan, {run.name: read_records(run) for run in plan.runs if run.name not in left})
    plan.output.mkdir(parents=True, exist_ok=True)
    write_json(plan.output / "comparison.json", found)
    write_atomically(plan.output / "comparison.md", markdown(found).encode())
    write_atomically(plan.output / "comparison.csv", csv_text(found).encode())
    return found


def told_failures(plan: Plan, failed: Mapping[str, str]) -> str:
    """Which runs failed and why; runs that failed in the same words are told together."""
    by_error: dict[str, list[str]] = {}
    for name, error in failed.items():
        by_error.setdefault(error, []).append(name)
    parts = []
    for error, names in by_error.items():
        lines = "\n".join(f"    {line}" for line in error.splitlines())
        parts.append(f"  {', '.join(names)}:\n{lines}")
    return (
        f"{len(failed)} of {len(plan.runs)} runs failed; whole logs are in {plan.output / 'logs'}, and the same "
        f"command goes on from here\n" + "\n".join(parts)
    )
