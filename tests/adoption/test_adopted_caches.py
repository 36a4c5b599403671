"""An adopted cache is an ordinary one: collected, verified, edited, appended to, read by all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from npy_folders import Arrays, check_arrays, save_all, snapshot, some_arrays

import featcache
from featcache import Cache, CacheWriter, FeatureStats, FeatureStorageConfig
from featcache.adoption.npy import NpyFolder
from featcache.errors import (
    CacheError,
    ConfigError,
    CorruptCacheError,
    FeatureError,
    KeyNotFoundError,
    StaleCacheError,
)
from featcache.format import read_manifest

FEATS = FeatureStorageConfig("feats")
MADE_FROM = {"adopted": "npy"}


@pytest.fixture
def arrays() -> Arrays:
    return some_arrays()


@pytest.fixture
def source(tmp_path: Path, arrays: Arrays) -> Path:
    return save_all(tmp_path / "fbank", arrays)


@pytest.fixture
def cache(tmp_path: Path, source: Path) -> Cache:
    return featcache.adopt(source, tmp_path / "cache")


def without(arrays: Arrays, *ids: str) -> Arrays:
    return {id: array for id, array in arrays.items() if id not in ids}


def stats_of(arrays: Arrays) -> FeatureStats:
    return FeatureStats.of(np.concatenate([*arrays.values()]))


def check_stats(cache: Cache, arrays: Arrays) -> None:
    found, expected = cache.stats("feats"), stats_of(arrays)
    assert found.count == expected.count
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(found.var, expected.var, rtol=1e-12)


def test_what_is_not_collected_says_what_to_call(tmp_path: Path, cache: Cache) -> None:
    with pytest.raises(KeyNotFoundError, match=r"collect\(\)"):
        cache.stats("feats")
    for settings in ({"verify": "arrays"}, {"check_reads": True}):
        with pytest.raises(CacheError, match=r"collect\(\)"):
            featcache.open(tmp_path / "cache", **settings)
    featcache.open(tmp_path / "cache", verify="columns")


def test_collected_caches_have_statistics_and_are_verified(
    tmp_path: Path, cache: Cache, arrays: Arrays, source: Path
) -> None:
    before = snapshot(source)
    cache.collect()
    check_stats(cache, arrays)
    check_arrays(cache, arrays)
    check_arrays(featcache.open(tmp_path / "cache", verify="arrays", check_reads=True), arrays)
    generation = cache.generation
    cache.collect()  # nothing is left to do
    assert cache.generation == generation
    assert snapshot(source) == before


def test_a_changed_byte_is_found_where_size_and_time_are_the_same(
    tmp_path: Path, cache: Cache, source: Path
) -> None:
    cache.collect()
    file = source / "utt-2.npy"
    status, data = file.stat(), bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CorruptCacheError, match=r"utt-2\.npy' is damaged.*'utt-2'"):
        featcache.open(tmp_path / "cache", verify="arrays")
    with pytest.raises(CorruptCacheError, match=r"utterance 'utt-2'.*checksum"):
        featcache.open(tmp_path / "cache", check_reads=True).read("utt-2", "feats")
    with pytest.raises(CorruptCacheError, match=r"utt-2\.npy' is damaged"):
        featcache.open(tmp_path / "cache", check_reads=True).read("utt-2", "feats", 1, 14)


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def touch(file: Path) -> None:
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", [grow, touch])
def test_a_source_that_changed_says_so(
    tmp_path: Path, cache: Cache, source: Path, change: Callable[[Path], None]
) -> None:
    del cache
    change(source / "utt-4.npy")
    cache = featcache.open(tmp_path / "cache")
    cache.read("utt-2", "feats")
    for read in (cache.collect, lambda: cache.read("utt-4", "feats")):
        with pytest.raises(CorruptCacheError, match=r"utt-4\.npy' has changed since.*adopt"):
            read()
    with pytest.raises(CorruptCacheError, match=r"utt-4\.npy' has changed since"):
        featcache.open(tmp_path / "cache", verify="columns")


def test_a_source_is_adopted_again_when_told_so(
    tmp_path: Path, cache: Cache, source: Path, arrays: Arrays
) -> None:
    arrays = {**without(arrays, "utt-4"), "new": np.ones((3, 5), np.float32)}
    np.save(source / "new.npy", arrays["new"])
    (source / "utt-4.npy").unlink()
    with pytest.raises(CacheError, match="overwrite=True"):
        featcache.adopt(source, tmp_path / "cache")
    check_arrays(featcache.adopt(source, tmp_path / "cache", overwrite=True), arrays)
    assert len(list((tmp_path / "cache/parts").iterdir())) == 1


def test_times_in_whole_seconds_are_of_archives(cache: Cache, source: Path) -> None:
    time_ns = (source / "utt-4.npy").stat().st_mtime_ns
    os.utime(source / "utt-4.npy", ns=(0, time_ns - time_ns % 10**9))
    assert cache.read("utt-4", "feats").shape == (5, 5)


def test_a_moved_source_is_opened_by_its_key(
    tmp_path: Path, cache: Cache, source: Path, arrays: Arrays
) -> None:
    moved = shutil.move(source, tmp_path / "elsewhere")
    del cache
    cache = featcache.open(tmp_path / "cache")
    assert cache.lengths("feats").sum() == sum(map(len, arrays.values()))
    with pytest.raises(CorruptCacheError, match=r"not there; .*roots=\{'fbank': "):
        cache.read("utt-2", "feats")
    with pytest.raises(ConfigError, match="no adopted source 'fbnk'; did you mean 'fbank'"):
        featcache.open(tmp_path / "cache", roots={"fbnk": moved})
    found = featcache.open(tmp_path / "cache", roots={"fbank": moved}, verify="columns")
    check_arrays(found, arrays)
    check_arrays(pickle.loads(pickle.dumps(found)), arrays)  # noqa: S301
    reader = pickle.loads(pickle.dumps(found.reader("feats")))  # noqa: S301
    assert np.array_equal(reader("utt-2").numpy(), arrays["utt-2"])
    own = featcache.FeatureReader(tmp_path / "cache", "feats", roots={"fbank": moved})
    for each in (own, pickle.loads(pickle.dumps(own))):  # noqa: S301
        assert np.array_equal(each("utt-2").numpy(), arrays["utt-2"])
    with pytest.raises(ConfigError, match="no adopted source 'fbnk'; did you mean 'fbank'"):
        featcache.FeatureReader(tmp_path / "cache", "feats", roots={"fbnk": moved})("utt-2")
    found.collect()
    check_stats(found, arrays)
    found.delete(["utt-2"])
    found.compact()
    found.refresh()
    check_arrays(found, without(arrays, "utt-2"))
    check_stats(found, without(arrays, "utt-2"))


def test_where_sources_lie_may_be_edited(tmp_path: Path, cache: Cache, arrays: Arrays) -> None:
    file = tmp_path / "cache/adopted.json"
    assert json.loads(file.read_bytes()) == {"fbank": str(tmp_path / "fbank")}
    shutil.move(tmp_path / "fbank", tmp_path / "elsewhere")
    file.write_text(json.dumps({"fbank": str(tmp_path / "elsewhere")}))
    check_arrays(featcache.open(cache.path), arrays)
    file.unlink()
    lost = featcache.open(cache.path)
    with pytest.raises(
        CorruptCacheError, match=r"nothing says where its source lies.*roots=\{'fbank': "
    ):
        lost.read("utt-2", "feats")
    check_arrays(featcache.open(cache.path, roots={"fbank": tmp_path / "elsewhere"}), arrays)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"fbank": 3}', b'{"fbank": "elsewhere"}', b'{"../x": "/"}', b"[" * 10**5,
     b'{"fbank": "/a\\u0000b"}', b"\xff"],
)  # fmt: skip
def test_a_damaged_list_of_sources_is_an_error(
    tmp_path: Path, cache: Cache, content: bytes
) -> None:
    (cache.path / "adopted.json").write_bytes(content)
    with pytest.raises(CorruptCacheError, match=r"adopted\.json' is damaged"):
        featcache.open(tmp_path / "cache")


@pytest.mark.parametrize("collected", [False, True])
def test_an_adopted_cache_is_edited_and_the_source_stays(
    tmp_path: Path, cache: Cache, source: Path, arrays: Arrays, collected: bool
) -> None:
    before = snapshot(source)
    if collected:
        cache.collect()
    cache.tag("all")
    cache.delete(["utt-2", "spk1/utt-1"])
    cache.annotate({"utt-4": {"speaker": "anna"}})
    cache.refresh()
    left = without(arrays, "utt-2", "spk1/utt-1")
    check_arrays(cache, left)
    check_arrays(featcache.open(cache.path, version="all"), arrays)
    if collected:
        check_stats(cache, left)
    cache.compact(drop_tags=True)
    cache.refresh()
    check_arrays(cache, left)
    assert cache.annotation("speaker")[list(cache).index("utt-4")] == "anna"
    assert all(part.tombstones is None for part in read_manifest(cache.path).parts)
    cache.collect()
    check_stats(cache, left)
    check_arrays(featcache.open(cache.path, verify="arrays"), left)
    assert snapshot(source) == before


def test_all_utterances_may_be_deleted(tmp_path: Path, cache: Cache, source: Path) -> None:
    before = snapshot(source)
    cache.delete(list(cache))
    cache.compact()
    assert len(featcache.open(tmp_path / "cache")) == 0
    assert snapshot(source) == before


@pytest.mark.parametrize("collected", [False, True])
def test_utterances_are_appended_to_adopted_ones(
    tmp_path: Path, cache: Cache, arrays: Arrays, collected: bool
) -> None:
    if collected:
        cache.collect()
    more = {f"new-{number}": np.full((number, 5), number, np.float32) for number in range(20)}
    for id, array in more.items():  # small parts become one, the adopted one aside
        with CacheWriter(cache.path, [FEATS], MADE_FROM) as writer:
            writer.write(id, {"feats": array})
    cache.refresh()
    check_arrays(cache, {**arrays, **more})
    if not collected:
        with pytest.raises(KeyNotFoundError, match=r"collect\(\)"):
            cache.stats("feats")
        cache.collect()
    check_stats(cache, {**arrays, **more})
    check_arrays(featcache.open(tmp_path / "cache", verify="arrays"), {**arrays, **more})


def test_another_feature_is_computed_beside_adopted_ones(
    tmp_path: Path, cache: Cache, arrays: Arrays
) -> None:
    energy = FeatureStorageConfig("energy")
    with CacheWriter(tmp_path / "cache", [energy]) as writer:
        for id in cache:
            writer.write(id, {"energy": arrays[id].sum(1)})
    both = featcache.open(tmp_path / "cache")
    assert set(both.features) == {"feats", "energy"}
    for id, array in arrays.items():
        assert np.array_equal(both[id]["feats"], array)
        assert np.array_equal(both[id]["energy"], array.sum(1))
    both.collect()
    check_stats(both, arrays)
    featcache.open(tmp_path / "cache", verify="arrays")


def test_another_store_is_adopted_beside_an_adopted_one(
    tmp_path: Path, cache: Cache, arrays: Arrays
) -> None:
    others = {id: array[:, :2].astype("f8") for id, array in arrays.items()}
    folder = save_all(tmp_path / "more/fbank", others)  # the key of the first is taken
    both = featcache.adopt(folder, tmp_path / "cache", feature="other")
    assert all(np.array_equal(both[id]["other"], array) for id, array in others.items())
    assert all(np.array_equal(both[id]["feats"], array) for id, array in arrays.items())
    moved = shutil.move(folder, tmp_path / "moved")
    both = featcache.open(tmp_path / "cache", roots={"fbank-2": moved})
    assert all(np.array_equal(both[id]["other"], array) for id, array in others.items())


def test_views_and_batches_read_adopted_arrays(cache: Cache, arrays: Arrays) -> None:
    ids = sorted(arrays)[:5]
    padded = cache.read_batch(ids, "feats")
    (batch,) = featcache.FeatureLoader(cache.table.select(ids), batch_size=5, shuffle=False)
    for found in (padded.data, batch["feats"].numpy()):
        for number, id in enumerate(ids):
            assert np.array_equal(found[number, : len(arrays[id])], arrays[id])


def test_an_overwrite_by_own_arrays_leaves_the_source(
    tmp_path: Path, cache: Cache, source: Path
) -> None:
    before = snapshot(source)
    with CacheWriter(tmp_path / "cache", [FEATS], {"model": "own"}, overwrite=True) as writer:
        writer.write("own", {"feats": np.ones((3, 5), np.float32)})
    cache = featcache.open(tmp_path / "cache", verify="arrays")
    assert list(cache) == ["own"]
    assert cache.stats("feats").count == 3
    assert read_manifest(tmp_path / "cache").requires == ()
    assert snapshot(source) == before


def test_another_fingerprint_is_stale(cache: Cache) -> None:
    with pytest.raises(StaleCacheError, match="adopted"):
        CacheWriter(cache.path, [FEATS], {"adopted": "ark"})


def test_numbers_that_are_not_finite_are_told_when_collected(tmp_path: Path) -> None:
    arrays = {**some_arrays(), "bad": np.array([[1, np.nan, np.inf, 4, 5]], np.float32)}
    folder = save_all(tmp_path / "a", arrays)
    cache = featcache.adopt(folder, tmp_path / "cache")
    with pytest.raises(FeatureError, match=r"NaN or infinity in 1 utterances \('bad'\)"):
        cache.collect()
    cache.delete(["bad"])
    cache.collect()
    check_stats(cache, without(arrays, "bad"))
    kept = featcache.adopt(folder, tmp_path / "kept", nonfinite="keep")
    kept.collect()
    check_arrays(featcache.open(tmp_path / "kept", verify="arrays"), arrays)


def test_a_version_is_not_collected(cache: Cache) -> None:
    cache.tag("first")
    with pytest.raises(CacheError, match="does not change"):
        featcache.open(cache.path, version="first").collect()


def test_a_part_that_says_it_is_adopted_needs_times(tmp_path: Path, cache: Cache) -> None:
    from featcache.format import write_manifest

    manifest = read_manifest(cache.path)
    with CacheWriter(tmp_path / "own", [FEATS]) as writer:
        writer.write("own", {"feats": np.ones((3, 5), np.float32)})
    own = read_manifest(tmp_path / "own")
    parts = tuple(replace(part, adopted=manifest.parts[0].adopted) for part in own.parts)
    write_manifest(tmp_path / "own", replace(own, parts=parts))
    with pytest.raises(CorruptCacheError, match="lacks times"):
        featcache.open(tmp_path / "own")


def test_a_source_is_refused_before_it_is_indexed_again(
    cache: Cache, source: Path, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(NpyFolder, "index", None)
        with pytest.raises(CacheError, match=r"already, adopted as 'feats': featcache\.open reads"):
            featcache.adopt(source, cache.path)
    again = featcache.adopt(source, cache.path, feature="more")  # beside what is there
    assert again.features == ("feats", "more")
    check_arrays(featcache.adopt(source, cache.path, overwrite=True), arrays)
