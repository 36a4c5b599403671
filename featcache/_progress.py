"""Progress of long work: one bar for all of it, in a terminal, a notebook, or the log of a job.

Beside it, `Interval` is a timer for what long work does again and again, but not too often.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


LINE_S = 60.0  # between the lines of a log
DELAY_S = 1.0  # shorter work shows nothing
_shown = ContextVar("whether any bar is shown", default=True)


@contextmanager
def without_bars() -> Iterator[None]:
    """Show no bar within a block, whoever asks for one."""
    before = _shown.set(False)
    try:
        yield
    finally:
        _shown.reset(before)


def bar(
    what: str,
    total: int | None,
    *,
    unit: str = "B",
    initial: int = 0,
    shown: bool = True,
    delay_s: float = DELAY_S,
    colour: str | None = None,
) -> tqdm[Any]:
    """Return a bar, a context manager: a line that changes, or a line a minute without a terminal.

    Args:
        what: the work, in a few words.
        total: how much of it there is; None: nobody knows.
        unit: of that; bytes are counted by the thousand.
        initial: how much was done before.
        shown: whether it is shown at all.
        delay_s: shown after so many seconds.
        colour: of the bar; None: the terminal's.
    """
    how: dict[str, Any] = {"dynamic_ncols": True}
    if not _redraws():
        how = {"mininterval": LINE_S, "maxinterval": LINE_S, "bar_format": "{l_bar}{r_bar}\n"}
    return _without_thread()(
        desc=what,
        total=total,
        initial=initial,
        unit=unit,
        unit_scale=unit == "B",
        disable=not (shown and _shown.get()),
        delay=delay_s,
        colour=colour,
        miniters=1,
        **how,
    )


@cache
def _without_thread() -> type[tqdm[Any]]:
    """Return tqdm without its thread, which would stay, also where nothing is shown.

    It looks after bars that look at the clock at some updates alone; ours does at each.
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # of Any
        monitor_interval = 0

    return Bar


def _redraws() -> bool:
    """Whether a line can be written over, as in terminals and notebooks."""
    return "ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty())


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
