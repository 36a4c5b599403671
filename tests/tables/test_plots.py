"""Plots of arrays, lengths and statistics: drawn into axes, with the numbers of the cache."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ConfigError, KeyNotFoundError, MissingDependencyError


@pytest.fixture
def cache(tmp_path: Path) -> featcache.Cache:
    features = [
        FeatureStorageConfig("fbank", frame_s=0.01),
        FeatureStorageConfig("units", dtype="uint8", stats=False),
        FeatureStorageConfig("xvector", time_axis=None, stats=False),
    ]
    random = np.random.default_rng(0)
    with CacheWriter(tmp_path / "cache", features) as writer:
        for number in range(40):
            fbank = random.normal(2, 3, (10 + number, 6))
            fbank[:, 4] = 7
            units = random.integers(0, 9, 10 + number)
            arrays = {"fbank": fbank, "units": units, "xvector": np.arange(5.0)}
            writer.write(f"utt-{number:02}$x$", arrays)
    return featcache.open(tmp_path / "cache")


@pytest.fixture
def _drawn() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")


@pytest.mark.usefixtures("_drawn")
def test_an_array_is_drawn_frame_by_frame(cache: featcache.Cache, tmp_path: Path) -> None:
    axes = cache.plot("utt-03$x$")
    shown = axes.images[0].get_array()
    np.testing.assert_allclose(shown, cache.read("utt-03$x$", "fbank").T)
    assert axes.get_xlabel() == "frame (10 ms)"
    assert "(13, 6)" in axes.get_title(loc="left")
    axes.figure.savefig(tmp_path / "a.png")  # the id is no mathematics
    units = cache.plot("utt-03$x$", feature="units")
    assert units.lines[0].get_ydata().tolist() == cache.read("utt-03$x$", "units").tolist()
    assert cache.plot("utt-03$x$", feature="xvector", ax=units) is units
    with pytest.raises(KeyNotFoundError):
        cache.plot("nobody")


@pytest.mark.usefixtures("_drawn")
def test_lengths_are_drawn_with_the_borders_of_buckets(cache: featcache.Cache) -> None:
    axes = cache.plot_lengths(buckets=4)
    assert sum(bar.get_height() for bar in axes.patches) == 40
    assert [line.get_xdata()[0] for line in axes.lines] == [19, 29, 39]
    places = 10 * (19 + 29 + 39 + 49)
    assert f"{1 - sum(range(10, 50)) / places:.0%} padding" in axes.get_title(loc="left")
    view = cache.filter(fbank=(10, 19))
    assert sum(bar.get_height() for bar in view.plot_lengths().patches) == 10
    with pytest.raises(ConfigError, match="no utterances"):
        cache.filter(fbank=(900, None)).plot_lengths()
    with pytest.raises(ConfigError, match="buckets"):
        cache.plot_lengths(buckets=0)


@pytest.mark.usefixtures("_drawn")
def test_statistics_are_drawn_and_constant_dimensions_named(cache: featcache.Cache) -> None:
    axes = cache.plot_stats("fbank")
    np.testing.assert_allclose(axes.lines[0].get_ydata(), cache.stats("fbank").mean)
    assert axes.get_legend().get_texts()[0].get_text() == "constant: 4"
    with pytest.raises(KeyNotFoundError, match="no statistics"):
        cache.plot_stats("units")


def test_without_matplotlib_an_error_says_how_to_get_it(
    cache: featcache.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'featcache\[plot\]'"):
        cache.plot("utt-03$x$")
