"""Outcomes of an extraction: its progress, and the utterances that failed."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

from tqdm import tqdm

from featcache.container_files import write_durably

# `Outcome`: the end of an executor's work.


class Outcome(NamedTuple):
    """The end of an executor's work: whether all was computed."""

    left_out: int = 0  # utterances that a given sampler did not ask for
    stopped: bool = True  # before all was computed
    seen: set[str] | None = None  # ids of all utterances, where the dataset does not show them

    @classmethod
    def of_all(cls, ranks: Sequence[Outcome]) -> Outcome:
        """Return the outcome of several ranks' work."""
        seen = [rank.seen for rank in ranks if rank.seen is not None]
        return cls(
            sum(rank.left_out for rank in ranks),
            any(rank.stopped for rank in ranks),
            set().union(*seen) if len(seen) == len(ranks) else None,
        )


# Utterances that could not be computed: for people, a line each in `work-failures.jsonl`.

FAILURES = "work-failures.jsonl"


class Failure(TypedDict):
    """A line of the file: an utterance that could not be computed."""

    id: str | None  # None if the loader does not show it
    error: str
    type: str
    traceback: str


def failure_of(id: str | None, error: Exception) -> Failure:
    """Return the line for an utterance that ended in an error."""
    text = "".join(traceback.format_exception(error))
    return {"id": id, "error": str(error), "type": type(error).__name__, "traceback": text}


def read_failures(cache: Path) -> list[Failure]:
    """Return the lines of a cache's file that can be read; none if it has no file."""
    found: list[Failure] = []
    with contextlib.suppress(OSError):
        for line in (cache / FAILURES).read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError):
                failure = json.loads(line)
                if isinstance(failure, dict) and "id" in failure:
                    found.append(cast(Failure, failure))
    return found


def write_failures(cache: Path, failures: Sequence[Failure]) -> None:
    """Replace the file; without failures there is none."""
    path = cache / FAILURES
    if not failures:
        path.unlink(missing_ok=True)
        return
    lines = [json.dumps(failure, ensure_ascii=False) + "\n" for failure in failures]
    write_durably(path, "".join(lines).encode("utf-8", "backslashreplace"))


# Progress of an extraction: one bar over the utterances of all workers, and the failures.


class TaskProgress(NamedTuple):
    """Counts of one task so far."""

    task: int
    utterances: int = 0  # written or failed
    nbytes: int = 0
    failed: int = 0


class ProgressBar:
    """One bar over the utterances of all tasks, those under way included.

    Args:
        description: the text of the bar.
        total: number of utterances of the dataset; None if unknown.
        known: number of utterances that the cache held before.
        failures: the list that reported failures are appended to.
        shown: whether there is a bar.
        colour: of the bar; None: the terminal's.
    """

    def __init__(
        self,
        description: str,
        total: int | None,
        known: int,
        failures: list[Failure],
        *,
        shown: bool,
        colour: str | None = None,
    ) -> None:
        self._failures = failures
        self._done = [0, 0, 0]  # utterances, bytes, failed ones
        self._running: dict[int, TaskProgress] = {}
        self._known, self._started = known, time.monotonic()
        self.bar = tqdm(
            desc=description,
            total=total,
            initial=known,
            unit="utt",
            dynamic_ncols=True,
            disable=not shown,
            colour=colour,
        )

    def begin(self) -> None:
        """Count time from now on: workers may have waited in a queue before."""
        self._started = time.monotonic()
        self.bar.unpause()

    def update(self, progress: TaskProgress) -> None:
        """Show the progress of a task."""
        self._running[progress.task] = progress
        self._show()

    def drop(self, task: int) -> None:
        """Forget the reports of a task whose worker died."""
        self._running.pop(task, None)
        self._show()

    def end(self, progress: TaskProgress, failures: Sequence[Failure] = ()) -> None:
        """Add a task that has ended."""
        self._running.pop(progress.task, None)
        self._done = [done + more for done, more in zip(self._done, progress[1:], strict=True)]
        self._failures += failures
        self._show()

    def add(self, utterances: int, failures: Sequence[Failure] = ()) -> None:
        """Add utterances that no task reported."""
        self.end(TaskProgress(-1, utterances + len(failures), failed=len(failures)), failures)

    def count(self, utterances: int, nbytes: int) -> None:
        """Add utterances that this process has stored."""
        self.end(TaskProgress(-1, utterances, nbytes))

    def _show(self) -> None:
        if self.bar.disable:
            return
        of_all = [self._done, *(progress[1:] for progress in self._running.values())]
        utterances, nbytes, failed = (sum(column) for column in zip(*of_all, strict=True))
        seconds = max(time.monotonic() - self._started, 1e-3)
        failures = f", {failed} failed" if failed else ""
        self.bar.set_postfix_str(f"{nbytes / 1e6 / seconds:.1f} MB/s{failures}", refresh=False)
        self.bar.update(self._known + utterances - self.bar.n)
