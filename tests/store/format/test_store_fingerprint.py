"""A cache made from something else is never served or continued silently; the error says in what it
differs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
from featcache import CacheWriter, FeatureStorage, FeatureStorageConfig
from featcache.errors import ConfigError, StaleCacheError
from featcache.format import ABSENT, canonical, differences, fingerprint_digest
from featcache.writing.part_writer import PartWriter

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, -0.0, 1.0, 1.5, 1e300])
    | st.sampled_from(["", "a", "(absent)", "null", "é"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "model", "é"]), JSON, max_size=4)


@given(OBJECTS, OBJECTS)
@settings(max_examples=500)
def test_two_fingerprints_differ_if_and_only_if_their_digests_do(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert (differences(one, other) == []) == (fingerprint_digest(one) == fingerprint_digest(other))
    assert differences(one, canonical(one)) == []
    assert differences(one, dict(reversed(one.items()))) == []


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ({"layer": 9}, {"layer": 12}, "layer: was 9, now 12"),
        (
            {"model": {"name": "a", "sha": 1}},
            {"model": {"name": "a", "sha": 2}},
            "model.sha: was 1, now 2",
        ),
        ({}, {"layer": None}, "layer: was (absent), now null"),
        ({"layer": 9}, {}, "layer: was 9, now (absent)"),
        ({"layer": "(absent)"}, {}, 'layer: was "(absent)", now (absent)'),
        ({"rate": 1}, {"rate": 1.0}, "rate: was 1, now 1.0"),
        ({"rates": [1]}, {"rates": [True]}, "rates: was [1], now [true]"),
        ({"text": "x" * 300}, {"text": "y"}, f'text: was "{"x" * 196}..., now "y"'),
    ],
)
def test_a_difference_is_told_field_by_field_and_stops_the_writer(
    tmp_path: Path, old: dict[str, object], new: dict[str, object], line: str
) -> None:
    make_cache(tmp_path, range(3), fingerprint=old)
    with pytest.raises(StaleCacheError, match=r"overwrite it \(overwrite=True\)") as error:
        CacheWriter(tmp_path, two_features(), new)
    assert f"\n  {line}\n" in str(error.value)
    assert len(str(error.value).splitlines()) == 3  # this one and no other
    check_cache(tmp_path, range(3))
    make_cache(tmp_path, range(3, 5), fingerprint=old)
    check_cache(tmp_path, range(5))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"dtype": "float64"}, 'features.fbank.dtype: was "float32", now "float64"'),
        ({"backend": "webdataset"}, 'features.fbank.backend: was "memmap", now "webdataset"'),
        ({"time_axis": None}, "features.fbank.time_axis: was 0, now null"),
        ({"stats": False}, "features.fbank.stats: was true, now false"),
    ],
)
def test_a_changed_declaration_is_told(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    make_cache(tmp_path / "train", range(3))
    changed = [FeatureStorageConfig("fbank", **change), two_features()[1]]
    with pytest.raises(StaleCacheError, match=re.escape(line)):
        CacheWriter(tmp_path / "train", changed, FINGERPRINT)
    with pytest.raises(StaleCacheError, match=re.escape(line)):
        FeatureStorage(tmp_path, changed).cache("train")
    FeatureStorage(tmp_path, two_features()).cache("train")


def test_an_added_or_removed_feature_is_told(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    with pytest.raises(
        StaleCacheError, match=r'features.units: was {.*"name": "units".*}, now \(absent\)'
    ):
        CacheWriter(tmp_path, two_features()[:1], FINGERPRINT)


def test_an_option_at_its_default_is_no_difference(tmp_path: Path) -> None:
    features = [
        FeatureStorageConfig("fbank", backend="webdataset"),
        FeatureStorageConfig("units", dtype="int16"),
    ]
    make_cache(tmp_path / "train", range(3), features)
    spelt_out = FeatureStorageConfig(
        "fbank", backend="webdataset", codec="raw", options={"shard_bytes": 1 << 30}
    )
    FeatureStorage(tmp_path, [spelt_out, features[1]]).cache("train")
    make_cache(tmp_path / "train", range(3, 5), [spelt_out, features[1]])
    check_cache(tmp_path / "train", range(5))


def test_what_a_killed_writer_left_is_stale_too(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(3))
        writer._parts.seal()  # sealed, not yet published
        manifest = (tmp_path / "featcache.json").read_bytes()
    (tmp_path / "featcache.json").write_bytes(manifest)
    with pytest.raises(StaleCacheError, match=r"layer: was 9, now 12"):
        CacheWriter(tmp_path, two_features(), {**FINGERPRINT, "layer": 12})
    make_cache(tmp_path, range(3, 5))
    check_cache(tmp_path, range(5))


def test_what_a_killed_writer_left_can_be_overwritten_with_another_fingerprint(
    tmp_path: Path,
) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(3))
        writer._parts.seal()
        manifest = (tmp_path / "featcache.json").read_bytes()
    (tmp_path / "featcache.json").write_bytes(manifest)
    make_cache(tmp_path, range(4, 6), fingerprint={"model": "other"}, overwrite=True)
    check_cache(tmp_path, range(4, 6))
    assert len(list((tmp_path / "parts").iterdir())) == 1


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("sealed", [True, False])
def test_the_parts_of_a_cache_without_manifest_are_not_removed_for_another(
    tmp_path: Path, sealed: bool, overwrite: bool
) -> None:
    writer = CacheWriter(tmp_path / "live", two_features(), FINGERPRINT)
    write(writer, range(3))
    writer.commit()
    if sealed:
        writer._parts.seal()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    writer.abort()
    (tmp_path / "killed" / "featcache.json").unlink()
    with pytest.raises(
        StaleCacheError,
        match=r"lost its featcache.json, .* declare it as it was, or remove '.*parts'",
    ):
        CacheWriter(tmp_path / "killed", two_features(), {"model": "other"}, overwrite=overwrite)
    make_cache(tmp_path / "killed", range(3, 5))
    check_cache(tmp_path / "killed", range(5))


def test_a_cache_without_utterances_takes_another_fingerprint(tmp_path: Path) -> None:
    make_cache(tmp_path, [])
    make_cache(tmp_path, range(3), fingerprint={"model": "other"})
    check_cache(tmp_path, range(3))
    assert featcache.open(tmp_path).fingerprint["model"] == "other"


@pytest.mark.parametrize(
    "value", [np.float32(1), float("nan"), {1, 2}, object(), b"x", "\ud800", {("a",): 1}]
)
def test_a_fingerprint_that_is_no_json_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match="fingerprint must be made of JSON values"):
        CacheWriter(tmp_path / "cache", two_features(), {"model": value})
    assert not (tmp_path / "cache").exists()


def test_a_fingerprint_cannot_hide_the_declarations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot have a key 'features'.*rename it"):
        CacheWriter(tmp_path / "cache", two_features(), {"features": "mfcc"})


def test_a_fingerprint_with_tuples_reads_back_as_the_same(tmp_path: Path) -> None:
    make_cache(tmp_path, range(2), fingerprint={"strides": (1, 2), "nested": {"b": 1, "a": (3,)}})
    make_cache(tmp_path, range(2, 4), fingerprint={"nested": {"a": [3], "b": 1}, "strides": [1, 2]})
    check_cache(tmp_path, range(4))


def test_a_part_writer_of_another_fingerprint_or_declaration_is_refused(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        for features, fingerprint in ((two_features(), {}), (two_features()[:1], FINGERPRINT)):
            with pytest.raises(StaleCacheError, match="give those of its CacheWriter"):
                PartWriter(tmp_path, features, fingerprint)
        write(writer, range(2))
    with (
        CacheWriter(tmp_path, two_features(), {"model": "other"}, overwrite=True) as writer,
        pytest.raises(StaleCacheError, match="give those of its CacheWriter"),
    ):
        PartWriter(tmp_path, two_features(), FINGERPRINT)


def test_a_caller_cannot_change_the_fingerprint_of_an_open_cache(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(2)))
    cache.fingerprint["features"]["fbank"]["dtype"] = "int8"
    assert cache.fingerprint["features"]["fbank"]["dtype"] == "float32"
    assert cache.read(id_of(1), "fbank").tolist() == arrays_of(1)["fbank"].tolist()


def test_a_difference_says_where_it_is_whatever_the_keys_and_values_are() -> None:
    old = {"features": {"a.b: was 1, now 2": ": was (absent), now 3"}, "gain": 1}
    new = {"features": {"a.b: was 1, now 2": "other"}, "gain": 1, "layer": 9}
    first, second = differences(old, new)
    assert first.path == ("features", "a.b: was 1, now 2")
    assert (first.was, first.now) == (": was (absent), now 3", "other")
    assert (second.path, second.was, second.now) == (("layer",), ABSENT, 9)
    assert str(second) == "layer: was (absent), now 9"
