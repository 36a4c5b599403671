"""lhotse's samplers make the batches of a `FeatureLoader`, and of a DataLoader."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import featcache
from featcache import FeatureDataset, FeatureLoader

lhotse: Any = pytest.importorskip("lhotse")
from lhotse.dataset import (  # noqa: E402
    BucketingSampler,
    CutPairsSampler,
    DynamicBucketingSampler,
    SimpleCutSampler,
)

from featcache.interop.lhotse import CutBatches, FeatcacheWriter  # noqa: E402

HZ = 16_000
SAMPLERS = {
    "simple": lambda cuts: SimpleCutSampler(cuts, max_duration=3.0, shuffle=True, seed=1),
    "buckets": lambda cuts: BucketingSampler(
        cuts, sampler_type=SimpleCutSampler, max_duration=3.0, num_buckets=3, shuffle=True
    ),
    "dynamic": lambda cuts: DynamicBucketingSampler(
        cuts, max_duration=3.0, num_buckets=3, shuffle=True, seed=1
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def cache(tmp_path: Path) -> featcache.Cache:
    declared = [featcache.FeatureStorageConfig("f", frame_s=0.01)]
    with featcache.CacheWriter(tmp_path / "cache", declared) as writer:
        for number in range(20):
            frames = np.arange(50 + 7 * number, dtype=np.float32)
            writer.write(f"u{number:02}", {"f": frames[:, None] + np.full(2, 1000 * number)})
    return featcache.open(tmp_path / "cache")


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_epoch_has_the_batches_of_the_sampler(cache: featcache.Cache, name: str) -> None:
    cuts = cache.to_cuts(sample_rate_hz=HZ)
    alone, sampler = SAMPLERS[name](cuts), SAMPLERS[name](cuts)
    loader = FeatureLoader(cache, batch_sampler=CutBatches(sampler))
    dataset = FeatureDataset(cache)
    plain = DataLoader(
        dataset,
        batch_sampler=CutBatches(SAMPLERS[name](cuts)),
        collate_fn=FeatureDataset.collate,
    )
    orders = []
    for epoch in range(2):
        alone.set_epoch(epoch)
        plain.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        expected = [[cut.id for cut in batch] for batch in alone]
        batches = list(loader)
        assert [batch["id"] for batch in batches] == expected
        assert sorted(id for batch in expected for id in batch) == sorted(cache)
        for batch, other in zip(batches, plain, strict=True):
            for row, id in enumerate(batch["id"]):
                found = batch["f"][row, : batch["f_lengths"][row]]
                np.testing.assert_array_equal(found, cache.read(id, "f"))
            torch.testing.assert_close(batch["f"], other["f"])
        orders.append(expected)
    assert orders[0] != orders[1]


def test_a_loader_goes_on_within_an_epoch(cache: featcache.Cache) -> None:
    def loader() -> FeatureLoader:
        sampler = SAMPLERS["dynamic"](cache.to_cuts(sample_rate_hz=HZ))
        return FeatureLoader(cache, batch_sampler=CutBatches(sampler))

    whole, first, second = loader(), loader(), loader()
    expected = [batch["id"] for _ in range(2) for batch in whole]
    count = len(list(first))
    seen = [batch["id"] for batch in islice(first, 2)]
    second.load_state_dict(first.state_dict())
    assert seen + [batch["id"] for batch in second] == expected[count:]


def test_windows_and_random_keys_read_their_frames(cache: featcache.Cache, tmp_path: Path) -> None:
    cuts = cache.to_cuts(sample_rate_hz=HZ)
    with FeatcacheWriter(tmp_path / "stored") as writer:  # its keys are no ids of cuts
        stored = cuts.copy_feats(writer)
    windows = stored.cut_into_windows(0.2)
    loader = FeatureLoader(
        tmp_path / "stored", batch_sampler=CutBatches(SimpleCutSampler(windows, max_cuts=1))
    )
    found = [batch["feats"][0] for batch in loader]
    for cut, frames in zip(windows, found, strict=True):
        np.testing.assert_array_equal(frames, cut.load_features())


def with_units(path: Path, frame_s: float | None) -> featcache.Cache:
    """Frames of 10 ms and units of 20 ms, of which one or two lack at the end."""
    declared = [
        featcache.FeatureStorageConfig("f", frame_s=0.01),
        featcache.FeatureStorageConfig("units", dtype="int32", frame_s=frame_s),
    ]
    with featcache.CacheWriter(path, declared) as writer:
        for number, frames in enumerate((200, 301, 322)):
            units = np.arange(frames // 2 - number, dtype=np.int32)
            writer.write(
                f"u{number}", {"f": np.arange(2.0 * frames).reshape(-1, 2), "units": units}
            )
    return featcache.open(path)


@pytest.mark.parametrize("step_s", [0.25, 0.5, 0.3335])
def test_each_feature_has_the_frames_that_lhotse_reads(tmp_path: Path, step_s: float) -> None:
    cache = with_units(tmp_path, 0.02)
    cuts = cache.to_cuts(sample_rate_hz=HZ, feature="f")
    parts = lhotse.CutSet.from_cuts(
        [
            *cuts.cut_into_windows(step_s),
            *cuts.cut_into_windows(step_s, hop=0.107),
            *(cut.truncate(offset=0.006, duration=1.0001, preserve_id=False) for cut in cuts),
            *(cut.truncate(offset=1.0, duration=1.0, preserve_id=False) for cut in cuts),
        ]
    ).modify_ids(lambda id: f"{id}-part")
    batches = CutBatches(SimpleCutSampler(parts, max_cuts=1))
    found = [*FeatureLoader(cache, batch_sampler=batches)]
    for cut, batch in zip(parts, found, strict=True):
        units = cut.load_units()
        np.testing.assert_array_equal(batch["units"][0], units)
        frames = batch["f"][0].numpy()
        expected = cut.load_features()
        if len(frames) < len(expected):  # where one lacks, lhotse repeats the last one
            expected = expected[:-1]
        np.testing.assert_array_equal(frames, expected)


def test_parts_of_features_whose_rate_is_unknown_are_refused(tmp_path: Path) -> None:
    cache = with_units(tmp_path / "cache", None)
    timed = with_units(tmp_path / "timed", 0.02).to_cuts(sample_rate_hz=HZ, feature="f")
    for cut, refused in ((timed[0], False), (timed[0].truncate(duration=1.0), True)):
        sampler = SimpleCutSampler(lhotse.CutSet.from_cuts([cut]), max_cuts=1)
        loader = FeatureLoader(cache, batch_sampler=CutBatches(sampler))
        if refused:
            with pytest.raises(featcache.errors.ConfigError, match=r"'units' does not say"):
                next(iter(loader))
        else:
            assert next(iter(loader))["units"].shape == (1, 100)


def test_a_part_beyond_the_end_is_refused(cache: featcache.Cache, tmp_path: Path) -> None:
    cut = with_units(tmp_path / "other", 0.02).to_cuts(sample_rate_hz=HZ, feature="f")[0]
    cut = cut.truncate(offset=1.0, duration=0.5).with_id("u00")
    cut.features.storage_key = "f/u00"  # of 50 frames there
    sampler = SimpleCutSampler(lhotse.CutSet.from_cuts([cut]), max_cuts=1)
    with pytest.raises(featcache.errors.WindowError, match=r"frames 100 to 150 are not"):
        next(iter(FeatureLoader(cache, batch_sampler=CutBatches(sampler))))


def test_pairs_of_cuts_are_refused(cache: featcache.Cache) -> None:
    cuts = cache.to_cuts(sample_rate_hz=HZ)
    batches = CutBatches(CutPairsSampler(cuts, cuts, max_source_duration=3.0))
    with pytest.raises(featcache.errors.ConfigError, match="one set of cuts alone"):
        next(iter(FeatureLoader(cache, batch_sampler=batches)))
