"""All that `hacrl check` finds out about a run before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl.check.batches import BatchArithmetic, batch_arithmetic
from hacrl.check.gold import GoldReport, gold_reports, spread
from hacrl.check.memory import AgentMemory, DeviceMemory, estimate_memory
from hacrl.check.pairs import PairReport, pair_reports, template_kind, token_text
from hacrl.config import AgentConfig, RunConfig
from hacrl.encode import Encoder
from hacrl.policy import resolve_device, resolve_dtype
from hacrl.preflight import Prepared, prepare
from hacrl.tasks import overlap
from hacrl.types import Task

# Enough texts for a stable length ratio, few enough for every pair of many agents.
MOST_TEXTS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentReport:
    """One agent as it was resolved. Token texts are as the vocabulary writes them."""

    agent: AgentConfig
    device: str
    dtype: str
    prompt_format: str
    stop_tokens: tuple[tuple[int, str], ...]
    pad_token: tuple[int, str]
    context_length: int | None
    prompt_tokens: tuple[int, int]
    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """How one agent is evaluated."""

    agent: str
    k: int
    temperature: float
    top_p: float
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceReport:
    """One source of tasks: those in use, those dropped as too long, and held-out ones that are also trained on."""

    name: str
    tasks: int
    dropped: int
    overlap: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """Everything found out, and `warnings`: what will run, but probably not as it was meant."""

    config: RunConfig
    agents: tuple[AgentReport, ...]
    sources: tuple[SourceReport, ...]
    epochs: float
    batches: tuple[BatchArithmetic, ...]
    gold: tuple[GoldReport, ...]
    evaluation: tuple[EvaluationReport, ...]
    evaluated_steps: tuple[int, ...]
    pairs: tuple[PairReport, ...]
    memory: tuple[AgentMemory, ...]
    devices: tuple[DeviceMemory, ...]
    warnings: tuple[str, ...]


def check_run(config: RunConfig) -> CheckReport:
    """Try out everything that needs no weights. Raises ConfigError with all faults found, ModelError."""
    prepared = prepare(config)
    tried = spread(prepared.train, MOST_TEXTS)
    memory, devices = estimate_memory(config)
    agents = tuple(_agent(config, agent, prepared.encoders[agent.name], tried) for agent in config.agents)
    sources = tuple(_sources(prepared))
    gold = tuple(gold_reports(config, prepared.rewards, tried))
    pairs = tuple(pair_reports(config, prepared.encoders, [_said(task) for task in tried], _answers(gold, tried)))
    epochs = config.steps * config.prompts_per_step / len(prepared.train)
    return CheckReport(
        config=config,
        agents=agents,
        sources=sources,
        epochs=epochs,
        batches=tuple(batch_arithmetic(config)),
        gold=gold,
        evaluation=tuple(_evaluation(config, agent) for agent in config.agents),
        evaluated_steps=_evaluated_steps(config),
        pairs=pairs,
        memory=tuple(memory),
        devices=tuple(devices),
        warnings=tuple(_warnings(config, agents, sources, gold, pairs, devices)),
    )


def _agent(config: RunConfig, agent: AgentConfig, encoder: Encoder, tasks: Sequence[Task]) -> AgentReport:
    device = resolve_device(agent)
    limits = config.sampling_of(agent)
    lengths = sorted(len(encoder.prompt_ids(task.prompt)) for task in tasks)
    return AgentReport(
        agent=agent,
        device=str(device),
        dtype=str(resolve_dtype(agent, device)).removeprefix("torch."),
        prompt_format=template_kind(encoder),
        stop_tokens=tuple((id_, token_text(encoder, id_)) for id_ in encoder.stop_token_ids),
        pad_token=(encoder.pad_token_id, token_text(encoder, encoder.pad_token_id)),
        context_length=encoder.context_length,
        prompt_tokens=(lengths[len(lengths) // 2], lengths[-1]),
        max_prompt_tokens=limits.max_prompt_tokens,
        max_new_tokens=limits.max_new_tokens,
        temperature=limits.temperature,
    )


def _sources(prepared: Prepared) -> Iterator[SourceReport]:
    for name, tasks in {"train": prepared.train, **prepared.evaluation}.items():
        yield SourceReport(
            name=name,
            tasks=len(tasks),
            dropped=prepared.dropped_tasks.get(name, 0),
            overlap=() if name == "train" else tuple(overlap(prepared.train, tasks)),
        )


def _evaluation(config: RunConfig, agent: AgentConfig) -> EvaluationReport:
    settings = config.evaluation
    return EvaluationReport(
        agent=agent.name,
        k=settings.k,
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_new_tokens=settings.max_new_tokens or config.sampling_of(agent).max_new_tokens,
    )


def _evaluated_steps(config: RunConfig) -> tuple[int, ...]:
    if not config.tasks.eval:
        return ()
    settings = config.evaluation
    steps = {0} if settings.at_start else set[int]()
    if settings.every:
        steps |= set(range(settings.every, config.steps + 1, settings.every))
    if settings.at_end:
        steps.add(config.steps)
    return tuple(sorted(steps))


def _said(task: Task) -> str:
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n\n".join(message["content"] for message in task.prompt)


def _answers(gold: Sequence[GoldReport], tasks: Sequence[Task]) -> Sequence[str]:
    """Reference answers as completions; the bare `answer` column where no reward function can write one."""
    written = next((report.answers for report in gold if report.answers), ())
    return written or [task.columns["answer"] for task in tasks if isinstance(task.columns.get("answer"), str)]


# ---------------------------------------------------------------- warnings


def _warnings(
    config: RunConfig,
    agents: Sequence[AgentReport],
    sources: Sequence[SourceReport],
    gold: Sequence[GoldReport],
    pairs: Sequence[PairReport],
    devices: Sequence[DeviceMemory],
) -> Iterator[str]:
    for report in agents:
        yield from _agent_warnings(report)
    for source in sources:
        if source.dropped:
            yield (
                f"tasks, {source.name}: {source.dropped} of {source.tasks + source.dropped} prompts are longer than "
                f"an agent's max_prompt_tokens and are dropped"
            )
        if source.overlap:
            first = source.overlap[0]
            yield (
                f"tasks, {source.name}: {len(source.overlap)} of {source.tasks} held-out tasks ask what is also "
                f"trained on, e.g. {first[1]} = {first[0]}; held-out accuracy will look better than it is"
            )
    if not config.tasks.eval:
        yield "tasks.eval: nothing is held out, so neither progress nor the best checkpoint can be measured"
    for scores in gold:
        if scores.failures:
            yield (
                f"reward {scores.reward}: {scores.failures} of {scores.tasks} reference answers do not get the full "
                f"score, e.g. {scores.example}; right answers will be punished: check the answer column and the reward"
            )
    for pair in pairs:
        if pair.round_trip_failures:
            yield (
                f"{pair.learner} <- {pair.author}: {pair.round_trip_failures} of {pair.texts} texts come back changed "
                f"from {pair.learner}'s tokenizer, e.g. {pair.example!r:.80}; it would learn from altered answers"
            )
        if pair.answers_too_long:
            limit = config.sampling_of(config.agent(pair.learner)).max_new_tokens
            rule = "dropped" if config.exchange.too_long == "drop" else "cut"
            yield (
                f"{pair.learner} <- {pair.author}: long answers of {pair.author} take more than {pair.learner}'s "
                f"max_new_tokens ({limit}) in its own tokens and will be {rule}; raise agents.{pair.learner}.sampling."
                f"max_new_tokens or lower {pair.author}'s"
            )
    for device in devices:
        if device.available is not None and device.peak > 0.9 * device.available:
            yield (
                f"{device.device}: the estimated peak, {size(device.peak)}, does not fit well into "
                f"{size(device.available)}; lower micro_batch_tokens or sampling.batch_rows, use "
                f"gradient_checkpointing, or train with lora"
            )
    yield from _folder_warnings(Path(config.output))


def _agent_warnings(report: AgentReport) -> Iterator[str]:
    agent = report.agent
    if report.prompt_format == "plain" and agent.prompt_format == "auto":
        yield (
            f"agent {agent.name}: no chat template, so prompts are given as plain text; a base model may not stop by "
            f"itself then (set prompt_format: plain to confirm, or give chat_template)"
        )
    if report.pad_token[0] in {id_ for id_, _ in report.stop_tokens}:
        yield (
            f"agent {agent.name}: the padding token {report.pad_token[1]!r} also ends answers; hacrl masks by length, "
            f"but other programs that use the exported model may mask by id"
        )


def _folder_warnings(output: Path) -> Iterator[str]:
    """What stands where the run is to be written; whether it can go on there is decided when training starts."""
    if output.is_dir() and any(output.iterdir()):
        if (output / "config.yaml").is_file():
            yield f"output: {output} holds a run; training continues it if the configuration is the same"
        else:
            yield f"output: {output} holds other files; training will refuse it: choose another folder"


def size(number: float) -> str:
    """Bytes for people: 512B, 1.5K, 230M, 12.3G (powers of 1024)."""
    for unit in ("B", "K", "M"):
        if number < 1024:
            return f"{number:.0f}{unit}" if number >= 100 or unit == "B" else f"{number:.1f}{unit}"
        number /= 1024
    return f"{number:.1f}G"
