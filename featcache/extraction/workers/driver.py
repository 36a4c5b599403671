"""`Driver`: gives tasks to workers, and requeues those whose worker is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from featcache.errors import ComputeError, IncompleteError
from featcache.extraction.datasets import IdNumbers
from featcache.extraction.outcomes import ProgressBar, TaskProgress, failure_of
from featcache.extraction.workers.executor import RunSettings
from featcache.samplers.batches import Batches
from featcache.workers.dispatch import Dispatch, LostAttempt, Report
from featcache.workers.workers import Workers

DEATHS_WITHOUT_PROGRESS = 20  # of each worker, with nothing computed in between


@dataclass
class Driver:
    """Gives tasks to workers.

    Args:
        workers: the workers.
        settings: of the run.
        ids: of the whole dataset.
        bar: progress and failures are reported to it.
        tend: called about once a second.
    """

    workers: Workers
    settings: RunSettings
    ids: Sequence[str]
    bar: ProgressBar
    tend: Callable[[], None]

    def __post_init__(self) -> None:
        self._dispatch = Dispatch[Batches](self.workers, self.settings.directory)
        self._deaths = Counter[int]()  # of workers, by the utterance that they were at
        self._deaths_without_progress = 0  # workers' deaths since anything was computed

    def work(self, tasks: Iterable[Batches]) -> None:
        """Run all tasks on the workers; whatever happens, their parts are sealed in the end.

        Raises what a worker raised, `ComputeError` if workers die of an utterance,
        `IncompleteError` if they die before they compute anything.
        """
        for task in tasks:
            self._dispatch.add(task)
        self.bar.begin()
        with self._dispatch:
            for task, outcome in self._dispatch.outcomes(self.tend):
                if isinstance(outcome, LostAttempt):
                    self.bar.drop(outcome.number)
                    self._replace(task, outcome)
                    continue
                self._deaths_without_progress = 0
                if isinstance(outcome, Report):
                    self.bar.update(TaskProgress(*outcome.message))
                else:
                    self.bar.end(*outcome)

    def _replace(self, task: Batches, lost: LostAttempt) -> None:
        """Requeue what is left of a task whose worker has died."""
        if lost.batch is None:  # the task was waiting there, the worker was at another one
            self._dispatch.add(task)
        else:
            self._requeue_rest(task, lost.batch, lost)
        if lost.batch is not None and lost.batch >= 0:
            self._deaths_without_progress = 0
            return
        self._deaths_without_progress += 1
        most = DEATHS_WITHOUT_PROGRESS * max(len(self.workers.addresses), 1)
        if self._deaths_without_progress > most:
            raise IncompleteError(
                f"workers die before they compute anything, the last one so: {lost.error}"
            ) from lost.error

    def _requeue_rest(self, task: Batches, batch: int, lost: LostAttempt) -> None:
        """Requeue what is not committed of a task: the utterances of one batch one by one."""
        at = np.repeat(np.arange(len(task)) == batch, task.sizes)
        ids = [self.ids[index] for index in task.items.tolist()]
        # nobody else has stored any of them: other parts need not be read
        missing = ~IdNumbers(ids).committed(self.settings.path, lost.lines)
        self.bar.add(int((~missing).sum()))
        self._requeue(_some_of(task, missing & ~at))
        suspected: list[int] = task.items[missing & at].tolist()
        if len(suspected) != 1 or self._is_retried(suspected[0], lost.error):
            self._requeue(Batches(suspected, np.arange(len(suspected) + 1)))

    def _requeue(self, task: Batches) -> None:
        if len(task):
            self._dispatch.add(task)

    def _is_retried(self, index: int, error: Exception) -> bool:
        """Count a death against an utterance; False if it is one of the failures now."""
        self._deaths[index] += 1
        if self._deaths[index] <= self.settings.retries:
            return True
        id = self.ids[index]
        times = "once" if self._deaths[index] == 1 else f"{self._deaths[index]} times"
        failure = ComputeError(
            f"the worker that computed {id!r} died {times}: out of memory, or a crash in a "
            "library; its log may say more"
        )
        if not self.settings.skip_failures:
            raise failure from error
        self.bar.add(0, [failure_of(id, failure)])
        return False


def _some_of(batches: Batches, wanted: Any) -> Batches:
    """Return batches less some utterances, without the batches that become empty."""
    kept = np.append(0, np.cumsum(wanted))[batches.ends]
    return Batches(batches.items[wanted], np.unique(kept))
