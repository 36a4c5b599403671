"""The progress of an extraction, by all workers together.

One bar over utterances, and the failures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from tqdm import tqdm

from featcache.extraction.failures import Failure


class Progress(NamedTuple):
    """How far a task has come."""

    task: int
    utterances: int = 0  # written or failed
    nbytes: int = 0
    failed: int = 0


class Account:
    """Adds up what tasks report, those that run included.

    Args:
        description: what the bar says.
        total: utterances of the dataset; None if it does not tell.
        known: those of them that were in the cache before.
        failures: is added those that are reported.
        shown: whether there is a bar.
        colour: its colour; None: the terminal's.
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
        self._running: dict[int, Progress] = {}
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
        """Count time from now on: workers may have been waited for, in a queue perhaps."""
        self._started = time.monotonic()
        self.bar.unpause()

    def update(self, progress: Progress) -> None:
        """Take note of how far a task is."""
        self._running[progress.task] = progress
        self._show()

    def drop(self, task: int) -> None:
        """Forget what a task has reported.

        Its worker died, what it committed comes with the next look.
        """
        self._running.pop(task, None)
        self._show()

    def end(self, progress: Progress, failures: Sequence[Failure] = ()) -> None:
        """Take note of what a task has done in all."""
        self._running.pop(progress.task, None)
        self._done = [done + more for done, more in zip(self._done, progress[1:], strict=True)]
        self._failures += failures
        self._show()

    def found(self, utterances: int, failures: Sequence[Failure] = ()) -> None:
        """Take note of what tasks have done that never reported it."""
        self.end(Progress(-1, utterances + len(failures), failed=len(failures)), failures)

    def _show(self) -> None:
        if self.bar.disable:
            return
        of_all = [self._done, *(progress[1:] for progress in self._running.values())]
        utterances, nbytes, failed = (sum(column) for column in zip(*of_all, strict=True))
        seconds = max(time.monotonic() - self._started, 1e-3)
        self.bar.set_postfix_str(
            f"{nbytes / 1e6 / seconds:.1f} MB/s" + (f", {failed} failed" if failed else ""),
            refresh=False,
        )
        self.bar.update(self._known + utterances - self.bar.n)
