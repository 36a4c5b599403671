"""What users do that nobody thinks of: threads, generators, other directories, lost files, hundreds
of features.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import featcache
import featcache.errors
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ConfigError, CorruptCacheError, DuplicateIdError, KeyNotFoundError

FEATURES = [FeatureStorageConfig("fbank")]


def make(path: Path, ids: range, complete: bool = True) -> None:
    writer = CacheWriter(path, FEATURES)
    for number in ids:
        if f"utt-{number}" not in writer:
            writer.write(f"utt-{number}", {"fbank": np.full((3, 2), number)})
    writer.close(complete)


def holds(path: Path, ids: range) -> bool:
    cache = featcache.open(path, verify="arrays")
    return len(cache) == len(ids) and all((cache.read(f"utt-{n}", "fbank") == n).all() for n in ids)


@pytest.mark.parametrize("backend", ["memmap", "hdf5", "webdataset"])
def test_threads_may_share_a_writer(tmp_path: Path, backend: str) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank", backend=backend)]) as writer:
        refused: list[str] = []

        def write(first: int) -> None:
            for number in [*range(first, 400, 4), 0]:
                try:
                    writer.write(f"utt-{number}", {"fbank": np.full((3, 2), number)})
                except DuplicateIdError:
                    refused.append(f"utt-{number}")

        threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert refused == ["utt-0"] * 4
    assert holds(tmp_path, range(400))


def test_ids_may_come_from_a_generator_but_not_as_one_string(tmp_path: Path) -> None:
    make(tmp_path, range(5))
    cache = featcache.open(tmp_path)
    assert cache.read_batch((f"utt-{n}" for n in (3, 1)), "fbank").data[:, 0, 0].tolist() == [3, 1]
    assert cache.lengths("fbank", ids=(id for id in cache)).tolist() == [3] * 5
    with pytest.raises(KeyNotFoundError, match="not the one string 'utt-1'"):
        cache.read_batch("utt-1", "fbank")


def test_a_cache_is_a_mapping(tmp_path: Path) -> None:
    make(tmp_path, range(3))
    cache = featcache.open(tmp_path)
    assert list(cache.keys()) == ["utt-0", "utt-1", "utt-2"]
    assert {id: arrays["fbank"].sum() for id, arrays in cache.items()} == {
        "utt-0": 0,
        "utt-1": 6,
        "utt-2": 12,
    }
    assert cache.get("utt-3") is None
    assert cache == cache
    assert cache != featcache.open(tmp_path)


def test_relative_paths_stay_what_they_were_when_the_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with CacheWriter("cache", FEATURES) as writer:
        writer.write("utt-0", {"fbank": np.zeros((3, 2))})
        monkeypatch.chdir(tmp_path / "there")
        writer.write("utt-1", {"fbank": np.ones((3, 2))})
    monkeypatch.chdir(tmp_path / "here")
    cache, reader = featcache.open("cache"), featcache.FeatureReader("cache", "fbank")
    monkeypatch.chdir(tmp_path / "there")
    assert cache.read("utt-1", "fbank").sum() == reader("utt-1").sum() == 6
    assert holds(tmp_path / "here" / "cache", range(2))


def test_a_lost_container_is_named_before_anything_is_published_over_it(tmp_path: Path) -> None:
    make(tmp_path, range(4))
    (container,) = tmp_path.glob("parts/*/fbank.npy")
    container.unlink()
    with pytest.raises(
        CorruptCacheError, match=r"fbank.npy' is missing; .*put it back, or remove its part"
    ):
        featcache.open(tmp_path, verify="columns")
    generation = featcache.open(tmp_path).generation
    with pytest.raises(
        CorruptCacheError, match=r"fbank.npy' is missing; .*put it back, or remove its part"
    ):
        make(tmp_path, range(6))
    assert featcache.open(tmp_path).generation == generation


def test_a_removed_part_is_computed_again(tmp_path: Path) -> None:
    make(tmp_path, range(2), complete=False)
    make(tmp_path, range(4))
    first = min((tmp_path / "parts").iterdir())
    subprocess.run(["rm", "-r", str(first)], check=True)
    make(tmp_path, range(4))
    assert holds(tmp_path, range(4))


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_cache_whose_manifest_was_lost_is_found_again_by_its_parts(
    tmp_path: Path, overwritten: bool
) -> None:
    make(tmp_path, range(4))
    if overwritten:
        with CacheWriter(tmp_path, FEATURES, overwrite=True) as writer:
            for number in range(4):
                writer.write(f"utt-{number}", {"fbank": np.full((3, 2), number)})
    manifest = tmp_path / "featcache.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])
    with pytest.raises(
        CorruptCacheError, match="or remove it and write the cache again: what is sealed is kept"
    ):
        make(tmp_path, range(4))
    manifest.unlink()
    with CacheWriter(tmp_path, FEATURES) as writer:
        assert all(f"utt-{number}" in writer for number in range(4))
    assert holds(tmp_path, range(4))


def test_hundreds_of_features_need_few_open_files(tmp_path: Path) -> None:
    features = [FeatureStorageConfig(f"f{number}") for number in range(120)]
    with CacheWriter(tmp_path, features) as writer:
        writer.write("utt", {feature.name: np.ones((2, 3)) for feature in features})
    script = (
        "import resource, sys, featcache\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))\n"
        "print(sum(array.sum() for array in featcache.open(sys.argv[1])['utt'].values()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert float(done.stdout) == 120 * 6


def test_a_fingerprint_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the fingerprint is a dict .* not 'v1'"):
        CacheWriter(tmp_path, FEATURES, "v1")  # type: ignore[arg-type]
