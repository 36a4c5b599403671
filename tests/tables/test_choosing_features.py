"""Views with fewer features, which go together with tables that never had the others."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig
from featcache.errors import ConfigError, KeyNotFoundError
from featcache.samplers import BucketBatchSampler

SECONDS = {"fbank": 0.01, "units": 0.02}


def arrays_of(number: int) -> dict[str, np.ndarray]:
    fbank = np.full((20 + number, 4), number, np.float32)
    return {"fbank": fbank, "units": np.full(10 + number // 2, number, np.float32)}


def written(path: Path, numbers: range, *features: str) -> featcache.Cache:
    declared = [FeatureStorageConfig(name, frame_s=SECONDS[name]) for name in features]
    with CacheWriter(path, declared) as writer:
        for number in numbers:
            arrays = arrays_of(number)
            writer.write(f"u{number:02}", {name: arrays[name] for name in features})
    return featcache.open(path)


@pytest.fixture
def less(tmp_path: Path) -> featcache.Cache:
    return written(tmp_path / "less", range(10), "fbank")


@pytest.fixture
def more(tmp_path: Path) -> featcache.Cache:
    return written(tmp_path / "more", range(10, 20), "fbank", "units")


def test_a_table_with_more_features_is_mixed_without_them(
    less: featcache.Cache, more: featcache.Cache
) -> None:
    line = r"take those of both, of each: .select_features\(\['fbank'\]\)"
    both: tuple[Callable[[], object], ...] = (
        partial(featcache.concat, less, more),
        partial(featcache.mix, {"less": less, "more": more}),
    )
    for refused in both:
        with pytest.raises(ConfigError, match=line):
            refused()
    view = more.select_features("fbank")
    whole = featcache.concat(less, view)
    assert [*whole] == [f"u{number:02}" for number in range(20)]
    assert whole.features == ("fbank",)
    mixed = featcache.mix({"less": less, "more": view}, epoch_size=40)
    sampler = BucketBatchSampler(mixed, max_frames=200)
    seen = [id for batch in FeatureLoader(mixed, batch_sampler=sampler) for id in batch["id"]]
    assert sorted(seen) == sorted([*whole] * 2)


def test_a_view_with_fewer_features_has_nothing_of_the_others(more: featcache.Cache) -> None:
    view = more.select_features(["fbank"])
    for table in (view, pickle.loads(pickle.dumps(view)), view.sort("fbank"), view.sample(1.0)):  # noqa: S301
        assert table.features == ("fbank",)
        np.testing.assert_array_equal(table.read("u12", "fbank"), arrays_of(12)["fbank"])
        assert {*table["u12"]} == {"fbank"}
        asks: tuple[Callable[[], object], ...] = (
            partial(table.read, "u12", "units"),
            partial(table.stats, "units"),
            partial(table.lengths, "units"),
        )
        for ask in asks:
            with pytest.raises(KeyNotFoundError, match=r"no feature 'units'.*fbank"):
                ask()
    assert {*FeatureDataset(view)[0]} == {"id", "fbank", "fbank_lengths"}
    assert view.digest == more.digest  # the same utterances: a loader's state goes on
    assert "select_features('fbank')" in repr(view)
    np.testing.assert_array_equal(view.stats("fbank").mean, more.stats("fbank").mean)


def test_what_is_joined_cut_or_mixed_can_leave_features_out_too(
    more: featcache.Cache, tmp_path: Path
) -> None:
    other = written(tmp_path / "other", range(10, 20), "fbank", "units")
    joined = featcache.join(more.select_features("units"), other.select_features("fbank"))
    assert {*joined.features} == {"fbank", "units"}
    np.testing.assert_array_equal(joined["u13"]["fbank"], arrays_of(13)["fbank"])
    alone = joined.select_features("fbank")
    assert {*alone["u13"]} == {"fbank"}
    cut = more.segments(featcache.Windows(0.1)).select_features("fbank")
    rest = written(tmp_path / "rest", range(20, 22), "fbank")
    assert featcache.concat(cut, rest)["u20"]["fbank"].shape == (40, 4)
    assert len(featcache.concat(cut, rest)) == len(cut) + 2
    mixed = featcache.mix({"a": more, "b": written(tmp_path / "b", range(5), "fbank", "units")})
    assert mixed.select_features("units").plan is mixed.plan


def test_a_view_is_converted_with_its_features_alone(more: featcache.Cache, tmp_path: Path) -> None:
    view = more.select_features("units")
    made = featcache.convert(view, tmp_path / "made", progressbar=False)
    assert made.features == ("units",)
    np.testing.assert_array_equal(made.read("u15", "units"), arrays_of(15)["units"])


def test_features_that_are_not_there_or_none_are_refused(more: featcache.Cache) -> None:
    with pytest.raises(KeyNotFoundError, match=r"no feature 'fbnk'.*'fbank'"):
        more.select_features(["fbnk"])
    with pytest.raises(ConfigError, match="at least one feature; there are 'fbank', 'units'"):
        more.select_features([])


def test_a_mix_of_the_same_ids_says_what_to_do(less: featcache.Cache, tmp_path: Path) -> None:
    noisy = written(tmp_path / "noisy", range(10), "fbank")
    with pytest.raises(ConfigError, match=r"an id names one utterance.*FeatureDataset\(variants="):
        featcache.mix({"clean": less, "noisy": noisy})
