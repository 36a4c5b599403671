"""The driver's side of Dask: a few tasks per worker under way, and what becomes of those whose worker dies."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import CancelledError, KilledWorker
from distributed.comm.core import CommClosedError

from featcache.compute import failure_of
from featcache.errors import ComputeError, FeatcacheError, IncompleteError
from featcache.loading.batches import Batches, Ints
from featcache.parallel.account import Account
from featcache.parallel.plan import (
    PLAN,
    Task,
    TaskTakenError,
    hashes_of,
    load_batches,
    missing_from,
    save_batches,
    take_back,
)
from featcache.parallel.worker import Job, Progress, finish_work, run_task
from featcache.store.part_writer import close_after

if TYPE_CHECKING:
    from distributed import Client, Future

TASKS_UNDER_WAY = 2  # of each worker: one that runs, and one that it need not wait for
PATIENCE_S = 60.0  # for a worker that the scheduler has lost to be through with its batch
DEATHS_IN_VAIN = 20  # of each worker, with nothing computed in between
REPLACE_AFTER_S = 30.0  # Dask gives up a lost worker after 15 s, then it starts another if asked to
_log = logging.getLogger("featcache")


class Crew:
    """Has tasks done by the workers of a Dask client.

    Args:
        client: the client.
        workers: how many workers there should be.
        job: what is the same for all tasks.
        ids: of the whole dataset.
        account: is told what was done and what failed.
        tend: called about once a second.
    """

    def __init__(
        self,
        client: Client,
        workers: int,
        job: Job,
        ids: Sequence[str],
        account: Account,
        tend: Callable[[], None],
    ) -> None:
        self._client, self._workers, self._job, self._ids = client, workers, job, ids
        self._account, self._tend = account, tend
        self._topic = job.directory.name
        self._numbers = count()
        self._waiting: deque[Task] = deque()
        self._under_way: dict[str, Task] = {}
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # futures that are done, and progress
        self._deaths: Counter[int] = Counter()  # of workers, by the utterance that they were at
        self._in_vain = 0  # workers' deaths since anything was computed
        self._there = workers  # how many workers there are
        self._checked_at = self._complete_at = time.monotonic()

    def work(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have all ranges of the plan computed; whatever happens, the workers' parts are sealed in the end."""
        self._waiting += [Task(next(self._numbers), PLAN, start, stop) for start, stop in ranges]
        self._client.subscribe_topic(self._topic, self._receive)  # type: ignore[no-untyped-call]
        error: BaseException | None = None
        try:
            while self._waiting or self._under_way:
                self._submit()
                self._handle_events()
                self._look_after_workers()
                self._tend()
        except BaseException as failure:
            error = failure
            raise
        finally:
            close_after(error, self._finish)

    def _receive(self, event: tuple[float, Sequence[int]]) -> None:
        self._events.put(Progress(*event[1]))

    def _key(self, number: int) -> str:
        return f"{self._topic}-{number}"

    def _submit(self) -> None:
        while self._waiting and len(self._under_way) < TASKS_UNDER_WAY * max(self._there, 1):
            task = self._waiting.popleft()
            key = self._key(task.number)
            self._under_way[key] = task
            future = self._client.submit(run_task, task, self._topic, key=key, pure=False)
            future.add_done_callback(self._events.put)  # type: ignore[no-untyped-call]

    def _handle_events(self) -> None:
        try:
            event = self._events.get(timeout=1)
            while True:
                if not isinstance(event, Progress):
                    self._handle(event)
                elif self._key(event.task) in self._under_way:
                    self._in_vain = 0
                    self._account.update(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _handle(self, future: Future[Any]) -> None:
        task = self._under_way.pop(str(future.key))
        try:
            progress, failures = future.result()
        except (KilledWorker, TaskTakenError) as error:
            self._account.drop(task.number)
            self._lost(task, error)
        except (CancelledError, CommClosedError) as error:
            raise IncompleteError(f"the connection to Dask's scheduler was lost: {error}") from error
        else:
            self._in_vain = 0
            self._account.end(progress, failures)

    def _lost(self, task: Task, error: Exception) -> None:
        """Have done what is left of a task whose worker has died."""
        position = take_back(self._job.directory, task, PATIENCE_S)
        if position is None:  # it was waiting there, somebody else was at work
            self._waiting.append(task._replace(number=next(self._numbers)))
        else:
            batches = load_batches(self._job.directory, task.name)[task.start : task.stop]
            at = np.repeat(np.arange(task.start, task.stop) == position, batches.sizes)
            missing = missing_from(self._job.path, hashes_of([self._ids[index] for index in batches.items.tolist()]))
            self._account.end(Progress(-1, utterances=int((~missing).sum())))
            self._again(_some_of(batches, missing & ~at), whole=True)
            self._again(self._suspected(batches.items[missing & at], error), whole=False)
        self._in_vain = 0 if position is not None and position >= 0 else self._in_vain + 1
        if self._in_vain > DEATHS_IN_VAIN * self._workers:
            raise IncompleteError(f"workers die before they compute anything, the last one so: {error}") from error

    def _suspected(self, indices: Ints, error: Exception) -> Batches:
        """Take note of utterances that may have killed their worker; returns those to be tried again, each alone."""
        again = []
        for index in indices.tolist():
            self._deaths[index] += 1
            if self._deaths[index] <= self._job.retries:
                again.append(index)
                continue
            id = self._ids[index]
            failure = ComputeError(
                f"the worker that computed {id!r} died, {self._deaths[index]} times: out of memory, or a crash in a "
                "library; its log may say more"
            )
            if not self._job.skip_failures:
                raise failure from error
            self._account.end(Progress(-1, utterances=1, failed=1), [failure_of(id, failure)])
        return Batches(again, np.arange(len(again) + 1))

    def _again(self, batches: Batches, whole: bool) -> None:
        """Have batches done, as one task or each as its own."""
        if not len(batches.items):
            return
        number = next(self._numbers)
        name = f"again-{number:06d}"
        save_batches(self._job.directory, name, batches)
        ranges = [(0, len(batches))] if whole else [(k, k + 1) for k in range(len(batches))]
        self._waiting += [Task(next(self._numbers), name, start, stop) for start, stop in ranges]

    def _look_after_workers(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < 1:
            return
        self._checked_at = now
        self._there = len(self._client.nthreads())  # type: ignore[no-untyped-call]
        if self._there >= self._workers:
            self._complete_at = now
        elif now - self._complete_at > REPLACE_AFTER_S:
            _log.warning("%d of %d workers are there; asking for the others", self._there, self._workers)
            self._complete_at = now
            if self._client.cluster is not None:
                self._client.cluster.scale(self._workers)

    def _finish(self) -> None:
        """End what still runs, and have the workers seal their parts."""
        if self._under_way:
            self._client.cancel(list(self._under_way), force=True)  # type: ignore[no-untyped-call]
        for result in self._client.run(finish_work, on_error="return").values():
            if isinstance(result, FeatcacheError):  # another is that of a worker which dies now: its part is recovered
                raise result


def _some_of(batches: Batches, wanted: Any) -> Batches:
    """Leave utterances out of batches, and batches that have none left."""
    kept = np.append(0, np.cumsum(wanted))[batches.ends - batches.ends[0]]
    return Batches(batches.items[wanted], np.unique(kept))
