"""The report of `hacrl check` as it is printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hacrl.check.batches import BatchArithmetic
from hacrl.check.run_check import CheckReport, size

# Updates whose band is written out; the middle of a longer row of them is left out.
MOST_BOUNDS = 8


def renderables(report: CheckReport) -> Iterator[RenderableType]:
    """Section by section, warnings last so that they stand right above the prompt."""
    yield from _section("Agents", _blocks(_agents(report)))
    yield from _section("Tasks", _tasks(report))
    yield from _section("Each step", _steps(report), _blocks(_batches(report)))
    if any(scores.tasks for scores in report.gold):
        yield from _section("Reference answers", _gold(report))
    nothing = "One agent: nothing is shared." if len(report.config.agents) == 1 else "No rollouts are shared."
    yield from _section("Pairs", _blocks(_pairs(report)) if report.pairs else Text(nothing, style="dim"))
    yield from _section("Evaluation", _evaluation(report))
    title = "Memory and disk, estimated (batch: activations of one micro-batch)"
    yield from _section(title, _memory(report), *_disk(report))
    yield Text()
    for warning in report.warnings:
        yield Text.assemble(("warning ", "bold yellow"), (warning, "yellow"))
    count = len(report.warnings)
    told = f"{count} warning{'s' if count != 1 else ''}" if count else "no warnings"
    yield Text(f"The configuration can run: no errors, {told}.", style="green" if not count else "")


def _section(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", style="bold")
    for part in parts:
        yield Padding(part, (0, 0, 0, 2))


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _blocks(rows: Iterator[tuple[str, str]]) -> RenderableType:
    """A name and what there is to say of it, at any width."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column()
    for name, text in rows:
        grid.add_row(Text(name), Text(text))
    return grid


def _agents(report: CheckReport) -> Iterator[tuple[str, str]]:
    for entry in report.agents:
        agent = entry.agent
        tokenizer = f", tokenizer {agent.tokenizer}" if agent.tokenizer else ""
        trains = f"LoRA of rank {agent.lora.rank}" if agent.lora else "all weights"
        does = {
            "both": f"trains {trains}",
            "author": "author only, not trained",
            "learner": f"learner only, trains {trains}",
        }[agent.role]
        prompts = "plain text" if entry.prompt_format == "plain" else "its own chat template"
        if agent.chat_template is not None and entry.prompt_format == "chat":
            prompts = "the given chat template"
        if agent.chat_template_arguments:
            prompts += f" ({', '.join(f'{key}={value!r}' for key, value in agent.chat_template_arguments.items())})"
        stops = ", ".join(f"{id_} {text!r}" for id_, text in entry.stop_tokens)
        context = f", made for {entry.context_length} positions" if entry.context_length is not None else ""
        yield agent.name, agent.model + tokenizer
        yield "", f"{does}; {entry.dtype} on {entry.device}; temperature {entry.temperature:g}"
        median, longest = entry.prompt_tokens
        yield "", f"prompts as {prompts}: {median} tokens at the median, {longest} at most"
        yield "", f"limits: {entry.max_prompt_tokens} tokens of prompt, {entry.max_new_tokens} of answer{context}"
        yield "", f"ends on {stops}; pads with {entry.pad_token[0]} {entry.pad_token[1]!r}"


def _tasks(report: CheckReport) -> RenderableType:
    table = _table("source", "tasks", "too long, dropped", "also trained on", right=("tasks", "too long, dropped"))
    for source in report.sources:
        shared = "" if source.name == "train" else str(len(source.overlap))
        table.add_row(*map(Text, (source.name, str(source.tasks), str(source.dropped), shared)))
    return table


def _steps(report: CheckReport) -> RenderableType:
    config = report.config
    return Text(
        f"{config.prompts_per_step} prompts; in {config.steps} steps every training task is used "
        f"{report.epochs:.3g} times"
    )


def _batches(report: CheckReport) -> Iterator[tuple[str, str]]:
    mixed = report.config.minibatch_order == "mixed"
    for learner in report.batches:
        rows = " + ".join(
            f"{count} own" if name == learner.learner else f"{count} of {name}" for name, count in learner.rows.items()
        )
        updates = f"{_updates(learner.updates_own)} on own rows"
        if mixed:
            updates = f"{_updates(learner.updates_foreign)} on mixed rows"
        elif learner.updates_foreign:
            updates += f", then {learner.updates_foreign} on foreign rows"
        yield learner.learner, f"{rows} rows in minibatches of {learner.minibatch_rows}: {updates}"
        if learner.band is not None:
            yield "", f"foreign rows learn where s is within [{_bounds(learner)}, 1]"


def _updates(count: int) -> str:
    return f"{count} update{'s' if count != 1 else ''}"


def _bounds(learner: BatchArithmetic) -> str:
    """The lower bound of the band at each update m."""
    assert learner.band is not None
    if len(learner.band) > 1 and len({bound for _, bound in learner.band}) == 1:
        return f"{learner.band[0][1]:.4g}"
    shown = [f"{bound:.4g} at m={m}" for m, bound in learner.band]
    if len(shown) > MOST_BOUNDS:
        shown = [*shown[:3], "...", *shown[-2:]]
    return "; ".join(shown)


def _gold(report: CheckReport) -> RenderableType:
    table = _table("reward", "tried", "not given the full score", right=("tried", "not given the full score"))
    for scores in report.gold:
        tried = str(scores.tasks) if scores.tasks else "it names none"
        table.add_row(*map(Text, (scores.reward, tried, str(scores.failures) if scores.tasks else "-")))
    return table


def _pairs(report: CheckReport) -> Iterator[tuple[str, str]]:
    for pair in report.pairs:
        name = f"{pair.learner} ← {pair.author}"
        if pair.same_tokenizer:
            yield name, "same tokenizer: token ids are passed on"
        else:
            ratios = [
                f"×{value:.2f} tokens in {what}"
                for what, value in (("prompts", pair.prompt_ratio), ("answers", pair.answer_ratio))
                if value is not None
            ]
            changed = f"{pair.round_trip_failures} of {pair.texts} texts changed by a round trip"
            yield name, "different tokenizers: " + ", ".join([*ratios, changed])
        ends = (
            f"both end on {pair.learner_eos!r}"
            if pair.learner_eos == pair.author_eos
            else f"the author's end {pair.author_eos!r} becomes {pair.learner_eos!r}"
        )
        yield "", f"templates: {pair.templates}; {ends}"


def _evaluation(report: CheckReport) -> RenderableType:
    if not report.evaluated_steps:
        return Text("None.", style="dim")
    steps = report.evaluated_steps
    shown = ", ".join(map(str, steps if len(steps) <= MOST_BOUNDS else (*steps[:3], "...", *steps[-2:])))
    parameters: dict[tuple[object, ...], list[str]] = {}
    for entry in report.evaluation:
        key = (entry.k, entry.temperature, entry.top_p, entry.max_new_tokens)
        parameters.setdefault(key, []).append(entry.agent)
    lines = [
        f"{', '.join(names)}: k = {k}, "
        + (f"temperature {temperature:g}" if temperature else "greedy")
        + f", top-p {top_p:g}, at most {tokens} new tokens"
        for (k, temperature, top_p, tokens), names in parameters.items()
    ]
    return Text("\n".join([f"after steps {shown}", *lines]))


def _memory(report: CheckReport) -> RenderableType:
    columns = ("weights", "grads", "AdamW", "batch", "logits", "KV cache")
    table = _table("agent", "parameters", *columns, right=("parameters", *columns))
    for memory in report.memory:
        parameters = _count(memory.parameters)
        if memory.trained and memory.trained != memory.parameters:
            parameters += f" + {_count(memory.trained)}"
        name = memory.agent + (f" (base: {memory.shares_base_with})" if memory.shares_base_with else "")
        weights = memory.weights + memory.reference
        figures = (weights, memory.gradients, memory.optimizer, memory.activations, memory.logits, memory.kv_cache)
        table.add_row(*map(Text, (name, parameters, *(size(figure) if figure else "-" for figure in figures))))
    return table


def _disk(report: CheckReport) -> Iterator[RenderableType]:
    for device in report.devices:
        has = f" of {size(device.available)}" if device.available is not None else ""
        yield Text(f"peak on {device.device}: about {size(device.peak)}{has}")
    checkpoint = sum(memory.checkpoint for memory in report.memory)
    keeps = report.config.checkpoint
    kept = keeps.keep_last + (1 if keeps.keep_best and report.evaluated_steps else 0)
    # One more is on disk while the newest is being written.
    yield Text(f"checkpoint: {size(checkpoint)}, {kept} kept, up to {size((kept + 1) * checkpoint)} on disk")


def _count(number: int) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return str(number)
