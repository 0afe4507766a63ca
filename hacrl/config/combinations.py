"""Faults of a configuration that no single option shows."""

from __future__ import annotations

import difflib
import math

from hacrl.config.options import AgentConfig, HacpoConfig, NaiveConfig, RayConfig, RunConfig

# vLLM raises lower temperatures to this without an error.
VLLM_LOWEST_TEMPERATURE = 0.01


def impossible_combinations(config: RunConfig) -> list[str]:
    """Faults that no single field shows; each line names the place, the value and the remedy."""
    problems: list[str] = []
    names = [agent.name for agent in config.agents]
    for index, agent in enumerate(config.agents):
        place = f"agents.{index} ({agent.name})"
        if agent.name in names[:index]:
            problems.append(f"{place}: the name is used twice; give every agent its own name")
        temperature = config.sampling_of(agent).temperature
        if temperature <= 0:
            problems.append(
                f"{place}: sampling temperature is {temperature:g}; training needs samples and divides logits by it, "
                f"so it must be above 0 (1.0 is usual; greedy decoding is for evaluation.temperature)"
            )
        if agent.role != "both" and agent.kl_coefficient > 0:
            problems.append(
                f"{place}: role is {agent.role}, so kl_coefficient has no effect, for it counts own rows that are "
                f"trained on; leave it out or use role: both"
            )
        if agent.sampler_correction is not None and agent.role != "both":
            problems.append(
                f"{place}: role is {agent.role}, so sampler_correction has no effect, for it weighs own rows that are "
                f"trained on; leave it out or use role: both"
            )
        elif agent.sampler_correction is not None and agent.old_logprobs == "sampler":
            problems.append(
                f"{place}: sampler_correction weighs by the learner's own old log-probabilities, and old_logprobs: "
                f"sampler asks for none; use old_logprobs: auto or learner"
            )
        problems += _vllm_faults(config, agent, place)
        problems += _staleness_faults(config, agent, place)
        problems += _resource_faults(config, agent, place)
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
    if isinstance(config.execution, RayConfig) and (config.execution.address or "").startswith("ray://"):
        problems.append(
            f"execution.address: {config.execution.address} is that of a Ray client; start the run on a machine of the "
            f"cluster, with address: auto"
        )
    if config.evaluation.every > 0 and not config.tasks.eval:
        problems.append(
            f"evaluation.every: got {config.evaluation.every}, but there are no held-out tasks; give tasks.eval or "
            f"leave it out"
        )
    if config.tasks.train.trained_questions == "drop":
        problems.append(
            "tasks.train.trained_questions: drop is for held-out sources; set it in tasks.eval, or leave it out"
        )
    kinds = [tracker.name for tracker in config.trackers]
    problems += [
        f"trackers.{index}: {kind} is there twice; leave one out"
        for index, kind in enumerate(kinds)
        if kind in kinds[:index]
    ]
    if config.prompts_per_minibatch is not None and config.prompts_per_minibatch > config.prompts_per_step:
        problems.append(
            f"prompts_per_minibatch: {config.prompts_per_minibatch} is more than prompts_per_step "
            f"({config.prompts_per_step}); lower it or leave it out"
        )
    return problems


def _vllm_faults(config: RunConfig, agent: AgentConfig, place: str) -> list[str]:
    sampling = config.sampling_of(agent)
    if sampling.engine != "vllm":
        return []
    problems = []
    if agent.trust_remote_code:
        problems.append(
            f"{place}: trust_remote_code, but vLLM brings models of its own and is given weights only; use "
            f"sampling.engine: transformers for this agent"
        )
    for option, temperature in (
        ("sampling.temperature", sampling.temperature),
        ("evaluation.temperature", config.evaluation.temperature),
    ):
        if 0 < temperature < VLLM_LOWEST_TEMPERATURE:
            problems.append(
                f"{place}: {option} is {temperature:g}, and vLLM samples at {VLLM_LOWEST_TEMPERATURE:g} whatever lies "
                f"below; raise it, or use sampling.engine: transformers"
            )
    return problems


def _staleness_faults(config: RunConfig, agent: AgentConfig, place: str) -> list[str]:
    if config.max_staleness == 0 or agent.role != "both":
        return []
    problems = []
    if agent.old_logprobs == "learner":
        problems.append(
            f"{place}: old_logprobs: learner recomputes them with newer weights than those that sampled, under "
            f"max_staleness: {config.max_staleness}; use old_logprobs: auto or sampler"
        )
    if agent.sampler_correction is not None:
        problems.append(
            f"{place}: sampler_correction compares a sampler and a learner of the same weights, which max_staleness: "
            f"{config.max_staleness} does not give; leave one of them out"
        )
    return problems


def _resource_faults(config: RunConfig, agent: AgentConfig, place: str) -> list[str]:
    workers = agent.resources.workers
    if workers > 1 and not isinstance(config.execution, RayConfig):
        remedy = "use execution: ray, or leave workers out"
        return [f"{place}: resources.workers is {workers}, but execution: local has one process; {remedy}"]
    problems = []
    if agent.resources.samplers and agent.role != "both":
        problems.append(
            f"{place}: role is {agent.role}, so resources.samplers has no effect, for they sample from weights that "
            f"workers train; leave it out"
        )
    if workers > 1 and agent.optimizer.states == "int8":
        problems.append(
            f"{place}: resources.workers is {workers}, and states of 8 bits cannot be shared out; use "
            f"optimizer.states: float32, of which each worker holds its part, or leave workers out"
        )
    return problems + _gpu_faults(config, agent, place)


def _gpu_faults(config: RunConfig, agent: AgentConfig, place: str) -> list[str]:
    if not isinstance(config.execution, RayConfig) or agent.resources.gpus is None:
        return []
    gpus, device = agent.resources.gpus, agent.device.partition(":")[0]
    if gpus > 1 and gpus != int(gpus):
        return [f"{place}: resources.gpus is {gpus:g}; above 1 it must be a whole number"]
    if gpus > 0 and device == "cpu":
        return [f"{place}: resources.gpus is {gpus:g}, but device is cpu; leave one of them out"]
    if gpus == 0 and device == "cuda":
        return [f"{place}: resources.gpus is 0, but device is {agent.device}; leave one out, or use device: cpu"]
    return []


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
