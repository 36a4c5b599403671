"""What a killed writer had committed comes back as it was, in every format and codec."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
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
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CorruptCacheError
from featcache.format import JOURNAL
from featcache.registry import get_backend

CODED = [
    (backend, codec)
    for backend in featcache.registry.backend_names()
    for codec in get_backend(backend).codecs
]


@pytest.mark.parametrize(("backend", "codec"), CODED)
def test_recovered_arrays_are_those_of_a_writer_that_was_not_killed(
    tmp_path: Path, backend: str, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "featcache")
    features = [FeatureStorageConfig("fbank", backend=backend, codec=codec)]
    frames = {number: arrays_of(number, 30 * number + 1)["fbank"] for number in range(12)}
    writer = CacheWriter(tmp_path / "live", features)
    for number in range(6):
        writer.write(id_of(number), {"fbank": frames[number]})
    writer.commit()
    writer.write(id_of(6), {"fbank": frames[6]})  # not committed
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    for number in range(7, 12):
        writer.write(id_of(number), {"fbank": frames[number]})
    writer.close()
    with CacheWriter(tmp_path / "killed", features) as writer:
        assert [number for number in range(12) if id_of(number) in writer] == [0, 1, 2, 3, 4, 5]
        (told,) = (each for each in caplog.messages if "goes on with" in each)
        assert "6 utterances that a writer before this one had committed" in told
        for number in range(6, 12):
            writer.write(id_of(number), {"fbank": frames[number]})
    whole = featcache.open(tmp_path / "live", verify="arrays")
    recovered = featcache.open(tmp_path / "killed", verify="arrays")
    assert list(whole) == list(recovered)
    for id in whole:
        np.testing.assert_array_equal(
            whole.read(id, "fbank"), recovered.read(id, "fbank"), strict=True
        )
    np.testing.assert_allclose(whole.stats("fbank").mean, recovered.stats("fbank").mean, rtol=1e-12)
    np.testing.assert_allclose(whole.stats("fbank").m2, recovered.stats("fbank").m2, rtol=1e-12)


def test_statistics_count_what_is_committed_once_however_often_it_is_recovered(
    tmp_path: Path,
) -> None:
    path = tmp_path / "0"
    for crash in range(1, 6):
        writer = CacheWriter(path, two_features(), FINGERPRINT)
        write(writer, range(crash * 4, crash * 4 + 4))
        writer.commit()
        write(writer, [100])
        path = tmp_path / str(crash)
        shutil.copytree(tmp_path / str(crash - 1), path)
        writer.abort()
    make_cache(path, [1])
    check_cache(path, [1, *range(4, 24)])
    assert not list(path.glob(f"parts/*/{JOURNAL}"))


def test_an_error_during_recovery_leaves_all_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CacheWriter(tmp_path / "live", two_features(), FINGERPRINT)
    write(writer, range(6))
    writer.commit()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    writer.abort()
    with monkeypatch.context() as patch:
        patch.setattr("featcache.writing.open_part.save_columns", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            CacheWriter(tmp_path / "killed", two_features(), FINGERPRINT)
    assert len(list((tmp_path / "killed" / "parts").iterdir())) == 1
    make_cache(tmp_path / "killed", range(6, 8))
    check_cache(tmp_path / "killed", range(8))


def test_readers_are_not_disturbed_by_parts_that_are_being_written(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(3, 6))
        writer.commit()
        check_cache(tmp_path, range(3))
        writer.abort()
    check_cache(tmp_path, range(3))


def _refusal_of_a_writer(cache: Path) -> str | None:
    try:
        make_cache(cache, [9])
    except CorruptCacheError as error:
        return str(error)
    return None


@pytest.mark.parametrize("loss", ["gone", "empty", "cut"])
def test_a_writer_takes_no_damage_of_what_is_published_for_a_dead_writer(
    tmp_path: Path, loss: str
) -> None:
    make_cache(tmp_path / "whole", range(4))
    before = [*featcache.open(tmp_path / "whole")]
    files = [path for path in (tmp_path / "whole" / "parts").rglob("*") if path.is_file()]
    for number, file in enumerate(files):
        cache = shutil.copytree(tmp_path / "whole", tmp_path / str(number))
        damaged = cache / file.relative_to(tmp_path / "whole")
        data = damaged.read_bytes()
        damaged.unlink()
        if loss != "gone":
            damaged.write_bytes(b"" if loss == "empty" else data[: len(data) // 2])
        others = {path: path.read_bytes() for path in cache.glob("parts/*/*") if path != damaged}
        refused = _refusal_of_a_writer(cache)
        if refused is None:
            assert {*before} < {*featcache.open(cache)}
        else:
            assert file.name in refused
        for path, content in others.items():
            assert path.suffix == ".lock" or path.read_bytes() == content
