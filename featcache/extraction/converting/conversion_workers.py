"""Conversion on workers: tasks are handed out, those of a worker that is lost once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from featcache._interval import Interval
from featcache.errors import IncompleteError
from featcache.extraction.converting.convert import Conversion, ConversionTask
from featcache.extraction.outcomes import ProgressBar, TaskProgress
from featcache.extraction.process_part import ProcessPart
from featcache.extraction.run import make_run
from featcache.format.part import committed
from featcache.workers.config import ParallelConfig
from featcache.workers.pickling import pack, unpack

if TYPE_CHECKING:
    from pathlib import Path

    from distributed import Client

    from featcache.workers.dispatch import LostAttempt, WorkerReport

REPORT_EVERY_S = 1.0
DEATHS_WITHOUT_PROGRESS = 20  # of workers, with no task done in between


class TaskResult(NamedTuple):
    """The end of a task: what was compared, as `ReadBack` has it."""

    progress: TaskProgress
    errors: dict[str, float]
    compared: set[str]


class TaskConverter:
    """Converts tasks in a worker process."""

    def __init__(self, packed: bytes, directory: Path) -> None:
        self._packed, self._directory = packed, directory
        self._conversion: Conversion | None = None
        self.part = ProcessPart()

    def run(
        self, number: int, task: ConversionTask, report: Callable[[TaskProgress], object]
    ) -> TaskResult:
        """Convert a task in the attempt of this number; `report` is called about once a second."""
        with self.part.attempt(self._directory, number) as attempt:
            if self._conversion is None:
                self._conversion = cast(Conversion, unpack(self._packed)["conversion"])
            attempt.note_batch(0)
            writer = self.part.writer(self._conversion.open_part)
            done, reporting = [0, 0], Interval(REPORT_EVERY_S)

            def tell(utterances: int, nbytes: int) -> None:
                done[0], done[1] = done[0] + utterances, done[1] + nbytes
                if reporting.due():
                    report(TaskProgress(number, *done))
                    if self.part.stopping or not attempt.is_wanted:
                        raise IncompleteError("the conversion has been stopped")

            back = self._conversion.do(writer, task, tell)
            return TaskResult(TaskProgress(number, *done), back.errors, back.compared)


def convert_on_workers(
    conversion: Conversion,
    parallel: ParallelConfig | Client,
    tasks: Sequence[ConversionTask],
    bar: ProgressBar,
) -> Iterator[TaskResult]:
    """Do tasks on workers, those of a lost one on another; yields the end of each.

    Raises what a worker raised, `IncompleteError` if they die again and again.
    """
    from featcache.workers.dispatch import Dispatch, LostAttempt
    from featcache.workers.workers import workers_of

    directory = make_run(conversion.path).absolute()
    setup = partial(_environment, pack({"conversion": conversion}), directory)
    with workers_of(parallel, setup) as workers:
        dispatch = Dispatch[ConversionTask](workers, directory)
        for task in tasks:
            dispatch.add(task)
        bar.begin()
        deaths = 0
        with dispatch:
            for task, outcome in dispatch.outcomes():
                if isinstance(outcome, LostAttempt):
                    deaths += 1
                    if deaths > DEATHS_WITHOUT_PROGRESS * max(len(workers.addresses), 1):
                        raise IncompleteError(
                            f"workers die before a task is done, the last one so: {outcome.error}"
                        ) from outcome.error
                    bar.drop(outcome.number)
                    rest = _rest(conversion, task, outcome)
                    bar.add(len(task.rows) - len(rest.rows))
                    dispatch.add(rest)
                elif isinstance(outcome, TaskResult):
                    bar.end(outcome.progress)
                    deaths = 0
                    yield outcome
                else:
                    bar.update(TaskProgress(*cast("WorkerReport", outcome).message))


def _rest(conversion: Conversion, task: ConversionTask, lost: LostAttempt) -> ConversionTask:
    """Return what is left of a task whose worker was lost."""
    if lost.batch is None:  # it was not begun
        return task
    there = conversion.rows.table.find(committed(conversion.path, lost.lines))
    return task._replace(rows=np.setdiff1d(task.rows, there))


def _environment(packed: bytes, directory: Path) -> dict[str, object]:
    converter = TaskConverter(packed, directory)
    return {"work": converter.run, "part": converter.part}
