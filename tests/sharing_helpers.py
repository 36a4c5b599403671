"""Threads that share one object, with Python changing between them as often as it can."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

ROUNDS = int(os.environ.get("FEATCACHE_ROUNDS", "20"))  # of each case; `make torture` has 300
INTERVALS_S = (1e-6, 1e-5, 0.005)  # between two changes of the thread; the last is Python's own
PATIENCE_S = 60.0


@contextmanager
def switching(interval_s: float) -> Iterator[None]:
    """Let Python change between threads as often as that."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def at_once(
    jobs: Sequence[Callable[[], object]], allowed: tuple[type[BaseException], ...] = ()
) -> list[BaseException]:
    """Run jobs in threads that begin together; return what they raised of the errors allowed.

    Any other error is raised here, and so is a job that does not end.
    """
    start = threading.Barrier(len(jobs))
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            start.wait(PATIENCE_S)
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if any(thread.is_alive() for thread in threads):
        frames = sys._current_frames()
        stuck = [frames[each.ident] for each in threads if each.is_alive() and each.ident in frames]
        raise AssertionError("\n".join("".join(traceback.format_stack(each)) for each in stuck))
    for error in errors:
        if not isinstance(error, allowed):
            raise error
    return errors
