"""Scores texts in worker processes, with a hard time limit that no reward function can escape."""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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


class Verifier:
    """A pool of scoring processes for one reward set. Thread-safe; use it as a context manager.

    The texts of one task go to a reward function in one call, so functions that compare them work. A call that times
    out, kills its worker or raises is repeated text by text, each with the full limit, and only the texts that fail
    alone stay unscored; a function that compares texts then sees one at a time. (A worker that leaves with exit code 0
    in the middle of a call is missed only when the time is up, and counts as a timeout.)

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
            RewardError: a function returned anything but one score per text, could not be loaded in a worker, or
                raised for every single text of this call, which makes it a fault of the function.
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
        for r, reward in enumerate(self.rewards.rewards):
            mine = [single[r, position] for position in range(len(texts))]
            if mine and all(outcome.kind == "exception" for outcome in mine):
                raise RewardError(
                    f"reward {reward.name!r} raised an exception for every one of {len(mine)} texts, so the fault lies "
                    f"in the function; the last one:\n{mine[-1].detail}"
                )
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
        outcomes: list[Outcome] = []
        for call, outcome in zip(calls, self._attempt(calls), strict=True):
            if outcome is None:
                # The pool broke, and any call may have done it. Alone, a call can break it for itself only.
                outcome = self._attempt([call])[0]
            outcomes.append(outcome or Outcome(kind="crash", detail="the worker process died"))
        return outcomes

    def _attempt(self, calls: Sequence[Call]) -> list[Outcome | None]:
        """Outcomes of calls made side by side; None where the pool broke before one was known."""
        outcomes: list[Outcome | None] = [None] * len(calls)
        if not calls:
            return outcomes
        pool = self._ready_pool()
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        futures: list[Future[Outcome]] = []
        for position, call in enumerate(calls):
            message = self._pickled(call)
            try:
                future = pool.schedule(worker.run, args=(message,), timeout=self.time_limit_s)
            except RuntimeError:
                # The pool has broken, perhaps long ago: an idle worker was killed from outside.
                break
            futures.append(future)
            future.add_done_callback(partial(_tell, done, position))
        for _ in futures:
            try:
                position = done.get(timeout=self.time_limit_s + STALL_MARGIN_S)
            except queue.Empty:
                break
            outcomes[position] = self._outcome(futures[position])
        if None in outcomes:
            self._replace(pool)
        return outcomes

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
            pool, ready = self._pool, self._ready
        try:
            error = ready.result(timeout=START_LIMIT_S)
        except (BrokenProcessPool, ProcessExpired):
            error = "the worker process died while it loaded them"
        except TimeoutError:
            error = f"they were not loaded within {START_LIMIT_S:g} s"
        if error is not None:
            names = ", ".join(repr(reward.name) for reward in self.rewards.rewards)
            raise RewardError(
                f"reward {names}: loading in a worker process failed; it must load there as here:\n{error}"
            )
        return pool

    def _replace(self, broken: ProcessPool) -> None:
        with self._lock:
            # Another thread may have been quicker.
            if self._closed or self._pool is not broken:
                return
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


def _tell(done: queue.SimpleQueue[int], position: int, _: Future[Outcome]) -> None:
    done.put(position)


def _only(outcome: Outcome, index: int) -> Outcome:
    """The part of an outcome that belongs to one of its texts."""
    if outcome.kind != "scored":
        return outcome
    answers = None if outcome.answers is None else (outcome.answers[index],)
    return Outcome(kind="scored", scores=(outcome.scores[index],), answers=answers)
