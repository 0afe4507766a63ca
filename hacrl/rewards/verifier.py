"""Scores texts in worker processes, with a hard time limit that no reward function can escape."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from types import TracebackType

from pebble import ProcessExpired, ProcessPool

from hacrl.errors import RewardError
from hacrl.rewards import worker
from hacrl.rewards.reward_set import RewardSet
from hacrl.rewards.verdict import build_verdict
from hacrl.rewards.worker import Call, Outcome
from hacrl.rewards.worker_context import WorkerContext
from hacrl.types import Task, Verdict

# A worker may import large libraries before its first call; beyond this it is taken for dead.
START_LIMIT_S = 300.0
# No call may take longer than its limit; if none ends for this much more, the pool has lost track of its workers.
STALL_MARGIN_S = 30.0
# How often a thread looks whether the pool that it waits for has broken: calls in its queue are then never heard of.
LOOK_EVERY_S = 0.5


class Verifier:
    """A pool of scoring processes for one reward set. Thread-safe; use it as a context manager.

    The texts of one task go to a reward function in one call, so functions that compare them work. A call that times
    out, kills its worker or raises is repeated text by text, each with the full limit, and only the texts that fail
    alone stay unscored; a function that compares texts then sees one at a time. (A worker that leaves with exit code 0
    in the middle of a call is missed only when the time is up, and counts as a timeout.)

    Several threads may verify at the same time and share the processes. Where the whole pool breaks, every call that
    was in it is repeated with nothing beside it, and the other threads wait for that.

    Args:
        rewards: from `load_rewards`.
        workers: number of processes. They start at once and serve until `close`.
        time_limit_s: wall-clock seconds for each call; the worker is killed when it is up.
    """

    def __init__(self, rewards: RewardSet, *, workers: int, time_limit_s: float) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; at least 1 is needed")
        if not time_limit_s > 0:
            raise ValueError(f"time_limit_s is {time_limit_s}; it must be positive")
        self.rewards = rewards
        self.workers = workers
        self.time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._closed = False
        self._turns = threading.Condition()
        self._sharing, self._alone = 0, False
        self._last_end = time.monotonic()
        # Linux kills a worker when the THREAD that started it ends, so one that lives as long as the pool starts them.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verifier")
        self._pool, self._ready = self._start()
        # Calls of `submit`: what they wait for are the workers, so a few more than these keep all of them busy.
        self._submitted = ThreadPoolExecutor(max_workers=workers + 3, thread_name_prefix="verifying")

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops the workers. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._pool.stop()
            self._pool.join()
            self._starter.shutdown()
        self._submitted.shutdown(cancel_futures=True)

    def submit(self, tasks: Sequence[Task], texts: Sequence[str]) -> Future[list[Verdict]]:
        """`verify` in the background."""
        return self._submitted.submit(self.verify, tasks, texts)

    def verify(self, tasks: Sequence[Task], texts: Sequence[str]) -> list[Verdict]:
        """One verdict per text, in order; `tasks[i]` is the task that `texts[i]` answers.

        Raises:
            RewardError: a function returned anything but one score per text, or could not be loaded in a worker. (One
                that raises leaves texts unscored here; see `check_any_returned` for all verdicts of a step.)
        """
        if len(tasks) != len(texts):
            raise ValueError(f"{len(tasks)} tasks but {len(texts)} texts")
        if self._closed:
            raise RuntimeError("this Verifier has been closed")
        groups = _group(tasks)
        jobs = [(r, group) for r in range(len(self.rewards.rewards)) for group in groups]
        outcomes = self._run([self._call(r, tasks, texts, group) for r, group in jobs])
        # Per function and text: an outcome with exactly one entry.
        single: dict[tuple[int, int], Outcome] = {}
        again: list[tuple[int, int]] = []
        for (r, group), outcome in zip(jobs, outcomes, strict=True):
            self._check(r, outcome)
            if outcome.kind != "scored" and len(group) > 1:
                again += [(r, position) for position in group]
            else:
                single.update({(r, position): _only(outcome, i) for i, position in enumerate(group)})
        for key, outcome in zip(again, self._run([self._call(r, tasks, texts, [i]) for r, i in again]), strict=True):
            self._check(key[0], outcome)
            single[key] = outcome
        count = len(self.rewards.rewards)
        return [
            build_verdict(self.rewards.rewards, [single[r, position] for r in range(count)])
            for position in range(len(texts))
        ]

    def _call(self, reward: int, tasks: Sequence[Task], texts: Sequence[str], group: Sequence[int]) -> Call:
        task = tasks[group[0]]
        columns = self.rewards.rewards[reward].used_columns(task.columns)
        return Call(reward=reward, prompt=task.prompt, texts=tuple(texts[i] for i in group), columns=columns)

    def _check(self, reward: int, outcome: Outcome) -> None:
        name = self.rewards.rewards[reward].name
        if outcome.kind == "contract":
            raise RewardError(f"reward {name!r} {outcome.detail}; give one number (or None) per completion")
        if outcome.kind == "load":
            raise RewardError(f"reward {name!r} could not be loaded in a worker process:\n{outcome.detail}")

    def _run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Outcomes in the order of the calls."""
        if not calls:
            return []
        outcomes: list[Outcome] = []
        with self._turn(alone=False):
            attempted = self._attempt(calls)
        for call, outcome in zip(calls, attempted, strict=True):
            if outcome is None:
                # The pool broke, and any call may have done it. Alone, a call can break it for itself only.
                with self._turn(alone=True):
                    outcome = self._attempt([call])[0]
            outcomes.append(outcome or Outcome(kind="crash", detail="the worker process died"))
        return outcomes

    @contextmanager
    def _turn(self, *, alone: bool) -> Iterator[None]:
        """Use the pool beside other threads, or alone: then none begins, and those that have begun end first."""
        with self._turns:
            self._turns.wait_for(lambda: not self._alone)
            if alone:
                self._alone = True
            else:
                self._sharing += 1
        try:
            if alone:
                with self._turns:
                    self._turns.wait_for(lambda: self._sharing == 0)
            yield
        finally:
            with self._turns:
                if alone:
                    self._alone = False
                else:
                    self._sharing -= 1
                self._turns.notify_all()

    def _attempt(self, calls: Sequence[Call]) -> list[Outcome | None]:
        """Outcomes of calls made side by side; None where the pool broke before one was known."""
        outcomes: list[Outcome | None] = [None] * len(calls)
        messages = [self._pickled(call) for call in calls]
        pool = self._ready_pool()
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        futures: list[Future[Outcome]] = []
        begun = time.monotonic()
        for position, message in enumerate(messages):
            try:
                future = pool.schedule(worker.run, args=(message,), timeout=self.time_limit_s)
            except RuntimeError:
                # The pool has just broken.
                break
            futures.append(future)
            future.add_done_callback(partial(self._tell, done, position))
        left = len(futures)
        while left:
            # Asked before the queue is: what ended until now is in the queue then.
            works = pool.active
            try:
                position = done.get(timeout=LOOK_EVERY_S if works else 0)
            except queue.Empty:
                # Calls of other threads stand in the same queue: as long as any ends, there is progress.
                waited = time.monotonic() - max(begun, self._last_end)
                if works and waited < self.time_limit_s + STALL_MARGIN_S:
                    continue
                break
            outcomes[position] = self._outcome(futures[position])
            left -= 1
        if None in outcomes:
            self._replace(pool)
        return outcomes

    def _tell(self, done: queue.SimpleQueue[int], position: int, _: Future[Outcome]) -> None:
        self._last_end = time.monotonic()
        done.put(position)

    def _pickled(self, call: Call) -> bytes:
        try:
            return pickle.dumps(call)
        except Exception as error:
            name = self.rewards.rewards[call.reward].name
            columns = ", ".join(f"{column} ({type(value).__name__})" for column, value in call.columns.items())
            raise RewardError(
                f"reward {name!r}: a task's columns cannot be pickled for a worker ({type(error).__name__}: {error}); "
                f"they are {columns}; use plain data"
            ) from error

    def _outcome(self, future: Future[Outcome]) -> Outcome | None:
        try:
            return future.result()
        except TimeoutError:
            return Outcome(kind="timeout", detail=f"no score within {self.time_limit_s:g} s")
        except ProcessExpired as error:
            return Outcome(kind="crash", detail=f"the worker process died with exit code {error.exitcode}")
        except (BrokenProcessPool, CancelledError):
            return None

    def _start(self) -> tuple[ProcessPool, Future[str | None]]:
        pool = ProcessPool(
            max_workers=self.workers,
            initializer=worker.start,
            initargs=(self.rewards.payload, os.getpid()),
            context=WorkerContext(),
        )
        return pool, self._starter.submit(pool.schedule, worker.loading_error).result()

    def _ready_pool(self) -> ProcessPool:
        """The pool, once a worker has loaded the reward functions."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this Verifier has been closed")
            if not self._pool.active:
                # Broken while it was idle: one of its workers was killed from outside.
                self._start_another()
            pool, ready = self._pool, self._ready
        begun = time.monotonic()
        while not ready.done() and pool.active and time.monotonic() - begun < START_LIMIT_S:
            wait([ready], timeout=LOOK_EVERY_S)
        try:
            error = ready.result(timeout=0)
        except (BrokenProcessPool, ProcessExpired):
            error = "the worker process died while it loaded them"
        except TimeoutError:
            error = f"they were not loaded within {START_LIMIT_S:g} s"
        if error is not None and self._closed:
            raise RuntimeError("this Verifier has been closed")
        if error is not None:
            names = ", ".join(repr(reward.name) for reward in self.rewards.rewards)
            raise RewardError(
                f"reward {names}: loading in a worker process failed; it must load there as here:\n{error}"
            )
        return pool

    def _replace(self, broken: ProcessPool) -> None:
        with self._lock:
            # Another thread may have been quicker.
            if not self._closed and self._pool is broken:
                self._start_another()

    def _start_another(self) -> None:
        broken = self._pool
        self._pool, self._ready = self._start()
        broken.stop()
        broken.join()


def _group(tasks: Sequence[Task]) -> list[list[int]]:
    """Positions of each task, in order of first appearance."""
    groups: dict[str, list[list[int]]] = {}
    ordered: list[list[int]] = []
    for position, task in enumerate(tasks):
        same_id = groups.setdefault(task.id, [])
        # Two sources may use one id, so the id alone does not make them one task.
        group = next((g for g in same_id if tasks[g[0]] is task or tasks[g[0]] == task), None)
        if group is None:
            group = []
            same_id.append(group)
            ordered.append(group)
        group.append(position)
    return ordered


def _only(outcome: Outcome, index: int) -> Outcome:
    """The part of an outcome that belongs to one of its texts."""
    if outcome.kind != "scored":
        return outcome
    answers = None if outcome.answers is None else (outcome.answers[index],)
    return Outcome(kind="scored", scores=(outcome.scores[index],), answers=answers)
