"""HDF5 files, written by h5py and by SpeechBrain, are caches where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_stores import adopted, assert_holds, contents, random_arrays, write_h5

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import AdoptionError, ConfigError

h5py = pytest.importorskip("h5py")
sb = pytest.importorskip("speechbrain.integrations.hdf5.cached_item")


def cached_by_speechbrain(
    folder: Path, arrays: dict[str, Any], compression: str | None = None
) -> Path:
    item = sb.CachedHDF5DynamicItem(
        folder,
        compression=compression,
        takes=["id"],
        func=lambda id: arrays[id],
        provides=["feats"],
    )
    for id in arrays:
        item(id)
    item.hdf5file.close()
    return folder / "cache.hdf5"


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "uint16", "int64", "bool"]
)
def test_datasets_are_arrays_of_their_dtype(tmp_path: Path, dtype: str) -> None:
    arrays: dict[str, Any] = {id: a.astype(dtype) for id, a in random_arrays(1).items()}
    arrays["spk9-empty"] = np.zeros((0, 5), dtype)
    source = write_h5(tmp_path / "data" / "feats.h5", arrays)
    before = contents(tmp_path / "data")
    with adopted(source, tmp_path) as cache:
        assert_holds(cache, "feats", arrays)
        assert cache.dtype("feats") == dtype
    assert contents(tmp_path / "data") == before


@pytest.mark.parametrize(
    "filters",
    [{}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True}],
    ids=["none", "gzip", "shuffle and gzip"],
)
def test_chunks_of_whole_frames_are_read(tmp_path: Path, filters: dict[str, Any]) -> None:
    rng = np.random.default_rng(2)
    arrays: dict[str, Any] = {
        f"utt{rows}": rng.standard_normal((rows, 5), np.float32) for rows in (1, 7, 8, 9, 40, 123)
    }
    path = tmp_path / "feats.h5"
    with h5py.File(path, "w") as file:
        for number, (id, array) in enumerate(arrays.items()):  # of other chunks each
            chunks = (7 + number, 5)
            file.create_dataset(id, data=array, chunks=chunks, maxshape=(None, 5), **filters)
        file.create_dataset("none", data=np.zeros((0, 5), np.float32))
    with adopted(path, tmp_path) as cache:
        assert_holds(cache, "feats", {**arrays, "none": np.zeros((0, 5), np.float32)})


@pytest.mark.parametrize("pattern", ["{feature}/{id}", "{id}/{feature}", "/v1/{id}.{feature}"])
def test_a_pattern_tells_features_and_ids(tmp_path: Path, pattern: str) -> None:
    fbank = random_arrays(3)
    units = {id: np.arange(len(array)) for id, array in fbank.items()}
    name = pattern.strip("/")
    names: dict[str, Any] = {
        name.format(feature="fbank", id=id): array for id, array in fbank.items()
    }
    names |= {name.format(feature="units", id=id): units[id] for id in reversed(units)}
    source = write_h5(tmp_path / "feats.h5", names)
    with adopted(source, tmp_path, pattern=pattern) as cache:
        assert_holds(cache, "fbank", fbank)
        assert_holds(cache, "units", units)


def test_features_in_files_of_their_own_are_one_cache(tmp_path: Path) -> None:
    fbank = random_arrays(4)
    units = {id: np.arange(len(array)) for id, array in reversed(fbank.items())}
    write_h5(tmp_path / "data" / "fbank.h5", {f"fbank/{id}": fbank[id] for id in fbank})
    path = tmp_path / "data" / "units.h5"
    path = write_h5(path, {f"units/{id}": units[id] for id in units}, track_order=True)
    with adopted(path.parent, tmp_path, pattern="{feature}/{id}") as cache:
        assert_holds(cache, "fbank", fbank)
        assert_holds(cache, "units", units)


def test_datasets_of_other_names_are_left_out(tmp_path: Path) -> None:
    arrays = random_arrays(4)
    names = {f"feats/{id}": array for id, array in arrays.items()}
    source = write_h5(tmp_path / "feats.h5", {**names, "mean": np.zeros(5)})
    with adopted(source, tmp_path, pattern="feats/{id}", feature="fbank") as cache:
        assert_holds(cache, "fbank", arrays)


def test_ids_may_have_slashes(tmp_path: Path) -> None:
    arrays = {id.replace("-", "/"): array for id, array in random_arrays(5).items()}
    source = write_h5(tmp_path / "feats.h5", arrays)
    with pytest.raises(AdoptionError, match=r"'spk0/utt00' lies in a group.*pattern='\{id\}'"):
        adopted(source, tmp_path)
    with adopted(source, tmp_path, pattern="{id}") as cache:
        assert_holds(cache, "feats", arrays)


def test_files_of_a_folder_are_one_cache(tmp_path: Path) -> None:
    first, second = random_arrays(6), {f"b-{id}": a for id, a in random_arrays(7).items()}
    write_h5(tmp_path / "data" / "a.h5", first)
    write_h5(tmp_path / "data" / "deeper" / "b.hdf5", second)
    with adopted(tmp_path / "data", tmp_path) as cache:
        assert_holds(cache, "feats", first | second)


def test_files_of_this_library_can_be_adopted_too(tmp_path: Path) -> None:
    arrays = random_arrays(8)
    declared = FeatureStorageConfig("fbank", backend="hdf5", codec="gzip")
    with CacheWriter(tmp_path / "own", [declared]) as writer:
        for id, array in arrays.items():
            writer.write(id, {"fbank": array})
    (source,) = (tmp_path / "own").rglob("*.h5")
    source = source.rename(tmp_path / "away.h5")
    with adopted(source, tmp_path, pattern="{feature}/{id}") as cache:
        assert_holds(cache, "fbank", arrays)


def test_an_embedding_an_utterance_has_no_time_axis(tmp_path: Path) -> None:
    vectors = {id: np.resize(array, 5) for id, array in random_arrays(9).items()}
    for name, options in (("plain", {}), ("gzip", {"compression": "gzip"})):
        source = write_h5(tmp_path / f"{name}.h5", vectors, **options)
        with adopted(source, tmp_path / name) as cache:
            assert cache.dims("feats") == (5,)
            assert all((cache.read(id, "feats") == vectors[id]).all() for id in vectors)
        with adopted(source, tmp_path / f"{name}-frames", time_axis=0) as cache:
            assert_holds(cache, "feats", vectors)


def test_numbers_are_features_without_a_time_axis(tmp_path: Path) -> None:
    source = write_h5(tmp_path / "snr.h5", {f"utt{n}": np.float32(n) for n in range(5)})
    with adopted(source, tmp_path) as cache:
        assert [float(cache.read(id, "feats")) for id in cache.ids] == [0, 1, 2, 3, 4]


def test_what_speechbrain_cached_is_a_cache(tmp_path: Path) -> None:
    arrays = random_arrays(10)
    source = cached_by_speechbrain(tmp_path / "sb", arrays)
    with adopted(source, tmp_path) as cache:
        assert_holds(cache, "feats", arrays)


def test_the_folder_that_speechbrain_cached_into_will_do(tmp_path: Path) -> None:
    arrays = random_arrays(11)
    with adopted(cached_by_speechbrain(tmp_path / "sb", arrays).parent, tmp_path) as cache:
        assert_holds(cache, "feats", arrays)


def test_tokens_that_speechbrain_compressed_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    tokens = {f"utt{n}": rng.integers(0, 500, size) for n, size in enumerate((1, 50, 40_000))}
    source = cached_by_speechbrain(tmp_path / "sb", tokens, "gzip")
    with adopted(source, tmp_path) as cache:
        assert_holds(cache, "feats", tokens)


def test_chunks_that_cut_frames_are_refused_by_name(tmp_path: Path) -> None:
    arrays = {"short": np.zeros((2, 80), np.float32), "long": np.zeros((750, 80), np.float32)}
    source = cached_by_speechbrain(tmp_path / "sb", arrays, "gzip")
    with pytest.raises(AdoptionError, match=r"'long' of shape \(750, 80\) .*cut another axis"):
        adopted(source, tmp_path)


def test_groups_that_hold_each_other_have_an_end(tmp_path: Path) -> None:
    source = write_h5(tmp_path / "feats.h5", {"group/a": np.zeros((3, 5))})
    with h5py.File(source, "a") as file:
        file["group/again"] = file["group"]
    with pytest.raises(AdoptionError, match="'group/again' is a group that has another name"):
        adopted(source, tmp_path, pattern="{id}")


def test_only_chunks_are_refused_behind_a_user_block(tmp_path: Path) -> None:
    arrays = random_arrays(13)
    with h5py.File(tmp_path / "feats.h5", "w", userblock_size=512) as file:
        for id, array in arrays.items():
            file[id] = array
    with adopted(tmp_path / "feats.h5", tmp_path) as cache:
        assert_holds(cache, "feats", arrays)
    with h5py.File(tmp_path / "chunks.h5", "w", userblock_size=512) as file:
        file.create_dataset("bad", data=np.zeros((3, 5)), chunks=(3, 5))
    with pytest.raises(AdoptionError, match="'bad' has chunks in a file with a user block"):
        adopted(tmp_path / "chunks.h5", tmp_path / "chunks")


def test_each_feature_must_hold_each_id(tmp_path: Path) -> None:
    names = {"a/1": np.zeros((3, 5)), "a/2": np.zeros((3, 5)), "b/1": np.zeros((3, 5))}
    source = write_h5(tmp_path / "feats.h5", names)
    with pytest.raises(AdoptionError, match="'b': utterance '2' lacks it"):
        adopted(source, tmp_path, pattern="{feature}/{id}")


def test_an_id_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        write_h5(tmp_path / "data" / name, {"utt": np.zeros((3, 5)), name: np.zeros((3, 5))})
    with pytest.raises(AdoptionError, match="'utt' is there twice"):
        adopted(tmp_path / "data", tmp_path)


def test_a_pattern_must_have_an_id(tmp_path: Path) -> None:
    source = write_h5(tmp_path / "feats.h5", {"utt": np.zeros((3, 5))})
    for pattern in ("{feature}", "{id}/{id}", "{name}"):
        with pytest.raises(ConfigError, match=r"one \{id\}"):
            adopted(source, tmp_path, pattern=pattern)
    with pytest.raises(AdoptionError, match=r"no dataset called like 'x/\{id\}'"):
        adopted(source, tmp_path, pattern="x/{id}")


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    source = write_h5(tmp_path / "feats.h5", random_arrays(14))
    whole = source.read_bytes()
    for size in (8, 100, 2000, len(whole) // 2, len(whole) - 1):
        source.write_bytes(whole[:size])
        with pytest.raises(AdoptionError, match=r"feats\.h5' .*HDF5"):
            adopted(source, tmp_path, kind="hdf5")


def test_a_file_with_flipped_bytes_is_at_worst_refused(tmp_path: Path) -> None:
    arrays = {f"utt{n}": np.full((4, 5), n, np.float32) for n in range(4)}
    source = write_h5(tmp_path / "feats.h5", arrays, chunks=(2, 5), compression="gzip")
    whole, rng = source.read_bytes(), np.random.default_rng(15)
    refused = 0
    for number in range(60):
        data = bytearray(whole)
        for at in rng.integers(8, len(whole), 8):
            data[at] ^= int(rng.integers(1, 256))
        source.write_bytes(data)
        try:
            with adopted(source, tmp_path / str(number), kind="hdf5") as cache:
                assert all(
                    cache.read(id, name).ndim == 2 for id in cache for name in cache.features
                )
        except featcache.FeatcacheError:
            refused += 1
    assert 0 < refused < 60  # bytes of either kind were flipped
