"""Files that run out, shrink, go away or are replaced while a cache is read."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import TESTS
from store_helpers import arrays_of, id_of, make_cache

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CacheError, CorruptCacheError
from featcache.format import ColumnFile, ContainerColumns, Strings
from featcache.reading import Containers, containers


def test_files_are_let_go_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [FeatureStorageConfig("fbank", backend="webdataset", options={"shard_bytes": 1})]
    with CacheWriter(tmp_path, shards) as writer:
        for number in range(1, 30):
            writer.write(id_of(number), {"fbank": arrays_of(number, frames=number)["fbank"]})
    monkeypatch.setattr(containers, "MAX_OPEN", 5)
    cache = featcache.open(tmp_path)
    for number in (*range(1, 30), *range(1, 30)):
        assert len(cache.read(id_of(number), "fbank")) == number
        assert len(cache.opened.containers._open) <= 5


def test_a_cache_makes_do_with_one_file_when_others_have_opened_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = featcache.open(make_cache(tmp_path, range(9)))
    cache.read(id_of(3), "fbank")
    opened = os.open

    def refuse(path: Path, flags: int, **where: int) -> int:
        if cache.opened.containers._open:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, flags, **where)

    monkeypatch.setattr(os, "open", refuse)
    assert cache.read(id_of(3), "units").tolist() == arrays_of(3)["units"].tolist()
    assert len(cache.opened.containers._open) == 1
    monkeypatch.setattr(cache.opened.containers, "_open", {99: None})
    monkeypatch.setattr(
        os, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no"))
    )
    with pytest.raises(CacheError, match=r"cannot be read.*no"):
        cache.read(id_of(3), "fbank")


def test_a_reader_that_is_overtaken_while_it_opens_takes_the_newer_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(tmp_path, range(3))
    overtaken = False

    def open_late(root: Path, path: str, **settings: Any) -> ColumnFile:
        nonlocal overtaken
        if not overtaken:
            overtaken = True
            for number in (3, 4):
                make_cache(tmp_path, [number])
        return ColumnFile(root, path, **settings)

    monkeypatch.setattr("featcache.reading.generation.ColumnFile", open_late)
    assert len(featcache.open(tmp_path)) == 5


def test_what_is_not_there_is_quickly_answered_with_a_default(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(9)))
    cache.opened.index.__dict__["nearest"] = None  # which takes its time
    assert cache.get("nobody") is None
    assert cache.get("nobody", 7) == 7
    assert cache.get(id_of(3), {})["fbank"].tolist() == arrays_of(3)["fbank"].tolist()


def test_a_container_that_shrinks_while_it_is_read_is_an_error_without_mapping(
    tmp_path: Path,
) -> None:
    make_cache(tmp_path, range(9))
    cache = featcache.open(tmp_path, mapped=False)
    cache.read(id_of(4), "fbank")
    (container,) = tmp_path.glob("parts/*/fbank.npy")
    os.truncate(container, 300)
    with pytest.raises(CorruptCacheError, match=r"fbank.npy' ends before byte"):
        cache.read(id_of(4), "fbank")


@pytest.mark.parametrize("gone", [True, False])
def test_an_index_that_is_gone_or_damaged_is_named_and_made_anew(
    tmp_path: Path, gone: bool
) -> None:
    make_cache(tmp_path, range(3))
    index = tmp_path / featcache.open(tmp_path).opened.manifest.index
    data = index.read_bytes()
    index.unlink() if gone else index.write_bytes(data[:-9] + bytes(9))
    for look in (featcache.open, featcache.inspect.made_from):
        with pytest.raises(CacheError, match=rf"{index.name}.*featcache.store.repair\(path\)"):
            look(tmp_path)
    assert featcache.store.repair(tmp_path).lost == ()
    assert len(featcache.open(tmp_path, verify="arrays")) == 3


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A directory that is not in memory, unlike the others of the tests."""
    with tempfile.TemporaryDirectory(dir=TESTS) as directory:
        yield Path(directory)


def test_what_is_not_in_memory_is_read_ahead(on_disk: Path) -> None:
    file = on_disk / "data"
    file.write_bytes(os.urandom(8 << 20))
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    of_none, sizes = np.zeros(16, np.uint8), np.array([8 << 20])
    columns = ContainerColumns(Strings.of(["data"]), sizes, of_none, np.zeros(1, np.int32))
    containers = Containers(on_disk, columns)
    places = [(0, start << 20, 900_000) for start in range(8)]
    if all(containers._file(0).has(offset) for _, offset, _ in places):
        pytest.skip("this file system keeps its files in memory, or cannot tell")
    containers.prefetch(places)

    # backwards: asking for a byte makes the system read those behind it
    def is_there(attempt: int) -> bool:
        time.sleep(0.05)
        return all(
            containers._file(0).has(offset + 890_000 - 16_384 * attempt) for _, offset, _ in places
        )

    assert any(map(is_there, range(50)))
