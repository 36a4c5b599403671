"""`Estimate`: a table of the ways to store features, with the bytes and hours of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from featcache.extraction.estimating.forecast import said_bytes


@dataclass(frozen=True)
class StorageEstimate:
    """Bytes and hours of one feature, stored in one way."""

    feature: str
    backend: str
    codec: str
    dtype: str
    nbytes: int  # of all files of a cache of this feature alone
    hours: float  # in one process: until the arrays are there, and to write them
    declared: bool = False  # whether it is what was asked for
    lossless: bool = True  # of the codec


@dataclass(frozen=True, repr=False, kw_only=True)
class Estimate:
    """Bytes and hours of features; printed, a table.

    Attributes:
        utterances: how many there are.
        frames: of all utterances, by feature; 1 an utterance without a time axis.
        nbytes: of all files of the cache, as declared.
        hours: of one process, as declared.
        rows: each way to store each feature, as declared first.
        uncertainty: a standard error of the frames, as a share; 0 where all lengths are known.
    """

    utterances: int
    frames: Mapping[str, int]
    nbytes: int
    hours: float
    rows: tuple[StorageEstimate, ...]
    uncertainty: float = 0.0

    def __repr__(self) -> str:
        frames = ", ".join(f"{count:,} of {name}" for name, count in self.frames.items())
        about = f", give or take {self.uncertainty:.0%}" if self.uncertainty >= 0.005 else ""
        head = (
            f"{self.utterances:,} utterances, frames: {frames}{about}\n"
            f"as declared: {said_bytes(self.nbytes)}, {said_hours(self.hours)} in one process"
        )
        table = [("feature", "backend", "codec", "dtype", "size", "time", "")]
        for row in self.rows:
            what = "as declared" if row.declared else "" if row.lossless else "lossy"
            size, time = said_bytes(row.nbytes), said_hours(row.hours)
            table.append((row.feature, row.backend, row.codec, row.dtype, size, time, what))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
            for cells in table
        )
        return "\n".join([head, *lines])


def said_hours(hours: float) -> str:
    """Say a time in the unit that fits.

    >>> said_hours(2.5), said_hours(0.1), said_hours(0.001)
    ('2.5 h', '6 min', '3.6 s')
    """
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{hours * 60:.2g} min" if hours * 60 >= 1 else f"{hours * 3600:.2g} s"
