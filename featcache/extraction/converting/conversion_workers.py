"""Conversion on workers: tasks are handed out, those of a worker that is lost once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from featcache.workers.pickling import pack, returned, unpack

if TYPE_CHECKING:
    from pathlib import Path

    from distributed import Client

    from featcache.workers.dispatch import LostAttempt, Report

REPORT_EVERY_S = 1.0
DEATHS_WITHOUT_PROGRESS = 20  # of workers, with no task done in between


class TaskResult(NamedTuple):
    """The end of a task."""

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


@dataclass
class WorkersRun:
    """Has workers do the tasks of a conversion.

    Args:
        conversion: what becomes of each row.
        bar: progress is reported to it.

    Attributes:
        errors: the largest errors that workers measured.
        compared: names of the parts that they compared; not those of workers that were lost.
    """

    conversion: Conversion
    bar: ProgressBar
    errors: dict[str, float] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)

    def work(self, parallel: ParallelConfig | Client, tasks: Sequence[ConversionTask]) -> None:
        """Run tasks on workers; those of a lost one are done by another.

        Raises what a worker raised, `IncompleteError` if they die again and again.
        """
        from featcache.workers.dispatch import Dispatch, LostAttempt
        from featcache.workers.workers import workers_of

        directory = make_run(self.conversion.path).absolute()
        setup = partial(_environment, pack({"conversion": self.conversion}), directory)
        with workers_of(parallel, setup) as workers:
            dispatch = Dispatch[ConversionTask](workers, directory, convert_task, workers.env)
            for task in tasks:
                dispatch.add(task)
            self.bar.begin()
            deaths = 0
            with dispatch:
                for task, outcome in dispatch.outcomes():
                    if isinstance(outcome, LostAttempt):
                        deaths += 1
                        if deaths > DEATHS_WITHOUT_PROGRESS * max(len(workers.addresses), 1):
                            raise IncompleteError(
                                f"workers die before a task is done, the last one so: "
                                f"{outcome.error}"
                            ) from outcome.error
                        dispatch.add(self._rest(task, outcome))
                    elif self._take(outcome):
                        deaths = 0

    def _take(self, outcome: object) -> bool:
        """Note a report or a result of a worker; tell whether a task is done."""
        if isinstance(outcome, Exception):
            raise outcome
        if not isinstance(outcome, TaskResult):
            self.bar.update(TaskProgress(*cast("Report", outcome).message))
            return False
        self.bar.end(outcome.progress)
        self.compared |= outcome.compared
        for name, error in outcome.errors.items():
            self.errors[name] = max(error, self.errors.get(name, 0.0))
        return True

    def _rest(self, task: ConversionTask, lost: LostAttempt) -> ConversionTask:
        """Return what is left of a task whose worker was lost."""
        self.bar.drop(lost.number)
        if lost.batch is None:  # it was not begun
            return task
        there = self.conversion.rows.table.find(committed(self.conversion.path, lost.lines))
        rest = np.setdiff1d(task.rows, there)
        self.bar.add(len(task.rows) - len(rest))
        return task._replace(rows=rest)


def _environment(packed: bytes, directory: Path) -> dict[str, object]:
    converter = TaskConverter(packed, directory)
    return {"work": converter, "part": converter.part}


def convert_task(number: int, task: ConversionTask, env: str) -> TaskResult | Exception:
    """Do a task in this worker; returns what it raised, of which Dask would make much noise."""
    from distributed import get_worker

    from featcache.workers.worker_env import env_of

    def run() -> TaskResult:
        worker = get_worker()
        converter = cast(TaskConverter, env_of(worker, env)["work"])
        return converter.run(number, task, partial(worker.log_event, env))

    return returned(run)
