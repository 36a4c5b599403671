"""`Conversion`: rows of a table become parts of a cache, task by task, in whichever process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import FeatureError
from featcache.extraction.converting.read_back import ReadBack
from featcache.extraction.table_rows import TableRows
from featcache.interface import Ints
from featcache.store.format.part import read_part
from featcache.store.writing import part_writer
from featcache.store.writing.part_writer import PartWriter
from featcache.store.writing.small_parts import LARGE

FILLED = 1.25 * LARGE  # of what a part holds at most, so that parts of tasks are not small

Tell = Callable[[int, int], object]


class ConversionTask(NamedTuple):
    """Rows to be converted, and names of sealed parts that are only to be compared."""

    rows: Ints
    parts: tuple[str, ...] = ()


@dataclass
class Conversion:
    """Converts rows, and reads back what it wrote.

    Args:
        rows: the source.
        path: the directory of the cache.
        features: the declarations there.
        fingerprint: what they are made from.
    """

    rows: TableRows
    path: Path
    features: dict[str, FeatureStorageConfig]
    fingerprint: dict[str, object]

    def open_part(self) -> PartWriter:
        """Begin a part of the cache."""
        writer = PartWriter(self.path, self.features, self.fingerprint)
        writer.trust_shapes()
        return writer

    def read_back(self) -> ReadBack:
        """Return what compares parts of the cache with the source."""
        return ReadBack(self.rows, self.path, self.features)

    def write(self, writer: PartWriter, rows: Ints, tell: Tell) -> None:
        """Write rows, in the order of their bytes; `tell` is called with counts of each."""
        for row in self.rows.read(self.rows.in_order_of_bytes(rows)):
            before = writer.bytes_written
            try:
                writer.write(
                    row.id, row.arrays, annotations=row.annotations or None, stamps=row.stamps
                )
            except FeatureError as error:
                raise FeatureError(f"{error}; nothing of this utterance is converted") from error
            tell(1, writer.bytes_written - before)

    def do(self, writer: PartWriter, task: ConversionTask, tell: Tell) -> ReadBack:
        """Convert the rows of a task into sealed parts, and compare these and those it names."""
        names: list[str] = []
        noted = writer.on_part

        def note(name: str) -> None:
            names.append(name)
            noted(name)

        writer.on_part = note
        try:
            self.write(writer, task.rows, tell)
            writer.seal()
        finally:
            writer.on_part = noted
        back = self.read_back()
        if task.parts:
            back.parts(part for part in back.sealed() if part.entry.name in task.parts)
        back.parts(part for name in names if (part := read_part(self.path, name)) is not None)
        return back

    def tasks(self, rows: Ints, nbytes: int, least: int) -> list[ConversionTask]:
        """Cut rows, in the order of their bytes, into tasks that fill parts well.

        Args:
            rows: the rows.
            nbytes: what they will take on disk.
            least: tasks that there are to be, where there are rows enough.
        """
        rows = self.rows.in_order_of_bytes(rows)
        sizes = self.rows.nbytes(rows)
        share = nbytes / max(int(sizes.sum()), 1) / part_writer.PART_BYTES
        full = np.maximum(sizes * share, 1 / part_writer.PART_ROWS)
        filled = np.cumsum(full)
        total = float(filled[-1]) if len(rows) else 0.0
        number = max(int(total / FILLED), min(least, len(rows)), 1)
        bounds = np.searchsorted(filled, total * np.arange(1, number) / number)
        return [ConversionTask(some) for some in np.split(rows, bounds) if len(some)]
