"""Methods by which a table goes to other toolkits, and the functions behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import numpy as np
import pytest
from third_party_install import install

import featcache
from featcache.errors import ConfigError
from featcache.registry import TOOLKITS

OWN = [entry for entry in entry_points(group=TOOLKITS) if entry.value.startswith("featcache.")]


@pytest.fixture
def cache(tmp_path: Path) -> featcache.Cache:
    declared = [featcache.FeatureStorageConfig("f", frame_s=0.01)]
    with featcache.CacheWriter(tmp_path / "cache", declared) as writer:
        for id in "abc":
            writer.write(id, {"f": np.full((5, 3), ord(id))})
    return featcache.open(tmp_path / "cache")


@pytest.mark.parametrize("found", OWN, ids=lambda entry: entry.name)
def test_a_method_has_the_arguments_of_the_function_behind_it(found: EntryPoint) -> None:
    pytest.importorskip("lhotse")
    pytest.importorskip("datasets")
    method, function = getattr(featcache.FeatureTable, found.name), found.load()
    (_, *shown), (_, *taken) = (
        inspect.signature(each).parameters.values() for each in (method, function)
    )
    assert shown == taken
    assert method.__doc__


def test_each_method_to_a_toolkit_is_installed() -> None:
    assert {entry.name for entry in OWN} == {"to_cuts", "to_features", "to_hf_dataset", "to_kaldi"}


def test_a_view_of_joined_caches_goes_to_a_toolkit(tmp_path: Path, cache: featcache.Cache) -> None:
    with featcache.CacheWriter(tmp_path / "g", [featcache.FeatureStorageConfig("g")]) as writer:
        for id in "abc":
            writer.write(id, {"g": np.full((7, 2), ord(id))})
    view = featcache.join(cache, featcache.open(tmp_path / "g")).filter(id={"a", "c"})
    view.to_kaldi(tmp_path / "data", feature="g")
    assert (tmp_path / "data" / "utt2num_frames").read_text() == "a 7\nc 7\n"


def to_cuts(table: featcache.FeatureTable) -> object:
    return table.to_cuts(sample_rate_hz=16000)


TO_OTHERS = pytest.mark.parametrize(
    "hand", [to_cuts, featcache.FeatureTable.to_hf_dataset], ids=["lhotse", "datasets"]
)


@TO_OTHERS
def test_a_segment_is_not_taken_for_the_utterance_of_its_id(
    hand: Callable[[featcache.FeatureTable], object], cache: featcache.Cache
) -> None:
    segments = cache.segments({"b": ("a", 0, 0.05)})  # as long as utterance 'b'
    for table in (segments, featcache.mix({"cut": segments, "whole": cache.select(["c"])})):
        with pytest.raises(ConfigError, match=r"'b' is no utterance of .* take whole utterances"):
            hand(table)


@TO_OTHERS
def test_a_view_of_nothing_goes_to_a_toolkit(
    hand: Callable[[featcache.FeatureTable], Sized], cache: featcache.Cache
) -> None:
    assert len(hand(cache.select([]))) == 0


def test_metadata_of_an_earlier_version_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: featcache.Cache
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "featcache", {})
    monkeypatch.syspath_prepend(site)
    with pytest.raises(ConfigError, match=r"earlier version.* install featcache again"):
        cache.to_kaldi(tmp_path / "data")
    assert not (tmp_path / "data").exists()
