"""Finds backends and codecs, ours and others', behind one door: entry points."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from featcache.errors import ConfigError, UnknownNameError, nearest
from featcache.interface import Backend, Codec

BACKENDS = "featcache.backends"
CODECS = "featcache.codecs"
RAW = "raw"  # the name of no codec: plain bytes


def backend_names() -> list[str]:
    """List the names of all installed backends.

    >>> backend_names()
    ['hdf5', 'lilcom', 'memmap', 'webdataset', 'zarr']
    """
    return sorted(_entries(BACKENDS))


def codec_names() -> list[str]:
    """List the names of all installed codecs, `raw` (no codec) included."""
    return sorted({RAW, *_entries(CODECS)})


def get_backend(name: str) -> type[Backend]:
    """Return the class of a storage format; its constructor takes the format's options.

    Raises `UnknownNameError` if no such backend is installed.

    >>> get_backend("memmap").codecs
    ('raw',)
    """
    return cast(type[Backend], _load(BACKENDS, "backend", name))


def get_codec(name: str) -> type[Codec]:
    """Return the class of a codec; its constructor takes the codec's options.

    Raises `UnknownNameError` if no such codec is installed.
    """
    return cast(type[Codec], _load(CODECS, "codec", name))


def _load(group: str, kind: str, name: str) -> type:
    entries = _entries(group)
    if name not in entries:
        raise UnknownNameError(
            f"no {kind} {name!r} is installed; {nearest(name, entries)} "
            f"(a package can add one under the entry point group {group!r})"
        )
    entry = entries[name]
    try:
        loaded = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r} is registered as {entry.value!r}, which does not load: {error}") from error
    return cast(type, loaded)


def _entries(group: str) -> dict[str, EntryPoint]:
    return _entries_on(group, tuple(sys.path))


@lru_cache(maxsize=8)  # scanning the installed packages takes tens of milliseconds; a changed path scans again
def _entries_on(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"two packages register {entry.name!r} under {group!r}: {other.value!r} and {entry.value!r}; "
                "uninstall one of them"
            )
    return found
