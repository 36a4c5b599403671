"""Versions of a cache: generations that have a tag, or are still there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from featcache.errors import NotACacheError, UnknownNameError, nearest
from featcache.store.format.disk_errors import reading
from featcache.store.format.manifest import manifest_file, read_manifest


def tags_of(cache: Path) -> Mapping[str, str]:
    """Return the names of the generations that have tags, by tag."""
    with reading(cache):
        return read_manifest(cache).tags


def name_of(cache: Path, version: str | None) -> str | None:
    """Return the name of the generation that a tag names; None for the current generation.

    Raises `UnknownNameError` for an unknown tag.
    """
    if version is None:
        return None
    tags = tags_of(cache)
    if version not in tags:
        raise UnknownNameError(
            f"cache {str(cache)!r} has no version {version!r}; {nearest(version, tags)}"
        )
    return tags[version]


def is_of_current_build(cache: Path, name: str) -> bool:
    """Tell whether a generation is still there, and its parts with it."""
    try:
        with reading(cache):
            return read_manifest(cache, manifest_file(name)).build == read_manifest(cache).build
    except NotACacheError:
        return False
