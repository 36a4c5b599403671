"""Formats, codecs, kinds of stores to adopt and toolkits by name, found through entry points."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from featcache.adoptable import Kind
from featcache.errors import ConfigError, MissingDependencyError, UnknownNameError, nearest
from featcache.interface import Backend, Codec

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BACKENDS = "featcache.backends"
CODECS = "featcache.codecs"
ADOPTION = "featcache.adoption"
TOOLKITS = "featcache.toolkits"
RAW = "raw"  # the name of no codec: plain bytes
_OF_BACKENDS = ("codecs", "open_writer")
_OF_KINDS = ("name", "recognises", "index")
_OF_CODECS = ("name", "lossless", "dtypes", "encode", "decode")


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
    ('raw', 'int8')
    """
    backend = cast(type[Backend], _load(BACKENDS, "backend", name, _OF_BACKENDS))
    if not backend.codecs:
        raise ConfigError(
            f"backend {name!r} lists no codecs; one that stores plain bytes lists {RAW!r}"
        )
    return backend


def get_codec(name: str) -> type[Codec]:
    """Return the class of a codec; its constructor takes the codec's options.

    Raises `UnknownNameError` if no such codec is installed.
    """
    return cast(type[Codec], _load(CODECS, "codec", name, _OF_CODECS))


def is_lossless(codec: str) -> bool:
    """Whether arrays come back from a codec as they were; those of no codec do."""
    return codec == RAW or get_codec(codec).lossless


def only_reads(codec: str) -> bool:
    """Whether a codec is for adopted stores alone: any format may declare it, none writes it.

    Such a codec has `only_reads = True`, and its `encode` raises `ConfigError`.
    """
    known = isinstance(codec, str) and codec in _entries(CODECS)  # a manifest may name a list
    return known and getattr(get_codec(codec), "only_reads", False) is True


def kind_names() -> list[str]:
    """List the names of all installed kinds of stores that can be adopted."""
    return sorted(_entries(ADOPTION))


def get_kind(name: str) -> Kind:
    """Return a kind of store that can be adopted.

    Raises `UnknownNameError` if no such kind is installed, `ConfigError` if it does not load.
    """
    return cast(Kind, _loaded(ADOPTION, "kind of store", name, _OF_KINDS))


def get_toolkit(name: str) -> Callable[..., object]:
    """Return the function that hands a table to another toolkit, by the name of the table's method.

    Raises `ConfigError` if featcache's own are not installed, `MissingDependencyError` without the
    toolkit.
    """
    if name not in _entries(TOOLKITS):
        raise ConfigError(
            f"featcache's installed metadata has no {name!r} under {TOOLKITS!r}: it is that of an "
            "earlier version, or of none; install featcache again, in a checkout by: "
            "pip install -e ."
        )
    return cast(Callable[..., object], _loaded(TOOLKITS, "toolkit", name, ("__call__",)))


def _load(group: str, kind: str, name: str, needed: tuple[str, ...]) -> type:
    loaded = _loaded(group, kind, name, needed)
    if not isinstance(loaded, type) or not dataclasses.is_dataclass(loaded):
        raise ConfigError(
            f"{kind} {name!r} is registered as {_entries(group)[name][0].value!r}, which is no "
            f"{kind}: a frozen dataclass with {', '.join(needed)} is needed"
        )
    return loaded


def _loaded(group: str, kind: str, name: str, needed: tuple[str, ...]) -> object:
    entries = _entries(group)
    if not isinstance(name, str) or name not in entries:  # a damaged manifest may name a list
        raise UnknownNameError(
            f"no {kind} {name!r} is installed; {nearest(name, entries)} "
            f"(a package can add one under the entry point group {group!r})"
        )
    return _loaded_on(group, kind, name, needed, tuple(sys.path))


@lru_cache(maxsize=64)
def _loaded_on(
    group: str, kind: str, name: str, needed: tuple[str, ...], path: tuple[str, ...]
) -> object:
    entries = _entries_on(group, path)
    targets = sorted({entry.value for entry in entries[name]})
    if len(targets) > 1:
        raise ConfigError(
            f"several packages register {kind} {name!r}: {', '.join(targets)}; uninstall all but "
            "one"
        )
    try:
        loaded: object = entries[name][0].load()
    except MissingDependencyError:
        raise
    except Exception as error:  # whatever the package of a stranger raises
        raise ConfigError(
            f"{kind} {name!r} is registered as {targets[0]!r}, which does not load: "
            f"{type(error).__name__}: {error}"
        ) from error
    lacks = [attribute for attribute in needed if not hasattr(loaded, attribute)]
    if lacks:
        raise ConfigError(
            f"{kind} {name!r} is registered as {targets[0]!r}, which is no {kind}: one with "
            f"{', '.join(needed)} is needed, it lacks {', '.join(lacks)}"
        )
    return loaded


def _entries(group: str) -> dict[str, list[EntryPoint]]:
    return _entries_on(group, tuple(sys.path))


# scanning the installed packages takes tens of milliseconds; a changed path scans again
@lru_cache(maxsize=8)
def _entries_on(group: str, path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    from importlib.metadata import entry_points

    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    return found
