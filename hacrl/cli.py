"""The `hacrl` command. What is heavy is imported inside the commands, so that `--help` and config errors are quick."""

from __future__ import annotations

import contextlib
import shlex
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hacrl.process import use_passive_threads

if TYPE_CHECKING:
    from hacrl.progress import Mode, RunHistory
    from hacrl.saved_run import CheckpointName

# Exit status: 0 done, 1 an error during the run, 2 a faulty configuration or command line, 128 + signal interrupted.
FAILED, FAULTY, INTERRUPTED = 1, 2, 128

app = typer.Typer(
    name="hacrl",
    help="Train different language models together by RL: they share verified rollouts, each learns from all.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Override options, e.g. algorithm.alpha=3 agents.0.learning_rate=5e-7."
    ),
]


def main() -> None:
    """Entry point."""
    use_passive_threads()
    app()


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"hacrl {version('hacrl')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# ---------------------------------------------------------------- commands


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the demo's runs, chart and exported models.")] = Path(
        "runs/demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of both runs.")] = 0,
) -> None:
    """Train two tiny agents that come with the package, with and without sharing. No network, about half a minute."""
    with _told_errors(), _quiet_libraries():
        from hacrl.demo.run import run

        run(output=output, seed=seed)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML configuration.")],
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the end.")] = False,
) -> None:
    """Train, or continue an interrupted run of the same configuration."""
    overrides = overrides or []
    console = Console(highlight=False)
    again = shlex.join(["hacrl", "train", str(config), *overrides])
    with _told_errors(), _quiet_libraries():
        from hacrl.config import load_config

        settings = load_config(config, overrides)

        from hacrl.progress import Progress, RunHistory, closing_table
        from hacrl.stop import StopRequest
        from hacrl.trainer import training_steps

        _hide_bars(downloads=quiet)
        history, stop = RunHistory(settings), StopRequest()
        mode: Mode = "quiet" if quiet else "live" if console.is_terminal else "plain"
        try:
            with stop.on_signals(), Progress(console, history, mode=mode, stop=stop) as progress:
                for record in training_steps(settings, stop=stop, on_phase=progress.phase):
                    progress.step(record)
        except KeyboardInterrupt:
            _say(console, f"Ended at once; the step in progress is lost. Continue with:\n  {again}", "yellow")
            raise typer.Exit(INTERRUPTED + signal.SIGINT) from None
        if not history.made_here:
            history.read(Path(settings.output))
            if stop.signal is None:
                _say(console, f"All {history.done} steps of this run were made before; nothing is left to do.")
        if stop.signal is not None:
            _say(console, f"Interrupted after step {history.done}, which is saved. Continue with:\n  {again}", "yellow")
            raise typer.Exit(INTERRUPTED + stop.signal)
        console.print(closing_table(history))
        _say(console, _closing_words(history))


@app.command()
def compare(
    config: Annotated[Path, typer.Argument(help="YAML configuration that all methods have in common.")],
    overrides: Overrides = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, each with overrides of its own after a colon: hacpo,hacpo:alpha=3,delta=0.4,"
            "gspo:agents.*.learning_rate=2e-4; or a YAML file of them."
        ),
    ] = "hacpo,gspo,gspo-x2,grpo,naive",
    seeds: Annotated[int, typer.Option(help="Number of seeds, from the configuration's own on.")] = 5,
    axis: Annotated[
        str, typer.Option(metavar="rollouts|updates|tokens|seconds", help="What is made equal for all methods.")
    ] = "rollouts",
    ablations: Annotated[
        bool, typer.Option("--ablations", help="Add HACPO without each of its mechanisms, and alpha 0 to 3.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; one per core, or one in all with a GPU, if left out.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder; the configuration's output with -compare if left out.")
    ] = None,
) -> None:
    """Train with several methods and seeds on one budget, and say which is better by how much. Goes on where it was."""
    overrides = overrides or []
    console = Console(highlight=False)
    with _told_errors(), _quiet_libraries():
        from hacrl.compare.plan import make_plan

        plan = make_plan(config, overrides, methods=methods, seeds=seeds, axis=axis, ablations=ablations, output=output)

        from hacrl.compare.comparison import run_all, told_failures, unfinished, write_results
        from hacrl.compare.table import renderables
        from hacrl.compare.view import View
        from hacrl.errors import HacrlError
        from hacrl.stop import StopRequest

        stop = StopRequest()
        failed: dict[str, str] = {}
        events = run_all(plan, jobs=jobs, stop=stop)
        with contextlib.closing(events), stop.on_signals(), View(console, plan, unfinished(plan), stop) as view:
            for event in events:
                view.note(event)
                if event.ended == "failed":
                    failed[event.run] = event.error
        if stop.signal is not None:
            _say(console, f"Interrupted; the same command goes on from here. Runs are in {plan.output}.", "yellow")
            raise typer.Exit(INTERRUPTED + stop.signal)
        for part in renderables(write_results(plan)):
            console.print(part)
        _say(console, f"\nWritten      {plan.output}/comparison.json, .md and .csv")
        if failed:
            raise HacrlError(told_failures(plan, failed))


@app.command()
def check(config: Annotated[Path, typer.Argument(help="YAML configuration.")], overrides: Overrides = None) -> None:
    """Look a configuration over before training: all errors, batch arithmetic, memory, and each pair of agents."""
    console = Console(highlight=False)
    with _told_errors(), _quiet_libraries():
        from hacrl.config import load_config

        settings = load_config(config, overrides or [])

        from hacrl.check.run_check import check_run
        from hacrl.check.view import renderables

        _hide_bars()
        for part in renderables(check_run(settings)):
            console.print(part)


@app.command(name="eval")
def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A run's folder, a YAML configuration, or (with --benchmark) a model's folder or hub id.",
        ),
    ],
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="best|last|STEP", help="Which of a run's checkpoints; last if left out.")
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Public sets of tasks: math500, math, gsm8k, aime25, amc23, minerva, olympiadbench.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Benchmarks from files here (NAME.jsonl, ...), not from the hub.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many tasks of each set.")] = None,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Answers to each task; the same as evaluation.k=K.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Also write the entries here.")
    ] = None,
) -> None:
    """Measure accuracy on held-out tasks or public benchmarks (docs/evaluation.md); nothing of a run is changed.

    Sampling is overridden as everything is, e.g. evaluation.temperature=0.6 evaluation.max_new_tokens=16384.
    """
    console = Console(highlight=False)
    with _told_errors(), _quiet_libraries():
        chosen = None if checkpoint is None else _checkpoint(checkpoint)
        overrides = [*(overrides or []), *([f"evaluation.k={k}"] if k is not None else [])]
        names = [name.strip() for name in (benchmark or "").split(",") if name.strip()]
        # Faults of the command line are told before torch is loaded.
        from hacrl.benchmarks import load_benchmarks
        from hacrl.config import load_config

        load_benchmarks(names)
        if not names and not Path(source).is_dir():
            load_config(source, overrides)
        from hacrl.progress import evaluation_table
        from hacrl.saved_run import evaluate as evaluate_source

        _hide_bars()
        with _status(console, "evaluating ..."):
            entries = evaluate_source(source, overrides, checkpoint=chosen, benchmarks=names, data=data, limit=limit)
        console.print(evaluation_table(entries))
        if json_path is not None:
            _write_json(json_path, entries)
            _say(console, f"written: {json_path}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    checkpoint: Annotated[str, typer.Option(metavar="best|last|STEP", help="Which checkpoint.")] = "last",
    agent: Annotated[list[str] | None, typer.Option(help="Only this agent; may be given again.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="LoRA agents as peft adapters, not merged.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder to write to; RUN/agents if left out.")] = None,
) -> None:
    """Write a run's agents as ordinary Hugging Face folders."""
    console = Console(highlight=False)
    with _told_errors(), _quiet_libraries():
        chosen = _checkpoint(checkpoint)

        from hacrl.saved_run import export as export_run

        _hide_bars()
        with _status(console, "exporting ..."):
            folders = export_run(run, checkpoint=chosen, agents=agent or [], adapter=adapter, output=output)
        for folder in folders:
            _say(console, str(folder))


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hacrl compare wrote.")
    ],
    output: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Show runs in one HTML file that needs no network: does sharing help, why, and what the agents wrote."""
    console = Console(highlight=False)
    with _told_errors():
        from hacrl.report.page import write_report

        with _status(console, "reading runs ..."):
            page = write_report(runs, output)
        _say(console, f"written: {page} ({page.stat().st_size / 1e6:.1f} MB); open it in a browser")


# ---------------------------------------------------------------- what the commands share


def _checkpoint(text: str) -> CheckpointName:
    if text == "best":
        return "best"
    if text == "last":
        return "last"
    if text.isdigit():
        return int(text)
    from hacrl.errors import ConfigError

    raise ConfigError([f"--checkpoint: got {text!r}; it must be best, last or the number of a step"])


def _write_json(path: Path, entries: list[dict[str, Any]]) -> None:
    import json

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def _closing_words(history: RunHistory) -> str:
    config, output = history.config, Path(history.config.output)
    lines = [f"Run folder   {output}"]
    lines += [
        f"Model        {folder}" for agent in config.agents if (folder := output / "agents" / agent.name).is_dir()
    ]
    best = (
        "best" if config.checkpoint.keep_best and len({entry["step"] for entry in history.evaluations}) > 1 else "last"
    )
    lines += [
        "",
        "Next:",
        f"  {shlex.join(['hacrl', 'eval', str(output), '--checkpoint', best, 'evaluation.k=16'])}",
        f"  {shlex.join(['hacrl', 'export', str(output), '--checkpoint', best, '--output', str(output / best)])}",
    ]
    return "\n".join(lines)


def _say(console: Console, text: str, style: str = "") -> None:
    # As a Text, so that brackets in paths and messages are not taken for markup.
    console.print(Text(text, style=style), soft_wrap=True)


@contextlib.contextmanager
def _status(console: Console, text: str) -> Iterator[None]:
    if console.is_terminal:
        with console.status(Text(text)):
            yield
    else:
        yield


@contextlib.contextmanager
def _told_errors() -> Iterator[None]:
    """Errors that the package raises on purpose are told without a traceback; all others keep theirs."""
    from hacrl.errors import ConfigError, HacrlError

    try:
        yield
    except HacrlError as error:
        console = Console(stderr=True, highlight=False)
        console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(FAULTY if isinstance(error, ConfigError) else FAILED) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(INTERRUPTED + signal.SIGINT) from None


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Warnings as one line each, those about libraries' own future left out."""
    console = Console(stderr=True, highlight=False)

    def show(message: Warning | str, *_: object, **__: object) -> None:
        console.print(Text.assemble(("warning: ", "yellow"), str(message)), soft_wrap=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.showwarning = show
        yield


def _hide_bars(*, downloads: bool = False) -> None:
    """Libraries' progress bars would break into what is shown; those of downloads stay, unless asked, for they explain
    a long wait."""
    import datasets
    import transformers
    from huggingface_hub.utils import disable_progress_bars

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if downloads:
        disable_progress_bars()


if __name__ == "__main__":
    main()
