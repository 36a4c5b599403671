"""A cache is complete when each expected utterance is stored or has failed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    assert_holds,
    id_of,
    make_cache,
    oracle,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter
from featcache.errors import ConfigError, FeatureError
from featcache.writing.part_writer import PartWriter

IDS = [id_of(number) for number in range(6)]


def state(path: Path) -> tuple[bool, int | None, tuple[str, ...]]:
    cache = featcache.open(path, verify="columns")
    return cache.complete, cache.expected, cache.failed


def make(
    path: Path, numbers: range | list[int], failed: list[int], *, overwrite: bool = False
) -> None:
    with CacheWriter(path, two_features(), FINGERPRINT, overwrite=overwrite) as writer:
        writer.expect(IDS)
        write(writer, [number for number in numbers if id_of(number) not in writer])
        for number in failed:
            writer.fail(id_of(number))


@pytest.mark.parametrize(
    ("stored", "failed", "complete"),
    [
        (range(6), [], True),
        (range(5), [], False),
        (range(4), [4, 5], True),
        (range(4), [4], False),
        ([], list(range(6)), True),
        ([], [], False),
    ],
)
def test_complete_means_that_each_expected_id_is_stored_or_failed(
    tmp_path: Path, stored: range, failed: list[int], complete: bool
) -> None:
    make(tmp_path, stored, failed)
    expected_failed = tuple(sorted(id_of(number) for number in failed))
    assert state(tmp_path) == (complete, 6, expected_failed)
    assert_holds(featcache.open(tmp_path), oracle(stored))


def test_what_failed_is_remembered_until_it_is_stored(tmp_path: Path) -> None:
    make(tmp_path, range(3), [3, 4, 5])
    assert state(tmp_path) == (True, 6, tuple(sorted(IDS[3:])))
    make(tmp_path, [3], [])
    assert state(tmp_path) == (True, 6, tuple(sorted(IDS[4:])))
    make(tmp_path, [4], [4])  # failed, and came at another try
    assert state(tmp_path) == (True, 6, (IDS[5],))
    make(tmp_path, [5], [])
    assert state(tmp_path) == (True, 6, ())


def test_what_failed_is_forgotten_by_an_overwrite(tmp_path: Path) -> None:
    make(tmp_path, range(3), [3, 4, 5])
    make(tmp_path, range(3), [], overwrite=True)
    assert state(tmp_path) == (False, 6, ())
    make(tmp_path, range(5), [5], overwrite=True)
    assert state(tmp_path) == (True, 6, (IDS[5],))


def test_an_interrupted_overwrite_leaves_what_failed_before_to_the_old_cache(
    tmp_path: Path,
) -> None:
    make(tmp_path, range(3), [3, 4, 5])
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        CacheWriter(tmp_path, two_features(), FINGERPRINT, overwrite=True) as writer,
    ):
        writer.fail(IDS[0])
        raise ZeroDivisionError
    assert state(tmp_path) == (True, 6, tuple(sorted(IDS[3:])))


def test_ids_that_are_stored_and_not_expected_are_counted(tmp_path: Path) -> None:
    make_cache(tmp_path, [100, 101])
    make(tmp_path, range(6), [])
    assert state(tmp_path) == (True, 8, ())


def test_a_writer_that_expects_nothing_says_itself_whether_the_cache_is_complete(
    tmp_path: Path,
) -> None:
    make(tmp_path, range(3), [3])
    assert state(tmp_path) == (False, 6, (IDS[3],))
    make_cache(tmp_path, [100])
    assert state(tmp_path) == (True, None, (IDS[3],))
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    write(writer, [101])
    writer.close(complete=False)
    assert state(tmp_path) == (False, None, (IDS[3],))


def test_each_publish_tells_how_far_it_is(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        writer.expect(iter(IDS))
        write(writer, range(3))
        writer.publish(complete=True)  # it is not
        assert state(tmp_path) == (False, 6, ())
        write(writer, range(3, 5))
        writer.fail(IDS[5])
        writer.publish()
        assert state(tmp_path) == (True, 6, (IDS[5],))
        write(writer, [5])
    assert state(tmp_path) == (True, 6, ())


def test_the_last_that_is_expected_counts(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        writer.expect(IDS)
        write(writer, range(3))
        writer.expect(IDS[:3])
    assert state(tmp_path) == (True, 3, ())


def test_what_part_writers_store_counts(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        writer.expect(IDS)
        with PartWriter(tmp_path, two_features(), FINGERPRINT) as part:
            for number in range(6):
                part.write(id_of(number), arrays_of(number))
    assert state(tmp_path) == (True, 6, ())


def test_an_error_at_the_very_end_does_not_make_a_whole_cache_incomplete(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer,
    ):
        writer.expect(IDS)
        write(writer, range(6))
        raise ZeroDivisionError
    assert state(tmp_path) == (True, 6, ())


def test_expected_ids_come_as_a_list_of_strings(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        for ids in ("utt-1", 6):
            with pytest.raises(ConfigError, match="the expected ids are a list of strings, not"):
                writer.expect(ids)  # type: ignore[arg-type]
        for id in ("", "a\0b", "\ud800"):
            with pytest.raises(FeatureError, match="is not usable"):
                writer.fail(id)
    assert state(tmp_path) == (True, None, ())


def test_a_hundred_thousand_expected_ids_cost_little(tmp_path: Path) -> None:
    ids = [f"speaker-{number % 1000:04}/utterance-{number:08}" for number in range(100_000)]
    make_cache(tmp_path, range(10))
    started = time.process_time()
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        writer.expect([*ids, *map(id_of, range(10))])
        for id in ids[:50_000]:
            writer.fail(id)
    assert time.process_time() - started < 8  # 1 s on a quiet machine
    complete, expected, failed = state(tmp_path)
    assert (complete, expected) == (False, 100_010)
    assert list(failed) == sorted(ids[:50_000])
