"""Conversion on workers: tasks are handed out, those of a worker that is lost once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from featcache._interval import Interval
from featcache.cluster.config import ParallelConfig
from featcache.cluster.pickling import pack, returned, unpack
from featcache.errors import IncompleteError
from featcache.extraction.converting.conversion import Conversion, ConversionTask
from featcache.extraction.progress import ProgressBar, TaskProgress
from featcache.extraction.workers.plan import make_run
from featcache.extraction.workers.process_part import ProcessPart
from featcache.store.format.committed import committed

if TYPE_CHECKING:
    from pathlib import Path

    from distributed import Client

    from featcache.cluster.dispatch import LostAttempt

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


def convert_on_workers(
    conversion: Conversion,
    parallel: ParallelConfig | Client,
    tasks: Sequence[ConversionTask],
    bar: ProgressBar,
) -> tuple[dict[str, float], set[str]]:
    """Have workers do tasks; return the largest errors, and the parts that they compared.

    What a lost worker had committed is in neither. Raises what a worker raised, `IncompleteError`
    if they die again and again.
    """
    from featcache.cluster.dispatch import Dispatch, LostAttempt, Report
    from featcache.cluster.workers import workers_of

    directory = make_run(conversion.path).absolute()
    errors: dict[str, float] = {}
    compared: set[str] = set()
    deaths = 0
    setup = partial(_environment, pack({"conversion": conversion}), directory)
    with workers_of(parallel, setup) as workers:
        dispatch = Dispatch[ConversionTask](workers, directory, convert_task, workers.env)
        for task in tasks:
            dispatch.add(task)
        bar.begin()
        with dispatch:
            for task, outcome in dispatch.outcomes():
                if isinstance(outcome, Exception):
                    raise outcome
                if isinstance(outcome, Report):
                    bar.update(TaskProgress(*outcome.message))
                elif isinstance(outcome, LostAttempt):
                    deaths += 1
                    if deaths > DEATHS_WITHOUT_PROGRESS * max(len(workers.addresses), 1):
                        raise IncompleteError(
                            f"workers die before a task is done, the last one so: {outcome.error}"
                        ) from outcome.error
                    bar.drop(outcome.number)
                    rest = _rest(conversion, task, outcome)
                    bar.add(len(task.rows) - len(rest.rows))
                    dispatch.add(rest)
                else:
                    deaths = 0
                    result = TaskResult(*outcome)
                    bar.end(result.progress)
                    compared |= result.compared
                    for name, error in result.errors.items():
                        errors[name] = max(error, errors.get(name, 0.0))
    return errors, compared


def _rest(conversion: Conversion, task: ConversionTask, lost: LostAttempt) -> ConversionTask:
    """Return what is left of a task whose worker was lost."""
    if lost.batch is None:
        return task
    there = conversion.rows.table.find(committed(conversion.path, lost.lines))
    return task._replace(rows=np.setdiff1d(task.rows, there))


def _environment(packed: bytes, directory: Path) -> dict[str, object]:
    converter = TaskConverter(packed, directory)
    return {"work": converter, "part": converter.part}


def convert_task(number: int, task: ConversionTask, env: str) -> TaskResult | Exception:
    """Do a task in this worker; returns what it raised, of which Dask would make much noise."""
    from distributed import get_worker

    from featcache.cluster.worker_env import env_of

    def run() -> TaskResult:
        worker = get_worker()
        converter = cast(TaskConverter, env_of(worker, env)["work"])
        return converter.run(number, task, partial(worker.log_event, env))

    return returned(run)
