"""Storing overlaps with computing, within bounds, and no error of the other thread is lost."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    check_cache,
    id_of,
    make_cache,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.container_files import EncodedArrays, Extents, FeatureFilesWriter
from featcache.errors import ClosedError, FeatureError, StorageFullError
from featcache.format import read_journal
from featcache.writing import free_space, queue
from featcache.writing.background import Background
from featcache.writing.queue import HandOver


@pytest.fixture(autouse=True)
def nothing_is_leaked() -> Iterator[None]:
    gc.collect()
    threads, files = set(threading.enumerate()), os.listdir("/proc/self/fd")  # noqa: PTH208
    yield
    gc.collect()
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == len(files)  # noqa: PTH208


class Gate:
    """Lets the background thread store when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.error: BaseException | None = None
        append_many = FeatureFilesWriter.append_many

        def gated(
            writer: FeatureFilesWriter, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]
        ) -> dict[str, Extents]:
            self.opened.wait()
            if self.error is not None:
                raise self.error
            return append_many(writer, ids, arrays)

        monkeypatch.setattr(FeatureFilesWriter, "append_many", gated)

        def add_at_once(queue: HandOver, *utterance: Any) -> None:
            add(queue, *utterance)
            queue._put_waiting()

        add = HandOver.add
        monkeypatch.setattr(HandOver, "add", add_at_once)
        monkeypatch.setattr(queue, "MOST_ROWS", 0)  # no memory beyond their own
        monkeypatch.setattr(queue, "LEAST_BYTES", 0)
        monkeypatch.setattr(queue, "NOTE_BYTES", 0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def utterance_bytes(numbers: range) -> int:
    return sum(array.nbytes for number in numbers for array in arrays_of(number).values())


def test_write_returns_before_the_bytes_are_stored(tmp_path: Path, gate: Gate) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(5))
        gate.opened.set()
    check_cache(tmp_path, range(5))


def test_the_queue_is_bounded_and_write_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr(queue, "QUEUE_BYTES", utterance_bytes(range(1, 4)))
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(1, 4))
        blocked = threading.Thread(target=write, args=(writer, [4]))
        blocked.start()
        blocked.join(0.2)
        assert blocked.is_alive()
        assert writer._parts._thread._background.queued_bytes == utterance_bytes(range(1, 4))
        gate.opened.set()
        blocked.join()
        assert writer._parts._thread._background.queued_bytes <= utterance_bytes(range(1, 5))
    check_cache(tmp_path, range(1, 5))


def test_short_utterances_count_in_the_queue_for_what_is_noted_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr(queue, "NOTE_BYTES", 1 << 10)
    monkeypatch.setattr(queue, "QUEUE_BYTES", 3 << 10)
    with CacheWriter(tmp_path, [FeatureStorageConfig("tokens", dtype="int16")]) as writer:
        write_three = threading.Thread(target=write_tokens, args=(writer, range(3)))
        write_three.start()
        write_three.join(0.2)
        assert write_three.is_alive()
        assert writer._parts._thread.nbytes < 100  # on the disk they take no more than their bytes
        gate.opened.set()
        write_three.join()
    assert len(featcache.open(tmp_path)) == 3


def write_tokens(writer: CacheWriter, numbers: range) -> None:
    for number in numbers:
        writer.write(id_of(number), {"tokens": np.ones(5 + number, np.int16)})


def test_an_utterance_larger_than_the_queue_passes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "QUEUE_BYTES", 1)
    make_cache(tmp_path, range(9))
    check_cache(tmp_path, range(9))


def test_an_error_wakes_a_writer_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr(queue, "QUEUE_BYTES", utterance_bytes(range(1, 3)))
    gate.error = OSError(errno.ENOSPC, "No space left on device")
    raised: list[BaseException] = []

    def write_on() -> None:
        try:
            write(writer, [3])
        except featcache.FeatcacheError as error:
            raised.append(error)

    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    write(writer, range(1, 3))
    blocked = threading.Thread(target=write_on)
    blocked.start()
    gate.opened.set()
    blocked.join()
    assert isinstance(raised[0], StorageFullError)
    with pytest.raises(StorageFullError):
        writer.close()


def test_an_error_of_the_thread_is_raised_by_the_next_write_and_by_close(
    tmp_path: Path, gate: Gate
) -> None:
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    gate.opened.set()
    write(writer, range(3))
    assert writer.commit() == 3
    gate.error = OSError(errno.EIO, "Input/output error")
    write(writer, [3])
    wait_for_end(writer._parts._thread._background)
    for call in (lambda: write(writer, [4]), writer.commit, writer.publish, writer.close):
        with pytest.raises(OSError, match="Input/output error"):
            call()
    gate.error = None
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        assert [number for number in range(9) if id_of(number) in writer] == [0, 1, 2]
        write(writer, range(3, 5))
    check_cache(tmp_path, range(5))


def wait_for_end(background: Background) -> None:
    background._thread.join(10)
    assert background.error is not None


def test_an_error_in_the_block_is_not_hidden_by_one_of_the_thread(
    tmp_path: Path, gate: Gate
) -> None:
    gate.error = OSError(errno.ENOSPC, "No space left on device")
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError) as error,
        CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer,
    ):
        write(writer, range(2))
        gate.opened.set()
        wait_for_end(writer._parts._thread._background)
        raise ZeroDivisionError
    assert any(
        "then closing the cache failed" in note and "is full" in note
        for note in error.value.__notes__
    )


def test_what_is_written_is_committed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "COMMIT_INTERVAL_S", 0.05)
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    write(writer, range(3))
    (part,) = (tmp_path / "parts").iterdir()
    deadline = time.monotonic() + 10
    while (journal := read_journal(tmp_path, f"parts/{part.name}")) is None or len(
        journal.utterances
    ) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer.abort()


def test_what_is_written_is_stored_in_its_order_when_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_many = FeatureFilesWriter.append_many
    stored: list[str] = []

    def slow(
        writer: FeatureFilesWriter, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]
    ) -> dict[str, Extents]:
        stored.extend(ids)
        time.sleep(0.01)
        return append_many(writer, ids, arrays)

    monkeypatch.setattr(FeatureFilesWriter, "append_many", slow)
    monkeypatch.setattr(queue, "MOST_ROWS", 8)
    monkeypatch.setattr(queue, "COMMIT_INTERVAL_S", 0.0)
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        for number in range(100):
            write(writer, range(number, number + 1))
            time.sleep(0.0005)
    assert stored == [id_of(number) for number in range(100)]
    check_cache(tmp_path, range(100))


def test_abort_drops_what_waits(tmp_path: Path, gate: Gate) -> None:
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    write(writer, range(1, 20))
    threading.Timer(0.1, gate.opened.set).start()
    writer.abort()
    assert list((tmp_path / "parts").iterdir()) == []
    time.sleep(0.15)


def test_a_thread_that_writes_while_another_closes_stores_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    stop = writer._parts._stop
    stored: list[int] = []

    def stop_late(**how: bool) -> None:
        time.sleep(0.1)
        stop(**how)

    monkeypatch.setattr(writer._parts, "_stop", stop_late)

    def write_on() -> None:
        with contextlib.suppress(ClosedError):
            for number in range(100_000):
                write(writer, [number])
                stored.append(number)

    thread = threading.Thread(target=write_on)
    thread.start()
    while not stored:
        time.sleep(0.001)
    writer.close()
    thread.join()
    check_cache(tmp_path, stored)


def test_a_part_of_nothing_but_refused_utterances_leaves_nothing(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank", backend="lilcom")]) as writer:
        with pytest.raises(FeatureError, match="utterance 'huge', feature 'fbank'"):
            writer.write("huge", {"fbank": np.full((5, 4), 1e30, np.float32)})
        assert len(list((tmp_path / "parts").iterdir())) == 1
    assert list((tmp_path / "parts").iterdir()) == []


def test_a_closed_writer_lets_go_of_its_files_at_once(tmp_path: Path) -> None:
    make_cache(tmp_path, range(9))
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        make_cache(tmp_path, range(9, 12))
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    finally:
        gc.enable()


def test_too_little_space_is_said_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_space, "LOOK_INTERVAL_S", 0)
    free = type("Usage", (), {"free": 1_100_000})
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(3))
        assert writer.commit() == 3
        monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
        message = r"1,100,000 bytes are free .* 160,000 .*; 3 utterances .* committed"
        with pytest.raises(StorageFullError, match=message):
            writer.write(
                "long", {"fbank": np.zeros((10_000, 4), np.float32), "units": np.zeros(0, np.int16)}
            )
        write(writer, [3])
    monkeypatch.undo()
    check_cache(tmp_path, range(4))


def test_a_disk_too_small_for_what_is_expected_is_a_warning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_200_000}))
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        writer.expect_more(100_000)
        with pytest.warns(
            UserWarning, match=r"will need about [0-9,]+ more bytes, only 1,200,000 are free"
        ) as warned:
            write(writer, range(110))
        assert len(warned) == 1
    monkeypatch.undo()
    check_cache(tmp_path, range(110))
