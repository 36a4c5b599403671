"""`featcache.json`: says what a cache holds, and changes by an atomic rename only."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from featcache.declaration.feature_config import DTYPES
from featcache.declaration.frame_times import FrameTimes
from featcache.errors import CorruptCacheError, FormatVersionError, NotACacheError
from featcache.store.format import checked
from featcache.store.format.annotations import KINDS
from featcache.store.format.checked import OPTIONAL
from featcache.store.format.files import read_within, write_durably
from featcache.store.format.manifest_entries import AnnotationEntry, Expected, PartEntry
from featcache.store.format.sealed_json import pack_json, unpack_json

FORMAT_VERSION = 1
NAME = "featcache.json"
PARTS = "parts"
MANIFESTS = "manifests"  # one of each generation that is still there
SETS = "sets"  # feature sets, each a cache of its own; the kind of the manifest that names them
INDEX = re.compile(r"index-([0-9]{6,}-[0-9a-f]{8})\.columns")  # the columns of a generation
# names in `requires` and `requires_to_write` that this featcache knows
STAMPS = "stamps"
ANNOTATIONS = "annotations"
ADOPTED = "adopted"
KNOWN = frozenset({STAMPS, ANNOTATIONS, ADOPTED})
_COPY = f"put a good copy of it back (those of the last generations are in {MANIFESTS!r})"


class FeatureSetsError(NotACacheError):
    """The error of who takes a cache of feature sets for a plain one."""

    def __init__(self, cache: Path, names: tuple[str, ...]) -> None:
        super().__init__(
            f"{str(cache)!r} holds feature sets, each a cache in {str(cache / SETS)!r}: "
            f"{', '.join(map(repr, names))}; open it again, or one of them"
        )
        self.names = names


@dataclass(frozen=True, slots=True)
class Manifest:
    """One generation of a cache."""

    # what it was made from; "features" are the declarations, by name
    fingerprint: Mapping[str, Any]
    generation: checked.Counter = 0
    write_id: str = ""  # random at each write of the file, so that a writer recognises its own
    previous: checked.Name | None = None  # name of the generation before
    index: checked.Name = ""  # the file of this generation's columns
    index_digest: str = ""
    build: checked.Counter = 1  # counts up with each overwrite
    # the build that writers add parts to; an overwrite under way is ahead of `build`
    building: checked.Counter = 1
    building_fingerprint: str = ""  # xxh3-64 of the fingerprint that `building` is made with
    complete: bool = False
    expected: Expected | None = None
    rows: int = 0
    # shape of a frame; known after the first array
    dims: Mapping[checked.Name, tuple[int, ...]] = field(default_factory=dict)
    parts: tuple[PartEntry, ...] = ()
    # name -> name of a generation that is never removed
    tags: Mapping[str, checked.Name] = field(default_factory=dict)
    # path -> xxh3-64, of what else belongs to the generation
    files: Mapping[checked.FilePath, str] = field(default_factory=dict)
    # the same, of the build that writers add parts to; they belong to the next generation of it
    building_files: Mapping[checked.Name, str] = field(default_factory=dict, metadata=OPTIONAL)
    # parts of a build that is no generation yet, of which rows are deleted
    building_parts: tuple[PartEntry, ...] = field(default=(), metadata=OPTIONAL)
    # digests of earlier fingerprints of `build` that compute the same, as somebody has said
    accepted: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    annotations: Mapping[checked.Name, AnnotationEntry] = field(
        default_factory=dict, metadata=OPTIONAL
    )
    # parts that may still be on disk, and count no more: others have taken their place
    replaced: tuple[checked.Name, ...] = field(default=(), metadata=OPTIONAL)
    requires: tuple[str, ...] = ()  # names that a reader must know
    requires_to_write: tuple[str, ...] = ()  # names that a writer must know
    # keys that this featcache does not know
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The features' declarations, by name, as `FeatureStorageConfig.to_json` gives them."""
        return cast(dict[str, dict[str, Any]], self.fingerprint["features"])

    def is_building(self, build: int, fingerprint: str) -> bool:
        """Tell whether a part is of the build that writers add parts to."""
        if build != self.building:
            return False
        same = build == self.build and fingerprint in self.accepted
        return same or fingerprint == self.building_fingerprint

    @property
    def is_collected(self) -> bool:
        """True if the checksums and statistics of all parts are there."""
        return all(part.is_collected for part in self.parts)

    @property
    def name(self) -> str:
        """The name of this generation: its number, and what tells it from others of that number."""
        return self.index.removeprefix("index-").removesuffix(".columns")


_KEYS = {field.name for field in dataclasses.fields(Manifest)} - {"others"} | {"format", "version"}
_OPTIONAL = {
    field.name
    for kind in (Manifest, PartEntry)
    for field in dataclasses.fields(kind)
    if field.metadata == OPTIONAL
}


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


def write_manifest(cache: Path, manifest: Manifest, *, keep: bool = False) -> Manifest:
    """Write `featcache.json`, and return it as it stands there.

    All that it names must be durable already. With `keep`, it is also kept under its generation's
    name.
    """
    manifest = dataclasses.replace(manifest, write_id=secrets.token_hex(8))
    content = dataclasses.asdict(manifest, dict_factory=_without_empty)
    others = content.pop("others")
    data = pack_json({"format": "featcache", "version": FORMAT_VERSION} | content | others)
    if keep:
        write_durably(cache / manifest_file(manifest.name), data)
    write_durably(cache / NAME, data)
    return manifest


def _without_empty(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if value or key not in _OPTIONAL}


def read_manifest(cache: Path, file: str = NAME) -> Manifest:
    """Read the current generation, or that of another file.

    Raises `NotACacheError`, `FormatVersionError` or `CorruptCacheError`, and says what is there;
    `FeatureSetsError` for a cache of feature sets.
    """
    content = read_content(cache, file)
    try:
        _check_version(cache, content)
        if content.get("kind") == SETS:
            raise FeatureSetsError(cache, checked.read_as(tuple[checked.Name, ...], content[SETS]))
        others = {key: value for key, value in content.items() if key not in _KEYS}
        manifest = checked.read_as(Manifest, content | {"others": others})
        _check_declarations(manifest)
    except checked.NOT_AS_WRITTEN as error:
        raise CorruptCacheError(f"{str(cache / file)!r} is damaged: {error!r}") from error
    return manifest


def read_content(cache: Path, file: str = NAME) -> dict[str, Any]:
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
        raise CorruptCacheError(
            f"{error}; {_COPY}, or remove it and write the cache again: what is sealed is kept"
        ) from error
    if not isinstance(content, dict) or content.get("format") != "featcache":
        raise NotACacheError(f"{str(cache / file)!r} is not featcache's")
    return content


def check_writable(cache: Path, manifest: Manifest) -> None:
    """Raise `FormatVersionError` if a writer must know more than this featcache does."""
    unknown = sorted({*manifest.requires_to_write} - KNOWN)
    if unknown:
        raise FormatVersionError(
            f"cache {str(cache)!r} can be read, but to write it a featcache is needed that knows "
            f"{', '.join(map(repr, unknown))}; upgrade featcache"
        )


def with_needed(names: Iterable[str], needed: Mapping[str, bool]) -> tuple[str, ...]:
    """Return `requires_to_write` with the names that are needed now, and without those not so."""
    now = {name for name, is_needed in needed.items() if is_needed}
    return tuple(sorted({*names} - {*needed} | now))


def kept_manifests(cache: Path) -> Iterator[str]:
    """Iterate over the names of the generations whose manifests are kept."""
    for path in sorted((cache / MANIFESTS).glob("*.json")):
        yield path.stem


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


def _check_version(cache: Path, content: Mapping[str, Any]) -> None:
    if checked.natural(content["version"]) > FORMAT_VERSION:
        raise FormatVersionError(
            f"cache {str(cache)!r} has format version {content['version']}, newer than "
            f"{FORMAT_VERSION}, the newest that this featcache reads; upgrade featcache"
        )
    unknown = sorted({*checked.read_as(tuple[str, ...], content.get("requires", ()))} - KNOWN)
    if content.get("kind") not in (None, "cache", SETS) or unknown:
        what = ", ".join(map(repr, unknown or [content["kind"]]))
        raise FormatVersionError(
            f"cache {str(cache)!r} was written by a newer featcache: to read it one must know "
            f"{what}; upgrade featcache"
        )
    if "write_id" not in content and content.get("kind") != SETS:
        raise FormatVersionError(
            f"cache {str(cache)!r} was written by featcache 0.1, before its format was fixed; "
            "write it again"
        )


def _check_declarations(manifest: Manifest) -> None:
    by_feature = (manifest.dims, *(part.block_rows for part in manifest.parts))
    for name, feature in manifest.features.items():
        checked.within(name, 1)
        if not (
            feature["dtype"] in DTYPES
            and feature["time_axis"] in (0, None)
            and isinstance(feature["options"], dict)
            and isinstance(feature["codec"], str)
            and "stats" in feature
        ):
            raise ValueError(f"feature {name!r} is declared as {feature!r}")
        FrameTimes.declared(feature)  # which tells what cannot be
        if manifest.parts and not all(name in each for each in by_feature):
            raise ValueError(f"feature {name!r} has no dims, or no block_rows in some part")
    for name, annotation in manifest.annotations.items():
        if annotation.kind not in KINDS:
            raise ValueError(f"annotation {name!r} is of a kind {annotation.kind!r}")
