"""`featcache.adopt`: a store that others wrote, as a cache whose bytes stay where they lie."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal, cast
from urllib.parse import unquote

import numpy as np

from featcache._checks import directory, named_settings
from featcache._progress import bar
from featcache.adoptable import (
    CONVERT,
    COPY,
    RAW,
    Found,
    FoundFeature,
    Kind,
    Options,
    TimeAxis,
)
from featcache.adoption.checks import check_found, check_shapes
from featcache.adoption.libraries.payloads import LOAD_IT
from featcache.adoption.libraries.refused import known_way, way_out
from featcache.adoption.place import LocalPlace, Tell, UrlPlace, is_pattern, tell_nobody
from featcache.declaration import FeatureStorageConfig
from featcache.errors import (
    AdoptionError,
    CacheError,
    ConfigError,
    NotACacheError,
    RemoteError,
)
from featcache.format import (
    ADOPTED,
    MANIFESTS,
    PARTS,
    SETS,
    Adopted,
    Column,
    ContainerColumns,
    FeatureColumns,
    Header,
    Index,
    Values,
    check_annotations,
    explained,
    kinds_of,
    read_manifest,
    refuse_other_formats,
    stored_sets,
)
from featcache.format import NAME as MANIFEST
from featcache.reading import CachePath, PathOrUrl, read_roots, write_root
from featcache.registry import backend_names, get_backend, get_kind, kind_names, only_reads
from featcache.remote import (
    DEFAULT,
    RemoteOptions,
    RemotePlace,
    is_url,
    options_with_pages,
    requests_to,
)
from featcache.store import Cache
from featcache.store import open as open_cache
from featcache.tables import FeatureTable
from featcache.writing.compact import seal_adopted
from featcache.writing.held import HeldCache
from featcache.writing.open_part import Declarations
from featcache.writing.session import session_of
from featcache.writing.sets import directory_to_write, has_none_of

_log = logging.getLogger("featcache")

# Publishing what an adopted source holds, as the first generation of a cache or of a build.


@dataclass(frozen=True, slots=True)
class Source:
    """A source and its files, as they were when they were first looked at."""

    kind: str
    root: PathOrUrl  # without links on the way
    paths: list[str]  # relative to the root
    sizes: list[int]
    mtimes: list[int]  # nanoseconds; behind a URL states, below 0


def publish_adopted(
    cache: Path, features: Declarations, found: Found, source: Source, *, overwrite: bool
) -> None:
    """Make a source a cache, or a feature set of one; whoever is killed here runs the same again.

    Raises `CacheError` where something is stored already, unless that is to be overwritten.
    """
    index = _index_of(found, source)
    annotations = _columns_of(found, features)
    directory = directory_to_write(cache, features)
    if not overwrite and _rows_in(directory):
        raise CacheError(
            f"cache {str(directory)!r} holds something already; give another directory, or "
            "overwrite=True to replace it"
        )
    if directory != cache and (other := has_none_of(cache, index.hashes)):
        raise CacheError(
            f"{str(other)!r} holds other utterances, none of these: together they would show none; "
            "give another directory, or adopt features of the same ids"
        )
    made_from = {ADOPTED: source.kind}
    with (
        explained(directory, lambda: "the source is as it was"),
        session_of(directory, features, made_from, overwrite=overwrite) as session,
    ):
        key = _key_of((directory, *(each for each, _ in stored_sets(cache))), source)
        write_root(directory, key, source.root)
        header = _header_for(session.held, found)
        seal_adopted(directory, header, Adopted(key, False), index, annotations)
        session.close(True, publish=True)


def _rows_in(cache: Path) -> int:
    try:
        return read_manifest(cache).rows
    except NotACacheError:
        return 0


def _key_of(caches: Iterable[Path], source: Source) -> str:
    """Return a key for the root of a source, which no other root has in a cache or its sets."""
    known, name = [read_roots(each) for each in caches], PurePath(source.root).name or "root"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(
        key for key in names if all(each.get(key, source.root) == source.root for each in known)
    )


def _header_for(held: HeldCache, found: Found) -> Header:
    """Return the header of the part, which replaces what a killed run left sealed."""
    return Header(
        build=held.manifest.building,
        fingerprint=held.manifest.building_fingerprint,
        dims={name: feature.dims for name, feature in found.features.items()},
        block_rows=dict.fromkeys(found.features, 0),
        replaces=tuple(part.entry.name for part in held.sealed()),
    )


def _index_of(found: Found, source: Source) -> Index:
    features = {
        name: FeatureColumns(
            rows=feature.rows,
            checksum=np.zeros(len(found.ids), np.uint64),
            first=feature.first,
            container=feature.container,
            offset=feature.offset,
            nbytes=feature.nbytes,
            block_rows=feature.block_rows,
            skip=feature.skip,
        )
        for name, feature in found.features.items()
    }
    files = ContainerColumns.of(source.paths, source.sizes)
    containers = replace(files, mtimes=np.array(source.mtimes, np.int64))
    return Index.of(found.ids, features, containers, {})


def _columns_of(found: Found, features: Declarations) -> dict[str, Column]:
    """Return annotations as columns, checked as those of a writer are."""
    names = list(found.annotations)
    values: list[Values] = [
        check_annotations(id, dict(zip(names, each, strict=True)), features)
        for id, each in zip(found.ids, zip(*found.annotations.values(), strict=True), strict=False)
    ]
    kinds: Mapping[str, str] = kinds_of(zip(found.ids, values, strict=False))
    return {
        name: Column.of([each.get(name) for each in values], kind) for name, kind in kinds.items()
    }


# `adopt`: an existing store becomes a cache, by an index of where its bytes lie.

MOST_TOLD = 4  # files
COMPRESSED = (".gz", ".tgz", ".bz2", ".xz")
OWN = "memmap"  # format of arrays that are appended to adopted ones


@named_settings("adopt")
def adopt(
    source: CachePath,
    cache: CachePath,
    *,
    kind: str | None = None,
    feature: str = "feats",
    pattern: str | None = None,
    time_axis: TimeAxis = "auto",
    nonfinite: Literal["raise", "keep"] = "raise",
    overwrite: bool = False,
    remote: RemoteOptions = DEFAULT,
) -> Cache:
    """Make a cache of a store that others wrote, where it lies, without a copy.

    The source is never written to. Each file is compared, by size and time of change, when it is
    first read, and again when it is read a second later (at every read where the cache is opened
    with `check_reads=True`), so one that changes is an error. Where a file may be cut short while
    it is open, open the cache with `mapped=False`, or the system ends the process.
    `Cache.collect` gives the cache checksums and statistics, which take one pass over all bytes.
    To append to it, give `CacheWriter` the fingerprint `{"adopted": kind}`.

    A source behind a URL is read by ranges, and is an error where an object has another ETag than
    it had; folders and patterns need a store that lists its objects, as a web server does not.

    Args:
        source: a folder, a file, or files of a folder by a pattern with `*`; or the URL of one.
        cache: the directory of the new cache; not within the source.
        kind: one of the installed kinds, as an error about an unknown one lists them; None: the
            one that recognises the source.
        feature: name of the feature, where the source names none.
        pattern: names of the arrays in files that name them, or of files of one array each without
            their suffix, such as "{feature}/{id}" or "{id}_mel"; what is called otherwise is left
            out.
        time_axis: 0 if the first axis is the frames, also of arrays of one axis, and of those that
            look like a batch of one; 1 if it is the second one, as in mels of shape (80, frames),
            -1 if it is the last one: they are read with the frames first; None if no array has a
            time axis; "auto" takes the first one, but floats of one axis that are all equally long
            for embeddings.
        nonfinite: "keep" where arrays may hold NaN or infinity: no statistics then.
        overwrite: replace what the cache holds, such as what the source was before it changed.
        remote: of a URL: where pages of it are kept, and how its store is asked.

    Raises `AdoptionError` for what cannot be adopted, naming id or file and what to do,
    `CacheError` for a cache that holds the feature already, or other utterances: what is adopted
    into a cache of the same ids is added to its features.

    >>> import numpy as np
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as mine, TemporaryDirectory() as other:
    ...     np.save(f"{mine}/utt-1.npy", np.ones((300, 80), np.float32))
    ...     cache = adopt(mine, f"{other}/cache", feature="fbank")
    ...     cache.read("utt-1", "fbank", 100, 150).shape
    (50, 80)
    """
    given = _one_source(source)
    path = directory(cache, "a cache").absolute()
    options = Options(feature, pattern, time_axis)
    FeatureStorageConfig(feature, nonfinite=nonfinite)  # a wrong name is told before files are read
    if isinstance(given, Path):
        _refuse_inside(path, given)
    with bar(f"adopt {PurePath(given).name}", None, unit=" files") as shown:
        place, what = place_of(given, remote, shown.update)
        chosen = kind_of(place, what, kind)
        if pattern is not None and not getattr(chosen, "takes_pattern", False):
            raise ConfigError(f"kind {chosen.name!r} takes no pattern")
        if pattern is None and not overwrite:
            _refuse_again(path, chosen.name, feature)
        found, adopted = _indexed(place, what, chosen, options)
    declared = {name: _declared(name, each, nonfinite) for name, each in found.features.items()}
    publish_adopted(path, declared, found, adopted, overwrite=overwrite)
    return open_cache(path, remote=remote)


def _indexed(
    place: LocalPlace | UrlPlace, what: str, kind: Kind, options: Options
) -> tuple[Found, Source]:
    """Return what a kind finds in a source, checked, and the files that it lies in."""
    try:
        found = kind.index(place, what, options)
        adopted = _source_of(place, found.containers, kind.name, is_folder=not what)
        check_found(found, adopted.sizes)
        pattern = found.pattern if getattr(kind, "takes_pattern", False) else None
        check_shapes(place.name, found.ids, found.features, options, pattern)
    except AdoptionError as error:
        told = with_way(str(error), Path(place.name) if place.is_local else place.name)
        whose = "" if place.name in str(error) else f"{place.name!r}, as kind {kind.name!r}: "
        raise AdoptionError(f"{whose}{told}") from error
    if isinstance(place, UrlPlace) and not place.is_sure:
        _log.warning(
            "%r: the server gives no ETags, or weak ones: objects that change are noticed by size "
            "and by what it says of their time of change, and by nothing else",
            place.name,
        )
    return found, adopted


def _refuse_inside(cache: Path, source: Path) -> None:
    """Raise `ConfigError` for a cache that would lie in its source."""
    if source.is_dir() and cache.resolve().is_relative_to(source.resolve()):
        raise ConfigError(
            f"the cache {str(cache)!r} would lie in its source {str(source)!r}, where nothing is "
            "written; give another directory"
        )


def _one_source(source: CachePath) -> PathOrUrl:
    if isinstance(source, list | tuple):
        raise ConfigError(
            f"one source is adopted at a time, not {source!r:.80}; give a folder or a pattern, "
            "'dump/*.ark', or adopt each into a cache of its own: featcache.concat reads them as "
            "one"
        )
    return cast(str, source) if is_url(source) else directory(source, "a source").absolute()


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
    place: LocalPlace | UrlPlace, containers: Iterable[str], kind: str, *, is_folder: bool
) -> Source:
    """Return which files a cache reads, below the folder that the user named or their own."""
    named = list(containers)
    whole = [place.absolute(path) for path in named]
    folders = {os.path.dirname(path) for path in whole}  # noqa: PTH120 (no object each)
    for folder in sorted(folders):
        if {PARTS, SETS} & {*folder.split("/")}:
            _refuse_own_at(place, folder)
    root = f"{place.root.rstrip('/')}/"
    if not (is_folder and all(path.startswith(root) for path in whole)):
        common = os.path.commonpath([os.path.dirname(path) for path in whole] or [root])  # noqa: PTH120 (no object each)
        root = f"{common.rstrip('/')}/"
    if len(set(whole)) < len(whole):
        raise AdoptionError(f"kind {kind!r} names a file of {place.name!r} twice")
    seen = [place.status(path) for path in named]
    return Source(
        kind,
        place.url_of(root) if isinstance(place, UrlPlace) else Path(root),
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


def is_own(path: Path) -> bool:
    """Whether a directory is a cache, or was begun to be one."""
    with suppress(PermissionError):  # of a folder that whoever lists it says more about
        return (path / MANIFEST).exists() or all(
            (path / name).is_dir() for name in (PARTS, MANIFESTS)
        )
    return False


def refuse_own(path: Path) -> None:
    """Raise `AdoptionError` for a cache, and for files of one.

    Its index alone tells which utterances of them are deleted, or replaced.
    """
    for each in (path, *path.parents):
        below = path.relative_to(each).parts[:1]
        if (not below or below[0] in (PARTS, SETS)) and is_own(each):
            refuse_other_formats(each)
            what = "lies in" if below else "is"
            raise AdoptionError(
                f"the source {str(path)!r} {what} a cache of featcache, {str(each)!r}, which "
                "featcache.open reads"
            )


def _refuse_own_at(place: LocalPlace | UrlPlace, folder: str) -> None:
    """Raise `AdoptionError` for a folder of a cache, by its path from the root of its system."""
    if isinstance(place, LocalPlace):
        refuse_own(Path(folder))
        return
    for each in (PurePosixPath(folder), *PurePosixPath(folder).parents):
        if place.has(f"{each}/{MANIFEST}"):
            raise AdoptionError(
                f"the source {place.name!r} is a cache of featcache, or lies in one: "
                f"featcache.open({place.url_of(str(each))!r}) reads it"
            )


def place_of(
    source: PathOrUrl, remote: RemoteOptions = DEFAULT, tell: Tell = tell_nobody
) -> tuple[LocalPlace | UrlPlace, str]:
    """Return the place that a kind may look at, and the file in it that the user named."""
    if isinstance(source, str):
        return _place_at(source, options_with_pages(remote), tell)
    refuse_own(source)
    if source.is_dir():
        return LocalPlace(source, tell=tell), ""
    if source.exists():
        return LocalPlace(source.parent, source.name, tell=tell), source.name
    if is_pattern(source.name) and source.parent.is_dir():
        return LocalPlace(source.parent, source.name, tell=tell), ""
    braces = "; '*' stands for what differs in names" if "{" in source.name else ""
    raise AdoptionError(f"the source {str(source)!r} does not exist{braces}")


def _place_at(url: str, options: RemoteOptions, tell: Tell) -> tuple[UrlPlace, str]:
    """Return the place of a URL: of a file where an object is called so, else of a folder."""
    folder, _, name = url.rstrip("/").rpartition("/")
    is_folder = url.endswith("/") or folder.endswith(":/")  # of a whole bucket
    if not is_folder and is_pattern(name):
        return UrlPlace(folder, options, name, tell=tell), ""
    if not is_folder:
        place = UrlPlace(folder, options, unquote(name), tell=tell)
        if place.has(where := place.absolute(unquote(name))):
            if {PARTS, SETS} & {*where.split("/")}:
                _refuse_own_at(place, where)
            return place, unquote(name)
    place = UrlPlace(url, options, tell=tell)
    _refuse_own_at(place, place.root)
    try:
        if next(place.files(), None) is not None:
            return place, ""
    except AdoptionError as error:
        raise AdoptionError(f"there is no object {url!r}, and {error}") from error
    raise AdoptionError(f"the source {url!r} does not exist")


def kind_of(place: LocalPlace | UrlPlace, what: str, name: str | None) -> Kind:
    """Return the kind of that name, or the one that recognises a source."""
    return _recognised(place, what) if name is None else get_kind(name)


def _recognised(place: LocalPlace | UrlPlace, what: str) -> Kind:
    found: list[Kind] = []
    broken: list[str] = []
    for name in kind_names():
        try:
            kind = get_kind(name)
        except ConfigError as error:
            broken.append(str(error))
            continue
        with suppress(AdoptionError):  # it cannot read that
            if kind.recognises(place, what):
                found.append(kind)
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(kind.name) for kind in found)
    told = f"it may be of kinds {names}; give kind=, one of them" if found else _what_it_is(place)
    more = f" ({'; '.join(broken)})" if broken else ""
    raise AdoptionError(f"the source {place.name!r} is not recognised: {told}{more}")


def _what_it_is(place: LocalPlace | UrlPlace) -> str:
    """Return why nothing recognises a place; `AdoptionError` if its files cannot be listed."""
    some = list(itertools.islice(place.files(), MOST_TOLD + 1))
    if not some:
        return "no file is there"
    if all(path.lower().endswith(COMPRESSED) for path in some):
        return f"files such as {some[0]!r} are compressed; {COPY}"
    way = way_out(Path(place.name)) if place.is_local else ""
    if way:
        return way
    more = ", ..." * (len(some) > MOST_TOLD)
    told = ", ".join(map(repr, some[:MOST_TOLD]))
    return (
        f"it is of no installed kind, with files such as {told}{more}; if it is of one of them all "
        f"the same, give kind=, one of {', '.join(map(repr, kind_names()))}; else {CONVERT}"
    )


def with_way(told: str, source: PathOrUrl) -> str:
    """Return a refusal, with the line that loads what no kind reads, where one is known."""
    ends = [end for end in (CONVERT, COPY, LOAD_IT) if told.endswith(end)]
    way = known_way(source) if ends and isinstance(source, Path) else ""
    return told.removesuffix(ends[0]) + way if way else told


# Stores of others as caches for the while of one call, whether they can be adopted or not.

NAME = "work-source"  # begins the name of such a cache
SETTINGS = ("kind", "feature", "pattern", "time_axis", "nonfinite", "remote")  # of `adopt`
SAID = "settings of featcache.adopt, such as kind=, are given as adopting={'kind': ...}"


def foreign_source(
    source: FeatureTable | CachePath, remote: RemoteOptions = DEFAULT
) -> PathOrUrl | None:
    """Return the path or URL of a source that is there and is no cache."""
    if isinstance(source, FeatureTable):
        return None
    if is_url(source):
        place = RemotePlace.of(cast(str, source), remote)
        try:
            requests_to(place).whole(MANIFEST)
        except (FileNotFoundError, RemoteError):  # who may not list is refused what is not there
            return place.url
        return None
    path = directory(source, "a source").absolute()
    if is_own(path):
        return None
    return path if path.exists() or "*" in path.name else None


def check_settings(settings: Mapping[str, object]) -> None:
    """Raise `ConfigError` for what are no settings of `adopt` that other verbs take."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings of featcache.adopt are a mapping by name, not {settings!r}")
    if others := settings.keys() - {*SETTINGS}:
        told = ", ".join(map(repr, SETTINGS))
        raise ConfigError(f"no setting {sorted(others)[0]!r} of featcache.adopt; there are {told}")


@contextmanager
def as_cache(source: PathOrUrl, beside: Path, settings: Mapping[str, Any]) -> Iterator[Cache]:
    """Adopt a source in the directory `beside`; the cache is removed at the end.

    `settings` are those of `adopt`; raises what that raises.
    """
    is_new = not beside.exists()
    try:
        with adopt(source, beside / NAME, overwrite=True, **settings) as cache:
            yield cache
    finally:
        shutil.rmtree(beside / NAME, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # where anything was written
                beside.rmdir()
