"""Every option and every default, once. YAML file plus `key=value` overrides -> one validated `RunConfig`.

Reading a config needs neither torch nor transformers, so faults are told before anything heavy is imported.
`docs/configuration.md` is generated from these models.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from yaml import YAMLError

from hacrl.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# ---------------------------------------------------------------- algorithms


class _ClipConfig(_Section):
    clip_low: float = Field(3e-4, gt=0, lt=1, description="Own rows: lower clip distance of the ratio from 1.")
    clip_high: float = Field(4e-4, gt=0, description="Own rows: upper clip distance of the ratio from 1.")
    epsilon: float = Field(1e-6, gt=0, description="Added to the standard deviation of a group's rewards.")


class HacpoConfig(_ClipConfig):
    """HACPO: all verified rollouts train every agent. Defaults are the paper's setting."""

    name: Literal["hacpo"] = "hacpo"
    alpha: float = Field(1.0, ge=0, description="Exponent of the importance factor of foreign rows (Eq. 12).")
    delta: float = Field(0.2, gt=0, le=1, description="Width of the foreign band [1 - delta, 1] (Eq. 13).")
    delta_step: float = Field(0.025, ge=0, description="The band narrows by this much per optimizer update (Eq. 14).")
    window: int = Field(5, ge=1, description="Capability is the mean score over this many latest steps.")
    score: Literal["positive_rate", "mean"] = Field(
        "positive_rate", description="What capability averages: the share of rewards > 0, or the mean reward."
    )
    floor: float = Field(1e-3, gt=0, description="Lowest capability, so that no ratio divides by zero.")
    ratio_min: float = Field(0.1, gt=0, le=1, description="Lower clamp of the capability ratio.")
    ratio_max: float = Field(10.0, ge=1, description="Upper clamp of the capability ratio.")
    capability_advantage: bool = Field(True, description="Switch: rescale rewards in the baseline by capability.")
    capability_coefficient: bool = Field(True, description="Switch: weigh foreign rows by the capability ratio.")
    importance_weighting: bool = Field(True, description="Switch: the factor sg(c)^alpha; off equals alpha = 0.")
    clipping: Literal["stepwise", "fixed", "none"] = Field(
        "stepwise", description="Band of foreign rows: narrowing with each update, fixed, or none at all."
    )


class GspoConfig(_ClipConfig):
    """GSPO: own rows only, sequence-level ratio."""

    name: Literal["gspo"] = "gspo"


class NaiveConfig(_ClipConfig):
    """Naive sharing: all rows, joint mean and standard deviation, GSPO's clip, no correction."""

    name: Literal["naive"] = "naive"


class GrpoConfig(_ClipConfig):
    """GRPO: own rows only, token-level ratio."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip distance of the token ratio from 1.")
    clip_high: float = Field(0.28, gt=0, description="Upper clip distance of the token ratio from 1.")


AlgorithmConfig = Annotated[HacpoConfig | GspoConfig | GrpoConfig | NaiveConfig, Field(discriminator="name")]


# ---------------------------------------------------------------- agents


class SamplingConfig(_Section):
    """How rollouts for training are sampled. Training uses the plain tempered distribution: no top-p, no top-k."""

    temperature: float = Field(1.0, description="Logits are divided by this, in sampler and learner alike; above 0.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longest prompt, in the agent's own tokens.")
    max_new_tokens: int = Field(1024, ge=1, description="Longest completion, end of sequence included.")
    batch_rows: int = Field(64, ge=1, description="Rows decoded at the same time; bounds the KV cache.")


class AgentSamplingConfig(_Section):
    """One agent's departures from the run's `sampling`; what is left out is inherited."""

    temperature: float | None = Field(None, description="See sampling.temperature.")
    max_prompt_tokens: int | None = Field(None, ge=1, description="See sampling.max_prompt_tokens.")
    max_new_tokens: int | None = Field(None, ge=1, description="See sampling.max_new_tokens.")
    batch_rows: int | None = Field(None, ge=1, description="See sampling.batch_rows.")


class LoraConfig(_Section):
    """Train a low-rank adapter (peft). Agents with the same base model share it in memory."""

    rank: int = Field(ge=1, description="Rank of the adapter.")
    alpha: float | None = Field(None, gt=0, description="Scale; 2 x rank where left out.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input while training.")
    target_modules: str | list[str] = Field(
        "all-linear", description="Which layers get an adapter, as peft names them."
    )


class OptimizerConfig(_Section):
    """AdamW."""

    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")


class ScheduleConfig(_Section):
    """Learning rate over the run's steps (transformers' schedulers)."""

    name: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from 0.")


class AgentConfig(_Section):
    """One policy: a model with its tokenizer, and how it samples and learns."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Unique; names metrics, files and folders.")
    model: str = Field(min_length=1, description="Hub id or local folder.")
    gguf_file: str | None = Field(None, description="A GGUF file within `model`, dequantised on loading.")
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    tokenizer: str | None = Field(None, description="Hub id or folder of the tokenizer; the model's own if left out.")
    chat_template: str | None = Field(None, description="Jinja text, or a path to a .jinja file, in place of the own.")
    chat_template_arguments: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the template, e.g. {enable_thinking: false}."
    )
    prompt_format: Literal["auto", "chat", "plain"] = Field(
        "auto", description="`plain` joins message contents by blank lines; `auto`: chat where a template exists."
    )
    trust_remote_code: bool = Field(False, description="Allow the model folder's own Python code.")
    role: Literal["both", "author", "learner"] = Field(
        "both", description="`author`: samples, never updated. `learner`: updated on others' rollouts, samples none."
    )
    learns_from: list[str] | None = Field(None, description="Names of other authors it may use; all if left out.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Type of the arithmetic; trained weights stay float32. `auto`: bfloat16 on CUDA only."
    )
    device: str = Field("auto", description="`auto`, `cpu`, `cuda`, `cuda:1`, ...")
    attention: str | None = Field(None, description="transformers' attn_implementation, e.g. sdpa, flash_attention_2.")
    lora: LoraConfig | None = Field(None, description="Train an adapter instead of all weights.")
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW's settings.")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="Learning rate over steps.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm.")
    gradient_checkpointing: bool = Field(False, description="Trade time for memory in the backward pass.")
    micro_batch_tokens: int = Field(8192, ge=1, description="Padded tokens (prompt and answer) per forward pass.")
    old_logprobs: Literal["auto", "sampler", "learner"] = Field(
        "auto",
        description="Own rows' old log-probabilities: the sampler's, or recomputed by the learner before its first "
        "update. `auto`: the sampler's in float32, the learner's otherwise.",
    )
    kl_coefficient: float = Field(0.0, ge=0, description="Weight of the KL to its starting weights, own rows only.")
    group_size: int | None = Field(None, ge=1, description="Answers per prompt; the run's group_size if left out.")
    sampling: AgentSamplingConfig = Field(
        default_factory=AgentSamplingConfig, description="Departures from the run's `sampling`."
    )


# ---------------------------------------------------------------- tasks


class _SourceConfig(_Section):
    system: str | None = Field(None, description="System message put before every prompt.")
    template: str = Field("{prompt}", description="Text around the prompt, or around the last user message.")
    limit: int | None = Field(None, ge=1, description="Use only this many tasks.")
    shuffle_seed: int | None = Field(None, description="Shuffle with this seed before `limit`; file order if left out.")
    long_prompts: Literal["error", "drop"] = Field(
        "error", description="A prompt above an agent's max_prompt_tokens: refuse to start, or drop the task (counted)."
    )


class DatasetConfig(_SourceConfig):
    """A Hugging Face dataset: hub name, or local parquet, JSONL or CSV."""

    dataset: str = Field(
        min_length=1, description="Hub id, or path to a .parquet, .jsonl, .json or .csv file or folder."
    )
    config: str | None = Field(None, description="Name of the dataset's configuration on the hub.")
    split: str = Field("train", description="Split to use.")
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")
    prompt: str = Field("prompt", description="Column of the prompt: text or messages. Dots reach into nested columns.")
    answer: str | None = Field(
        None, description="Column of the reference, given to rewards as `answer`, e.g. reward_model.ground_truth."
    )
    columns: dict[str, str] = Field(default_factory=dict, description="More reward arguments: name -> (dotted) column.")


class ReasoningGymConfig(_SourceConfig):
    """A reasoning-gym generator. Item i is seeded with seed + i: keep seeds of different splits far apart."""

    reasoning_gym: str = Field(min_length=1, description="Name of the generator, e.g. chain_sum.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="The generator's own settings.")
    size: int = Field(500, ge=1, description="Number of items.")
    seed: int = Field(0, ge=0, description="First item's seed.")


class FunctionTasksConfig(_SourceConfig):
    """Tasks made by your own function, which returns a list of `hacrl.Task`."""

    function: str = Field(min_length=1, description="module:function or file.py:function.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")


_SOURCES: dict[str, type[_SourceConfig]] = {
    "dataset": DatasetConfig,
    "reasoning_gym": ReasoningGymConfig,
    "function": FunctionTasksConfig,
}


def _source_kind(data: Any) -> str:
    keys = data if isinstance(data, Mapping) else type(data).model_fields if isinstance(data, _SourceConfig) else ()
    return next((kind for kind in _SOURCES if kind in keys), "dataset")


TaskSourceConfig = Annotated[
    Annotated[DatasetConfig, Tag("dataset")]
    | Annotated[ReasoningGymConfig, Tag("reasoning_gym")]
    | Annotated[FunctionTasksConfig, Tag("function")],
    Discriminator(_source_kind),
]


class TasksConfig(_Section):
    """Tasks to train on and tasks held out; each source is one of the three kinds below."""

    train: TaskSourceConfig = Field(description="What the agents are trained on.")
    eval: dict[str, TaskSourceConfig] = Field(
        default_factory=dict, description="Held-out tasks: one source, or several by name."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_single_source(cls, data: Any) -> Any:
        source = data.get("eval") if isinstance(data, Mapping) else None
        if isinstance(source, Mapping) and any(key in source and isinstance(source[key], str) for key in _SOURCES):
            return {**data, "eval": {"eval": source}}
        return data


# ---------------------------------------------------------------- the rest of a run


class RewardConfig(_Section):
    """One reward function; several are added up by weight."""

    function: str = Field(
        min_length=1, description="math, reasoning_gym, exact, multiple_choice, module:function or file.py:function."
    )
    weight: float = Field(1.0, description="Weight in the sum.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Extra keyword arguments.")


class VerificationConfig(_Section):
    """Scoring in worker processes."""

    workers: int = Field(1, ge=1, description="Worker processes.")
    time_limit_s: float = Field(10.0, gt=0, description="Hard limit for each text; the worker is killed.")


class ExchangeConfig(_Section):
    """What happens to foreign rollouts on their way into a learner's batch."""

    too_long: Literal["drop", "truncate"] = Field(
        "drop", description="A foreign text above the learner's max_new_tokens: drop it (counted) or cut it."
    )
    cut_off: Literal["keep", "drop"] = Field(
        "keep",
        description="A foreign answer that its author's length limit cut off: use it without an end, or drop it.",
    )


class EvaluationConfig(_Section):
    """Held-out accuracy with its own sampling settings."""

    every: int = Field(0, ge=0, description="Evaluate after every so many steps; 0: only at start and end.")
    at_start: bool = Field(True, description="Evaluate before the first step.")
    at_end: bool = Field(True, description="Evaluate after the last step.")
    k: int = Field(4, ge=1, description="Answers per task, for avg@k, best@k and maj@k.")
    temperature: float = Field(1.0, ge=0, description="0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    max_new_tokens: int | None = Field(None, ge=1, description="The agent's own limit if left out.")


class CheckpointConfig(_Section):
    """Whole states on disk, from which a run goes on as if it had never stopped."""

    every: int = Field(1, ge=1, description="Save the whole state after every so many steps.")
    keep_last: int = Field(2, ge=1, description="Keep this many latest checkpoints.")
    keep_best: bool = Field(True, description="Also keep the one with the best mean held-out avg@k over agents.")


class RunConfig(_Section):
    """Agents, tasks, reward and algorithm, and how the loop goes."""

    agents: list[AgentConfig] = Field(min_length=1, description="The policies, any number from one.")
    tasks: TasksConfig = Field(description="Where tasks come from.")
    reward: list[RewardConfig] = Field(min_length=1, description="A name, or a weighted list.")
    algorithm: AlgorithmConfig = Field(
        default_factory=HacpoConfig, description="hacpo, gspo, grpo, naive; gspo-x2 doubles rollouts and updates."
    )
    steps: int = Field(ge=1, description="Training steps.")
    prompts_per_step: int = Field(ge=1, description="Prompts per step, the same ones for every agent.")
    group_size: int = Field(8, ge=1, description="Answers per prompt and agent (G).")
    prompts_per_minibatch: int | None = Field(
        None, ge=1, description="An optimizer minibatch holds this many prompts x G rows; all prompts if left out."
    )
    minibatch_order: Literal["own_first", "mixed"] = Field(
        "own_first", description="Own rows' minibatches before the foreign ones, or all rows shuffled together."
    )
    output: str = Field(min_length=1, description="Run directory.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initialisation.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="Sampling of training rollouts.")
    exchange: ExchangeConfig = Field(default_factory=ExchangeConfig, description="Rules for foreign rollouts.")
    verification: VerificationConfig = Field(default_factory=VerificationConfig, description="Reward workers.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Held-out evaluation.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving and keeping.")
    export: Literal["merged", "adapter", "none"] = Field(
        "merged", description="After the last step, write each learner as a Hugging Face folder; LoRA merged or alone."
    )
    execution: Literal["local"] = Field("local", description="Where agents live: `local`, all in this process.")

    @model_validator(mode="before")
    @classmethod
    def _expand_short_forms(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        reward = data.get("reward")
        if isinstance(reward, str | Mapping):
            reward = [reward]
        if isinstance(reward, list):
            data["reward"] = [{"function": item} if isinstance(item, str) else item for item in reward]
        algorithm = data.get("algorithm")
        if isinstance(algorithm, str):
            algorithm = data["algorithm"] = {"name": algorithm}
        if isinstance(algorithm, Mapping) and "name" not in algorithm:
            algorithm = data["algorithm"] = {"name": "hacpo", **algorithm}
        if isinstance(algorithm, Mapping) and algorithm.get("name") == "gspo-x2":
            data = _doubled_rollouts(data)
        return data

    def agent(self, name: str) -> AgentConfig:
        return next(agent for agent in self.agents if agent.name == name)

    def group_size_of(self, agent: AgentConfig) -> int:
        """Rollouts per prompt that this agent samples; 0 for a learner-only agent."""
        return 0 if agent.role == "learner" else (agent.group_size or self.group_size)

    def sampling_of(self, agent: AgentConfig) -> SamplingConfig:
        return self.sampling.model_copy(update=agent.sampling.model_dump(exclude_none=True))

    def authors_for(self, learner: AgentConfig) -> list[str]:
        """Names of the agents whose rollouts this learner uses, itself included where it samples."""
        if learner.role == "author":
            return []
        shares = isinstance(self.algorithm, HacpoConfig | NaiveConfig)
        return [
            author.name
            for author in self.agents
            if author.role != "learner"
            and (
                author.name == learner.name
                or (shares and (learner.learns_from is None or author.name in learner.learns_from))
            )
        ]

    def minibatch_rows(self, learner: AgentConfig) -> int:
        """Rows of one optimizer minibatch of this learner."""
        group_size = learner.group_size or self.group_size
        return (self.prompts_per_minibatch or self.prompts_per_step) * group_size

    def updates_per_step(self, learner: AgentConfig) -> tuple[int, int]:
        """Most optimizer updates of one step: on own rows, and on foreign rows (all of them under `mixed`)."""
        rows = {
            name: self.prompts_per_step * self.group_size_of(self.agent(name)) for name in self.authors_for(learner)
        }
        size = self.minibatch_rows(learner)
        if self.minibatch_order == "mixed":
            return 0, math.ceil(sum(rows.values()) / size)
        own = rows.pop(learner.name, 0)
        return math.ceil(own / size), math.ceil(sum(rows.values()) / size)


def _doubled_rollouts(data: dict[str, Any]) -> dict[str, Any]:
    """The paper's GSPOx2: twice the rollouts per prompt and twice the updates, minibatches of the same size."""
    data["algorithm"] = {**data["algorithm"], "name": "gspo"}
    group_size = data.get("group_size", RunConfig.model_fields["group_size"].default)
    if isinstance(group_size, int):
        data["group_size"] = 2 * group_size
    agents = data.get("agents")
    if isinstance(agents, list):
        data["agents"] = [
            {**agent, "group_size": 2 * agent["group_size"]}
            if isinstance(agent, Mapping) and isinstance(agent.get("group_size"), int)
            else agent
            for agent in agents
        ]
    prompts = data.get("prompts_per_minibatch") or data.get("prompts_per_step")
    if isinstance(prompts, int):
        data["prompts_per_minibatch"] = max(1, prompts // 2)
    return data


# ---------------------------------------------------------------- loading


def load_config(
    source: str | Path | Mapping[str, Any] | RunConfig, overrides: Sequence[str] = (), *, output: str | None = None
) -> RunConfig:
    """Read, override and validate a run's configuration.

    `source` is a YAML path, `preset:NAME` for one of the paper's pairs, a mapping or a finished `RunConfig`; each
    override is `dotted.key=value` with the value read as YAML, list entries addressed by number or agents by name
    (`agents.0.learning_rate=5e-7`). All faults are collected and raised as one `ConfigError`. Nothing heavier than
    pydantic is imported.
    """
    data = _read(source)
    for override in overrides:
        _apply_override(data, override)
    if output is not None:
        data["output"] = output
    # References such as ${steps} are looked up last, so that they see what the overrides have set.
    try:
        return _validate(_mapping(OmegaConf.to_container(OmegaConf.create(data), resolve=True)))
    except OmegaConfBaseException as error:
        raise ConfigError([f"configuration: {_one_line(error)}"]) from error


def _read(source: str | Path | Mapping[str, Any] | RunConfig) -> dict[str, Any]:
    if isinstance(source, RunConfig):
        return source.model_dump()
    if isinstance(source, Mapping):
        try:
            return _mapping(OmegaConf.to_container(OmegaConf.create(dict(source))))
        except OmegaConfBaseException as error:
            raise ConfigError([f"configuration: {_one_line(error)}; give names and numbers, not objects"]) from error
    path = _preset(str(source).removeprefix(_PRESET)) if str(source).startswith(_PRESET) else Path(source)
    if not path.is_file():
        raise ConfigError([f"{path}: no such file; give the path of a YAML configuration, or {_PRESET}NAME"])
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read as YAML: {_one_line(error)}"]) from error
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: holds {type(data).__name__}; a configuration is a mapping of options"])
    return _mapping(data)


def _mapping(data: Any) -> dict[str, Any]:
    return typing.cast(dict[str, Any], data)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_PRESET = "preset:"


def _preset(name: str) -> Path:
    folder = Path(__file__).parent / "presets"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
        raise ConfigError([f"{_PRESET}{name}: no such preset; {remedy}"])
    return folder / f"{name}.yaml"


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError([f"override {override!r}: expected key=value, e.g. algorithm.alpha=3"])
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index, call-overload]
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError([f"override {override!r}: the value is not YAML: {_one_line(error)}"]) from error
    parts = key.split(".")
    node: Any = data
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            names = [item.get("name") if isinstance(item, Mapping) else None for item in node]
            index = names.index(part) if part in names else int(part) if part.isdigit() else -1
            if not 0 <= index < len(node):
                where = ".".join(parts[:depth])
                raise ConfigError([f"override {override!r}: {where} has {len(node)} entries, none is {part!r}"])
            if last:
                node[index] = value
            else:
                node = node[index]
        elif isinstance(node, dict):
            if last:
                node[part] = value
            else:
                if isinstance(node.get(part), str) and part == "algorithm":
                    node[part] = {"name": node[part]}
                if node.get(part) is None:
                    node[part] = {}
                node = node[part]
        else:
            where = ".".join(parts[:depth])
            raise ConfigError([f"override {override!r}: {where} is {node!r}, which has no options inside"])


def _validate(data: dict[str, Any]) -> RunConfig:
    problems: list[str] = []
    told: set[str] = set()
    # Faulty optional entries are told, then taken out, so that the checks of combinations still run.
    while True:
        try:
            config = RunConfig.model_validate(data)
        except ValidationError as error:
            faults = [(_data_path(item, data), item) for item in error.errors()]
            for path, item in faults:
                if _dotted(path) not in told:
                    told.add(_dotted(path))
                    problems.append(_problem(_dotted(path) or "configuration", item))
            # Without a required option its whole section goes; what was taken out is not told again as missing.
            outs = [path[:-1] if item["type"] == "missing" else path for path, item in faults]
            told.update(map(_dotted, outs))
            taken_out = [_take_out(data, path) for path in sorted(outs, key=len, reverse=True)]
            if not any(taken_out):
                raise ConfigError(problems) from None
        else:
            problems += _impossible_combinations(config)
            if problems:
                raise ConfigError(problems)
            return config


def _take_out(data: Any, path: Sequence[str | int]) -> bool:
    """Delete an option; an entry of a list stays, since its neighbours are addressed by number."""
    for key in path[:-1]:
        data = data[key]
    if not path or not isinstance(data, dict) or path[-1] not in data:
        return False
    del data[path[-1]]
    return True


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _data_path(item: Any, data: Any) -> list[str | int]:
    """Where in the data a fault stands: pydantic's location without the parts that name a union's branch."""
    path: list[str | int] = []
    node = data
    loc = item["loc"]
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        # A tag such as `dataset` can also be a key: it is the branch when the location goes on behind it.
        is_key = isinstance(node, Mapping) and part in node and (last or part not in _BRANCHES)
        if is_key or (isinstance(node, list) and isinstance(part, int) and part < len(node)):
            node = node[part]
            path.append(part)
        elif last and item["type"] == "missing":
            path.append(part)
    return path


_BRANCHES = {"hacpo", "gspo", "grpo", "naive", *_SOURCES}


def _problem(place: str, item: Any) -> str:
    kind, given = item["type"], item["input"]
    if kind == "extra_forbidden":
        return f"{place}: {_unknown_option(item['loc'])}"
    if kind == "missing":
        return f"{place}: required and not given"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{place}: got {given!r}; must be a mapping of options"
    if kind in ("union_tag_invalid", "literal_error"):
        expected = item["ctx"].get("expected_tags") or item["ctx"].get("expected")
        if place == "algorithm":
            place, given = "algorithm.name", given.get("name") if isinstance(given, Mapping) else given
            expected = f"{expected}, 'gspo-x2'"
        close = difflib.get_close_matches(
            str(given), [part.strip(" '") for part in str(expected).replace(" or ", ",").split(",")], n=1
        )
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{place}: got {given!r}, must be one of {expected}{hint}"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{place}: got {given!r}; {message}"


def _unknown_option(loc: Sequence[str | int]) -> str:
    option, model = str(loc[-1]), _model_at(RunConfig, loc[:-1])
    if model is None:
        return "unknown option"
    known = {name: name for name in model.model_fields}
    if issubclass(model, _SourceConfig):
        if option in _SOURCES:
            return f"a source is one of {', '.join(_SOURCES)}; take out all but one"
        known |= {kind: kind for kind in _SOURCES}
    # An option that stands one section deeper is found too.
    for name, field in model.model_fields.items():
        if typing.get_origin(field.annotation) not in (list, dict):
            for inner in _models_in(field.annotation):
                known = {deeper: f"{name}.{deeper}" for deeper in inner.model_fields} | known
    close = difflib.get_close_matches(option, known, n=1)
    if close:
        return f"unknown option; did you mean {known[close[0]]!r}?"
    return f"unknown option; known here: {', '.join(sorted(model.model_fields))}"


def _model_at(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel] | None:
    """The model whose fields stand at a pydantic location; union branches are part of such a location."""
    candidates: list[type[BaseModel]] = [model]
    for part in loc:
        branch = [item for item in candidates if part in (_tag(item), _KINDS.get(item))]
        if len(candidates) > 1 and branch:
            candidates = branch
            continue
        if isinstance(part, int) or not any(part in item.model_fields for item in candidates):
            continue
        annotation = next(item.model_fields[part].annotation for item in candidates if part in item.model_fields)
        candidates = list(_models_in(annotation))
    return candidates[0] if candidates else None


_KINDS: dict[type[BaseModel], str] = {model: kind for kind, model in _SOURCES.items()}


def _tag(model: type[BaseModel]) -> Any:
    name = model.model_fields.get("name")
    return name.default if name is not None else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and not isinstance(annotation, types.GenericAlias)
    ):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models_in(part)]


def _impossible_combinations(config: RunConfig) -> list[str]:
    """Faults that no single field shows; each line names the place, the value and the remedy."""
    problems: list[str] = []
    names = [agent.name for agent in config.agents]
    for index, agent in enumerate(config.agents):
        place = f"agents.{index} ({agent.name})"
        if agent.name in names[:index]:
            problems.append(f"{place}: the name is used twice; give every agent its own name")
        temperature = config.sampling_of(agent).temperature
        if agent.role != "learner" and temperature <= 0:
            problems.append(
                f"{place}: sampling temperature is {temperature:g}; training needs samples, so it must be above 0 "
                f"(1.0 is usual; greedy decoding is for evaluation.temperature)"
            )
        for author in agent.learns_from or []:
            if author not in names:
                close = difflib.get_close_matches(author, names, n=1)
                remedy = f"did you mean {close[0]!r}?" if close else f"agents are {', '.join(names)}"
                problems.append(f"{place}: learns_from names {author!r}, which is no agent; {remedy}")
            elif config.agent(author).role == "learner":
                problems.append(f"{place}: learns_from names {author!r}, whose role is learner: it samples nothing")
        if agent.role == "author" and agent.lora is not None:
            problems.append(f"{place}: role is author, so lora would never be trained; leave lora out")
        if agent.role == "author" and agent.learns_from:
            problems.append(f"{place}: role is author, so learns_from has no effect; leave it out or use role: both")
        if agent.role == "author":
            continue
        if agent.role == "learner" and not isinstance(config.algorithm, HacpoConfig | NaiveConfig):
            problems.append(
                f"{place}: role is learner, but {config.algorithm.name} trains on own rows only; use hacpo or naive"
            )
            continue
        authors = config.authors_for(agent)
        joint = sum(config.group_size_of(config.agent(name)) for name in authors if name in names)
        if joint < 2:
            problems.append(
                f"{place}: its joint group has {joint} rollout(s) per prompt, so every advantage is 0 and nothing "
                f"is learned; use group_size >= 2" + ("" if joint == 0 else ", or let it learn from other agents")
            )
        problems += _closed_band(config, agent, place)
    if all(agent.role == "author" for agent in config.agents):
        problems.append("agents: every role is author, so nobody learns; set one agent's role to both or learner")
    if config.evaluation.every > 0 and not config.tasks.eval:
        problems.append(
            f"evaluation.every: got {config.evaluation.every}, but there are no held-out tasks; give tasks.eval or "
            f"leave it out"
        )
    if config.prompts_per_minibatch is not None and config.prompts_per_minibatch > config.prompts_per_step:
        problems.append(
            f"prompts_per_minibatch: {config.prompts_per_minibatch} is more than prompts_per_step "
            f"({config.prompts_per_step}); lower it or leave it out"
        )
    return problems


def _closed_band(config: RunConfig, agent: AgentConfig, place: str) -> list[str]:
    algorithm = config.algorithm
    if not isinstance(algorithm, HacpoConfig) or algorithm.clipping != "stepwise" or algorithm.delta_step == 0:
        return []
    own, foreign = config.updates_per_step(agent)
    if foreign == 0 or config.authors_for(agent) in ([], [agent.name]):
        return []
    last = own + foreign - 1
    # m * delta_step is compared with a hair of tolerance: 8 * 0.025 is not exactly 0.2 in binary.
    if last * algorithm.delta_step < algorithm.delta * (1 - 1e-9):
        return []
    closes = math.ceil(algorithm.delta / algorithm.delta_step * (1 - 1e-9))
    most = algorithm.delta / (last + 1)
    message = (
        f"{place}: foreign rows would be switched off: a step makes up to {own + foreign} updates "
        f"({own} on own rows first), the last with m = {last}, but the band [1 - {algorithm.delta:g} + m x "
        f"{algorithm.delta_step:g}, 1] closes at m = {closes}; make fewer updates (prompts_per_minibatch), set "
        f"algorithm.delta_step to at most {most:.3g}, raise algorithm.delta, or use algorithm.clipping: fixed"
    )
    return [message]
