"""Results that are computed again: the first ones of a process, whether computed or read.

A result that is another one each time is refused, since a cache would freeze it: the first one that
a process computes is computed again, and further ones while the function draws from the global
random generators, which are left as one computing leaves them. A stored result that is another one
now is refused, since the cache is stale: the first one that a process reads is computed again, and
up to three more while three seconds last; so are those of a data set whose entries have changed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from featcache._tensors import ArrayLike
from featcache.errors import FeatureError, describe
from featcache.extraction.process_part import WhileFilling
from featcache.lazy.arguments import Call
from featcache.lazy.live_cache import LiveCache

if TYPE_CHECKING:
    from featcache.staleness.probe import ProbeRows

_MOST = 8  # results that are computed twice
_LAST_BITS = 1e-6  # of single precision

Taken = Callable[[str, object], Mapping[str, ArrayLike]]  # a result as arrays by feature
PROBE = 4  # stored results that are computed again
PROBE_S = 3.0  # after so many seconds no further one is
_log = logging.getLogger("featcache")


class StoredAgain:
    """Computes stored results again, the first ones that a process reads.

    Attributes:
        is_over: True once nothing more is computed again.
        told: how the first one that is another now differs; empty while there is none.
    """

    def __init__(self) -> None:
        self._left = PROBE
        self._spent_s = 0.0
        self._at_it = threading.Lock()  # held by one thread; the others read
        self.is_over = False
        self.told = ""

    def compare(self, call: Call, found: object, live: LiveCache) -> None:
        """Compare a stored result with what a call computes now."""
        if self.told or self.is_over or not self._at_it.acquire(blocking=False):
            return
        try:
            begin = time.monotonic()
            self.told = self._differs(call, found, live)
            if self.told and call.is_doubted:
                self.told += f"; its entry in the data set, or a file of {call.id!r}, has changed"
            self._spent_s += time.monotonic() - begin
            self._left -= 1
            enough = self._left <= 0 or self._spent_s >= PROBE_S
            self.is_over = not self.told and (self.is_over or enough)
        finally:
            self._at_it.release()

    def _differs(self, call: Call, found: object, live: LiveCache) -> str:
        from featcache.extraction.probing import spreads_of, unlike_stored
        from featcache.extraction.random_state import kept_random_state
        from featcache.staleness.probe import Probed, tolerance

        id, results = call.id, live.results
        stored, texts = results.parted(results.arrays(id, found))
        with kept_random_state():
            try:
                value = call.copied().compute()
            except Exception as error:  # a cache may outlive its recordings
                self.is_over = True
                _log.warning(
                    "cache %r: utterance %r cannot be computed again (%s): nothing tells whether "
                    "what is stored is still the same",
                    str(live.path), id, describe(error),
                )  # fmt: skip
                return ""
            now, now_texts = results.parted(results.arrays(id, value))
            alone = Probed({}, _copied(now))
        spreads = spreads_of({id: alone}, list(live.features))
        limit = tolerance("fp32", same_device=True)
        unlike = unlike_stored(id, stored, alone, spreads, limit, live.features)
        told = [f"{each.feature!r} of {id!r} {each.told()}" for each in unlike]
        told += [
            f"{name!r} of {id!r} is {now_texts[name]!r:.60}, and {text!r:.60} is stored"
            for name, text in texts.items()
            if now_texts[name] != text
        ]
        return "; ".join(told)


class TwiceComputed:
    """Computes results, the first ones twice."""

    def __init__(self) -> None:
        self._left = _MOST
        self._at_it = threading.Lock()  # held by one thread: all draw from the same generators

    def compute(self, call: Call, taken: Taken, filling: WhileFilling) -> object:
        """Compute a call; raises `FeatureError` if the result is another one each time.

        Args:
            call: the call.
            taken: takes a result apart.
            filling: computes, and compares what that is done with before and after.
        """

        def compared(call: Call) -> object:
            return filling.compute(repr(call.id), call.compute)

        if self._left <= 0 or not self._at_it.acquire(blocking=False):
            return compared(call)
        try:
            value = self._compute_twice(call, taken, compared)
            filling.vouch()  # for others to see it at once
            return value
        finally:
            self._at_it.release()

    def _compute_twice(
        self, call: Call, taken: Taken, compared: Callable[[Call], object]
    ) -> object:
        from featcache.extraction.random_state import RandomState, kept_random_state

        again, before = call.copied(), RandomState.now()
        value = compared(call)
        steady = before.is_now()  # else what is drawn may count for the next result only
        first = _copied(taken(call.id, value))
        with kept_random_state():
            told = _unlike(call.id, first, _copied(taken(call.id, compared(again.copied()))))
            if told:
                before.put_back()
                third = _copied(taken(call.id, compared(again)))
                is_drawn = not steady and not _unlike(call.id, first, third)
                raise FeatureError(_refusal(call.id, told, is_drawn=is_drawn))
        self._left = 0 if steady else self._left - 1
        return value


def _refusal(id: str, told: str, *, is_drawn: bool) -> str:
    if is_drawn:
        return (
            f"utterance {id!r} comes out another way each time: {told}. The function draws from "
            "the global random generators, and a cache would keep one draw for ever: call eval() "
            "on its modules, leave augmentation to what comes behind the cache, or seed it by the "
            "id within the function (torch.manual_seed(zlib.crc32(id.encode())))"
        )
    return (
        f"utterance {id!r} comes out another way each time: {told}. The function has a random "
        "generator of its own, or changes something that it computes with, such as running "
        "statistics or its arguments: a cache would keep what depends on the order of the calls; "
        "make it a function of the utterance alone"
    )


def _copied(arrays: Mapping[str, ArrayLike]) -> dict[str, ProbeRows]:
    """Return copies, as functions may use their memory again; what is no number is left out."""
    from featcache.staleness.probe import as_rows

    found: dict[str, ProbeRows] = {}
    for name, array in arrays.items():
        with contextlib.suppress(TypeError):  # refused when it is stored
            found[name] = as_rows(array)
    return found


def _unlike(id: str, one: Mapping[str, ProbeRows], other: Mapping[str, ProbeRows]) -> str:
    """Return how two results differ, beyond the last bits; empty if they do not."""
    from featcache.staleness.probe import spread, tolerance, unlike

    if one.keys() != other.keys():
        return f"its features are {[*one]}, then {[*other]}"
    for name, before in one.items():
        array = before.array
        limit = tolerance("fp32", same_device=True)
        size = np.abs(array[np.isfinite(array)]).max(initial=0)
        found = unlike((id, name), before, other[name], spread([array]), limit, _LAST_BITS * size)
        if found is not None:
            return f"{name!r} {found.told()}"
    return ""
