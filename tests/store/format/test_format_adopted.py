"""Adopted parts on disk: read by the reader of `docs/format.md`, with blocks as others cut them."""

from __future__ import annotations

import threading
import zlib
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_reader import Reader
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import featcache
from featcache import Cache, FeatureStorageConfig
from featcache.adoptable import Found, FoundFeature
from featcache.adoption.adopt import Source, publish_adopted
from featcache.adoption.checks import check_found
from featcache.errors import AdoptionError, CorruptCacheError
from featcache.remote import Look

FEATS = FeatureStorageConfig("feats", backend="hdf5", codec="gzip", options={"shuffle": False})
# rows of the blocks, rows to skip, rows of the array: blocks of a file that chose them itself
CUTS = {
    "one": (0, 0, 7),
    "whole": (12, 0, 12),
    "several": (5, 0, 13),
    "window": (5, 3, 9),
    "end": (5, 4, 16),
    "within": (20, 6, 4),
    "none": (5, 0, 0),
}


def stored_rows(name: str) -> int:
    size, skip, rows = CUTS[name]
    return -(-(skip + rows) // size) * size if size and rows else rows


def array_of(name: str) -> NDArray[Any]:
    """All rows of the blocks of an array."""
    return np.random.default_rng(len(name)).integers(0, 99, (stored_rows(name), 3)).astype("f4")


def wanted(name: str) -> NDArray[Any]:
    _, skip, rows = CUTS[name]
    return array_of(name)[skip : skip + rows]


def blocks_of(name: str) -> list[bytes]:
    size, whole = CUTS[name][0], array_of(name)
    if not len(whole):
        return []
    starts = range(0, len(whole), size or len(whole))
    return [zlib.compress(whole[at : at + (size or len(whole))].tobytes()) for at in starts]


def found_in(file: Path) -> Found:
    """Write blocks to a file as another tool would, and say where they lie."""
    blocks = {name: blocks_of(name) for name in CUTS}
    flat = [block for each in blocks.values() for block in each]
    file.write_bytes(b"head" + b"".join(flat))
    sizes = np.array([len(block) for block in flat], np.int64)
    counts = [len(each) for each in blocks.values()]
    feature = FoundFeature(
        dtype="float32",
        dims=(3,),
        has_frames=True,
        rows=np.array([rows for _, _, rows in CUTS.values()]),
        first=np.cumsum([0, *counts]),
        container=np.zeros(len(flat), np.int32),
        offset=4 + np.cumsum(sizes) - sizes,
        nbytes=sizes,
        codec="gzip",
        options={"shuffle": False},
        block_rows=np.array([size for size, _, _ in CUTS.values()]),
        skip=np.array([skip for _, skip, _ in CUTS.values()]),
    )
    return Found([file.name], list(CUTS), {"feats": feature}, {"size": [*map(len, CUTS)]})


def publish(path: Path, file: Path, found: Found) -> Cache:
    status = file.stat()
    check_found(found, [status.st_size])
    source = Source("blocks", file.parent, [file.name], [status.st_size], [status.st_mtime_ns])
    publish_adopted(path, {"feats": FEATS}, found, source, overwrite=False)
    return featcache.open(path)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    directory = tmp_path_factory.mktemp("blocks")
    return publish(directory / "cache", directory / "data.bin", found_in(directory / "data.bin"))


def test_blocks_are_read_as_others_cut_them(cache: Cache) -> None:
    for _ in range(2):
        for name in CUTS:
            assert np.array_equal(cache.read(name, "feats"), wanted(name))
        batch = cache.read_batch(list(CUTS), "feats")
        for number, name in enumerate(CUTS):
            assert np.array_equal(batch.data[number, : CUTS[name][2]], wanted(name))
        cache = featcache.open(cache.path, mapped=False)


@given(name=st.sampled_from(list(CUTS)), first=st.floats(0, 1), second=st.floats(0, 1))
def test_windows_are_read_from_blocks(cache: Cache, name: str, first: float, second: float) -> None:
    start, stop = sorted(int(each * CUTS[name][2]) for each in (first, second))
    assert np.array_equal(cache.read(name, "feats", start, stop), wanted(name)[start:stop])


def test_collected_blocks_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    cache = publish(tmp_path / "cache", file, found_in(file))
    cache.collect()
    count, mean, _ = Reader(cache.path).stats("feats")
    frames = np.concatenate([wanted(name) for name in CUTS])
    assert count == len(frames)
    np.testing.assert_allclose(mean, frames.mean(0), rtol=1e-6)
    cache = featcache.open(cache.path, verify="arrays", check_reads=True)
    for name in CUTS:
        assert np.array_equal(cache.read(name, "feats"), wanted(name))
        rows = CUTS[name][2]
        assert np.array_equal(cache.read(name, "feats", rows // 2), wanted(name)[rows // 2 :])


def test_the_reader_of_the_documents_reads_objects_behind_a_url(tmp_path: Path) -> None:
    found = found_in(tmp_path / "data.bin")
    data, etag = (tmp_path / "data.bin").read_bytes(), 'W/"an etag"'

    class Objects(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("ETag", etag)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    look = Look.of({"size": len(data), "e_tag": etag})
    with HTTPServer(("127.0.0.1", 0), Objects) as server:
        url = f"http://127.0.0.1:{server.server_port}/some%20where"
        source = Source("blocks", url, ["data.bin"], [look.size], [look.state])
        publish_adopted(tmp_path / "cache", {"feats": FEATS}, found, source, overwrite=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        reader = Reader(tmp_path / "cache")
        for name in CUTS:
            assert np.array_equal(reader.read(name, "feats"), wanted(name))
        server.shutdown()
        thread.join()


def test_the_reader_of_the_documents_reads_adopted_parts(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    cache = publish(tmp_path / "cache", file, found_in(file))
    for _ in range(3):
        reader = Reader(cache.path)
        assert reader.manifest["requires"] == ["adopted"]
        assert "adopted" in reader.manifest["requires_to_write"]
        for name in CUTS:
            assert np.array_equal(reader.read(name, "feats"), wanted(name))
        assert reader.annotation("size") == [len(id) if id in CUTS else None for id in reader.ids]
        cache.collect()
        with featcache.CacheWriter(cache.path, [FEATS], {"adopted": "blocks"}) as writer:
            own = np.ones((1200, 3), np.float32)
            writer.write(f"own-{reader.manifest['generation']}", {"feats": own})
        cache.refresh()
        for id in cache.ids:
            expected = own if id.startswith("own") else wanted(id)
            assert np.array_equal(cache.read(id, "feats", 1 if len(expected) else 0),
                                  expected[1:])  # fmt: skip


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("rows", -1, "'several'.* negative length"),
        ("rows", 99, "'several'.* fewer blocks than frames"),
        ("block_rows", -5, "'several'.* negative blocks"),
        ("block_rows", 4, "'several'.* fewer blocks"),
        ("skip", -1, "'several'.* negative blocks"),
        ("skip", 3, "'several'.* fewer blocks"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, column: str, value: int, why: str) -> None:
    file = tmp_path / "data.bin"
    found = found_in(file)
    changed = getattr(found.features["feats"], column).copy()
    changed[2] = value
    feature = replace(found.features["feats"], **{column: changed})
    with pytest.raises(AdoptionError, match=why):
        publish(tmp_path / "cache", file, replace(found, features={"feats": feature}))


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("container", 1, "lies in no file"),
        ("container", -1, "lies in no file"),
        ("offset", -1, "beyond the end"),
        ("offset", 1 << 62, "beyond the end"),
        ("nbytes", 1 << 62, "beyond the end"),
        ("nbytes", 0, "beyond the end"),
    ],
)
def test_extents_that_cannot_be_are_refused(
    tmp_path: Path, column: str, value: int, why: str
) -> None:
    file = tmp_path / "data.bin"
    found = found_in(file)
    changed = getattr(found.features["feats"], column).copy()
    changed[1] = value
    feature = replace(found.features["feats"], **{column: changed})
    with pytest.raises(AdoptionError, match=rf"'whole'.* {why}"):
        publish(tmp_path / "cache", file, replace(found, features={"feats": feature}))


@pytest.mark.parametrize("ids", [["a"] * len(CUTS), ["", *list(CUTS)[1:]], [*"abcdef"]])
def test_ids_that_cannot_be_are_refused(tmp_path: Path, ids: list[str]) -> None:
    file = tmp_path / "data.bin"
    found = replace(found_in(file), ids=ids)
    with pytest.raises(AdoptionError, match=r"twice|not usable|not a value for each"):
        publish(tmp_path / "cache", file, found)


def test_a_block_that_changed_under_the_same_time_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    found = found_in(file)
    feature = found.features["feats"]
    sizes = feature.nbytes.copy()
    sizes[2] -= 1
    lying = replace(found, features={"feats": replace(feature, nbytes=sizes)})
    cache = publish(tmp_path / "cache", file, lying)
    with pytest.raises(CorruptCacheError, match=r"'several'|gzip|zlib|block"):
        cache.read("several", "feats")


@pytest.mark.parametrize("methods", [[None, 2, 3, 5, 7, 1], [2], [3], [5]], ids=str)
@pytest.mark.parametrize("rows", [3, 300])
def test_blocks_of_kaldi_are_read_as_documented(
    tmp_path: Path, methods: list[int | None], rows: int
) -> None:
    kaldiio = pytest.importorskip("kaldiio")
    random = np.random.default_rng(rows)
    ark, scp = tmp_path / "feats.ark", tmp_path / "feats.scp"
    with ark.open("wb") as file, scp.open("w") as lines:
        for number, method in enumerate(methods):
            array = random.normal(0, 30, (rows + number, 5)).astype(np.float32)
            file.write(f"utt-{number} ".encode())
            lines.write(f"utt-{number} {ark}:{file.tell()}\n")
            kaldiio.matio.write_array(file, array, compression_method=method)
    cache = featcache.adopt(scp, tmp_path / "cache")
    cache.collect()
    assert Reader(tmp_path / "cache").features["feats"]["codec"] == "kaldi"
    reader = Reader(tmp_path / "cache")
    for id in cache:
        np.testing.assert_array_equal(
            reader.read(id, "feats"), cache.read(id, "feats"), strict=True
        )


@pytest.mark.parametrize("time_axis", [0, 1, 2, None])
def test_arrays_in_another_order_are_read_as_documented(
    tmp_path: Path, time_axis: int | None
) -> None:
    (tmp_path / "all").mkdir()
    for number in range(3):
        array = np.random.default_rng(number).random((3, 4, 5)).astype(">f4")
        np.save(tmp_path / f"all/utt-{number}.npy", np.asfortranarray(array))
    cache = featcache.adopt(tmp_path / "all", tmp_path / "cache", time_axis=time_axis)
    cache.collect()
    reader = Reader(tmp_path / "cache")
    declared = reader.features["feats"]
    assert declared["codec"] == "reordered"
    assert declared["codec_options"]["big_endian"] is True
    for id in cache:
        np.testing.assert_array_equal(
            reader.read(id, "feats"), cache.read(id, "feats"), strict=True
        )
