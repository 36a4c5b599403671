"""Stores of others as caches for the while of one call, whether they can be adopted or not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from featcache._checks import directory
from featcache.adoptable import Kind, Options, Readable, ReadsArrays
from featcache.adoption.adopt import adopt, kind_of, place_of
from featcache.adoption.place import LocalPlace
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import AdoptionError, ConfigError
from featcache.store.cache import Cache, CachePath
from featcache.store.format.manifest import ADOPTED, MANIFESTS, PARTS
from featcache.store.format.manifest import NAME as MANIFEST
from featcache.store.writing.cache_writer import CacheWriter
from featcache.tables.table import FeatureTable

NAME = "work-source"  # begins the name of such a cache
SETTINGS = ("kind", "feature", "pattern", "time_axis", "nonfinite")  # of `adopt`
_log = logging.getLogger("featcache")


def foreign_source(source: FeatureTable | Cache | CachePath) -> Path | None:
    """Return the path of a source that is there and is no cache."""
    if isinstance(source, FeatureTable | Cache):
        return None
    path = directory(source, "a source").absolute()
    if (path / MANIFEST).exists() or all((path / name).is_dir() for name in (PARTS, MANIFESTS)):
        return None
    return path if path.exists() or "*" in path.name else None


@contextmanager
def as_cache(
    source: Path, beside: Path, settings: Mapping[str, Any], *, copies: bool = True
) -> Iterator[Cache]:
    """Adopt a source in the directory `beside`; or copy its arrays, if only its library reads them.

    The cache is removed at the end. A copy stays if anything is raised: the same call goes on with
    it. `settings` are those of `adopt`; raises what that raises. Without `copies`, that too for
    what only its library reads.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings of featcache.adopt are a mapping by name, not {settings!r}")
    if others := settings.keys() - {*SETTINGS}:
        told = ", ".join(map(repr, SETTINGS))
        raise ConfigError(f"no setting {sorted(others)[0]!r} of featcache.adopt; there are {told}")
    is_new = not beside.exists()
    try:
        with _cache_of(source, beside, settings, copies) as cache:
            yield cache
        shutil.rmtree(cache.path)
    finally:
        shutil.rmtree(beside / NAME, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # where anything was written
                beside.rmdir()


def _cache_of(source: Path, beside: Path, settings: Mapping[str, Any], copies: bool) -> Cache:
    try:
        return adopt(source, beside / NAME, overwrite=True, **settings)
    except AdoptionError as error:
        place, what = place_of(source)
        kind: Kind = kind_of(place, what, settings.get("kind"))
        if not copies or not isinstance(kind, ReadsArrays):
            raise
        # as text: the error holds the file open
        _log.warning("%s: its arrays are read, and stored twice for the while", str(error))
    options = {key: settings[key] for key in SETTINGS[1:4] if key in settings}
    with kind.readable(place, what, Options(**options)) as readable:
        return _copied(readable, place, beside, kind.name, settings.get("nonfinite", "raise"))


def _copied(
    readable: Readable, place: LocalPlace, beside: Path, kind: str, nonfinite: str
) -> Cache:
    """Write a cache of arrays, or go on with one."""
    features = {
        name: FeatureStorageConfig(
            name,
            stored.dtype,
            dims=stored.dims,
            time_axis=0 if stored.has_frames else None,
            nonfinite=nonfinite,
        )
        for name, stored in readable.features.items()
    }
    state = [(place.absolute(path), *place.status(path)) for path in readable.files]
    digest = xxhash.xxh3_64_hexdigest(repr((state, [*features.values()])).encode())
    path = beside / f"{NAME}-{digest}"
    for left in beside.glob(f"{NAME}*"):  # of what the source was before
        if left != path:
            shutil.rmtree(left, ignore_errors=True)
    with CacheWriter(path, features, {ADOPTED: kind}) as writer:
        for number, id in enumerate(readable.ids):
            if id not in writer:
                writer.write(id, readable.read(number))
    return Cache(path)
