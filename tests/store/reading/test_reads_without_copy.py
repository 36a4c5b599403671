"""Arrays that are the mapped bytes themselves: the same numbers, read-only, good while held."""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from store_helpers import arrays_of, id_of, make_cache, two_features

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ClosedError, CorruptCacheError, KeyNotFoundError, WindowError

RAW = ["memmap", "hdf5", "webdataset", "zarr"]
ARRAY = np.arange(600, dtype=np.float32).reshape(200, 3)


def is_mapped(array: NDArray[Any]) -> bool:
    """Whether an array is the bytes of a file, and no copy of them."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return isinstance(base, mmap.mmap)


def cache_of(path: Path, **settings: Any) -> featcache.Cache:
    """A cache of one utterance, `ARRAY`."""
    with CacheWriter(path, [FeatureStorageConfig("f", **settings)]) as writer:
        writer.write("u", {"f": ARRAY})
    return featcache.open(path)


@pytest.mark.parametrize("backend", RAW)
def test_raw_arrays_are_read_without_a_copy(tmp_path: Path, backend: str) -> None:
    codec = "raw" if backend == "zarr" else None
    features = [
        FeatureStorageConfig("fbank", backend=backend, codec=codec),
        FeatureStorageConfig("units", dtype="int16", backend=backend, codec=codec),
    ]
    cache = featcache.open(make_cache(tmp_path, range(30), features))
    view = cache.table.select([id_of(number) for number in range(29, -1, -2)])
    for source in (cache, view):
        for number in range(1, 30, 2):
            for name, expected in arrays_of(number).items():
                found = source.read(id_of(number), name, copy=False)
                np.testing.assert_array_equal(found, expected, strict=True)
                window = source.read(id_of(number), name, len(found) // 2, copy=False)
                np.testing.assert_array_equal(window, expected[len(expected) // 2 :], strict=True)
                assert is_mapped(found) or not found.size
                assert is_mapped(window) or not window.size
                assert not is_mapped(source.read(id_of(number), name))


def test_an_array_without_a_copy_cannot_be_written_to(tmp_path: Path) -> None:
    found = cache_of(tmp_path).read("u", "f", copy=False)
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        found.flags.writeable = True


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "hdf5", "codec": "gzip"},
        {"backend": "lilcom"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "mapped": False},
        {"time_axis": None},
    ],
    ids=str,
)
def test_whatever_is_stored_is_read_only_without_copy(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    mapped = settings.pop("mapped", True)
    cache_of(tmp_path, **settings)
    cache = featcache.open(tmp_path, mapped=mapped)
    for source in (cache, cache.table):
        found, copied = source.read("u", "f", copy=False), source.read("u", "f")
        np.testing.assert_array_equal(found, copied, strict=True)
        assert copied.flags.writeable
        assert not found.flags.writeable


def test_segments_are_read_without_a_copy(tmp_path: Path) -> None:
    view = cache_of(tmp_path, frame_s=0.01).table.segments({"s": ("u", 0.5, 1.0)})
    found = view.read("s", "f", 10, copy=False)
    np.testing.assert_array_equal(found, ARRAY[60:100])
    assert is_mapped(found)


def test_an_array_without_a_copy_stays_good_while_it_is_held(tmp_path: Path) -> None:
    """The mapping lives as long as the array, whatever happens to the cache and its files."""
    path = make_cache(tmp_path / "c", range(40))
    expected = arrays_of(9)["fbank"]
    cache = featcache.open(path)
    held = [cache.read(id_of(9), "fbank", copy=False)]
    cache.delete([id_of(9), id_of(10)])
    cache.compact()
    cache.refresh()
    held.append(cache.read(id_of(11), "fbank", copy=False))
    cache.close()
    with pytest.raises(ClosedError, match="closed"):
        cache.read(id_of(11), "fbank", copy=False)
    held.append(held[0][1:][::2])
    del cache
    make_cache(path, range(3), overwrite=True)
    shutil.rmtree(path)
    np.testing.assert_array_equal(held[0], expected)
    np.testing.assert_array_equal(held[1], arrays_of(11)["fbank"])
    np.testing.assert_array_equal(held[2], expected[1:][::2])


def test_arrays_without_a_copy_outlive_the_files_that_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more parts than may be open at once."""
    monkeypatch.setattr("featcache.reading.containers.MAX_OPEN", 2)
    folder = tmp_path / "npy"
    folder.mkdir()
    for number in range(20):
        np.save(folder / f"u{number:02}.npy", ARRAY + number)
    cache = featcache.adopt(folder, tmp_path / "c")
    held = [cache.read(id, "feats", copy=False) for id in cache]
    cache.close()
    for number, array in enumerate(held):
        np.testing.assert_array_equal(array, ARRAY + number)


def test_an_array_without_a_copy_is_good_in_forked_processes_and_at_the_end(
    tmp_path: Path,
) -> None:
    make_cache(tmp_path, range(9), two_features())
    script = f"""
import os, featcache
held = featcache.open({str(tmp_path)!r}).read({id_of(5)!r}, "fbank", copy=False)
total = float(held.sum())
child = os.fork()
if child == 0:
    os._exit(0 if float(held.sum()) == total else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_checked_reads_are_checked_without_a_copy(tmp_path: Path) -> None:
    cache_of(tmp_path)
    [container] = (tmp_path / "parts").glob("*/*.npy")
    content = bytearray(container.read_bytes())
    content[content.index(ARRAY[100:].tobytes())] ^= 1
    container.chmod(0o644)
    container.write_bytes(content)
    checked = featcache.open(tmp_path, check_reads=True)
    for read in (checked.read, checked.table.read):
        for window in ((), (90, 110)):
            with pytest.raises(CorruptCacheError):
                read("u", "f", *window, copy=False)
    assert is_mapped(featcache.open(tmp_path).read("u", "f", copy=False))


def test_wrong_reads_are_refused_without_a_copy_as_well(tmp_path: Path) -> None:
    cache = cache_of(tmp_path)
    for source in (cache, cache.table):
        with pytest.raises(WindowError, match=r"utterance 'u', .* 0 to 201 are not within"):
            source.read("u", "f", 0, 201, copy=False)
        with pytest.raises(KeyNotFoundError, match="no utterance 'v'"):
            source.read("v", "f", copy=False)
        with pytest.raises(KeyNotFoundError, match="no feature 'g'"):
            source.read("u", "g", copy=False)
