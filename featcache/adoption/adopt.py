"""`adopt`: an existing store becomes a cache, by an index of where its bytes lie."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from featcache._checks import directory
from featcache.adoptable import RAW, FoundFeature, Kind, Options
from featcache.adoption.checked_found import check_found
from featcache.adoption.place import LocalPlace, is_pattern
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import AdoptionError, CacheError, ConfigError
from featcache.registry import backend_names, get_backend, get_kind, kind_names, only_reads
from featcache.store.cache import Cache, CachePath
from featcache.store.format.feature_sets import stored_sets
from featcache.store.format.manifest import ADOPTED
from featcache.store.format.manifest import NAME as MANIFEST
from featcache.store.opening import open as open_cache
from featcache.store.writing.adopted_source import Source, publish_adopted

MOST_TOLD = 4  # files
OWN = "memmap"  # format of arrays that are appended to adopted ones


def adopt(
    source: CachePath,
    cache: CachePath,
    *,
    kind: str | None = None,
    feature: str = "feats",
    pattern: str | None = None,
    time_axis: Literal[0, "auto"] | None = "auto",
    nonfinite: Literal["raise", "keep"] = "raise",
    overwrite: bool = False,
) -> Cache:
    """Make a cache of a store that others wrote, where it lies, without a copy.

    The source is never written to. Each file is compared, by size and time of change, when it is
    first read, so one that changes is an error. Where a file may be cut short while it is open,
    open the cache with `mapped=False`, or the system ends the process. `Cache.collect` gives the
    cache checksums and statistics, which take one pass over all bytes. To append to it, give
    `CacheWriter` the fingerprint `{"adopted": kind}`.

    Args:
        source: a folder, a file, or files of a folder by a pattern with `*`.
        cache: the directory of the new cache; not within the source.
        kind: one of the installed kinds, as an error about an unknown one lists them; None: the
            one that recognises the source.
        feature: name of the feature, where the source names none.
        pattern: names of the arrays in a file that names them, such as "{feature}/{id}".
        time_axis: 0 if arrays of one axis are frames of one number each; None if no array has a
            time axis; "auto" takes floats of one axis that are all equally long for embeddings.
        nonfinite: "keep" where arrays may hold NaN or infinity: no statistics then.
        overwrite: replace what the cache holds, such as what the source was before it changed.

    Raises `AdoptionError` for what cannot be adopted, naming id or file and what to do,
    `CacheError` for a cache that holds something already.

    >>> import numpy as np
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as mine, TemporaryDirectory() as other:
    ...     np.save(f"{mine}/utt-1.npy", np.ones((300, 80), np.float32))
    ...     cache = adopt(mine, f"{other}/cache", feature="fbank")
    ...     cache.read("utt-1", "fbank", 100, 150).shape
    (50, 80)
    """
    folder = directory(source, "a source").absolute()
    path = directory(cache, "a cache").absolute()
    place, what = place_of(folder)
    if folder.is_dir() and path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"the cache {str(path)!r} would lie in its source {str(folder)!r}, where nothing is "
            "written; give another directory"
        )
    options = Options(feature, pattern, time_axis)
    FeatureStorageConfig(feature, nonfinite=nonfinite)  # a wrong name is told before files are read
    chosen = kind_of(place, what, kind)
    if pattern is not None and not getattr(chosen, "takes_pattern", False):
        raise ConfigError(f"kind {chosen.name!r} takes no pattern")
    if pattern is None and not overwrite:
        _refuse_again(path, chosen.name, feature)
    try:
        found = chosen.index(place, what, options)
        adopted = _source_of(place, found.containers, chosen.name, is_folder=not what)
        check_found(found, adopted.sizes)
    except AdoptionError as error:
        if place.name in str(error):
            raise
        raise AdoptionError(f"{place.name!r}, as kind {chosen.name!r}: {error}") from error
    declared = {name: _declared(name, each, nonfinite) for name, each in found.features.items()}
    publish_adopted(path, declared, found, adopted, overwrite=overwrite)
    return open_cache(path)


def _refuse_again(cache: Path, kind: str, feature: str) -> None:
    """Raise `CacheError` before files are indexed, where such a source was adopted already."""
    for place, stored in stored_sets(cache):
        if stored.rows and feature in stored.features and stored.fingerprint.get(ADOPTED) == kind:
            raise CacheError(
                f"cache {str(place)!r} holds something already, adopted as {feature!r}: "
                "featcache.open reads it; overwrite=True replaces it, another directory, or "
                "another feature=, keeps both"
            )


def _source_of(
    place: LocalPlace, containers: Iterable[str], kind: str, *, is_folder: bool
) -> Source:
    """Say which files a cache reads, below the folder that the user named or their own."""
    named = list(containers)
    whole = [place.absolute(path) for path in named]
    root = f"{place.root.rstrip('/')}/"
    if not (is_folder and all(path.startswith(root) for path in whole)):
        root = f"{os.path.commonpath([os.path.dirname(path) for path in whole] or [root])}/"  # noqa: PTH120 (no object each)
    if len(set(whole)) < len(whole):
        raise AdoptionError(f"kind {kind!r} names a file of {place.name!r} twice")
    seen = [place.status(path) for path in named]
    return Source(
        kind,
        Path(root),
        [path.removeprefix(root) for path in whole],
        [size for size, _ in seen],
        [mtime for _, mtime in seen],
    )


def _declared(name: str, feature: FoundFeature, nonfinite: str) -> FeatureStorageConfig:
    """Return the declaration by which the store reads a feature."""
    backends = [each for each in backend_names() if feature.codec in get_backend(each).codecs]
    if feature.codec == RAW or only_reads(feature.codec):
        backends = [OWN]
    if not backends:
        raise AdoptionError(f"feature {name!r}: no installed format has codec {feature.codec!r}")
    return FeatureStorageConfig(
        name,
        feature.dtype,
        backend=backends[0],
        codec=feature.codec,
        options=feature.options,
        time_axis=0 if feature.has_frames else None,
        nonfinite=nonfinite,
        frame_s=feature.frame_s if feature.has_frames else None,
        offset_s=feature.offset_s if feature.has_frames else 0.0,
    )


def place_of(source: Path) -> tuple[LocalPlace, str]:
    """Return the place that a kind may look at, and the file in it that the user named."""
    if source.is_dir():
        return LocalPlace(source), ""
    if source.exists():
        return LocalPlace(source.parent, source.name), source.name
    if is_pattern(source.name) and source.parent.is_dir():
        return LocalPlace(source.parent, source.name), ""
    braces = "; '*' stands for what differs in names" if "{" in source.name else ""
    raise AdoptionError(f"the source {str(source)!r} does not exist{braces}")


def kind_of(place: LocalPlace, what: str, name: str | None) -> Kind:
    """Return the kind of that name, or the one that recognises a source."""
    return _recognised(place, what) if name is None else get_kind(name)


def _recognised(place: LocalPlace, what: str) -> Kind:
    found: list[Kind] = []
    broken: list[str] = []
    for name in kind_names():
        try:
            kind = get_kind(name)
        except ConfigError as error:
            broken.append(str(error))
            continue
        if kind.recognises(place, what):
            found.append(kind)
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(kind.name) for kind in found)
    told = f"it may be of kinds {names}; give kind=, one of them" if found else _what_it_is(place)
    more = f" ({'; '.join(broken)})" if broken else ""
    raise AdoptionError(f"the source {place.name!r} is not recognised: {told}{more}")


def _what_it_is(place: LocalPlace) -> str:
    """Say why nothing recognises a place; raises `AdoptionError` if its files cannot be listed."""
    some = list(itertools.islice(place.files(), MOST_TOLD + 1))
    if MANIFEST in some:
        return "it is a cache of featcache, which featcache.open reads"
    if not some:
        return "no file is there"
    more = ", ..." * (len(some) > MOST_TOLD)
    told = ", ".join(map(repr, some[:MOST_TOLD]))
    return (
        f"it is of no installed kind, with files such as {told}{more}; if it is of one of them all "
        f"the same, give kind=, one of {', '.join(map(repr, kind_names()))}"
    )
