"""Copies utterances of another cache into new parts, block by block as they are.

For declarations that change nothing of what is stored. Nothing is decoded, where whole parts are
copied: then their statistics are those of the copies, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featcache.declaration import FeatureStorageConfig
from featcache.format.part import SealedPart, as_known, header_for, read_part
from featcache.interface import Ints
from featcache.reading.generation import Generation
from featcache.registry import RAW
from featcache.stats import FeatureStats
from featcache.writing.compact import LARGE, fullness
from featcache.writing.copies import CopySource, StoredArrays, copy_rows
from featcache.writing.known_ids import find_stored
from featcache.writing.open_part import Declarations
from featcache.writing.publish import AnnotatedRows, merged_stats


def keeps_its_bytes(source: Generation, feature: FeatureStorageConfig) -> bool:
    """Whether an array of a generation, stored as `feature` declares, has the same bytes."""
    manifest, name = source.manifest, feature.name
    was = FeatureStorageConfig.from_json(manifest.features[name])
    dims = manifest.dims.get(name, ())
    stricter = (feature.stats and not was.stats) or (was.nonfinite, feature.nonfinite) == (
        "keep",
        "raise",
    )
    fits = feature.dims in (None, dims) and feature.time_axis == was.time_axis
    if stricter or not fits or (was.dtype, was.codec) != (feature.dtype, feature.codec):
        return False
    if feature.codec == RAW:
        return True
    cut = feature.blocks(dims)
    rows = {part.block_rows[name] for part in manifest.parts}
    same = (was.make_codec(), was.blocks(dims)) == (feature.make_codec(), cut)
    return same and rows <= {0 if cut is None else cut.rows or 0}


@dataclass(frozen=True)
class PartCopies:
    """Copies rows of a plain generation into new parts of another cache.

    Only the holder of that cache's lock may use this.

    Args:
        source: the generation that is copied.
        cache: the directory of the cache that takes the copies.
        features: the declarations there; none changes the bytes of the source.
        fingerprint: digest of what that cache is made from.
    """

    source: Generation
    cache: Path
    features: Declarations
    fingerprint: str

    def groups(self, rows: Ints) -> Iterator[Ints]:
        """Cut rows into those of one new part each, in the order of their bytes.

        Rows of one old part stay together. Parts are as small as they may be: one that is killed
        is copied again.
        """
        if not len(rows):
            return
        containers, offsets = self._arrays().places(rows)
        order = np.lexsort((offsets, containers))
        numbers = self.source.index.containers.parts
        # an array without bytes may be copied with any part
        parts = np.where(containers < 0, -1, numbers[containers] if len(numbers) else -1)[order]
        starts = np.flatnonzero(np.append(True, parts[1:] != parts[:-1]))
        sizes = np.add.reduceat(self.nbytes(rows)[order], starts).tolist()
        counts = np.diff(np.append(starts, len(rows))).tolist()
        begin = end = held = 0
        for size, count in zip(sizes, counts, strict=True):
            if (
                fullness(end - begin, held) >= LARGE
                or fullness(end - begin + count, held + size) > 1
            ):
                if end > begin:
                    yield rows[order[begin:end]]
                begin, held = end, 0
            end, held = end + count, held + size
        if end > begin:
            yield rows[order[begin:end]]

    def _arrays(self) -> StoredArrays:
        return StoredArrays(self.source.path, "", self.source.index, self.features)

    def nbytes(self, rows: Ints) -> Ints:
        """Return the stored bytes of rows, all features together."""
        columns = self.source.index.features
        return sum((columns[name].sizes()[rows] for name in self.features), np.zeros_like(rows))

    def copy(
        self, rows: Ints, tell: Callable[[int, int], object] = lambda utterances, nbytes: None
    ) -> tuple[SealedPart, set[str]]:
        """Copy rows into a new part and seal that; `tell` is called with utterances and bytes.

        Also returns the paths of its files whose pages were hashed on their way to the disk.

        Raises `CorruptCacheError` for an array that is not what was written; then nothing is left.
        """
        build = find_stored(self.cache, self.fingerprint).build
        dims = {name: self.source.manifest.dims[name] for name in self.features}
        header = header_for(self.features, dims, build, self.fingerprint)
        source = CopySource(self._arrays(), _annotated(self.source), rows)
        stats = self._whole_stats(rows)
        return copy_rows(self.cache, self.features, header, [source], stats, tell=tell)

    def _whole_stats(self, rows: Ints) -> Mapping[str, FeatureStats] | None:
        """Return the statistics of the parts that rows are all of; None if they are not all."""
        opened, manifest = self.source, self.source.manifest
        containers, _ = self._arrays().places(rows)
        numbers = np.unique(opened.index.containers.parts[containers[containers >= 0]]).tolist()
        names = [manifest.parts[number].name for number in numbers]
        found = [part for name in names if (part := read_part(opened.path, name)) is not None]
        if not found or len(found) < len(names):
            return None
        stats = merged_stats(opened.path, as_known(found, manifest), manifest)
        frames = {name: int(opened.index.features[name].rows[rows].sum()) for name in self.features}
        counted = (name for name, each in self.features.items() if each.stats)
        # rows are some of those that the parts' statistics are of: as many frames are all of them
        return stats if all(stats[name].count == frames[name] for name in counted) else None


def _annotated(opened: Generation) -> AnnotatedRows:
    kinds = {name: entry.kind for name, entry in opened.manifest.annotations.items()}
    return AnnotatedRows(
        opened.manifest.name,
        len(opened.index),
        kinds,
        opened.annotation,
        lambda: np.empty(0, np.int64),
    )
