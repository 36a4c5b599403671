"""`Driver`: gives tasks to workers, and requeues those whose worker is lost."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from featcache._closing import closed_after
from featcache.cluster.attempts import notes_on
from featcache.cluster.dispatch import Dispatch, LostAttempt
from featcache.cluster.workers import Workers
from featcache.errors import ComputeError, IncompleteError
from featcache.extraction.failures import failure_of
from featcache.extraction.id_numbers import IdNumbers
from featcache.extraction.progress import ProgressBar, TaskProgress
from featcache.extraction.workers.plan import (
    PLAN,
    Task,
    load_batches,
    save_batches,
)
from featcache.extraction.workers.tasks import RunSettings, run_task
from featcache.samplers.batches import Batches

DEATHS_WITHOUT_PROGRESS = 20  # of each worker, with nothing computed in between


class Driver:
    """Gives tasks to workers.

    Args:
        workers: the workers.
        settings: of the run.
        ids: of the whole dataset.
        bar: progress and failures are reported to it.
        tend: called about once a second.
    """

    def __init__(
        self,
        workers: Workers,
        settings: RunSettings,
        ids: Sequence[str],
        bar: ProgressBar,
        tend: Callable[[], None],
    ) -> None:
        self._workers, self._settings, self._ids = workers, settings, ids
        self._bar, self._tend = bar, tend
        self._dispatch = Dispatch[Task](workers, settings.directory, run_task, workers.env)
        self._reports: queue.SimpleQueue[tuple[float, Sequence[int]]] = queue.SimpleQueue()
        self._deaths: Counter[int] = Counter()  # of workers, by the utterance that they were at
        self._deaths_without_progress = 0  # workers' deaths since anything was computed
        self._lists = 0  # of batches that are to be done again

    def work(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have all ranges of the plan computed by the workers.

        Whatever happens, the workers' parts are sealed in the end.
        """
        for start, stop in ranges:
            self._dispatch.add(Task(PLAN, start, stop))
        client, topic = self._workers.client, self._workers.env
        client.subscribe_topic(topic, self._reports.put)  # type: ignore[no-untyped-call]
        self._bar.begin()
        with (
            closed_after(partial(client.unsubscribe_topic, topic)),
            closed_after(self._dispatch.finish),
        ):
            for task, outcome in self._dispatch.outcomes(self._between):
                if isinstance(outcome, LostAttempt):
                    self._bar.drop(task.number)
                    self._replace(task, outcome)
                elif isinstance(outcome, Exception):
                    raise outcome
                else:
                    self._deaths_without_progress = 0
                    self._bar.end(*outcome)

    def _between(self) -> None:
        while not self._reports.empty():
            progress = TaskProgress(*self._reports.get()[1])
            if self._dispatch.is_under_way(progress.task):
                self._deaths_without_progress = 0
                self._dispatch.reset_silence()
                self._bar.update(progress)
        self._tend()

    def _replace(self, task: Task, lost: LostAttempt) -> None:
        """Requeue a task whose worker has died, less the utterances that are committed."""
        if lost.batch is None:  # the task was waiting there, the worker was at another one
            self._dispatch.add(task)
        else:
            self._requeue_rest(task, lost.batch, lost.error)
        if lost.batch is not None and lost.batch >= 0:
            self._deaths_without_progress = 0
            return
        self._deaths_without_progress += 1
        most = DEATHS_WITHOUT_PROGRESS * max(len(self._workers.addresses), 1)
        if self._deaths_without_progress > most:
            raise IncompleteError(
                f"workers die before they compute anything, the last one so: {lost.error}"
            ) from lost.error

    def _requeue_rest(self, task: Task, batch: int, error: Exception) -> None:
        """Requeue the batches of a task whose worker died at `batch`: that one by one."""
        directory = self._settings.directory
        batches = load_batches(directory, task.name)[task.start : task.stop]
        at = np.repeat(np.arange(task.start, task.stop) == batch, batches.sizes)
        ids = [self._ids[index] for index in batches.items.tolist()]
        # nobody else has stored any of them: other parts need not be read
        parts = notes_on(directory, task.number)
        missing = ~IdNumbers(ids).committed(self._settings.path, parts)
        self._bar.add(int((~missing).sum()))
        self._requeue(_some_of(batches, missing & ~at), whole=True)
        suspected: list[int] = batches.items[missing & at].tolist()
        again = suspected if len(suspected) > 1 else self._blame(suspected, error)
        self._requeue(Batches(again, np.arange(len(again) + 1)), whole=False)

    def _blame(self, alone: list[int], error: Exception) -> list[int]:
        """Count a death against an utterance that was alone; returns it if it is to be retried."""
        for index in alone:
            self._deaths[index] += 1
            if self._deaths[index] <= self._settings.retries:
                continue
            id = self._ids[index]
            times = "once" if self._deaths[index] == 1 else f"{self._deaths[index]} times"
            failure = ComputeError(
                f"the worker that computed {id!r} died {times}: out of memory, or a crash in a "
                "library; its log may say more"
            )
            if not self._settings.skip_failures:
                raise failure from error
            self._bar.add(0, [failure_of(id, failure)])
            return []
        return alone

    def _requeue(self, batches: Batches, whole: bool) -> None:
        """Add batches, as one task or each as its own."""
        if not len(batches.items):
            return
        self._lists += 1
        name = f"again-{self._lists:06d}"
        save_batches(self._settings.directory, name, batches)
        for start, stop in (
            [(0, len(batches))] if whole else [(k, k + 1) for k in range(len(batches))]
        ):
            self._dispatch.add(Task(name, start, stop))


def _some_of(batches: Batches, wanted: Any) -> Batches:
    """Return batches less some utterances, without the batches that become empty."""
    kept = np.append(0, np.cumsum(wanted))[batches.ends - batches.ends[0]]
    return Batches(batches.items[wanted], np.unique(kept))
