"""Writing an index: utterances in any order are put into the canonical one, a column at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.interface import Ints
from featcache.stats import FeatureStats
from featcache.store.format.annotation_columns import Column, stored_columns
from featcache.store.format.annotations import Values, kinds_of
from featcache.store.format.column_file import Number
from featcache.store.format.id_order import argsort_ids, take
from featcache.store.format.index import ContainerColumns, FeatureColumns, Hashes, Index, hash_of
from featcache.store.format.journal_lines import Utterance
from featcache.store.format.stamps import StampColumns
from featcache.store.format.strings import Strings, ends_of

Columns = Iterator[tuple[str, NDArray[Any]]]


def index_of(
    utterances: Sequence[Utterance],
    containers: ContainerColumns,
    stats: Mapping[str, FeatureStats],
    names: Sequence[str],
) -> Index:
    """Return the index of utterances as they come, for `index_columns`."""
    keys = [utterance.id.encode() for utterance in utterances]
    numbers = {path: number for number, path in enumerate(containers.paths)}
    features = {}
    for name in names:
        placed = [utterance.arrays[name] for utterance in utterances]
        extents = [extent for array in placed for extent in array.extents]
        features[name] = FeatureColumns(
            rows=np.array([array.rows for array in placed], np.int64),
            checksum=np.array([array.checksum for array in placed], np.uint64),
            first=ends_of([len(array.extents) for array in placed]),
            container=np.array([numbers[extent.container] for extent in extents], np.int32),
            offset=np.array([extent.offset for extent in extents], np.int64),
            nbytes=np.array([extent.nbytes for extent in extents], np.int64),
        )
    return Index(
        hashes=np.fromiter(map(hash_of, keys), np.uint64, len(keys)),
        hash_rows=np.arange(len(keys)),
        ids=Strings.of_bytes(keys),
        features=features,
        containers=containers,
        stats=stats,
        stamps=StampColumns.of([utterance.stamps for utterance in utterances]),
    )


class Rows(NamedTuple):
    """Rows of several indexes, numbered through, in the canonical order, and their ids."""

    order: Ints
    ids: Strings


def rows_of(indexes: Sequence[Index], left_out: Sequence[Ints]) -> Rows:
    """Put the rows of indexes, but for those that are left out of each, into the canonical order.

    Of equal ids, the one in the earliest index comes first.
    """
    id_bytes = _joined([*(index.ids.data for index in indexes), np.zeros(8, np.uint8)], np.uint8)
    id_ends = ends_of(_joined([np.diff(index.ids.ends) for index in indexes], np.int64))
    order = argsort_ids(id_bytes, id_ends)
    starts = ends_of([len(index) for index in indexes])
    out = _joined([rows + start for rows, start in zip(left_out, starts, strict=False)], np.int64)
    if len(out):
        stays = np.ones(len(order), bool)
        stays[out] = False
        order = order[stays[order]]
    data, ends = take(id_bytes, id_ends, order)
    return Rows(order, Strings(ends, data))


def hashes_of(indexes: Sequence[Index], order: Ints) -> Hashes:
    """Return the hashes of the ids of rows of several indexes, numbered through."""
    return _joined([index.hashes_of_rows() for index in indexes], np.uint64)[order]


def doubled_rows(indexes: Sequence[Index], rows: Rows) -> list[Ints]:
    """Return, for each of the indexes, the rows whose id an earlier one has, too, ascending."""
    hashes = hashes_of(indexes, rows.order)
    candidates = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
    doubled = [row for row in candidates.tolist() if rows.ids[row] == rows.ids[row - 1]]
    numbers = np.sort(rows.order[doubled])
    starts = ends_of([len(index) for index in indexes])
    cuts = numbers.searchsorted(starts)
    return [numbers[cuts[i] : cuts[i + 1]] - starts[i] for i in range(len(indexes))]


def index_columns(
    indexes: Sequence[Index], rows: Rows, names: Sequence[str], stats: Mapping[str, FeatureStats]
) -> Columns:
    """Join indexes into one, and give its columns one by one: together they may be gigabytes.

    Args:
        indexes: of parts, whose containers are numbered on from those of the one before.
        rows: those of the joined index, as `rows_of` gives them.
        names: of the features.
        stats: of all frames, by feature.
    """
    order, ids = rows
    del rows
    yield from string_columns("id", ids)
    del ids
    hashes = hashes_of(indexes, order)
    hash_rows = np.argsort(hashes, kind="stable").astype(np.int64, copy=False)
    yield "hashes", hashes[hash_rows]
    yield "hash_rows", hash_rows
    del hashes, hash_rows
    if any(index.stamps for index in indexes):
        for number, name in enumerate(StampColumns._fields):
            yield name, _joined([_stamps_of(index, number) for index in indexes], np.uint64)[order]
    shifts = ends_of([len(index.containers) for index in indexes])
    for name in names:
        parts = [index.features[name] for index in indexes]
        yield f"{name}.rows", _joined([part.rows for part in parts], np.int64)[order]
        yield f"{name}.checksum", _joined([part.checksum for part in parts], np.uint64)[order]
        counts = _joined([np.diff(part.first) for part in parts], np.int64)
        first = ends_of(counts[order])
        yield f"{name}.first", first
        # the extents of row r come, in their order, from those of row order[r]
        source = ends_of(counts)[order]
        source -= first[:-1]
        source = np.repeat(source, counts[order])
        source += np.arange(first[-1])
        del counts, first
        containers = [part.container + shift for part, shift in zip(parts, shifts, strict=False)]
        yield f"{name}.container", _joined(containers, np.int32)[source]
        yield f"{name}.offset", _joined([part.offset for part in parts], np.int64)[source]
        yield f"{name}.nbytes", _joined([part.nbytes for part in parts], np.int64)[source]
        yield from _optional(
            f"{name}.block_rows", parts, [part.block_rows for part in parts], order
        )
        yield from _optional(f"{name}.skip", parts, [part.skip for part in parts], order)
    for name, value in stats.items():
        yield from stats_columns(name, value)


def annotation_columns(ids: Sequence[str], annotations: Sequence[Values], order: Ints) -> Columns:
    """Give the annotations of utterances as columns, in the order of the rows that they become."""
    kinds = kinds_of(zip(ids, annotations, strict=True))
    for name, kind in sorted(kinds.items()):
        values = [annotations[row].get(name) for row in order.tolist()]
        yield from stored_columns(name, Column.of(values, kind))


def container_columns(prefixes: Sequence[str], containers: Sequence[ContainerColumns]) -> Columns:
    """Give the columns of all parts' containers; `prefixes` lead from the cache to the parts."""
    pairs = zip(prefixes, containers, strict=True)
    paths = [prefix + path for prefix, each in pairs for path in each.paths]
    yield from string_columns("container_path", Strings.of(paths))
    yield "container_size", _joined([each.sizes for each in containers], np.int64)
    yield "container_digest", _joined([each.digests for each in containers], np.uint8)
    numbers = np.arange(len(containers), dtype=np.int32)
    yield "container_part", np.repeat(numbers, [len(each) for each in containers])
    if any(each.mtimes is not None for each in containers):
        yield "container_mtime", _joined([_mtimes_of(each) for each in containers], np.int64)


def string_columns(name: str, strings: Strings) -> Columns:
    """Give a column of strings as the two that are stored."""
    yield f"{name}_ends", strings.ends
    yield f"{name}_bytes", strings.data


def stats_columns(feature: str, stats: FeatureStats) -> Columns:
    """Give the statistics of a feature as columns."""
    yield f"{feature}.count", np.array([stats.count], np.int64)
    yield f"{feature}.dims", np.array(stats.mean.shape, np.int64)
    yield f"{feature}.mean", stats.mean.reshape(-1)
    yield f"{feature}.m2", stats.m2.reshape(-1)


def _optional(
    name: str, parts: Sequence[FeatureColumns], columns: Sequence[Ints | None], order: Ints
) -> Columns:
    """Give a column that not all parts have, with 0 for the rows of the others."""
    if any(column is not None for column in columns):
        pairs = zip(parts, columns, strict=True)
        filled = [np.zeros(len(part.rows), np.int64) if c is None else c for part, c in pairs]
        yield name, _joined(filled, np.int64)[order]


def _stamps_of(index: Index, number: int) -> Hashes:
    return np.zeros(len(index), np.uint64) if index.stamps is None else index.stamps[number]


def _mtimes_of(containers: ContainerColumns) -> Ints:
    return np.zeros(len(containers), np.int64) if containers.mtimes is None else containers.mtimes


def _joined(columns: Iterable[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    return np.concatenate([np.empty(0, dtype), *columns]).astype(dtype, copy=False)
