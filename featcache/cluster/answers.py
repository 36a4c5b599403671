"""Calls that may never come back, made side by side."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

R = TypeVar("R")


def answers_within(
    seconds: float, calls: Mapping[str, Callable[[], R]]
) -> dict[str, R | Exception]:
    """Make calls side by side that may never come back.

    Returns what those returned or raised that did in time.
    """
    answers: queue.SimpleQueue[tuple[str, R | Exception]] = queue.SimpleQueue()

    def call(name: str) -> None:
        try:
            answers.put((name, calls[name]()))
        except Exception as error:
            answers.put((name, error))

    for name in calls:
        threading.Thread(target=call, args=(name,), name=f"featcache-{name}", daemon=True).start()
    until, found = time.monotonic() + seconds, dict[str, R | Exception]()
    with suppress(queue.Empty):
        while len(found) < len(calls):
            found.update([answers.get(timeout=max(until - time.monotonic(), 0))])
    return found
