"""Collected features of a collect-stats run: in `.npy` files, and in a part of a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from pathlib import Path
from urllib.parse import quote

import numpy as np

from featcache.interface import Array
from featcache.store.writing.part_writer import PartWriter

_LONGEST_NAME = 240  # of files, in bytes: most file systems take 255


class NpyWriter:
    """Writes one `.npy` an utterance, and lists them as ESPnet's `npy` reader wants it."""

    def __init__(self, directory: Path) -> None:
        self.lines: list[str] = []
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def __setitem__(self, id: str, array: Array) -> None:
        path = self._directory / f"{_file_name(id)}.npy"
        aside = path.with_suffix(".tmp")
        with aside.open("wb") as file:
            np.save(file, array, allow_pickle=False)
        aside.replace(path)
        self.lines.append(f"{id} {path}\n")


def _file_name(id: str) -> str:
    r"""Return a file name for an id: percent-encoded, beyond the length of file names a digest.

    >>> _file_name("spk1/utt.7")
    'spk1%2Futt.7'
    """
    name = quote(id, safe="")
    return name if len(name) <= _LONGEST_NAME else hashlib.sha256(id.encode()).hexdigest()


class NewFeatures:
    """Adds utterances to a part of a cache, but for those that are stored already.

    An earlier run may have stored them, or a worker that was lost; `known` are the latter.
    """

    def __init__(self, writer: PartWriter, known: Set[str]) -> None:
        self._writer, self._known = writer, known

    def write(self, id: str, arrays: Mapping[str, Array]) -> None:
        """Store the features of an utterance, unless they are stored."""
        if id not in self._known and id not in self._writer:
            self._writer.write(id, arrays)
