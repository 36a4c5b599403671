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
from featcache.errors import CacheError, ClosedError, ConfigError, FeatureError, KeyNotFoundError
from featcache.interface import Array

lhotse: Any = pytest.importorskip("lhotse")
soundfile: Any = pytest.importorskip("soundfile")
from lhotse.features.base import FeatureExtractor, register_extractor  # noqa: E402

from featcache.interop.lhotse import FeatcacheReader, FeatcacheWriter  # noqa: E402

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
    def run() -> Any:
        with ThreadPoolExecutor(3) as executor:
            return cuts.compute_and_store_features(
                Squares(SquaresConfig()),
                path,
                num_jobs=3,
                executor=executor,
                storage_type=FeatcacheWriter,
            )

    path = tmp_path / "cache"
    stored = run()
    assert {cut.features.storage_path for cut in stored} == {str(path)}
    with pytest.raises(CacheError, match=r"'feats' that job \d of an earlier run wrote"):
        run()
    assert_stored(stored, cuts)
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


def job(path: Path, number: int, mode: str | None = None) -> FeatcacheWriter:
    path.mkdir(exist_ok=True)
    return FeatcacheWriter(path / f"feats-{number}", mode)


def killed_while(write: Callable[[], object]) -> None:
    """Write in a fork that ends as by a kill when it has returned."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _kept = write()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def killed_writer(writer: FeatcacheWriter, *ids: str, value: float = 1.0) -> None:
    """Let a writer of mode "a" or "w" die when it has written these."""
    killed_while(lambda: [writer.write(id, np.full((3, 2), value)) for id in ids])


def test_jobs_refuse_what_no_job_wrote_and_delete_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with FeatcacheWriter(path) as writer:
        writer.write("old", np.zeros((3, 2)))
    with (
        job(path, 0) as writer,
        pytest.raises(CacheError, match=r"no job of lhotse's wrote.*; remove the cache, or"),
    ):
        writer.write("new", np.zeros((3, 2)))
    assert list(featcache.open(path)) == ["old"]
    assert featcache.open(path).complete


@pytest.mark.parametrize("end", ["published", "sealed", "killed"])
def test_a_job_refuses_what_one_of_its_number_wrote_before(tmp_path: Path, end: str) -> None:
    path = tmp_path / "cache"
    if end == "killed":
        killed_writer(job(path, 0, "w"), "a", "b")
    else:
        with job(path, 1) as other:
            if end == "sealed":
                other.write("other", np.zeros((3, 2)))  # lives, so that job 0 publishes nothing
            with job(path, 0) as writer:
                writer.write("a", np.zeros((3, 2)))
            assert_refused(path)
    assert_refused(path)


def assert_refused(path: Path) -> None:
    with job(path, 0) as writer, pytest.raises(CacheError, match="job 0 of an earlier run wrote"):
        writer.write("c", np.zeros((3, 2)))


def test_a_run_in_which_a_job_was_killed_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    killed_writer(job(path, 0, "w"), "a")
    with job(path, 1) as last, job(path, 2) as first:
        last.write("b", np.zeros((3, 2)))
        first.write("c", np.zeros((3, 2)))
    cache = featcache.open(path, verify="arrays")
    assert sorted(cache) == ["a", "b", "c"]
    assert not cache.complete


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_run_in_which_a_job_failed_is_not_complete(tmp_path: Path, fails_first: bool) -> None:
    path = tmp_path / "cache"
    failing, other = job(path, 0), job(path, 1)
    other.write("b", np.zeros((3, 2)))
    if not fails_first:
        failing.write("a", np.zeros((3, 2)))
        other.close()
    with suppress(OSError), failing:
        if fails_first:
            failing.write("a", np.zeros((3, 2)))
        raise OSError("no audio")
    other.close()
    cache = featcache.open(path, verify="arrays")
    assert sorted(cache) == ["a", "b"]
    assert not cache.complete


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


@pytest.mark.parametrize("killed", [True, False])
def test_an_overwrite_that_was_stopped_is_not_gone_on_with(tmp_path: Path, killed: bool) -> None:
    path = tmp_path / "cache"
    with FeatcacheWriter(path) as writer:
        for id in "abc":
            writer.write(id, np.zeros((3, 2)))
    if killed:
        killed_writer(FeatcacheWriter(path, "w"), "a", "b")
    else:
        with suppress(KeyboardInterrupt), FeatcacheWriter(path, "w") as writer:
            writer.write("a", np.ones((3, 2)))
            raise KeyboardInterrupt
    for refusing in (FeatcacheWriter(path, "a"), job(path, 0)):
        with refusing, pytest.raises(CacheError, match="run it again with overwrite=True"):
            refusing.write("c", np.ones((3, 2)))
    with FeatcacheWriter(path, "w") as writer:
        writer.write("c", np.ones((3, 2)))
    cache = featcache.open(path)
    assert {id: cache.read(id, "feats").max() for id in cache} == {"c": 1}


def test_a_refused_array_deletes_nothing(tmp_path: Path) -> None:
    with FeatcacheWriter(tmp_path) as writer:
        for id in "abc":
            writer.write(id, np.full((3, 2), ord(id), np.float32))
    refused = {"a": np.zeros((3, 5)), "b": np.full((3, 2), np.nan), "c": np.zeros(())}
    with FeatcacheWriter(tmp_path, mode="a") as writer:
        for id, array in refused.items():
            with pytest.raises(FeatureError, match=repr(id)):
                writer.write(id, array.astype(np.float32))
    cache = featcache.open(tmp_path, verify="arrays")
    assert {id: cache.read(id, "feats").max() for id in cache} == {id: ord(id) for id in "abc"}


@pytest.mark.parametrize("of_job", [True, False])
def test_nothing_is_written_after_close(tmp_path: Path, of_job: bool) -> None:
    path = tmp_path / "cache"
    writer = job(path, 0) if of_job else FeatcacheWriter(path)
    writer.write("a", np.zeros((3, 2)))
    writer.close()
    with pytest.raises(ClosedError, match="is closed; open another one"):
        writer.write("b", np.zeros((3, 2)))
    writer.close()
    assert list(featcache.open(path)) == ["a"]


@pytest.mark.parametrize("backend", ["memmap", "hdf5"])
def test_statistics_are_right_after_a_kill_though_no_commit_has_them(
    tmp_path: Path, backend: str
) -> None:
    path, feature = tmp_path / "cache", featcache.FeatureStorageConfig("f", backend=backend)
    rng = np.random.default_rng(0)
    arrays = {id: rng.normal(3, 2, (5 + ord(id), 4)).astype(np.float32) for id in "abcd"}

    def write() -> object:
        writer = FeatcacheWriter(path, "a", feature=feature)
        for id in "abc":
            writer.write(id, arrays[id])
        return writer

    killed_while(write)
    (journal,) = path.rglob("journal.jsonl")
    assert b'"mean"' not in journal.read_bytes()
    with FeatcacheWriter(path, "a", feature=feature) as writer:
        writer.write("d", arrays["d"])
    stats = featcache.open(path, verify="arrays").stats("f")
    frames = np.concatenate([*arrays.values()]).astype(np.float64)
    assert stats.count == len(frames)
    np.testing.assert_allclose(stats.mean, frames.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats.std, frames.std(axis=0), rtol=1e-12)


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
    (cut,) = cache.to_cuts(sample_rate_hz=HZ, feature="fbank")
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
