"""Writing: in any order, in several runs, until the process is killed; the cache is the same."""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import featcache
from featcache.declaration import FeatureStorageConfig
from featcache.format.files import from_storage
from featcache.store import Cache
from featcache.testing.backend_under_test import (
    Storage,
    Utterances,
    as_given,
    some_features,
    some_utterances,
    write,
)

FRAMES = {
    "utt-10": 600,
    "utt-9": 3,
    "Utt-9": 0,
    "spk/1": 1025,
    "spk.1": 1,
    "ü": 90,
    "u": 7,
    "z" * 300: 256,
}
IDS = list(FRAMES)


class Writing:
    """The cache is the same in whatever way the utterances come."""

    def test_the_order_of_arrival_does_not_matter(self, storage: Storage, tmp_path: Path) -> None:
        features = some_features(storage)
        utterances = some_utterances(features, FRAMES)
        write(tmp_path / "cache", features, utterances)
        write(tmp_path / "other", features, utterances, ids=IDS[::-1])
        write(tmp_path / "third", features, utterances, ids=IDS[3:] + IDS[:3])
        cache = featcache.open(tmp_path / "cache")
        storage.assert_holds(cache, features, utterances)
        for other in ("other", "third"):
            assert_equal(featcache.open(tmp_path / other), cache)

    def test_a_second_writer_goes_on(self, storage: Storage, tmp_path: Path) -> None:
        features = some_features(storage)
        utterances = some_utterances(features, FRAMES)
        write(tmp_path / "once", features, utterances)
        write(tmp_path / "twice", features, utterances, ids=IDS[::2])
        storage.assert_holds(
            featcache.open(tmp_path / "twice"), features, {id: utterances[id] for id in IDS[::2]}
        )
        write(tmp_path / "twice", features, utterances, ids=IDS[1::2])
        assert_equal(
            featcache.open(tmp_path / "twice", verify="arrays"), featcache.open(tmp_path / "once")
        )

    def test_statistics_are_those_of_the_written_arrays(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        features = some_features(storage)
        utterances = some_utterances(features, FRAMES)
        for ids in (IDS[:3], IDS[3:]):
            write(tmp_path / "cache", features, utterances, ids)
        for feature in features:
            if feature.stats:
                arrays = [
                    from_storage(each[feature.name], feature.dtype) for each in utterances.values()
                ]
                frames = np.concatenate(
                    [a if feature.time_axis == 0 else a[None] for a in arrays]
                ).astype(np.float64)
                stats = featcache.open(tmp_path / "cache").stats(feature.name)
                assert stats.count == len(frames)
                np.testing.assert_allclose(stats.mean, frames.mean(axis=0), rtol=1e-12)
                np.testing.assert_allclose(stats.std, frames.std(axis=0), rtol=1e-12)

    def test_what_was_committed_survives_a_killed_writer(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        features = some_features(storage)
        utterances = some_utterances(features, FRAMES)
        path = tmp_path / "cache"
        write_until_killed(path, features, utterances, committed=IDS[:5], lost=IDS[5:7])
        with featcache.CacheWriter(path, features) as writer:
            assert all(id in writer for id in IDS[:5])
            for id in IDS:
                if id not in writer:
                    writer.write(
                        id, {f.name: as_given(utterances[id][f.name], f.dtype) for f in features}
                    )
        storage.assert_holds(featcache.open(path, verify="arrays"), features, utterances)
        write(tmp_path / "alive", features, utterances)
        assert_equal(featcache.open(path), featcache.open(tmp_path / "alive"))


def assert_equal(cache: Cache, other: Cache) -> None:
    """Fail unless two caches hold the same, bit for bit; statistics may differ by rounding."""
    assert list(cache) == list(other)
    assert cache.fingerprint == other.fingerprint
    assert (cache.complete, other.complete) == (True, True)
    for feature in cache.features:
        batch, expected = (
            cache.read_batch(list(cache), feature),
            other.read_batch(list(cache), feature),
        )
        assert batch.data.tobytes() == expected.data.tobytes()
        assert (
            batch.lengths.tolist() == cache.lengths(feature).tolist() == expected.lengths.tolist()
        )
        if cache.fingerprint["features"][feature]["stats"]:
            stats, wanted = cache.stats(feature), other.stats(feature)
            assert stats.count == wanted.count
            np.testing.assert_allclose(stats.mean, wanted.mean, rtol=1e-12)
            np.testing.assert_allclose(stats.std, wanted.std, rtol=1e-12)


def write_until_killed(
    path: Path,
    features: list[FeatureStorageConfig],
    utterances: Utterances,
    committed: list[str],
    lost: list[str],
) -> None:
    """Write in a process that kills itself with SIGKILL after writing, not committing, `lost`."""
    arrays = {
        f"{number}.{feature.name}": from_storage(utterances[id][feature.name], feature.dtype)
        for number, id in enumerate(committed + lost)
        for feature in features
    }
    file = path.with_name("arrays.npz")
    np.savez(file, **arrays)  # type: ignore[arg-type]  # mypy takes them for `allow_pickle`
    job = {
        "features": [feature.to_json() for feature in features],
        "committed": committed,
        "lost": lost,
    }
    script = Path(__file__).with_name("killed_writer.py")
    ended = subprocess.run(
        [sys.executable, "-P", script, path, json.dumps(job), file],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
