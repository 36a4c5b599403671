"""The driver's side of an extraction on workers: what becomes of tasks whose worker is lost."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from featcache._closing import closed_after
from featcache.cluster.dispatch import Dispatch, LostAttempt
from featcache.cluster.workers import Workers
from featcache.errors import ComputeError, IncompleteError
from featcache.extraction.failures import failure_of
from featcache.extraction.progress import ProgressBar, TaskProgress
from featcache.extraction.workers.plan import (
    PLAN,
    Task,
    hashes_of,
    load_batches,
    missing_from,
    save_batches,
)
from featcache.extraction.workers.tasks import RunSettings, run_task
from featcache.samplers.batches import Batches

DEATHS_WITHOUT_PROGRESS = 20  # of each worker, with nothing computed in between


class Driver:
    """Has tasks done by workers.

    Args:
        workers: the workers.
        settings: what is the same for all tasks.
        ids: of the whole dataset.
        bar: is told what was done and what failed.
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
        """Have all ranges of the plan computed.

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
                    self._lost(task, outcome)
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

    def _lost(self, task: Task, lost: LostAttempt) -> None:
        """Have done what is left of a task whose worker has died."""
        if lost.batch is None:  # it was waiting there, another was at work
            self._dispatch.add(task)
        else:
            batches = load_batches(self._settings.directory, task.name)[task.start : task.stop]
            at = np.repeat(np.arange(task.start, task.stop) == lost.batch, batches.sizes)
            missing = missing_from(
                self._settings.path,
                hashes_of([self._ids[index] for index in batches.items.tolist()]),
            )
            self._bar.add(int((~missing).sum()))
            self._requeue(_some_of(batches, missing & ~at), whole=True)
            suspected: list[int] = batches.items[missing & at].tolist()
            again = suspected if len(suspected) > 1 else self._blame(suspected, lost.error)
            self._requeue(Batches(again, np.arange(len(again) + 1)), whole=False)
        self._deaths_without_progress = (
            0 if lost.batch is not None and lost.batch >= 0 else self._deaths_without_progress + 1
        )
        if self._deaths_without_progress > DEATHS_WITHOUT_PROGRESS * max(
            len(self._workers.addresses), 1
        ):
            raise IncompleteError(
                f"workers die before they compute anything, the last one so: {lost.error}"
            ) from lost.error

    def _blame(self, alone: list[int], error: Exception) -> list[int]:
        """Take note of an utterance that was alone when its worker died.

        Returns it if it is to be tried again.
        """
        for index in alone:
            self._deaths[index] += 1
            if self._deaths[index] <= self._settings.retries:
                continue
            id = self._ids[index]
            times = "once" if self._deaths[index] == 1 else f"{self._deaths[index]} times"
            failure = ComputeError(
                f"the worker that computed {id!r} died {times}: out of memory, or a crash in a "
                "library; its log may "
                "say more"
            )
            if not self._settings.skip_failures:
                raise failure from error
            self._bar.add(0, [failure_of(id, failure)])
            return []
        return alone

    def _requeue(self, batches: Batches, whole: bool) -> None:
        """Have batches done, as one task or each as its own."""
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
    """Leave utterances out of batches, and batches that have none left."""
    kept = np.append(0, np.cumsum(wanted))[batches.ends - batches.ends[0]]
    return Batches(batches.items[wanted], np.unique(kept))
