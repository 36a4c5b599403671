"""Feature sets that are deleted from, tagged, compacted, refreshed and annotated as one cache."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from feature_set_helpers import ALL, ENERGY, add, both, energy_of
from store_helpers import FINGERPRINT, arrays_of, assert_holds, id_of, make_cache

import featcache
from featcache import CacheWriter, FeatureStorageConfig, FeatureTable
from featcache.errors import (
    CacheError,
    CacheLockedError,
    ConfigError,
    FeatureError,
    KeyNotFoundError,
    UnknownNameError,
)
from featcache.format import read_manifest
from featcache.testing.contract import traces_in


def given(cache: featcache.Cache | FeatureTable, name: str) -> dict[str, object]:
    """Values of an annotation by id, where there is one."""
    values = zip(cache.ids, cache.annotation(name), strict=True)
    return {id: value for id, value in values if value is not None}


BYTES = [arrays_of(7)["fbank"].tobytes(), energy_of(7)["energy"].tobytes()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    cache = make_cache(tmp_path / "train", ALL)
    add(cache)
    return cache


def test_an_utterance_is_deleted_from_all_sets(path: Path) -> None:
    cache = featcache.open(path)
    before = cache.table
    cache.delete([id_of(3), id_of(5)])
    assert len(before) == len(ALL)
    left = [number for number in ALL if number not in (3, 5)]
    assert_holds(cache, both(left))
    assert cache.complete
    assert cache.missing("energy") == cache.missing("fbank") == ()


def test_an_utterance_that_one_set_has_is_deleted_there(tmp_path: Path) -> None:
    path = make_cache(tmp_path / "train", ALL)
    add(path, range(4))
    cache = featcache.open(path)
    cache.delete([id_of(7), id_of(2)])
    cache.refresh()
    assert {*cache.missing("energy")} == {id_of(number) for number in (4, 5, 6, 8)}
    assert {*cache} == {id_of(number) for number in (0, 1, 3)}


def test_what_failed_in_one_set_is_deleted_from_the_others(tmp_path: Path) -> None:
    path = make_cache(tmp_path / "train", ALL)
    with CacheWriter(path, [ENERGY], FINGERPRINT) as writer:
        writer.expect(map(id_of, ALL))
        for number in ALL[1:]:
            writer.write(id_of(number), energy_of(number))
        writer.fail(id_of(0))
    cache = featcache.open(path)
    assert (cache.complete, cache.failed) == (True, (id_of(0),))
    cache.delete([id_of(0)])
    cache.refresh()
    assert (cache.complete, cache.failed, cache.missing("energy")) == (True, (), ())
    assert_holds(cache, both(ALL[1:]))


def test_a_tag_of_one_set_that_is_dropped_is_dropped_from_all(path: Path) -> None:
    with CacheWriter(path, [ENERGY], FINGERPRINT) as writer:
        writer.write("alone", energy_of(3))
    featcache.open(path).tag("v1")
    cache = featcache.open(path)
    cache.delete(["alone"])
    cache.compact(drop_tags=True)
    assert featcache.open(path).tags == {}
    assert not read_manifest(path).tags


@pytest.mark.parametrize("numbers", [[3, 77], [77]])
def test_nothing_is_deleted_from_any_set_where_an_id_is_unknown(
    path: Path, numbers: list[int]
) -> None:
    with pytest.raises(KeyNotFoundError, match=r"1 are not in cache .*none was deleted"):
        featcache.open(path).delete(map(id_of, numbers))
    assert_holds(featcache.open(path), both(ALL))


def test_nothing_is_deleted_from_any_set_while_one_is_written(path: Path) -> None:
    with CacheWriter(path, [ENERGY], FINGERPRINT), pytest.raises(CacheLockedError):
        featcache.open(path).delete([id_of(3)])
    assert_holds(featcache.open(path), both(ALL))


def test_a_tag_names_a_generation_of_each_set(path: Path) -> None:
    featcache.open(path).tag("v1")
    featcache.open(path).delete([id_of(3)])
    old = featcache.open(path, version="v1", verify="arrays")
    assert featcache.open(path).tags == {"v1": old.generation}
    assert_holds(old, both(ALL))
    for copy in (pickle.loads(pickle.dumps(old)), old):  # noqa: S301
        copy.refresh()
        assert_holds(copy, both(ALL))
        assert len(copy.reader("energy").lengths()) == len(ALL)
    assert len(featcache.open(path)) == len(ALL) - 1
    old.untag("v1")
    assert featcache.open(path).tags == {}
    with pytest.raises(UnknownNameError, match="no version 'v1'"):
        featcache.open(path, version="v1")
    with pytest.raises(UnknownNameError, match="no tag 'v1'"):
        old.untag("v1")


def test_a_tag_is_not_given_to_two_generations_of_sets(path: Path) -> None:
    first = featcache.open(path)
    first.tag("v1")
    first.tag("v1")
    first.delete([id_of(3)])
    with pytest.raises(ConfigError, match=r"names generation .* already"):
        featcache.open(path).tag("v1")
    assert len(featcache.open(path, version="v1")) == len(ALL)


def test_a_version_from_before_a_feature_was_added_has_the_others(tmp_path: Path) -> None:
    path = make_cache(tmp_path / "train", ALL)
    before = featcache.open(path)
    before.tag("v1")
    add(path)
    old = featcache.open(path, version="v1")
    assert old.features == ("fbank", "units")
    assert_holds(old, {id_of(number): arrays_of(number) for number in ALL})
    before.tag("v2")  # of who had it open since
    assert featcache.open(path).tags.keys() == {"v1", "v2"}
    assert featcache.open(path, version="v2").features == ("fbank", "units")
    with pytest.raises(UnknownNameError, match=r"no version 'v3'.*'v[12]'"):
        featcache.open(path, version="v3")


def test_a_cache_that_is_open_goes_on_with_its_features(tmp_path: Path) -> None:
    path = make_cache(tmp_path / "train", ALL)
    cache = featcache.open(path)
    add(path)
    cache.delete([id_of(3)])
    cache.refresh()
    assert cache.features == ("fbank", "units")
    assert len(cache) == len(featcache.open(path)) == len(ALL) - 1


def test_copies_read_the_generation_of_each_set_while_it_is_there(path: Path) -> None:
    cache = featcache.open(path)
    pickled = pickle.dumps(cache)
    cache.delete([id_of(3)])
    assert_holds(pickle.loads(pickled), both(ALL))  # noqa: S301
    cache.compact()
    assert len(pickle.loads(pickled)) == len(ALL) - 1  # noqa: S301


def test_compacting_removes_what_was_deleted_from_all_sets(path: Path) -> None:
    cache = featcache.open(path)
    cache.delete([id_of(7)])
    cache.compact()
    left = [number for number in ALL if number != 7]
    assert_holds(featcache.open(path, verify="arrays"), both(left))
    assert not traces_in(path, BYTES)


def test_compacting_while_a_feature_is_added_leaves_nothing_of_what_was_deleted(
    tmp_path: Path,
) -> None:
    path = make_cache(tmp_path / "train", ALL)
    writer = CacheWriter(path, [ENERGY], FINGERPRINT)
    writer.write(id_of(1), energy_of(1))
    writer.close(complete=False)
    cache = featcache.open(path)
    cache.delete([id_of(7)])
    cache.compact()
    assert not traces_in(path, BYTES)
    add(path, [number for number in ALL if number not in (1, 7)])
    assert len(featcache.open(path, verify="arrays")) == len(ALL) - 1


def test_a_tag_of_any_set_that_holds_what_was_deleted_is_told_of_first(path: Path) -> None:
    featcache.open(path).tag("v1")
    cache = featcache.open(path)
    cache.delete([id_of(7)])
    with pytest.raises(CacheError, match=r"tags of cache .*'v1'.* nothing was changed"):
        cache.compact()
    assert_holds(featcache.open(path, version="v1", verify="arrays"), both(ALL))
    cache.compact(drop_tags=True)
    assert featcache.open(path).tags == {}
    assert not traces_in(path, BYTES)


def test_annotations_are_given_to_one_set_and_read_of_all(path: Path) -> None:
    cache = featcache.open(path)
    cache.annotate({id_of(number): {"speaker": f"s{number % 3}"} for number in ALL})
    cache.refresh()
    assert cache.annotations == ("speaker",)
    assert given(cache, "speaker") == {id_of(number): f"s{number % 3}" for number in ALL}
    assert not featcache.open(path / "sets" / "energy").annotations
    cache.delete([id_of(0)])
    cache.refresh()
    assert given(cache, "speaker") == {id_of(n): f"s{n % 3}" for n in ALL if n}


def test_annotations_of_sets_with_other_utterances_are_joined_by_id(tmp_path: Path) -> None:
    path = make_cache(tmp_path / "train", ALL)
    featcache.open(path).annotate({id_of(number): {"number": number} for number in ALL})
    add(path, [8, 2, 5], annotations={"quality": "good"})
    cache = featcache.open(path)
    assert given(cache, "number") == {id_of(number): number for number in (2, 5, 8)}
    assert [*cache.annotation("quality")] == ["good"] * 3
    table = cache.table.filter(number=(3, 8)).sort("number", descending=True)
    assert [*table.annotation("number")] == [8, 5]
    assert [*pickle.loads(pickle.dumps(table)).annotation("number")] == [8, 5]  # noqa: S301


def test_a_set_keeps_the_annotations_that_it_has(tmp_path: Path) -> None:
    path = make_cache(tmp_path / "train", ALL)
    add(path, annotations={"quality": "good"})
    featcache.open(path).annotate({id_of(1): {"quality": "bad", "words": "one"}})
    cache = featcache.open(path)
    good = {id_of(number): "good" for number in ALL}
    assert given(cache, "quality") == good | {id_of(1): "bad"}
    assert given(cache, "words") == {id_of(1): "one"}
    assert [*read_manifest(path).annotations] == ["words"]


def test_annotations_of_ids_that_no_set_has_are_refused_and_none_stored(path: Path) -> None:
    cache = featcache.open(path)
    with pytest.raises(KeyNotFoundError, match="1 utterances of the annotations"):
        cache.annotate({id_of(1): {"n": 1}, "stranger": {"n": 2}})
    assert not featcache.open(path).annotations
    cache.annotate({id_of(1): {"n": 1}, "stranger": {"n": 2}}, unknown="skip")
    assert given(featcache.open(path), "n") == {id_of(1): 1}


def test_a_feature_cannot_have_the_name_of_an_annotation_of_another_set(path: Path) -> None:
    with pytest.raises(FeatureError, match="energy"):
        featcache.open(path).annotate({id_of(1): {"energy": 1}})
    assert not featcache.open(path).annotations
    featcache.open(path).annotate({id_of(1): {"pitch": 1}})
    with pytest.raises(ConfigError, match="has an annotation 'pitch'"):
        CacheWriter(path, [FeatureStorageConfig("pitch")], FINGERPRINT)
