"""A source that changes while a cache of it is open says so at one of the next reads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch_loaders import read_all

import featcache
from featcache import Cache, FeatureLoader
from featcache.errors import CorruptCacheError
from featcache.samplers import ShuffledBatchSampler

NOTICED_S = 1.0
FRAMES = np.full((50, 4), 1, np.float32)
OTHERS = np.full((50, 4), 98, np.float32)  # of the same size


def in_place(file: Path) -> None:
    np.save(file, OTHERS)


def by_rename(file: Path) -> None:
    np.save(file.with_suffix(".new.npy"), OTHERS)
    file.with_suffix(".new.npy").rename(file)


def remove(file: Path) -> None:
    file.unlink()


def grow(file: Path) -> None:
    with file.open("ab") as end:
        end.write(b"\0")


def cut(file: Path) -> None:
    os.truncate(file, 200)


def link(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


def whole(cache: Cache) -> object:
    return cache.read("a", "feats")


def window(cache: Cache) -> object:
    return cache.read("a", "feats", 3, 7)


def batch(cache: Cache) -> object:
    return cache.read_batch(["b", "a"], "feats")


def tensor(cache: Cache) -> object:
    return cache.reader("feats").read("a")


def loader(cache: Cache) -> object:
    return list(FeatureLoader(cache.table, batch_sampler=ShuffledBatchSampler([["a", "b"]])))


CHANGES = [in_place, by_rename, remove, grow, link]
READS = [whole, window, batch, tensor, loader]


def refused_within_a_second(read: Callable[[], object]) -> str:
    """Read until that is refused; at the latest, what is read after a second must be."""
    latest = time.monotonic() + NOTICED_S
    while time.monotonic() < latest:
        try:
            read()
        except CorruptCacheError as error:
            return str(error)
    with pytest.raises(CorruptCacheError) as refused:
        read()
    return str(refused.value)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for id in "abc":
        np.save(folder / f"{id}.npy", FRAMES)
    return folder


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_is_refused_within_a_second_of_its_next_read(
    tmp_path: Path,
    source: Path,
    change: Callable[[Path], None],
    read: Callable[[Cache], object],
    mapped: bool,
) -> None:
    featcache.adopt(source, tmp_path / "cache")
    with featcache.open(tmp_path / "cache", mapped=mapped) as cache:
        read(cache)
        change(source / "a.npy")
        told = refused_within_a_second(lambda: read(cache))
        assert "a.npy" in told
        assert np.array_equal(cache.read("c", "feats"), FRAMES)  # which nobody touched


def test_a_file_that_is_cut_short_is_refused_where_it_is_not_mapped(
    tmp_path: Path, source: Path
) -> None:
    featcache.adopt(source, tmp_path / "cache")
    with featcache.open(tmp_path / "cache", mapped=False) as cache:
        cache.read("a", "feats")
        cut(source / "a.npy")
        told = refused_within_a_second(lambda: cache.read("a", "feats"))
        assert "a.npy" in told


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", CHANGES)
def test_where_reads_are_checked_the_next_one_is_refused(
    tmp_path: Path, source: Path, change: Callable[[Path], None], read: Callable[[Cache], object]
) -> None:
    featcache.adopt(source, tmp_path / "cache").collect()
    with featcache.open(tmp_path / "cache", check_reads=True) as cache:
        for _ in range(3):
            read(cache)
        change(source / "a.npy")
        with pytest.raises(CorruptCacheError, match=r"a\.npy"):
            read(cache)


def test_a_file_of_many_utterances_is_refused_for_each_of_them(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "feats.h5", "w") as file:
        for number in range(5):
            file[f"u{number}"] = FRAMES
    with featcache.adopt(tmp_path / "feats.h5", tmp_path / "cache") as cache:
        cache.read("u0", "feats")
        with h5py.File(tmp_path / "feats.h5", "r+") as file:
            file["u3"][...] = OTHERS
        refused_within_a_second(lambda: cache.read("u3", "feats"))
        for number in range(5):
            with pytest.raises(CorruptCacheError, match="has changed since it was adopted"):
                cache.read(f"u{number}", "feats")


def test_the_same_file_put_back_is_read_again(tmp_path: Path, source: Path) -> None:
    with featcache.adopt(source, tmp_path / "cache") as cache:
        cache.read("a", "feats")
        status = (source / "a.npy").stat()
        by_rename(source / "a.npy")
        refused_within_a_second(lambda: cache.read("a", "feats"))
        np.save(source / "a.npy", FRAMES)
        os.utime(source / "a.npy", ns=(0, status.st_mtime_ns))
        assert np.array_equal(cache.read("a", "feats"), FRAMES)


def test_workers_of_a_data_loader_notice_too(tmp_path: Path, source: Path) -> None:
    cache = featcache.adopt(source, tmp_path / "cache")
    cache.read("a", "feats")  # open before the fork
    rows = torch.utils.data.DataLoader(
        featcache.FeatureDataset(cache.table), num_workers=1, batch_size=None
    )
    assert len(list(rows)) == 3
    in_place(source / "a.npy")
    refused_within_a_second(lambda: read_all(rows))
