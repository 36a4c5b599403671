"""Runs many inputs in forked children, which may hang, crash or take too much memory."""

from __future__ import annotations

import json
import mmap
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from tracebacks import places

from featcache.errors import FeatcacheError

LIMIT_S = 1.0  # of the processor
HANGS_S = 10.0  # of any clock; then the child is killed
LIMIT_BYTES = 300 << 20
ADDRESS_BYTES = 4 << 30  # beyond that there is a MemoryError


class Fine(str):
    """Tells what came of an input where nothing is wrong, to be counted."""


# input, directory to work in -> what is wrong, if anything
Work = Callable[[int, Path], str | None]


@dataclass(frozen=True)
class Outcome:
    """What came of one input; `what` is None where all is well."""

    number: int
    what: str | None
    where: str = ""
    came: str = ""  # of what was fine
    spent_s: float = 0.0
    grown_bytes: int = 0  # of the process, by all of its inputs so far


def run_inputs(work: Work, numbers: Sequence[int], directory: Path) -> Iterator[Outcome]:
    """Run `work` on all inputs; slow ones are tried again alone."""
    slow = []
    for outcome in _run(work, numbers, directory, os.cpu_count() or 1):
        if outcome.what == "slow":
            slow.append(outcome.number)
        else:
            yield outcome
    yield from _run(work, slow, directory, 1)


def _run(work: Work, numbers: Sequence[int], directory: Path, count: int) -> Iterator[Outcome]:
    directory.mkdir(exist_ok=True, parents=True)
    shares = [numbers[first::count] for first in range(min(count, len(numbers)))]
    children = [_Child(work, share, directory / str(at)) for at, share in enumerate(shares)]
    while children:
        ready, _, _ = select.select([child.pipe for child in children], [], [], 0.5)
        for child in list(children):
            if child.pipe in ready or child.hangs():
                yield from child.take()
            if child.done:
                children.remove(child)


class _Child:
    def __init__(self, work: Work, numbers: Sequence[int], directory: Path) -> None:
        self._work, self._numbers, self._directory = work, numbers, directory
        self._at = 0
        self._current = mmap.mmap(-1, 8)
        self._rest = b""
        self._process = -1
        self.done = False
        self._start()

    def hangs(self) -> bool:
        return time.monotonic() - self._heard > HANGS_S

    def take(self) -> Iterator[Outcome]:
        """Give what the child has said; start another in place of one that has ended."""
        if self.hangs():
            os.kill(self._process, signal.SIGKILL)
        data = os.read(self.pipe, 1 << 20)
        self._heard = time.monotonic()
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            yield Outcome(*json.loads(line))
        if not data:
            yield from self._ended()

    def _ended(self) -> Iterator[Outcome]:
        _, status = os.waitpid(self._process, 0)
        os.close(self.pipe)
        self._at = struct.unpack("<q", self._current[:])[0]
        if status:
            signalled = os.WIFSIGNALED(status)
            name = signal.Signals(os.WTERMSIG(status)).name if signalled else f"status {status}"
            what = "hangs" if name == "SIGKILL" else f"ends the process: {name}"
            yield Outcome(self._numbers[self._at], what)
            self._at += 1
        self.done = self._at >= len(self._numbers)
        if not self.done:
            self._start()

    def _start(self) -> None:
        self.pipe, writing = os.pipe()
        self._rest = b""
        self._heard = time.monotonic()
        self._process = os.fork()
        if self._process == 0:
            code = 1
            try:
                os.close(self.pipe)
                self._work_off(writing)
                code = 0
            finally:
                os._exit(code)
        os.close(writing)

    def _work_off(self, writing: int) -> None:
        """Work off inputs until one took too much memory; the parent starts another child then."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # lilcom says there what it does not like
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        before = _most_bytes()
        for at in range(self._at, len(self._numbers)):
            self._current[:] = struct.pack("<q", at)
            outcome = _tried(self._work, self._numbers[at], self._directory)
            grown = _most_bytes() - before
            outcome = replace(outcome, grown_bytes=grown)
            if grown > LIMIT_BYTES:
                outcome = Outcome(outcome.number, f"takes {grown >> 20} MB", outcome.what or "")
            os.write(writing, (json.dumps(astuple(outcome)) + "\n").encode())
            if grown > LIMIT_BYTES:
                self._current[:] = struct.pack("<q", at + 1)
                return
        self._current[:] = struct.pack("<q", len(self._numbers))


def _tried(work: Work, number: int, directory: Path) -> Outcome:
    used = time.process_time()
    what, where, came = None, "", ""
    try:
        what = work(number, directory)
        if isinstance(what, Fine):
            what, came = None, str(what)
    except BaseException as error:
        what, where = f"untyped {type(error).__name__}: {error!r}"[:500], places(error)
    spent = time.process_time() - used  # a machine that does other things takes no more of that
    if what is None and spent > LIMIT_S:
        what = "slow"
    return Outcome(number, what, where, came, spent)


def typed(*calls: Callable[[], object]) -> None:
    """Make calls, each of which may raise a `FeatcacheError`."""
    for call in calls:
        with suppress(FeatcacheError):
            call()


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
