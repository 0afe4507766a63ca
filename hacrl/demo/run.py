"""`hacrl demo`: the two shipped agents trained by HACPO and, with as many rollouts, alone by GSPO; then compared.

Both runs go on side by side, each in a process of its own with one thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hacrl.compare.execute import Event, execute
from hacrl.config import RunConfig, load_config
from hacrl.demo.settings import METHODS, demo_config
from hacrl.errors import HacrlError, RunDirectoryError
from hacrl.progress import LiveView, RunHistory, plain_line

NAMES = {"hacpo": "HACPO, sharing", "gspo": "GSPO, alone"}
COLORS = {"hacpo": "#1f6feb", "gspo": "#d1662a"}


def run(*, output: Path, seed: int) -> None:
    """Train, compare, draw, export and let the exported agents answer. Raises what the training raises."""
    console = Console(highlight=False)
    configs = {method: load_config(demo_config(method, output=output / method, seed=seed)) for method in METHODS}
    held = {entry.name for entry in output.iterdir()} if output.exists() else set()
    if held - {*METHODS, "logs"} and not (output / METHODS[0] / "config.yaml").exists():
        raise RunDirectoryError(f"{output}: holds other files; choose another folder with --output")
    start = time.perf_counter()
    histories = {method: RunHistory(config) for method, config in configs.items()}
    with _view(console, histories) as show:
        for event in train_side_by_side(configs, logs=output / "logs"):
            show(event)
    seconds = time.perf_counter() - start
    for method, history in histories.items():
        history.read(Path(configs[method].output))
    console.print(result_table(histories))
    console.print(Text.from_ansi(terminal_chart(histories, width=min(console.width, 100))))
    page = output / "demo.html"
    write_chart(histories, page)
    _answer(console, configs["hacpo"])
    console.print(
        Text(
            f"\nTraining took {seconds:.0f} s. One seed proves little: benchmarks/demo_seeds.py compares over five.\n"
            f"chart    {page}\n"
            + "\n".join(f"run      {config.output}" for config in configs.values())
            + "\n"
            + "\n".join(f"model    {configs['hacpo'].output}/agents/{agent.name}" for agent in configs["hacpo"].agents)
        ),
        soft_wrap=True,
    )


# ---------------------------------------------------------------- training


def train_side_by_side(configs: Mapping[str, RunConfig], *, logs: Path) -> Iterator[Event]:
    """Run all configurations at once and yield what happens; a failure ends the others. Raises HacrlError."""
    with contextlib.closing(execute(configs, logs=logs)) as events:
        for event in events:
            if event.ended == "failed":
                raise HacrlError(f"the training of {event.run} failed:\n{event.error}")
            yield event


@contextlib.contextmanager
def _view(console: Console, histories: Mapping[str, RunHistory]) -> Iterator[Any]:
    """Both runs live on a terminal, one line per step elsewhere."""
    views = {method: LiveView(history) for method, history in histories.items()}

    def note(event: Event) -> None:
        history = histories[event.run]
        if event.phase is not None:
            if event.phase == "sample" and not history.metrics:
                history.read(Path(history.config.output))
            views[event.run].begin(event.phase)
        if event.step is not None:
            history.read(Path(history.config.output))
            history.made_here += 1
            if not console.is_terminal:
                console.print(Text(f"{event.run:6}{plain_line(history)}"), soft_wrap=True)

    if not console.is_terminal:
        yield note
        return
    with Live(Group(*views.values()), console=console, refresh_per_second=4):
        yield note


# ---------------------------------------------------------------- results


def result_table(histories: Mapping[str, RunHistory]) -> Table:
    """Held-out accuracy of each agent before and after, by method, and the difference that sharing made."""
    evaluation = next(iter(histories.values())).config.evaluation
    table = Table(title=f"Held-out accuracy (avg@{evaluation.k}) in %", title_justify="left")
    table.add_column("agent")
    table.add_column("start", justify="right")
    for method in histories:
        table.add_column(NAMES[method], justify="right")
    table.add_column("difference", justify="right", style="bold")
    agents = [agent.name for agent in next(iter(histories.values())).config.agents]
    rows = [(name, [history.held_out(name) for history in histories.values()]) for name in agents]
    for name, found in rows:
        ends = [scores[-1][1] for scores in found]
        table.add_row(name, _percent(found[0][0][1]), *map(_percent, ends), f"{100 * (ends[0] - ends[-1]):+.1f}")
    starts, *ends = (
        _means(found[0][0][1] for _, found in rows),
        *(_means(found[place][-1][1] for _, found in rows) for place in range(len(histories))),
    )
    table.add_section()
    table.add_row("mean", _percent(starts), *map(_percent, ends), f"{100 * (ends[0] - ends[-1]):+.1f}")
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _means(values: Iterator[float]) -> float:
    held = list(values)
    return sum(held) / len(held)


def terminal_chart(histories: Mapping[str, RunHistory], *, width: int) -> str:
    """Mean held-out accuracy of the agents against steps, as text with colours."""
    import plotext

    plotext.clear_figure()
    plotext.plotsize(width, 16)
    plotext.theme("clear")
    for method, history in histories.items():
        steps, means = mean_curve(history)
        plotext.plot(steps, [100 * mean for mean in means], label=NAMES[method], marker="braille")
    plotext.title("Mean held-out accuracy of both agents in %")
    plotext.xlabel("step")
    return str(plotext.build())


def mean_curve(history: RunHistory) -> tuple[list[int], list[float]]:
    """Steps at which all agents were evaluated, and the mean of their avg@k there."""
    curves = [dict(history.held_out(agent.name)) for agent in history.config.agents]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return steps, [sum(curve[step] for curve in curves) / len(curves) for step in steps]


def write_chart(histories: Mapping[str, RunHistory], path: Path) -> None:
    """One HTML file that opens from disk: a panel per agent, a line per method."""
    from plotly.subplots import make_subplots

    agents = [agent.name for agent in next(iter(histories.values())).config.agents]
    figure = make_subplots(rows=1, cols=len(agents), subplot_titles=agents, shared_yaxes=True)
    for column, agent in enumerate(agents, 1):
        for method, history in histories.items():
            points = history.held_out(agent)
            figure.add_scatter(
                x=[step for step, _ in points],
                y=[100 * score for _, score in points],
                name=NAMES[method],
                legendgroup=method,
                showlegend=column == 1,
                line={"color": COLORS[method], "width": 3},
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="held-out accuracy in %", rangemode="tozero", row=1, col=1)
    figure.update_layout(template="plotly_white", title="hacrl demo: sharing rollouts against training alone")
    figure.write_html(path, include_plotlyjs=True)


def _answer(console: Console, config: RunConfig) -> None:
    """Let each exported agent answer a held-out question, with nothing but transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from hacrl.preflight import prepare

    logging.disable_progress_bar()

    task = next(iter(prepare(config).evaluation.values()))[0]
    messages: Sequence[Any] = task.prompt if not isinstance(task.prompt, str) else ()
    console.print(Text(f"\n{messages[-1]['content']}", style="bold"))
    for agent in config.agents:
        folder = Path(config.output) / "agents" / agent.name
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
        words = tokenizer.decode(answer, skip_special_tokens=True)
        console.print(Text(f"{agent.name}:  {' / '.join(words.splitlines())}"))
    console.print(Text(f"right:  {task.columns['answer']}", style="dim"))
