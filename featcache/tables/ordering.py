"""Orders of rows: by a value, and at random; the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.store.format.index import Hashes
from featcache.tables.columns import Column


def stable_order(values: Ints) -> Ints:
    """Return the rows by value, rows of one value in order; values are from 0 on."""
    bits, most = len(values).bit_length(), int(values.max(initial=0))
    if most < 2**16:
        return np.argsort(values.astype(np.uint16), kind="stable")  # by counting
    if most.bit_length() + bits > 63:
        return np.argsort(values, kind="stable")
    # numbers are sorted several times faster than rows by number
    order: Ints = (values << bits) | np.arange(len(values))
    order.sort()
    order &= (1 << bits) - 1
    return order


def order_by(column: Column, name: str, *, descending: bool) -> Ints:
    """Return the rows by value, those of one value in order, those without one last.

    Texts are in the order of their UTF-8 bytes.
    """
    if column.kind in ("int", "float", "bool"):
        values, missing = column.numbers()
    elif column.kind == "str":
        codes, distinct = column.codes()
        texts = [str(text).encode("utf-8", "surrogatepass") for text in distinct]
        ranks = np.empty(len(texts), np.int64)
        ranks[sorted(range(len(texts)), key=texts.__getitem__)] = np.arange(len(texts))
        missing = codes < 0
        values = ranks[codes] if len(texts) else codes
    else:
        raise ConfigError(f"{name!r} holds {column.kind}, by which nothing is sorted")
    if values.dtype.kind == "f":
        nowhere = np.isnan(values)
        missing = nowhere if missing is None else missing | nowhere
    if missing is None:
        return _stable(values, descending=descending)
    rows = np.flatnonzero(~missing)
    return np.concatenate(
        [rows[_stable(values[rows], descending=descending)], np.flatnonzero(missing)]
    )


def _stable(values: NDArray[Any], *, descending: bool) -> Ints:
    if descending:
        return (len(values) - 1 - _stable(values[::-1], descending=False))[::-1]
    if values.dtype == np.int64 and values.min(initial=0) >= 0:
        return stable_order(values)
    order = np.argsort(values)  # not stable, and many times faster than what is
    ordered = values[order]
    ranks = np.zeros(len(values), np.int64)  # rows of one value have one rank
    np.cumsum(ordered[1:] != ordered[:-1], out=ranks[1:])
    bits = len(values).bit_length()
    ranks <<= bits
    ranks |= order
    ranks.sort()
    ranks &= (1 << bits) - 1
    return ranks


def drawn_parts(hashes: Hashes, seed: int, sizes: Sequence[int] | Ints) -> list[Ints]:
    """Draw rows for parts of these sizes, ascending in each; what is over is in none.

    A draw depends on the hashes of the ids and the seed alone: an utterance that comes or goes
    moves no others but at the ends of parts.
    """
    keys, ends = mixed(hashes, seed), np.cumsum(sizes)
    inner = ends[ends < len(keys)]
    bounds = np.partition(keys, inner)[inner] if len(inner) else keys[:0]
    part_of = bounds.searchsorted(keys, side="right")
    parts = [np.flatnonzero(part_of == part) for part in range(len(sizes))]
    if [*map(len, parts)] == [*map(int, sizes)]:
        return parts
    part_of[np.argsort(keys, kind="stable")] = inner.searchsorted(
        np.arange(len(keys)), side="right"
    )  # two ids have one hash, at a bound
    return [np.flatnonzero(part_of == part) for part in range(len(sizes))]


def mixed(hashes: Hashes, seed: int) -> Hashes:
    """Return numbers drawn for hashes."""
    # the mixing of splitmix64: Steele, Lea & Flood, OOPSLA 2014
    drawn = hashes + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    drawn = (drawn ^ (drawn >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    drawn = (drawn ^ (drawn >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return drawn ^ (drawn >> np.uint64(31))
