"""`featcache.json`: the one file that says what a cache holds. It changes by an atomic rename only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from featcache.errors import CorruptCacheError, FormatVersionError, NotACacheError
from featcache.feature import DTYPES
from featcache.store.files import pack_json, unpack_json, within, write_durably

FORMAT_VERSION = 1
NAME = "featcache.json"
PARTS = "parts"


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A sealed part: its files and how its arrays are cut."""

    name: str
    rows: int
    containers: tuple[tuple[str, int], ...]  # POSIX path relative to the cache, size in bytes
    block_rows: Mapping[str, int]  # rows a block of the codec; 0: one block an array, or raw
    digest: str  # xxh3-64 of its part.json


@dataclass(frozen=True, slots=True)
class Manifest:
    """One generation of a cache."""

    fingerprint: Mapping[str, Any]  # what it was made from; "features" are the declarations, by name
    generation: int = 0
    build: int = 1  # counts up with each overwrite
    building: int = 1  # the build that writers add parts to; an overwrite under way is ahead of `build`
    building_fingerprint: str = ""  # xxh3-64 of the fingerprint that `building` is made with
    complete: bool = False
    rows: int = 0
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shape of a frame; known after the first array
    parts: tuple[PartEntry, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)  # xxh3-64 of every column and statistics file

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The declarations of the features, by name, as `FeatureStorageConfig.to_json` gives them."""
        return cast(dict[str, dict[str, Any]], self.fingerprint["features"])

    @property
    def index_directory(self) -> str:
        """Name of the directory of this generation's columns."""
        return f"index-{self.generation:06d}"

    @property
    def stats_directory(self) -> str:
        """Name of the directory of this generation's statistics."""
        return f"stats-{self.generation:06d}"


def write_manifest(cache: Path, manifest: Manifest) -> None:
    """Publish a generation: all that it names must be durable already."""
    content = {"format": "featcache", "version": FORMAT_VERSION} | dataclasses.asdict(manifest)
    write_durably(cache / NAME, pack_json(content))


def read_manifest(cache: Path) -> Manifest:
    """Read the current generation.

    Raises `NotACacheError`, `FormatVersionError` or `CorruptCacheError`, saying what was found.
    """
    try:
        data = (cache / NAME).read_bytes()
    except FileNotFoundError as error:
        what = "does not exist" if not cache.exists() else f"is not a cache: it holds no {NAME}"
        raise NotACacheError(f"{str(cache)!r} {what}") from error
    except NotADirectoryError as error:
        raise NotACacheError(f"{str(cache)!r} is a file, not a cache directory") from error
    try:
        content = unpack_json(data, repr(str(cache / NAME)))
    except CorruptCacheError as error:
        raise CorruptCacheError(
            f"{error}; put a good copy of it back, or remove it and write the cache again: what is sealed is kept"
        ) from error
    if not isinstance(content, dict) or content.get("format") != "featcache":
        raise NotACacheError(f"{str(cache / NAME)!r} is not featcache's")
    try:
        if _natural(content["version"]) > FORMAT_VERSION:
            raise FormatVersionError(
                f"cache {str(cache)!r} has format version {content['version']}, newer than {FORMAT_VERSION}, the "
                "newest that this featcache reads; upgrade featcache"
            )
        return _from_json(cast(dict[str, Any], content))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CorruptCacheError(f"{str(cache / NAME)!r} is damaged: {error!r}") from error


def _from_json(content: dict[str, Any]) -> Manifest:
    for name, feature in content["fingerprint"]["features"].items():
        within(name, 1)
        if feature["dtype"] not in DTYPES or feature["time_axis"] not in (0, None):
            raise ValueError(f"feature {name!r} is declared as {feature!r}")
        if not isinstance(feature["options"], dict) or not {"codec", "stats"} <= set(feature):
            raise ValueError(f"feature {name!r} is declared as {feature!r}")
        for part in content["parts"]:
            _natural(part["block_rows"][name])
        if content["parts"] and name not in content["dims"]:
            raise ValueError(f"feature {name!r} has no dims")
    return Manifest(
        fingerprint=content["fingerprint"],
        generation=_natural(content["generation"]),
        build=_natural(content["build"]),
        building=_natural(content["building"]),
        building_fingerprint=content["building_fingerprint"],
        complete=content["complete"],
        rows=_natural(content["rows"]),
        dims={name: tuple(map(_natural, dims)) for name, dims in content["dims"].items()},
        parts=tuple(part_from_json(part) for part in content["parts"]),
        digests={within(path): value for path, value in content["digests"].items()},
    )


def part_from_json(content: dict[str, Any]) -> PartEntry:
    """Make a part's entry from its JSON form; raises an error of Python's own for anything else."""
    return PartEntry(
        name=within(content["name"], 1),
        rows=_natural(content["rows"]),
        containers=tuple((within(path), _natural(size)) for path, size in content["containers"]),
        block_rows=content["block_rows"],
        digest=content["digest"],
    )


def _natural(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no number of anything")
    return number
