"""`featcache.inspect.estimate`: bytes within 3 % of what is then written, from a few utterances."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from convert_helpers import KINDS, make_source

import featcache
from featcache import CacheWriter, EnvironmentProvider, FeatureStorageConfig
from featcache.errors import AdoptionError, ComputeError, ConfigError


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


class Waves(EnvironmentProvider):
    """A data set of waves, whose features are a tenth of their length."""

    def __init__(self, size: int, *, shown: bool = True) -> None:
        self.samples = [1000 + (number * 7919) % 9000 for number in range(size)]
        self.shown, self.computed = shown, 0

    def build_env_local(self) -> dict[str, object]:
        ids = [f"utterance-{number}" for number in range(len(self.samples))]
        env: dict[str, object] = {"dataset": [*zip(ids, self.samples, strict=True)], "ids": ids}
        shown = {"lengths": self.samples} if self.shown else {}
        return {**env, **shown, "compute_features": self.compute}

    def compute(self, batch: list[tuple[str, int]]) -> list[dict[str, object]]:
        self.computed += len(batch)
        return [
            {"id": id, "fbank": torch.from_numpy(speech_like(samples, samples // 10))}
            for id, samples in batch
        ]


@pytest.mark.parametrize("shown", [True, False])
def test_an_extraction_is_estimated_from_few_utterances(tmp_path: Path, shown: bool) -> None:
    waves = Waves(500, shown=shown)
    declared = [FeatureStorageConfig("fbank", backend="hdf5", codec="gzip")]
    told = featcache.inspect.estimate(waves, declared, utterances=24)
    assert waves.computed == 24
    assert (told.uncertainty > 0.01) is not shown
    featcache.extract(waves, tmp_path / "a", declared, check=None, progressbar=False)
    written = size_of(tmp_path / "a")
    allowed = 0.03 if shown else 3 * told.uncertainty
    assert told.nbytes == pytest.approx(written, rel=allowed)
    assert told.frames["fbank"] == pytest.approx(
        featcache.open(tmp_path / "a").lengths("fbank").sum(), rel=allowed
    )


def test_an_environment_is_estimated_as_its_provider() -> None:
    declared = [FeatureStorageConfig("fbank")]
    env = Waves(50).build_env_local()
    assert (
        featcache.inspect.estimate(env, declared).nbytes
        == featcache.inspect.estimate(Waves(50), declared).nbytes
    )


def test_the_table_tells_what_is_declared_and_what_loses(tmp_path: Path) -> None:
    make_source(tmp_path / "a", ["fbank", "units"])
    text = repr(featcache.inspect.estimate(tmp_path / "a", ["fbank"]))
    assert "40 utterances, frames: " in text
    assert sum(line.endswith("as declared") for line in text.splitlines()) == 1
    assert [line for line in text.splitlines() if "lilcom" in line and line.endswith("lossy")]
    integers = featcache.inspect.estimate(tmp_path / "a", ["units"]).rows
    assert {row.dtype for row in integers} == {"int16"}
    assert "lilcom" not in {row.codec for row in integers}


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_source(tmp_path / "a", [*KINDS])
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    featcache.inspect.estimate(tmp_path / "a", ["half", "speaker"])
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_cannot_be_estimated_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="declare its features"):
        featcache.inspect.estimate(Waves(3))
    with pytest.raises(ConfigError, match="is empty"):
        featcache.inspect.estimate(Waves(0), [FeatureStorageConfig("fbank")])

    class Broken(Waves):
        def compute(self, batch: list[tuple[str, int]]) -> list[dict[str, object]]:
            raise ValueError("no such file")

    with pytest.raises(ComputeError, match=r"utterance-.*no such file"):
        featcache.inspect.estimate(Broken(3), [FeatureStorageConfig("fbank")])


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


def test_an_estimate_copies_nothing_that_cannot_be_adopted(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "feats.h5", "w") as file:
        file.create_dataset("utt-1", data=np.ones((300, 80), np.float32), chunks=(75, 40))
    with pytest.raises(AdoptionError, match=r"featcache\.convert makes a cache of it"):
        featcache.inspect.estimate(tmp_path / "feats.h5")
