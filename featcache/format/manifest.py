"""`featcache.json`, the manifest: what a cache holds and was made from, and states of its build.

It changes by an atomic rename only. Here are its entries, edits of several feature sets at once,
versions, and the files that belong to a build.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

from featcache.container_files import sync_directory, write_durably
from featcache.declaration import (
    DTYPES,
    KEYS,
    DeclaredFeature,
    FeatureStorageConfig,
    FrameTimes,
)
from featcache.errors import (
    CacheError,
    CorruptCacheError,
    FormatVersionError,
    NotACacheError,
    UnknownNameError,
    nearest,
)
from featcache.format.annotations import KINDS
from featcache.format.files import (
    NOT_AS_WRITTEN,
    OPTIONAL,
    Counter,
    FilePath,
    Json,
    Name,
    NameOrNone,
    Size,
    digest,
    entries,
    fields_of,
    natural,
    newer,
    open_there,
    pack_for_readers,
    pack_json,
    program,
    read_as,
    read_within,
    reading,
    remedy,
    unpack_json,
    within,
)
from featcache.format.fingerprint import digest_of_canonical
from featcache.registry import RAW

# Entries of a manifest: parts and what changed of them, annotations, ids that are expected.


@dataclass(frozen=True, slots=True)
class Tombstones:
    """A file of columns: the rows of a part that count no more, the statistics of the others."""

    file: Name  # in the part's directory
    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class Restamps:
    """A file of columns: stamps of a part's rows, which count in place of those in its index."""

    file: Name  # in the part's directory
    digest: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """The source that a part's containers lie in: a cache names it by a key, see `roots`."""

    root: Name  # the key
    collected: bool  # checksums and statistics are there


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A sealed part: how many utterances it holds, and how its arrays are cut."""

    name: Name
    rows: int
    block_rows: Mapping[Name, int]  # of the codec; 0: one block an array, or raw
    digest: str  # xxh3-64 of its part.json
    tombstones: Tombstones | None = None
    stamps: Restamps | None = field(default=None, metadata=OPTIONAL)
    adopted: Adopted | None = field(default=None, metadata=OPTIONAL)

    @property
    def is_collected(self) -> bool:
        """Whether checksums and statistics are there."""
        return self.adopted is None or self.adopted.collected

    @property
    def beside(self) -> list[Tombstones | Restamps]:
        """The files beside its index that say what counts of it."""
        return [each for each in (self.tombstones, self.stamps) if each is not None]


@dataclass(frozen=True, slots=True)
class AnnotationEntry:
    """An annotation of which some utterances have a value."""

    kind: str
    # its values were given to a generation, not to the parts alone: each one takes them from the
    # generation before
    carried: bool


@dataclass(frozen=True, slots=True)
class Expected:
    """Ids that a cache is to hold: their number, and a digest of them."""

    count: int
    digest: str  # xxh3-128 of the ids' UTF-8 in ascending order, a zero byte behind each


# Feature sets: `sets/featcache.json` names those that were added, each a cache in `sets/<name>/`.
#
#     {"format": "featcache", "version": 1, "kind": "sets", "sets": ["energy"]}
#
# Those that a cache began with lie in its own directory; its manifest requires "sets". An edit of
# several comes into force for all at once: the next manifest of each lies beside its manifest, as
# `next.json`. Then `sets/featcache.json` names, in one step, the `write_id`s of both:
#
#     {..., "next": {".": [<of featcache.json>, <of next.json>], "energy": [...]}}
#
# While a set's `featcache.json` is the one that is named, its `next.json` counts instead.

NEXT = "next.json"
KEY = "next"  # of the file that names the sets
NAME = "featcache.json"
SETS = "sets"  # feature sets, each a cache of its own; the kind of the file that names them
OWN = "."  # the name there of the features that a cache began with
OUTER = "sets/featcache.json"
NAME_SETS = "put it back, or name the feature sets again: featcache.store.repair(path)"


def cache_of_set(directory: Path) -> Path | None:
    """Return the cache that a directory is an added set of; None if of none."""
    cache = directory.parent.parent
    return cache if directory.parent.name == SETS and (cache / OUTER).exists() else None


def set_name(cache: Path, directory: Path) -> str:
    """Return the name of a feature set of a cache."""
    return OWN if directory == cache else directory.name


def read_outer(cache: Path) -> dict[str, object] | None:
    """Read what names the feature sets of a cache; None if there is none."""
    content = _read(cache, OUTER)
    if content is not None:
        _check_version(cache / SETS, content)
    return content


def in_force(directory: Path, content: dict[str, object]) -> dict[str, object]:
    """Return what counts as the manifest of a set: `content`, its own, or what follows that.

    Raises `CorruptCacheError` where that cannot be told.
    """
    return _following(directory, content) or content


def settle(directory: Path) -> None:
    """Put the manifest that counts in its place; one that was never named goes.

    Only the holder of the set's lock may call this.
    """
    if not os.path.lexists(directory / NEXT):
        return
    content = _read(directory, NAME)
    following = None if content is None else _following(directory, content)
    if following is not None:  # first there, then gone: a power cut may undo half of a rename
        write_durably(directory / NAME, pack_json(following))
    (directory / NEXT).unlink(missing_ok=True)
    sync_directory(directory)


def last_pairs(outer: Json) -> dict[str, tuple[str, str]]:
    """Return, by set, the two `write_id`s that `sets/featcache.json` names."""
    found = outer.get(KEY, {})
    pairs = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in pairs):
        raise CorruptCacheError(f"{OUTER!r} of feature sets is damaged: {KEY!r}")
    return {name: (before, after) for name, (before, after) in found.items()}


def _following(directory: Path, content: Mapping[str, object]) -> dict[str, object] | None:
    cache = cache_of_set(directory)
    if cache is None and SETS not in cast(Iterable[str], content.get("requires", ())):
        return None
    outer, name = _read(cache or directory, OUTER) or {}, set_name(cache or directory, directory)
    before, after = last_pairs(outer).get(name, (None, None))
    if before is None or content.get("write_id") != before:
        return None
    found = _read(directory, NEXT)
    if found is not None and found.get("write_id") == after:
        return found
    now = _read(directory, NAME)  # it has come to its place meanwhile
    if now is None or now.get("write_id") == before:
        raise CorruptCacheError(
            f"{str(directory / NEXT)!r} is missing or another one, with the last edit of feature "
            f"set {name!r}; put it back, or {NAME!r} as it was after that edit"
        )
    return now


def _read(directory: Path, file: str) -> dict[str, object] | None:
    try:
        data = read_within(directory, file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        content = unpack_json(data, repr(str(directory / file)))
    except CorruptCacheError as error:
        if file != OUTER:
            raise
        raise CorruptCacheError(f"{error}; {NAME_SETS}") from error
    return content if isinstance(content, dict) else None


# `featcache.json`: says what a cache holds, and changes by an atomic rename only.

FORMAT_VERSION = 1
PARTS = "parts"
MANIFESTS = "manifests"  # one of each generation that is still there
INDEX = re.compile(r"index-([0-9]{6,}-[0-9a-f]{8})\.columns")  # the columns of a generation
# names in `requires` and `requires_to_write` that this featcache knows
STAMPS = "stamps"
ANNOTATIONS = "annotations"
ADOPTED = "adopted"
KNOWN = frozenset({STAMPS, ANNOTATIONS, ADOPTED, SETS})
_BEFORE = (
    "was written by featcache 0.1, before its format was fixed; write it again, into another "
    "directory, or into this one when you have removed it"
)
_COPY = f"put a good copy of it back (those of the last generations are in {MANIFESTS!r})"


class BuildState(Enum):
    """The build that writers add parts to: the one that readers see, or one that is to follow.

    Transitions, each a method of `Manifest` that returns another one:

    | | from | to | `building` | `building_fingerprint` | files and parts | `accepted` |
    |---|---|---|---|---|---|---|
    | `overwritten` | any | aside | one above all | the new one's | given up | stays |
    | the same, made from the same | aside | aside | stays | stays | stay | stays |
    | `begun_anew`, also to give up | any | current | `build` | the new one's | given up | stays |
    | `accepting` | current | current | `build` | the accepted one's | stay | and the one before |
    | the same | aside | current | `build` | the accepted one's | given up | and the one before |
    | `published` | any | current | stays, as `build` | stays | published | of this `build` |
    """

    CURRENT = "current"
    ASIDE = "aside"  # an overwrite, beside the generation that it is to take the place of


@dataclass(frozen=True, slots=True)
class Manifest:
    """One generation of a cache."""

    # what it was made from; "features" are the declarations, by name
    fingerprint: Mapping[str, Any]
    generation: Counter = 0
    write_id: str = ""  # random at each write of the file, so that a writer recognises its own
    previous: Name | None = None  # name of the generation before
    index: NameOrNone = ""  # the file of this generation's columns; "": nothing was published yet
    index_digest: str = ""
    build: Counter = 1  # counts up with each overwrite
    # the build that writers add parts to; an overwrite under way is ahead of `build`
    building: Counter = 1
    building_fingerprint: str = ""  # xxh3-64 of the fingerprint that `building` is made with
    complete: bool = False
    expected: Expected | None = None
    rows: int = 0
    by: str = field(default="", metadata=OPTIONAL)  # the program that began the build
    # shape of a frame; known after the first array
    dims: Mapping[Name, tuple[int, ...]] = field(default_factory=dict)
    parts: tuple[PartEntry, ...] = ()
    # name -> name of a generation that is never removed
    tags: Mapping[str, Name] = field(default_factory=dict)
    # path -> xxh3-64, of what else belongs to the generation
    files: Mapping[FilePath, str] = field(default_factory=dict)
    # path -> bytes, of all files that the generation leads to but its containers: readers of object
    # stores ask for none. Absent in manifests of before; a file that was damaged already has none
    sizes: Mapping[FilePath, Size] = field(default_factory=dict, metadata=OPTIONAL)
    # the same as `files`, of the build that writers add parts to; they are of its next generation
    building_files: Mapping[Name, str] = field(default_factory=dict, metadata=OPTIONAL)
    # parts of a build that is no generation yet, of which rows are deleted
    building_parts: tuple[PartEntry, ...] = field(default=(), metadata=OPTIONAL)
    # digests of earlier fingerprints of `build` that compute the same, as somebody has said
    accepted: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    annotations: Mapping[Name, AnnotationEntry] = field(default_factory=dict, metadata=OPTIONAL)
    # parts that may still be on disk, and count no more: others have taken their place
    replaced: tuple[Name, ...] = field(default=(), metadata=OPTIONAL)
    requires: tuple[str, ...] = ()  # names that a reader must know
    requires_to_write: tuple[str, ...] = ()  # names that a writer must know
    # keys that this featcache does not know
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> dict[str, DeclaredFeature]:
        """The features' declarations, by name, as `FeatureStorageConfig.to_json` gives them."""
        return cast(dict[str, DeclaredFeature], self.fingerprint["features"])

    @property
    def declared(self) -> dict[str, FeatureStorageConfig]:
        """The features' declarations, by name."""
        return {name: FeatureStorageConfig.from_json(each) for name, each in self.features.items()}

    @property
    def made_from(self) -> dict[str, object]:
        """The fingerprint without the declarations."""
        return {key: each for key, each in self.fingerprint.items() if key != "features"}

    def is_building(self, build: int, fingerprint: str) -> bool:
        """Whether a part is of the build that writers add parts to."""
        if build != self.building:
            return False
        same = build == self.build and fingerprint in self.accepted
        return same or fingerprint == self.building_fingerprint

    @property
    def state(self) -> BuildState:
        """State of the build that writers add parts to."""
        return BuildState.ASIDE if self.building > self.build else BuildState.CURRENT

    def overwritten(self, made_from: Mapping[str, object]) -> Manifest:
        """Begin an overwrite, or go on with the one that is made from the same."""
        made_of = digest_of_canonical(made_from)
        if self.state is BuildState.ASIDE and self.building_fingerprint == made_of:
            return self
        building = max(self.build, self.building) + 1
        return replace(self._given_up(), building=building, building_fingerprint=made_of)

    def begun_anew(self, made_from: Mapping[str, object]) -> Manifest:
        """Add to the build that readers see, where what it holds is made from this, or nothing."""
        made_of = digest_of_canonical(made_from)
        begun = replace(self._given_up(), fingerprint=made_from, building_fingerprint=made_of)
        return replace(begun, by=self.by if self.rows else program())

    def accepting(self, made_from: Mapping[str, object]) -> Manifest:
        """Take what readers see for made from this, too; an overwrite is given up."""
        manifest = self._given_up() if self.state is BuildState.ASIDE else self
        return replace(
            manifest,
            fingerprint=made_from,
            building_fingerprint=digest_of_canonical(made_from),
            accepted=tuple(dict.fromkeys((*self.accepted, digest_of_canonical(self.fingerprint)))),
        )

    def published(self) -> Manifest:
        """Show readers the build that writers add parts to, with the files that were kept for it.

        Of an overwritten build, files of later versions of featcache stay.
        """
        aside, new = self.state is BuildState.ASIDE, self.building_files
        gone = {*ROLES} if aside else {role_of(path) for path in new}
        stay = {path: each for path, each in self.files.items() if role_of(path) not in gone}
        accepted = () if aside else self.accepted
        return replace(
            self,
            build=self.building,
            building_files={},
            building_parts=(),
            files=stay | {**new},
            accepted=accepted,
            by=program() if aside else self.by,
        )

    def _given_up(self) -> Manifest:
        return replace(self, building=self.build, building_files={}, building_parts=())

    def building_file(self, role: str) -> dict[str, str]:
        """Return path and digest of the file of a role that the build has; one at most."""
        published = self.files if self.state is BuildState.CURRENT else {}
        return of_role(self.building_files, role) or of_role(published, role)

    @property
    def is_collected(self) -> bool:
        """Whether the checksums and statistics of all parts are there."""
        return all(part.is_collected for part in self.parts)

    @property
    def name(self) -> str:
        """The name of this generation: its number, and what tells it from others of that number."""
        return self.index.removeprefix("index-").removesuffix(".columns")


_KEYS = {field.name for field in dataclasses.fields(Manifest)} - {"others"} | {"format", "version"}


def new_generation_name(generation: int) -> str:
    """Return the name of a generation, which no other publisher gives."""
    return f"{generation:06d}-{secrets.token_hex(4)}"


def generation_number(name: str) -> int:
    """Return the number in the name of a generation; 0 if there is none."""
    digits = name.partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def index_file(name: str) -> str:
    """Return the file of the columns of a generation, relative to the cache."""
    return f"index-{name}.columns"


def manifest_file(name: str) -> str:
    """Return where the manifest of a generation is kept, relative to the cache."""
    return f"{MANIFESTS}/{name}.json"


def write_manifest(
    cache: Path, manifest: Manifest, *, keep: bool = False, file: str = NAME
) -> Manifest:
    """Write `featcache.json`, or what is to follow it, and return it as it stands there.

    All that it names must be durable already, but for its index. With `keep`, it is also kept under
    its generation's name, and names in the cache's own directory are made durable.
    """
    manifest = replace(manifest, write_id=secrets.token_hex(8))
    content = fields_of(manifest)
    del content["others"]
    head = {"format": "featcache", "version": FORMAT_VERSION}
    data = pack_for_readers({**head, **content, **manifest.others})
    copy = cache / manifest_file(manifest.name) if keep else None
    if copy is not None:
        copy.parent.mkdir(exist_ok=True)
    index = cache / manifest.index
    after = (index,) if manifest.index and index.exists() else ()
    write_durably(cache / file, data, alone=not keep, after=after, copy=copy)
    return manifest


def refuse_other_formats(cache: Path) -> None:
    """Raise `FormatVersionError` for a cache of before format 1, or of a newer one.

    Says nothing of a directory that is no cache, or of a damaged one.
    """
    with contextlib.suppress(NotACacheError, CorruptCacheError):
        read_manifest(cache)


def read_manifest(cache: Path, file: str = NAME, *, alone: bool = False) -> Manifest:
    """Read the current generation, or that of another file.

    With `alone`, an edit of several feature sets counts only where it is in its place. Raises
    `NotACacheError`, `FormatVersionError` or `CorruptCacheError`, and says what is there.
    """
    content = read_content(cache, file)
    try:
        if file == NAME and not alone:
            content = in_force(cache, content)
        _check_version(cache, content)
        if content.get("kind") == SETS:
            if cache.name != SETS:
                raise FormatVersionError(f"cache {str(cache)!r} {_BEFORE}")
            raise NotACacheError(
                f"{str(cache / file)!r} names the feature sets of a cache, {str(cache.parent)!r}"
            )
        others = {key: value for key, value in content.items() if key not in _KEYS}
        manifest = read_as(Manifest, content | {"others": others})
        _check_declarations(cache, manifest)
    except NOT_AS_WRITTEN as error:
        raise CorruptCacheError(f"{str(cache / file)!r} is damaged: {error!r}") from error
    return manifest


def read_content(cache: Path, file: str = NAME) -> dict[str, object]:
    """Read the object that a manifest is, of whatever kind and version."""
    try:
        data = read_within(cache, file)
    except FileNotFoundError as error:
        raise NotACacheError(_nothing_there(cache, file)) from error
    except NotADirectoryError as error:
        raise NotACacheError(f"{str(cache)!r} is a file, not a cache directory") from error
    try:
        content = unpack_json(data, repr(str(cache / file)))
    except CorruptCacheError as error:
        mended = (
            "featcache.store.repair(path) restores it where it can prove which copy it was; else "
        )
        mended = mended if file == NAME else ""
        raise CorruptCacheError(
            f"{error}; {mended}{_COPY}, or remove it and write the cache again: what is sealed is "
            "kept"
        ) from error
    if not isinstance(content, dict) or content.get("format") != "featcache":
        raise NotACacheError(f"{str(cache / file)!r} is not featcache's")
    return content


def kept_manifests(cache: Path) -> list[str]:
    """List the names of the generations whose manifests are kept."""
    return [
        entry.name.removesuffix(".json")
        for entry in entries(cache / MANIFESTS)
        if entry.name.endswith(".json")
    ]


def proven_generation(cache: Path) -> str | None:
    """Return the generation whose kept manifest a damaged `featcache.json` was, if that is proved.

    The same was written to both: each write has a `write_id` of its own, and the first bytes are
    the hash of the rest. Either of these, still to be read, says which one it was. Of a manifest
    that was written without a generation, an overwrite begun, say, there is no copy.
    """
    try:
        data = read_within(cache, NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for name in kept_manifests(cache):
        with contextlib.suppress(CacheError, OSError):
            manifest = read_manifest(cache, manifest_file(name))
            seal = read_within(cache, manifest_file(name))[:20]
            written = re.fullmatch("[0-9a-f]{16}", manifest.write_id)
            told = written is not None and f'"{manifest.write_id}"'.encode() in data
            if manifest.name == name and (told or data.startswith(seal)):
                return name
    return None


def _nothing_there(cache: Path, file: str) -> str:
    if not cache.exists():
        return f"{str(cache)!r} does not exist"
    kept = cache / MANIFESTS
    if file == NAME and kept.is_dir() and any(kept.iterdir()):
        return (
            f"{str(cache / file)!r} is lost; {_COPY}, or write the cache again: what is sealed is "
            "kept"
        )
    inside = sorted(path.parent.name for path in cache.glob(f"*/{NAME}"))[:5]
    below = f"; caches in it: {', '.join(map(repr, inside))}" if inside else ""
    return f"{str(cache)!r} is not a cache: it holds no {file}{below}"


def _check_version(cache: Path, content: Json) -> None:
    if natural(content["version"]) > FORMAT_VERSION:
        raise FormatVersionError(
            f"cache {str(cache)!r} has format version {content['version']}, newer than "
            f"{FORMAT_VERSION}, the newest that this featcache reads; upgrade featcache"
        )
    unknown = sorted({*read_as(tuple[str, ...], content.get("requires", ()))} - KNOWN)
    if content.get("kind") not in (None, "cache", SETS) or unknown:
        what = ", ".join(map(repr, unknown or [content["kind"]]))
        raise newer(f"cache {str(cache)!r}", what)
    if "write_id" not in content and content.get("kind") != SETS:
        raise FormatVersionError(f"cache {str(cache)!r} {_BEFORE}")


def _check_declarations(cache: Path, manifest: Manifest) -> None:
    by_feature = (manifest.dims, *(part.block_rows for part in manifest.parts))
    for name, feature in manifest.features.items():
        within(name, 1)
        if "codec_options" not in feature:
            raise FormatVersionError(f"cache {str(cache)!r} {_BEFORE}")
        if not (
            all(isinstance(feature[key], str) for key in ("dtype", "codec", "nonfinite"))
            and all(isinstance(feature[key], dict) for key in ("options", "codec_options"))
            and isinstance(feature["time_axis"], int | None)
            and "stats" in feature
        ):
            raise ValueError(f"feature {name!r} is declared as {feature!r}")
        if unknown := _unknown_to_readers(feature):
            raise newer(f"feature {name!r} of cache {str(cache)!r}", unknown)
        FrameTimes.declared(feature)  # which tells what cannot be
        if manifest.parts and not all(name in each for each in by_feature):
            raise ValueError(f"feature {name!r} has no dims, or no block_rows in some part")
    for name, annotation in manifest.annotations.items():
        if annotation.kind not in KINDS:
            where = f"annotation {name!r} of cache {str(cache)!r}"
            raise newer(where, f"the kind {annotation.kind!r}")


def _unknown_to_readers(feature: Json) -> str:
    """Return what of a declaration this featcache does not know, for a message."""
    known = {"dtype": DTYPES, "time_axis": (0, None), "nonfinite": ("raise", "keep")}
    found = [
        f"{key} {feature[key]!r}" for key, values in known.items() if feature[key] not in values
    ]
    found += [repr(key) for key in sorted(feature.keys() - KEYS)]
    if feature["codec"] == RAW:  # any other codec knows its own
        found += [f"the option {key!r} of codec {RAW!r}" for key in feature["codec_options"]]
    return ", ".join(found)


# Versions of a cache: generations that have a tag, or are still there.


def tags_of(cache: Path) -> Mapping[str, str]:
    """Return the names of the generations that have tags, by tag."""
    with reading(cache):
        return read_manifest(cache).tags


def name_of(cache: Path, version: str) -> str:
    """Return the name of the generation of a tag; raises `UnknownNameError` for an unknown one."""
    tags = tags_of(cache)
    if version not in tags:
        raise UnknownNameError(
            f"cache {str(cache)!r} has no version {version!r}; {nearest(version, tags)}"
        )
    return tags[version]


def is_of_current_build(cache: Path, name: str) -> bool:
    """Whether a generation is still there, and its parts with it."""
    try:
        with reading(cache):
            return read_manifest(cache, manifest_file(name)).build == read_manifest(cache).build
    except NotACacheError:
        return False


# Files beside the features that belong to a build: its probe, and what it was made from.
#
# A file is named `<role>-<8 random hexadecimal digits>` and the extension of its role; the
# manifest names it, with its digest.

ROLES = {"probe": "bin", "made-from": "json"}  # and the extension of each
MOST_BYTES = 64 << 20
_NAMES = "|".join(rf"{role}-[0-9a-f]{{8}}\.{extension}" for role, extension in ROLES.items())
KEPT_FILE = re.compile(_NAMES)


def role_of(path: str) -> str | None:
    """Return the role of a file; None for one of a later version."""
    return path.rpartition("-")[0] if KEPT_FILE.fullmatch(path) else None


def check_role(role: str) -> None:
    """Raise `UnknownNameError` for what is no role."""
    if role not in ROLES:
        raise UnknownNameError(f"no role of a file is {role!r}; {nearest(role, ROLES)}")


def new_file(role: str) -> str:
    """Return a name for a file of a role, which no other has."""
    return f"{role}-{secrets.token_hex(4)}.{ROLES[role]}"


def of_role(files: Mapping[str, str], role: str) -> dict[str, str]:
    """Return those of some files that have a role, which is one at most."""
    return {path: each for path, each in files.items() if role_of(path) == role}


def read_kept(cache: Path, files: Mapping[str, str], role: str) -> bytes | None:
    """Read the file of a role; None if there is none.

    Raises `CorruptCacheError` if it is missing or is not what was written.
    """
    check_role(role)
    for path, expected in of_role(files, role).items():
        with open(open_there(cache, path), "rb") as file:  # noqa: PTH123 (a descriptor)
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES or digest(data) != expected:
            raise CorruptCacheError(
                f"{str(cache / path)!r} is damaged: its checksum does not match; "
                f"{remedy(cache, path)}"
            )
        return data
    return None


def read_building_file(cache: Path, role: str) -> bytes | None:
    """Read the file of a role that was kept for the build that is being written.

    None if there is none. Raises `CorruptCacheError` as `Generation.file` does.
    """
    return read_kept(cache, read_manifest(cache).building_file(role), role)
