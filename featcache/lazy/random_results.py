"""Results that are others each time: computed twice, and refused, since a cache would freeze them.

The first result that a process computes is computed again, and further ones while the function
draws from the global random generators, which are left as one computing leaves them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from featcache.errors import FeatureError
from featcache.extraction.while_filling import WhileFilling
from featcache.interface import Array
from featcache.lazy.arguments import Call
from featcache.writing.arrays import ArrayLike

_MOST = 8  # results that are computed twice
_LAST_BITS = 1e-6  # of single precision

Taken = Callable[[str, object], Mapping[str, ArrayLike]]  # a result as arrays by feature


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


def _copied(arrays: Mapping[str, ArrayLike]) -> dict[str, Array]:
    """Return copies, as functions may use their memory again."""
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        value: Any = array
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
        if np.asarray(value).dtype.kind in "iufb":  # anything else is refused when it is stored
            found[name] = np.atleast_1d(np.array(value))
    return found


def _unlike(id: str, one: Mapping[str, Array], other: Mapping[str, Array]) -> str:
    """Return how two results differ, beyond the last bits; empty if they do not."""
    from featcache.staleness.probe import ProbeRows, spread, tolerance, unlike

    if one.keys() != other.keys():
        return f"its features are {[*one]}, then {[*other]}"
    for name, array in one.items():
        before, now = (ProbeRows(each, len(each)) for each in (array, other[name]))
        limit = tolerance("fp32", same_device=True)
        size = np.abs(array[np.isfinite(array)]).max(initial=0)
        found = unlike((id, name), before, now, spread([array]), limit, _LAST_BITS * size)
        if found is not None:
            return f"{name!r} {found.told()}"
    return ""
