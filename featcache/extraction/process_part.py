"""`ProcessPart`: the part of a cache that one process writes, of one state of what computes.

`WhileFilling` compares that state meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from featcache._closing import closed_after
from featcache.errors import StaleCacheError, describe
from featcache.extraction.datasets import kept_random_state
from featcache.format import digest
from featcache.staleness.follow import Follower
from featcache.staleness.values import Values, settled
from featcache.staleness.watch import Watch
from featcache.workers.attempts import Attempt, Attempts
from featcache.writing.part_writer import PartWriter

# `WhileFilling`: features of one state in one cache, whatever changes while it is filled.

T = TypeVar("T")
SHARE = 0.005  # of the time, that comparisons take at most
MOST_UNSURE = 32  # results that are kept until the next comparison
MOST_LINES = 8  # that an error names
_PATIENCE_S = 0.01
_BETWEEN = (
    "fill the cache before that changes (of a model in training, with a copy that stays as it is), "
    "or give what it is now a directory of its own"
)
_COMPUTING = (
    "if computing changes it, put the module into evaluation mode (module.eval()), or let it learn "
    "before; of a model that is trained meanwhile give a copy that stays as it is"
)


class WhileFilling:
    """Compares what features are made with before and after each computing; threads may share it.

    Args:
        path: the cache directory.
        watch: compares, with how it is now.
        lock: that of who stores; results are computed again under it.
    """

    def __init__(self, path: Path, watch: Watch, lock: threading.RLock | None = None) -> None:
        self._path, self._watch = path, watch
        self._lock = threading.RLock() if lock is None else lock
        self._under_way: set[object] = set()
        self._refused = ""  # the text of the error
        self._is_in_doubt = self._is_dropped = self._is_undecided = False
        self._was_interrupted = False  # while something was computed
        self._computed = 0  # times, of which the second may be to see what is random
        # what was computed first, its digest, and whether anything was since the last `check`
        self._first: tuple[Callable[[], object], str] | None = None
        self._is_checked = True
        # what was computed since the last equal comparison: its name, again, and the result
        self._unsure: list[tuple[str, Callable[[], object], object]] = []
        self._due_at = self._whole_due_at = 0.0  # the next comparison, and that of everything

    @property
    def is_over(self) -> bool:
        """Whether something has changed: then nothing more is computed."""
        return bool(self._refused)

    @property
    def is_in_doubt(self) -> bool:
        """Whether it was seen so late that what is not committed may be of the second state."""
        return self._is_in_doubt

    @property
    def is_undecided(self) -> bool:
        """Whether the last `check` failed, or was interrupted, before it had compared all."""
        return self._is_undecided

    @property
    def is_sure(self) -> bool:
        """Whether what was computed so far may be stored."""
        return not (self._refused or self._unsure)

    @property
    def is_same(self) -> bool:
        """Whether nothing has changed that is quickly compared."""
        return not self._refused and self._compare()

    def begin(self) -> None:
        """Take what a probe that was computed has left behind for harmless.

        Raises `StaleCacheError` if weights have changed.
        """
        with self._lock, self._watch.deciding():
            if not self._compare() and (found := self._watch.differences()).learnt:
                self._refuse("since the run began", found.lines, _COMPUTING)

    def compute(self, what: str, compute: Callable[[], T]) -> T:
        """Return what `compute` returns; in case of doubt it may be called again later.

        Raises `StaleCacheError`, and from then on always, if what features are made with is seen to
        have changed. `what` names the utterance.
        """
        under_way, is_known = object(), False
        try:
            with self._lock:
                is_known = self._check_before()
                self._under_way.add(under_way)
            value = compute()
        except Exception as error:
            self._failed(under_way, is_known)
            if self._refused and not isinstance(error, StaleCacheError):
                error.add_note(self._refused)
            raise
        except BaseException:  # whoever interrupts does not wait for comparisons
            self._was_interrupted = True
            raise
        finally:
            self._under_way.discard(under_way)
        with self._lock:
            self.check_open()  # another thread may have noticed
            self._unsure.append((what, compute, value))
            self._computed += 1
            self._is_checked = False
            if self._first is None or self._is_due() or len(self._unsure) >= MOST_UNSURE:
                self._make_sure(under_way=1, is_known=is_known)
            if self._first is None:
                self._first = compute, _digest(value)
        return value

    def check_open(self) -> None:
        """Raise `StaleCacheError` once something has changed."""
        if self._refused:
            raise StaleCacheError(self._refused)

    def vouch(self) -> bool:
        """Whether what was computed so far may be committed; in any thread, at any time."""
        if not self._lock.acquire(timeout=_PATIENCE_S):  # a comparison may be under way
            return False
        try:
            if not self.is_sure and self.is_same:
                self._unsure.clear()
            return self.is_sure
        finally:
            self._lock.release()

    def check(self, drop: Callable[[], object], *, at_once: bool = True) -> None:
        """Compare the whole fingerprint; before what was computed is published.

        If it shows a change that no other comparison has seen, `drop` is to remove what was
        computed since the last call, and `StaleCacheError` is raised; so it is for what the quick
        comparison sees only now. Unless `at_once`, the quick one may have to do for now.
        """
        with self._lock:
            try:
                if not self._is_dropped:
                    self._check(at_once=at_once)
            finally:
                is_dropped = self._is_dropped
                if is_dropped:
                    drop()
                    self._is_dropped = False
            if is_dropped:
                self.check_open()

    def may_seal(self) -> bool:
        """Whether what was computed so far may be sealed: by the whole fingerprint."""
        with self._lock:
            if self.vouch():
                self._check(at_once=True)
            return self.is_sure

    def _check(self, *, at_once: bool) -> None:
        if self._refused or self._is_checked:
            return
        self._is_undecided = True
        try:
            self._check_whole(at_once=at_once)
        except StaleCacheError:
            self._is_undecided = False
            raise
        self._is_undecided = False

    def _check_whole(self, *, at_once: bool) -> None:
        self._make_sure()
        begun = time.perf_counter()
        # what has changed after the last utterance is no matter: the next one is refused
        if not self.is_same or (begun < self._whole_due_at and not at_once):
            return
        try:
            with self._watch.deciding():
                found = self._watch.differences()
                if found.learnt or found.chosen or (found.lines and not self._comes_out_the_same()):
                    self._is_dropped = True
                    self._refuse("while it was filled", found.lines, _COMPUTING)
        except StaleCacheError:
            pass  # `check` raises it, once that is done
        now = time.perf_counter()
        self._whole_due_at = now + (now - begun) / SHARE
        self._is_checked = True

    def _is_due(self) -> bool:
        return time.perf_counter() >= self._due_at

    def _compare(self) -> bool:
        begun = time.perf_counter()
        is_same = self._watch.is_same()
        now = time.perf_counter()
        self._due_at = now + (now - begun) / SHARE
        return is_same

    def _failed(self, under_way: object, is_known: bool) -> None:
        """Take what a computing that failed has left behind for harmless, but not weights."""
        with self._lock:
            self._under_way.discard(under_way)
            if self._refused or self._under_way:
                return
            if self._compare():
                self._unsure.clear()
                return
            with contextlib.suppress(StaleCacheError), self._watch.deciding():
                found = self._watch.differences()
                is_known = is_known and not self._unsure
                is_nothing = is_known or not (found.lines or found.moved)
                is_harmless = is_nothing or self._comes_out_the_same()
                if found.learnt or (found.chosen and not is_known) or not is_harmless:
                    self._is_in_doubt = bool(self._unsure)
                    self._refuse("by a computing that failed", found.lines, _COMPUTING)
                self._watch.forgive(found)
                self._unsure.clear()

    def _check_before(self) -> bool:
        """Compare if it is time; tells whether what has changed from now on, computing changes."""
        self.check_open()
        # what other threads compute may change something: they look at it when they are done
        if self._under_way or not (self._is_due() or self._first is None):
            return False
        if self._unsure:
            self._make_sure()
        elif not self._compare():
            with self._watch.deciding():
                found = self._watch.differences()
                is_changed = found.learnt or found.chosen
                # of a library, and left by a computing that was interrupted; or of another mode,
                # say, which is no part of the fingerprint, and may be of dropout
                is_changed = is_changed or (bool(found.lines) and not self._was_interrupted)
                is_looked_at = found.lines or (self._computed > 1 and found.moved)
                if is_changed or (is_looked_at and not self._comes_out_the_same()):
                    self._refuse("since the utterance before", found.lines, _BETWEEN)
                if found.lines:
                    self._watch.forgive(found)
        self._was_interrupted = False
        return True

    def _make_sure(self, under_way: int = 0, *, is_known: bool = False) -> None:
        """Refuse what has changed, unless a library has it and the same comes out once more.

        The last `under_way` results are not stored yet. If it `is_known` that computing the last
        one has changed it, settings of the user's may do so, too.
        """
        if self.vouch():
            return
        with self._watch.deciding():
            found = self._watch.differences()
            is_known = is_known and len(self._unsure) == 1
            if found.chosen and not is_known:
                found = found._replace(learnt=True)
            # where all is as it was it may have been otherwise meanwhile
            elif not found.learnt and (found.lines or (found.moved and not is_known)):
                is_harmless = self._comes_out_the_same()
                learnt = self._watch.differences().learnt
                found = found._replace(learnt=learnt or not is_harmless)
            if found.learnt:
                before = f", or {len(self._unsure) - 1} before it" if len(self._unsure) > 1 else ""
                when = f"while {self._unsure[-1][0]} was computed{before}"
                self._is_in_doubt = len(self._unsure) > under_way
                self._refuse(when, found.lines, _COMPUTING)
            if found.lines:
                self._watch.forgive(found)
            self._unsure.clear()

    def _comes_out_the_same(self) -> bool:
        """Whether what was computed first, and what is unsure, comes out as it did."""
        again = [(compute, _digest(value)) for _, compute, value in self._unsure]
        if self._first is not None:
            again.append(self._first)
        return all(_outcome(compute) == was for compute, was in again)

    def _refuse(self, when: str, lines: Sequence[str], cure: str) -> NoReturn:
        self._refused = self._told(when, lines, cure)
        raise StaleCacheError(self._refused)

    def _told(self, when: str, lines: Sequence[str], cure: str) -> str:
        lines = lines or ["something, which is as it was by now"]
        more = len(lines) - MOST_LINES
        shown = [*lines[:MOST_LINES], *([f"and {more} more"] if more > 0 else [])]
        return (
            f"what the features of cache {str(self._path)!r} are made with has changed {when}:"
            f"{''.join(f'{chr(10)}  {line}' for line in shown)}\n"
            f"features of two states do not belong in one cache, and only those of before are "
            f"stored; {cure}"
        )


def _outcome(compute: Callable[[], object]) -> str:
    """Return the digest of what is computed, or what its error says."""
    with kept_random_state():
        try:
            return _digest(compute())
        except Exception as error:  # of a function that cannot be called twice: a digest of none
            return describe(error)


def _digest(result: object) -> str:
    """Return the digest of arrays, however they are nested."""
    described = settled(Values(Follower()).describe(result))
    return digest(json.dumps(described, sort_keys=True).encode())


# `ProcessPart`: the part of a cache that one process writes, of one state of what computes.

OpensPart = Callable[..., PartWriter]


class ProcessPart:
    """The part of the cache that a process writes, in one go or task after task."""

    def __init__(self) -> None:
        self._filling: WhileFilling | None = None
        self._attempts = Attempts()
        self._attempt: Attempt | None = None  # the last one
        self._writer: PartWriter | None = None

    @contextlib.contextmanager
    def attempt(self, directory: Path, number: int) -> Iterator[Attempt]:
        """Begin an attempt at a task; commits its utterances before the attempt can be revoked.

        Raises what `Attempts.begin` raises.
        """
        with self._attempts.begin(directory, number) as self._attempt, closed_after(self.commit):
            yield self._attempt

    def writer(self, open_part: OpensPart, filling: WhileFilling | None = None) -> PartWriter:
        """Return the writer of this process's part, which is noted with the attempt under way.

        The first call opens it, by a `PartWriter` that lacks but `on_part`. `filling` compares what
        features are made with, before anything is committed.
        """
        self._filling = filling
        if self._writer is None:
            self._writer = open_part(on_part=self._note)
            if filling is not None:
                self._writer.ask_before(commits=filling.vouch, seals=filling.may_seal)
        if self._writer.part is not None:
            self._note(self._writer.part)
        return self._writer

    def _note(self, part: str) -> None:
        if self._attempt is not None:
            self._attempt.note(part)

    def finish(self) -> None:
        """End the current task after its batch, and seal the part."""
        self._attempts.finish()
        try:
            self._check(at_once=True)
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def commit(self) -> None:
        """Make durable what was written."""
        self._check(at_once=False)
        if self._writer is not None:
            self._writer.commit()

    def seal(self) -> None:
        """Finish the files of what was written, so that it can be published."""
        self._check(at_once=True)
        if self._writer is not None:
            self._writer.seal()
            self._writer.published()  # from now on that is not ours to remove

    def _check(self, *, at_once: bool) -> None:
        """Raise `StaleCacheError`, without what is in doubt, if features were of two states."""
        if self._filling is None:
            return
        try:
            self._filling.check(self._drop, at_once=at_once)
        finally:
            in_doubt = self._filling.is_in_doubt or self._filling.is_undecided
            if in_doubt and self._writer is not None:
                self._writer.leave()
                self._writer = None

    def _drop(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.published()
            writer.abort()
