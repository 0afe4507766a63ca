"""What coordination costs with agents that do no work: seconds and bytes of a step, and how they grow with agents.

python benchmarks/coordination.py --results benchmarks/results/coordination.json

n agents, every one author and learner of all, HACPO. Three parts, each n in a process of its own:

loop           the training loop's own part in one process without Ray, stage by stage, verdicts and ratios given
ray-different  the same rollouts on Ray, by actors that follow a script and have n different tokenizers
ray-same       the same with one tokenizer

All actors share this machine's cores, where real agents have machines of their own: `wall` is therefore no figure of
theirs, `loop` is the work of the loop's process, and `one_learner` what one learner reads, measured by itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pickle
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from hacrl.config import RayConfig, RunConfig, load_config
from hacrl.durable_files import write_json
from hacrl.execution.exchange import Exchange, shared_groups
from hacrl.execution.hosted_agent import Answer, HostedAgent
from hacrl.types import Completion, RolloutGroup, StepRecord, Task, Verdict

# An agent's answers come in so many parts.
PARTS = 8
VOCABULARY = 150_000
CHARACTERS_OF_A_TOKEN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The rollouts of one step."""

    agents: int
    prompts: int
    answers: int
    tokens: int

    @property
    def rollouts(self) -> int:
        return self.agents * self.prompts * self.answers


def run_config(size: Size, output: Path, **changes: Any) -> RunConfig:
    return load_config(
        {
            "agents": [{"name": name, "model": "none", "resources": {"cpus": 0.01}} for name in names(size)],
            "tasks": {"train": {"function": "none:none"}},
            "reward": "exact",
            # The band of the default would close: so many authors make so many updates.
            "algorithm": {"name": "hacpo", "clipping": "fixed"},
            "steps": 100,
            "prompts_per_step": size.prompts,
            "group_size": size.answers,
            "output": str(output),
            **changes,
        }
    )


def names(size: Size) -> list[str]:
    return [f"agent{number:04}" for number in range(size.agents)]


def tasks(size: Size) -> list[Task]:
    return [Task(id=f"train/{number}", prompt=f"What is {number} + 3?" * 10) for number in range(size.prompts)]


def answers(size: Size, author: str) -> Iterator[list[Completion]]:
    """One author's groups: random ids, log-probabilities and text, as incompressible as real ones."""
    rng = random.Random(author)
    for task in tasks(size):
        yield [
            Completion(
                task_id=task.id,
                author=author,
                index=index,
                text="".join(rng.choices("abcdefghijklmnop qrstuvwxyz", k=size.tokens * CHARACTERS_OF_A_TOKEN)),
                token_ids=tuple(rng.choices(range(VOCABULARY), k=size.tokens)),
                logprobs=tuple(-rng.random() for _ in range(size.tokens)),
                finish_reason="stop",
                weights_version=0,
            )
            for index in range(size.answers)
        ]


class GivenVerdicts:
    """Scores by chance and at once, in place of a `Verifier`."""

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def submit(self, _: Sequence[Task], texts: Sequence[str]) -> Future[list[Verdict]]:
        verdicts = []
        for _text in texts:
            reward = float(self._rng.random() < 0.5)
            verdicts.append(Verdict(reward=reward, scores={"exact": reward}, answer="4", parsed=True))
        future: Future[list[Verdict]] = Future()
        future.set_result(verdicts)
        return future


class Stopwatch:
    """Seconds of this process's own work, which others on the machine disturb least."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        begin = time.process_time()
        value = work()
        self.seconds[name] = time.process_time() - begin
        return value


# ---------------------------------------------------------------- the loop's own part


def loop_part(size: Size) -> dict[str, Any]:
    """Seconds of each stage of `hacrl.trainer._steps` that is the loop's own work."""
    import torch

    from hacrl.execution.timeline import Lap
    from hacrl.rewards import Scoring
    from hacrl.run_directory import RunDirectory
    from hacrl.step_metrics import execution_metrics, rollout_rows, step_metrics
    from hacrl.trainer import (
        allowed_authors,
        build_algorithm,
        build_capability_tracker,
        reward_tensor,
        without_stale,
    )

    torch.set_num_threads(1)
    timed = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(size, Path(folder) / "run")
        authors = names(size)
        arrived = [group for author in authors for group in answers(size, author)]
        scoring = Scoring(GivenVerdicts(), tasks(size))  # type: ignore[arg-type]
        for group in arrived:
            scoring.add(group)
        allowed_LA = timed("allowed_authors, once a run", lambda: allowed_authors(config))
        capability, algorithm = build_capability_tracker(config), build_algorithm(config)
        with RunDirectory.open(config.output, config) as directory:
            before = peak_gib()
            groups = timed("groups", lambda: scoring.groups(authors))
            versions = dict.fromkeys(authors, 0)
            groups, stale, staleness = timed("without_stale", lambda: without_stale(groups, versions, most=0))
            rewards_PAG = timed("reward_tensor", lambda: reward_tensor(groups, authors))
            timed("capability", lambda: capability.observe(rewards_PAG))
            credit = timed("credit", lambda: algorithm.credit(rewards_PAG, capability.estimate(), allowed_LA))
            updates = given_updates(size)
            lap = Lap(seconds={name: {"sample": 1.0} for name in authors}, counts={}, spans=())
            metrics = timed(
                "step_metrics",
                lambda: (
                    step_metrics(config, groups, credit, capability.estimate(), updates, {"sample": 1.0}, {})
                    | execution_metrics(config, lap, restarts=0, stale=stale, staleness=staleness)
                ),
            )
            rows = timed("rollout_rows", lambda: tuple(rollout_rows(groups, authors, credit, updates)))
            record = StepRecord(step=1, steps=100, metrics=metrics, rollouts=rows)
            timed("record", lambda: directory.record(record))
            size_of = {
                "rollouts file": sum(file.stat().st_size for file in (directory.path / "rollouts").iterdir()),
                "metrics line": (directory.path / "metrics.jsonl").stat().st_size,
            }
    # Not every step's: once a run.
    total = sum(value for name, value in timed.seconds.items() if "once" not in name)
    return {
        "seconds": timed.seconds | {"all": total},
        "bytes": size_of,
        "peak_gib": peak_gib(),
        "peak_gib_before": before,
    }


def given_updates(size: Size) -> dict[str, Any]:
    from hacrl.agent import AgentUpdate

    shape = (size.prompts, size.agents, size.answers)
    return {learner: AgentUpdate(**given_update(names(size), shape)) for learner in names(size)}


def given_update(authors: Sequence[str], shape_PAG: tuple[int, int, int]) -> dict[str, Any]:
    """What one agent would report: some metrics of each author, and a ratio of each row."""
    figures = ("s_mean", "s_min", "s_max", "weight", "below_share", "inside_share", "above_share", "rows")
    rng = np.random.default_rng(0)
    return {
        "metrics": {f"author/{author}/{figure}": 0.5 for author in authors for figure in figures},
        "ratios": {author: rng.random((shape_PAG[0], shape_PAG[2])) for author in authors},
    }


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# ---------------------------------------------------------------- on Ray


class ScriptedAgent(HostedAgent):
    """Has its answers ready, and learns nothing. Loads no torch."""

    def start(self, run: RunConfig, algorithm: Any, *_: Any) -> Answer:
        size = Size(
            agents=len(run.agents),
            prompts=run.prompts_per_step,
            answers=run.group_size,
            tokens=run.sampling.max_new_tokens,
        )
        self.parts = list(answers(size, self.name))
        # In place of an algorithm: whether all have the same tokenizer.
        return self._answered("one" if algorithm == "same" else self.name, time.time(), ())

    def sample(self, tasks: Sequence[Task], step: int) -> Iterator[Any]:  # noqa: ARG002
        begin = time.time()
        several = max(1, len(self.parts) // PARTS)
        for first in range(0, len(self.parts), several):
            yield [completion for part in self.parts[first : first + several] for completion in part]
        yield self._answered(None, begin, ())

    def update(self, tasks: Any, advantages_PAG: Any, ratio: Any, *others: Any) -> Answer:
        _fingerprints, _step, *told = others
        begin = time.time()
        groups = shared_groups(tasks, told)
        assert sum(len(group.completions) for group in groups) == advantages_PAG.size
        return self._answered(SimpleNamespace(**given_update(list(ratio), advantages_PAG.shape)), begin, ())

    def pulse(self) -> tuple[int, float]:
        return 0, time.time()


def ray_part(size: Size, tokenizers: str, *, steps: int) -> dict[str, Any]:
    """Medians over the steps after the first."""
    import torch

    from hacrl.execution import ray_fleet
    from hacrl.trainer import allowed_authors, build_algorithm, build_capability_tracker, reward_tensor

    torch.set_num_threads(1)
    ray_fleet.HostedAgent = ScriptedAgent
    authors = names(size)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = run_config(size, folder / "run", execution="ray", sampling={"max_new_tokens": size.tokens})
        assert isinstance(config.execution, RayConfig)
        begin = time.perf_counter()
        fleet = ray_fleet.RayFleet(
            config,
            config.execution,
            tokenizers,  # type: ignore[arg-type]
            dump_directory=folder,
            log_directory=folder / "processes",
        )
        try:
            started = time.perf_counter() - begin
            asked = tasks(size)
            put: list[Any] = []
            plain_put = fleet._cluster.put

            def keeping_put(value: Any) -> Any:
                put.append(value)
                return plain_put(value)

            fleet._cluster.put = keeping_put  # type: ignore[method-assign]
            seconds = []
            for step in range(1, steps + 2):
                put.clear()
                timed = Both()
                groups = timed("sample", sampled, fleet, asked, step)
                rewards_PAG = reward_tensor(groups, authors)
                capability = build_capability_tracker(config).observe(rewards_PAG).estimate()
                credit = build_algorithm(config).credit(rewards_PAG, capability, allowed_authors(config))
                updating = timed("update_begin", partial(fleet.update, step=step), groups, credit)
                updates = timed("update_wait", updating.wait)
                seconds.append(timed.seconds)
                fleet.lap()
            sizes = bytes_of(size, groups, credit, updates, put)
        finally:
            fleet.close()
    medians = {
        name: {clock: statistics.median(step[name][clock] for step in seconds[1:]) for clock in ("wall", "loop")}
        for name in seconds[0]
    }
    return {"start_seconds": started, "seconds": medians, "bytes": sizes, **read_part(size, groups, tokenizers)}


def sampled(fleet: Any, asked: Sequence[Task], step: int) -> list[RolloutGroup]:
    from hacrl.rewards import Scoring

    scoring = Scoring(GivenVerdicts(), asked)  # type: ignore[arg-type]
    fleet.sample(asked, step=step, deliver=scoring.add).wait()
    return scoring.groups(fleet.names)


def bytes_of(size: Size, groups: Any, credit: Any, updates: Any, put: Sequence[Any]) -> dict[str, int]:
    """What a step sends, as it is pickled. `to_learners`: what leaves the loop's machine where each agent has one of
    its own and none passes anything on."""
    from hacrl.execution.fleet import learner_credit

    authors = names(size)
    first = [rollout.completion for group in groups for rollout in group.rollouts[: size.answers]]
    told = learner_credit(credit, 0, authors, authors)
    # The tasks twice: for sampling, and for the update.
    answers_put = [value for value in put if value and not isinstance(value[0], Task)]
    whole = [value for value in answers_put if isinstance(value[0][0], Completion)]
    others = [value for value in answers_put if not isinstance(value[0][0], Completion)]
    sent_whole, sent_others = sum(map(pickled, whole)), sum(map(pickled, others))
    return {
        "sampled": pickled(first) * size.agents,
        "put": sent_whole + sent_others,
        "to_learners": sent_whole + sent_others * (size.agents - 1),
        "whole_groups_to_learners": pickled(groups) * size.agents,
        "credit": pickled(told) * size.agents,
        "updates": pickled(next(iter(updates.values()))) * size.agents,
    }


def read_part(size: Size, groups: Any, tokenizers: str) -> dict[str, Any]:
    """What one learner needs to read what it is sent, and would need for the groups as they are, by the clock of this
    process alone."""
    authors = names(size)
    fingerprints = {author: "one" if tokenizers == "same" else author for author in authors}
    told, _ = Exchange(groups, fingerprints, pickle.dumps).told(authors[0], authors)
    whole, asked = pickle.dumps(groups), [group.task for group in groups]
    timed = Stopwatch()
    timed("read", lambda: shared_groups(asked, [pickle.loads(part) for part in told]))
    timed("read_whole_groups", lambda: pickle.loads(whole))
    return {
        "one_learner": {
            "bytes": sum(map(len, told)),
            "read_seconds": timed.seconds["read"],
            "whole_groups_bytes": len(whole),
            "whole_groups_read_seconds": timed.seconds["read_whole_groups"],
        }
    }


def pickled(value: Any) -> int:
    return len(pickle.dumps(value, protocol=5))


class Both:
    """Wall-clock seconds, and those of this process's own work (Ray's threads in it included)."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}

    def __call__(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        wall, own = time.perf_counter(), time.process_time()
        value = work(*arguments)
        self.seconds[name] = {"wall": time.perf_counter() - wall, "loop": time.process_time() - own}
        return value


# ---------------------------------------------------------------- growth


def slopes(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each figure, between neighbouring numbers of agents: the exponent by which it grows with rollouts. With
    rollouts times learners it grows by half as much."""
    found = []
    for smaller, larger in itertools.pairwise(entries):
        agents = smaller["agents"], larger["agents"]
        flat = _figures(smaller), _figures(larger)
        exponents = {
            name: round(math.log(flat[1][name] / value) / math.log(agents[1] / agents[0]), 2)
            for name, value in flat[0].items()
            if value > 0 and flat[1].get(name, 0) > 0
        }
        found.append(
            {
                "agents": agents,
                "per_rollouts": exponents,
                "per_rollouts_x_learners": {name: round(exponent / 2, 2) for name, exponent in exponents.items()},
            }
        )
    return found


def _figures(value: Any, name: str = "") -> dict[str, float]:
    if isinstance(value, dict):
        parts = (_figures(item, f"{name}/{key}".strip("/")) for key, item in value.items() if key != "agents")
        return {key: item for part in parts for key, item in part.items()}
    return {name: float(value)} if isinstance(value, int | float) else {}


def in_own_process(part: str, size: Size, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", part, "--agents", str(size.agents), "--prompts", str(size.prompts)]
    command += ["--answers", str(size.answers), "--tokens", str(size.tokens), "--steps", str(options.steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = {"agents": size.agents, **json.loads(done.stdout.splitlines()[-1])}
    print(part, json.dumps(found), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="2,8,32,128", help="of the part `loop`")
    parser.add_argument("--ray-agents", default="2,8,32", help="of the parts `ray-...`: each takes some 300 MB")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--parts", default="loop,ray-different,ray-same")
    parser.add_argument("--part", help="one of them, with one number of agents, in this process")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()

    def size(agents: str) -> Size:
        return Size(agents=int(agents), prompts=options.prompts, answers=options.answers, tokens=options.tokens)

    if options.part is not None:
        part, _, tokenizers = options.part.partition("-")
        one = size(options.agents)
        print(json.dumps(loop_part(one) if part == "loop" else ray_part(one, tokenizers, steps=options.steps)))
        return
    result: dict[str, Any] = {name: getattr(options, name) for name in ("prompts", "answers", "tokens", "steps")}
    for part in options.parts.split(","):
        counts = options.agents if part == "loop" else options.ray_agents
        entries = [in_own_process(part, size(agents), options) for agents in counts.split(",")]
        result[part] = {"sizes": entries, "growth": slopes(entries)}
    if options.results:
        write_json(options.results, result)


if __name__ == "__main__":
    main()
