"""The driver's side of an extraction on workers: what becomes of tasks whose worker is lost."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from featcache._closing import closed_after
from featcache.cluster.dispatch import Dispatch, Lost
from featcache.cluster.workers import Staff
from featcache.errors import ComputeError, IncompleteError
from featcache.extraction.failures import failure_of
from featcache.extraction.progress import Account, Progress
from featcache.extraction.workers.plan import (
    PLAN,
    Task,
    hashes_of,
    load_batches,
    missing_from,
    save_batches,
)
from featcache.extraction.workers.tasks import Job, run_task
from featcache.samplers.batches import Batches

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
        self._dispatch = Dispatch[Task](staff, job.directory, run_task, staff.env)
        self._reports: queue.SimpleQueue[tuple[float, Sequence[int]]] = queue.SimpleQueue()
        self._deaths: Counter[int] = Counter()  # of workers, by the utterance that they were at
        self._in_vain = 0  # workers' deaths since anything was computed
        self._lists = 0  # of batches that are to be done again

    def work(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have all ranges of the plan computed.

        Whatever happens, the workers' parts are sealed in the end.
        """
        for start, stop in ranges:
            self._dispatch.add(Task(PLAN, start, stop))
        client, topic = self._staff.client, self._staff.env
        client.subscribe_topic(topic, self._reports.put)  # type: ignore[no-untyped-call]
        self._account.begin()
        with (
            closed_after(partial(client.unsubscribe_topic, topic)),
            closed_after(self._dispatch.finish),
        ):
            for task, outcome in self._dispatch.outcomes(self._between):
                if isinstance(outcome, Lost):
                    self._account.drop(task.number)
                    self._lost(task, outcome)
                elif isinstance(outcome, Exception):
                    raise outcome
                else:
                    self._in_vain = 0
                    self._account.end(*outcome)

    def _between(self) -> None:
        while not self._reports.empty():
            progress = Progress(*self._reports.get()[1])
            if self._dispatch.is_under_way(progress.task):
                self._in_vain = 0
                self._dispatch.heard()
                self._account.update(progress)
        self._tend()

    def _lost(self, task: Task, lost: Lost) -> None:
        """Have done what is left of a task whose worker has died."""
        if lost.batch is None:  # it was waiting there, another was at work
            self._dispatch.add(task)
        else:
            batches = load_batches(self._job.directory, task.name)[task.start : task.stop]
            at = np.repeat(np.arange(task.start, task.stop) == lost.batch, batches.sizes)
            missing = missing_from(
                self._job.path, hashes_of([self._ids[index] for index in batches.items.tolist()])
            )
            self._account.found(int((~missing).sum()))
            self._again(_some_of(batches, missing & ~at), whole=True)
            suspected: list[int] = batches.items[missing & at].tolist()
            again = suspected if len(suspected) > 1 else self._accused(suspected, lost.error)
            self._again(Batches(again, np.arange(len(again) + 1)), whole=False)
        self._in_vain = 0 if lost.batch is not None and lost.batch >= 0 else self._in_vain + 1
        if self._in_vain > DEATHS_IN_VAIN * max(len(self._staff.addresses), 1):
            raise IncompleteError(
                f"workers die before they compute anything, the last one so: {lost.error}"
            ) from lost.error

    def _accused(self, alone: list[int], error: Exception) -> list[int]:
        """Take note of an utterance that was alone when its worker died.

        Returns it if it is to be tried again.
        """
        for index in alone:
            self._deaths[index] += 1
            if self._deaths[index] <= self._job.retries:
                continue
            id = self._ids[index]
            times = "once" if self._deaths[index] == 1 else f"{self._deaths[index]} times"
            failure = ComputeError(
                f"the worker that computed {id!r} died {times}: out of memory, or a crash in a "
                "library; its log may "
                "say more"
            )
            if not self._job.skip_failures:
                raise failure from error
            self._account.found(0, [failure_of(id, failure)])
            return []
        return alone

    def _again(self, batches: Batches, whole: bool) -> None:
        """Have batches done, as one task or each as its own."""
        if not len(batches.items):
            return
        self._lists += 1
        name = f"again-{self._lists:06d}"
        save_batches(self._job.directory, name, batches)
        for start, stop in (
            [(0, len(batches))] if whole else [(k, k + 1) for k in range(len(batches))]
        ):
            self._dispatch.add(Task(name, start, stop))


def _some_of(batches: Batches, wanted: Any) -> Batches:
    """Leave utterances out of batches, and batches that have none left."""
    kept = np.append(0, np.cumsum(wanted))[batches.ends - batches.ends[0]]
    return Batches(batches.items[wanted], np.unique(kept))
