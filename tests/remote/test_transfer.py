"""A cache is pushed to a bucket and pulled from it: the old generation or the new one, ever."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from s3_server import bucket as bucket
from s3_server import endpoint as endpoint
from s3_server import obstore, store_of

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.cli import main
from featcache.errors import CacheError, CorruptCacheError
from featcache.remote import RemoteOptions, Requests
from featcache.transfer import pull, push


def write(path: Path, ids: range, backend: str = "memmap") -> None:
    with CacheWriter(path, features=[FeatureStorageConfig("x", backend=backend)]) as writer:
        for number in ids:
            writer.write(f"utt-{number}", {"x": np.full((number + 1, 3), number, np.float32)})


def values(cache: featcache.Cache) -> dict[str, list[float]]:
    return {id: cache.read(id, "x").tolist() for id in cache.ids}


@pytest.fixture
def how(endpoint: str, tmp_path: Path) -> RemoteOptions:
    return RemoteOptions(
        pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1", retry_s=20.0
    )


@pytest.mark.parametrize("backend", ["memmap", "zarr", "hdf5"])
def test_what_is_pushed_is_read_and_pulled(
    backend: str, bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    write(tmp_path / "c", range(5), backend)
    here = featcache.open(tmp_path / "c")
    said = push(tmp_path / "c", f"{bucket}/train", remote=how, dry_run=True)
    assert said == push(tmp_path / "c", f"{bucket}/train", remote=how)
    assert values(featcache.open(f"{bucket}/train", remote=how)) == values(here)
    pull(f"{bucket}/train", tmp_path / "copy", remote=how)
    assert values(featcache.open(tmp_path / "copy", verify="arrays")) == values(here)
    assert not list(tmp_path.glob("copy/work-pull*"))


def test_a_later_generation_is_pushed_and_pulled_by_what_it_adds(
    bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "c", range(5))
    push(tmp_path / "c", url, remote=how)
    assert push(tmp_path / "c", url, remote=how).nbytes == 0
    pull(url, tmp_path / "copy", remote=how)
    for number in range(5, 9):  # more generations than a cache keeps
        write(tmp_path / "c", range(number, number + 1))
    added = push(tmp_path / "c", url, remote=how)
    assert added.skipped >= 3
    with pytest.raises(CacheError, match="new directory"):
        pull(url, tmp_path / "copy", remote=how)
    pull(url, tmp_path / "new", remote=how)
    assert len(featcache.open(tmp_path / "new", verify="arrays")) == 9
    assert len(featcache.open(tmp_path / "copy", verify="arrays")) == 5


def test_tags_are_pushed_and_neither_side_loses_one(
    bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "c", range(3))
    push(tmp_path / "c", url, remote=how)
    featcache.open(tmp_path / "c").tag("aa")
    write(tmp_path / "c", range(3, 5))
    push(tmp_path / "c", url + "/", remote=how)
    assert len(featcache.open(url, remote=how, version="aa")) == 3
    pull(url, tmp_path / "copy", remote=how)
    featcache.open(tmp_path / "copy").tag("bb")
    featcache.open(tmp_path / "c").tag("cc")
    push(tmp_path / "c", url, remote=how)
    with pytest.raises(CacheError, match="does not come"):
        push(tmp_path / "copy", url, remote=how)
    assert {*featcache.open(tmp_path / "copy").tags} == {"aa", "bb"}


@pytest.mark.parametrize("after", range(0, 6))
def test_a_pull_that_stops_anywhere_goes_on(
    after: int, bucket: str, how: RemoteOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "c", range(3))
    push(tmp_path / "c", f"{bucket}/train", remote=how)
    left = [after]
    rename = Path.replace

    def some(self: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", some)
    with contextlib.suppress(KeyboardInterrupt):
        pull(f"{bucket}/train", tmp_path / "copy", remote=how)
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    pull(f"{bucket}/train", tmp_path / "copy", remote=how)
    assert len(featcache.open(tmp_path / "copy", verify="arrays")) == 3
    assert not list((tmp_path / "copy").glob("work-*"))


def test_generations_that_do_not_come_from_each_other_are_refused_by_name(
    bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "a", range(3))
    write(tmp_path / "b", range(4))
    push(tmp_path / "a", url, remote=how)
    with pytest.raises(CacheError, match="does not come"):
        push(tmp_path / "b", url, remote=how)
    with pytest.raises(CacheError, match="new directory"):
        pull(url, tmp_path / "b", remote=how)
    assert len(featcache.open(tmp_path / "b")) == 4


def test_of_two_pushes_at_once_one_is_refused(
    bucket: str, how: RemoteOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "a", range(3))
    write(tmp_path / "b", range(4))
    replace = Requests.replace

    def late(self: Requests, name: str, data: bytes, etag: str | None) -> None:
        monkeypatch.setattr(Requests, "replace", replace)
        push(tmp_path / "b", url, remote=how)
        replace(self, name, data, etag)

    monkeypatch.setattr(Requests, "replace", late)
    with pytest.raises(CacheError, match="another push"):
        push(tmp_path / "a", url, remote=how)
    assert len(featcache.open(url, remote=how)) == 4


def test_a_push_whose_last_answer_is_lost_has_pushed(
    bucket: str, how: RemoteOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", range(3))
    replace = Requests.replace

    def lost(self: Requests, name: str, data: bytes, etag: str | None) -> None:
        replace(self, name, data, etag)
        replace(self, name, data, etag)  # as a client does that got no answer

    monkeypatch.setattr(Requests, "replace", lost)
    push(tmp_path / "a", f"{bucket}/train", remote=how)
    assert len(featcache.open(f"{bucket}/train", remote=how)) == 3


def test_a_push_that_stops_anywhere_leaves_the_generation_before_and_goes_on(
    bucket: str, how: RemoteOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "c", range(3))
    push(tmp_path / "c", url, remote=how)
    write(tmp_path / "c", range(3, 6))
    put, stopped = Requests.put, 0
    for after in range(20):
        left = [after]

        def some(self: Requests, name: str, data: bytes | Path, left: list[int] = left) -> object:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return put(self, name, data)

        monkeypatch.setattr(Requests, "put", some)
        try:
            push(tmp_path / "c", url, remote=how)
        except KeyboardInterrupt:
            stopped += 1
            assert len(featcache.open(url, remote=how)) == 3
            continue
        break
    assert stopped
    assert len(featcache.open(url, remote=how)) == 6


def test_the_command_pushes_and_pulls(
    bucket: str, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "c", range(3))
    store = ["--endpoint", endpoint, "--region", "us-east-1"]
    main.main(
        ["push", str(tmp_path / "c"), f"{bucket}/train", "--dry-run", *store],
        "featcache",
        standalone_mode=False,
    )
    assert capsys.readouterr().out.startswith("would copy 5 files")
    main.main(
        ["push", str(tmp_path / "c"), f"{bucket}/train", *store], "featcache", standalone_mode=False
    )
    main.main(
        ["pull", f"{bucket}/train", str(tmp_path / "d"), "--json", *store],
        "featcache",
        standalone_mode=False,
    )
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["verb"], told["files"], told["dry_run"]) == ("pull", 5, False)
    assert len(featcache.open(tmp_path / "d", verify="arrays")) == 3


def test_what_was_damaged_on_the_way_is_not_published(
    bucket: str, how: RemoteOptions, tmp_path: Path, endpoint: str
) -> None:
    write(tmp_path / "c", range(3))
    push(tmp_path / "c", f"{bucket}/train", remote=how)
    (file,) = (tmp_path / "c").glob("parts/*/x.npy")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    store = store_of(bucket, endpoint)
    obstore.put(store, f"train/{file.relative_to(tmp_path / 'c').as_posix()}", bytes(data))
    with pytest.raises(CorruptCacheError, match="pull it again"):
        pull(f"{bucket}/train", tmp_path / "copy", remote=how)
    assert not (tmp_path / "copy" / "featcache.json").exists()
