"""A disk that fills up, files that run out, formats that refuse: the writer stays usable where that
is promised.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from store_helpers import FINGERPRINT, check_cache, id_of, make_cache, two_features, write
from store_scripts import run_script

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.container_files import FeatureFilesWriter
from featcache.errors import FeatureError, StorageFullError
from featcache.registry import get_backend
from featcache.writing.background import Background

CODED = [
    (backend, codec)
    for backend in featcache.registry.backend_names()
    for codec in get_backend(backend).codecs
]


def frames(number: int, rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(number).standard_normal((rows, 40)).astype(np.float32)


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize(("backend", "codec"), CODED)
def test_a_writer_that_fills_the_disk_seals_and_publishes_what_it_took(
    small_disk: Path, backend: str, codec: str, rows: int
) -> None:
    features = [FeatureStorageConfig("fbank", backend=backend, codec=codec, stats=True)]
    path = small_disk / "cache"
    taken = 0
    with (  # noqa: PT012
        pytest.raises(
            StorageFullError, match="are committed and kept: free some space and run the same again"
        ),
        CacheWriter(path, features) as writer,
    ):
        while True:
            writer.write(f"{taken:05}", {"fbank": frames(taken, rows)})
            taken += 1
            if taken % 10 == 0:
                writer.commit()
    cache = featcache.open(path, verify="arrays")
    assert (len(cache), cache.complete) == (taken, False)
    assert taken > 20
    if codec not in ("lilcom", "int8"):  # which round
        np.testing.assert_array_equal(cache.read("00007", "fbank"), frames(7, rows))
    assert list(path.glob("parts/*/journal.jsonl")) == []


def test_after_a_kill_on_a_full_disk_the_error_says_the_bytes_that_are_needed(
    small_disk: Path,
) -> None:
    script = """
features = [FeatureStorageConfig("fbank", backend="hdf5")]
with CacheWriter(path / "cache", features) as writer:
    if len(sys.argv) > 2:
        for number in range(8):
            writer.write(f"{number:02}", {"fbank": np.full((1000, 40), number, np.float32)})
        writer.commit()
        os._exit(9)
"""
    assert run_script(script, small_disk, "kill").returncode == 9
    for free in (0, 1_000_000, 1_280_000, 1_350_000):
        leave_free(small_disk, free)
        done = run_script(script, small_disk)
        assert "StorageFullError" in done.stderr, (free, done.stderr)
        needed = done.stderr.split("which needs ")[-1].split(":")[0]
        assert 1_280_000 < int(needed.replace(",", "")) < 2_560_000
    leave_free(small_disk, int(needed.replace(",", "")) + 65536)
    done = run_script(script, small_disk)
    assert done.returncode == 0, done.stderr
    (small_disk / "filling").unlink()
    cache = featcache.open(small_disk / "cache", verify="arrays")
    assert [int(cache.read(id, "fbank")[7, 7]) for id in cache] == list(range(8))


def leave_free(path: Path, nbytes: int) -> None:
    filling = path / "filling"
    filling.unlink(missing_ok=True)
    with filling.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(shutil.disk_usage(path).free - nbytes, 1))


def shards(path: Path, count: int) -> Path:
    options = {"shard_bytes": 1}
    with CacheWriter(
        path, [FeatureStorageConfig("fbank", backend="webdataset", options=options)]
    ) as writer:
        for number in range(count):
            writer.write(f"{number:04}", {"fbank": np.full((2, 3), number, np.float32)})
    return path


def test_a_working_set_below_the_limit_is_opened_once(tmp_path: Path) -> None:
    script = """
import resource
from featcache.reading.containers import Containers
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))  # 40 containers may be open
opened = 0
open_file = Containers._open_file
def counted(*args):
    global opened
    opened += 1
    return open_file(*args)
Containers._open_file = counted
for mapped in (True, False):
    cache = featcache.open(path, mapped=mapped)
    random = np.random.default_rng(0)
    opened = 0
    for number in random.integers(0, 35, 3000).tolist():
        assert (cache.read(f"{number:04}", "fbank") == number).all()
    assert opened == 35, opened
    # the working set moves on: each of the new ones is opened, and hardly any twice
    for number in random.integers(60, 95, 3000).tolist():
        assert (cache.read(f"{number:04}", "fbank") == number).all()
    assert opened < 35 + 35 + 45, opened
    # one that is larger: everything is right, however often it is opened
    for number in random.integers(0, 200, 3000).tolist():
        assert (cache.read(f"{number:04}", "fbank") == number).all()
    found = cache.read_batch(list(cache), "fbank").data[:, 0, 0]
    assert found.tolist() == list(range(200))
    assert len(os.listdir("/proc/self/fd")) < 120
"""
    done = run_script(script, shards(tmp_path / "cache", 200))
    assert done.returncode == 0, done.stderr


def test_commit_returns_while_other_threads_keep_writing(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        ended = threading.Event()
        numbers: Iterator[int] = iter(range(10**9))
        guard = threading.Lock()

        def write_on() -> None:
            while not ended.is_set():
                with guard:
                    number = next(numbers)
                writer.write(str(number), {"fbank": np.zeros((50, 80), np.float32)})

        threads = [threading.Thread(target=write_on) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                before = len(writer)
                assert writer.commit() >= before  # and returns, or the test runs out of time
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    assert len(featcache.open(tmp_path)) == next(numbers)


def test_a_stopped_thread_takes_nothing_more() -> None:
    background = Background(lambda _: None, 10, 100, contextlib.nullcontext())
    background.put(lambda: None, 1000, 1000)
    background.stop(finish=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has been stopped"):
            background.put(lambda: None, 1000, 1000)
    background.drain()


def test_one_who_waits_for_room_is_woken_by_a_stop() -> None:
    release = threading.Event()
    background = Background(lambda _: None, 10, 100, contextlib.nullcontext())
    background.put(release.wait, 100, 100)
    raised: list[BaseException] = []

    def put() -> None:
        try:
            background.put(lambda: None, 100, 100)
        except RuntimeError as error:
            raised.append(error)

    waiting = threading.Thread(target=put)
    waiting.start()
    time.sleep(0.05)
    threading.Timer(0.1, release.set).start()
    background.stop(finish=False)
    waiting.join(10)
    assert not waiting.is_alive()


class Refusing:
    """A container that refuses an id, in `check` or in `append_many`."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str) -> None:
        call = getattr(FeatureFilesWriter, method, None)

        def refuse(writer: FeatureFilesWriter, ids: Any, arrays: Mapping[str, Any]) -> Any:
            if id_of(3) in ([ids] if method == "check" else ids):
                raise FeatureError(f"utterance {id_of(3)!r}: this format holds no such thing")
            return None if call is None else call(writer, ids, arrays)

        patch.setattr(FeatureFilesWriter, method, refuse, raising=False)


def test_what_a_format_refuses_before_it_writes_is_an_error_of_that_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Refusing(monkeypatch, "check")
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(3))
        for _ in range(2):
            with pytest.raises(FeatureError, match="holds no such thing"):
                write(writer, [3])
            assert id_of(3) not in writer
        write(writer, range(4, 7))
        assert writer.commit() == 6
    check_cache(tmp_path, [0, 1, 2, 4, 5, 6])


def test_what_a_format_refuses_while_it_writes_leaves_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Refusing(patch, "append_many")
        with (  # noqa: PT012
            pytest.raises(
                FeatureError, match="utterance 'spk3/utt-3': this format holds no such thing"
            ),
            CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer,
        ):
            write(writer, range(3))
            assert writer.commit() == 3
            write(writer, [3])
            writer.commit()
    make_cache(tmp_path, range(4, 6))
    check_cache(tmp_path, [0, 1, 2, 4, 5])


def test_one_lost_part_of_several_is_computed_again_and_a_lost_container_is_not(
    tmp_path: Path,
) -> None:
    for first in (0, 3, 6):
        make_cache(tmp_path, range(first, first + 3))
    one, other, _ = sorted((tmp_path / "parts").iterdir())
    (one / "fbank.npy").unlink()
    message = (
        r"fbank.npy' is missing; .*put it back, or remove its part, '.*', "
        "to compute its utterances again"
    )
    for overwrite in (False, True):
        with pytest.raises(featcache.errors.CorruptCacheError, match=message):
            CacheWriter(tmp_path, two_features(), FINGERPRINT, overwrite=overwrite)
    shutil.rmtree(one)
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        missing = [number for number in range(9) if id_of(number) not in writer]
        assert len(missing) == 3
        write(writer, missing)
    check_cache(tmp_path, range(9))
    assert other.exists()
