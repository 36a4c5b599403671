"""`featcache.through` and `featcache.cache`: read what a cache has, compute and store the rest."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, cast, overload

from torch.utils.data import Dataset

from featcache._checks import directory
from featcache._closing import close_after
from featcache.declaration import Features, by_name
from featcache.errors import ConfigError, NotACacheError, StaleCacheError
from featcache.format import NAME, as_id, check_id, read_manifest, set_of
from featcache.lazy.arguments import Arguments, Call, ItemEntries
from featcache.lazy.data_sets import (
    MadeFromItems,
    check_item,
    entries_of_items,
    ids_of_items,
)
from featcache.lazy.live_cache import ABSENT, MadeFrom, accept_if_same
from featcache.lazy.share import FillPlan, Share
from featcache.reading import ago
from featcache.tables import boxed, escaped, tiles

if TYPE_CHECKING:
    from speechbrain.utils.data_pipeline import DynamicItem

    from featcache.staleness.provenance import Provenance

# `featcache.through`: read what a cache has, compute and store what it lacks.

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_UNNAMED = "feature"


_pid = os.getpid()  # kept: a system call at each read is up to a tenth of it


def _note_pid() -> None:
    global _pid
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_pid)


class _OfProcess:
    """The share of one process; its lock is held while the share is begun or ended.

    A child that is forked has another one: the lock of its parent may be held by a thread that the
    child lacks.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.share: Share | None = None


class ReadThrough:
    """A function of an utterance id, and perhaps of more, whose results are kept in a cache.

    For an id that the cache has it reads; for another one it computes, stores and returns the
    result. That comes back later with the same numbers and in the same type: a torch tensor (on the
    CPU, without gradients), a NumPy array, a list of numbers, a number, or a tuple or dict of
    these. The first result of a cache decides on the type for all.

    Any number of processes may use it at once: workers of DataLoaders, ranks, several runs. Each
    writes a part of its own, durable every two seconds; for an utterance that one of them computes
    the others wait. What was written is published when the process ends, and after half a minute
    in which it only read.

    Threads may share it, from the first call on: one of them computes an utterance, the others wait
    for it. A child that is forked, and whoever unpickles it, has a part of its own; copies are the
    same function. After an interrupt (Ctrl-C) at any line the same call can be made again.

    Attributes:
        path: the cache directory.
    """

    def __init__(
        self, compute: Callable[..., object], plan: FillPlan, *, items: ItemEntries | None = None
    ) -> None:
        self.path = plan.path
        self._compute = compute
        self._items = items
        self._arguments = items or Arguments(compute)
        self._plan = plan
        self._by_pid: dict[int, _OfProcess] = {}  # with those that this process was forked from
        functools.update_wrapper(self, compute, updated=())

    def __call__(self, id: str, *args: object, **kwargs: object) -> object:
        """Return the result for an utterance; the function gets all arguments, the id first."""
        if not isinstance(id, str):
            id = cast(str, as_id(id))
            check_id(id)
        here = self._by_pid.get(_pid)
        share = None if here is None else here.share
        if share is not None:
            found = share.published(id, self._arguments.entry(args, kwargs))
            if found is not ABSENT:
                return found
        call = Call(self._compute, self._arguments, id, args, kwargs)
        return (share or self._begun(call)).get(call)

    @property
    def _name(self) -> str:
        return str(getattr(self, "__qualname__", type(self._compute).__name__))

    def __repr__(self) -> str:
        return f"<ReadThrough of {self._name} into {self.held()}>"

    def _repr_html_(self) -> str:
        head = f"<div><b>{escaped(self._name)}</b> into {escaped(self.path, 120)}</div>"
        return boxed(head, tiles((figure, "") for figure in self._figures()))

    def held(self) -> str:
        """Return in words what the cache holds, and what this process has written beside it."""
        return f"{str(self.path)!r}: {', '.join(self._figures())}"

    def _figures(self) -> list[str]:
        here = self._by_pid.get(_pid)
        written = 0 if here is None or here.share is None else here.share.written
        computed = [f"{written:,} computed here"] if written else []
        try:
            directory = set_of(self.path, self._plan.known_names[0])
            stored = f"{read_manifest(directory).rows:,} stored"
            seconds = time.time() - (directory / NAME).stat().st_mtime
        except NotACacheError:
            return ["no cache yet", *computed]
        except OSError as error:  # a repr must not fail
            return [f"which cannot be read ({type(error).__name__})", *computed]
        return [stored, f"{written:,} computed here", f"last published {ago(seconds)}"]

    def publish(self, *, complete: bool = False) -> None:
        """Show readers of the cache all that is stored, also what other processes sealed.

        Args:
            complete: say that the cache holds all that it is to hold: `FeatureLoader` and others
                refuse it before.

        Raises `CacheLockedError` if another process publishes or writes the cache for a minute.
        """
        self._begun().publish_now(complete or None)

    def close(self) -> None:
        """Publish what this process wrote; used again, it begins anew.

        Calls that other threads have under way then publish theirs when they end.
        """
        here = self._here()
        with here.lock:
            if here.share is not None:
                try:
                    here.share.close()  # an interrupt leaves it to the next `close`
                except StaleCacheError:
                    here.share = None  # it is refused for good, and has let go of all
                    raise
                here.share = None

    def change_file_mode(self, file_mode: Literal["a", "r"]) -> None:
        """Publish what was written, then go on in another mode: that of `featcache.cache`.

        A dynamic item has the method, too, as SpeechBrain's cached ones have.
        """
        _check_mode(file_mode)
        self.close()
        self._plan = replace(self._plan, read_only=file_mode == "r")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_after(error, self.close)

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
        make = functools.partial(type(self), items=self._items)
        return make, (self._compute, self._plan)

    def _here(self) -> _OfProcess:
        return self._by_pid.setdefault(_pid, _OfProcess())

    def _begun(self, call: Call | None = None) -> Share:
        """Return the share of this process; one that begins may accept a cache by a call."""
        here, plan = self._here(), self._plan
        with here.lock:
            if here.share is None:
                plan.fingerprint.begin()
                if call is not None:
                    of_now = plan.known_names, plan.features, plan.fingerprint
                    of_call = call.id, call.compute
                    accept_if_same(plan.path, *of_now, *of_call, is_asked=plan.accept)
                here.share = Share(plan, self)
            return here.share


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
    check: Literal["probe"] | None = "probe",
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
    check: Literal["probe"] | None = "probe",
) -> ReadThroughDataset: ...
def through(
    cache: str | PathLike[str],
    compute: Callable[..., object] | SizedItems,
    *,
    features: Features | None = None,
    fingerprint: Mapping[str, object] | None = None,
    ids: Sequence[str] | None = None,
    accept: bool = False,
    check: Literal["probe"] | None = "probe",
) -> ReadThrough | ReadThroughDataset:
    """Return `compute` with a cache before it: what is there is read, the rest computed and stored.

    Args:
        cache: the cache directory; made at the first result.
        compute: a function of an utterance id, and of whatever else it takes. It returns a tensor,
            an array, a list of numbers, a number, a text or a list of texts; or several, as a dict
            by feature, or as a tuple in the order of `features`, which are numbered where nobody
            names them. Texts are kept as annotations, lists of them as JSON. An id has one
            result, that of the arguments behind it when it was computed. Or a map-style data set
            whose items are such results: then the same data set, with a cache before it.
        features: the declarations; None: as the first result has them, as raw numbers, named after
            the function.
        fingerprint: what else the results are made from, as of `featcache.extract`. The code of
            `compute`, and the modules, constants and settings that it names, are found by
            themselves.
        ids: of the items of a data set; None: its `data_ids` or `ids`, or else what it holds of
            each item: a path, a text, a row. Subsets and concatenations are followed to the data
            sets that have the items. A data set that shows nothing of that is refused: the number
            of an item is another one's in another order, list or split.
        accept: keeps the cache after a change of code or settings, if the first utterance that is
            asked for, a stored one, comes out the same to the bit. So does it for an adopted cache,
            to which it adds what is missing.
        check: "probe" computes the first stored result that a process reads again, and up to three
            more while three seconds last; of a DataLoader's workers the first one does. So does
            each process with items of a data set whose entry is another one now, or a file that it
            names, by size and time. One that cannot be computed again is told in the log. None:
            nothing is.

    Arguments behind the id are compared by value with those that a stored result was computed
    with: numbers, texts, collections and dataclasses of these, short arrays of whole numbers. Of
    other arrays and tensors, whose last bits may differ, dtype and shape are compared; of paths of
    files that moved, the name and the first bytes. Bind settings before, and give each its
    directory: `through("fbank-40", functools.partial(fbank, n_mels=40))`.

    The first result that a process computes is computed twice, and up to seven more while the
    function draws random numbers, whose generators are left as one computing leaves them. A
    function that is random within the cache seeds itself by the id.

    Calls raise `StaleCacheError`, with the differences, if the cache was made by another function,
    or by this one before it was changed, for an id that was computed with other arguments, and for
    a stored result that is another one now;
    `FeatureError` for a result that cannot be stored, or that is another one each time;
    `ComputeError` for a function that asks for the very result that it computes.

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
    plan = replace(plan_of(cache, compute, features, fingerprint, check), accept=accept)
    if callable(compute) and ids is None:
        return ReadThrough(compute, plan)
    if not (hasattr(compute, "__getitem__") and hasattr(compute, "__len__")):
        raise ConfigError(
            "through needs a function of an utterance id, or a data set with items by number and a "
            f"length, not {compute!r:.80}"
        )
    return ReadThroughDataset(cast("SizedItems", compute), plan, ids)


def plan_of(
    cache: str | PathLike[str],
    compute: object,
    features: Features | None,
    fingerprint: Mapping[str, object] | None,
    check: object,
) -> FillPlan:
    """Return the plan to fill a cache, of which all but these is as usual."""
    if check not in ("probe", None):
        raise ConfigError(f"check is 'probe' or None, not {check!r}")
    if not isinstance(fingerprint or {}, Mapping):
        raise ConfigError(f"the fingerprint is a dict of JSON values, not {fingerprint!r:.80}")
    own = getattr(compute, "__name__", "")
    return FillPlan(
        path=directory(cache, "a cache").absolute(),
        features=None if features is None else by_name(features),
        names=(own if _NAME.fullmatch(own) and own != "id" else _UNNAMED,),
        fingerprint=MadeFrom(functools.partial(_provenance, compute), fingerprint or {}),
        check=check is not None,
    )


def _provenance(compute: object) -> list[Provenance]:
    from featcache.staleness.provenance import provenance

    return [provenance(compute)]


# A map-style data set with a cache before it.


class SizedItems(Protocol):
    """A map-style data set of a known length."""

    def __getitem__(self, number: int, /) -> object: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class _ItemOf:
    """Computes an item of a data set."""

    dataset: SizedItems
    is_checked: bool = False  # its order may change

    def __call__(self, id: str, number: int) -> object:
        if self.is_checked:
            check_item(self.dataset, number, id)
        return self.dataset[number]


class ReadThroughDataset(Dataset[object]):
    """A map-style data set whose items are kept in a cache, by id; see `ReadThrough`.

    The cache is complete once it holds all items. The items are what the data set returns, the
    types of the first one being those of all: tensors, arrays, lists of numbers, numbers, texts and
    lists of texts, alone, as a tuple or as a dict.

    Threads may share it, and it may be forked and pickled, as the function may; the data set is
    then read by several threads, or pickled, too.
    """

    def __init__(self, dataset: SizedItems, plan: FillPlan, ids: Sequence[str] | None) -> None:
        size = len(dataset)
        self.dataset = dataset
        self.ids = ids_of_items(dataset) if ids is None else list(ids)
        if len(self.ids) != size or len({*self.ids}) != size:
            raise ConfigError(
                f"the data set has {size} items, and {len(self.ids)} ids were given, "
                f"{len({*self.ids})} of them different; give each item an id of its own"
            )
        given = plan.fingerprint.given
        made_from = MadeFrom(MadeFromItems(dataset, given, ids).provenances, given)
        self.read = ReadThrough(
            _ItemOf(dataset, is_checked=ids is None),
            replace(plan, fingerprint=made_from, expected=self.ids),
            items=ItemEntries(entries_of_items(dataset)),
        )

    def __repr__(self) -> str:
        kind = type(self.dataset).__name__
        return f"<ReadThroughDataset of {kind}, {len(self)} items, {self.read.held()}>"

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> object:
        if not -len(self.ids) <= number < len(self.ids):
            raise IndexError(f"the data set has {len(self.ids)} items, and none at {number}")
        number %= len(self.ids)
        return self.read(self.ids[number], number)

    def publish(self) -> None:
        """Show readers of the cache all that is stored."""
        self.read.publish()

    def close(self) -> None:
        """Publish what this process wrote; used again, it begins anew."""
        self.read.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_after(error, self.close)


# `featcache.cache`: a decorator that keeps a function's results in a cache, in SpeechBrain too.

F = TypeVar("F", bound=Callable[..., object])


def cache(
    cache_location: str | PathLike[str],
    file_mode: Literal["a", "r"] = "a",
    *,
    cache_filename: str | None = None,
    compression: str | int | None = None,
    features: Features | None = None,
    fingerprint: Mapping[str, object] | None = None,
    accept: bool = False,
    check: Literal["probe"] | None = "probe",
) -> Callable[[F], F]:
    """Decorate a function of an utterance id, or a SpeechBrain dynamic item: `through` its cache.

    The call is that of SpeechBrain's `CachedDynamicItem.cache` and `CachedHDF5DynamicItem.cache`,
    in whose place it stands: the first key that the item takes is "id", and the features are named
    after the keys that it provides. Each function has a directory of its own, and each of its
    settings. An id has one result: a call with other arguments behind it is refused, and so is a
    function whose results are random, since they would be frozen; see `featcache.through`.

    Args:
        cache_location: the cache directory; made at the first result.
        file_mode: "a" computes and stores what is missing, "r" raises `ReadOnlyError` for it.
        cache_filename: a cache of that name, less its suffix, within `cache_location`.
        compression: "gzip", or a level from 0 to 9, stores losslessly compressed HDF5; None: raw
            numbers. For anything else declare `features`.
        features, fingerprint, accept, check: as of `featcache.through`; nothing is computed again
            where `file_mode` is "r".

    >>> import tempfile, featcache
    >>> @featcache.cache(tempfile.mkdtemp())
    ... def tokens(id, text):
    ...     return [ord(letter) for letter in text]
    >>> tokens("utt-1", "yes"), tokens("utt-1", "yes")
    ([121, 101, 115], [121, 101, 115])
    """
    _check_mode(file_mode)
    path = _path_of(cache_location, cache_filename)
    storage = _storage(compression)
    if storage and features is not None:
        raise ConfigError(
            "give compression or features, not both: features say how they are stored"
        )

    def decorate(function: F) -> F:
        item: Any = function
        is_item = all(hasattr(item, name) for name in ("takes", "provides", "next_takes"))
        plan = plan_of(path, item.func if is_item else item, features, fingerprint, check)
        plan = replace(plan, storage=storage, read_only=file_mode == "r", accept=accept)
        if not is_item:
            _check_first(item)
            return cast(F, ReadThrough(item, plan))
        plan = replace(plan, names=_names(item) or plan.names)
        item = copy.copy(item)
        item.func = ReadThrough(item.func, plan)
        item.change_file_mode = item.func.change_file_mode
        return cast(F, item)

    return decorate


def _check_mode(file_mode: str) -> None:
    if file_mode not in ("a", "r"):
        raise ConfigError(
            f"file_mode is 'a' or 'r', not {file_mode!r}; to compute everything again remove the "
            "directory"
        )


def _path_of(location: object, filename: str | None) -> Path:
    if callable(location):
        raise ConfigError(
            "the decorator takes the directory of the cache: @featcache.cache('features'), not "
            "@featcache.cache alone"
        )
    path = directory(cast(str, location), "a cache")
    return path if filename is None else path / Path(filename).stem


def _names(item: DynamicItem) -> tuple[str, ...]:
    """Return the keys that a dynamic item provides, after a check of what it takes."""
    if hasattr(item, "current_generator"):
        raise ConfigError(
            f"{item.func!r} gives its results one by one, as a generator; cache a function that "
            "returns them"
        )
    if not item.takes or item.takes[0] != "id":
        raise ConfigError(f"the first key that a cached item takes is 'id', not {item.takes!r}")
    return tuple(item.provides)


def _check_first(function: Callable[..., object]) -> None:
    """Raise `ConfigError` for a function that visibly takes something else before the id."""
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # some builtins tell nothing
        return
    if "id" in names[1:] or names[:1] == ["self"]:
        raise ConfigError(
            f"{function!r} takes {names[0]!r} first, and a cached function takes the utterance id; "
            "give a method of an object by a call: featcache.through(directory, thing.method)"
        )


def _storage(compression: str | int | None) -> dict[str, object]:
    if compression is None:
        return {}
    if compression == "gzip":
        return {"backend": "hdf5", "codec": "gzip"}
    if isinstance(compression, int) and not isinstance(compression, bool):
        return {"backend": "hdf5", "codec": "gzip", "options": {"level": compression}}
    raise ConfigError(
        f"compression is 'gzip', a level from 0 to 9, or None, not {compression!r}; declare "
        "features for others"
    )
