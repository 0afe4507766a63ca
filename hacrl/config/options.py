"""Every option and every default, once. `docs/configuration.md` is generated from these models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator


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
    clipping: Literal["stepwise", "fixed", "none", "truncated"] = Field(
        "stepwise",
        description="Band of foreign rows: narrowing with each update, fixed, or none at all. Not in the paper: "
        "`truncated`, no band, and a ratio above 1 counts as 1.",
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


class VllmConfig(_Section):
    """The engine `vllm`: a vLLM process for each agent, given the agent's weights before it samples (docs/vllm.md)."""

    python: str | None = Field(
        None, description="Interpreter of the environment that has vLLM; the one that runs hacrl if left out."
    )
    memory_share: float = Field(
        0.3, gt=0, le=1, description="Share of the GPU's memory for one engine: its weights and KV cache."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs of one engine, counted from the agent's `device` on.")
    enforce_eager: bool = Field(
        False, description="No compilation and no CUDA graphs: starts faster, samples more slowly. On a CPU always so."
    )
    sleep: bool = Field(
        True, description="On a GPU: give the engine's memory back between samplings (weights wait in main memory)."
    )
    mismatch_limit: float | None = Field(
        None,
        gt=0,
        description="Largest mean difference, in nats per token, between the engine's and the learner's "
        "log-probabilities of the same tokens; 0.001 in float32 and 0.05 otherwise if left out.",
    )
    on_mismatch: Literal["error", "warn"] = Field("error", description="Above the limit: end the run, or go on.")


class AgentVllmConfig(_Section):
    """One agent's departures from the run's `sampling.vllm`; what is left out is inherited."""

    memory_share: float | None = Field(None, gt=0, le=1, description="See sampling.vllm.memory_share.")
    tensor_parallel_size: int | None = Field(None, ge=1, description="See sampling.vllm.tensor_parallel_size.")
    mismatch_limit: float | None = Field(None, gt=0, description="See sampling.vllm.mismatch_limit.")


class SamplingConfig(_Section):
    """How rollouts for training are sampled. Training uses the plain tempered distribution: no top-p, no top-k."""

    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="What samples: the model in this process, or a vLLM process for each agent."
    )
    vllm: VllmConfig = Field(default_factory=VllmConfig, description="Settings of the engine `vllm`.")

    temperature: float = Field(1.0, description="Logits are divided by this, in sampler and learner alike; above 0.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longest prompt, in the agent's own tokens.")
    max_new_tokens: int = Field(1024, ge=1, description="Longest completion, end of sequence included.")
    batch_rows: int = Field(64, ge=1, description="Rows decoded at the same time; bounds the KV cache.")


class AgentSamplingConfig(_Section):
    """One agent's departures from the run's `sampling`; what is left out is inherited."""

    engine: Literal["transformers", "vllm"] | None = Field(None, description="See sampling.engine.")
    vllm: AgentVllmConfig = Field(default_factory=AgentVllmConfig, description="Departures from `sampling.vllm`.")

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


class ResourcesConfig(_Section):
    """What one agent is given on a cluster; used by `execution: ray` alone (docs/ray.md)."""

    cpus: float | None = Field(
        None,
        gt=0,
        description="Cores reserved; the agent computes with as many threads, at least one. If left out, half a core "
        "is reserved, and threads are OMP_NUM_THREADS where that is set, else an equal share of the node's cores.",
    )
    gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs, or a part of one. If left out: one for an agent on CUDA (an engine's tensor_parallel_size), "
        "or an equal part where there are fewer GPUs than such agents; none on a CPU.",
    )
    workers: int = Field(
        1,
        ge=1,
        description="Processes that train the agent together, each with a part of its weights (FSDP2) and of every "
        "minibatch.",
    )


class OptimizerConfig(_Section):
    """AdamW."""

    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    states: Literal["float32", "int8"] = Field(
        "float32", description="Type of the two moments: 8 bytes per trained weight, or 2 (needs hacrl[torchao])."
    )


class ScheduleConfig(_Section):
    """Learning rate over the run's steps (transformers' schedulers)."""

    name: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after warm-up.")
    warmup_steps: int = Field(
        0, ge=0, description="Steps of linear warm-up: the first step has 1/warmup_steps of the peak."
    )


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
        "update. `auto`: the sampler's in float32 with the engine transformers, the learner's otherwise.",
    )
    sampler_correction: float | None = Field(
        None,
        gt=0,
        description="Weigh own rows by the learner's over the sampler's probability (per token, geometric mean), at "
        "most this; none if left out.",
    )
    kl_coefficient: float = Field(0.0, ge=0, description="Weight of the KL to its starting weights, own rows only.")
    group_size: int | None = Field(None, ge=1, description="Answers per prompt; the run's group_size if left out.")
    sampling: AgentSamplingConfig = Field(
        default_factory=AgentSamplingConfig, description="Departures from the run's `sampling`."
    )
    resources: ResourcesConfig = Field(
        default_factory=ResourcesConfig, description="The agent's part of a cluster, under `execution: ray`."
    )


# ---------------------------------------------------------------- tasks


class _SourceConfig(_Section):
    system: str | None = Field(None, description="System message put before every prompt.")
    template: str = Field("{prompt}", description="Text around the prompt, or around the last user message.")
    limit: int | None = Field(None, ge=1, description="Use only this many tasks.")
    shuffle_seed: int | None = Field(None, description="Shuffle with this seed before `limit`; file order if left out.")
    trained_questions: Literal["keep", "drop"] = Field(
        "keep",
        description="Held-out sources: tasks whose question is also a training question are kept (`check` warns), or "
        "left out (counted).",
    )
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


SOURCES: dict[str, type[_SourceConfig]] = {
    "dataset": DatasetConfig,
    "reasoning_gym": ReasoningGymConfig,
    "function": FunctionTasksConfig,
}


def _source_kind(data: Any) -> str:
    keys = data if isinstance(data, Mapping) else type(data).model_fields if isinstance(data, _SourceConfig) else ()
    return next((kind for kind in SOURCES if kind in keys), "dataset")


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
        if isinstance(source, Mapping) and any(key in source and isinstance(source[key], str) for key in SOURCES):
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

    every: int = Field(
        1, ge=1, description="Save the whole state after every so many steps, and after each evaluation."
    )
    keep_last: int = Field(2, ge=1, description="Keep this many latest checkpoints.")
    keep_best: bool = Field(True, description="Also keep the one with the best mean held-out avg@k over agents.")


# ---------------------------------------------------------------- trackers


class TensorboardConfig(_Section):
    """TensorBoard: event files in `tensorboard/` of the run directory."""

    name: Literal["tensorboard"] = "tensorboard"


class WandbConfig(_Section):
    """Weights & Biases; its local files are in `wandb/` of the run directory."""

    name: Literal["wandb"] = "wandb"
    project: str = Field("hacrl", min_length=1, description="Project of the run.")
    entity: str | None = Field(None, description="User or team; the account's own default if left out.")
    run_name: str | None = Field(None, description="Name shown; the last part of `output` if left out.")
    mode: Literal["online", "offline"] | None = Field(
        None,
        description="`offline` touches no network; `wandb sync` sends later. WANDB_MODE, else online, if left out.",
    )


class TrackioConfig(_Section):
    """trackio: a local database, in TRACKIO_DIR or trackio's own default folder."""

    name: Literal["trackio"] = "trackio"
    project: str = Field("hacrl", min_length=1, description="Project of the run.")
    run_name: str | None = Field(
        None, description="Name shown, before the run id; the last part of `output` if left out."
    )


TrackerConfig = Annotated[TensorboardConfig | WandbConfig | TrackioConfig, Field(discriminator="name")]


# ---------------------------------------------------------------- execution


class LocalConfig(_Section):
    """All agents in this process, one after the other."""

    name: Literal["local"] = "local"


class RayConfig(_Section):
    """Each agent in a process of its own, all at the same time, on this machine or a cluster (docs/ray.md)."""

    name: Literal["ray"] = "ray"
    address: str | None = Field(
        None,
        min_length=1,
        description="A running cluster, host:port or `auto`. RAY_ADDRESS if left out, and without that a cluster of "
        "this machine alone, started and ended with the run.",
    )
    restarts: int = Field(
        2,
        ge=0,
        description="When an agent's process or its node dies, start again from the last checkpoint, this many times.",
    )
    wait_s: float = Field(
        60.0, ge=0, description="Seconds to wait for resources that a running cluster does not have, or not free, yet."
    )


ExecutionConfig = Annotated[LocalConfig | RayConfig, Field(discriminator="name")]


# ---------------------------------------------------------------- the whole run


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
    trackers: list[TrackerConfig] = Field(
        default_factory=list,
        description="Where metrics are sent besides the run directory: tensorboard, wandb, trackio.",
    )
    execution: ExecutionConfig = Field(
        default_factory=LocalConfig, description="Where agents live: `local`, all in this process, or `ray`."
    )

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
        trackers = data.get("trackers")
        if isinstance(trackers, str | Mapping):
            trackers = [trackers]
        if isinstance(trackers, list):
            data["trackers"] = [{"name": item} if isinstance(item, str) else item for item in trackers]
        if isinstance(data.get("execution"), str):
            data["execution"] = {"name": data["execution"]}
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
        departures = agent.sampling.model_dump(exclude_none=True)
        vllm = self.sampling.vllm.model_copy(update=departures.pop("vllm"))
        return self.sampling.model_copy(update={**departures, "vllm": vllm})

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
        if prompts % 2:
            raise ValueError(
                f"gspo-x2 halves the prompts of a minibatch to make twice the updates, and {prompts} is odd; set "
                f"prompts_per_minibatch to an even number"
            )
        data["prompts_per_minibatch"] = prompts // 2
    return data
