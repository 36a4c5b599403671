"""Lengths of the utterances to batch: of arrays, or of the features of a cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.store.cache import Cache, CachePath
from featcache.tables.has_table import HasSome, HasTable, within_table
from featcache.tables.table import FeatureTable

LengthsLike = (
    ArrayLike | Sequence[ArrayLike] | Cache | CachePath | FeatureTable | HasTable | HasSome
)


@dataclass(frozen=True)
class Shapes:
    """Lengths of the utterances of one feature, int64, and the shapes of their frames."""

    name: str
    lengths: Ints
    dims: Ints  # (n, dims) or, where all are alike, (1, dims); -1 where an utterance has fewer

    @classmethod
    def of(cls, name: str, shapes: Ints) -> Shapes:
        """Take them from an array of shapes, (n, 1 + dims)."""
        dims = shapes[:, 1:]
        alike = bool((dims == dims[:1]).all())
        return cls(name, np.ascontiguousarray(shapes[:, 0]), dims[:1] if alike else dims)

    def take(self, rows: Ints) -> Shapes:
        """Return the shapes of these rows."""
        dims = self.dims if len(self.dims) == 1 else self.dims[rows]
        return Shapes(self.name, self.lengths[rows], dims)


def shapes_of(lengths: LengthsLike, axes: int = 1) -> tuple[list[Shapes], FeatureTable | None]:
    """Return the shapes of each feature that has a time axis, or of each array; and the table.

    Arrays hold lengths, (utterances,), or with two `axes` also shapes, (utterances, 1 + dims).
    Raises `ConfigError` for what is neither, for no utterances and for features of different ones.
    """
    if isinstance(lengths, Cache | str | os.PathLike):
        lengths = FeatureTable.of(lengths)
    found = (lengths, lengths) if isinstance(lengths, FeatureTable) else within_table(lengths)
    if found is not None:
        owner, table = found
        if not len(table):
            raise ConfigError(f"there are no utterances to sample: {table!r} is empty")
        names = [name for name in owner.features if table.has_frames(name)]
        return [_of_table(table, name) for name in names], table
    if isinstance(lengths, list | tuple) and len(lengths) > 0 and np.ndim(lengths[0]) > 0:
        arrays = {f"lengths[{number}]": array for number, array in enumerate(lengths)}
    else:
        arrays = {"lengths": lengths}
    shapes = [_checked(name, np.asarray(array), axes) for name, array in arrays.items()]
    counts = [len(shape.lengths) for shape in shapes]
    if len(set(counts)) > 1:
        raise ConfigError(f"the features have lengths for {counts} utterances; give the same ones")
    return shapes, None


def _of_table(table: FeatureTable, name: str) -> Shapes:
    shapes = _checked(f"lengths of feature {name!r}", table.lengths(name), 1)  # may be damaged
    return replace(shapes, name=f"feature {name!r}", dims=np.array([table.dims(name)], np.int64))


def _checked(name: str, array: NDArray[np.generic], axes: int) -> Shapes:
    if array.ndim and not array.size:
        raise ConfigError(f"there are no utterances to sample: {name} is empty")
    if not 1 <= array.ndim <= axes or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}"
        if array.dtype.kind == "O" and array.ndim == 0:
            found = (
                f"a {type(array.item()).__name__}; if Lightning puts it there to share batches "
                "out, which the sampler does itself, set Trainer(use_distributed_sampler=False)"
            )
        shapes = "" if axes == 1 else " (or rows of integers, their shapes)"
        raise ConfigError(f"{name} are frames of each utterance, integers{shapes}, not {found}")
    whole = array.astype(np.int64, copy=False).reshape(len(array), -1)
    if whole.min() < 0:
        row = int(whole.min(1).argmin())
        raise ConfigError(f"{name} cannot be negative: row {row} has {array[row].tolist()}")
    return Shapes.of(name, whole)
