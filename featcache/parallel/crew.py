"""The driver's side of Dask: a few tasks per worker under way, and what becomes of those whose worker dies."""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import CancelledError, KilledWorker
from distributed.comm.core import CommClosedError

from featcache.compute import failure_of
from featcache.errors import ComputeError, IncompleteError
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
from featcache.parallel.staff import Staff
from featcache.parallel.worker import Job, Progress, run_task
from featcache.store.closing import closed_after

if TYPE_CHECKING:
    from distributed import Future

TASKS_UNDER_WAY = 2  # of each worker: one that runs, and one that it need not wait for
PATIENCE_S = 60.0  # for a worker that the scheduler has lost to be through with its batch
DEATHS_IN_VAIN = 20  # of each worker, with nothing computed in between


class Crew:
    """Has tasks done by workers.

    Args:
        staff: the workers.
        job: what is the same for all tasks.
        ids: of the whole dataset.
        account: is told what was done and what failed.
        tend: called about once a second.
    """

    def __init__(
        self,
        staff: Staff,
        job: Job,
        ids: Sequence[str],
        account: Account,
        tend: Callable[[], None],
    ) -> None:
        self._staff, self._job, self._ids = staff, job, ids
        self._account, self._tend = account, tend
        self._topic = job.directory.name
        self._numbers = count()
        self._waiting: deque[Task] = deque()
        self._under_way: dict[str, Task] = {}
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # futures that are done, and progress
        self._deaths: Counter[int] = Counter()  # of workers, by the utterance that they were at
        self._in_vain = 0  # workers' deaths since anything was computed

    def work(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have all ranges of the plan computed; whatever happens, the workers' parts are sealed in the end."""
        self._waiting += [Task(next(self._numbers), PLAN, start, stop) for start, stop in ranges]
        client = self._staff.client
        client.subscribe_topic(self._topic, self._receive)  # type: ignore[no-untyped-call]
        with closed_after(partial(self._staff.finish, self._under_way)):
            while self._waiting or self._under_way:
                self._submit()
                self._handle_events()
                self._staff.look_after()
                self._tend()
        client.unsubscribe_topic(self._topic)  # type: ignore[no-untyped-call]

    def _receive(self, event: tuple[float, Sequence[int]]) -> None:
        self._events.put(Progress(*event[1]))

    def _key(self, number: int) -> str:
        return f"{self._topic}-{number}"

    def _submit(self) -> None:
        while self._waiting and len(self._under_way) < TASKS_UNDER_WAY * max(self._staff.there, 1):
            task = self._waiting.popleft()
            key = self._key(task.number)
            self._under_way[key] = task
            future = self._staff.client.submit(run_task, task, self._topic, key=key, pure=False)
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
            outcome = future.result()
        except KilledWorker as error:
            outcome = error
        except (CancelledError, CommClosedError) as error:
            raise IncompleteError(f"the connection to Dask's scheduler was lost: {error}") from error
        if isinstance(outcome, KilledWorker | TaskTakenError):
            self._account.drop(task.number)
            self._lost(task, outcome)
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            self._in_vain = 0
            self._account.end(*outcome)

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
        if self._in_vain > DEATHS_IN_VAIN * max(self._staff.there, 1):
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


def _some_of(batches: Batches, wanted: Any) -> Batches:
    """Leave utterances out of batches, and batches that have none left."""
    kept = np.append(0, np.cumsum(wanted))[batches.ends - batches.ends[0]]
    return Batches(batches.items[wanted], np.unique(kept))
