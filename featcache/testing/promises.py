"""The promises of `featcache.interface`, asked of the backend itself.

Also of its `ContainerWriter` and its codec.
"""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import xxhash

from featcache.container_files import PAGE_BYTES, EncodedArrays, append_many
from featcache.declaration import DTYPES
from featcache.interface import (
    Backend,
    ContainerWriter,
    EncodedArray,
    Extent,
    FeatureSpec,
    SupportsBlocks,
    SupportsPages,
    WritesOut,
)
from featcache.registry import RAW, get_codec
from featcache.testing.backend_under_test import (
    DIMS,
    Storage,
    encode,
    random_numbers,
    some_features,
    some_utterances,
)

FRAMES = {"a": 3, "a/b": 700, "none": 0, "a.b": 1}


class Seam:
    """Promises of a backend that the store relies on."""

    def test_a_backend_is_made_of_its_options(self, storage: Storage) -> None:
        feature = storage.declare()
        backend, same = feature.make_backend(), feature.make_backend()
        assert isinstance(backend, Backend)
        assert dataclasses.is_dataclass(backend)
        assert (backend, hash(backend)) == (same, hash(same)), (
            "features with equal options share containers"
        )
        assert len(set(backend.codecs)) == len(backend.codecs) > 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            backend.anything = 1

    def test_extents_hold_the_written_bytes(self, storage: Storage, tmp_path: Path) -> None:
        (tmp_path / "foreign").write_bytes(b"not ours")
        writer, written = append_all(storage, tmp_path)
        if isinstance(writer, WritesOut):
            writer.write_out()
            assert_hold(tmp_path, written)
        writer.flush()
        assert_hold(tmp_path, written)
        writer.close()
        assert_hold(tmp_path, written)
        assert (tmp_path / "foreign").read_bytes() == b"not ours"

    def test_extents_do_not_overlap(self, storage: Storage, tmp_path: Path) -> None:
        writer, written = append_all(storage, tmp_path)
        writer.close()
        extents = [extent for _, each in written for extent in each]
        end = {extent.container: 0 for extent in extents}
        for extent in sorted(extents, key=lambda extent: extent.offset):
            assert extent.offset >= end[extent.container]
            end[extent.container] = extent.offset + extent.nbytes

    @pytest.mark.parametrize("blocks_a_piece", [1, 2, 1 << 20])
    def test_many_at_once_are_written_as_one_by_one(
        self, storage: Storage, tmp_path: Path, blocks_a_piece: int
    ) -> None:
        one_by_one, many = tmp_path / "one", tmp_path / "many"
        one_by_one.mkdir()
        many.mkdir()
        writer, written = append_all(storage, one_by_one)
        writer.close()
        writer, specs = open_writer(storage, many)
        names = [spec.name for spec in specs]
        arrays = {
            name: EncodedArrays.of([array for array, _ in written[place :: len(names)]])
            for place, name in enumerate(names)
        }
        arrays = {name: in_pieces_of(blocks_a_piece, each) for name, each in arrays.items()}
        found = append_many(writer, list(FRAMES), arrays)
        writer.close()
        for place, name in enumerate(names):
            extents = [each for _, each in written[place :: len(names)]]
            assert [*found[name].each()] == extents
        files = [path.relative_to(one_by_one) for path in one_by_one.rglob("*") if path.is_file()]
        for file in files:
            assert (many / file).read_bytes() == (one_by_one / file).read_bytes(), file

    def test_pages_are_those_of_the_files(self, storage: Storage, tmp_path: Path) -> None:
        writer, _ = append_all(storage, tmp_path)
        writer.close()
        if not isinstance(writer, SupportsPages):
            pytest.skip("the store reads the files again")
        for path, pages in writer.pages().items():
            data = memoryview((tmp_path / path).read_bytes())
            starts = range(0, len(data), PAGE_BYTES)
            assert pages.dtype == np.uint64
            assert pages.tolist() == [
                xxhash.xxh3_64_intdigest(data[start : start + PAGE_BYTES]) for start in starts
            ], path
            assert PurePosixPath(path).as_posix() == path

    def test_an_aborted_writer_leaves_flushed_bytes_in_place(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        writer, written = append_all(storage, tmp_path)
        writer.flush()
        writer.abort()
        assert_hold(tmp_path, written)

    def test_a_writer_without_arrays_closes_and_aborts(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        for end in ("close", "abort"):
            (tmp_path / end).mkdir()
            getattr(open_writer(storage, tmp_path / end)[0], end)()

    def test_abort_never_raises(self, storage: Storage, tmp_path: Path) -> None:
        writer, _ = append_all(storage, tmp_path)
        writer.close()
        writer.abort()  # when sealing failed after this container was closed
        writer.abort()

    def test_a_codec_leaves_its_input_alone(self, storage: Storage) -> None:
        if storage.codec == RAW:
            pytest.skip("no codec")
        assert isinstance(storage.declare().make_backend(), SupportsBlocks)
        assert get_codec(storage.codec).name == storage.codec
        assert set(storage.dtypes) <= set(DTYPES)
        for dtype in storage.dtypes:
            codec = storage.declare(dtype=dtype).make_codec()
            assert codec is not None
            for shape in ((1,), (300,), (300, 5), (2, 3, 4), (2, 2, 2, 3)):
                block = random_numbers(dtype, shape)
                before = block.tobytes()
                block.flags.writeable = False
                data = codec.encode(block)
                assert block.tobytes() == before
                decoded = codec.decode(memoryview(data), block.dtype, shape[1:], shape[0])
                assert (decoded.dtype, decoded.shape) == (block.dtype, shape)
                if storage.lossless:
                    assert decoded.tobytes() == before

    def test_the_same_block_gives_the_same_bytes(self, storage: Storage) -> None:
        codec = storage.declare().make_codec()
        if codec is not None:
            block = random_numbers(storage.dtypes[0], (300, 5))
            assert codec.encode(block) == codec.encode(block.copy())


Written = list[tuple[EncodedArray, tuple[Extent, ...]]]


def open_writer(storage: Storage, directory: Path) -> tuple[ContainerWriter, list[FeatureSpec]]:
    """Start the files of `some_features`."""
    features = some_features(storage)
    specs = [feature.spec(DIMS[feature.name]) for feature in features]
    return features[0].make_backend().open_writer(directory, specs), specs


def append_all(storage: Storage, directory: Path) -> tuple[ContainerWriter, Written]:
    """Append some utterances; returns the open writer, and what lies where."""
    writer, specs = open_writer(storage, directory)
    features = some_features(storage)
    written: Written = []
    for id, arrays in some_utterances(features, FRAMES).items():
        encoded = {
            feature.name: encode(
                spec,
                feature,
                arrays[feature.name] if spec.has_frames else arrays[feature.name][None],
            )
            for feature, spec in zip(features, specs, strict=True)
        }
        extents = writer.append(id, encoded)
        assert extents.keys() == encoded.keys()
        written += [(encoded[name], extents[name]) for name in encoded]
    return writer, written


def in_pieces_of(blocks: int, arrays: EncodedArrays) -> EncodedArrays:
    """Put so many blocks of arrays into a piece."""
    pieces = (arrays.pieces[at : at + blocks] for at in range(0, len(arrays.pieces), blocks))
    return replace(arrays, pieces=[memoryview(b"".join(each)) for each in pieces])


def assert_hold(directory: Path, written: Written) -> None:
    """Fail unless all extents hold what was written."""
    for array, extents in written:
        pieces = []
        for extent in extents:
            path = PurePosixPath(extent.container)
            assert not path.is_absolute()
            assert ".." not in path.parts
            data = (directory / path).read_bytes()[extent.offset : extent.offset + extent.nbytes]
            assert len(data) == extent.nbytes > 0
            pieces.append(data)
        blocks = [bytes(block) for block in array.blocks]
        assert b"".join(pieces) == b"".join(blocks)
        assert len(blocks) <= 1 or pieces == blocks, "one extent a block"
