"""lhotse stores features in caches: with one job, with several, in batches, and after a kill."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featcache
from featcache.errors import ConfigError, FeatureError, KeyNotFoundError
from featcache.interface import Array

lhotse: Any = pytest.importorskip("lhotse")
soundfile: Any = pytest.importorskip("soundfile")
from lhotse.features.base import FeatureExtractor, register_extractor  # noqa: E402

from featcache.interop.lhotse import FeatcacheReader, FeatcacheWriter, to_cuts  # noqa: E402

HZ = 16_000
COUNT = 7


@dataclass
class SquaresConfig:
    scale: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


@register_extractor
class Squares(FeatureExtractor):  # type: ignore[misc]
    """Mean squares of four pieces of each frame of 10 ms."""

    name = "featcache-squares"
    config_type = SquaresConfig
    frame_shift = 0.01

    def extract(self, samples: Any, sampling_rate: int) -> Array:
        squares = np.square(np.asarray(samples, np.float32).reshape(-1, 4, 40)).mean(axis=2)
        scaled: Array = squares * np.float32(self.config.scale)
        return scaled

    def feature_dim(self, sampling_rate: int) -> int:
        return 4


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, rng = tmp_path_factory.mktemp("wavs"), np.random.default_rng(0)
    for number in range(COUNT):
        samples = rng.uniform(-0.5, 0.5, 160 * (10 + 3 * number))
        soundfile.write(folder / f"utt-{number}.wav", samples, HZ, subtype="FLOAT")
    recordings = lhotse.RecordingSet.from_dir(folder, "*.wav")
    return lhotse.CutSet.from_manifests(recordings=recordings).to_eager()


def assert_stored(found: Any, cuts: Any, scale: float = 1.0) -> None:
    """The features of all cuts are those that the extractor computes."""
    found = {cut.id: cut for cut in found}
    assert sorted(found) == sorted(cut.id for cut in cuts)
    for cut in cuts:
        expected = Squares(SquaresConfig(scale)).extract(cut.load_audio(), HZ)
        np.testing.assert_array_equal(found[cut.id].load_features(), expected)


def test_one_job_writes_a_cache_and_writes_it_anew(tmp_path: Path, cuts: Any) -> None:
    path = tmp_path / "cache"
    for scale in (1.0, 2.0):
        stored = cuts.compute_and_store_features(
            Squares(SquaresConfig(scale)), path, storage_type=FeatcacheWriter
        )
        lhotse.qa.validate(stored, read_data=True)
        assert_stored(stored, cuts, scale)
        cache = featcache.open(path, verify="arrays")
        assert cache.complete
        assert sorted(cache) == sorted(cut.features.storage_key[6:] for cut in stored)
    (cut, *_) = stored
    np.testing.assert_array_equal(
        cut.truncate(offset=0.02, duration=0.05).load_features(), cut.load_features()[2:7]
    )


def test_several_jobs_write_one_cache(tmp_path: Path, cuts: Any) -> None:
    path = tmp_path / "cache"
    with FeatcacheWriter(path) as writer:  # what earlier runs wrote is gone then
        writer.write("old", np.zeros((3, 4), np.float32))
    for scale in (1.0, 2.0):
        with ThreadPoolExecutor(3) as executor:
            stored = cuts.compute_and_store_features(
                Squares(SquaresConfig(scale)),
                path,
                num_jobs=3,
                executor=executor,
                storage_type=FeatcacheWriter,
            )
        assert {cut.features.storage_path for cut in stored} == {str(path)}
        assert_stored(stored, cuts, scale)
        cache = featcache.open(path, verify="arrays")
        assert cache.complete
        assert sorted(cache) == sorted(cut.features.storage_key[6:] for cut in stored)


def test_jobs_that_do_not_overlap_write_one_cache(tmp_path: Path) -> None:
    tmp_path.joinpath("cache").mkdir()
    for job in range(3):
        with FeatcacheWriter(tmp_path / "cache" / f"feats-{job}") as writer:
            writer.write(f"u{job}", np.full((3, 2), job, np.float32))
    cache = featcache.open(tmp_path / "cache")
    assert cache.complete
    assert [cache.read(id, "feats").max() for id in cache] == [0, 1, 2]


def test_a_folder_of_another_use_is_not_taken_for_that_of_jobs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with FeatcacheWriter(tmp_path / "feats-1") as writer:
        writer.write("u", np.zeros((3, 2)))
    assert writer.storage_path == str(tmp_path / "feats-1")
    assert len(featcache.open(tmp_path / "feats-1")) == 1


def in_batches(
    cuts: Any, folder: Path, extractor: Any, storage: Any = FeatcacheWriter, **options: Any
) -> Any:
    return cuts.compute_and_store_features_batch(
        extractor,
        folder / "cache",
        folder / "cuts.jsonl",
        batch_duration=0.3,
        storage_type=storage,
        num_workers=0,
        **options,
    )


def test_batches_write_a_cache_with_the_ids_of_the_cuts(tmp_path: Path, cuts: Any) -> None:
    for scale in (1.0, 2.0):
        extractor = Squares(SquaresConfig(scale))
        assert_stored(in_batches(cuts, tmp_path, extractor, overwrite=True), cuts, scale)
        assert sorted(featcache.open(tmp_path / "cache")) == sorted(cut.id for cut in cuts)


def in_a_process_that_dies_at_the_third_cut(run: Callable[[], object]) -> None:
    """Run in a fork that ends as by a kill, as soon as the manifest names three cuts."""
    writes = list[Any]()

    def write(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        writes.append(args)
        if len(writes) == 3:
            os._exit(0)

    original = lhotse.serialization.SequentialJsonlWriter.write
    child = os.fork()
    if child == 0:
        try:
            lhotse.serialization.SequentialJsonlWriter.write = write
            run()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("backend", ["memmap", "hdf5"])
def test_a_killed_run_in_batches_goes_on_and_loses_nothing(
    tmp_path: Path, cuts: Any, backend: str
) -> None:
    storage = FeatcacheWriter.storing(featcache.FeatureStorageConfig("f", backend=backend))

    def run() -> Any:
        return in_batches(cuts, tmp_path, Squares(SquaresConfig()), storage)

    in_a_process_that_dies_at_the_third_cut(run)
    told = list(lhotse.CutSet.from_jsonl(tmp_path / "cuts.jsonl"))
    assert len(told) == 3
    assert_stored(told, told)  # though nobody has opened the cache since
    assert_stored(run(), cuts)
    assert len(featcache.open(tmp_path / "cache", verify="arrays")) == COUNT


def test_what_is_written_is_read_before_the_writer_is_closed(tmp_path: Path) -> None:
    for value in (1, 2):  # the second time beside a cache that stays until then
        with FeatcacheWriter(tmp_path) as writer:
            stored = writer.store_array(
                "u", np.full((4, 2), value), frame_shift=0.01, temporal_dim=0
            )
            assert stored.load().tolist() == [[value, value]] * 4
            assert stored.load(start=0.01, duration=0.02).shape == (2, 2)
            if value == 2:
                assert featcache.open(tmp_path).read("u", "feats").max() == 1
        assert stored.load().max() == value


def test_of_an_overwrite_that_was_interrupted_nothing_is_left(tmp_path: Path) -> None:
    with FeatcacheWriter(tmp_path) as writer:
        writer.write("old", np.zeros((3, 2)))
    with suppress(KeyboardInterrupt), FeatcacheWriter(tmp_path) as writer:
        writer.write("interrupted", np.zeros((3, 2)))
        raise KeyboardInterrupt
    assert list(featcache.open(tmp_path)) == ["old"]
    with FeatcacheWriter(tmp_path) as writer:
        writer.write("new", np.zeros((3, 2)))
    assert list(featcache.open(tmp_path)) == ["new"]


def test_going_on_replaces_what_an_earlier_run_stored_and_refuses_doubles(tmp_path: Path) -> None:
    for value, ids in ((1, "ab"), (1, "bc"), (2, "cd")):
        with FeatcacheWriter(tmp_path, mode="a") as writer:
            for id in ids:
                assert writer.write(id, np.full((3, 2), value)) == f"feats/{id}"
            with pytest.raises(featcache.errors.DuplicateIdError):
                writer.write(ids[0], np.zeros((3, 2), int))
    cache = featcache.open(tmp_path, verify="arrays")
    assert {id: cache.read(id, "feats").max() for id in cache} == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_declared_features_make_one_cache_that_becomes_cuts_again(tmp_path: Path) -> None:
    fbank = featcache.FeatureStorageConfig("fbank", dtype="float16", frame_s=0.01, backend="hdf5")
    units = featcache.FeatureStorageConfig("units", dtype="int16", frame_s=0.02)
    for declared, shape in ((fbank, (10, 4)), (units, (5,))):
        storage = pickle.loads(  # noqa: S301  # as lhotse's workers get it
            pickle.dumps(FeatcacheWriter.storing(declared, {"rate_hz": HZ}))
        )
        assert storage.name == "featcache"
        with storage(tmp_path, mode="w") as writer:
            key = writer.write("utt/1", np.ones(shape, np.int16))
            assert FeatcacheReader(tmp_path).read(key).shape == shape
    cache = featcache.open(tmp_path, expect={"rate_hz": HZ})
    (cut,) = to_cuts(cache, sample_rate_hz=HZ, feature="fbank")
    assert cut.load_features().dtype == np.float16
    assert cut.load_units().shape == (5,)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mode is 'w'"):
        FeatcacheWriter(tmp_path, mode="r")
    with FeatcacheWriter(tmp_path) as writer:
        writer.write("a", np.zeros((3, 2), np.float32))
        with pytest.raises(FeatureError, match="'b' is int64, and the arrays before it are float3"):
            writer.write("b", np.zeros((3, 2), int))
    with pytest.raises(KeyNotFoundError, match="'c'"):
        FeatcacheReader(tmp_path).read("feats/c")
