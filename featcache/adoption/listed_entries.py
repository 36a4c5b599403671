"""Files that list entries, as manifests do: JSON lines, or a list in JSON or YAML, maybe gzipped.

Sources are untrusted: what inflates without end, or repeats itself by aliases, is refused.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import PurePath

from featcache.adoptable import ByteSource, SourceFile
from featcache.errors import AdoptionError, MissingDependencyError, describe

LINES, JSON = ".jsonl", ".json"
PLAIN = (LINES, JSON, ".yaml", ".yml")
SUFFIXES = (*PLAIN, *(f"{each}.gz" for each in PLAIN))
LONGEST_LINE, MOST_BLANK = 1 << 23, 100  # bytes; lines without any
# deflate makes a thousandth of what repeats, but of no manifest: ids and numbers differ
MOST_INFLATED, ANY_INFLATED = 100, 1 << 24
PIECE_BYTES = 1 << 20
ITEM = re.compile(rb"^- ", re.M)  # of a list in YAML


def entries(source: ByteSource) -> Iterator[tuple[str, object]]:
    """Yield the entries of a file, each with its place for messages.

    Raises `AdoptionError` for what is none of these formats, `MissingDependencyError` for YAML
    without its library.
    """
    if _suffix(source.path) != LINES:
        for number, entry in enumerate(_listed(source), 1):
            yield f"{source.path!r}, entry {number}", entry
        return
    blank = 0
    for number, line in enumerate(_lines(source), 1):
        where = f"{source.path!r}, line {number}"
        if not line.strip():
            blank += 1
            if blank > MOST_BLANK:
                raise AdoptionError(f"{source.path!r} has more than {MOST_BLANK} empty lines")
            continue
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise AdoptionError(f"{where} is no JSON: {describe(error)}") from error


def first_entry(source: ByteSource) -> object:
    """Return the first entry; raises `ValueError`, or `AdoptionError`, where there is none."""
    if _suffix(source.path) == LINES:
        return json.loads(next(_lines(source), b""))
    begin = next(_pieces(source), b"")
    if _suffix(source.path) == JSON:
        text = begin.decode("utf-8", "ignore").lstrip().removeprefix("[").lstrip()
        found: object = json.JSONDecoder().raw_decode(text)[0]
        return found
    items = [match.start() for match, _ in zip(ITEM.finditer(begin), range(2), strict=False)]
    if not items:
        raise ValueError("it is no list")
    listed = _of_yaml(begin[slice(*items)] if len(items) == 2 else begin[items[0] :])
    return listed[0] if isinstance(listed, list) else listed


def _listed(source: ByteSource) -> list[object]:
    """Return the list that a JSON or YAML file is."""
    data = b"".join(_pieces(source))
    try:
        found: object = json.loads(data) if _suffix(source.path) == JSON else _of_yaml(data)
    except (ValueError, RecursionError) as error:
        told = describe(error).partition("\n")[0]
        raise AdoptionError(f"{source.path!r} cannot be read: {told}") from error
    if not isinstance(found, list):
        raise AdoptionError(f"{source.path!r} is no list")
    return found


def _of_yaml(data: bytes) -> object:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError(
            "reading YAML needs 'yaml'; try: pip install pyyaml"
        ) from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found: object = yaml.load(data, loader)  # plain values alone
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if _size(found, {}) > max(MOST_INFLATED * len(data), ANY_INFLATED):
        raise ValueError("its aliases repeat more than a manifest does")
    return found


def _size(value: object, known: dict[int, int]) -> int:
    """Return how many values one holds, those of aliases each time."""
    if id(value) not in known:
        inner: list[object] = []
        if isinstance(value, dict):
            inner = [*value, *value.values()]
        elif isinstance(value, list):
            inner = value
        known[id(value)] = 1 << 62  # of a value that holds itself
        known[id(value)] = 1 + sum(_size(each, known) for each in inner)
    return known[id(value)]


def _suffix(path: str) -> str:
    """Return ".jsonl", ".json" or ".yaml" (or another), without ".gz"."""
    return PurePath(path.removesuffix(".gz")).suffix


def _pieces(source: ByteSource) -> Iterator[bytes]:
    """Yield the bytes of a file, inflated where it is called `.gz`."""
    file, rest = _inflated(source)
    try:
        while piece := file.read(PIECE_BYTES):
            rest -= len(piece)
            if rest < 0:
                raise _repeats(source)
            yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise AdoptionError(f"{source.path!r} cannot be read: {describe(error)}") from error


def _lines(source: ByteSource) -> Iterator[bytes]:
    file, rest = _inflated(source)
    try:
        while line := file.readline(LONGEST_LINE):
            rest -= len(line)
            if len(line) == LONGEST_LINE:
                raise AdoptionError(f"{source.path!r} has a line of more than {LONGEST_LINE} bytes")
            if rest < 0:
                raise _repeats(source)
            yield line
    except (OSError, EOFError, zlib.error) as error:
        raise AdoptionError(f"{source.path!r} cannot be read: {describe(error)}") from error


def _inflated(source: ByteSource) -> tuple[io.BufferedIOBase, int]:
    """Return a file to read from, and how many bytes it may have."""
    file: io.BufferedIOBase = io.BufferedReader(SourceFile(source), PIECE_BYTES)
    if not source.path.endswith(".gz"):
        return file, source.size
    return gzip.GzipFile(fileobj=file), max(MOST_INFLATED * source.size, ANY_INFLATED)


def _repeats(source: ByteSource) -> AdoptionError:
    return AdoptionError(
        f"{source.path!r} inflates to more than {MOST_INFLATED} times its bytes: it repeats "
        "itself, as no manifest does"
    )
