"""Utterances that are stored before `write_through` returns, mostly in the thread that calls it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStats, FeatureStorageConfig
from featcache.container_files import PagedFile
from featcache.errors import CacheError, FeatureError
from featcache.format import read_journal
from featcache.interface import Array
from featcache.writing.background import Background
from featcache.writing.part_writer import PartWriter

FBANK = [FeatureStorageConfig("fbank", dims=(4,))]


def array_of(number: int) -> Array:
    return np.random.default_rng(number).random((number + 1, 4), np.float32)


def elsewhere(call: Callable[[], object]) -> None:
    """Call in a thread that Ctrl-C does not come to."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def here(call: Callable[[], object]) -> None:
    call()


@pytest.mark.parametrize("called", [here, elsewhere])
def test_what_is_written_through_is_committed_behind_what_was_written(
    tmp_path: Path, called: Callable[[Callable[[], object]], None]
) -> None:
    CacheWriter(tmp_path, FBANK).close(complete=False)
    writer = PartWriter(tmp_path, FBANK)
    for number in range(0, 6, 2):
        writer.write(f"utt-{number}", {"fbank": array_of(number)})
        number += 1
        array = array_of(number)
        through = {"fbank": array}
        told = {"n": number}
        called(partial(writer.write_through, f"utt-{number}", through, annotations=told))
        array[:] = 0
        journal = read_journal(tmp_path, f"parts/{writer.parts[0]}")
        assert journal is not None
        assert [each.id for each in journal.utterances] == [f"utt-{n}" for n in range(number + 1)]
    writer.leave()
    CacheWriter(tmp_path, FBANK).close()
    cache = featcache.open(tmp_path, verify="arrays")
    assert len(cache) == 6
    for number in range(6):
        np.testing.assert_array_equal(cache.read(f"utt-{number}", "fbank"), array_of(number))
    assert list(cache.annotation("n")) == [None, 1, None, 3, None, 5]
    expected = FeatureStats.of(np.concatenate([array_of(number) for number in range(6)]))
    found = cache.stats("fbank")
    assert found.count == expected.count
    np.testing.assert_allclose(found.m2.tolist(), expected.m2.tolist(), rtol=1e-12)


@pytest.mark.parametrize("called", [here, elsewhere])
def test_numbers_that_are_not_finite_are_refused_and_nothing_of_them_is_stored(
    tmp_path: Path, called: Callable[[Callable[[], object]], None]
) -> None:
    CacheWriter(tmp_path, FBANK).close(complete=False)
    wrong = array_of(3)
    wrong[2, 1] = np.nan
    with PartWriter(tmp_path, FBANK) as writer:
        called(lambda: writer.write_through("utt-0", {"fbank": array_of(0)}))
        with pytest.raises(FeatureError, match=r"'utt-1'.*nan at \(2, 1\) is not finite"):
            called(lambda: writer.write_through("utt-1", {"fbank": wrong}))
        called(lambda: writer.write_through("utt-1", {"fbank": array_of(1)}))
        assert len(writer) == writer.committed == 2


def test_numbers_that_are_not_finite_are_stored_where_that_is_declared(tmp_path: Path) -> None:
    kept = [FeatureStorageConfig("fbank", nonfinite="keep")]
    CacheWriter(tmp_path, kept).close(complete=False)
    with PartWriter(tmp_path, kept) as writer:
        wrong = np.array([[np.inf, 1.0]], np.float32)
        elsewhere(lambda: writer.write_through("utt-0", {"fbank": wrong}))
    CacheWriter(tmp_path, kept).close()
    np.testing.assert_array_equal(featcache.open(tmp_path).read("utt-0", "fbank"), wrong)


def test_an_error_of_storing_is_raised_at_once_and_ends_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CacheWriter(tmp_path, FBANK).close(complete=False)
    writer = PartWriter(tmp_path, FBANK)
    elsewhere(lambda: writer.write_through("utt-0", {"fbank": array_of(0)}))

    def full(file: PagedFile, pieces: list[memoryview]) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(PagedFile, "append_each", full)
        with pytest.raises(CacheError, match="1 utterances of this run are committed and kept"):
            elsewhere(lambda: writer.write_through("utt-1", {"fbank": array_of(1)}))
    with pytest.raises(CacheError, match="Input/output error"):
        elsewhere(lambda: writer.write_through("utt-2", {"fbank": array_of(2)}))
    with pytest.raises(CacheError, match="Input/output error"):
        writer.close()
    CacheWriter(tmp_path, FBANK).close()
    assert featcache.open(tmp_path, verify="arrays").ids == ["utt-0"]


def test_a_task_does_not_run_in_another_thread_before_those_that_wait() -> None:
    release, ran = threading.Event(), list[str]()
    background = Background(lambda _: None, 10, 100, contextlib.nullcontext())
    background.put(release.wait, 0, 0)
    elsewhere(lambda: ran.append(str(background.run_here(lambda: ran.append("task")))))
    assert ran == ["False"]
    release.set()
    background.drain()
    elsewhere(lambda: ran.append(str(background.run_here(lambda: ran.append("task")))))
    assert ran == ["False", "task", "True"]
    background.stop(finish=True)
