"""Utterances that are deleted: they are gone, their statistics too, and can be written again."""

from __future__ import annotations

import logging
import shutil
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
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ClosedError, ConfigError, KeyNotFoundError
from featcache.format import NAME, Stamps, committed
from featcache.writing.part_writer import PartWriter

ALL = range(8)
NEW = 1000  # of the arrays that take the place of deleted ones


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A complete cache of two parts."""
    path = tmp_path / "cache"
    with open_writer(path) as writer:
        write(writer, ALL[:4])
        writer.publish()
        write(writer, ALL[4:])
    return path


def open_writer(path: Path, *, overwrite: bool = False, expect: bool = True) -> CacheWriter:
    writer = CacheWriter(path, two_features(), FINGERPRINT, overwrite=overwrite)
    if expect:
        writer.expect(ids(*ALL))
    return writer


def ids(*numbers: int) -> list[str]:
    return [id_of(number) for number in numbers]


def kill(writer: CacheWriter, path: Path, copy: Path) -> Path:
    """Copy what is on disk, as if the writer were killed now."""
    writer._parts._thread.drain()
    shutil.copytree(path, copy)
    return copy


def test_what_is_deleted_is_gone_at_once_and_missing(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with open_writer(cache) as writer:
        writer.delete(ids(1, 2, 5))
        check_cache(cache, [0, 3, 4, 6, 7], complete=False)
        assert featcache.open(cache).expected == 8
        assert [id in writer for id in ids(0, 1, 5)] == [True, False, False]
        assert sorted(committed(cache)) == sorted(ids(0, 3, 4, 6, 7))
    check_cache(cache, [0, 3, 4, 6, 7], complete=False)
    assert "twice" not in caplog.text


def test_what_is_deleted_can_be_written_again(cache: Path) -> None:
    with open_writer(cache) as writer:
        writer.delete(ids(1, 5))
        for number in (1, 5):
            writer.write(id_of(number), arrays_of(number + NEW), stamps=Stamps(number, 1))
    opened = featcache.open(cache, verify="arrays")
    assert opened.complete
    again = {id_of(number): arrays_of(number + NEW) for number in (1, 5)}
    assert_holds(opened, oracle(ALL) | again)
    stamps = opened.opened.index.stamps
    assert stamps is not None
    assert int(stamps.input[opened.opened.row(id_of(5))]) == 5


def test_a_writer_killed_after_a_deletion_leaves_them_missing(cache: Path, tmp_path: Path) -> None:
    writer = open_writer(cache)
    writer.delete(ids(1, 5))
    writer.write(id_of(1), arrays_of(1 + NEW))
    writer.commit()
    copy = kill(writer, cache, tmp_path / "killed")
    writer.abort()
    with open_writer(copy) as writer:
        assert [id in writer for id in ids(*ALL)] == [number != 5 for number in ALL]
        writer.write(id_of(5), arrays_of(5 + NEW))
    again = {id_of(number): arrays_of(number + NEW) for number in (1, 5)}
    assert_holds(featcache.open(copy, verify="arrays"), oracle(ALL) | again)


def test_it_is_deleted_again_and_again(cache: Path) -> None:
    """Each time in another part, with all that was written before published."""
    with open_writer(cache) as writer:
        for time in range(3):
            writer.delete(ids(3))
            check_cache(cache, [0, 1, 2, 4, 5, 6, 7], complete=False)
            writer.write(id_of(3), arrays_of(time + NEW))
        assert id_of(3) in writer
    expected = oracle(ALL) | {id_of(3): arrays_of(2 + NEW)}
    assert_holds(featcache.open(cache, verify="arrays"), expected)
    assert len(list(cache.glob("parts/*"))) == 5


def test_all_can_be_deleted(cache: Path) -> None:
    with open_writer(cache) as writer:
        writer.delete(ids(*ALL))
        opened = featcache.open(cache, verify="arrays")
        assert (len(opened), opened.stats("fbank").count, opened.complete) == (0, 0, False)
        assert opened.expected == 8
        write(writer, ALL)
    check_cache(cache, ALL)


def test_what_nobody_expects_leaves_a_complete_cache(cache: Path) -> None:
    with open_writer(cache, expect=False) as writer:
        writer.expect(ids(*ALL[:7]))
        writer.delete(ids(7))
        check_cache(cache, ALL[:7], complete=True)
    with open_writer(cache, expect=False) as writer:
        writer.delete(ids(6))
        check_cache(cache, ALL[:6], complete=False)
    check_cache(cache, ALL[:6], complete=True)


def test_what_was_deleted_may_fail(cache: Path) -> None:
    with open_writer(cache) as writer:
        writer.delete(ids(1, 2))
        writer.fail(id_of(1))
        write(writer, [2])
    opened = featcache.open(cache, verify="arrays")
    assert (opened.failed, opened.complete) == ((id_of(1),), True)


def test_part_writers_take_what_was_deleted(cache: Path) -> None:
    with open_writer(cache) as writer:
        writer.delete(ids(1))
        with PartWriter(cache, two_features(), FINGERPRINT) as part:
            assert id_of(1) not in part
            part.write(id_of(1), arrays_of(1 + NEW))
    expected = oracle(ALL) | {id_of(1): arrays_of(1 + NEW)}
    assert_holds(featcache.open(cache, verify="arrays"), expected)


def test_what_is_written_now_can_be_deleted(cache: Path) -> None:
    with open_writer(cache) as writer:
        write(writer, [8, 9])
        writer.delete(ids(8))
        assert [id in writer for id in ids(8, 9)] == [False, True]
    check_cache(cache, [*ALL, 9])


def test_new_stamps_of_what_is_deleted_are_not_those_of_what_comes(cache: Path) -> None:
    with open_writer(cache) as writer:
        writer.restamp({id_of(1): Stamps(1, 1), id_of(2): Stamps(2, 2)})
        writer.delete(ids(1))
        writer.write(id_of(1), arrays_of(1), stamps=Stamps(7, 7))
    stamps = featcache.open(cache).opened.index.stamps
    assert stamps is not None
    found = {id: int(stamp) for id, stamp in zip(featcache.open(cache), stamps.input, strict=True)}
    assert (found[id_of(1)], found[id_of(2)]) == (7, 2)


def test_ids_that_are_not_stored_are_not_deleted(cache: Path) -> None:
    with open_writer(cache) as writer:
        with pytest.raises(KeyNotFoundError, match="no utterance 'nobody' in cache"):
            writer.delete([id_of(1), "nobody"])
        with pytest.raises(ConfigError, match="a list of strings, not 'spk1/utt-1'"):
            writer.delete(id_of(1))
        generation = featcache.open(cache).generation
        writer.delete([])
        assert featcache.open(cache).generation == generation
    check_cache(cache, ALL)
    with pytest.raises(ClosedError):
        writer.delete(ids(1))


# While a cache is overwritten


def test_readers_see_the_old_cache_while_the_new_one_loses_utterances(
    cache: Path, tmp_path: Path
) -> None:
    writer = open_writer(cache, overwrite=True)
    for number in range(4):
        writer.write(id_of(number), arrays_of(number + NEW))
    writer.delete(ids(1, 2))
    check_cache(cache, ALL)
    assert [id in writer for id in ids(0, 1, 2)] == [True, False, False]
    assert sorted(committed(cache)) == sorted(ids(0, 3))
    with PartWriter(cache, two_features(), FINGERPRINT) as part:
        assert [id in part for id in ids(0, 1)] == [True, False]
        part.write(id_of(1), arrays_of(1 + 2 * NEW))
    copy = kill(writer, cache, tmp_path / "killed")
    writer.abort()
    check_cache(copy, ALL)
    with open_writer(copy, overwrite=True) as writer:
        assert [id in writer for id in ids(0, 1, 2)] == [True, True, False]
        writer.write(id_of(2), arrays_of(2 + 2 * NEW))
        writer.expect(ids(0, 1, 2, 3))
    again = {id_of(number): arrays_of(number + NEW) for number in (0, 3)}
    again |= {id_of(number): arrays_of(number + 2 * NEW) for number in (1, 2)}
    assert_holds(featcache.open(copy, verify="arrays"), again)


def test_an_overwrite_that_is_given_up_leaves_no_deletions(cache: Path) -> None:
    writer = open_writer(cache, overwrite=True)
    write(writer, [0, 1])
    writer.delete(ids(0))
    writer._work.keep()
    with open_writer(cache):
        pass
    check_cache(cache, ALL)
    assert b"building_parts" not in (cache / NAME).read_bytes()


# A manifest that is lost


def test_what_was_deleted_stays_so_without_the_manifest(cache: Path) -> None:
    """Or the first part that holds an utterance would be served, which is the old one."""
    with open_writer(cache) as writer:
        writer.delete(ids(1, 2))
        writer.write(id_of(1), arrays_of(1 + NEW))
    (cache / NAME).unlink()
    with open_writer(cache) as writer:
        assert id_of(2) not in writer
        write(writer, [2])
    expected = oracle(ALL) | {id_of(1): arrays_of(1 + NEW)}
    assert_holds(featcache.open(cache, verify="arrays"), expected)


def test_tombstones_that_a_killed_writer_left_torn_do_not_count(cache: Path) -> None:
    with open_writer(cache) as writer:
        writer.delete(ids(1))
    (whole,) = cache.glob("parts/*/tombstones-*.columns")
    whole.write_bytes(whole.read_bytes()[:-9])
    (cache / NAME).unlink()
    with open_writer(cache) as writer:
        assert id_of(1) in writer
    check_cache(cache, ALL)


@pytest.mark.parametrize("backend", featcache.registry.backend_names())
def test_utterances_of_every_format_are_deleted(tmp_path: Path, backend: str) -> None:
    features = [FeatureStorageConfig("fbank", backend=backend)]
    with CacheWriter(tmp_path, features) as writer:
        for number in range(1, 6):
            writer.write(id_of(number), {"fbank": arrays_of(number)["fbank"]})
        writer.delete(ids(1, 4))
    opened = featcache.open(tmp_path, verify="arrays")
    assert list(opened) == sorted(ids(2, 3, 5))
    frames = np.concatenate([opened[id]["fbank"] for id in opened]).astype(np.float64)
    np.testing.assert_allclose(opened.stats("fbank").mean, frames.mean(axis=0), rtol=1e-12)


def test_a_deletion_costs_nothing_elsewhere(tmp_path: Path) -> None:
    """A part in which nothing is deleted stays as it is."""
    make_cache(tmp_path, range(3))
    (part,) = tmp_path.glob("parts/*")
    before = sorted(part.iterdir())
    with open_writer(tmp_path) as writer:
        write(writer, [5])
        writer.delete(ids(5))
    assert sorted(part.iterdir()) == before
