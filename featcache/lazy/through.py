"""`featcache.through`: read what a cache has, compute and store what it lacks."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, cast, overload

from featcache._checks import directory
from featcache.declaration.feature_config import Features, by_name
from featcache.errors import ConfigError
from featcache.lazy.share import Plan, Share
from featcache.lazy.stale import accept_if_same
from featcache.store.format.ids import as_id, check_id
from featcache.store.writing.unclosed import close_at_exit

if TYPE_CHECKING:
    from featcache.lazy.items import ReadThroughDataset, SizedItems

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_UNNAMED = "feature"
_PATIENCE_S = 60.0  # that others publish


@dataclass(frozen=True)
class MadeFrom:
    """The fingerprint of a function, found out when it is first asked for, and kept."""

    compute: Callable[..., object]
    given: Mapping[str, object]
    data: Sequence[object] = ()  # that count for nothing, though the code may name them

    def __call__(self) -> Mapping[str, object]:
        """Return it, as plain data."""
        return self._found

    @functools.cached_property
    def _found(self) -> Mapping[str, object]:
        from featcache.staleness.provenance import provenance

        return provenance(self.compute, data=self.data).fingerprint(self.given)


class ReadThrough:
    """A function of an utterance id, and perhaps of more, whose results are kept in a cache.

    For an id that the cache has it reads; for another one it computes, stores and returns the
    result. That comes back later with the same numbers and in the same type: a torch tensor (on the
    CPU, without gradients), a NumPy array, a list of numbers, a number, or a tuple or dict of
    these. The first result of a cache decides on the type for all.

    Any number of processes may use it at once: workers of DataLoaders, ranks, several runs. Each
    writes a part of its own, durable every two seconds; for an utterance that one of them computes
    the others wait. Copies share all of this; it may be pickled and forked. What was written is
    published when the process ends, and after half a minute in which it only read.

    Attributes:
        path: the cache directory.
    """

    def __init__(self, compute: Callable[..., object], plan: Plan) -> None:
        self.path = plan.path
        self._compute = compute
        self._plan = plan
        self._share: Share | None = None
        self._inherited: list[Share] = []  # of the process that this one was forked from
        functools.update_wrapper(self, compute, updated=())

    def __call__(self, id: str, *args: object, **kwargs: object) -> object:
        """Return the result for an utterance; the function gets all arguments, the id first."""
        if not isinstance(id, str):
            id = cast(str, as_id(id))
            check_id(id)
        share = self._share
        if share is None or share.pid != os.getpid():
            plan = self._plan
            if plan.accept:
                compute = functools.partial(self._compute, id, *args, **kwargs)
                accept_if_same(
                    plan.path, plan.known_names, plan.features, plan.fingerprint, id, compute
                )
            share = self._begin()
        return share.get(id, self._compute, *args, **kwargs)

    def publish(self, *, complete: bool = False) -> None:
        """Let readers of the cache see all that is stored, also what other processes sealed.

        Args:
            complete: say that the cache holds all that it is to hold: `FeatureLoader` and others
                refuse it before.
        """
        share = self._share
        if share is None or share.pid != os.getpid():
            share = self._begin()
        share.publish(complete or None, patience_s=_PATIENCE_S)

    def close(self) -> None:
        """Publish what this process wrote; used again, it begins anew."""
        share, self._share = self._share, None
        if share is not None and share.pid == os.getpid():
            self._forget()
            share.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:  # as `filtered_sorted` of SpeechBrain does
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the name that the decorator gave it, where it has one."""
        names = getattr(self, "__module__", ""), getattr(self, "__qualname__", "")
        try:
            if _found(*names) is self:
                return _found, names
        except (ImportError, AttributeError, ValueError):  # no name, or that of a local function
            pass
        return type(self), (self._compute, self._plan)

    def _begin(self) -> Share:
        if self._share is not None:
            self._inherited.append(self._share)
        self._share = share = Share(self._plan)
        what = f"the part of {str(self.path)!r} that is filled by reading"
        self._forget = close_at_exit(share, what, Share.close, self, expected=True)
        return share


def _found(module: str, name: str) -> object:
    """Return what is decorated under a name of a module."""
    found: Any = importlib.import_module(module)
    for step in name.split("."):
        found = getattr(found, step)
    return found if isinstance(found, ReadThrough) else found.func


@overload
def through(
    cache: str | PathLike[str],
    compute: Callable[..., object],
    *,
    features: Features | None = None,
    fingerprint: Mapping[str, object] | None = None,
    accept: bool = False,
) -> ReadThrough: ...
@overload
def through(
    cache: str | PathLike[str],
    compute: SizedItems,
    *,
    features: Features | None = None,
    fingerprint: Mapping[str, object] | None = None,
    ids: Sequence[str] | None = None,
    accept: bool = False,
) -> ReadThroughDataset: ...
def through(
    cache: str | PathLike[str],
    compute: Callable[..., object] | SizedItems,
    *,
    features: Features | None = None,
    fingerprint: Mapping[str, object] | None = None,
    ids: Sequence[str] | None = None,
    accept: bool = False,
) -> ReadThrough | ReadThroughDataset:
    """Return `compute` with a cache before it: what is there is read, the rest computed and stored.

    Args:
        cache: the cache directory; made at the first result.
        compute: a function of an utterance id, and of whatever else it takes. It returns a tensor,
            an array, a list of numbers or a number; or several, as a dict by feature, or as a tuple
            in the order of `features`, which are numbered where nobody names them. The id alone
            says which result it is. Or a map-style data set whose items are such results: then the
            same data set, with a cache before it.
        features: the declarations; None: as the first result has them, as raw numbers, named after
            the function.
        fingerprint: what else the results are made from, as of `featcache.extract`. The code of
            `compute`, and the modules, constants and settings that it names, are found by
            themselves.
        ids: of the items of a data set; None: its `data_ids` or `ids`, or else their numbers.
        accept: keeps the cache after a change of code or settings, if the first utterance that is
            asked for, a stored one, comes out the same to the bit. So does it for an adopted cache,
            to which it adds what is missing.

    Calls raise `StaleCacheError`, with the differences, if the cache was made by another function,
    or by this one before it was changed; `FeatureError` for a result that cannot be stored.

    >>> import tempfile, featcache, numpy as np
    >>> def squares(id, limit):
    ...     return np.arange(limit) ** 2
    >>> path = tempfile.mkdtemp()
    >>> with featcache.through(path, squares) as read:
    ...     read("utt-1", 4), read("utt-1", 4)
    (array([0, 1, 4, 9]), array([0, 1, 4, 9]))
    >>> featcache.open(path).read("utt-1", "squares")
    array([0, 1, 4, 9])
    """
    if callable(cache) or isinstance(compute, str | PathLike):
        raise ConfigError(
            "the directory of the cache comes first, then what computes: "
            "featcache.through('features', function)"
        )
    if callable(compute) and ids is None:
        plan = plan_of(cache, compute, features, fingerprint)
        return ReadThrough(compute, replace(plan, accept=accept))
    if not (hasattr(compute, "__getitem__") and hasattr(compute, "__len__")):
        raise ConfigError(
            "through needs a function of an utterance id, or a data set with items by number and a "
            f"length, not {compute!r:.80}"
        )
    from featcache.lazy.items import ReadThroughDataset

    plan = replace(plan_of(cache, compute, features, fingerprint), accept=accept)
    return ReadThroughDataset(cast("SizedItems", compute), plan, ids)


def plan_of(
    cache: str | PathLike[str],
    compute: object,
    features: Features | None,
    fingerprint: Mapping[str, object] | None,
) -> Plan:
    """Return the plan to fill a cache, of which all but these is as usual."""
    if not isinstance(fingerprint or {}, Mapping):
        raise ConfigError(f"the fingerprint is a dict of JSON values, not {fingerprint!r:.80}")
    own = getattr(compute, "__name__", "")
    return Plan(
        path=directory(cache, "a cache").absolute(),
        features=None if features is None else by_name(features),
        names=(own if _NAME.fullmatch(own) and own != "id" else _UNNAMED,),
        fingerprint=MadeFrom(cast(Callable[..., object], compute), fingerprint or {}),
    )
