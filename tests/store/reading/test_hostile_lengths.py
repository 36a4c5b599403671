"""Lengths that no arrays can have: each way to ask for them or to read by them names the damage."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import change_index

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CorruptCacheError, FeatcacheError
from featcache.reading import MOST_FRAMES
from featcache.samplers import BucketBatchSampler

LAYOUTS = [("memmap", "raw"), ("hdf5", "lilcom"), ("hdf5", "gzip"), ("zarr", "zstd")]
HOSTILE = [10**10, 2**62, 2**63 - 1, MOST_FRAMES, -1, -3, -(2**63)]

READS: dict[str, Callable[[featcache.Cache], object]] = {
    "read": lambda cache: cache.read("u1", "x"),
    "view": lambda cache: cache.read("u1", "x", copy=False),
    "item": lambda cache: cache["u1"],
    "batch": lambda cache: cache.read_batch(["u0", "u1"], "x"),
    "reader": lambda cache: cache.reader("x")("u1"),
    "table": lambda cache: cache.table.read("u1", "x"),
    "table-batch": lambda cache: cache.table.read_batch(["u0", "u1"], "x"),
    "loader": lambda cache: list(featcache.FeatureLoader(cache, batch_size=2)),
    "loader-cast": lambda cache: list(
        featcache.FeatureLoader(cache, batch_size=2, dtypes={"x": "float64"})
    ),
    "data-set": lambda cache: featcache.FeatureDataset(cache)["u1"],
    "frames": lambda cache: featcache.FeatureDataset(cache)["u1", 0:3],
    "seconds": lambda cache: featcache.FeatureDataset(cache)["u1", featcache.Seconds(0.0)],
    "view-stats": lambda cache: cache.table.select(["u0", "u1"]).stats("x"),
    "segment-stats": lambda cache: cache.table.segments({"s": ("u1", 0.0, 0.05)}).stats("x"),
    "windows": lambda cache: cache.table.segments(featcache.Windows(1.0)),
    "segments": lambda cache: cache.table.segments({"s": ("u1", 0.0, 0.05)}),
}
ASKED: dict[str, Callable[[featcache.Cache], object]] = {
    "lengths": lambda cache: cache.lengths("x"),
    "lengths-of-some": lambda cache: cache.lengths("x", ids=["u1"]),
    "table-lengths": lambda cache: cache.table.lengths("x"),
    "view-lengths": lambda cache: cache.table.sample(2).lengths("x"),
    "filter": lambda cache: cache.table.filter(x=(0, 10)),
    "sort": lambda cache: cache.table.sort("x"),
    "arrow": lambda cache: cache.table.to_arrow(),
    "sampler": lambda cache: list(BucketBatchSampler(cache, batch_size=2)),
    "sampler-of-frames": lambda cache: list(BucketBatchSampler(cache, max_frames=20)),
    "sampler-of-elements": lambda cache: list(BucketBatchSampler(cache, max_elements=200)),
}


def crafted(path: Path, layout: tuple[str, str], frames: int) -> featcache.Cache:
    """Write a cache whose digests are right, and whose index tells of so many frames."""
    backend, codec = layout
    feature = FeatureStorageConfig("x", backend=backend, codec=codec, stats=True, frame_s=0.01)
    with CacheWriter(path, [feature]) as writer:
        for number in range(4):
            writer.write(f"u{number}", {"x": np.ones((5, 4), np.float32)})
    change_index(path, {"x.rows": np.full(4, frames, np.int64)})
    return featcache.open(path)


@pytest.mark.parametrize("frames", HOSTILE)
@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_arrays_are_not_read_by_lengths_that_they_cannot_have(
    tmp_path: Path, layout: tuple[str, str], frames: int
) -> None:
    cache = crafted(tmp_path, layout, frames)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, read in READS.items():
        with pytest.raises(CorruptCacheError) as caught:
            read(cache)
        assert "feature 'x'" in str(caught.value), name
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB


@pytest.mark.parametrize("offset", [*HOSTILE, 2**63 - 30])
@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_bytes_that_no_container_has_are_not_asked_for(
    tmp_path: Path, layout: tuple[str, str], offset: int
) -> None:
    columns = crafted(tmp_path, layout, 5).opened.arrays("x")._columns
    offsets = columns.offset.copy()
    offsets[1] = offset  # neither of the shortest nor of the longest, which are looked at first
    change_index(tmp_path, {"x.offset": offsets, "x.rows": np.array([5, 4, 3, 3])})
    for mapped in (True, False):
        cache = featcache.open(tmp_path, mapped=mapped)
        with pytest.raises(CorruptCacheError):
            cache.read_batch(["u1", "u0", "u2"], "x")
        with pytest.raises(CorruptCacheError):
            list(featcache.FeatureLoader(cache, batch_size=4))


@pytest.mark.parametrize("frames", HOSTILE)
@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_lengths_that_nothing_can_have_are_refused_as_such(
    tmp_path: Path, layout: tuple[str, str], frames: int
) -> None:
    cache = crafted(tmp_path, layout, frames)
    for name, ask in ASKED.items():
        try:
            found: Any = ask(cache)
        except FeatcacheError:
            continue
        # a codec may make any number of frames of few bytes: what cannot be known is not refused
        may_be = layout[1] != "raw" and frames in (10**10, MOST_FRAMES)
        assert may_be, (name, found)


def test_lengths_can_be_asked_for_when_the_containers_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with CacheWriter(path, [FeatureStorageConfig("x")]) as writer:
        writer.write("u", {"x": np.ones((5, 4), np.float32)})
    cache = featcache.open(path)
    cache.close()
    assert cache.lengths("x").tolist() == cache.table.lengths("x").tolist() == [5]
