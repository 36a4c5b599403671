"""Native files: what a backend wrote is what its format's own library reads."""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from featcache.errors import FeatureError
from featcache.interface import Array, ChecksArrays, ContainerWriter, Extent, FeatureSpec
from featcache.testing.backend_under_test import (
    Storage,
    Utterances,
    encode,
    random_numbers,
    some_features,
)
from featcache.testing.promises import Written, assert_hold, open_writer
from featcache.testing.round_trips import IDS

LONG_IDS = [char * size for char in "x/é" for size in (5_000, 32_760, 65_519, 65_536, 300_000)]


class NativeFiles:
    """The format's own library reads what was written; what it cannot read is refused before."""

    def read_natively(
        self, directory: Path, feature: FeatureSpec, extents: Mapping[str, tuple[Extent, ...]]
    ) -> Mapping[str, Array] | None:
        """Read the arrays of a feature with the format's own library; override it.

        Args:
            directory: with the files of a closed `ContainerWriter`.
            feature: as that writer knows it.
            extents: what `append` returned for each id, for formats that do not store ids.

        Returns by id the arrays in the shape that the user sees, bfloat16 as the uint16 of its
        bits; None: the library is not asked.
        """
        return None

    def test_the_formats_own_library_reads_it(self, storage: Storage, tmp_path: Path) -> None:
        utterances, _ = self._write_and_read(storage, tmp_path, IDS)
        if not utterances:
            pytest.skip("read_natively is not overridden")
        assert set(utterances) == set(IDS)

    def test_an_id_that_the_format_cannot_hold_is_refused_before(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        _, written = self._write_and_read(storage, tmp_path, ["before", *LONG_IDS, "after"])
        assert_hold(tmp_path, written)

    def _write_and_read(
        self, storage: Storage, directory: Path, ids: Iterable[str]
    ) -> tuple[Utterances, Written]:
        """Write all that is not refused and read it; returns what the format's library read."""
        writer, specs = open_writer(storage, directory)
        features = some_features(storage)
        utterances: dict[str, dict[str, Array]] = {}
        extents: dict[str, dict[str, tuple[Extent, ...]]] = {}
        written: Written = []
        for number, id in enumerate(ids):
            arrays = {spec.name: some_rows(spec, number) for spec in specs}
            if is_refused(writer, id, arrays):
                continue
            encoded = {
                feature.name: encode(spec, feature, arrays[feature.name])
                for feature, spec in zip(features, specs, strict=True)
            }
            utterances[id] = arrays
            extents[id] = writer.append(id, encoded)
            written += [(encoded[name], extents[id][name]) for name in encoded]
        writer.close()
        read: dict[str, dict[str, Array]] = {}
        for spec in specs:
            places = {id: each[spec.name] for id, each in extents.items()}
            arrays_read = self.read_natively(directory, spec, places)
            if arrays_read is None:
                return {}, written
            assert set(arrays_read) == set(utterances)
            for id, array in arrays_read.items():
                rows = utterances[id][spec.name]
                expected = rows.reshape(spec.shape(len(rows)))
                storage.assert_same(array, expected, spec.storage_dtype.name, (id, spec.name))
                read.setdefault(id, {})[spec.name] = array
        return read, written


def some_rows(spec: FeatureSpec, number: int) -> Array:
    """Make an array of shape (rows, *dims), without frames now and then."""
    rows = number % 4 if spec.has_frames else 1
    return random_numbers(spec.dtype, (rows, *spec.dims), seed=number)


def is_refused(writer: ContainerWriter, id: str, arrays: Mapping[str, Array]) -> bool:
    """Ask a writer, if it can be asked, whether it refuses arrays of shape (rows, *dims)."""
    if isinstance(writer, ChecksArrays):
        try:
            writer.check(id, {name: (len(array), array.nbytes) for name, array in arrays.items()})
        except FeatureError:
            return True
    return False
