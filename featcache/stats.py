"""Mean and variance over all frames of a feature: merged exactly, and taken away where rows go."""

from __future__ import annotations

import operator
import threading
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.errors import CorruptCacheError, FeatureError
from featcache.interface import Array

# Blocks small enough to stay in the processor's cache, so that a long array never needs a float64
# copy of itself, and of few enough rows that plain summation over them rounds no worse than 4,096 *
# 2^-53.
_BLOCK_VALUES = 1 << 17
_BLOCK_ROWS = 1 << 12
_BLOCKS = 16  # whose sums are added: merging rounds less, where there are more
# Squares are summed as they are, in one pass less, where no mean is so far from zero that they
# swallow the variance: this many variances in the square of a mean cost seven of the 53 bits.
# Log-mel energies of noise have 80, of speech fewer. Small arrays take two passes at once: there
# calls cost more than passes.
_NEAR = 100.0
_SMALL_VALUES = 1 << 12
_WIDE = 1 << 11  # values that are summed side by side: 80 are too few for a loop
_MOST_TOGETHER = 64  # rows of these
# Taking frames away multiplies the error of a variance by what it is divided by: ten at most. Where
# a mean is beyond 1,000 standard deviations, that error is no longer below 1e-12.
_LEAST_LEFT = 0.1
_MOST_DEVIATIONS = 1000.0
_ZERO = np.zeros(())
_scratch = threading.local()  # of each thread: fresh memory costs more than the sums


@dataclass(frozen=True, eq=False)
class FeatureStats:
    """Number, mean and spread of the frames of a feature, float64, per element of a frame.

    `mean` and `m2` have the shape of one frame. Two of these made from different frames merge into
    the one of all frames, whatever the partition and the order: within 1e-12 relative while a mean
    is below 1,000 standard deviations, beyond that within 2^-53 times their ratio a merge. NaN or
    infinity in a frame makes its elements NaN.

    >>> stats = FeatureStats.of([[1.0, 5.0], [3.0, 5.0]]).merge(FeatureStats.of([[5.0, 5.0]]))
    >>> stats.count, stats.mean.tolist(), stats.var.round(3).tolist()
    (3, [3.0, 5.0], [2.667, 0.0])
    """

    count: int  # frames
    mean: NDArray[np.float64]  # zeros while there are no frames
    m2: NDArray[np.float64]  # sum of squared differences from the mean

    def __post_init__(self) -> None:
        mean, m2 = _frozen(self.mean), _frozen(self.m2)
        if mean.shape != m2.shape:
            raise FeatureError(
                f"mean of shape {mean.shape!r} and m2 of shape {m2.shape!r} do not belong together"
            )
        if self.count < 0:
            raise FeatureError(f"a count of frames cannot be negative: {self.count!r}")
        vars(self).update(count=int(self.count), mean=mean, m2=m2)

    @classmethod
    def empty(cls, dims: tuple[int, ...]) -> FeatureStats:
        """Start with no frames; `dims` is the shape of one frame.

        Raises `FeatureError` for more than memory holds.
        """
        try:
            return cls(0, np.zeros(dims), np.zeros(dims))
        except (MemoryError, ValueError) as error:  # a damaged cache has any dims
            raise FeatureError(
                f"no memory for statistics of frames of shape {dims!r}: {error}; see whether the "
                "cache is damaged (verify='columns')"
            ) from error

    @classmethod
    def of(cls, frames: ArrayLike) -> FeatureStats:
        """Take the statistics of an array of shape (frames, *dims), of any real number type."""
        array = np.asarray(frames)
        if array.ndim == 0:
            raise FeatureError(
                "statistics need an array of shape (frames, ...), not a single number"
            )
        if not array.size:  # of any number of frames, where these have no elements
            return replace(cls.empty(array.shape[1:]), count=len(array))
        return reduce(cls.merge, (cls._of_blocks(each) for each in _pieces(array, _BLOCKS)))

    @classmethod
    def _of_blocks(cls, array: Array) -> FeatureStats:
        stats = cls._of_sums(array) if array.size > _SMALL_VALUES else None
        return stats or reduce(cls.merge, map(cls._of_block, _pieces(array, 1)))

    @classmethod
    def _of_sums(cls, array: Array) -> FeatureStats | None:
        """Take them in one pass; None where a mean is too far from zero for that."""
        sums = squares = _ZERO
        with _nan_and_infinity_allowed():
            for block in _pieces(array, 1):
                values = _as_float64(block)
                sums = sums + _summed(values)
                np.multiply(values, values, out=values)
                squares = squares + _summed(values)
            mean = sums / len(array)
            of_mean = sums * mean
            m2 = squares - of_mean
            if not np.logical_and.reduce(of_mean <= _NEAR * m2):
                return None
        return cls(len(array), mean.reshape(array.shape[1:]), m2.reshape(array.shape[1:]))

    @classmethod
    def _of_block(cls, block: Array) -> FeatureStats:
        with _nan_and_infinity_allowed():
            values = _as_float64(block)
            mean = _summed(values) / len(block)
            values -= mean  # squares of values far from zero would swallow the variance
            np.multiply(values, values, out=values)
            m2 = _summed(values)
        return cls(len(block), mean.reshape(block.shape[1:]), m2.reshape(block.shape[1:]))

    def merge(self, other: FeatureStats) -> FeatureStats:
        """Return the statistics of the frames of both."""
        if self.mean.shape != other.mean.shape:
            raise FeatureError(
                f"statistics of frames of shape {self.mean.shape!r} and {other.mean.shape!r} do "
                "not merge"
            )
        if not self.count or not other.count:
            return self if self.count else other
        # merge two (n, mean, M2): Chan, Golub & LeVeque, The American Statistician 37(3), 1983
        count = self.count + other.count
        with _nan_and_infinity_allowed():
            delta = other.mean - self.mean
            mean = self.mean + delta * (other.count / count)
            m2 = self.m2 + other.m2 + delta * delta * (self.count * other.count / count)
        return FeatureStats(count, mean, m2)

    def merge_all(self, others: Iterable[FeatureStats]) -> FeatureStats:
        """Return the statistics of the frames of all, to the bit as `merge` by one after the other.

        The sums of many merges take the same memory, and no object a merge.
        """
        count, mean, m2 = self.count, self.mean.copy(), self.m2.copy()
        delta = np.empty_like(mean)
        with _nan_and_infinity_allowed():
            for other in others:
                if mean.shape != other.mean.shape or not count or not other.count:
                    merged = FeatureStats(count, mean, m2).merge(other)
                    count, mean, m2 = merged.count, merged.mean.copy(), merged.m2.copy()
                    continue
                total = count + other.count
                np.subtract(other.mean, mean, out=delta)
                mean += delta * (other.count / total)
                m2 += other.m2
                delta *= delta
                delta *= count * other.count / total
                m2 += delta
                count = total
        return FeatureStats(count, mean, m2)

    def without(self, other: FeatureStats) -> FeatureStats | None:
        """Return the statistics of all frames but those of `other`; None if digits would be lost.

        Take them of the frames that are left, then: what is subtracted leaves its rounding behind.

        >>> found = FeatureStats.of([[1.0], [3.0], [5.0]]).without(FeatureStats.of([[5.0]]))
        >>> found.count, found.mean.tolist(), found.m2.tolist()
        (2, [2.0], [2.0])
        """
        count = self.count - other.count
        if not other.count or count <= 0:
            return self if not other.count else None
        with _nan_and_infinity_allowed():
            # the merge of Chan, Golub & LeVeque (see `merge`), solved for one of the two
            mean = self.mean + (self.mean - other.mean) * (other.count / count)
            delta = mean - other.mean
            m2 = self.m2 - other.m2 - delta * delta * (other.count * count / self.count)
            kept = m2 >= _LEAST_LEFT * self.m2
            kept &= mean * mean * count <= _MOST_DEVIATIONS**2 * m2
            kept |= (self.m2 == 0) & (other.m2 == 0) & (mean == self.mean)  # it never changes
            if not np.all(kept):  # also where NaN is among them
                return None
        return FeatureStats(count, mean, m2)

    @property
    def is_finite(self) -> bool:
        """Whether mean and spread are: then so are all numbers of the frames."""
        return bool(np.isfinite(self.m2).all())

    @property
    def var(self) -> NDArray[np.float64]:
        """Population variance (divided by the count); NaN while there are no frames."""
        return self.m2 / self.count if self.count else np.full_like(self.m2, np.nan)

    @property
    def std(self) -> NDArray[np.float64]:
        """Population standard deviation; NaN while there are no frames."""
        return np.sqrt(self.var)

    @property
    def sum(self) -> NDArray[np.float64]:
        """Sum over all frames, as ESPnet and Kaldi keep it."""
        return self.mean * self.count

    @property
    def sum_square(self) -> NDArray[np.float64]:
        """Sum of squares over all frames, as ESPnet and Kaldi keep it."""
        with _nan_and_infinity_allowed():
            return self.m2 + self.mean * self.mean * self.count

    def save(self, file: str | PathLike[str] | BinaryIO) -> None:
        """Write an uncompressed `.npz` of `count`, `mean`, `m2`, `sum` and `sum_square`.

        The same statistics give the same bytes. ESPnet's `GlobalMVN(stats_file=...)` reads them.
        """
        if isinstance(file, str | PathLike):
            # given a path, NumPy would add a suffix of its own
            with Path(file).open("wb") as stream:
                self.save(stream)
            return
        sums: dict[str, Any] = {"sum": self.sum, "sum_square": self.sum_square}
        np.savez(file, count=np.int64(self.count), mean=self.mean, m2=self.m2, **sums)

    @classmethod
    def load(cls, file: str | PathLike[str] | BinaryIO) -> FeatureStats:
        """Read what `save` wrote; raises `CorruptCacheError` for anything else."""
        if isinstance(file, str | PathLike):
            name, data = str(file), Path(file).read_bytes()
        else:
            name, data = str(getattr(file, "name", "the file")), file.read()
        try:
            return cls(*_unpacked(data))
        except Exception as error:  # of damaged bytes zipfile, zlib and NumPy raise a dozen kinds
            raise CorruptCacheError(
                f"{name!r} does not hold statistics that featcache wrote: {error}; "
                "put a good copy of it back"
            ) from error


def _unpacked(data: bytes) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Return count, mean and m2 of what `FeatureStats.save` wrote; anything else is an error."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        for member in archive.infolist():  # before NumPy reserves the memory
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > len(data):
                raise ValueError(f"{member.filename!r} is compressed, or larger than the file")
    with np.load(BytesIO(data), allow_pickle=False) as arrays:
        count, mean, m2 = (arrays[name] for name in ("count", "mean", "m2"))
    for array, kind in ((count, np.int64), (mean, np.float64), (m2, np.float64)):
        if array.dtype != kind:
            raise ValueError(f"numbers are {array.dtype}, not {np.dtype(kind)}")
    return operator.index(count[()]), mean, m2


def _as_float64(block: Array) -> NDArray[np.float64]:
    """Return a block as rows of float64, in memory that the next block of this thread takes."""
    if block.size > _BLOCK_VALUES:  # a single frame
        return block.astype(np.float64, order="C").reshape(len(block), -1)
    memory: NDArray[np.float64] | None = getattr(_scratch, "memory", None)
    if memory is None:
        memory = _scratch.memory = np.empty(_BLOCK_VALUES)
    values = memory[: block.size].reshape(block.shape)
    np.copyto(values, block)
    return values.reshape(len(block), -1)


def _pieces(array: Array, blocks: int) -> Iterator[Array]:
    """Cut an array into pieces of so many blocks."""
    width = max(array.size // max(len(array), 1), 1)
    rows = max(min(_BLOCK_VALUES // width, _BLOCK_ROWS), 1) * blocks
    return (array[start : start + rows] for start in range(0, len(array), rows))


def _summed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum over rows, some of them side by side: that is faster, and rounds less."""
    rows, width = values.shape
    side_by_side = min(max(_WIDE // width, 1), _MOST_TOGETHER)
    together = rows - rows % side_by_side
    wide = values[:together].reshape(together // side_by_side, side_by_side * width)
    sums: NDArray[np.float64] = np.add.reduce(np.add.reduce(wide).reshape(side_by_side, width))
    if together < rows:
        sums += np.add.reduce(values[together:])
    return sums


def _nan_and_infinity_allowed() -> np.errstate:
    # whether they may be stored is for the writer to say
    return np.errstate(invalid="ignore", over="ignore")


def _frozen(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64).view()
    array.flags.writeable = False
    return array
