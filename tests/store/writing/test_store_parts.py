"""Several writers, one cache: parts of their own, joined when they are published."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import TESTS
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
from featcache.container_files import lock
from featcache.errors import CacheLockedError, DuplicateIdError, FeatureError
from featcache.format import read_journal
from featcache.writing import part_writer, recover
from featcache.writing.part_writer import PartWriter


def write_part(path: Path, numbers: range) -> None:
    with PartWriter(path, two_features(), FINGERPRINT) as writer:
        for number in numbers:
            writer.write(id_of(number), arrays_of(number))


def part_names(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "parts").iterdir())


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_write_parts_at_once_while_one_holds_the_cache(
    tmp_path: Path, method: str
) -> None:
    context: Any = multiprocessing.get_context(method)
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        processes = [
            context.Process(target=write_part, args=(tmp_path, range(i, 40, 4)))
            for i in range(1, 4)
        ]
        for process in processes:
            process.start()
        write(writer, range(0, 40, 4))
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert len(featcache.open(tmp_path)) == 0  # nothing is seen before it is published
        writer.publish()
        check_cache(tmp_path, range(40), complete=False)
    check_cache(tmp_path, range(40))
    assert len(part_names(tmp_path)) == 4


def test_the_order_of_rows_does_not_depend_on_who_wrote_them(tmp_path: Path) -> None:
    make_cache(tmp_path / "alone", range(40))
    with CacheWriter(tmp_path / "shared", two_features(), FINGERPRINT) as writer:
        threads = [
            threading.Thread(target=write_part, args=(tmp_path / "shared", range(i, 40, 3)))
            for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.publish()
    check_cache(tmp_path / "shared", range(40))
    assert list(featcache.open(tmp_path / "alone")) == list(featcache.open(tmp_path / "shared"))


def test_a_part_writer_knows_what_is_published_and_what_is_sealed(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write_part(tmp_path, range(3, 5))
        with PartWriter(tmp_path, two_features(), FINGERPRINT) as second:
            assert [number for number in range(9) if id_of(number) in second] == [0, 1, 2, 3, 4]
            with pytest.raises(DuplicateIdError, match="already; skip it"):
                second.write(id_of(4), arrays_of(4))
        write(writer, [5])
    check_cache(tmp_path, range(6))


def test_of_an_utterance_in_two_parts_the_first_stands_and_the_other_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        with (
            PartWriter(tmp_path, two_features(), FINGERPRINT) as one,
            PartWriter(tmp_path, two_features(), FINGERPRINT) as other,
        ):
            one.write(id_of(1), arrays_of(1))
            one.write(id_of(2), arrays_of(2))
            first = part_names(tmp_path)
            other.write(id_of(2), arrays_of(2002))
            other.write(id_of(4), arrays_of(4))
            second = [name for name in part_names(tmp_path) if name not in first]
        write(writer, [3])
    stands = arrays_of(2 if first < second else 2002)
    assert f"1 utterances were stored twice ({id_of(2)!r})" in caplog.text
    expected = oracle(range(1, 5)) | {id_of(2): stands}
    assert_holds(featcache.open(tmp_path, verify="arrays"), expected)
    make_cache(tmp_path, [5])  # what was left out stays so
    assert_holds(featcache.open(tmp_path, verify="arrays"), expected | oracle([5]))
    assert caplog.text.count("stored twice") == 1


def test_parts_of_other_dimensions_are_refused_with_both_named(tmp_path: Path) -> None:
    features = [FeatureStorageConfig("fbank")]
    message = r"'fbank' has frames of shape \(\d,\) in part '.*' and of \(\d,\) in '.*'; remove"
    with pytest.raises(FeatureError, match=message):  # noqa: PT012, SIM117
        with CacheWriter(tmp_path, features):
            with PartWriter(tmp_path, features) as one, PartWriter(tmp_path, features) as other:
                one.write("a", {"fbank": np.zeros((2, 3))})
                other.write("b", {"fbank": np.zeros((2, 4))})


def test_a_part_rolls_over_by_rows_and_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "PART_ROWS", 4)
    make_cache(tmp_path / "rows", range(10))
    check_cache(tmp_path / "rows", range(10))
    assert len(part_names(tmp_path / "rows")) == 3
    monkeypatch.setattr(part_writer, "PART_ROWS", 100)
    monkeypatch.setattr(part_writer, "PART_BYTES", 200)
    make_cache(tmp_path / "bytes", range(1, 11))
    check_cache(tmp_path / "bytes", range(1, 11))
    assert 3 < len(part_names(tmp_path / "bytes")) < 10


def test_a_hundred_parts_need_few_open_files(tmp_path: Path) -> None:
    program = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from featcache import CacheWriter
from featcache.writing import part_writer
from store_helpers import FINGERPRINT, arrays_of, check_cache, id_of, make_cache, two_features
path = Path(sys.argv[2])
part_writer.PART_ROWS = 1
with CacheWriter(path, two_features(), FINGERPRINT) as writer:
    with part_writer.PartWriter(path, two_features(), FINGERPRINT) as parts:
        for number in range(100):
            parts.write(id_of(number), arrays_of(number))
    writer.abort()
part_writer.PART_ROWS = 100
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
make_cache(path, range(100, 103))
make_cache(path, range(103, 105))
check_cache(path, range(105))
"""
    arguments = [sys.executable, "-c", program, str(TESTS), str(tmp_path / "cache")]
    subprocess.run(arguments, check=True, timeout=100)


def test_a_part_that_is_sealed_during_recovery_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    survivor = PartWriter(tmp_path, two_features(), FINGERPRINT)
    survivor.write(id_of(1), arrays_of(1))
    first.abort()
    with pytest.raises(
        CacheLockedError, match=r"part .* is still being written by process .* end that first"
    ):
        CacheWriter(tmp_path, two_features(), FINGERPRINT)

    locked = lock.WriterLock

    def seal_just_before(directory: Path) -> lock.WriterLock:
        survivor.close()
        return locked(directory)

    monkeypatch.setattr(recover, "is_locked", lambda directory: False)  # it came just after that
    monkeypatch.setattr(recover, "WriterLock", seal_just_before)
    make_cache(tmp_path, range(2, 4))
    check_cache(tmp_path, range(1, 4))


def test_parts_without_anything_committed_are_removed(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    for number, journal in enumerate((None, b'["0123', b"\0" * 100)):
        part = tmp_path / "parts" / f"20261121T082532-0000000{number}"
        part.mkdir()
        if journal is not None:
            (part / "journal.jsonl").write_bytes(journal)
        assert read_journal(tmp_path, f"parts/{part.name}") is None
    make_cache(tmp_path, range(3, 5))
    check_cache(tmp_path, range(5))
    assert len(part_names(tmp_path)) == 2


@pytest.mark.parametrize("before", [True, False])
def test_what_others_keep_among_the_parts_is_left_alone(tmp_path: Path, before: bool) -> None:
    if not before:
        make_cache(tmp_path, range(3))
    mine = [
        tmp_path / "parts" / name
        for name in ("notes.txt", "arm/left.stl", "20261121T082532-0000000/x")
    ]
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    make_cache(tmp_path, range(3, 5))
    make_cache(tmp_path, range(3), overwrite=True)
    check_cache(tmp_path, range(3))
    assert [file.read_text() for file in mine] == ["mine"] * 3


def test_a_writer_of_nothing_publishes_an_empty_complete_cache(tmp_path: Path) -> None:
    make_cache(tmp_path, [])
    cache = featcache.open(tmp_path, verify="arrays")
    assert (len(cache), list(cache), cache.complete) == (0, [], True)
    assert cache.read_batch([], "fbank").data.shape[0] == 0
    assert cache.stats("fbank").count == 0
    assert "anything" not in cache
    with pytest.raises(featcache.FeatcacheError, match="the cache is empty"):
        cache.read("anything", "fbank")


def test_publishing_the_same_twice_changes_nothing(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    before = (tmp_path / "featcache.json").read_bytes()
    make_cache(tmp_path, [])
    assert (tmp_path / "featcache.json").read_bytes() == before
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        writer.publish(complete=True)
        writer.publish(complete=True)
    assert (tmp_path / "featcache.json").read_bytes() == before


def test_features_may_share_a_backend_with_other_options(tmp_path: Path) -> None:
    features = [
        FeatureStorageConfig("fbank", backend="webdataset", options={"shard_bytes": 4096}),
        FeatureStorageConfig("units", dtype="int16", backend="webdataset"),
    ]
    make_cache(tmp_path, range(20), features)
    check_cache(tmp_path, range(20))
    (part,) = (tmp_path / "parts").iterdir()
    assert len(list((part / "fbank").glob("shard-*.tar"))) > 1
    assert [entry.name for entry in (part / "units").iterdir()] == ["shard-000000.tar"]
    assert_holds(featcache.open(tmp_path, mapped=False), oracle(range(20)))


def test_the_header_of_a_journal_is_durable_before_lines_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[int] = []  # of the journal, at each sync of it
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        for journal in tmp_path.glob("parts/*/journal.jsonl"):
            if os.path.sameopenfile(descriptor, (opened := journal.open("rb")).fileno()):
                lines.append(len(opened.readlines()))
            opened.close()

    monkeypatch.setattr(os, "fsync", noted)
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        writer.write("utt-1", {"fbank": np.zeros((3, 2), np.float32)})
        writer.commit()
    assert lines == [1, 3]
