"""Pages of HDF5 files: hashed from the arrays in hand, read where records of HDF5 lie."""

from __future__ import annotations

from pathlib import Path
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hdf5_helpers import FBANK, encoded, make, read
from hypothesis import given, settings

from featcache.container_files import PAGE_BYTES
from featcache.interface import Extent, FeatureSpec
from featcache_backends.hdf5 import GzipCodec, Hdf5Backend, Hdf5Writer, PagePieces

GZIP = FeatureSpec("fbank", "float32", (80,), codec=GzipCodec())


def pages_in(path: Path) -> list[int]:
    data = path.read_bytes()
    starts = range(0, len(data), PAGE_BYTES)
    return [xxhash.xxh3_64_intdigest(data[start : start + PAGE_BYTES]) for start in starts]


def change(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def written(directory: Path, feature: FeatureSpec, rows: int) -> tuple[Hdf5Writer, Extent]:
    """Write an array between two small ones; return the place of its bytes, or of its chunk 0."""
    writer = Hdf5Backend().open_writer(directory, [feature])
    for id, count in (("before", 3), ("utt", rows), ("after", 3)):
        extents = writer.append(id, {"fbank": encoded(feature, make(feature, count))})
        if id == "utt":
            found = extents["fbank"][0]
    return writer, found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 1, 56, 8192, PAGE_BYTES]),
            st.one_of(st.integers(1, 300), st.integers(1, 3 * PAGE_BYTES)),
        ),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_pieces_anywhere_give_the_pages_of_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    gaps_and_sizes: list[tuple[int, int]],
    random: Random,
) -> None:
    places, end = [], 0
    for gap, size in gaps_and_sizes:
        places.append((end + gap, size))
        end += gap + size
    data = np.random.default_rng(end).bytes(end + 100)
    path = tmp_path_factory.getbasetemp() / "pieces"
    path.write_bytes(data)
    random.shuffle(places)
    pieces = PagePieces()
    for offset, size in places:
        pieces.add(offset, memoryview(data)[offset : offset + size])
    with path.open("rb") as file:
        assert pieces.pages_of(file).tolist() == pages_in(path)


def test_a_page_within_an_array_has_the_digest_of_what_was_given(tmp_path: Path) -> None:
    writer, extent = written(tmp_path, FBANK, 600)
    writer.flush()
    page = -(-extent.offset // PAGE_BYTES)
    inside = Extent("fbank.h5", page * PAGE_BYTES, PAGE_BYTES)
    right = xxhash.xxh3_64_intdigest(read(tmp_path, inside))
    change(tmp_path / "fbank.h5", inside.offset + 5)
    writer.close()
    found = writer.pages()["fbank.h5"].tolist()
    assert found[page] == right
    there = pages_in(tmp_path / "fbank.h5")
    assert [n for n, each in enumerate(there) if each != found[n]] == [page]


@pytest.mark.parametrize("feature", [FBANK, GZIP], ids=["raw", "gzip"])
@pytest.mark.parametrize("rows", [3, 600])
def test_an_array_beside_records_that_is_not_what_was_given_is_an_error(
    tmp_path: Path, feature: FeatureSpec, rows: int
) -> None:
    writer, extent = written(tmp_path, feature, rows)
    writer.flush()
    change(tmp_path / "fbank.h5", extent.offset)
    with pytest.raises(OSError, match=r"the array at byte \d+ is not what was written"):
        writer.close()
    writer.abort()


def test_an_array_behind_the_end_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE_BYTES))
    pieces = PagePieces()
    pieces.add(PAGE_BYTES, memoryview(b"here"))
    with (
        (tmp_path / "file").open("rb") as file,
        pytest.raises(OSError, match="byte 65536 is not what was written"),
    ):
        pieces.pages_of(file)
