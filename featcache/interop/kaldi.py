"""Kaldi: a data directory of a table, as Kaldi's and ESPnet's own tools read it.

    feats.ark         by id, sorted as bytes: `<id> `, then a matrix (00 "B" "FM " 04 <i32 rows>
                      04 <i32 columns>, float32 in C order; "DM ", float64), a vector ("FV ", "DV ")
                      or integers (00 "B" 04 <i32 length>, then 04 <i32> for each)
    feats.scp         `<id> <path of feats.ark>:<offset of 00 "B">`
    utt2num_frames    `<id> <frames>`
    feats_shape       `<id> <frames>,<dims>`, ESPnet's shape file
    cmvn.ark          one matrix "DM ", 2 x (dims + 1): sums and the count; sums of squares and 0
    feats_stats.npz   ESPnet's "count", "sum", "sum_square"
    text utt2spk spk2utt utt2dur utt2lang    of annotations

`featcache.adopt` reads such a directory; that is `featcache.adoption.kaldi`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.container_files import sync_directory, sync_file
from featcache.errors import ConfigError, FeatureError
from featcache.interface import Array
from featcache.stats import FeatureStats
from featcache.tables import FeatureTable

_TABLES = {"text": "text", "utt2spk": "speaker", "utt2dur": "duration", "utt2lang": "language"}
_KINDS = {np.dtype(np.float32): b"F", np.dtype(np.float64): b"D"}
_SIZE = struct.Struct("<Bi")
_INT32 = np.iinfo(np.int32)


def to_kaldi(
    table: FeatureTable, directory: str | os.PathLike[str], *, feature: str | None = None
) -> None:
    """Write a data directory of Kaldi, as `FeatureTable.to_kaldi` describes it."""
    if feature is None:
        if len(table.features) != 1:
            raise ConfigError(f"feature= names one of {', '.join(map(repr, table.features))}")
        (feature,) = table.features
    target = Path(directory).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{str(target)!r} is there and not empty; take a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    aside.mkdir()
    try:
        _Export(table, feature, aside, target).write()
        sync_directory(aside)
        aside.replace(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_directory(target.parent)


class _Export:
    """One export: rows sorted as Kaldi wants them, into a directory that is renamed later."""

    def __init__(self, table: FeatureTable, feature: str, aside: Path, target: Path) -> None:
        self._table, self._feature, self._aside, self._target = table, feature, aside, target
        self._lengths = table.lengths(feature) if table.has_frames(feature) else None
        # in the order of LC_ALL=C, which is that of bytes
        self._rows = sorted(range(len(table)), key=lambda row: table.id(row).encode())
        before = ""
        for row in self._rows:
            if before == (before := _one_word("id", table.id(row))):
                raise FeatureError(
                    f"{before!r} has several rows, as a mix by weights of utterances has, and "
                    "Kaldi's tables hold each utterance once; export the sources of the mix"
                )
            if self._lengths is not None and not self._lengths[row]:
                raise FeatureError(
                    f"{feature!r} of {table.id(row)!r} has no frames, which Kaldi cannot hold; "
                    "leave such utterances out: table.filter(...)"
                )

    def write(self) -> None:
        """Write all files, durably."""
        offsets = self._archive()
        path, lengths = self._target / "feats.ark", self._lengths
        self._lines("feats.scp", lambda row: f"{path}:{offsets[row]}")
        dims = ",".join(map(str, self._table.dims(self._feature)))
        if lengths is None:
            self._lines("feats_shape", lambda row: dims)
        else:
            self._lines("utt2num_frames", lambda row: str(lengths[row]))
            self._lines("feats_shape", lambda row: f"{lengths[row]},{dims}".rstrip(","))
        for name, annotation in _TABLES.items():
            if annotation in self._table.annotations:
                self._annotation(name, list(self._table.annotation(annotation)))
        try:
            stats = self._table.stats(self._feature)
        except KeyError:  # none were collected: integers, or `stats=False`
            return
        with (self._aside / "feats_stats.npz").open("wb") as file:
            stats.save(file)
            sync_file(file)
        if len(stats.mean.shape) == 1:
            with (self._aside / "cmvn.ark").open("wb") as file:
                file.write(_object(_cmvn(stats)))
                sync_file(file)

    def _archive(self) -> dict[int, int]:
        """Write the archive; return by row where its object begins."""
        offsets: dict[int, int] = {}
        with (self._aside / "feats.ark").open("wb") as file:
            for row in self._rows:
                id = self._table.id(row)
                file.write(f"{id} ".encode())
                offsets[row] = file.tell()
                file.write(_object(self._kaldis(id)))
            sync_file(file)
        return offsets

    def _kaldis(self, id: str) -> Array:
        """Return the array of an utterance in a dtype of Kaldi's."""
        array = self._table.read(id, self._feature, copy=False)
        what = f"{self._feature!r} of {id!r}, {array.dtype} of shape {array.shape},"
        if array.ndim == 1 and array.dtype.kind in "iub":
            if array.dtype.itemsize > 2 and (array.min() < _INT32.min or array.max() > _INT32.max):
                raise FeatureError(f"{what} is beyond int32, the integers of Kaldi")
            return array.astype("<i4")
        if array.ndim not in (1, 2) or array.dtype.kind != "f":
            raise FeatureError(
                f"{what} is neither a matrix or vector of floats nor a vector of integers, the "
                "arrays of Kaldi"
            )
        return array if array.dtype == np.float64 else array.astype("<f4", copy=False)

    def _annotation(self, file: str, values: list[object]) -> None:
        told = {row: values[row] for row in self._rows if values[row] is not None}
        for row, value in told.items():
            if "\n" in str(value):
                raise FeatureError(f"the {_TABLES[file]} of {self._table.id(row)!r} has two lines")
        self._lines(file, lambda row: str(told[row]), told)
        if file == "utt2spk":
            spoken: dict[str, list[str]] = {}
            for row, value in told.items():
                speaker = _one_word("speaker", str(value))
                spoken.setdefault(speaker, []).append(self._table.id(row))
            lines = [f"{speaker} {' '.join(spoken[speaker])}" for speaker in _sorted(spoken)]
            self._text("spk2utt", lines)

    def _lines(
        self, file: str, value: Callable[[int], str], rows: Iterable[int] | None = None
    ) -> None:
        rows = self._rows if rows is None else rows
        self._text(file, (f"{self._table.id(row)} {value(row)}" for row in rows))

    def _text(self, name: str, lines: Iterable[str]) -> None:
        with (self._aside / name).open("wb") as file:
            file.writelines(f"{line}\n".encode() for line in lines)
            sync_file(file)


def _object(array: Array) -> bytes:
    """Return an array as Kaldi writes it in binary."""
    if array.dtype.kind == "i":
        pairs = np.empty(len(array), [("size", "u1"), ("value", "<i4")])
        pairs["size"], pairs["value"] = 4, array
        return b"\0B" + _SIZE.pack(4, len(array)) + pairs.tobytes()
    token = _KINDS[array.dtype] + (b"M " if array.ndim == 2 else b"V ")
    return b"\0B" + token + b"".join(_SIZE.pack(4, size) for size in array.shape) + array.tobytes()


def _cmvn(stats: FeatureStats) -> NDArray[np.float64]:
    """Return the statistics as Kaldi's `compute-cmvn-stats` has them: sums, count; squares, 0."""
    return np.array([[*stats.sum, stats.count], [*stats.sum_square, 0]], np.float64)


def _one_word(what: str, value: str) -> str:
    if value.split() != [value]:
        raise FeatureError(f"the {what} {value!r} is not one word, as Kaldi's tables need it")
    return value


def _sorted(words: Iterable[str]) -> list[str]:
    return sorted(words, key=str.encode)
