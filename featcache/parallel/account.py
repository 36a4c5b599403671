"""What all workers together have done: one bar over utterances, and the failures."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tqdm import tqdm

from featcache.compute import Failure
from featcache.parallel.worker import Progress


class Account:
    """Adds up what tasks report, those that run included.

    Args:
        description: what the bar says.
        total: utterances of the dataset.
        known: those of them that were in the cache before.
        shown: whether there is a bar.
        colour: its colour; None: the terminal's.
    """

    def __init__(self, description: str, total: int, known: int, *, shown: bool, colour: str | None = None) -> None:
        self.failures: list[Failure] = []
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

    def update(self, progress: Progress) -> None:
        """Take note of how far a task is."""
        self._running[progress.task] = progress
        self._show()

    def drop(self, task: int) -> None:
        """Forget what a task has reported: its worker died, what it committed comes with the next look."""
        self._running.pop(task, None)
        self._show()

    def end(self, progress: Progress, failures: Sequence[Failure] = ()) -> None:
        """Take note of what a task has done in all."""
        self._running.pop(progress.task, None)
        self._done = [done + more for done, more in zip(self._done, progress[1:], strict=True)]
        self.failures += failures
        self._show()

    def _show(self) -> None:
        if self.bar.disable:
            return
        of_all = [self._done, *(progress[1:] for progress in self._running.values())]
        utterances, nbytes, failed = (sum(column) for column in zip(*of_all, strict=True))
        seconds = max(time.monotonic() - self._started, 1e-3)
        self.bar.set_postfix_str(
            f"{nbytes / 1e6 / seconds:.1f} MB/s" + (f", {failed} failed" if failed else ""), refresh=False
        )
        self.bar.update(self._known + utterances - self.bar.n)
