"""`Interval`: a timer for what is done again and again, but not too often."""

from __future__ import annotations

import time


class Interval:
    """A timer that is due at most once every `seconds`; never, if that is None."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether `seconds` have passed since this last said so."""
        now = time.monotonic()
        if self._seconds is None or now - self._last < self._seconds:
            return False
        self._last = now
        return True
