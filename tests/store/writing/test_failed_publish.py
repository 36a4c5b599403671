"""A publish that fails anywhere may be repeated: nothing that is in use is ever removed."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    assert_holds,
    check_cache,
    id_of,
    make_cache,
    oracle,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CacheError, KeyNotFoundError
from featcache.format import JOURNAL, manifest
from featcache.writing.part_writer import PartWriter


class Failing:
    """Lets the n-th call of `os.<name>` fail, before or after it has taken effect."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        name: str,
        number: int,
        error: type[BaseException],
        late: bool,
    ) -> None:
        self.calls = 0
        call: Callable[..., Any] = getattr(os, name)

        def failing(*args: Any, **settings: Any) -> Any:
            self.calls += 1
            if self.calls != number:
                return call(*args, **settings)
            if late:
                call(*args, **settings)
            raise OSError(errno.EIO, "Input/output error") if error is OSError else error

        patch.setattr(os, name, failing)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["fsync", "replace", "unlink"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_publish_may_be_repeated_wherever_it_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: type[BaseException],
    late: bool,
    overwrite: bool,
) -> None:
    number, failed = 0, True
    messages: list[str] = []
    while failed:
        number += 1
        path = tmp_path / str(number)
        make_cache(path, range(2))
        make_cache(path, range(2, 4))
        reader = featcache.open(path)
        reader["spk1/utt-1"]
        told = CacheError if error is OSError else error
        with CacheWriter(path, two_features(), FINGERPRINT, overwrite=overwrite) as writer:
            write(writer, range(4, 7))
            writer._parts.seal()
            with monkeypatch.context() as patch:
                failing = Failing(patch, name, number, error, late)
                try:
                    writer.publish()
                except told as raised:
                    messages.append(str(raised))
                failed = failing.calls >= number
            stored = range(4, 7) if overwrite else range(7)
            assert len(featcache.open(path, verify="arrays")) in (4, len(stored))
            writer.publish()
            check_cache(path, stored, complete=False)
            write(writer, [7])
        check_cache(path, [*stored, 7])
        if not overwrite:
            check_cache_of(reader, range(4))
        leftover = {file.name for file in path.rglob("*.tmp")}
        assert not leftover or name == "unlink"
    assert number > 1
    if error is OSError:
        assert all(str(tmp_path) in each and "run the same again" in each for each in messages)


def check_cache_of(reader: featcache.Cache, numbers: range) -> None:
    assert_holds(reader, oracle(numbers))


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gather the paths of all that is made durable."""
    paths: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return paths


@pytest.mark.parametrize("left", ["exp", "exp/train", "exp/train/parts"])
def test_the_name_of_the_last_directory_that_was_there_is_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """D3: the one who made it may have been killed before it came to that."""
    (tmp_path / left).mkdir(parents=True)
    paths = synced(monkeypatch)
    with CacheWriter(tmp_path / "exp" / "train", two_features(), FINGERPRINT) as writer:
        write(writer, range(3))
        writer.commit()
        above = [tmp_path, *(tmp_path / each for each in ("exp", "exp/train", "exp/train/parts"))]
        needed = above[left.count("/") :]
        assert {*map(str, needed)} <= {*paths}


def test_a_part_writer_makes_the_names_in_its_cache_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who made the cache may have been killed before it came to that."""
    make_cache(tmp_path, range(3))
    paths = synced(monkeypatch)
    with PartWriter(tmp_path, two_features(), FINGERPRINT) as part:
        part.write(id_of(3), arrays_of(3))
        part.commit()
        assert {str(tmp_path), str(tmp_path / "parts")} <= {*paths}


def test_the_name_of_a_set_is_durable_before_anything_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who named it in the outer manifest may have been killed before it came to that."""
    for name in ("fbank", "units"):
        with CacheWriter(tmp_path, [FeatureStorageConfig(name)]) as writer:
            writer.write("utt-1", {name: np.zeros((3, 2), np.float32)})
    paths = synced(monkeypatch)
    CacheWriter(tmp_path, [FeatureStorageConfig("units")]).close()
    assert str(tmp_path / "sets") in paths[:2]


def test_a_cache_of_one_utterance_syncs_what_it_needs_and_reads_no_manifest_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(tmp_path / "other", [])
    paths = synced(monkeypatch)
    read = manifests_read(monkeypatch)
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("fbank")]) as writer:
        writer.write("utt-1", {"fbank": arrays_of(1)["fbank"]})
    assert len(paths) <= 19
    assert [each for each in paths if "/cache" not in each] == [str(tmp_path)]
    assert read.count(manifest.NAME) <= 2


def test_a_cache_that_was_never_published_is_whole_and_empty(tmp_path: Path) -> None:
    CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]).abort()
    cache = featcache.open(tmp_path, verify="arrays", check_reads=True)
    assert (len(cache), cache.complete, cache.generation) == (0, False, 0)
    assert cache.stats("fbank").count == 0
    with pytest.raises(CacheError, match="is no longer there"):
        cache.tag("v1")
    with pytest.raises(KeyNotFoundError):
        cache.delete(["utt-1"])
    cache.compact()
    with pytest.raises(KeyNotFoundError, match="not in cache"):
        cache.annotate({"utt-1": {"speaker": "anna"}})
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        writer.write("utt-1", {"fbank": arrays_of(1)["fbank"]})
    assert len(pickle.loads(pickle.dumps(cache))) == 1  # noqa: S301
    assert list(featcache.open(tmp_path, verify="arrays")) == ["utt-1"]


def manifests_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gather the files of all manifests that are read."""
    files: list[str] = []
    read_content = manifest.read_content

    def noted(cache: Path, file: str = manifest.NAME) -> dict[str, Any]:
        files.append(file)
        return read_content(cache, file)

    monkeypatch.setattr(manifest, "read_content", noted)
    return files


def test_no_directory_above_a_cache_is_synced_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(tmp_path / "exp" / "train", range(3))
    paths = synced(monkeypatch)
    make_cache(tmp_path / "exp" / "train", range(3, 6))
    assert all(Path(each).is_relative_to(tmp_path / "exp" / "train") for each in paths)


def test_a_manifest_is_durable_before_what_it_makes_superfluous_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: killed after the rename of the manifest, before it was synced."""
    make_cache(tmp_path, range(3))
    old = next((tmp_path / "parts").iterdir())
    monkeypatch.setattr("featcache.writing.publish.remove_superseded", lambda *_: None)
    make_cache(tmp_path, range(5), overwrite=True)
    assert old.exists()
    monkeypatch.undo()
    paths = synced(monkeypatch)
    unlink = Path.unlink

    def noted(path: Path, missing_ok: bool = False) -> None:
        if path.parent == old:
            paths.append("removed")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    CacheWriter(tmp_path, two_features(), FINGERPRINT).close()
    assert not old.exists()
    assert str(tmp_path) in paths[: paths.index("removed")]
    check_cache(tmp_path, range(5))


def test_an_open_reader_knows_its_statistics_over_any_number_of_publishes(tmp_path: Path) -> None:
    """D13: they were read when they were first asked for."""
    make_cache(tmp_path, range(4))
    reader = featcache.open(tmp_path)
    for number in range(4, 8):
        make_cache(tmp_path, [number])
    make_cache(tmp_path, range(2), overwrite=True)
    make_cache(tmp_path, range(2, 4))
    stats = reader.stats("fbank")
    assert stats.count == sum(reader.lengths("fbank"))
    assert len(reader) == 4


def test_a_journal_that_could_not_be_removed_goes_with_the_next_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D14: a failure between a part's seal and the end of its journal."""
    make_cache(tmp_path, range(3))
    unlink = Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path.name == JOURNAL and path.exists():
            raise OSError(errno.EIO, "Input/output error", str(path))
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        with pytest.raises(CacheError, match=f"{JOURNAL}.*run the same again"):
            make_cache(tmp_path, range(3, 6))
    (left,) = tmp_path.glob(f"parts/*/{JOURNAL}")
    with monkeypatch.context() as patch:
        paths = synced(patch)
        CacheWriter(tmp_path, two_features(), FINGERPRINT).abort()
        assert str(left.parent) in paths  # the seal may not have been durable
    with CacheWriter(tmp_path, two_features(), FINGERPRINT):
        check_cache(tmp_path, range(6), complete=False)
    assert list(tmp_path.glob(f"parts/*/{JOURNAL}")) == []
    check_cache(tmp_path, range(6))
