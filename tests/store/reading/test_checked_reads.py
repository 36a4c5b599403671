"""`check_reads=True` finds damage in whatever is read; `mapped=False` never maps."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from store_helpers import make_cache
from store_scripts import run_script

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureStorageConfig
from featcache.errors import CorruptCacheError, FeatcacheError
from featcache.registry import get_backend

CODED = [
    (backend, codec)
    for backend in featcache.registry.backend_names()
    for codec in get_backend(backend).codecs
]
LENGTHS = [0, 1, 700, 33, 2000, 5]  # utterance 4 lies on several pages


def frames(number: int, seed: int = 0) -> NDArray[np.float32]:
    random = np.random.default_rng((number, seed))
    return random.standard_normal((LENGTHS[number], 40)).astype(np.float32)


def make(path: Path, backend: str, codec: str, seed: int = 0) -> Path:
    features = [
        FeatureStorageConfig("fbank", backend=backend, codec=codec, stats=True),
        FeatureStorageConfig("xvector", backend=backend, codec=codec, time_axis=None),
    ]
    with CacheWriter(path, features) as writer:
        for number in range(len(LENGTHS)):
            vector = np.full(300, number + seed, np.float32)
            writer.write(str(number), {"fbank": frames(number, seed), "xvector": vector})
    return path


def reads(cache: featcache.Cache) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways of reading utterance 4, each with a name."""
    reader, pickled = cache.reader("fbank"), pickle.loads(pickle.dumps(cache.reader("fbank")))  # noqa: S301
    dataset = FeatureDataset(cache, ["fbank"])
    again = pickle.loads(pickle.dumps(cache))  # noqa: S301
    yield "read", lambda: cache.read("4", "fbank")
    yield "mapping", lambda: cache["4"]["fbank"]
    yield "batch", lambda: cache.read_batch(["1", "4"], "fbank").data[1]
    yield "pickled", lambda: again.read("4", "fbank")
    yield "data set", lambda: dataset[list(cache).index("4")]["fbank"]
    yield "reader", lambda: reader("4").numpy()
    yield "pickled reader", lambda: pickled("4").numpy()


def windows(cache: featcache.Cache) -> Iterator[Callable[[], Any]]:
    """Windows of utterance 4 that cover it together."""
    for start in range(0, 2000, 250):
        yield partial(cache.read, "4", "fbank", start, start + 250)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(("backend", "codec"), CODED)
def test_what_is_undamaged_reads_the_same(
    tmp_path: Path, backend: str, codec: str, mapped: bool
) -> None:
    path = make(tmp_path, backend, codec)
    plain, checked = featcache.open(path), featcache.open(path, check_reads=True, mapped=mapped)
    for id in plain:
        for feature in plain.features:
            np.testing.assert_array_equal(plain.read(id, feature), checked.read(id, feature))
        length = plain.lengths("fbank", ids=[id])[0]
        for start, stop in ((0, length), (0, length // 2), (length // 3, length), (length, length)):
            np.testing.assert_array_equal(
                plain.read(id, "fbank", start, stop), checked.read(id, "fbank", start, stop)
            )
    for feature in plain.features:
        one, other = (
            plain.read_batch(list(plain), feature),
            checked.read_batch(list(plain), feature),
        )
        np.testing.assert_array_equal(one.data, other.data)
    expected = plain.read("4", "fbank")
    for _, read in reads(checked):
        np.testing.assert_array_equal(read(), expected)


def extents_of(cache: featcache.Cache, id: str, feature: str) -> list[tuple[Path, int, int]]:
    arrays = cache.opened.arrays(feature)
    row = cache.opened.row(id)
    return [
        (
            cache.path / cache.opened.index.containers.path(arrays._container[e]),
            arrays._offset[e],
            arrays._nbytes[e],
        )
        for e in range(arrays._first[row], arrays._first[row + 1])
    ]


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(("backend", "codec"), CODED)
def test_a_flipped_bit_is_found_by_whoever_reads_it(
    tmp_path: Path, backend: str, codec: str, mapped: bool
) -> None:
    path = make(tmp_path, backend, codec)
    extents = extents_of(featcache.open(path), "4", "fbank")
    file, offset, nbytes = extents[len(extents) // 2]
    data = bytearray(file.read_bytes())
    data[offset + nbytes // 2] ^= 16
    file.write_bytes(data)
    cache = featcache.open(path, check_reads=True, mapped=mapped)
    for name, read in reads(cache):
        with pytest.raises(CorruptCacheError, match=r"'4'|container"):  # noqa: PT012
            read()
            pytest.fail(name)
    found = 0
    for read in windows(cache):
        try:
            read()
        except CorruptCacheError:
            found += 1
    assert found >= 1
    assert cache.read("2", "fbank").shape == (700, 40)
    assert cache.read("4", "xvector").tolist() == [4] * 300 or codec == "lilcom"


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("what", ["container", "part"])
@pytest.mark.parametrize(("backend", "codec"), CODED)
def test_a_container_or_part_of_another_cache_in_its_place_is_found(
    tmp_path: Path, backend: str, codec: str, what: str, mapped: bool
) -> None:
    path, other = make(tmp_path / "a", backend, codec), make(tmp_path / "b", backend, codec, seed=1)
    (ours,), (theirs,) = (path / "parts").iterdir(), (other / "parts").iterdir()
    if what == "part":
        shutil.rmtree(ours)
        shutil.copytree(theirs, ours)
    else:
        file = extents_of(featcache.open(path), "4", "fbank")[0][0].relative_to(ours)
        shutil.copy(theirs / file, ours / file)
    cache = featcache.open(path, check_reads=True, mapped=mapped)
    for name, read in reads(cache):
        with pytest.raises(CorruptCacheError):  # noqa: PT012
            read()
            pytest.fail(name)
    for read in windows(cache):
        with pytest.raises(CorruptCacheError):
            read()


def test_damage_of_the_index_is_found_when_the_cache_is_opened(tmp_path: Path) -> None:
    path = make_cache(tmp_path, range(20))
    index = path / featcache.open(path).opened.manifest.index
    data = index.read_bytes()
    for place in range(0, len(data) - 8, 97):
        index.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CorruptCacheError):
            featcache.open(path, check_reads=True)


@pytest.mark.parametrize("gone", ["container", "part", "columns"])
def test_files_that_go_away_under_a_checked_reader_are_told(tmp_path: Path, gone: str) -> None:
    path = make(tmp_path, "memmap", "raw")
    cache = featcache.open(path, check_reads=True)
    (part,) = (path / "parts").iterdir()
    if gone == "part":
        shutil.rmtree(part)
    else:
        (part / ("fbank.npy" if gone == "container" else "index.columns")).unlink()
    with pytest.raises(FeatcacheError, match=r"is missing|is not there"):
        cache.read("4", "fbank", 5, 9)


SHRINK = """
import resource
path = Path(sys.argv[1])
features = [FeatureStorageConfig("fbank")]
cache = featcache.open(path, mapped=False, check_reads=sys.argv[2] == "checked")
reader = cache.reader("fbank")
reader.read("00000007", 0, 1)
maps = Path("/proc/self/maps").read_text()
assert str(path) not in maps, maps
for file in [*path.glob("index-*"), *path.glob("parts/*/*")]:
    os.truncate(file, 0)
for number in range(0, 10_000, 100):
    try:
        cache.read(f"{number:08}", "fbank")
        print("read")
    except featcache.errors.CorruptCacheError:
        pass
assert len(cache.lengths("fbank")) == 10_000
assert list(cache)[77] == "00000077"
assert "00009999" in cache
"""


@pytest.mark.parametrize("checked", ["checked", "unchecked"])
def test_without_mapping_no_file_that_shrinks_kills_the_process(
    tmp_path: Path, checked: str
) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        for number in range(10_000):
            writer.write(f"{number:08}", {"fbank": np.full((2, 4), number, np.float32)})
    assert os.stat(next(tmp_path.glob("index-*1-*"))).st_size > 1 << 17  # noqa: PTH116
    done = run_script(SHRINK, tmp_path, checked)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
