"""`ReadBack`: sealed parts compared with the rows of the source that they were converted from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from featcache.declaration import FeatureStorageConfig
from featcache.errors import CorruptCacheError, KeyNotFoundError
from featcache.extraction.conversion_source import ConversionSource, is_exact
from featcache.format.files import from_storage
from featcache.format.index import FeatureColumns
from featcache.format.manifest import read_manifest
from featcache.format.part import SealedPart, checksum, sealed_in
from featcache.interface import Array, Ints
from featcache.reading.feature_arrays import OpenedPart, stored_blocks
from featcache.registry import RAW, is_lossless
from featcache.writing.arrays import to_storage
from featcache.writing.copies import StoredArrays

SAMPLED = 64  # of so many arrays one is read, where digests tell of the bytes


@dataclass
class ReadBack:
    """Reads what is sealed, and compares it with the source.

    Args:
        rows: the source.
        cache: the directory of the cache that is written.
        features: the declarations there.

    Attributes:
        errors: the largest difference of a number from the source's, by feature that is not
            exact.
        compared: names of the parts that are compared.
    """

    rows: ConversionSource
    cache: Path
    features: Mapping[str, FeatureStorageConfig]
    errors: dict[str, float] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        was = {name: self.rows.declaration(name) for name in self.features}
        self._exact = {name: is_exact(was[name], each) for name, each in self.features.items()}
        self._same = {name: _same_bytes(was[name], each) for name, each in self.features.items()}
        self._declared = {name: feature.to_json() for name, feature in self.features.items()}
        self.errors |= {name: 0.0 for name, exact in self._exact.items() if not exact}

    def merge(self, errors: Mapping[str, float], compared: Collection[str]) -> None:
        """Take over what was compared elsewhere."""
        self.compared |= {*compared}
        for name, error in errors.items():
            self.errors[name] = max(error, self.errors[name])

    def sealed(self) -> list[SealedPart]:
        """List the sealed parts of the cache, with their tombstones."""
        manifest = read_manifest(self.cache)
        return sealed_in(self.cache, manifest)

    def rest(self) -> int:
        """Compare all parts that were not compared yet; return how many rows there are in all."""
        parts = self.sealed()
        self.parts(part for part in parts if part.entry.name not in self.compared)
        return sum(part.entry.rows - len(part.tombstones(self.cache)) for part in parts)

    def copied(self, sealed: SealedPart, hashed: Collection[str]) -> None:
        """Compare a part with the arrays that were copied into it just now.

        These were compared with their checksums on the way. Files in `hashed` have the digests of
        the very bytes that were written then, so only some of their arrays are read, to see
        that they lie where the index says; of other files all.

        Raises what `parts` raises.
        """
        index = sealed.index(self.cache, [*self.features])
        rows = self.find([*index.ids])
        every = np.arange(len(index))
        for name, columns in index.features.items():
            if not self._has_the_bytes(columns, every, name, rows):
                self.parts([sealed])
                return
        arrays = StoredArrays(self.cache, sealed.directory, index, self.features)
        in_order = arrays.in_order_of_bytes(every)
        read = np.zeros(len(index), bool)
        read[in_order[::SAMPLED]] = read[in_order[-1]] = True
        paths = index.containers.paths
        told = np.array([path in hashed for path in paths], bool)
        for columns in index.features.values():
            extents = np.flatnonzero(~told[columns.container])
            read[columns.first.searchsorted(extents, "right") - 1] = True
        arrays.check(in_order[read[in_order]])
        self.compared.add(sealed.entry.name)

    def parts(self, parts: Iterable[SealedPart]) -> None:
        """Compare parts.

        Raises `CorruptCacheError` for an array that is not what the source has,
        `KeyNotFoundError` for an utterance that it has not.
        """
        for sealed in parts:
            index = sealed.index(self.cache, [*self.features])
            inner = np.setdiff1d(np.arange(sealed.entry.rows), sealed.tombstones(self.cache))
            rows = self.find([*index.ids.take(inner)])
            same = {
                name: feature
                for name, feature in self.features.items()
                if self._has_the_bytes(index.features[name], inner, name, rows)
            }
            if same:
                arrays = StoredArrays(self.cache, sealed.directory, index, same)
                arrays.check(arrays.in_order_of_bytes(inner))
            part = OpenedPart.of(self.cache, sealed, self._declared, index)
            ordered = self.rows.in_order_of_bytes(rows)
            places = inner[np.argsort(rows)][np.searchsorted(np.sort(rows), ordered)]
            for row, place in zip(ordered.tolist(), places.tolist(), strict=True):
                for name in self.features.keys() - same.keys():
                    self._compare(sealed, part, place, row, name)
            part.containers.close()
            self.compared.add(sealed.entry.name)

    def _has_the_bytes(self, columns: FeatureColumns, inner: Ints, name: str, rows: Ints) -> bool:
        """Whether arrays are to have the very bytes that rows of the source have."""
        source = self.rows.plain()
        if source is None or not self._same[name]:
            return False
        theirs, below = source.index.features[name], self.rows.rows_below(rows)
        return np.array_equal(columns.rows[inner], theirs.rows[below]) and np.array_equal(
            columns.checksum[inner], theirs.checksum[below]
        )

    def find(self, ids: list[str]) -> Ints:
        """Return the rows of ids; raises `KeyNotFoundError` for those that the source has not."""
        found = self.rows.find(ids)
        if missing := [ids[place] for place in np.flatnonzero(found < 0)]:
            shown = ", ".join(map(repr, missing[:3])) + ", ..." * (len(missing) > 3)
            raise KeyNotFoundError(
                f"cache {str(self.cache)!r} holds {len(missing)} utterances that the source has "
                f"not ({shown}); give another directory, or overwrite it (overwrite=True)"
            )
        return found

    def _compare(
        self, sealed: SealedPart, part: OpenedPart, place: int, row: int, name: str
    ) -> None:
        """Compare an array with the source's, and its bytes with their checksum."""
        columns, id = part.index.features[name], part.index.id(place)
        blocks = stored_blocks(columns, place, part.containers)
        if checksum(blocks.blocks) != int(columns.checksum[place]):
            raise self._unlike(sealed, id, name, "its bytes are not what was written")
        source = self.rows.array(row, name)
        stored = part.arrays[name].read(place)
        wanted = to_storage(id, source, self.features[name])
        if self.features[name].time_axis is None:
            wanted = wanted[0]
        if stored.shape != wanted.shape:
            raise self._unlike(sealed, id, name, f"its shape is {stored.shape}, not {wanted.shape}")
        if is_lossless(self.features[name].codec) and not _same_bits(stored, wanted):
            raise self._unlike(sealed, id, name, "it is another array")
        if not self._exact[name]:
            found = from_storage(stored, self.features[name].dtype)
            self.errors[name] = max(self.errors[name], _largest_difference(found, source))

    def _unlike(self, part: SealedPart, id: str, name: str, why: str) -> CorruptCacheError:
        return CorruptCacheError(
            f"utterance {id!r}, feature {name!r}, in part {part.entry.name!r} of "
            f"{str(self.cache)!r} is not what the source has: {why}; if the source has changed "
            "since, convert it anew (overwrite=True), else see to the disk"
        )


def _same_bytes(was: FeatureStorageConfig, now: FeatureStorageConfig) -> bool:
    """Whether equal checksums of stored bytes tell of equal arrays."""
    same = (was.dtype, was.codec) == (now.dtype, now.codec)
    return same and (now.codec == RAW or was.make_codec() == now.make_codec())


def _same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _largest_difference(a: Array, b: Array) -> float:
    """Return the largest difference of two arrays' finite numbers."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return float(apart.max(initial=0.0, where=np.isfinite(apart)))
