"""`featcache.convert`: the same values in another format, and what it refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert_helpers import FINGERPRINT, KINDS, arrays_of, assert_same, make_source

import featcache
from featcache import (
    CacheWriter,
    EnvironmentProvider,
    FeatureStorageConfig,
    KeyNotFoundError,
    StaleCacheError,
)
from featcache.errors import ConfigError, CorruptCacheError, FeatureError, StorageFullError
from featcache.writing import part_writer


def converted(
    src: object, dst: Path, features: object = None, **settings: object
) -> featcache.Cache:
    return featcache.convert(src, dst, features=features, progressbar=False, **settings)  # type: ignore[arg-type]


def again(names: list[str], **settings: object) -> list[FeatureStorageConfig]:
    """Declare features as they are, but for backend, codec and options."""
    return [FeatureStorageConfig.from_json({**KINDS[name].to_json(), **settings}) for name in names]


def errors_of(cache: featcache.Cache) -> dict[str, float]:
    recorded: Any = featcache.inspect.made_from(cache)["recorded"]
    return dict(recorded["converted"][-1]["largest_error"])


@pytest.mark.parametrize("small_parts", [False, True])
def test_a_round_trip_through_all_formats_gives_the_first_cache_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: bool
) -> None:
    if small_parts:
        monkeypatch.setattr(part_writer, "PART_ROWS", 9)
    names = list(KINDS)
    first = featcache.open(make_source(tmp_path / "first", names))
    ways = [("hdf5", "raw"), ("webdataset", "raw"), ("zarr", "zstd"), ("hdf5", "gzip")]
    ways += [("zarr", "raw"), ("zarr", "blosc"), ("memmap", "raw")]
    cache = first
    for number, (backend, codec) in enumerate(ways):
        features = again(names, backend=backend, codec=codec)
        cache = converted(cache, tmp_path / f"{number}-{backend}", features)
        assert_same(cache, first)
        assert errors_of(cache) == {}
        featcache.open(cache.path, verify="arrays").close()
    assert cache.fingerprint == first.fingerprint
    for name in names:
        theirs = first.opened.index.features[name].checksum
        assert np.array_equal(cache.opened.index.features[name].checksum, theirs)
    recorded: Any = featcache.inspect.made_from(cache)["recorded"]
    assert recorded["command"] == ["python", "train.py"]
    assert len(recorded["converted"]) == len(ways)


def test_without_features_all_are_stored_as_they_are_declared(tmp_path: Path) -> None:
    source = featcache.open(make_source(tmp_path / "a", ["fbank", "units"]))
    cache = converted(source, tmp_path / "b")
    assert_same(cache, source)
    assert cache.fingerprint == source.fingerprint


def test_encoded_blocks_are_copied_as_they_are(tmp_path: Path) -> None:
    make_source(tmp_path / "a", ["fbank"])
    lossy = converted(
        tmp_path / "a", tmp_path / "b", [FeatureStorageConfig("fbank", backend="lilcom")]
    )
    cache = converted(lossy, tmp_path / "c")
    assert_same(cache, lossy)
    assert cache.fingerprint == lossy.fingerprint
    assert errors_of(cache) == {"fbank": 0.0}


def test_names_and_declarations_choose_features_and_keep_their_times(tmp_path: Path) -> None:
    make_source(tmp_path / "a", ["fbank", "units", "voiced"])
    half = FeatureStorageConfig("fbank", "float16", backend="hdf5")
    assert converted(tmp_path / "a", tmp_path / "alone", half).features == ("fbank",)
    cache = converted(tmp_path / "a", tmp_path / "b", ["voiced", half])
    declared = cache.fingerprint["features"]
    assert set(declared) == {"voiced", "fbank"}
    assert (declared["fbank"]["frame_s"], declared["fbank"]["dims"]) == (0.01, [8])


@pytest.mark.parametrize(
    "feature",
    [
        FeatureStorageConfig("fbank", "float16"),
        FeatureStorageConfig("fbank", "bfloat16", backend="zarr", codec="zstd"),
        FeatureStorageConfig("fbank", backend="lilcom"),
    ],
    ids=lambda feature: f"{feature.dtype}-{feature.codec}",
)
def test_the_largest_error_is_measured_and_recorded(
    tmp_path: Path, feature: FeatureStorageConfig
) -> None:
    source = featcache.open(make_source(tmp_path / "a", ["fbank"]))
    cache = converted(source, tmp_path / "b", [feature])
    apart = max(
        float(
            np.abs(cache.read(id, "fbank").astype(float) - source.read(id, "fbank")).max(initial=0)
        )
        for id in source
    )
    assert errors_of(cache) == {"fbank": apart}
    assert apart > 0
    # computed anew it were rounded, too: the same features
    assert {**cache.fingerprint, "features": 0} == {**source.fingerprint, "features": 0}
    back = converted(cache, tmp_path / "c", again(["fbank"]))
    assert [*back.fingerprint["converted"]] == ["fbank"]
    with pytest.raises(StaleCacheError, match="converted"):
        CacheWriter(tmp_path / "c", again(["fbank"]), FINGERPRINT)


def test_a_wider_dtype_changes_no_value(tmp_path: Path) -> None:
    source = featcache.open(make_source(tmp_path / "a", ["fbank", "units", "brain"]))
    wide = [
        FeatureStorageConfig("fbank", "float64"),
        FeatureStorageConfig("units", "float32"),
        FeatureStorageConfig("brain", "float32"),
    ]
    cache = converted(source, tmp_path / "b", wide)
    assert errors_of(cache) == {}
    for id in source:
        for name, array in source[id].items():
            assert np.array_equal(cache.read(id, name), array)


def test_views_segments_and_joined_caches_are_converted(tmp_path: Path) -> None:
    source = featcache.open(make_source(tmp_path / "a", ["fbank", "units"]))
    other = featcache.open(make_source(tmp_path / "o", ["speaker"]))
    view = source.table.filter(fbank=(10, 40))
    cache = converted(view, tmp_path / "view")
    assert set(cache) == set(view)
    assert all(np.array_equal(cache.read(id, "fbank"), view.read(id, "fbank")) for id in view)
    assert cache.complete
    assert not cache.failed
    stats, whole = cache.stats("fbank"), view.stats("fbank")
    np.testing.assert_allclose(stats.mean, whole.mean, rtol=1e-12)

    long = max(source.ids, key=lambda id: len(source.read(id, "fbank")))
    cut = source.table.select([long])
    table = featcache.open(converted(cut, tmp_path / "one", ["fbank"]).path).table.segments(
        {"s-1": (long, 0.05, 0.2), "s-2": (long, 0.2, 0.3)}
    )
    pieces = converted(table, tmp_path / "segments")
    assert pieces.read("s-1", "fbank").tobytes() == source.read(long, "fbank", 5, 20).tobytes()
    assert pieces.annotation("text")[0] == source.annotation("text")[source.ids.index(long)]

    joined = converted(featcache.join(source, other), tmp_path / "joined", ["units", "speaker"])
    assert all(
        np.array_equal(joined.read(id, "speaker"), other.read(id, "speaker")) for id in other
    )
    parts = source.table.split({"x": 0.5, "y": 0.5})
    both = featcache.concat(
        converted(parts["x"], tmp_path / "x"), converted(parts["y"], tmp_path / "y")
    )
    whole_again = converted(both, tmp_path / "xy")
    assert all(
        np.array_equal(whole_again.read(id, "fbank"), source.read(id, "fbank")) for id in source
    )
    assert {**whole_again.fingerprint} == {**source.fingerprint}


def test_feature_sets_become_one_cache(tmp_path: Path) -> None:
    make_source(tmp_path / "a", ["fbank"])
    with CacheWriter(tmp_path / "a", [KINDS["units"]], {"codebook": 3}) as writer:
        for number in range(40):
            writer.write(f"utt-{(number * 17) % 40}", {"units": arrays_of(number)["units"]})
    source = featcache.open(tmp_path / "a")
    cache = converted(source, tmp_path / "b")
    assert not cache.opened.sets
    for id in source:
        assert np.array_equal(cache.read(id, "fbank"), source.read(id, "fbank"))
        assert np.array_equal(cache.read(id, "units"), source.read(id, "units"))


def test_deleted_utterances_and_given_annotations_are_those_of_now(tmp_path: Path) -> None:
    source = featcache.open(make_source(tmp_path / "a", ["fbank"]))
    source.delete(["utt-3", "utt-4"])
    source.refresh()
    source.annotate({id: {"speaker": f"s{id[-1]}"} for id in source})
    source.refresh()
    assert_same(converted(source, tmp_path / "b"), source)
    assert_same(converted(source, tmp_path / "c", again(["fbank"], backend="hdf5")), source)


def test_an_incomplete_source_gives_an_incomplete_cache_that_grows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(numbers: range, complete: bool) -> None:
        writer = CacheWriter(tmp_path / "a", [KINDS["fbank"]])
        for number in numbers:
            writer.write(f"u{number}", {"fbank": arrays_of(number)["fbank"]})
        writer.close(complete=complete)

    add(range(5), complete=False)
    assert not converted(tmp_path / "a", tmp_path / "b").complete
    assert "incomplete" in caplog.text
    add(range(5, 9), complete=True)
    cache = converted(tmp_path / "a", tmp_path / "b")
    assert cache.complete
    assert len(cache) == 9


def test_bytes_are_told_before_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_source(tmp_path / "a", ["fbank"])
    with caplog.at_level(logging.INFO, "featcache"):
        converted(tmp_path / "a", tmp_path / "b")
    assert "converting 40 utterances" in caplog.text


def test_a_disk_that_is_too_small_is_told_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    make_source(tmp_path / "a", ["fbank"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4000))
    with pytest.raises(StorageFullError, match="free some space"):
        converted(tmp_path / "a", tmp_path / "b")


def test_a_source_that_changed_since_is_told_of(tmp_path: Path) -> None:
    def write(number: int) -> None:
        with CacheWriter(tmp_path / "a", [KINDS["fbank"]], overwrite=True) as writer:
            for each in range(number, number + 3):
                writer.write(f"u{each - number}", {"fbank": arrays_of(each)["fbank"]})

    write(0)
    hdf5 = again(["fbank"], backend="hdf5")
    for way in (None, hdf5):
        write(0)
        target = tmp_path / f"b-{way is None}"
        converted(tmp_path / "a", target, way)
        write(1)
        with pytest.raises(CorruptCacheError, match=r"'u0', feature 'fbank'.*overwrite=True"):
            converted(tmp_path / "a", target, way)
        cache = converted(tmp_path / "a", target, way, overwrite=True)
        assert np.array_equal(cache.read("u0", "fbank"), arrays_of(1)["fbank"])


def test_a_target_with_other_utterances_is_refused(tmp_path: Path) -> None:
    make_source(tmp_path / "a", ["fbank"], 12)
    make_source(tmp_path / "b", ["fbank"], 6)
    converted(tmp_path / "a", tmp_path / "c")
    with pytest.raises(KeyNotFoundError, match="holds 6 utterances that the source has not"):
        converted(tmp_path / "b", tmp_path / "c")
    assert len(featcache.open(tmp_path / "c")) == 12


@pytest.mark.parametrize("backend", ["memmap", "hdf5"])
def test_damage_of_the_source_is_not_converted(tmp_path: Path, backend: str) -> None:
    make_source(tmp_path / "a", ["fbank"])
    (file,) = (tmp_path / "a").glob("parts/*/fbank.npy")
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCacheError, match="'utt-"):
        converted(tmp_path / "a", tmp_path / "b", again(["fbank"], backend=backend))
    assert not featcache.open(tmp_path / "b").complete


def test_what_cannot_work_is_refused_with_a_sentence(tmp_path: Path) -> None:
    source = make_source(tmp_path / "a", ["fbank", "speaker", "units"])
    with pytest.raises(ConfigError, match="is the source itself"):
        converted(source, source)
    with pytest.raises(ConfigError, match="lies in the source itself"):
        converted(source, source / "sub")
    with pytest.raises(KeyNotFoundError, match=r"no feature 'mfcc'.*'fbank'"):
        converted(source, tmp_path / "b", ["mfcc"])
    with pytest.raises(ConfigError, match="time_axis=None"):
        converted(source, tmp_path / "b", [FeatureStorageConfig("speaker")])
    with pytest.raises(ConfigError, match="names, or declarations"):
        converted(source, tmp_path / "b", [3])
    with pytest.raises(FeatureError, match=r"utterance 'utt-.*does not fit"):
        converted(source, tmp_path / "b", [FeatureStorageConfig("units", "int8")])
    with pytest.raises(ConfigError, match="nothing to read"):
        converted(featcache.open(source).table.filter(fbank=(10**6, None)), tmp_path / "c")


class Tones(EnvironmentProvider):
    """Computes a tone, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def build_env_local(self) -> dict[str, object]:
        return {"dataset": [3, 4, 5], "ids": ["a", "b", "c"], "compute_features": self.compute}

    def compute(self, items: list[int]) -> list[dict[str, object]]:
        self.calls += 1
        return [{"id": "abc"[n - 3], "tone": np.full((n, 2), n / 3, np.float32)} for n in items]


def test_extraction_goes_on_with_a_converted_cache(tmp_path: Path) -> None:
    tones = Tones()
    featcache.extract(
        tones, tmp_path / "a", [FeatureStorageConfig("tone")], progressbar=False, check=None
    )
    declared = [FeatureStorageConfig("tone", "float16", backend="zarr", codec="zstd")]
    cache = converted(tmp_path / "a", tmp_path / "b", declared)
    record = json.loads((cache.opened.file("made-from") or b"").decode())
    assert "sources" in record
    before = tones.calls
    featcache.extract(tones, tmp_path / "b", declared, progressbar=False, check=None)
    assert tones.calls == before
    featcache.extract(tones, tmp_path / "b", declared, progressbar=False)  # compares its probe


def annotated(cache: featcache.Cache) -> dict[str, dict[str, object]]:
    names = cache.annotations
    columns = {name: cache.annotation(name)[:] for name in names}
    return {
        id: {name: columns[name][row] for name in names if columns[name][row] is not None}
        for row, id in enumerate(cache.ids)
    }


@pytest.mark.parametrize("codec", ["raw", "gzip"])
def test_a_second_call_brings_corrected_annotations(tmp_path: Path, codec: str) -> None:
    with CacheWriter(tmp_path / "a", [FeatureStorageConfig("f")]) as writer:
        for n in range(6):
            said = {"speaker": f"s{n}", "snr": n, "age": n, "tags": [n]}
            writer.write(f"u{n}", {"f": np.ones((3, 2), np.float32)}, annotations=said)
    features = [FeatureStorageConfig("f", backend="hdf5", codec=codec)]

    def check() -> None:
        cache = converted(tmp_path / "a", tmp_path / "b", features)
        expected, found = annotated(featcache.open(tmp_path / "a")), annotated(cache)
        assert found == {id: {**each, **mine[id]} for id, each in expected.items()}

    mine: dict[str, dict[str, object]] = {f"u{n}": {} for n in range(6)}
    check()
    source = featcache.open(tmp_path / "a")
    source.annotate({"u0": {"speaker": "CORRECTED"}, "u1": {"speaker": None, "new": 1}})
    check()
    featcache.open(tmp_path / "b").annotate({"u3": {"mine": 7}})
    mine["u3"]["mine"] = 7
    check()
    with CacheWriter(tmp_path / "a", [FeatureStorageConfig("f")]) as writer:
        writer.write("u9", {"f": np.ones((3, 2), np.float32)}, annotations={"speaker": "s9"})
    mine["u9"] = {}
    check()


def test_annotations_of_another_kind_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for age in (30, "thirty"):
        with CacheWriter(tmp_path / "a", [FeatureStorageConfig("f")], overwrite=True) as writer:
            writer.write("u1", {"f": np.ones((3, 2), np.float32)}, annotations={"age": age})
        if age == 30:
            converted(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FeatureError, match=r"'age' is int in .*, and str .*overwrite=True"):
        converted(tmp_path / "a", tmp_path / "b")
    cache = converted(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert cache.annotation("age")[:] == ["thirty"]


def test_a_second_call_brings_corrected_texts_of_a_foreign_source(tmp_path: Path) -> None:
    import torch

    (tmp_path / "pt").mkdir()
    for text in ("one", "two"):
        torch.save({"f": torch.ones(5, 2), "text": text}, tmp_path / "pt" / "u1.pt")
        cache = converted(tmp_path / "pt", tmp_path / "b")
        assert cache.annotation("text")[:] == [text]
