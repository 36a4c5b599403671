"""Caches as cuts of lhotse: lhotse loads from them what it would load from its own storage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featcache
from featcache.errors import ConfigError, KeyNotFoundError

lhotse: Any = pytest.importorskip("lhotse")
from featcache.interop import lhotse as ours  # noqa: E402

HZ = 16_000


def written(path: Path, *, backend: str = "memmap", count: int = 12) -> featcache.Cache:
    rng = np.random.default_rng(0)
    declared = [
        featcache.FeatureStorageConfig("fbank", dtype="float16", frame_s=0.01, backend=backend),
        featcache.FeatureStorageConfig("units", dtype="int16", frame_s=0.02),
        featcache.FeatureStorageConfig("xvector", time_axis=None),
    ]
    with featcache.CacheWriter(path, declared) as writer:
        for number in range(count):
            frames = int(rng.integers(50, 400))
            arrays = {
                "fbank": rng.normal(size=(frames, 80)),
                "units": rng.integers(0, 500, frames // 2),
                "xvector": rng.normal(size=16),
            }
            told = {"text": f"say {number}", "speaker": f"s{number % 3}", "snr": number / 2}
            seconds = frames / 100 + 0.0025 * (number % 2)  # a wave ends between two frames
            writer.write(f"a/u{number}", arrays, annotations={**told, "duration": seconds})
    return featcache.open(path)


@pytest.fixture
def cache(tmp_path: Path) -> featcache.Cache:
    return written(tmp_path / "cache")


@pytest.mark.parametrize("backend", ["memmap", "hdf5"])
def test_features_of_all_cuts_are_those_of_the_cache(tmp_path: Path, backend: str) -> None:
    cache = written(tmp_path / "cache", backend=backend)
    cuts = cache.to_cuts(sample_rate_hz=HZ, feature="fbank")
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    for found in (cuts, lhotse.CutSet.from_file(tmp_path / "cuts.jsonl.gz")):
        assert [cut.id for cut in found] == list(cache)
        for cut in found:
            np.testing.assert_array_equal(cut.load_features(), cache.read(cut.id, "fbank"))
            np.testing.assert_array_equal(cut.load_units(), cache.read(cut.id, "units"))
            np.testing.assert_array_equal(cut.load_xvector(), cache.read(cut.id, "xvector"))
            assert cut.load_features().flags.writeable


def test_annotations_are_supervisions_and_custom_fields(cache: featcache.Cache) -> None:
    cuts = cache.to_cuts(sample_rate_hz=HZ, feature="fbank")
    durations = dict(zip(cache, cache.annotation("duration"), strict=True))
    for cut in cuts:
        number = int(cut.id.removeprefix("a/u"))
        (said,) = cut.supervisions
        assert (said.text, said.speaker) == (f"say {number}", f"s{number % 3}")
        assert (said.duration, said.recording_id) == (cut.duration, cut.id)
        assert cut.snr == number / 2
        assert cut.duration == durations[cut.id]
        lhotse.qa.validate(cut)


@pytest.mark.parametrize(
    ("left", "right"), [(0, None), (3, None), (3, 9), (0, 10_000), (10_000, None), (9, 3), (0, 0)]
)
def test_the_reader_cuts_frames_as_lhotses_own(
    cache: featcache.Cache, tmp_path: Path, left: int, right: int | None
) -> None:
    whole = cache.read("a/u3", "fbank")
    with lhotse.NumpyHdf5Writer(tmp_path / "theirs") as writer:
        writer.write("u", whole)
    theirs = lhotse.features.io.NumpyHdf5Reader(writer.storage_path).read("u", left, right)
    found = ours.FeatcacheReader(cache.path).read("fbank/a/u3", left, right)
    np.testing.assert_array_equal(found, theirs)
    assert found.dtype == theirs.dtype


def test_truncated_and_windowed_cuts_read_their_frames(cache: featcache.Cache) -> None:
    (cut, *_) = cache.to_cuts(sample_rate_hz=HZ, feature="fbank")
    found = cut.truncate(offset=0.1, duration=0.25).load_features()
    np.testing.assert_array_equal(found, cache.read(cut.id, "fbank", 10, 35))
    windows = cache.to_cuts(sample_rate_hz=HZ, feature="fbank").cut_into_windows(0.2)
    np.testing.assert_array_equal(
        np.concatenate([each.load_features() for each in windows][:2]),
        cache.read(cut.id, "fbank", 0, 40),
    )


def test_manifests_of_features_give_lhotses_statistics(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    features = cache.to_features(sample_rate_hz=HZ, feature="fbank")
    assert [each.num_frames for each in features] == cache.lengths("fbank").tolist()
    cuts = cache.to_cuts(sample_rate_hz=HZ, feature="fbank")
    found = cuts.compute_global_feature_stats()
    np.testing.assert_allclose(found["norm_means"], cache.stats("fbank").mean, rtol=1e-5)


def test_views_joined_and_concatenated_caches_are_read_where_they_lie(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one"), written(tmp_path / "two", count=3)
    table = featcache.concat(
        one.filter(lambda row: str(row["id"]) >= "a/u5"), two.select(["a/u0", "a/u1"])
    )
    cuts = table.to_cuts(sample_rate_hz=HZ, feature="fbank")
    assert len(cuts) == len(table)
    for cut in cuts:
        np.testing.assert_array_equal(cut.load_features(), table.read(cut.id, "fbank"))


@pytest.mark.parametrize(
    ("backend", "codec", "storage"),
    [
        ("hdf5", "raw", "numpy_hdf5"),
        ("hdf5", "gzip", "numpy_hdf5"),
        ("hdf5", "lilcom", "lilcom_hdf5"),
        ("lilcom", "lilcom", "lilcom_chunky"),
    ],
)
def test_native_manifests_are_read_by_lhotse_alone(
    tmp_path: Path, backend: str, codec: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, ids = np.random.default_rng(0), ["a/1", "50%", "."]
    declared = [featcache.FeatureStorageConfig("f", frame_s=0.01, backend=backend, codec=codec)]
    for number, id in enumerate(ids):  # in several parts
        with featcache.CacheWriter(tmp_path / "cache", declared) as writer:
            writer.write(id, {"f": rng.normal(size=(500 * number + 20, 4))})
    cache = featcache.open(tmp_path / "cache")
    cuts = cache.to_cuts(sample_rate_hz=HZ, native=True)
    cuts.to_file(tmp_path / "cuts.jsonl")
    monkeypatch.delitem(lhotse.features.io.READER_BACKENDS, "featcache")
    for cut in lhotse.CutSet.from_file(tmp_path / "cuts.jsonl"):
        assert cut.features.storage_type == storage
        np.testing.assert_array_equal(cut.load_features(), cache.read(cut.id, "f"))
        found = cut.truncate(offset=0.02, duration=0.1).load_features()
        np.testing.assert_array_equal(found, cache.read(cut.id, "f", 2, 12))


def test_native_manifests_of_other_backends_are_refused(cache: featcache.Cache) -> None:
    with pytest.raises(
        ConfigError, match=r"no reader of its own for 'fbank'.*float16, memmap, raw"
    ):
        cache.to_features(sample_rate_hz=HZ, feature="fbank", native=True)


def test_segments_are_refused(cache: featcache.Cache) -> None:
    table = cache.segments(featcache.Windows(0.2, hop_s=0.2))
    with pytest.raises(ConfigError, match="is no utterance of"):
        table.to_cuts(sample_rate_hz=HZ, feature="fbank")


@pytest.mark.parametrize(
    ("feature", "says"), [(None, "feature= names one"), ("units", "are matrices of frames")]
)
def test_features_that_lhotse_does_not_have_are_refused(
    cache: featcache.Cache, feature: str | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        cache.to_features(sample_rate_hz=HZ, feature=feature)


def test_a_cache_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        declared = [featcache.FeatureStorageConfig("f", frame_s=0.01)]
        with featcache.CacheWriter(tmp_path, declared, overwrite=value > 1) as writer:
            writer.write("u", {"f": np.full((10, 2), value)})
        (cut,) = featcache.open(tmp_path).to_cuts(sample_rate_hz=HZ)
        assert float(cut.load_features().max()) == value
    with pytest.raises(KeyNotFoundError, match="'v'"):
        ours.FeatcacheReader(tmp_path).read("f/v")


def test_lhotses_sampler_and_dataset_load_them_in_workers(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    import torch
    from lhotse.dataset import DynamicBucketingSampler, K2SpeechRecognitionDataset

    cache.to_cuts(sample_rate_hz=HZ, feature="fbank").to_file(tmp_path / "cuts.jsonl")
    cuts = lhotse.CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl")
    sampler = DynamicBucketingSampler(cuts, max_duration=8.0, num_buckets=2, shuffle=True)
    dataset = K2SpeechRecognitionDataset(return_cuts=True)
    loader = torch.utils.data.DataLoader(
        dataset, sampler=sampler, batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    seen = []
    for batch in loader:
        for row, cut in enumerate(batch["supervisions"]["cut"]):
            expected = torch.from_numpy(cache.read(cut.id, "fbank").astype(np.float32))
            torch.testing.assert_close(batch["inputs"][row, : len(expected)].float(), expected)
            seen.append(cut.id)
    assert sorted(seen) == sorted(cache)


def test_another_process_reads_saved_cuts_once_the_module_is_imported(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    cache.to_cuts(sample_rate_hz=HZ, feature="fbank").to_file(tmp_path / "cuts.jsonl")
    code = f"""
import lhotse, featcache.interop.lhotse
for cut in lhotse.CutSet.from_file({str(tmp_path / "cuts.jsonl")!r}):
    print(cut.load_features().shape[0])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert [*map(int, done.stdout.split())] == cache.lengths("fbank").tolist()


def test_a_mix_is_given_without_its_plan_which_the_log_tells(
    cache: featcache.Cache, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = featcache.mix(cache.split({"a": 0.5, "b": 0.5}, seed=1), weights={"a": 3, "b": 1})
    cuts = mixed.to_cuts(sample_rate_hz=16000, feature="fbank")
    assert len(cuts) == len(mixed)
    (told,) = (record.getMessage() for record in caplog.records)
    assert "to_cuts gives each row of a mix once, without its plan" in told
