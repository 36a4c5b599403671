"""Collects checksums and statistics of adopted parts: one pass over the bytes of their sources.

Each part is sealed again with what was collected, in the place of the one before. A killed run has
changed nothing of the parts that it had not come to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from featcache.container_files import PAGE_BYTES, Pages
from featcache.errors import FeatureError
from featcache.interface import Ints
from featcache.stats import FeatureStats
from featcache.store.format.bfloat16 import from_storage
from featcache.store.format.index import FeatureColumns, Index
from featcache.store.format.manifest import Manifest
from featcache.store.format.pages import container_digest, page_count, pages_of
from featcache.store.format.part import SealedPart, as_known
from featcache.store.format.roots import Roots
from featcache.store.reading.adopted_files import AdoptedFiles
from featcache.store.reading.containers import Containers
from featcache.store.reading.feature_arrays import FeatureArrays
from featcache.store.writing.adopted_part import seal_again
from featcache.store.writing.compact import UNCHANGED
from featcache.store.writing.open_part import Declarations
from featcache.store.writing.publish import publish, sealed_parts
from featcache.store.writing.rewrite import live_rows

MOST_TOLD = 5


def collect_parts(
    cache: Path, features: Declarations, manifest: Manifest, roots: Roots
) -> Manifest:
    """Collect what is missing of adopted parts, and publish it; return the manifest of then.

    Only the holder of the cache's lock may call this.
    """
    parts = as_known(sealed_parts(cache, manifest), manifest)
    for part in parts:
        if not part.entry.is_collected:
            collected = _Collected(cache, part, features, manifest, roots)
            seal_again(cache, part, manifest, collected.index(), collected.pages)
    return publish(cache, manifest, UNCHANGED)


class _Collected:
    """One pass over the bytes of a part: checksums of pages and arrays, and statistics."""

    def __init__(
        self,
        cache: Path,
        part: SealedPart,
        features: Declarations,
        manifest: Manifest,
        roots: Roots,
    ) -> None:
        self._index = part.stamped_index(cache, list(features))
        files = self._index.containers
        adopted = AdoptedFiles.of(cache, [part.entry], files, roots)
        alone = dataclasses.replace(manifest, dims=part.header.dims, parts=(part.entry,))
        self._containers = Containers.of(cache / part.directory, files, adopted=adopted)
        self._arrays = {
            name: FeatureArrays(alone, name, self._index, self._containers) for name in features
        }
        self._checksums = {name: np.zeros(len(self._index), np.uint64) for name in features}
        self._stats = {
            name: FeatureStats.empty(part.header.dims[name])
            for name, feature in features.items()
            if feature.stats
        }
        self._not_finite: dict[str, list[str]] = {name: [] for name in features}
        self.pages: list[Pages] = []
        if adopted is not None:
            self._read(_ReadAhead(files.sizes, adopted, self.pages), live_rows(cache, part))
        self._check_finite()

    def index(self) -> Index:
        """Return the part's index with what was collected."""
        columns = self._index.containers
        sizes = columns.sizes.tolist()
        pairs = zip(self.pages, sizes, strict=True)
        digests = b"".join(container_digest(pages, size) for pages, size in pairs)
        features = {
            name: dataclasses.replace(each, checksum=self._checksums[name])
            for name, each in self._index.features.items()
        }
        digest_column = np.frombuffer(digests, np.uint8)
        containers = dataclasses.replace(columns, digests=digest_column)
        return dataclasses.replace(
            self._index, features=features, containers=containers, stats=self._stats
        )

    def _read(self, files: _ReadAhead, rows: Ints) -> None:
        names = list(self._arrays)
        with contextlib.closing(files):
            for number, row in _in_order_of_bytes([*self._index.features.values()], rows):
                self._read_array(names[number], row, files)
            files.finish()

    def _read_array(self, name: str, row: int, files: _ReadAhead) -> None:
        columns, state = self._index.features[name], xxhash.xxh3_64()
        for at in range(int(columns.first[row]), int(columns.first[row + 1])):
            place = (int(columns.container[at]), int(columns.offset[at]), int(columns.nbytes[at]))
            files.come_to(place[0], place[1] + place[2])
            state.update(self._containers.view(*place).data)
        self._checksums[name][row] = state.intdigest()
        if name not in self._stats:
            return
        arrays = self._arrays[name]
        frames = from_storage(arrays.read(row), arrays.declared_dtype)
        stats = FeatureStats.of(frames if arrays.has_frames else frames[np.newaxis])
        if not np.isfinite(stats.mean).all():
            self._not_finite[name].append(self._index.id(row))
        self._stats[name] = self._stats[name].merge(stats)

    def _check_finite(self) -> None:
        for name, ids in self._not_finite.items():
            if ids:
                told = ", ".join(map(repr, ids[:MOST_TOLD])) + ", ..." * (len(ids) > MOST_TOLD)
                raise FeatureError(
                    f"feature {name!r} has NaN or infinity in {len(ids)} utterances ({told}), so "
                    "it has no statistics: delete these from the cache (Cache.delete; the source "
                    "stays as it is), or adopt it with nonfinite='keep'"
                )


class _ReadAhead:
    """Reads containers one after the other, page by page, just ahead of the arrays in them.

    So the arrays are in memory when they are read, and each byte comes from the disk once.

    Args:
        sizes: the bytes of each container.
        adopted: opens them.
        pages: gets the checksums of the pages of each container, in order.
    """

    def __init__(self, sizes: Ints, adopted: AdoptedFiles, pages: list[Pages]) -> None:
        self._sizes = sizes.tolist()
        self._adopted = adopted
        self._pages = pages
        self._descriptor = -1  # of the container that is being read, the next one of `pages`
        self._read_pages: list[Pages] = []  # of it
        self._done = 0
        from tqdm import tqdm  # here, since every `featcache.open` imports this module

        self.bar = tqdm(
            total=sum(self._sizes), unit="B", unit_scale=True, desc="collect", disable=None
        )

    def come_to(self, container: int, end: int) -> None:
        """Read at least up to a byte of a container."""
        while len(self._pages) < container:
            self._finish_file()
        if len(self._pages) == container:
            self._read(-(-end // PAGE_BYTES))

    def finish(self) -> None:
        """Read all that is left."""
        while len(self._pages) < len(self._sizes):
            self._finish_file()

    def close(self) -> None:
        """Let go of the container that is being read."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.bar.close()

    def _finish_file(self) -> None:
        number = len(self._pages)
        self._read(page_count(self._sizes[number]))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        os.close(self._adopted.open(number))  # it has not changed meanwhile
        self._pages.append(np.concatenate([np.empty(0, np.uint64), *self._read_pages]))
        self._read_pages, self._done = [], 0

    def _read(self, last: int) -> None:
        if last > self._done:
            if self._descriptor < 0:
                self._descriptor = self._adopted.open(len(self._pages))
            new = pages_of(self._descriptor, self._done, last - self._done)
            self._read_pages.append(new)
            self._done = last
            self.bar.update(len(new) * PAGE_BYTES)


def _in_order_of_bytes(features: Sequence[FeatureColumns], rows: Ints) -> Iterator[tuple[int, int]]:
    """Give the arrays of rows, each as number of its feature and row, in the order of bytes."""
    numbers: list[Ints] = []
    containers, offsets = [], []
    for columns in features:
        first = np.minimum(columns.first[rows], max(len(columns.offset) - 1, 0))
        has_any = len(columns.offset) > 0  # of arrays without bytes, any place will do
        containers.append(columns.container[first] if has_any else np.zeros(len(rows), np.int32))
        offsets.append(columns.offset[first] if has_any else np.zeros(len(rows), np.int64))
        numbers.append(np.full(len(rows), len(numbers)))
    order = np.lexsort((np.concatenate(offsets), np.concatenate(containers)))
    of_feature, of_row = np.concatenate(numbers)[order], np.tile(rows, len(features))[order]
    yield from zip(of_feature.tolist(), of_row.tolist(), strict=True)
