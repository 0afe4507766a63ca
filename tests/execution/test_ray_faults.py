"""Agents on Ray that hang, dawdle, fail and come back."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_processes import agents_of
from run_states import assert_identical, final_state, metric_lines
from scripted_agents import ScriptedAgent, no_credit, scripted_fleet
from tiny_runs import run_config

from hacrl.errors import AgentError, AgentLostError, RunDirectoryError
from hacrl.execution.hosted_agent import Answer
from hacrl.execution.ray_fleet import RayFleet
from hacrl.trainer import train, training_steps
from hacrl.types import Completion, Task

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: hacrl[ray]")

Make = Callable[..., RayFleet]
TASKS = [Task(id=f"t{number}", prompt="1 + 1?") for number in range(3)]


@pytest.fixture
def make(
    by_value: None, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes a fleet of scripted agents with settings of `execution`."""
    fleets = []

    def making(agent: type, **settings: Any) -> RayFleet:
        """`settings` are those of `scripted_fleet`."""
        fleets.append(scripted_fleet(tiny_models, tmp_path, monkeypatch, agent, **settings))
        return fleets[-1]

    yield making
    for fleet in fleets:
        fleet.close()


def hanging() -> type:
    class HangingAgent(ScriptedAgent):
        """Never ends an update."""

        def update(self, *_: Any) -> Answer:
            while True:
                time.sleep(0.1)  # this line is where it hangs

    return HangingAgent


def impatient(fleet: RayFleet) -> RayFleet:
    """The same with a watchdog that waits a second; starting takes longer than that."""
    fleet._settings = fleet._settings.model_copy(update={"watchdog_s": 1.0})
    return fleet


def test_an_agent_that_hangs_is_named_with_its_phase_and_its_stack(make: Make) -> None:
    fleet = impatient(make(hanging()))
    begin = time.monotonic()
    with pytest.raises(AgentLostError) as caught:
        fleet.update([], no_credit(), step=1).wait()
    assert time.monotonic() - begin < 30
    text = str(caught.value)
    assert text.startswith(("agent qwen (process ", "agent llama (process "))
    assert "no progress for 1 s (execution.watchdog_s) in the phase 'update'; it is at" in text
    assert "this line is where it hangs" in text


@pytest.mark.slow
def test_an_agent_whose_process_is_stopped_is_named(make: Make) -> None:
    fleet = impatient(make(hanging()))
    stopped = int(fleet._agents["llama"].workers[0].where.split()[1])
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(AgentLostError, match=f"^agent (llama .process {stopped} .*does not answer|qwen)"):
            fleet.update([], no_credit(), step=1).wait()
    finally:
        os.kill(stopped, signal.SIGKILL)


@pytest.mark.slow
def test_an_agent_of_two_processes_that_hang_is_let_go_once(make: Make) -> None:
    class LlamaHangsAgent(ScriptedAgent):
        """`llama` never ends an update."""

        def update(self, *_: Any) -> Answer:
            while self.name == "llama":
                time.sleep(0.1)
            return self._answered("learned", time.time(), ())

    fleet = impatient(make(LlamaHangsAgent, on_agent_failure="continue_without"))
    workers = fleet._agents["llama"].workers
    workers.append(dataclasses.replace(workers[0]))  # two, as far as the fleet knows
    with pytest.warns(UserWarning, match="agent llama is let go") as caught:
        updates = fleet.update([], no_credit(), step=1).wait()
    assert updates["qwen"] == "learned"
    assert sum("is let go" in str(item.message) for item in caught) == 1


@pytest.mark.slow
def test_work_that_goes_on_is_not_taken_for_a_hang(make: Make) -> None:
    class SlowAgent(ScriptedAgent):
        """Takes longer than the limit, and moves all the while."""

        def update(self, *_: Any) -> Answer:
            begin = time.time()
            while time.time() < begin + 3:
                self.steps = getattr(self, "steps", 0) + 1
                time.sleep(0.02)
            return self._answered("learned", begin, ())

        def pulse(self) -> tuple[int, float]:
            return getattr(self, "steps", 0), 0.0

    fleet = impatient(make(SlowAgent))
    assert fleet.update([], no_credit(), step=1).wait() == {"qwen": "learned", "llama": "learned"}


def dawdling() -> type:
    class DawdlingAgent(ScriptedAgent):
        """`llama` gives its second part only when a file says so; both count their updates."""

        def sample(self, tasks: Sequence[Task], step: int) -> Iterator[Any]:
            begin = time.time()
            for number, task in enumerate(tasks):
                while self.name == "llama" and number == 1 and not Path("go-on").exists():
                    time.sleep(0.02)
                yield [completion(task, self.name)]
            yield self._answered(None, begin, ())

        def update(self, tasks: Any, advantages: Any, ratio: Any, fingerprints: Any, step: int, *_: Any) -> Answer:
            return self._answered(f"step {step}", time.time(), ())

    def completion(task: Task, author: str) -> Completion:
        return Completion(
            task_id=task.id,
            author=author,
            index=0,
            text="2",
            token_ids=(1,),
            logprobs=(0.0,),
            finish_reason="stop",
            weights_version=0,
        )

    return DawdlingAgent


def test_what_comes_too_late_is_left_out_and_counted(make: Make) -> None:
    fleet = make(dawdling(), peer_timeout=1.0)
    arrived: list[Completion] = []
    fleet.sample(TASKS, step=1, deliver=arrived.extend).wait()
    assert sorted((item.author, item.task_id) for item in arrived) == [
        ("llama", "t0"),
        ("qwen", "t0"),
        ("qwen", "t1"),
        ("qwen", "t2"),
    ]
    # It is given the step's rollouts to learn from all the same, when it comes to that, and nobody waits.
    updates = fleet.update([], no_credit(), step=1).wait()
    assert updates["qwen"] == "step 1"
    assert updates["llama"].metrics == {}
    fleet.sample(TASKS, step=2, deliver=arrived.extend).wait()
    assert fleet.lap().counts == {"llama": {"sample_late": 1, "update_late": 1, "steps_missed": 1}}
    Path("go-on").touch()
    while fleet._behind("llama"):
        fleet._pump()
    assert fleet.lap().counts == {"llama": {"rollouts_late": 2}}
    arrived.clear()
    fleet.sample(TASKS, step=3, deliver=arrived.extend).wait()
    assert len(arrived) == 6
    assert fleet.update([], no_credit(), step=3).wait() == {"qwen": "step 3", "llama": "step 3"}


@pytest.mark.slow
def test_without_a_limit_agents_wait_for_each_other(make: Make) -> None:
    fleet = make(dawdling())
    arrived: list[Completion] = []
    sampling = fleet.sample(TASKS, step=1, deliver=arrived.extend)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        fleet._pump()
    assert len(arrived) == 4
    Path("go-on").touch()
    sampling.wait()
    assert len(arrived) == 6


def failing() -> type:
    class FailingAgent(ScriptedAgent):
        """`llama` fails to learn until a file says that it is mended; states are files with the number of updates."""

        def update(self, *_: Any) -> Answer:
            if self.name == "llama" and not Path("mended").exists():
                raise MemoryError("no room")
            self.updates = getattr(self, "updates", 0) + 1
            return self._answered(self.updates, time.time(), ())

        def save(self, folder: Path) -> Answer:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "agent.json").write_text(str(getattr(self, "updates", 0)))
            return self._answered(None, time.time(), ())

        def load(self, folder: Path, weights_only: bool) -> Answer:
            self.updates = int((folder / "agent.json").read_text())
            return self._answered(None, time.time(), ())

    return FailingAgent


@pytest.mark.slow
def test_an_agent_that_fails_ends_the_run_where_nothing_else_is_said(make: Make) -> None:
    fleet = make(failing())
    with pytest.raises(AgentError, match=r"(?s)^agent llama .* in the phase 'update':.*MemoryError: no room"):
        fleet.update([], no_credit(), step=1).wait()


def test_an_agent_that_fails_is_let_go_and_comes_back_from_its_last_state(make: Make, tmp_path: Path) -> None:
    fleet = make(failing(), on_agent_failure="continue_without")
    fleet.save(tmp_path / "first", before=None)
    with pytest.warns(UserWarning, match=r"(?s)MemoryError: no room.*agent llama is let go"):
        updates = fleet.update([], no_credit(), step=1).wait()
    assert updates["qwen"] == 1
    assert updates["llama"].metrics == {}
    assert "no room" in fleet.absent["llama"]
    # Nothing of it had been saved before: then its folder says so, and it begins anew from that.
    fleet.save(tmp_path / "none", before=None)
    assert [file.name for file in (tmp_path / "none/llama").iterdir()] == ["absent.json"]
    assert fleet.lap().counts == {"llama": {"absent": 1}}
    # The others go on, and what is saved still holds it, as it was.
    assert fleet.update([], no_credit(), step=2).wait()["qwen"] == 2
    fleet.save(tmp_path / "second", before=tmp_path / "first")
    assert (tmp_path / "second/qwen/agent.json").read_text() == "2"
    assert (tmp_path / "second/llama/agent.json").read_text() == "0"
    assert "no room" in json.loads((tmp_path / "second/llama/absent.json").read_text())["reason"]
    assert fleet.rejoin(tmp_path / "second") == ["llama"]
    assert not fleet.absent
    Path("mended").touch()
    assert fleet.update([], no_credit(), step=3).wait() == {"qwen": 3, "llama": 1}


@pytest.mark.slow
def test_a_lost_agent_is_let_go_only_when_there_is_no_restart_and_a_failing_one_at_once(make: Make) -> None:
    fleet = impatient(make(hanging(), on_agent_failure="continue_without", restarted=True))
    with pytest.raises(AgentLostError, match="no progress"):
        fleet.update([], no_credit(), step=1).wait()
    failing_fleet = make(failing(), on_agent_failure="continue_without", restarted=True)
    with pytest.warns(UserWarning, match="agent llama is let go"):
        failing_fleet.update([], no_credit(), step=1).wait()


@pytest.mark.slow
def test_the_last_learner_cannot_be_let_go(make: Make) -> None:
    class AllFailAgent(ScriptedAgent):
        """Fails to learn, whoever it is."""

        def update(self, *_: Any) -> Answer:
            raise MemoryError("no room")

    fleet = make(AllFailAgent, on_agent_failure="continue_without")
    with pytest.warns(UserWarning, match="is let go"), pytest.raises(AgentError, match="no room"):
        fleet.update([], no_credit(), step=1).wait()


def test_a_disk_that_refuses_is_no_reason_to_let_an_agent_go(make: Make, tmp_path: Path) -> None:
    class RefusedAgent(ScriptedAgent):
        """`llama` cannot write its state."""

        def save(self, folder: Path) -> Answer:
            if self.name == "llama":
                raise RunDirectoryError("no room")
            return self._answered(None, time.time(), ())

    fleet = make(RefusedAgent, on_agent_failure="continue_without")
    with pytest.raises(RunDirectoryError, match="no room"):
        fleet.save(tmp_path / "first", before=None)
    assert not fleet.absent


def test_a_worker_that_dies_is_named_and_not_the_one_that_waited_for_it(make: Make) -> None:
    class PairedAgent(ScriptedAgent):
        """One of two workers dies, and the other one tells of an error at once."""

        def update(self, *_: Any) -> Answer:
            if self.name == "llama" and self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.name == "llama":
                raise RuntimeError("connection reset by peer")
            return self._answered("learned", time.time(), ())

    fleet = make(PairedAgent, workers=2)
    with pytest.raises(AgentLostError, match=r"^agent llama\.worker-1 .*its process died"):
        fleet.update([], no_credit(), step=1).wait()


# ---------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_a_run_goes_on_without_an_agent_and_takes_it_back(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = {"name": "ray", "restarts": 0, "on_agent_failure": "continue_without", "rejoin_every": 2}
    config = run_config(tiny_models, run, steps=6, execution=settings)

    def disturbed() -> Iterator[float]:
        for record in training_steps(config):
            yield record.metrics.get("agent/llama/absent", 0)
            if record.step == 1:
                os.kill(agents_of(psutil.Process(), run)["llama"], signal.SIGKILL)

    with pytest.warns(UserWarning, match="agent llama is") as caught:
        absent = list(disturbed())
    assert absent == [0, 1, 1, 1, 0, 0]
    assert [str(item.message) for item in caught if "is back" in str(item.message)] == [
        "agent llama is back, from its last saved state"
    ]
    lines = metric_lines(run)
    assert ["agent/llama/rows" in line for line in lines] == [True, False, False, False, True, True]
    assert [line["pair/qwen/llama/rows"] for line in lines] == [12, 0, 0, 0, 12, 12]
    assert [line["rollouts"] for line in lines] == [24, 12, 12, 12, 24, 24]
    # Its own updates: of step 1, 5 and 6.
    assert final_state(run)["llama"]["version"]["weights_version"] == 3
    assert sorted(folder.name for folder in (run / "agents").iterdir()) == ["llama", "qwen"]


@pytest.mark.slow
def test_a_run_that_was_started_again_takes_an_absent_agent_back(
    cluster: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = {"name": "ray", "restarts": 0, "on_agent_failure": "continue_without", "rejoin_every": 0}
    steps = training_steps(run_config(tiny_models, run, steps=4, execution=settings))
    next(steps)
    state = final_state(run)["llama"]
    os.kill(agents_of(psutil.Process(), run)["llama"], signal.SIGKILL)
    with pytest.warns(UserWarning, match="agent llama is let go"):
        next(steps)
    next(steps)
    steps.close()
    # What is kept of it is its state after step 1, whole.
    assert_identical(final_state(run)["llama"], state)
    train(run_config(tiny_models, run, steps=4))
    assert metric_lines(run)[-1]["pair/qwen/llama/rows"] > 0
    assert final_state(run)["llama"]["version"]["weights_version"] == 2
