"""`featcache.cache`: a decorator that keeps a function's results in a cache, in SpeechBrain too."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from featcache._checks import directory
from featcache.declaration import Features
from featcache.errors import ConfigError
from featcache.lazy.through import ReadThrough, plan_of

if TYPE_CHECKING:
    from speechbrain.utils.data_pipeline import DynamicItem

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
        file_mode: "a" computes and stores what is missing, "r" raises `KeyNotFoundError` for it.
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
    if file_mode not in ("a", "r"):
        raise ConfigError(
            f"file_mode is 'a' or 'r', not {file_mode!r}; to compute everything again remove the "
            "directory"
        )
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
        return cast(F, item)

    return decorate


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
