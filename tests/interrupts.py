"""Ctrl-C at a line of the library's code, of a number or of none."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import featcache

LIBRARY = Path(featcache.__file__).parent
STORE = [LIBRARY / name for name in ("format", "reading", "writing", "store.py")]
STORE += [LIBRARY / "container_files" / name for name in ("lock.py", "whole_files.py")]


class Interrupt:
    """Raises `KeyboardInterrupt` at the line of this number, once; those of `places` alone count.

    Not at `with` nor `try`: Python raises none between what comes before and their block.

    Args:
        line: from 1 on, in the order in which they run, however often; 0: never.
        places: files or folders of code.
        at: a file and a line of it: the runs of this one alone count. A second run of the same
            code passes fewer lines in all, as some run once in a process.

    Attributes:
        left: how many lines are still to come before that.
        passed: the numbers at which each line, a file and its number there, ran.
    """

    def __init__(self, line: int, *places: Path, at: tuple[str, int] | None = None) -> None:
        self.left = line
        self._at = at
        self.passed: dict[tuple[str, int], list[int]] = {}
        self._places = tuple(map(str, places))
        self._count = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._places):
            return None
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not source.lstrip().startswith(("with ", "try:")):
            place = frame.f_code.co_filename, frame.f_lineno
            self._count += 1
            self.passed.setdefault(place, []).append(self._count)
            if self._at in (None, place):
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
        return self


@contextmanager
def interrupted(trace: Callable[[FrameType, str, object], Any]) -> Iterator[None]:
    """Let an `Interrupt` see the lines of a block."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
