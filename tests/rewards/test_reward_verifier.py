"""Isolation, time limits and outcomes: every text gets exactly one verdict and no failure becomes a silent 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from hacrl.errors import RewardError
from hacrl.rewards import RewardSpec, Verifier, check_any_returned, check_any_scored, load_rewards, verdict_metrics
from hacrl.types import Task, Verdict

SAMPLES = f"{Path(__file__).parent / 'sample_rewards.py'}"
LIMIT = 1.0


def task(name: str, answer: str = "right") -> Task:
    return Task(id=name, prompt="?", columns={"answer": answer, "other": 1})


@pytest.fixture(scope="module")
def verifier():
    rewards = load_rewards([f"{SAMPLES}:obedient"])
    with Verifier(rewards, workers=2, time_limit_s=LIMIT) as shared:
        yield shared


def judge(verifier: Verifier, *texts: str, tasks: list[Task] | None = None) -> list[Verdict]:
    return verifier.verify(tasks or [task("t")] * len(texts), texts)


def rewards_of(verdicts: list[Verdict]) -> list[float | None]:
    return [verdict.reward for verdict in verdicts]


def causes_of(verdicts: list[Verdict]) -> list[str | None]:
    return [verdict.unscored.get("obedient") for verdict in verdicts]


def test_texts_of_one_task_are_scored_in_one_call_wherever_they_stand(verifier):
    a, b = task("a"), task("b")
    verdicts = judge(verifier, "count", "count", "count", tasks=[a, b, a])
    assert rewards_of(verdicts) == [2.0, 1.0, 2.0]


def test_one_id_in_two_sources_is_two_tasks(verifier):
    verdicts = judge(verifier, "x", "x", tasks=[task("a", "x"), task("a", "y")])
    assert rewards_of(verdicts) == [1.0, 0.0]


def test_results_come_in_input_order_whatever_ends_first(verifier):
    tasks = [task(str(i), answer=str(i)) for i in range(6)]
    texts = ["slow 0.4", "1", "slow 0.2", "3", "no", "5"]
    assert rewards_of(judge(verifier, *texts, tasks=tasks)) == [0.25, 1.0, 0.25, 1.0, 0.0, 1.0]


def test_only_the_hanging_text_is_unscored(verifier):
    begun = time.monotonic()
    verdicts = judge(verifier, "right", "hang", "wrong")
    assert rewards_of(verdicts) == [1.0, None, 0.0]
    assert causes_of(verdicts) == [None, "timeout", None]
    assert f"{LIMIT:g} s" in verdicts[1].detail
    assert time.monotonic() - begun < 6 * LIMIT


def test_only_the_text_that_kills_the_worker_is_unscored(verifier):
    verdicts = judge(verifier, "right", "exit 3", "wrong")
    assert rewards_of(verdicts) == [1.0, None, 0.0]
    assert causes_of(verdicts) == [None, "crash", None]
    assert "3" in verdicts[1].detail


def test_a_worker_that_leaves_with_success_is_unscored_too(verifier):
    assert causes_of(judge(verifier, "right", "exit 0"))[1] in ("crash", "timeout")


def test_only_the_text_that_raises_is_unscored_and_scores_stay_aligned(verifier):
    verdicts = judge(verifier, "right", "raise unreadable", "wrong", "leave", "right")
    assert rewards_of(verdicts) == [1.0, None, 0.0, None, 1.0]
    assert causes_of(verdicts) == [None, "exception", None, "exception", None]
    assert "UnpicklableError: unreadable" in verdicts[1].detail
    assert "sample_rewards.py" in verdicts[1].detail


def test_none_nan_and_infinity_are_unscored(verifier):
    verdicts = judge(verifier, "score 1", "score None", "score 0", "score nan", "score inf", "score -inf")
    assert rewards_of(verdicts) == [1.0, None, 0.0, None, None, None]
    assert causes_of(verdicts) == [None, "none", None, "nan", "nan", "nan"]


@pytest.mark.parametrize(
    ("command", "got"),
    [("one", "1 scores, expected 3"), ("scalar", "a float"), ("tensor", "a Scalar"), ("word", "score 0 is a str")],
)
def test_anything_but_one_number_per_text_is_an_error_and_never_broadcast(verifier, command, got):
    with pytest.raises(RewardError, match=r"'obedient'") as raised:
        judge(verifier, command, "right", "right")
    assert got in str(raised.value)
    assert "3" in str(raised.value) or command == "word"


def test_a_function_that_always_raises_is_an_error_with_its_traceback(verifier):
    """Over all verdicts of a step, from however many calls."""
    raised_for = judge(verifier, "raise a", tasks=[task("a")]) + judge(verifier, "raise b", tasks=[task("b")])
    for check in (check_any_returned, check_any_scored):
        with pytest.raises(RewardError, match="every one of 2 texts") as raised:
            check(raised_for)
        assert "obedient" in str(raised.value)
        assert "sample_rewards.py" in str(raised.value)
        assert "UnpicklableError: b" in str(raised.value)
        check(raised_for + judge(verifier, "right"))
        check([])
    check_any_returned(judge(verifier, "hang", "exit 1", tasks=[task("a"), task("b")]) + raised_for)


def test_one_of_several_functions_that_always_raises_is_an_error() -> None:
    raised = Verdict(reward=1.0, scores={"a": 1.0, "b": None}, unscored={"b": "exception"}, detail="b: trace")
    with pytest.raises(RewardError, match=r"(?s)'b' raised .* 2 texts.*b: trace"):
        check_any_returned([raised, raised])
    check_any_returned([raised, Verdict(reward=2.0, scores={"a": 1.0, "b": 1.0})])
    check_any_returned([Verdict(reward=1.0, scores={"a": 1.0, "b": None}, unscored={"b": "timeout"}), raised])


def test_a_step_in_which_every_text_hangs_or_crashes_is_no_error(verifier):
    assert causes_of(judge(verifier, "hang", "exit 1", tasks=[task("a"), task("b")])) == ["timeout", "crash"]


def test_workers_are_light_single_threaded_and_reused(verifier):
    names = ("torch", "transformers", "datasets", "sympy")
    verdicts = judge(verifier, *(f"imported {name}" for name in names), "imported os", "environment OMP_NUM_THREADS")
    assert rewards_of(verdicts) == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    tasks = [task(str(i)) for i in range(12)]
    pids = {pid for _ in range(2) for pid in rewards_of(judge(verifier, *["pid"] * 12, tasks=tasks))}
    assert len(pids) <= 2
    assert os.getpid() not in pids


def test_it_works_from_a_thread_and_from_several(verifier):
    found: dict[int, list[float | None]] = {}

    def work(index: int) -> None:
        found[index] = rewards_of(judge(verifier, "right", "wrong", f"score {index}"))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: [1.0, 0.0, float(index)] for index in range(4)}


def test_crashes_and_hangs_of_one_thread_do_no_harm_to_another():
    """Two threads, parts of a step each. Whatever both have in the pool breaks it, as a worker that dies may do."""
    texts = {
        "first": ["right", "exit 3", "score 7", "exit 1", "hang", "wrong"],
        "second": ["score 2", "exit 5", "right", "slow 0.1", "score 3", "wrong"],
    }
    expected = {"first": [1.0, None, 7.0, None, None, 0.0], "second": [2.0, None, 1.0, 0.25, 3.0, 0.0]}
    found: dict[str, list[list[float | None]]] = {"first": [], "second": []}
    lost: list[str | None] = []

    def work(name: str) -> None:
        for part in range(2):
            tasks = [task(f"{name} {part} {index}") for index in range(6)]
            verdicts = judge(verifier, *texts[name], tasks=tasks)
            found[name].append(rewards_of(verdicts))
            lost.extend(causes_of(verdicts))

    def breaking(calls):
        if len(calls) == 1:
            return attempt(calls)
        manager = verifier._ready_pool()._pool_manager
        broken = threading.Timer(0.3, lambda: manager.handle_broken_pool(BrokenProcessPool("All workers expired")))
        broken.start()
        try:
            return attempt(calls)
        finally:
            broken.cancel()
            broken.join()

    with Verifier(load_rewards([f"{SAMPLES}:obedient"]), workers=2, time_limit_s=LIMIT) as verifier:
        attempt, verifier._attempt = verifier._attempt, breaking  # type: ignore[method-assign]
        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    assert found == {name: [expected[name]] * 2 for name in texts}
    assert set(lost) <= {None, "crash", "timeout"}


def test_calls_of_a_pool_that_another_thread_replaced_are_made_again():
    found: list[float | None] = []
    with Verifier(load_rewards([f"{SAMPLES}:obedient"]), workers=1, time_limit_s=LIMIT) as verifier:
        judge(verifier, "right")
        tasks = [task(str(index)) for index in range(6)]
        thread = threading.Thread(
            target=lambda: found.extend(rewards_of(judge(verifier, *["slow 0.3"] * 6, tasks=tasks))), daemon=True
        )
        thread.start()
        time.sleep(0.7)
        verifier._replace(verifier._pool)
        thread.join(timeout=25)
    assert found == [0.25] * 6


def test_a_call_behind_a_long_queue_of_another_thread_does_not_take_the_pool_for_dead(monkeypatch):
    monkeypatch.setattr("hacrl.rewards.verifier.STALL_MARGIN_S", 0.2)
    with Verifier(load_rewards([f"{SAMPLES}:obedient"]), workers=1, time_limit_s=LIMIT) as verifier:
        pid = judge(verifier, "pid")[0].reward
        tasks = [task(str(index)) for index in range(6)]
        thread = threading.Thread(target=lambda: judge(verifier, *["slow 0.5"] * 6, tasks=tasks), daemon=True)
        thread.start()
        time.sleep(0.2)
        assert judge(verifier, "pid")[0].reward == pid
        thread.join()


def test_a_call_that_is_made_alone_has_no_other_beside_it():
    """A good text is made again alone; meanwhile another thread breaks whatever pool it gets."""
    with Verifier(load_rewards([f"{SAMPLES}:obedient"]), workers=2, time_limit_s=LIMIT) as verifier:
        attempt, together, at_work = verifier._attempt, [], []

        def watched(calls):
            at_work.append(len(at_work))
            if calls[0].texts == ("right",):
                first = not together
                together.append(len(at_work))
                time.sleep(0.5)
                together[-1] = (len(at_work) - together[-1], first)
                return [None] if first else attempt(calls)
            return attempt(calls)

        verifier._attempt = watched
        thread = threading.Thread(
            target=lambda: [judge(verifier, f"score {number}") for number in range(30)], daemon=True
        )
        thread.start()
        assert rewards_of(judge(verifier, "right")) == [1.0]
        thread.join()
    (beside, first), (beside_alone, second) = together
    assert (first, second) == (True, False)
    assert beside > 0
    assert beside_alone == 0


@pytest.mark.parametrize("loaded", [False, True])
def test_close_ends_what_other_threads_wait_for(loaded):
    ended: list[BaseException] = []

    def work() -> None:
        try:
            judge(verifier, *["slow 0.5"] * 20, tasks=[task(str(index)) for index in range(20)])
        except RuntimeError as error:
            ended.append(error)

    verifier = Verifier(load_rewards([f"{SAMPLES}:obedient"]), workers=1, time_limit_s=LIMIT)
    thread = threading.Thread(target=work, daemon=True)
    if loaded:
        judge(verifier, "right")
    thread.start()
    time.sleep(0.3 if loaded else 0.05)
    verifier.close()
    thread.join(timeout=25)
    assert [str(error) for error in ended] == ["this Verifier has been closed"]


def test_workers_outlive_the_thread_that_made_the_verifier():
    made: list[Verifier] = []

    def make() -> None:
        made.append(Verifier(load_rewards([f"{SAMPLES}:obedient"]), workers=1, time_limit_s=LIMIT))
        made.append(judge(made[0], "pid")[0].reward)  # type: ignore[arg-type]

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    verifier, pid = made
    with verifier:
        time.sleep(0.3)
        assert judge(verifier, "pid")[0].reward == pid


def test_a_pool_whose_idle_worker_was_killed_recovers():
    with Verifier(load_rewards([f"{SAMPLES}:obedient"]), workers=1, time_limit_s=LIMIT) as verifier:
        pid = judge(verifier, "pid")[0].reward
        os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.5)
        assert rewards_of(judge(verifier, "right", "wrong")) == [1.0, 0.0]


def test_no_texts_wrong_lengths_and_use_after_close():
    verifier = Verifier(load_rewards([f"{SAMPLES}:plain"]), workers=1, time_limit_s=LIMIT)
    assert verifier.verify([], []) == []
    with pytest.raises(ValueError, match="1 tasks but 2 texts"):
        verifier.verify([task("t")], ["a", "b"])
    verifier.close()
    verifier.close()
    with pytest.raises(RuntimeError, match="closed"):
        judge(verifier, "x")


def test_columns_that_cannot_be_sent_are_named(verifier):
    bad = Task(id="t", prompt="?", columns={"answer": threading.Lock()})
    with pytest.raises(RewardError, match=r"answer \(lock\)"):
        verifier.verify([bad], ["x"])


def test_several_functions_of_every_kind_with_weights():
    """Async, arguments, callable object with answers, closure, TRL conversations; a hang in one spares the others."""
    bonus = 10.0

    def closure(prompts, completions, **columns):
        return [None if text == "yes" else bonus for text in completions]

    rewards = load_rewards(
        [
            RewardSpec(function=f"{SAMPLES}:asynchronous", weight=0.5, arguments={"bonus": 1.0}),
            RewardSpec(function=f"{SAMPLES}:scorer"),
            RewardSpec(function=closure, weight=0.0),
            RewardSpec(function=f"{SAMPLES}:group_relative", weight=-1.0, name="longest"),
            f"{SAMPLES}:obedient",
        ]
    )
    assert [reward.name for reward in rewards.rewards] == ["asynchronous", "scorer", "closure", "longest", "obedient"]
    with Verifier(rewards, workers=1, time_limit_s=LIMIT) as verifier:
        first, second, third = judge(verifier, "yes", "", "hang", tasks=[task("t", "yes")] * 3)
    assert first.scores == {"asynchronous": 4.0, "scorer": 1.0, "closure": None, "longest": 0.0, "obedient": 1.0}
    assert first.reward == 0.5 * 4 + 1 + 1
    assert first.unscored == {"closure": "none"}
    assert (first.answer, first.parsed) == ("yes", True)
    assert (second.answer, second.parsed) == (None, False)
    assert third.scores == {"asynchronous": 5.0, "scorer": 0.0, "closure": 10.0, "longest": 1.0, "obedient": None}
    assert third.reward == 0.5 * 5 + 0 - 1
    assert third.unscored == {"obedient": "timeout"}


def test_messages_reach_the_function_as_trl_gives_them():
    chat = Task(id="t", prompt=({"role": "user", "content": "hi"},))
    with Verifier(load_rewards([f"{SAMPLES}:conversation"]), workers=1, time_limit_s=LIMIT) as verifier:
        assert rewards_of(verifier.verify([chat, chat], ["yes", "no"])) == [1.0, 0.0]


SCRIPT = """
    import sys
    print("ran", flush=True)
    offset = 2.0
    def mine(prompts, completions, **columns):
        return [offset + len(text) for text in completions]
    from hacrl.rewards import Verifier, load_rewards
    from hacrl.types import Task
    with Verifier(load_rewards([mine, lambda prompts, completions: [0.5] * len(completions)]),
                  workers=1, time_limit_s=5) as verifier:
        print(verifier.verify([Task(id="t", prompt="?")], ["abc"])[0].scores)
"""


def test_a_script_without_a_guard_runs_once_and_may_use_its_own_functions(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["ran", "{'mine': 5.0, 'lambda': 0.5}"], done.stderr


ORPHAN = """
    import sys
    from hacrl.rewards import Verifier, load_rewards
    from hacrl.types import Task
    tasks = [Task(id=str(i), prompt="?", columns={"answer": "x"}) for i in range(6)]
    verifier = Verifier(load_rewards([sys.argv[1]]), workers=2, time_limit_s=60)
    print({int(v.reward) for v in verifier.verify(tasks, ["pid"] * 6)}, flush=True)
    verifier.verify(tasks, ["hang"] * 6)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="busy workers are tied to the parent on Linux only")
def test_workers_die_with_a_parent_killed_by_signal_9(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(ORPHAN))
    parent = subprocess.Popen([sys.executable, script, f"{SAMPLES}:obedient"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = eval(parent.stdout.readline())
    time.sleep(0.5)
    assert pids
    assert all(_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        # The state follows the name in parentheses; Z is dead but not yet collected.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_metrics_are_the_trained_quantity_and_count_every_loss():
    verdicts = [
        Verdict(reward=1.0, scores={"a": 1.0, "b": 0.0}, answer="5", parsed=True),
        Verdict(reward=0.0, scores={"a": 0.0, "b": 1.0}, answer=None, parsed=False),
        Verdict(reward=1.0, scores={"a": 1.0, "b": None}, unscored={"b": "timeout"}, answer="5", parsed=True),
        Verdict(reward=None, scores={"a": None, "b": 0.5}, unscored={"a": "nan"}),
        Verdict(reward=None, scores={"a": None, "b": None}, unscored={"a": "crash", "b": "timeout"}),
    ]
    assert verdict_metrics(verdicts) == {
        "reward/texts": 5,
        "reward/scored": 3,
        "reward/unscored": 2,
        "reward/partial": 1,
        "reward/unscored/none": 0,
        "reward/unscored/nan": 1,
        "reward/unscored/exception": 0,
        "reward/unscored/timeout": 2,
        "reward/unscored/crash": 1,
        "reward/mean": pytest.approx(2 / 3),
        "reward/function/a": pytest.approx(2 / 3),
        "reward/function/a/scored": 3,
        "reward/function/b": 0.5,
        "reward/function/b/scored": 3,
        "reward/extracted": 3,
        "reward/parse_failures": 1,
        "reward/parse_failure_rate": pytest.approx(1 / 3),
    }
    assert verdict_metrics([])["reward/texts"] == 0


def test_a_group_with_a_missing_score_keeps_the_others(verifier):
    assert rewards_of(judge(verifier, "score 0", "score 1", "score None", "score 1")) == [0.0, 1.0, None, 1.0]
    assert verdict_metrics(judge(verifier, "score 1", "score None", "score 0"))["reward/mean"] == 0.5
