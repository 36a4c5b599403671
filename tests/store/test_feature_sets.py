"""Features that are added to a cache: sets beside each other, each written by itself."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from feature_set_helpers import ALL, ENERGY, add, both, energy_of
from store_disk import Crash, Disk
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    assert_holds,
    change_index,
    check_cache,
    id_of,
    make_cache,
    oracle,
    two_features,
)

import featcache
from featcache import CacheWriter, FeatureReader, FeatureStorage, FeatureStorageConfig, FeatureTable
from featcache.errors import (
    ConfigError,
    CorruptCacheError,
    FeatureError,
    IncompleteError,
    NotACacheError,
    StaleCacheError,
)
from featcache.format import NAME, read_manifest
from featcache.writing.part_writer import PartWriter

PITCH = FeatureStorageConfig("pitch", backend="hdf5", stats=False)


def inodes(path: Path) -> dict[str, int]:
    files = (file for file in path.glob("parts/*/*") if not file.name.startswith("writer."))
    return {file.relative_to(path).as_posix(): file.stat().st_ino for file in files}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "train", ALL)


@pytest.mark.parametrize("backend", ["memmap", "hdf5", "webdataset", "zarr"])
def test_an_added_feature_stands_beside_the_others(tmp_path: Path, backend: str) -> None:
    path = make_cache(tmp_path / "train", ALL, two_features(backend))
    add(path, feature=FeatureStorageConfig("energy", backend=backend))
    cache = featcache.open(path, verify="arrays", check_reads=True)
    assert cache.features == ("fbank", "units", "energy")
    assert cache.complete
    assert_holds(cache, both(ALL))


def test_what_is_there_stays_as_it_is_and_where_it_is(cache: Path) -> None:
    before, names = inodes(cache), {entry.name for entry in cache.iterdir()}
    add(cache)
    assert inodes(cache) == before
    assert {entry.name for entry in cache.iterdir()} == {*names, "sets"}
    assert {entry.name for entry in (cache / "sets").iterdir()} == {NAME, "writer.lock", "energy"}


def test_readers_see_the_new_feature_once_it_is_complete(cache: Path) -> None:
    with CacheWriter(cache, [ENERGY], FINGERPRINT) as writer:
        writer.write(id_of(0), energy_of(0))
        writer.publish()
        check_cache(cache, ALL)
        declared = FeatureStorage(cache.parent, [*two_features(), ENERGY]).cache("train")
        assert (list(declared), declared.complete) == ([id_of(0)], False)
    assert list(featcache.open(cache)) == [id_of(0)]


def test_a_set_without_utterances_hides_none_of_the_others(cache: Path) -> None:
    with CacheWriter(cache, [ENERGY]):
        pass
    before = featcache.open(cache)
    assert len(before) > 0
    assert ENERGY.name not in before.features
    with CacheWriter(cache, [ENERGY]) as writer:
        for id in before:
            writer.write(id, {ENERGY.name: np.zeros((1, 1))})
    after = featcache.open(cache)
    assert ENERGY.name in after.features
    assert list(after) == list(before)


def test_a_set_of_other_utterances_hides_none_of_those_there(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = featcache.open(cache)
    with CacheWriter(cache, [ENERGY], FINGERPRINT) as writer:
        writer.write("elsewhere", energy_of(0))
    assert "'energy'" in caplog.text
    assert "no utterance in common" in caplog.text
    after = featcache.open(cache)
    assert (list(after), after.features, after.complete) == (list(before), before.features, True)
    with CacheWriter(cache, [ENERGY], FINGERPRINT) as writer:
        writer.write(id_of(3), energy_of(3))
    assert list(featcache.open(cache)) == [id_of(3)]


def test_rows_are_the_ids_that_all_sets_have_and_the_rest_is_listed(cache: Path) -> None:
    add(cache, range(4, 12))
    opened = featcache.open(cache, verify="arrays", check_reads=True)
    common = range(4, 9)
    assert list(opened) == sorted(map(id_of, common))
    for id, arrays in both(common).items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(opened.read(id, name), array)
    assert opened.missing("energy") == tuple(sorted(map(id_of, range(4))))
    assert opened.missing("units") == tuple(sorted(map(id_of, range(9, 12))))
    assert not opened.complete
    assert featcache.open(cache / "sets" / "energy").missing("energy") == ()


def test_a_set_that_says_what_failed_leaves_the_cache_complete(cache: Path) -> None:
    writer = CacheWriter(cache, [ENERGY], FINGERPRINT)
    writer.expect([id_of(number) for number in ALL])
    for number in ALL[1:]:
        writer.write(id_of(number), energy_of(number))
    writer.fail(id_of(0))
    writer.close()
    opened = featcache.open(cache)
    assert (opened.complete, opened.failed, len(opened)) == (True, (id_of(0),), 8)
    assert opened.missing("energy") == (id_of(0),)


def test_batches_windows_tables_and_copies_read_the_right_rows(cache: Path) -> None:
    add(cache, [1, 3, 5, 8])
    opened = featcache.open(cache, mapped=False)
    ids = sorted(map(id_of, [1, 3, 5, 8]))
    expected = both([1, 3, 5, 8])
    for copy in (opened, pickle.loads(pickle.dumps(opened))):  # noqa: S301
        batch = copy.read_batch(ids[::-1], "units")
        assert batch.lengths.tolist() == [len(expected[id]["units"]) for id in ids[::-1]]
        np.testing.assert_array_equal(
            copy.read(id_of(3), "fbank", 2, 9), expected[id_of(3)]["fbank"][2:9]
        )
    table = FeatureTable.of(opened)
    assert [table.id(row) for row in range(len(table))] == ids
    assert FeatureReader(cache, "fbank")(id_of(0)).shape == (0, 4)  # which energy lacks


@pytest.mark.parametrize("check_reads", [False, True])
def test_who_had_the_plain_cache_open_reads_on(cache: Path, check_reads: bool) -> None:
    opened = featcache.open(cache, check_reads=check_reads)
    reader, pickled = opened.reader("fbank"), pickle.dumps(opened)
    add(cache)
    assert_holds(opened, oracle(ALL))
    assert_holds(pickle.loads(pickled), oracle(ALL))  # noqa: S301
    assert tuple(reader(id_of(3)).shape) == arrays_of(3)["fbank"].shape


def test_a_third_feature_is_one_more_set(cache: Path) -> None:
    add(cache)
    assert add(cache, feature=PITCH, made_from={"other": 1}) == cache / "sets" / "pitch"
    opened = featcache.open(cache, verify="arrays")
    assert opened.features == ("fbank", "units", "energy", "pitch")
    assert opened.fingerprint["sets"]["pitch"] == {"other": 1}
    assert featcache.inspect.made_from(cache)["fingerprint"] == opened.fingerprint


def test_what_differs_between_two_caches_is_told_by_set(tmp_path: Path) -> None:
    for name, layer in (("a", 1), ("b", 2)):
        make_cache(tmp_path / name, range(3))
        add(tmp_path / name, range(3), made_from={"layer": layer})
    unlike = featcache.inspect.diff(tmp_path / "a", tmp_path / "b")["fingerprint"]
    assert unlike == ["sets.energy.layer: was 1, now 2"]


def test_a_set_goes_on_grows_and_is_overwritten_by_itself(cache: Path) -> None:
    add(cache)
    fbank = read_manifest(cache).write_id
    add(cache, [9])
    with pytest.raises(StaleCacheError, match="layer: was 9, now 10"):
        CacheWriter(cache, [ENERGY], {**FINGERPRINT, "layer": 10})
    add(cache, ALL, made_from={"layer": 10}, overwrite=True)
    assert read_manifest(cache).write_id == fbank
    assert featcache.open(cache).fingerprint["sets"]["energy"] == {"layer": 10}


def test_an_overwrite_of_other_features_leaves_what_is_there(cache: Path) -> None:
    add(cache, overwrite=True)
    assert_holds(featcache.open(cache), both(ALL))


def test_features_of_two_sets_are_not_written_together(cache: Path) -> None:
    add(cache)
    with pytest.raises(ConfigError, match="several feature sets"):
        CacheWriter(cache, [*two_features(), ENERGY])


def test_who_declares_old_and_new_features_together_is_told_to_add_the_new(cache: Path) -> None:
    with pytest.raises(StaleCacheError, match=r"add what is new alone \(declare 'energy' and no"):
        CacheWriter(cache, [*two_features(), ENERGY], FINGERPRINT)
    with pytest.raises(StaleCacheError) as told:
        CacheWriter(cache, [*two_features(), ENERGY], {"layer": 10})
    assert "add what is new" not in str(told.value)


def test_an_incomplete_cache_says_which_utterances_lack_a_feature(cache: Path) -> None:
    add(cache, [*range(7), 20, 21, 22])
    says = r"2 more have no 'energy': compute or delete them, cache\.missing\('energy'\)"
    with pytest.raises(IncompleteError, match=says):
        featcache.FeatureDataset(featcache.open(cache), ["energy"])


def test_a_feature_of_fewer_utterances_leaves_the_cache_incomplete_until_they_are_deleted(
    cache: Path,
) -> None:
    ids = [id_of(number) for number in ALL]
    with CacheWriter(cache, [ENERGY], FINGERPRINT) as writer:
        writer.expect(ids[:7])
        for number in ALL[:7]:
            writer.write(id_of(number), energy_of(number))
    opened = featcache.open(cache)
    assert not opened.complete
    assert [*opened.missing("energy")] == ids[7:]
    opened.delete(opened.missing("energy"))
    opened.refresh()
    assert opened.complete
    assert len(featcache.FeatureDataset(opened, ["fbank", "energy"])) == 7


def test_statistics_of_a_feature_are_of_the_rows(cache: Path) -> None:
    add(cache, [3, 4])
    opened = featcache.open(cache)
    frames = [len(arrays_of(number)["fbank"]) for number in ALL]
    assert opened.stats("fbank").count == frames[3] + frames[4]
    assert opened.opened.stats("fbank").count == sum(frames)  # stored beside all that have it


def test_no_annotation_has_the_name_of_a_feature_of_another_set(cache: Path) -> None:
    add(cache)
    for features, arrays, name in (
        ([ENERGY], energy_of(20), "units"),
        (two_features(), arrays_of(20), "energy"),
    ):
        with CacheWriter(cache, features, FINGERPRINT) as writer:
            with pytest.raises(FeatureError, match=name):
                writer.write(id_of(20), arrays, annotations={name: 1})
            assert id_of(20) not in writer


def test_an_empty_cache_is_begun_anew_with_other_features(tmp_path: Path) -> None:
    make_cache(tmp_path / "train", [])
    writer = CacheWriter(tmp_path / "train", [ENERGY], FINGERPRINT)
    assert writer.path == tmp_path / "train"
    assert featcache.open(tmp_path / "train").features == ("energy",)
    writer.write(id_of(1), energy_of(1))
    writer.close()
    assert list(featcache.open(tmp_path / "train", verify="arrays")) == [id_of(1)]


def test_a_stale_set_refuses_its_features_only(cache: Path) -> None:
    add(cache, made_from={"layer": 10})
    opened = featcache.open(cache, expect={"layer": 10})
    assert opened.features == ("energy",)
    assert opened.read(id_of(3), "energy").shape == energy_of(3)["energy"].shape
    with pytest.raises(StaleCacheError, match="layer: was 9, now 10"):
        opened.read(id_of(3), "fbank")
    with pytest.raises(StaleCacheError, match=r"layer: was 9, now 11[^$]*was 10, now 11"):
        featcache.open(cache, expect={"layer": 11})
    with pytest.raises(StaleCacheError):
        FeatureReader(cache, "fbank", expect={"layer": 10})(id_of(0))


def test_a_storage_opens_the_sets_of_what_it_declares(cache: Path) -> None:
    add(cache, range(3))
    root = cache.parent
    assert_holds(FeatureStorage(root, two_features()).cache("train"), oracle(ALL))
    assert len(FeatureStorage(root, [ENERGY]).cache("train")) == 3
    assert len(FeatureStorage(root, [*two_features(), ENERGY]).cache("train")) == 3
    with pytest.raises(StaleCacheError, match=r"pitch: was \(absent\)[^$]*computed by cache_feat"):
        FeatureStorage(root, [*two_features(), PITCH]).cache("train")
    with pytest.raises(StaleCacheError, match=r"units: was .*, now \(absent\)"):
        FeatureStorage(root, two_features()[:1]).cache("train")


def test_a_damaged_set_leaves_the_others_readable(cache: Path) -> None:
    add(cache)
    (file,) = (cache / "sets" / "energy").glob("parts/*/energy.npy")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptCacheError, match="sets/energy"):
        featcache.open(cache, verify="arrays")
    shutil.rmtree(cache / "sets" / "energy")
    with pytest.raises(CorruptCacheError, match="lacks one of its feature sets"):
        featcache.open(cache)
    assert_holds(FeatureStorage(cache.parent, two_features()).cache("train"), oracle(ALL))
    add(cache)
    assert_holds(featcache.open(cache), both(ALL))


@pytest.mark.parametrize("name", ["sets", "sets/energy"])
def test_no_link_leads_to_a_set(cache: Path, name: str) -> None:
    add(cache)
    outside = (cache / name).rename(cache.parent / "outside")
    (cache / name).symlink_to(outside)
    before = sorted(outside.rglob("*"))
    for use in (featcache.open, add):
        with pytest.raises(CorruptCacheError, match="a link"):
            use(cache)
    assert sorted(outside.rglob("*")) == before


def test_sets_of_other_utterances_with_wrong_columns_are_damaged(cache: Path) -> None:
    add(cache, range(3))
    wrong = np.arange(len(ALL), dtype=np.int64)[::-1] + 4096
    change_index(cache, {"hash_rows": wrong})
    with pytest.raises(CorruptCacheError, match="name what is not there"):
        featcache.open(cache)


@pytest.mark.parametrize("lost", [f"sets/{NAME}", "sets"])
def test_sets_that_are_lost_are_damage_and_what_is_left_is_named_again(
    cache: Path, lost: str
) -> None:
    add(cache)
    (cache / lost).rename(cache.parent / "lost")
    with pytest.raises(CorruptCacheError, match=f"sets/{NAME}' is lost or damaged"):
        featcache.open(cache)
    add(cache, [] if lost != "sets" else ALL)
    assert_holds(featcache.open(cache, verify="arrays"), both(ALL))


def test_a_lost_manifest_of_the_first_features_leaves_the_sets_in_their_place(cache: Path) -> None:
    add(cache)
    (cache / NAME).unlink()
    with pytest.raises(NotACacheError, match="is lost"):
        featcache.open(cache)
    make_cache(cache, [])
    assert_holds(featcache.open(cache), both(ALL))


def test_features_are_added_while_others_are_being_written(cache: Path) -> None:
    with PartWriter(cache, {each.name: each for each in two_features()}, FINGERPRINT) as part:
        part.write("new", arrays_of(1))
        part.commit()
        add(cache)
        part.write("newer", arrays_of(2))
    with CacheWriter(cache, two_features(), FINGERPRINT) as writer:
        assert "new" in writer
        assert "newer" in writer
    assert {*featcache.open(cache).missing("energy")} == {"new", "newer"}


def crashes_of_adding(path: Path) -> Sequence[Crash]:
    """Add a feature on a watched disk; returns what could be left at each step."""
    disk = Disk(path.parent)
    disk.promise = False
    with disk.watching():
        writer = CacheWriter(path, [ENERGY], FINGERPRINT)
        for number in ALL:
            writer.write(id_of(number), energy_of(number))
        writer.commit()
        writer.close()
        disk.promise = True
    return disk.crashes


def test_a_crash_while_a_feature_is_added_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    path = make_cache(tmp_path / "disk" / "train", ALL)
    crashes = crashes_of_adding(path)
    assert len(crashes) > 100
    if "FEATCACHE_EVERY_CRASH" not in os.environ:  # it takes a minute
        crashes = Random(0).sample(crashes, 25)
    for number, crash in enumerate(crashes):
        root = tmp_path / f"crash-{number}"
        crash.restore(root)
        try:
            opened = featcache.open(root / "train", verify="columns")
            assert_holds(opened, both(ALL) if "energy" in opened.features else oracle(ALL))
            assert not crash.promise or "energy" in opened.features
            with CacheWriter(root / "train", [ENERGY], FINGERPRINT) as writer:
                for each in ALL:
                    if id_of(each) not in writer:
                        writer.write(id_of(each), energy_of(each))
            assert_holds(featcache.open(root / "train", verify="arrays"), both(ALL))
            left = {entry.name for entry in (root / "train" / "sets").iterdir()}
            assert left == {NAME, "energy", "writer.lock"}
        except BaseException as error:
            error.add_note(f"after a crash: {crash.step}")
            raise
        shutil.rmtree(root)
