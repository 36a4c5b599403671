"""`featcache.inspect.estimate`: bytes within 3 % of what is then written, from a few utterances."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from convert_helpers import KINDS, make_source

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.extraction.estimate import Estimate, StorageEstimate


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def speech_like(number: int, frames: int) -> np.ndarray:
    random = np.random.default_rng(number)
    curves = random.standard_normal((frames // 20 + 2, 40)).repeat(20, axis=0)[:frames]
    return (3 * curves + random.standard_normal((frames, 40))).astype(np.float32)


FILLING = 2**17  # the last chunk of a Zarr array is filled up, by as many bytes at most
WAYS = [
    FeatureStorageConfig("fbank"),
    FeatureStorageConfig("fbank", "float16", backend="hdf5"),
    FeatureStorageConfig("fbank", backend="webdataset"),
    FeatureStorageConfig("fbank", backend="zarr"),
    FeatureStorageConfig("fbank", backend="hdf5", codec="gzip"),
    FeatureStorageConfig("fbank", backend="zarr", codec="zstd"),
    FeatureStorageConfig("fbank", backend="lilcom"),
]


@pytest.mark.parametrize("shortest", [200, 20])
def test_bytes_of_a_conversion_are_within_3_percent(tmp_path: Path, shortest: int) -> None:
    with CacheWriter(tmp_path / "a", [FeatureStorageConfig("fbank")]) as writer:
        for number in range(400):
            frames = shortest + (number * 37) % (3 * shortest)
            writer.write(f"utterance-{number}", {"fbank": speech_like(number, frames)})
    told = featcache.inspect.estimate(tmp_path / "a")
    rows = {(row.backend, row.codec, row.dtype): row for row in told.rows}
    assert told.utterances == 400
    for number, way in enumerate(WAYS):
        path = tmp_path / str(number)
        featcache.convert(tmp_path / "a", path, features=[way], progressbar=False)
        told_bytes = rows[way.backend, way.codec, way.dtype].nbytes
        filling = FILLING if way.backend == "zarr" else 0
        assert told_bytes == pytest.approx(size_of(path), rel=0.03, abs=filling), way


def test_short_tokens_are_within_3_percent_too(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "a", [FeatureStorageConfig("tokens", "int32")]) as writer:
        for number in range(8000):
            tokens = np.arange(30 + number % 40, dtype=np.int32)
            writer.write(f"utterance-{number:05d}", {"tokens": tokens})
    rows = {
        (row.backend, row.codec): row for row in featcache.inspect.estimate(tmp_path / "a").rows
    }
    for backend in ("memmap", "hdf5", "webdataset", "zarr"):
        way = FeatureStorageConfig("tokens", "int32", backend=backend)
        path = tmp_path / backend
        featcache.convert(tmp_path / "a", path, features=[way], progressbar=False)
        filling = FILLING if backend == "zarr" else 0
        told = rows[backend, "raw"].nbytes
        assert told == pytest.approx(size_of(path), rel=0.03, abs=filling), backend


def test_the_table_tells_what_is_declared_and_what_loses(tmp_path: Path) -> None:
    make_source(tmp_path / "a", ["fbank", "units"])
    text = str(featcache.inspect.estimate(tmp_path / "a", ["fbank"]))
    assert "40 utterances, frames: " in text
    assert sum(line.endswith("as declared") for line in text.splitlines()) == 1
    assert [line for line in text.splitlines() if "lilcom" in line and line.endswith("lossy")]
    integers = featcache.inspect.estimate(tmp_path / "a", ["units"]).rows
    assert {row.dtype for row in integers} == {"int16"}
    assert not {"lilcom", "int8"} & {row.codec for row in integers}


def test_each_way_tells_what_comes_back_and_how_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featcache.extraction.estimate.LEAST_GB_S", 0)  # however busy we are
    with CacheWriter(tmp_path / "a", [FeatureStorageConfig("fbank")]) as writer:
        for number in range(8):
            writer.write(f"utt-{number}", {"fbank": speech_like(number, 100 + number)})
    source = featcache.open(tmp_path / "a")
    told = featcache.inspect.estimate(source)
    rows = {(row.backend, row.codec, row.dtype): row for row in told.rows}
    exact = rows["memmap", "raw", "float32"]
    assert (exact.largest_error, exact.rms_error, exact.cosine) == (0, 0, 1)
    assert all(row.read_gb_s > 0 for row in told.rows)
    for number, way in enumerate([("float16", "raw"), ("float32", "int8")]):
        feature = FeatureStorageConfig("fbank", way[0], codec=way[1])
        path = tmp_path / str(number)
        cache = featcache.convert(source, path, features=[feature], progressbar=False)
        pairs = [(source.read(id, "fbank").astype(float), cache.read(id, "fbank")) for id in cache]
        apart = np.concatenate([a - b for a, b in pairs])
        pairs = [(a, b.astype(float)) for a, b in pairs]
        cosines = [(a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()) for a, b in pairs]
        row = rows["memmap", way[1], way[0]]
        assert row.largest_error == np.abs(apart).max()
        assert row.rms_error == pytest.approx(np.sqrt((apart**2).mean()))
        assert row.cosine == pytest.approx(min(cosines), abs=1e-12)
        std = np.concatenate([a for a, _ in pairs]).std(axis=0)
        assert row.rms_of_std == pytest.approx(np.sqrt(((apart / std) ** 2).mean()))
    best = min((row for row in told.rows if row.cosine >= 0.9999), key=lambda row: row.nbytes)
    assert f"fbank as {best.dtype} {best.codec} in {best.backend}, 0." in told.advice
    assert str(told).endswith(told.advice)
    assert "\n" not in told.advice


def test_precision_that_takes_much_of_the_spread_is_not_advised(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    features = [
        FeatureStorageConfig("far"),
        FeatureStorageConfig("still"),
        FeatureStorageConfig("x", time_axis=None),
    ]
    with CacheWriter(tmp_path / "a", features) as writer:
        for number in range(20):
            near = random.standard_normal((100, 40)).astype(np.float32)
            still = near.copy()
            still[:, 7] = 0.1  # a dimension that is constant tells nothing
            arrays = {"far": 1000 + near, "still": still, "x": 1000 + near[:50].ravel()}
            writer.write(f"utt-{number}", arrays)
    told = featcache.inspect.estimate(tmp_path / "a")
    ways = {(row.feature, row.backend, row.codec, row.dtype): row for row in told.rows}
    for name in ("far", "x"):
        assert ways[name, "memmap", "raw", "float16"].cosine > 0.9999
        assert 0.1 < ways[name, "memmap", "raw", "float16"].rms_of_std < 0.2
        assert f"{name} as float32 " in told.advice
    assert 0 < ways["still", "memmap", "raw", "float16"].rms_of_std < 0.001


def test_a_way_that_is_a_little_slower_than_the_limit_is_advised_as_before() -> None:
    def advice(gb_s: float) -> str:
        ways = [
            StorageEstimate("f", "memmap", "raw", "float32", 100, 1, declared=True, read_gb_s=1.6),
            StorageEstimate("f", "memmap", "raw", "float16", 50, 1, read_gb_s=1.4),
            StorageEstimate("f", "memmap", "int8", "float32", 26, 1, read_gb_s=gb_s),
            StorageEstimate("f", "hdf5", "gzip", "float16", 20, 1, read_gb_s=0.1),
        ]
        told = Estimate(utterances=1, frames={"f": 1}, nbytes=100, hours=1, rows=tuple(ways))
        return told.advice

    for gb_s in (2.0, 0.54, 0.52, 0.4):
        assert "f as float32 int8 in memmap, 0.26 of the bytes" in advice(gb_s)
    assert "f as float16 raw in memmap, 0.50 of the bytes" in advice(0.1)


def test_numbers_that_are_not_finite_come_back_as_they_are(tmp_path: Path) -> None:
    make_source(tmp_path / "a", ["double", "units"])
    told = featcache.inspect.estimate(tmp_path / "a")
    ways = {(row.feature, row.backend, row.dtype): row for row in told.rows}
    assert ways["double", "memmap", "float64"].cosine == 1
    assert 0 < ways["double", "memmap", "float16"].largest_error < 1
    assert "units as int16 " in told.advice


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_source(tmp_path / "a", [*KINDS])
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    featcache.inspect.estimate(tmp_path / "a", ["half", "speaker"])
    assert list((tmp_path / "temporary").iterdir()) == []


def test_features_of_others_are_estimated_where_they_lie(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "feats.h5", "w") as file:
        for number in range(30):
            file[f"fbank/utt-{number}"] = speech_like(number, 100 + number)
    before = (tmp_path / "feats.h5").read_bytes()
    half = FeatureStorageConfig("fbank", "float16")
    pattern = {"pattern": "{feature}/{id}"}
    told = featcache.inspect.estimate(tmp_path / "feats.h5", [half], adopting=pattern)
    converted = featcache.convert(
        tmp_path / "feats.h5", tmp_path / "c", features=[half], adopting=pattern, progressbar=False
    )
    assert told.utterances == 30
    assert told.nbytes == pytest.approx(size_of(converted.path), rel=0.03)
    assert (tmp_path / "feats.h5").read_bytes() == before
    assert {*tmp_path.iterdir()} == {tmp_path / "feats.h5", tmp_path / "c"}


def test_an_estimate_reads_by_its_library_what_cannot_be_adopted(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "feats.h5", "w") as file:
        file.create_dataset("utt-1", data=np.ones((300, 80), np.float32), chunks=(75, 40))
    told = featcache.inspect.estimate(tmp_path / "feats.h5")
    assert (told.utterances, told.frames) == (1, {"feats": 300})
    assert [path.name for path in tmp_path.iterdir()] == ["feats.h5"]
