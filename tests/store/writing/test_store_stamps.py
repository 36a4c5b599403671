"""Stamps: stored with an utterance, given anew, and kept through all that happens to a cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import FINGERPRINT, arrays_of, check_cache, id_of, make_cache, two_features

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ClosedError, ConfigError, KeyNotFoundError
from featcache.format import UNKNOWN, Stamps, journal, read_manifest
from featcache.writing.part_writer import PartWriter

MOST = 2**64 - 1


def stamps_of(number: int) -> Stamps:
    """Stamps of which some are as large as they can be, and some unknown."""
    return Stamps(MOST - number, 0 if number % 3 == 0 else number << 40)


def write(writer: CacheWriter | PartWriter, *numbers: int, stamped: bool = True) -> None:
    for number in numbers:
        stamps = stamps_of(number) if stamped else UNKNOWN
        writer.write(id_of(number), arrays_of(number), stamps=stamps)


def open_writer(path: Path, **settings: Any) -> CacheWriter:
    return CacheWriter(path, two_features(), FINGERPRINT, **settings)


def stamps_in(path: Path) -> dict[str, Stamps]:
    """The stamps that readers see; all files are verified."""
    cache = featcache.open(path, verify="arrays", check_reads=True)
    columns = cache.opened.index.stamps
    assert columns is not None
    assert {column.dtype for column in columns} == {np.dtype(np.uint64)}
    return {
        id: Stamps(*pair)
        for id, *pair in zip(cache, *(column.tolist() for column in columns), strict=True)
    }


def expected(*numbers: int) -> dict[str, Stamps]:
    return {id_of(number): stamps_of(number) for number in numbers}


def test_stamps_are_read_in_the_order_of_rows(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        write(writer, *range(9))
    assert stamps_in(tmp_path) == expected(*range(9))
    assert read_manifest(tmp_path).requires_to_write == ("stamps",)
    check_cache(tmp_path, range(9))


def test_a_cache_without_stamps_has_no_columns_of_them(tmp_path: Path) -> None:
    make_cache(tmp_path, range(4))
    assert featcache.open(tmp_path).opened.index.stamps is None
    assert read_manifest(tmp_path).requires_to_write == ()
    for path in tmp_path.rglob("*.columns"):
        assert b'"input"' not in path.read_bytes()
        assert b'"entry"' not in path.read_bytes()


def test_lines_without_stamps_are_not_longer(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        write(writer, 0, 1, stamped=False)
        writer.commit()
        (plain,) = tmp_path.glob("parts/*/journal.jsonl")
        lines = plain.read_bytes().splitlines()
        assert b"}],[" in lines[1]  # the arrays of an utterance are the last of it
        assert lines[1].endswith(b"}]]}]")


def test_stamps_of_some_utterances_of_some_parts_are_0_for_the_others(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        write(writer, 0, 1, stamped=False)
        writer.publish()
        write(writer, 2, 3)
        write(writer, 4, stamped=False)
    with open_writer(tmp_path) as writer:
        write(writer, 5)
    unknown = dict.fromkeys(map(id_of, (0, 1, 4)), Stamps())
    assert stamps_in(tmp_path) == expected(2, 3, 5) | unknown
    columns = [path.read_bytes() for path in tmp_path.glob("parts/*/index.columns")]
    assert sorted(b'"input"' in data for data in columns) == [False, True, True]


def test_part_writers_stamp(tmp_path: Path) -> None:
    with open_writer(tmp_path), PartWriter(tmp_path, two_features(), FINGERPRINT) as part:
        write(part, 1, 2)
    assert stamps_in(tmp_path) == expected(1, 2)


@pytest.mark.parametrize("backend", featcache.registry.backend_names())
def test_stamps_outlive_a_writer_that_died(tmp_path: Path, backend: str) -> None:
    """Of formats whose files are finished where they lie, and of those that are copied."""
    features = [
        FeatureStorageConfig("fbank", backend=backend),
        FeatureStorageConfig("units", dtype="int16"),
    ]
    writer = CacheWriter(tmp_path / "a", features, FINGERPRINT)
    write(writer, *range(70), stamped=False)
    write(writer, 70, 71)
    writer.commit()
    copy = tmp_path / "b"
    shutil.copytree(tmp_path / "a", copy)
    writer.abort()
    with CacheWriter(copy, features, FINGERPRINT):
        pass
    found = stamps_in(copy)
    assert {id: each for id, each in found.items() if each != Stamps()} == expected(70, 71)


@pytest.mark.parametrize(
    "wrong", [("x", 1), (1,), (1, 2, 3), (-1, 0), (MOST + 1, 0), (1.5, 0), 7, None]
)
def test_what_are_no_stamps_is_refused_and_nothing_stored(tmp_path: Path, wrong: Any) -> None:
    with open_writer(tmp_path) as writer:
        write(writer, 1)
        with pytest.raises(ConfigError, match=r"stamps of utterance .* two numbers from 0"):
            writer.write("a", arrays_of(3), stamps=wrong)
        with pytest.raises(ConfigError, match=r"stamps of utterance .* two numbers from 0"):
            writer.restamp({id_of(1): wrong})
        writer.write("b", arrays_of(4), stamps=(np.uint64(3), np.int64(4)))  # type: ignore[arg-type]
    assert stamps_in(tmp_path) == expected(1) | {"b": Stamps(3, 4)}


# Other stamps of what is stored


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of a part with stamps and one without."""
    with open_writer(tmp_path) as writer:
        write(writer, 0, 1, 2)
        writer.publish()
        write(writer, 3, 4, stamped=False)
    return tmp_path


BEFORE = expected(0, 1, 2) | dict.fromkeys(map(id_of, (3, 4)), Stamps())


def test_other_stamps_are_published_with_the_next_publish(cache: Path) -> None:
    new = {id_of(1): Stamps(1, 2), id_of(4): Stamps(3, 4), id_of(5): Stamps(5, 6)}
    with open_writer(cache) as writer:
        write(writer, 5)
        writer.restamp(new)
        assert stamps_in(cache) == BEFORE
        writer.publish()
        assert stamps_in(cache) == BEFORE | new
    assert stamps_in(cache) == BEFORE | new
    check_cache(cache, range(6))


def test_other_stamps_of_what_is_written_now(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        write(writer, 1, 2)
        writer.restamp({id_of(1): Stamps(1, 1)})
        writer.restamp({id_of(1): Stamps(2, 2)})
    assert stamps_in(tmp_path) == expected(2) | {id_of(1): Stamps(2, 2)}


def test_old_stamps_are_removed_once_nobody_reads_them(cache: Path) -> None:
    for number in range(5):
        with open_writer(cache) as writer:
            writer.restamp({id_of(1): Stamps(number, 7)})
    assert len(list(cache.glob("parts/*/stamps-*.columns"))) == 2
    assert stamps_in(cache)[id_of(1)] == Stamps(4, 7)


def test_equal_stamps_are_not_written_again(cache: Path) -> None:
    with open_writer(cache) as writer:
        writer.restamp(expected(1) | {id_of(3): Stamps()})
    assert list(cache.glob("parts/*/stamps-*.columns")) == []
    assert stamps_in(cache) == BEFORE


def test_stamps_of_a_writer_that_gives_up_are_forgotten(cache: Path) -> None:
    writer = open_writer(cache)
    writer.restamp({id_of(1): Stamps(1, 2)})
    writer.abort()
    assert stamps_in(cache) == BEFORE


def test_ids_that_are_not_stored_get_no_stamps(cache: Path) -> None:
    with open_writer(cache) as writer:
        with pytest.raises(KeyNotFoundError, match="no utterance 'nobody' in cache"):
            writer.restamp({id_of(1): Stamps(1, 2), "nobody": Stamps(1, 2)})
        writer.restamp({})
    assert stamps_in(cache) == BEFORE
    with pytest.raises(ClosedError):
        writer.restamp({id_of(1): Stamps(1, 2)})


def test_an_overwrite_has_stamps_of_its_own(cache: Path) -> None:
    with open_writer(cache, overwrite=True) as writer:
        write(writer, 1, stamped=False)
        with pytest.raises(KeyNotFoundError):
            writer.restamp({id_of(2): Stamps(1, 2)})
        writer.restamp({id_of(1): Stamps(8, 9)})
    assert stamps_in(cache) == {id_of(1): Stamps(8, 9)}
    with open_writer(cache, overwrite=True) as writer:
        write(writer, 1, stamped=False)
    assert featcache.open(cache).opened.index.stamps is None
    assert read_manifest(cache).requires_to_write == ()


def test_stamps_that_are_damaged_or_lost_are_found(cache: Path) -> None:
    with open_writer(cache) as writer:
        writer.restamp({id_of(1): Stamps(1, 2)})
    (path,) = cache.glob("parts/*/stamps-*.columns")
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(bytes([*whole[:place], whole[place] ^ 4, *whole[place + 1 :]]))
        with pytest.raises(featcache.errors.CorruptCacheError, match=path.name):
            featcache.open(cache, verify="columns")
    path.unlink()
    with pytest.raises(featcache.errors.CorruptCacheError, match=path.name):
        featcache.open(cache, verify="columns")
    assert len(featcache.open(cache)) == 5


def test_many_parts_and_lines_keep_stamps_and_utterances_together(tmp_path: Path) -> None:
    numbers = range(3 * journal.LINE_UTTERANCES)
    with open_writer(tmp_path) as writer:
        for start in range(0, len(numbers), 50):
            write(writer, *numbers[start : start + 50])
            writer.publish()
        writer.restamp({id_of(number): Stamps(number, 1) for number in numbers if number % 2})
    assert stamps_in(tmp_path) == {
        id_of(number): Stamps(number, 1) if number % 2 else stamps_of(number) for number in numbers
    }
