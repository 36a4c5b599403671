"""Kaldi's scp files and the tables beside them: one line an utterance, the id and the rest."""

from __future__ import annotations

import math
from array import array
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from featcache.adoptable import CONVERT, ByteSource, Place, Value
from featcache.errors import AdoptionError
from featcache.interface import Ints

PIECE_BYTES = 1 << 20
LINE_BYTES = 4096  # of a first line
MOST_UP = 8  # folders between an scp and the one that its paths are relative to
# Kaldi's names of files beside an scp, and the annotations that they are
TABLES = {"text": "text", "utt2spk": "speaker", "utt2dur": "duration", "utt2lang": "language"}


@dataclass(frozen=True, slots=True)
class Scp:
    """Lines of an scp: `<id> <file>`, `<id> <file>:<offset>`, either with `[<range>]` behind it."""

    ids: list[str]
    files: list[str]  # each one once, as `Place.open` takes them
    file: Ints  # N: the number in `files`
    offset: Ints  # N
    ranges: dict[int, str] = field(default_factory=dict)  # by row, the text in brackets


def read_scp(place: Place, path: str) -> Scp:
    """Read an scp; raises `AdoptionError` for a line that names no file, such as a pipe."""
    ids: list[str] = []
    numbers: dict[bytes, int] = {}
    file, offset = array("q"), array("q")
    ranges: dict[int, str] = {}
    for id, entry in _lines(place, path):
        if entry[-1:] == b"|" or entry[:1] == b"|" or entry == b"-":
            raise AdoptionError(
                f"{place.name!r}: {path!r} gives {id!r} by the command {_text(entry, path)!r}, "
                f"not by a file; {CONVERT}"
            )
        if entry[-1:] == b"]":
            entry, _, within = entry[:-1].rpartition(b"[")
            ranges[len(ids)] = _text(within, path)
        name, colon, behind = entry.rpartition(b":")
        if name.endswith((b".h5", b".hdf5")):  # as ESPnet names datasets
            raise AdoptionError(
                f"{place.name!r}: {path!r} gives {id!r} by a dataset of {_text(name, path)!r}, an "
                "HDF5 file; give that file as the source"
            )
        at = 0
        if colon and behind.isdigit() and len(behind) < 19:
            entry, at = name, int(behind)
        ids.append(id)
        file.append(numbers.setdefault(entry, len(numbers)))
        offset.append(at)
    if not ids:
        raise AdoptionError(f"{place.name!r}: {path!r} names no utterances")
    files = found_files(place, path, [_text(each, path) for each in numbers])
    return Scp(ids, files, np.frombuffer(file, np.int64), np.frombuffer(offset, np.int64), ranges)


def found_files(place: Place, scp: str, names: list[str]) -> list[str]:
    """Return the files that an scp names, as `Place.open` takes them.

    Relative ones are relative to the folder in which the scp was made: that of the scp, or the
    first one above it where the file is.
    """
    folder = scp.rpartition("/")[0]
    ways = [f"{folder}/" if folder else ""]
    ways += [ways[0] + "../" * steps for steps in range(1, MOST_UP + 1)]
    found = []
    for name in names:
        if name.startswith("/"):
            found.append(name)
            continue
        if len(ways) > 1:  # the first relative file tells for all
            ways = [next((way for way in ways if is_there(place, way + name)), ways[0])]
        found.append(ways[0] + name)
    return found


def read_table(place: Place, path: str) -> dict[str, bytes]:
    """Return the lines of a table by id; empty where there is no such file."""
    if not is_there(place, path):
        return {}
    return dict(_lines(place, path, rest_needed=False))


def read_annotations(place: Place, scp: str, ids: list[str]) -> dict[str, list[Value]]:
    """Return what Kaldi's tables in the folder of an scp say of its utterances."""
    folder = scp.rpartition("/")[0]
    found: dict[str, list[Value]] = {}
    for name, annotation in TABLES.items():
        path = f"{folder}/{name}" if folder else name
        table = read_table(place, path)
        values = [table.get(id) for id in ids]
        if any(value is not None for value in values):
            convert = seconds_of if annotation == "duration" else _text
            found[annotation] = [None if each is None else convert(each, path) for each in values]
    return found


def is_there(place: Place, path: str) -> bool:
    """Whether a file is there and can be opened."""
    try:
        with place.open(path):
            return True
    except AdoptionError:
        return False


def first_line(place: Place, path: str) -> bytes:
    """Return the first line of a file; nothing of one that cannot be read, or is not there."""
    with suppress(AdoptionError), place.open(path) as source:
        return source.read(0, min(source.size, LINE_BYTES)).partition(b"\n")[0].rstrip()
    return b""


def read_text(source: ByteSource) -> bytes:
    """Return all bytes of a file; raises `AdoptionError` at the first NUL, as of a file's hole."""
    pieces = []
    for begin in range(0, source.size, PIECE_BYTES):
        pieces.append(source.read(begin, min(PIECE_BYTES, source.size - begin)))
        if b"\0" in pieces[-1]:
            raise AdoptionError(f"{source.path!r} is no text: there is a NUL behind byte {begin:,}")
    return b"".join(pieces)


def _lines(place: Place, path: str, rest_needed: bool = True) -> list[tuple[str, bytes]]:
    with place.open(path) as source:
        lines = read_text(source).split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        # bytes are split at ASCII's white space alone, as Kaldi does
        words = line.split(None, 1)
        if not words and number == len(lines):
            break
        if len(words) < 1 + rest_needed:
            raise AdoptionError(
                f"{place.name!r}: line {number} of {path!r} has no id and a file: {line[:80]!r}"
            )
        found.append((_text(words[0], path), words[1].rstrip() if len(words) > 1 else b""))
    return found


def _text(value: bytes, path: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise AdoptionError(f"{path!r} is not in UTF-8: {value[:80]!r}: {error.reason}") from None


def seconds_of(value: bytes, path: str) -> float:
    """Return seconds that a file gives; raises `AdoptionError` for what is no finite number."""
    try:
        seconds = float(value)
        if math.isfinite(seconds):
            return seconds
    except ValueError:
        pass
    raise AdoptionError(f"{path!r} gives {value[:80]!r}, which is no number of seconds")
