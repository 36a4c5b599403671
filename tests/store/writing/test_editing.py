"""Editing a cache that is open for reading: deletions, tags, versions, refreshing."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    assert_holds,
    check_cache,
    id_of,
    make_cache,
    oracle,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter
from featcache.errors import (
    CacheError,
    CacheLockedError,
    ConfigError,
    KeyNotFoundError,
    UnknownNameError,
)
from featcache.format import Stamps

ALL = range(10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A complete cache of two parts."""
    with CacheWriter(tmp_path / "cache", two_features(), FINGERPRINT) as writer:
        write(writer, ALL[:6])
        writer.publish()
        write(writer, ALL[6:])
    return tmp_path / "cache"


def append(path: Path, *numbers: int) -> None:
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        write(writer, numbers)


def again(data: bytes) -> featcache.Cache:
    """What another process opens."""
    cache: featcache.Cache = pickle.loads(data)  # noqa: S301
    return cache


def test_what_is_deleted_is_gone_here_for_the_next_reader_and_after_a_refresh(path: Path) -> None:
    cache, other = featcache.open(path), featcache.open(path)
    before = cache.table
    cache.delete([id_of(2), id_of(8)])
    left = [number for number in ALL if number not in (2, 8)]
    check_cache(path, left)
    assert_holds(cache, oracle(left))
    assert_holds(other, oracle(ALL))
    assert np.array_equal(before.read(id_of(2), "fbank"), oracle(ALL)[id_of(2)]["fbank"])
    other.refresh()
    assert_holds(other, oracle(left))
    assert id_of(2) not in cache


def test_a_deletion_leaves_a_complete_cache_complete(path: Path) -> None:
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        writer.expect([*map(id_of, ALL), "bad"])
        writer.fail("bad")
    cache = featcache.open(path)
    assert cache.expected == 11
    cache.delete([id_of(0)])
    cache.refresh()
    assert (cache.complete, cache.expected, cache.failed) == (True, 10, ("bad",))


def test_a_failed_utterance_is_forgotten_with_the_lines_about_it(path: Path) -> None:
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        writer.expect([*map(id_of, ALL), "bad", "worse"])
        writer.fail("bad")
        writer.fail("worse")
    notes, others = path / "work-failures.jsonl", path / "work-plan.json"
    lines = ['{"id": "bad", "error": "1"}', "{", "[" * 100_000, '{"id": "worse"}', '{"id": [1]}']
    notes.write_text("\n".join(lines) + "\n")
    others.write_text(lines[0])
    cache = featcache.open(path)
    cache.delete(["bad", id_of(0)])
    cache.refresh()
    assert (cache.complete, cache.expected, cache.failed) == (True, 10, ("worse",))
    assert notes.read_text().splitlines() == lines[1:]
    assert others.read_text() == lines[0]
    with pytest.raises(KeyNotFoundError, match="'bad'"):
        cache.delete(["bad"])
    notes.write_text(lines[3])
    cache.delete(["worse"])
    assert not notes.exists()
    check_cache(path, ALL[1:])


def test_a_failed_utterance_of_an_unfinished_cache_is_forgotten(path: Path) -> None:
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        writer.expect([*map(id_of, ALL), "bad", "to come"])
        writer.fail("bad")
    featcache.open(path).delete(["bad"])
    cache = featcache.open(path)
    assert (cache.complete, cache.failed) == (False, ())


def test_a_deletion_leaves_an_unfinished_cache_unfinished(path: Path) -> None:
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        writer.expect([*map(id_of, ALL), "to come"])
    featcache.open(path).delete([id_of(0)])
    check_cache(path, ALL[1:], complete=False)


def test_an_unknown_id_is_named_and_nothing_is_deleted(path: Path) -> None:
    cache = featcache.open(path)
    with pytest.raises(KeyNotFoundError, match=r"2 are not in cache .*'no', 'neither'; none"):
        cache.delete([id_of(1), "no", "neither"])
    with pytest.raises(ConfigError, match="list of strings"):
        cache.delete(id_of(1))
    generation = featcache.open(path).generation
    cache.delete([])
    assert featcache.open(path).generation == generation
    check_cache(path, ALL)


def test_an_utterance_is_replaced_by_deleting_and_writing_it(path: Path) -> None:
    featcache.open(path).delete([id_of(3)])
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        writer.write(id_of(3), arrays_of(1003), stamps=Stamps(3, 4))
    cache = featcache.open(path, verify="arrays")
    assert_holds(cache, oracle(ALL) | {id_of(3): arrays_of(1003)})


def test_a_cache_that_is_written_refuses_to_be_edited(path: Path) -> None:
    cache = featcache.open(path)
    with CacheWriter(path, two_features(), FINGERPRINT):
        with pytest.raises(CacheLockedError, match="is being written"):
            cache.delete([id_of(1)])
        with pytest.raises(CacheLockedError, match="is being written"):
            cache.tag("v1")
        with pytest.raises(CacheLockedError, match="is being written"):
            cache.compact()
    check_cache(path, ALL)


def test_a_cache_that_is_being_overwritten_refuses_a_deletion(path: Path) -> None:
    writer = CacheWriter(path, two_features(), {"model": "new"}, overwrite=True)
    write(writer, ALL[:2])
    writer.commit()
    writer._work.keep()
    with pytest.raises(CacheError, match="is being overwritten: finish that"):
        featcache.open(path).delete([id_of(1)])
    with CacheWriter(path, two_features(), {"model": "new"}, overwrite=True) as writer:
        assert id_of(1) in writer
        write(writer, ALL[2:])
    check_cache(path, ALL)


def test_a_probe_that_names_a_deleted_utterance_goes(path: Path) -> None:
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        writer.keep_file("probe", json.dumps({id_of(2): 1, "é": 2}).encode())
        writer.keep_file("made-from", b"{}")
    cache = featcache.open(path)
    cache.delete([id_of(3)])
    cache.refresh()
    assert cache.opened.file("probe") is not None
    cache.delete([id_of(2)])
    cache.refresh()
    assert cache.opened.file("probe") is None
    assert cache.opened.file("made-from") == b"{}"


def test_a_probe_that_waits_for_its_publication_goes_too(path: Path) -> None:
    writer = CacheWriter(path, two_features(), FINGERPRINT)
    writer.keep_file("probe", json.dumps([id_of(2)]).encode())
    writer._work.close(complete=False, publish=False)  # as if it were killed
    featcache.open(path).delete([id_of(2)])
    assert featcache.open(path, verify="arrays").opened.file("probe") is None
    assert not list(path.glob("probe-*"))


@pytest.mark.parametrize("gone", [[0], [0, 1], list(range(9)), list(ALL)])
def test_statistics_after_a_deletion_are_those_of_what_remains(
    tmp_path: Path, gone: list[int]
) -> None:
    """Whether what goes is read, or what stays."""
    path = make_cache(tmp_path / "cache", ALL)
    featcache.open(path).delete(map(id_of, gone))
    check_cache(path, [number for number in ALL if number not in gone])


def test_statistics_stay_exact_where_what_goes_is_far_from_the_rest(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    near = {f"near-{i}": random.standard_normal((50, 3)).astype(np.float32) for i in range(9)}
    far = {"far": (random.standard_normal((50, 3)) * 1e6).astype(np.float32)}
    with CacheWriter(tmp_path, [featcache.FeatureStorageConfig("fbank")]) as writer:
        for id, array in (near | far).items():
            writer.write(id, {"fbank": array})
    cache = featcache.open(tmp_path)
    cache.delete(["far"])
    cache.refresh()
    frames = np.concatenate([*near.values()]).astype(np.float64)
    np.testing.assert_allclose(cache.stats("fbank").mean, frames.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(cache.stats("fbank").var, frames.var(axis=0), rtol=1e-12)


def test_a_tag_is_opened_after_whatever_came_later(path: Path) -> None:
    cache = featcache.open(path)
    cache.tag("v1")
    cache.tag("v1")  # harmless
    cache.delete([id_of(1)])
    for number in range(20, 24):
        append(path, number)
    make_cache(path, range(30, 33), fingerprint={"model": "other"}, overwrite=True)
    make_cache(path, range(40, 42), fingerprint={"model": "third"}, overwrite=True)
    check_cache(path, range(40, 42))
    tagged = featcache.open(path, version="v1", verify="arrays")
    assert_holds(tagged, oracle(ALL))
    assert tagged.fingerprint["model"] == "wavlm"
    assert tagged.tags == featcache.open(path).tags == {"v1": tagged.generation}
    tagged.refresh()
    assert_holds(again(pickle.dumps(tagged)), oracle(ALL))
    with pytest.raises(CacheError, match=r"version 'v1' .* does not change"):
        tagged.delete([id_of(1)])
    with pytest.raises(CacheError, match=r"version 'v1' .* does not change; .* to annotate it"):
        tagged.annotate({id_of(1): {"speaker": "anna"}})


def test_untagging_removes_what_the_tag_kept(path: Path) -> None:
    cache = featcache.open(path)
    cache.tag("v1")
    make_cache(path, range(30, 33), fingerprint={"model": "other"}, overwrite=True)
    append_other = {"model": "other"}
    with CacheWriter(path, two_features(), append_other) as writer:
        write(writer, [33])
    parts = len(list(path.glob("parts/*")))
    featcache.open(path).untag("v1")
    assert len(list(path.glob("parts/*"))) == parts - 2
    check_cache(path, range(30, 34))
    with pytest.raises(UnknownNameError, match="no version 'v1'"):
        featcache.open(path, version="v1")
    with pytest.raises(UnknownNameError, match="no tag 'v1'; known: none"):
        featcache.open(path).untag("v1")


@pytest.mark.parametrize("name", ["", "a/b", "-v", ".v", "v 1", "x" * 65, 3])
def test_a_bad_name_of_a_tag_is_refused(path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="the name of a tag"):
        featcache.open(path).tag(name)


def test_a_tag_is_not_moved_silently(path: Path) -> None:
    featcache.open(path).tag("v1")
    append(path, 20)
    with pytest.raises(ConfigError, match=r"names generation .* already; untag"):
        featcache.open(path).tag("v1")
    featcache.open(path).tag("v2")
    assert len(featcache.open(path).tags) == 2


def test_a_generation_that_is_gone_cannot_be_tagged(path: Path) -> None:
    cache, last = featcache.open(path), featcache.open(path)
    append(path, 20)
    last.tag("before")  # the one before is whole
    append(path, 21)
    append(path, 22)
    cache.untag("before")
    with pytest.raises(CacheError, match=r"no longer there; refresh\(\)"):
        cache.tag("v1")
    cache.refresh()
    cache.tag("v1")
    assert cache.tags == {"v1": cache.generation}


def test_a_generation_of_an_overwritten_cache_cannot_be_tagged(path: Path) -> None:
    cache = featcache.open(path)
    make_cache(path, range(30, 33), fingerprint={"model": "other"}, overwrite=True)
    with pytest.raises(CacheError, match="no longer there"):
        cache.tag("v1")


def test_an_accepted_fingerprint_is_tagged_with_the_generation(path: Path) -> None:
    from featcache.declaration import by_name
    from featcache.writing.session import accept

    accept(path, by_name(two_features()), {"model": "same, rewritten"})
    featcache.open(path).tag("v1")
    append_made_from = {"model": "same, rewritten"}
    with CacheWriter(path, two_features(), append_made_from) as writer:
        write(writer, [20])
    opened = featcache.open(path, version="v1", expect=append_made_from)
    assert_holds(opened, oracle(ALL))


def test_a_pickled_cache_opens_the_same_generation_while_it_is_there(path: Path) -> None:
    cache = featcache.open(path)
    data = pickle.dumps(cache)
    cache.delete([id_of(1)])
    assert_holds(again(data), oracle(ALL))
    append(path, 20)
    append(path, 21)
    assert len(again(data)) == 11


def test_a_refresh_refuses_what_was_made_anew_from_something_else(path: Path) -> None:
    cache = featcache.open(path)
    make_cache(path, range(3), fingerprint={"model": "other"}, overwrite=True)
    with pytest.raises(featcache.StaleCacheError, match="made anew from something else"):
        cache.refresh()
    assert len(cache) == 10
