"""`featcache.json`: says what a cache holds, and changes by an atomic rename only."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from featcache.declaration.feature_config import DTYPES
from featcache.errors import CorruptCacheError, FormatVersionError, NotACacheError
from featcache.store.format.files import read_within, write_durably
from featcache.store.format.sealed_json import natural, pack_json, text, unpack_json, within

FORMAT_VERSION = 1
NAME = "featcache.json"
PARTS = "parts"
MANIFESTS = "manifests"  # one of each generation that is still there
INDEX = re.compile(r"index-([0-9]{6,}-[0-9a-f]{8})\.columns")  # the columns of a generation
# names in `requires` and `requires_to_write` that this featcache knows
KNOWN: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Tombstones:
    """The rows of a part that count no more, and the statistics of the others.

    They are in a file of columns.
    """

    file: str  # in the part's directory
    rows: int
    digest: str

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Tombstones:
        """Make tombstones from their JSON form; raises Python's own errors for anything else."""
        return cls(within(content["file"], 1), natural(content["rows"]), text(content["digest"]))


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A sealed part: how many utterances it holds, and how its arrays are cut."""

    name: str
    rows: int
    block_rows: Mapping[str, int]  # rows a block of the codec; 0: one block an array, or raw
    digest: str  # xxh3-64 of its part.json
    tombstones: Tombstones | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PartEntry:
        """Make an entry from its JSON form; raises an error of Python's own for anything else."""
        tombstones = content.get("tombstones")
        return cls(
            name=within(content["name"], 1),
            rows=natural(content["rows"]),
            block_rows={
                within(name, 1): natural(rows) for name, rows in content["block_rows"].items()
            },
            digest=text(content["digest"]),
            tombstones=None if tombstones is None else Tombstones.from_json(tombstones),
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """Ids that a cache is to hold: their number, and a digest of them."""

    count: int
    digest: str  # xxh3-128 of the ids' UTF-8 in ascending order, a zero byte behind each


@dataclass(frozen=True, slots=True)
class Manifest:
    """One generation of a cache."""

    # what it was made from; "features" are the declarations, by name
    fingerprint: Mapping[str, Any]
    generation: int = 0
    write_id: str = ""  # random at each write of the file, so that a writer recognises its own
    previous: str | None = None  # name of the generation before
    index: str = ""  # the file of this generation's columns
    index_digest: str = ""
    build: int = 1  # counts up with each overwrite
    # the build that writers add parts to; an overwrite under way is ahead of `build`
    building: int = 1
    building_fingerprint: str = ""  # xxh3-64 of the fingerprint that `building` is made with
    complete: bool = False
    expected: Expected | None = None
    rows: int = 0
    # shape of a frame; known after the first array
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parts: tuple[PartEntry, ...] = ()
    # name -> name of a generation that is never removed
    tags: Mapping[str, str] = field(default_factory=dict)
    # path -> xxh3-64, of what else belongs to the generation
    files: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()  # names that a reader must know
    requires_to_write: tuple[str, ...] = ()  # names that a writer must know
    # keys that this featcache does not know
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The features' declarations, by name, as `FeatureStorageConfig.to_json` gives them."""
        return cast(dict[str, dict[str, Any]], self.fingerprint["features"])

    @property
    def name(self) -> str:
        """The name of this generation.

        Its number, and what tells it from another of the same number.
        """
        return self.index.removeprefix("index-").removesuffix(".columns")


_FIELDS = [field.name for field in dataclasses.fields(Manifest) if field.name != "others"]


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

    All that it names must be durable already.

    With `keep`, it is also kept under its generation's name.
    """
    manifest = dataclasses.replace(manifest, write_id=secrets.token_hex(8))
    content: dict[str, Any] = {"format": "featcache", "version": FORMAT_VERSION}
    content |= {
        key: value for key, value in dataclasses.asdict(manifest).items() if key != "others"
    }
    data = pack_json(
        content | {key: value for key, value in manifest.others.items() if key not in content}
    )
    if keep:
        write_durably(cache / manifest_file(manifest.name), data)
    write_durably(cache / NAME, data)
    return manifest


def read_manifest(cache: Path, file: str = NAME) -> Manifest:
    """Read the current generation, or that of another file.

    Raises `NotACacheError`, `FormatVersionError` or `CorruptCacheError`, saying what was found.
    """
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
            f"{error}; put a good copy of it back (those of the last generations are in "
            f"{MANIFESTS!r}), or remove it and write the cache again: what is sealed is kept"
        ) from error
    if not isinstance(content, dict) or content.get("format") != "featcache":
        raise NotACacheError(f"{str(cache / file)!r} is not featcache's")
    try:
        _check_version(cache, content)
        return _from_json(cast(dict[str, Any], content))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CorruptCacheError(f"{str(cache / file)!r} is damaged: {error!r}") from error


def check_writable(cache: Path, manifest: Manifest) -> None:
    """Raise `FormatVersionError` if a writer must know more than this featcache does."""
    unknown = sorted({*manifest.requires_to_write} - KNOWN)
    if unknown:
        raise FormatVersionError(
            f"cache {str(cache)!r} can be read, but to write it a featcache is needed that knows "
            f"{', '.join(map(repr, unknown))}; upgrade featcache"
        )


def kept_manifests(cache: Path) -> Iterator[str]:
    """Iterate over the names of the generations whose manifests are kept."""
    directory = cache / MANIFESTS
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.suffix == ".json":
            yield path.stem


def _nothing_there(cache: Path, file: str) -> str:
    if not cache.exists():
        return f"{str(cache)!r} does not exist"
    kept = cache / MANIFESTS
    if file == NAME and kept.is_dir() and any(kept.iterdir()):
        return (
            f"{str(cache)!r} has lost its {file}: put a good copy of it back as "
            f"{str(cache / file)!r} (those of the last generations are in 'manifests'), or write "
            "the cache again: what is sealed is kept"
        )
    inside = sorted(path.parent.name for path in cache.glob(f"*/{NAME}"))[:5]
    below = f"; caches in it: {', '.join(map(repr, inside))}" if inside else ""
    return f"{str(cache)!r} is not a cache: it holds no {file}{below}"


def _check_version(cache: Path, content: Mapping[str, Any]) -> None:
    if natural(content["version"]) > FORMAT_VERSION:
        raise FormatVersionError(
            f"cache {str(cache)!r} has format version {content['version']}, newer than "
            f"{FORMAT_VERSION}, the newest that this featcache reads; upgrade featcache"
        )
    unknown = sorted({text(name) for name in content.get("requires", ())} - KNOWN)
    if content.get("kind") not in (None, "cache") or unknown:
        what = ", ".join(map(repr, unknown or [content["kind"]]))
        raise FormatVersionError(
            f"cache {str(cache)!r} was written by a newer featcache: to read it one must know "
            f"{what}; upgrade featcache"
        )
    if "write_id" not in content:
        raise FormatVersionError(
            f"cache {str(cache)!r} was written by featcache 0.1, before its format was fixed; "
            "write it again"
        )


def _from_json(content: dict[str, Any]) -> Manifest:
    for name, feature in content["fingerprint"]["features"].items():
        within(name, 1)
        if feature["dtype"] not in DTYPES or feature["time_axis"] not in (0, None):
            raise ValueError(f"feature {name!r} is declared as {feature!r}")
        if not isinstance(feature["options"], dict) or not {"codec", "stats"} <= set(feature):
            raise ValueError(f"feature {name!r} is declared as {feature!r}")
        text(feature["codec"])
        for part in content["parts"]:
            natural(part["block_rows"][name])
        if content["parts"] and name not in content["dims"]:
            raise ValueError(f"feature {name!r} has no dims")
    expected, previous = content["expected"], content["previous"]
    return Manifest(
        fingerprint=content["fingerprint"],
        generation=natural(content["generation"], 10**12),
        write_id=text(content["write_id"]),
        previous=None if previous is None else within(previous, 1),
        index=within(content["index"], 1),
        index_digest=text(content["index_digest"]),
        build=natural(content["build"], 10**12),
        building=natural(content["building"], 10**12),
        building_fingerprint=text(content["building_fingerprint"]),
        complete=_flag(content["complete"]),
        expected=None
        if expected is None
        else Expected(natural(expected["count"]), text(expected["digest"])),
        rows=natural(content["rows"]),
        dims={within(name, 1): tuple(map(natural, dims)) for name, dims in content["dims"].items()},
        parts=tuple(PartEntry.from_json(part) for part in content["parts"]),
        tags={text(tag): within(name, 1) for tag, name in content["tags"].items()},
        files={within(path): text(value) for path, value in content["files"].items()},
        requires=tuple(map(text, content["requires"])),
        requires_to_write=tuple(map(text, content["requires_to_write"])),
        others={
            key: value
            for key, value in content.items()
            if key not in (*_FIELDS, "format", "version")
        },
    )


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value
