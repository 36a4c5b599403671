"""Compressed files, such as `.ark.gz` and `.tar.gz`, unpacked for the while of one call."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import xxhash

from featcache.adoptable import data_files
from featcache.adoption.adopt import NAME, kind_of, place_of
from featcache.container_files import sync_directory, sync_file
from featcache.errors import AdoptionError, describe

AT_ONCE = 1 << 20  # bytes
_BROKEN = (OSError, EOFError, lzma.LZMAError, ValueError)
# by suffix: what is left of the name, and what opens it
_OPENS: dict[str, tuple[str, Callable[[Path], IO[bytes]]]] = {
    ".tgz": (".tar", gzip.open),  # type: ignore[dict-item]
    ".gz": ("", gzip.open),  # type: ignore[dict-item]
    ".bz2": ("", bz2.open),
    ".xz": ("", lzma.open),
}


@contextmanager
def unpacked(source: Path, beside: Path) -> Iterator[Path]:
    """Unpack the files of a source into a folder in `beside`; others stay as they are.

    A file that was unpacked by a call that was killed is not unpacked again. Everything is removed
    at the end, unless anything is raised: the same call goes on with it.

    Raises `AdoptionError` where only some files are compressed, one is damaged, or two unpack
    to one name.
    """
    packed = _packed(source)
    if not packed:
        yield source
        return
    is_new, done = not beside.exists(), False
    root = source if source.is_dir() else source.parent
    folder = beside / f"{NAME}-{_state(root, packed)}"
    try:
        for path in packed:
            _unpack(root / path, folder / _name(path))
        yield folder / _name(packed[0]) if source.is_file() else folder
        done = True
    except AdoptionError as error:
        raise AdoptionError(str(error).replace(str(folder), str(root))) from error
    finally:
        if done or not any(folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
            if is_new:
                with suppress(OSError):  # where anything was written
                    beside.rmdir()


def _packed(source: Path) -> list[str]:
    """Return the compressed files of a source that no kind takes as they are."""
    place, what = place_of(source)
    try:
        first = [what] if what else data_files(place, 1)
        if not first or not first[0].lower().endswith(tuple(_OPENS)):
            return []
        kind_of(place, what, None)
    except AdoptionError:
        paths = [what] if what else data_files(place, 1 << 62)
        plain = [path for path in paths if not path.lower().endswith(tuple(_OPENS))]
        if plain:
            raise AdoptionError(
                f"{place.name!r} holds compressed files and others, such as {plain[0]!r}; name "
                "those of one kind by a pattern with '*'"
            ) from None
        _check_names(place.name, paths)
        return paths
    return []  # such as cuts.jsonl.gz


def _check_names(source: str, packed: Sequence[str]) -> None:
    by_name: dict[str, str] = {}
    for path in packed:
        first = by_name.setdefault(_name(path), path)
        if first != path:
            raise AdoptionError(
                f"{first!r} and {path!r} of {source!r} both unpack to {_name(path)!r}; remove one, "
                "or name the others by a pattern with '*'"
            )


def _name(path: str) -> str:
    suffix = next(end for end in _OPENS if path.lower().endswith(end))
    return path[: -len(suffix)] + _OPENS[suffix][0]


def _state(root: Path, paths: Sequence[str]) -> str:
    """Return a digest of files as they are now."""
    each = ((path, (root / path).stat()) for path in paths)
    state = [(path, status.st_size, status.st_mtime_ns) for path, status in each]
    return xxhash.xxh3_64_hexdigest(repr(state).encode())


def _unpack(path: Path, into: Path) -> None:
    """Unpack a file, unless that was done; what has its name is durable and whole."""
    if into.exists():
        return
    into.parent.mkdir(parents=True, exist_ok=True)
    partly = into.with_name(f".{into.name}.{os.getpid()}")  # hidden: no data if this is killed
    try:
        with _OPENS[path.suffix.lower()][1](path) as packed, partly.open("wb") as plain:
            shutil.copyfileobj(packed, plain, AT_ONCE)
            plain.flush()
            sync_file(plain)
    except _BROKEN as error:
        partly.unlink(missing_ok=True)
        raise AdoptionError(f"{str(path)!r} cannot be unpacked: {describe(error)}") from error
    sync_directory(into.parent)
    partly.replace(into)
    sync_directory(into.parent)
