"""Roots: the directories that adopted parts' containers lie below.

`adopted.json` in the cache maps keys to absolute paths: `{"fbank": "/data/fbank"}`. It is of one
machine, so nothing digests it, and it may be edited. A part names its root by the key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcache._checks import directory
from featcache.errors import ConfigError, CorruptCacheError, nearest
from featcache.store.format.checked import NOT_AS_WRITTEN, Name, read_as
from featcache.store.format.files import read_within, write_durably
from featcache.store.format.manifest_entries import PartEntry

NAME = "adopted.json"
Roots = Mapping[str, Path]
NO_ROOTS: Roots = {}


@dataclass(frozen=True, slots=True)
class Root:
    """The place of an adopted source."""

    key: str
    path: Path | None  # None: it is not known here


def absolute_roots(roots: Mapping[str, str | os.PathLike[str]]) -> dict[str, Path]:
    """Return the absolute paths of roots, checked as arguments are."""
    if not isinstance(roots, Mapping):
        raise ConfigError(f"roots map keys of adopted sources to directories, not {roots!r}")
    return {key: directory(path, "the place of a source").absolute() for key, path in roots.items()}


def read_roots(cache: Path) -> dict[str, Path]:
    """Read where the sources of a cache lie; empty where nothing says so."""
    try:
        data = read_within(cache, NAME)
    except FileNotFoundError:
        return {}
    try:
        content: Any = json.loads(data)
        roots = {key: Path(path) for key, path in read_as(dict[Name, str], content).items()}
        for key, path in roots.items():
            if not path.is_absolute() or "\0" in str(path):
                raise ValueError(f"{str(path)!r}, of {key!r}, is no absolute path")
    except (*NOT_AS_WRITTEN, RecursionError) as error:
        raise CorruptCacheError(
            f"{str(cache / NAME)!r} is damaged: {error}; it maps the keys of adopted sources to "
            "absolute paths"
        ) from error
    return roots


def write_root(cache: Path, key: str, path: Path) -> None:
    """Say durably where a source lies, beside the others."""
    roots = {**read_roots(cache), key: path}
    content = {each: str(place) for each, place in sorted(roots.items())}
    write_durably(cache / NAME, json.dumps(content, ensure_ascii=False, indent=1).encode())


def roots_of(
    cache: Path, parts: Iterable[PartEntry], elsewhere: Roots = NO_ROOTS
) -> list[Root | None]:
    """Return the root of each part, None for those whose containers lie in the cache.

    Args:
        cache: the cache directory.
        parts: of a manifest.
        elsewhere: paths by key, which count in place of those that the cache knows.
    """
    keys = [None if part.adopted is None else part.adopted.root for part in parts]
    if not any(keys):
        return [None] * len(keys)
    known: Roots = (
        elsewhere if {*elsewhere} >= {*keys} - {None} else read_roots(cache) | {**elsewhere}
    )
    return [None if key is None else Root(key, known.get(key)) for key in keys]


def check_roots(cache: Path, parts: Iterable[PartEntry], elsewhere: Roots) -> None:
    """Raise `ConfigError` for a key that no part of a cache names."""
    keys = {part.adopted.root for part in parts if part.adopted is not None}
    for key in elsewhere:
        if key not in keys:
            raise ConfigError(
                f"cache {str(cache)!r} has no adopted source {key!r}; {nearest(key, keys)}"
            )
