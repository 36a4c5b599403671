"""`featcache.convert` takes what others wrote: adopted for the while, or read by its library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_stores import contents, random_arrays, write_h5

import featcache
from featcache import FeatureStorageConfig, KeyNotFoundError
from featcache.errors import AdoptionError, ConfigError, CorruptCacheError, NotACacheError

h5py = pytest.importorskip("h5py")


def converted(source: object, dst: Path, **settings: Any) -> featcache.Cache:
    return featcache.convert(source, dst, progressbar=False, **settings)  # type: ignore[arg-type]


def assert_is(cache: featcache.Cache, arrays: dict[str, Any], feature: str = "feats") -> None:
    """Compare all arrays, to the bit, and see that the cache needs nothing else."""
    assert set(cache) == set(arrays)
    assert cache.complete
    for id, array in arrays.items():
        found = cache.read(id, feature)
        assert found.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, array, strict=found.dtype == array.dtype)
    assert not [path.name for path in cache.path.iterdir() if path.name.startswith("work-")]
    featcache.open(cache.path, verify="arrays").close()


def test_what_can_be_adopted_is_converted(tmp_path: Path) -> None:
    arrays = random_arrays(1)
    source = write_h5(tmp_path / "data" / "feats.h5", arrays)
    before = contents(tmp_path / "data")
    cache = converted(source, tmp_path / "b")
    assert_is(cache, arrays)
    assert cache.stats("feats").count == sum(map(len, arrays.values()))
    assert contents(tmp_path / "data") == before
    assert_is(converted(source, tmp_path / "b"), arrays)  # all is there
    half = FeatureStorageConfig("feats", "float16", backend="zarr", codec="zstd")
    assert converted(source, tmp_path / "half", features=[half]).dtype("feats") == "float16"
    (tmp_path / "npy").mkdir()
    for id, array in arrays.items():
        (tmp_path / "npy" / id).parent.mkdir(exist_ok=True)
        np.save(tmp_path / "npy" / f"{id}.npy", array)
    assert_is(converted(tmp_path / "npy", tmp_path / "c"), arrays)
    (tmp_path / "npy").rename(tmp_path / "parts")  # as a directory of a cache is called
    (tmp_path / "npy").mkdir()
    (tmp_path / "parts").rename(tmp_path / "npy" / "parts")
    named = {f"parts/{id}": array for id, array in arrays.items()}
    assert_is(converted(tmp_path / "npy", tmp_path / "d"), named)


def test_settings_of_adoption_are_given_on(tmp_path: Path) -> None:
    arrays = random_arrays(2)
    source = write_h5(tmp_path / "feats.h5", {f"fbank/{id}": a for id, a in arrays.items()})
    with pytest.raises(AdoptionError, match="say what names mean"):
        converted(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    cache = converted(source, tmp_path / "b", adopting={"pattern": "{feature}/{id}"})
    assert_is(cache, arrays, "fbank")
    with pytest.raises(ConfigError, match=r"no setting 'patern'.*'pattern'"):
        converted(source, tmp_path / "c", adopting={"patern": "{id}"})
    with pytest.raises(ConfigError, match="a mapping by name, not 'hdf5'"):
        converted(source, tmp_path / "c", adopting="hdf5")
    with pytest.raises(KeyNotFoundError, match="'mfcc'"):
        converted(source, tmp_path / "c", features=["mfcc"], adopting={"pattern": "fbank/{id}"})
    assert not (tmp_path / "c").exists()


OTHERWISE: dict[str, dict[str, Any]] = {
    "chunks that cut frames": {"chunks": (1, 3)},
    "lzf": {"chunks": (1, 5), "compression": "lzf"},
    "fletcher32": {"chunks": (1, 5), "fletcher32": True},
    "scaleoffset": {"chunks": (1, 5), "scaleoffset": 0, "dtype": "int32"},
    "big-endian": {"dtype": ">f4"},
}


@pytest.mark.parametrize("way", OTHERWISE)
@pytest.mark.parametrize("backend", ["memmap", "hdf5"])
def test_what_only_hdf5_reads_is_copied(tmp_path: Path, way: str, backend: str) -> None:
    options = OTHERWISE[way]
    dtype = options.get("dtype", "float32")
    arrays = {id: (9 * a).astype(dtype) for id, a in random_arrays(3).items()}
    source = write_h5(tmp_path / "data" / "feats.h5", arrays, **options)
    before = contents(tmp_path / "data")
    with pytest.raises(AdoptionError, match=r"featcache\.convert makes a cache of it"):
        featcache.adopt(source, tmp_path / "adopted")
    declared = FeatureStorageConfig("feats", np.dtype(dtype).name, backend=backend)
    cache = converted(source, tmp_path / "b", features=[declared])
    assert_is(cache, arrays)
    assert contents(tmp_path / "data") == before


def test_features_and_files_come_together_in_a_copy(tmp_path: Path) -> None:
    one, two = random_arrays(4), random_arrays(5)
    (tmp_path / "data").mkdir()
    for place, (id, array) in enumerate(one.items()):
        with h5py.File(tmp_path / "data" / f"shard-{place % 2}.h5", "a") as file:
            file.create_dataset(f"fbank/{id}", data=array, dtype=">f4")
            file.create_dataset(f"codes/{id}", data=two[id][:, 0])
            file.create_dataset(f"speaker/{id}", data=np.arange(3, dtype=">f8"))
    cache = converted(tmp_path / "data", tmp_path / "b", adopting={"pattern": "{feature}/{id}"})
    assert_is(cache, one, "fbank")
    assert_is(cache, {id: array[:, 0] for id, array in two.items()}, "codes")
    assert cache.read(next(iter(one)), "speaker").tolist() == [0, 1, 2]
    assert "time_axis" in str(cache.fingerprint["features"]["speaker"])


@pytest.mark.parametrize("what", ["text", "external", "virtual", "unwritten", "link"])
def test_what_hdf5_should_not_read_is_refused_and_leaves_nothing(tmp_path: Path, what: str) -> None:
    source = tmp_path / "feats.h5"
    (tmp_path / "other").write_bytes(bytes(80))
    with h5py.File(source, "w") as file:
        file.create_dataset("a", data=np.ones((4, 5), ">f4"))
        if what == "text":
            file.create_dataset("b", data="words")
        elif what == "external":
            file.create_dataset("b", (4, 5), ">f4", external=[(str(tmp_path / "other"), 0, 80)])
        elif what == "virtual":
            layout = h5py.VirtualLayout((4, 5), ">f4")
            layout[:] = h5py.VirtualSource(str(tmp_path / "feats.h5"), "a", shape=(4, 5))
            file.create_virtual_dataset("b", layout)
        elif what == "unwritten":
            file.create_dataset("b", (4, 5), ">f4")
        else:
            file["b"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "a")
    with pytest.raises(AdoptionError, match="dataset 'b'"):
        converted(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_copy_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from featcache_backends._hdf5_datasets import Hdf5Datasets

    arrays = random_arrays(6)
    source = write_h5(tmp_path / "feats.h5", arrays, chunks=(1, 3))
    seen: list[str] = []
    read = Hdf5Datasets.read

    def stopping(self: Hdf5Datasets, name: str) -> Any:
        seen.append(name)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return read(self, name)

    monkeypatch.setattr(Hdf5Datasets, "read", stopping)
    with pytest.raises(KeyboardInterrupt):
        converted(source, tmp_path / "b")
    assert_is(converted(source, tmp_path / "b"), arrays)
    assert len(seen) == 2 * len(arrays) + 1  # each is stored once, and compared
    # the source is another one now
    (tmp_path / "b").rename(tmp_path / "old")
    seen.clear()
    with pytest.raises(KeyboardInterrupt):
        converted(source, tmp_path / "b")
    changed = {id: array + 1 for id, array in arrays.items()}
    write_h5(source, changed, chunks=(1, 3))
    with pytest.raises(CorruptCacheError, match=r"convert it anew \(overwrite=True\)"):
        converted(source, tmp_path / "b")
    assert_is(converted(source, tmp_path / "b", overwrite=True), changed)


def test_sources_that_are_not_there_are_told_of(tmp_path: Path) -> None:
    with pytest.raises(NotACacheError):
        converted(tmp_path / "nowhere", tmp_path / "b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdoptionError, match="is not recognised"):
        converted(tmp_path / "empty", tmp_path / "b")
    with pytest.raises(ConfigError, match="would lie in its source"):
        converted(tmp_path / "empty", tmp_path / "empty" / "b")
    assert not (tmp_path / "b").exists()
