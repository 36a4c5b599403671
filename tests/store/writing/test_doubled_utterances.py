"""The same id in two parts of a build: the first row stands, the other is left out and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from store_scripts import run_script

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.registry import get_backend
from featcache.writing.part_writer import PartWriter

CODED = [
    (backend, codec)
    for backend in featcache.registry.backend_names()
    for codec in get_backend(backend).codecs
]


def frames(number: int, copy: int) -> NDArray[np.float32]:
    random = np.random.default_rng((number, copy))
    return (random.standard_normal((number * 7 % 40 + 1, 5)) * 3 + 10 * copy).astype(np.float32)


def write_parts(path: Path, features: list[FeatureStorageConfig], parts: list[range]) -> list[int]:
    """Write overlapping parts, and return their numbers in the order of their names."""
    names: list[str] = []
    with CacheWriter(path, features) as writer:
        writers = [PartWriter(path, features) for _ in parts]
        for copy, (part, numbers) in enumerate(zip(writers, parts, strict=True)):
            for number in numbers:
                part.write(f"{number:03}", arrays(features, number, copy))
            (name,) = {entry.name for entry in (path / "parts").iterdir()} - {*names}
            names.append(name)
        for part in writers:
            part.close()
        writer.publish()
    return sorted(range(len(parts)), key=names.__getitem__)


def arrays(features: list[FeatureStorageConfig], number: int, copy: int) -> dict[str, Any]:
    whole = frames(number, copy)
    return {each.name: whole if each.time_axis == 0 else whole[0] for each in features}


def check(path: Path, features: list[FeatureStorageConfig], stands: dict[int, int]) -> None:
    cache = featcache.open(path, verify="arrays", check_reads=True)
    assert list(cache) == [f"{number:03}" for number in sorted(stands)]
    for feature in features:
        rows = []
        lossy = feature.codec in ("lilcom", "int8")
        for number, copy in stands.items():
            expected = arrays(features, number, copy)[feature.name]
            found = cache.read(f"{number:03}", feature.name)
            np.testing.assert_allclose(found, expected, atol=0.1 if lossy else 0, rtol=0)
            rows.append(np.atleast_2d(expected).astype(np.float64))
        joined = np.concatenate(rows)
        stats = cache.stats(feature.name)
        assert stats.count == len(joined)
        tolerance = 1e-2 if lossy else 1e-12
        np.testing.assert_allclose(stats.mean, joined.mean(axis=0), rtol=tolerance)
        np.testing.assert_allclose(stats.var, joined.var(axis=0), rtol=tolerance)


@pytest.mark.parametrize(("backend", "codec"), CODED)
def test_the_first_row_stands_and_statistics_are_of_what_remains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, backend: str, codec: str
) -> None:
    features = [
        FeatureStorageConfig("fbank", backend=backend, codec=codec, stats=True),
        FeatureStorageConfig("xvector", backend=backend, codec=codec, time_axis=None, stats=True),
    ]
    parts = [range(5), range(3, 8), range(4, 10)]
    order = write_parts(tmp_path, features, parts)
    stands = {number: copy for copy in reversed(order) for number in parts[copy]}
    check(tmp_path, features, stands)
    told = [line for line in caplog.text.splitlines() if "were stored twice" in line]
    assert len(told) == 2
    for number in range(10):
        twice = sum(number in part for part in parts) > 1
        assert any(repr(f"{number:03}") in line for line in told) == twice
    caplog.clear()
    with CacheWriter(tmp_path, features) as writer:  # stays so over further generations
        for number in (20, 21):
            writer.write(f"{number:03}", arrays(features, number, 7))
            writer.publish()
    check(tmp_path, features, stands | {20: 7, 21: 7})
    assert "stored twice" not in caplog.text
    with CacheWriter(tmp_path, features, overwrite=True) as writer:
        writer.write("004", arrays(features, 4, 9))
    check(tmp_path, features, {4: 9})


def test_a_part_of_nothing_but_copies_leaves_an_empty_part(tmp_path: Path) -> None:
    features = [FeatureStorageConfig("fbank")]
    order = write_parts(tmp_path, features, [range(4), range(4), range(4)])
    check(tmp_path, features, dict.fromkeys(range(4), order[0]))
    with CacheWriter(tmp_path, features) as writer:
        assert all(f"{number:03}" in writer for number in range(4))
        assert "004" not in writer


def test_further_copies_of_what_was_left_out_before_are_left_out_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features = [FeatureStorageConfig("fbank")]
    with CacheWriter(tmp_path, features) as writer:
        late = [PartWriter(tmp_path, features) for _ in range(3)]
        for copy, part in enumerate(late):
            for number in range(copy, copy + 3):
                part.write(f"{number:03}", {"fbank": frames(number, copy)})
            part.close()
            writer.publish()
    names = sorted(entry.name for entry in (tmp_path / "parts").iterdir())
    cache = featcache.open(tmp_path, verify="arrays")
    assert list(cache) == [f"{number:03}" for number in range(5)]
    stands = {}
    for number in range(5):
        found = cache.read(f"{number:03}", "fbank")
        copies = [copy for copy in range(3) if np.array_equal(found, frames(number, copy))]
        assert len(copies) == 1
        stands[number] = copies[0]
    check(tmp_path, features, stands)
    assert len(names) == 3
    assert caplog.text.count("stored twice") in (2, 3)


def test_a_part_writer_that_outlives_its_driver_does_no_harm(tmp_path: Path) -> None:
    """D5: its part is sealed after another run has finished the same utterances."""
    script = """
import subprocess, time
driver = subprocess.Popen(
    [sys.executable, "-c", sys.argv[2], str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
driver.stdout.readline()
orphan = PartWriter(path, two_features(), FINGERPRINT)  # no part of it is open yet
driver.kill(); driver.wait(); driver.stdin.close(); driver.stdout.close()
make_cache(path, range(6))
for number in range(4, 9):
    orphan.write(id_of(number), arrays_of(number))
orphan.close()
check_cache(path, range(6))
with CacheWriter(path, two_features(), FINGERPRINT) as writer:
    write(writer, [number for number in range(12) if id_of(number) not in writer])
check_cache(path, range(12))
make_cache(path, range(12, 14))
check_cache(path, range(14))
make_cache(path, range(3), overwrite=True)
check_cache(path, range(3))
"""
    driver = """
import sys
from pathlib import Path
from featcache import CacheWriter
from store_helpers import FINGERPRINT, two_features
writer = CacheWriter(Path(sys.argv[1]), two_features(), FINGERPRINT)
print("ready", flush=True)
sys.stdin.read()
"""
    done = run_script(script, tmp_path, driver)
    assert done.returncode == 0, done.stderr
    assert "2 utterances were stored twice" in done.stderr
