"""A cache is pushed to a bucket and pulled from it: the old generation or the new one, ever."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fault_proxy import in_front_of
from s3_server import bucket as bucket
from s3_server import endpoint as endpoint
from s3_server import obstore, store_of

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.cli import main
from featcache.errors import CacheError, CorruptCacheError, NotACacheError
from featcache.format import pack_json, read_manifest, unpack_json
from featcache.remote import RemoteOptions, Requests
from featcache.transfer import pull, push, sync, to_disk


def write(path: Path, ids: range, backend: str = "memmap", feature: str = "x") -> None:
    with CacheWriter(path, features=[FeatureStorageConfig(feature, backend=backend)]) as writer:
        for number in ids:
            writer.write(f"utt-{number}", {feature: np.full((number + 1, 3), number, np.float32)})


def values(cache: featcache.Cache) -> dict[str, list[list[float]]]:
    """All that a cache holds; its sets must be those of one moment."""
    assert not any(cache.missing(feature) for feature in cache.features)
    return {id: [cache.read(id, name).tolist() for name in cache.features] for id in cache.ids}


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
    before = featcache.open(tmp_path / "copy")
    said = pull(url, tmp_path / "copy", remote=how, dry_run=True)
    assert pull(url, tmp_path / "copy", remote=how) == said
    assert said.skipped == 3
    after = featcache.open(tmp_path / "copy", verify="arrays")
    assert values(after) == values(featcache.open(tmp_path / "c"))
    assert (len(before), len(after)) == (5, 9)
    assert len(values(before)) == 5  # whoever reads the one before goes on


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


@pytest.mark.parametrize("written_on", [False, True])
@pytest.mark.parametrize(
    ("held", "kind"), [(0, "plain"), (2, "plain"), (0, "sets"), (2, "sets"), (2, "added")]
)
def test_a_pull_that_stops_anywhere_goes_on(
    held: int,
    kind: str,
    written_on: bool,
    bucket: str,
    how: RemoteOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, rename, stopped = tmp_path / "c", Path.replace, 0
    features = ["x", "y"] if kind == "sets" else ["x"]
    for feature in features if held else ():
        write(here, range(held), feature=feature)
    if held:
        push(here, f"{bucket}/train", remote=how)
        pull(f"{bucket}/train", tmp_path / "copy", remote=how)
    for feature in features:
        write(here, range(held, 4), feature=feature)
    if kind == "added":
        write(here, range(4), feature="y")
    push(here, f"{bucket}/train", remote=how)
    shutil.copytree(here, tmp_path / "later")
    featcache.open(tmp_path / "later").delete(["utt-1"])
    push(tmp_path / "later", f"{bucket}/later", remote=how)
    for after in range(60):
        copy, left = tmp_path / f"{after}", [after]
        shutil.copytree(tmp_path / "copy", copy) if held else None

        def some(self: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return rename(self, target)

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(Path, "replace", some)
            pull(f"{bucket}/train", copy, remote=how)
        if (copy / "featcache.json").exists():
            assert len(values(featcache.open(copy, verify="arrays"))) in (held, 4)
        url = f"{bucket}/later" if written_on else f"{bucket}/train"
        pull(url, copy, remote=how)
        assert len(values(featcache.open(copy, verify="arrays"))) == (3 if written_on else 4)
        assert not list(copy.glob("work-pull*"))
        if left[0] >= 0:
            break
        stopped += 1
    assert stopped > 5


def pull_until_it_moves_in(
    url: str, copy: Path, how: RemoteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop a pull when all is here, and before any file has its name."""

    def stopped(_self: object, _whole: object, _held: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(to_disk.Pull, "_move_in", stopped)
        with pytest.raises(KeyboardInterrupt):
            pull(url, copy, remote=how)


def test_what_was_written_here_since_a_pull_was_stopped_stays(
    bucket: str, how: RemoteOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "c", range(2))
    push(tmp_path / "c", url, remote=how)
    pull(url, tmp_path / "copy", remote=how)
    write(tmp_path / "c", range(2, 4))
    push(tmp_path / "c", url, remote=how)
    pull_until_it_moves_in(url, tmp_path / "copy", how, monkeypatch)
    write(tmp_path / "copy", range(9, 10))
    for _ in range(2):
        with pytest.raises(CacheError, match="does not come"):
            pull(url, tmp_path / "copy", remote=how)
        here = featcache.open(tmp_path / "copy", verify="arrays")
        assert [*here.ids] == ["utt-0", "utt-1", "utt-9"]


def test_a_dry_run_counts_what_an_earlier_pull_has_only_to_move_in(
    bucket: str, how: RemoteOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "c", range(2))
    push(tmp_path / "c", url, remote=how)
    pull_until_it_moves_in(url, tmp_path / "copy", how, monkeypatch)
    assert pull(url, tmp_path / "copy", remote=how, dry_run=True).files == 0
    write(tmp_path / "c", range(2, 4))
    push(tmp_path / "c", url, remote=how)
    said = pull(url, tmp_path / "copy", remote=how, dry_run=True)
    assert not (tmp_path / "copy" / "featcache.json").exists()
    assert said == pull(url, tmp_path / "copy", remote=how)


def test_feature_sets_are_pushed_read_and_pulled(
    bucket: str, how: RemoteOptions, tmp_path: Path, endpoint: str
) -> None:
    url, here = f"{bucket}/train", tmp_path / "c"
    write(here, range(4))
    push(here, url, remote=how)
    before = featcache.open(url, remote=how)
    write(here, range(4), feature="y")
    featcache.open(here).tag("v1")
    featcache.open(here).delete(["utt-1"])
    said = push(here, url, remote=how, dry_run=True)
    assert said == push(here, url, remote=how)
    assert push(here, url, remote=how).files == 0
    assert len(values(before)) == 4
    now = featcache.open(url, remote=how)
    assert values(now) == values(featcache.open(here))
    featcache.open(url, remote=how, verify="arrays")
    tagged = featcache.open(url, remote=how, version="v1")
    assert values(tagged) == values(featcache.open(here, version="v1"))
    said = pull(url, tmp_path / "copy", remote=how, dry_run=True)
    assert said == pull(url, tmp_path / "copy", remote=how)
    assert values(featcache.open(tmp_path / "copy", verify="arrays")) == values(now)
    write(tmp_path / "copy", range(4, 5))  # of one set, which lacks it of the other
    assert sync(tmp_path / "copy", url, remote=how).verb == "push"
    write(tmp_path / "copy", range(4, 5), feature="y")
    assert sync(tmp_path / "copy", url, remote=how).verb == "push"
    assert sync(here, url, remote=how).verb == "pull"
    assert values(featcache.open(here, verify="arrays")).keys() == {
        "utt-0",
        "utt-2",
        "utt-3",
        "utt-4",
    }
    with in_front_of(endpoint) as proxy:
        cache = featcache.open(url, remote=replace(how, endpoint=proxy.url))
        proxy.begin()
        cache.refresh()
        assert len(proxy.asked) == 1


@pytest.mark.parametrize("damaged", [b"", b"{", b'["0",{}]'])
def test_a_damaged_copy_of_the_manifest_of_a_set_is_fetched_again(
    damaged: bytes, bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    url, how = f"{bucket}/train", replace(how, pages=tmp_path / "pages")
    write(tmp_path / "c", range(4))
    write(tmp_path / "c", range(4), feature="y")
    push(tmp_path / "c", url, remote=how)
    assert len(values(featcache.open(url, remote=how))) == 4
    (copy,) = (tmp_path / "pages").rglob("sets/y/featcache-*.json")
    sound = copy.read_bytes()
    copy.write_bytes(damaged)
    assert len(values(featcache.open(url, remote=how))) == 4
    assert copy.read_bytes() == sound


def test_sets_that_were_changed_on_both_sides_are_refused_by_name(
    bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    url, a, b = f"{bucket}/train", tmp_path / "a", tmp_path / "b"
    write(a, range(4))
    push(a, url, remote=how)
    pull(url, b, remote=how)
    write(a, range(4), feature="y")
    push(a, url, remote=how)
    write(b, range(4), feature="z")
    with pytest.raises(CacheError, match="never had it"):
        push(b, url, remote=how)
    with pytest.raises(CacheError, match="does not come"):
        pull(url, b, remote=how)
    with pytest.raises(CacheError, match="each other"):
        sync(b, url, remote=how)
    copy = tmp_path / "copy"
    pull(url, copy, remote=how)
    with (
        contextlib.suppress(KeyboardInterrupt),
        CacheWriter(copy, [FeatureStorageConfig("w")]) as writer,
    ):
        writer.write("utt-0", {"w": np.zeros((1, 3), np.float32)})
        writer.commit()
        raise KeyboardInterrupt
    write(a, range(4), feature="w")
    push(a, url, remote=how)
    with pytest.raises(CacheError, match="does not come"):  # it is computed here, too
        pull(url, copy, remote=how)
    write(copy, range(1, 4), feature="w")
    assert len(values(featcache.open(copy))) == 4


@pytest.mark.parametrize("way", ["push", "pull", "sync"])
def test_what_was_changed_on_both_sides_is_brought_together_by_what_is_said(
    way: str,
    bucket: str,
    how: RemoteOptions,
    tmp_path: Path,
) -> None:
    url, here = f"{bucket}/train", tmp_path / "his cache"
    write(tmp_path / "a", range(4))
    push(tmp_path / "a", url, remote=how)
    pull(url, here, remote=how)
    write(tmp_path / "a", range(4), feature="y")
    push(tmp_path / "a", url, remote=how)
    write(here, range(4), feature="z")
    ask = {
        "push": lambda: push(here, url, remote=how),
        "pull": lambda: pull(url, here, remote=how),
        "sync": lambda: sync(here, url, remote=how),
    }
    with pytest.raises(CacheError) as refused:
        ask[way]()
    typed = [
        line for line in re.findall("`(.+?)`", str(refused.value)) if url in line or "-f" in line
    ]
    assert len(typed) == 4
    for line in typed:
        _, *words = shlex.split(line)
        main.main([*words, "-q"], "featcache", standalone_mode=False)
    assert featcache.open(url, remote=how).features == ("x", "y", "z")
    assert len(values(featcache.open(url, remote=how, verify="arrays"))) == 4
    assert featcache.open(f"{url}-here", remote=how).features == ("x", "z")


def test_what_was_changed_on_both_sides_is_not_brought_into_a_bucket_of_others(
    bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    write(tmp_path / "a", range(4))
    write(tmp_path / "b", range(3))
    push(tmp_path / "a", bucket, remote=how)
    with pytest.raises(CacheError, match=r"/b URL .+` keeps the one here") as refused:
        push(tmp_path / "b", bucket, remote=how)
    assert f"{bucket}-here" not in str(refused.value)


def test_sets_that_no_push_has_put_there_are_refused(
    bucket: str, how: RemoteOptions, tmp_path: Path, endpoint: str
) -> None:
    write(tmp_path / "c", range(4))
    write(tmp_path / "c", range(4), feature="y")
    for file in (each for each in (tmp_path / "c").rglob("*") if each.is_file()):
        name = f"train/{file.relative_to(tmp_path / 'c').as_posix()}"
        obstore.put(store_of(bucket, endpoint), name, file.read_bytes())
    assert len(values(featcache.open(f"{bucket}/train", remote=how))) == 4
    for refused in (push, sync):
        with pytest.raises(CacheError, match="no push"):
            refused(tmp_path / "c", f"{bucket}/train", remote=how)
    with pytest.raises(CacheError, match="no push"):
        pull(f"{bucket}/train", tmp_path / "d", remote=how)


def test_generations_that_do_not_come_from_each_other_are_refused_by_name(
    bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "a", range(3))
    write(tmp_path / "b", range(4))
    push(tmp_path / "a", url, remote=how)
    with pytest.raises(CacheError, match="does not come"):
        push(tmp_path / "b", url, remote=how)
    with pytest.raises(CacheError, match="beside the one here"):
        pull(url, tmp_path / "b", remote=how)
    with pytest.raises(CacheError, match="each other"):
        sync(tmp_path / "b", url, remote=how)
    assert len(featcache.open(tmp_path / "b")) == 4


def test_of_two_pushes_at_once_one_is_refused(
    bucket: str, how: RemoteOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "a", range(3))
    write(tmp_path / "b", range(4))
    put_in_place = Requests.replace

    def late(self: Requests, name: str, data: bytes, etag: str | None) -> None:
        monkeypatch.setattr(Requests, "replace", put_in_place)
        push(tmp_path / "b", url, remote=how)
        put_in_place(self, name, data, etag)

    monkeypatch.setattr(Requests, "replace", late)
    with pytest.raises(CacheError, match="another push"):
        push(tmp_path / "a", url, remote=how)
    assert len(featcache.open(url, remote=how)) == 4


def test_a_push_whose_last_answer_is_lost_has_pushed(
    bucket: str, how: RemoteOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", range(3))
    put_in_place = Requests.replace

    def lost(self: Requests, name: str, data: bytes, etag: str | None) -> None:
        put_in_place(self, name, data, etag)
        put_in_place(self, name, data, etag)  # as a client does that got no answer

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

        def some(
            self: Requests,
            name: str,
            data: bytes | Path,
            digest: str | None = None,
            left: list[int] = left,
        ) -> object:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return put(self, name, data, digest)

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
    assert capsys.readouterr().out.startswith("push: would copy 5 files")
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
    main.main(
        ["sync", str(tmp_path / "d"), f"{bucket}/train", *store], "featcache", standalone_mode=False
    )
    assert capsys.readouterr().out.startswith("pull: copied 0 files")
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


def test_what_was_fetched_before_a_stop_is_compared_too(
    bucket: str,
    how: RemoteOptions,
    tmp_path: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / "c", range(3))
    push(tmp_path / "c", f"{bucket}/train", remote=how)
    (file,) = (tmp_path / "c").glob("parts/*/x.npy")
    name = f"train/{file.relative_to(tmp_path / 'c').as_posix()}"
    obstore.put(store_of(bucket, endpoint), name, file.read_bytes()[:-1] + b"?")

    def stopped(_self: object, _names: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(to_disk.Pull, "_link", stopped)
        with pytest.raises(KeyboardInterrupt):
            pull(f"{bucket}/train", tmp_path / "copy", remote=how)
    with pytest.raises(CorruptCacheError, match="pull it again"):
        pull(f"{bucket}/train", tmp_path / "copy", remote=how)
    assert not (tmp_path / "copy" / "featcache.json").exists()


def test_a_damaged_container_is_not_pushed_and_the_right_one_is(
    bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    write(tmp_path / "c", range(3))
    (file,) = (tmp_path / "c").glob("parts/*/x.npy")
    right = file.read_bytes()
    file.write_bytes(right[:-1] + b"?")
    with pytest.raises(CorruptCacheError, match="not pushed"):
        push(tmp_path / "c", f"{bucket}/train", remote=how)
    file.write_bytes(right)
    push(tmp_path / "c", f"{bucket}/train", remote=how)
    featcache.open(f"{bucket}/train", remote=how, verify="arrays")


def test_the_later_generation_is_copied_to_the_earlier_one(
    bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    url, a, b = f"{bucket}/train", tmp_path / "a", tmp_path / "b"
    with pytest.raises(NotACacheError):
        sync(a, url, remote=how)
    write(a, range(3))
    assert sync(a, url, remote=how).verb == "push"
    assert sync(b, url, remote=how).verb == "pull"
    for number in range(3, 6):  # more generations than a cache keeps
        write(b, range(number, number + 1))
    assert sync(b, url, remote=how).verb == "push"
    with pytest.raises(CacheError, match="does not come"):
        push(a, url, remote=how)
    said = sync(a, url, remote=how, dry_run=True)
    assert (said.verb, said) == ("pull", sync(a, url, remote=how))
    assert values(featcache.open(a, verify="arrays")) == values(featcache.open(b))
    assert sync(a, url, remote=how).requests == 1
    write(a, range(6, 7))
    write(b, range(7, 8))
    assert sync(a, url, remote=how).verb == "push"
    names = rf"{generation(b)}.* and '{generation(a)}'"
    with pytest.raises(CacheError, match=names):
        sync(b, url, remote=how)
    with pytest.raises(CacheError, match="does not come"):
        pull(url, b, remote=how)
    assert len(featcache.open(b)) == 7


def generation(path: Path) -> str:
    return read_manifest(path).name


def test_a_copy_on_a_disk_comes_from_the_same(
    bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    write(tmp_path / "a", range(3))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    write(tmp_path / "a", range(3, 4))
    sync(tmp_path / "a", f"{bucket}/train", remote=how)
    sync(tmp_path / "b", f"{bucket}/train", remote=how)
    assert len(featcache.open(tmp_path / "b", verify="arrays")) == 4


def test_parts_that_are_not_published_are_never_lost_to_a_pull(
    bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "a", range(3))
    sync(tmp_path / "a", url, remote=how)
    sync(tmp_path / "b", url, remote=how)
    write(tmp_path / "a", range(3, 5))
    sync(tmp_path / "a", url, remote=how)
    with CacheWriter(tmp_path / "b", features=[FeatureStorageConfig("x")]) as writer:
        writer.write("utt-9", {"x": np.zeros((1, 3), np.float32)})
        writer.commit()
        with pytest.raises(CacheError, match="being written"):
            sync(tmp_path / "b", url, remote=how)
        lost = tmp_path / "lost"
        shutil.copytree(tmp_path / "b", lost)  # as after a kill
    with pytest.raises(CacheError, match="not published"):
        sync(lost, url, remote=how)
    write(lost, range(3, 4))
    assert "utt-9" in featcache.open(lost).ids


@pytest.mark.parametrize("change", ["rewritten", "deleted", "compacted", "compacted twice"])
def test_a_pull_in_place_leaves_no_part_that_comes_back(
    change: str, bucket: str, how: RemoteOptions, tmp_path: Path
) -> None:
    url, a, b = f"{bucket}/train", tmp_path / "a", tmp_path / "b"
    write(a, range(3))
    sync(a, url, remote=how)
    sync(b, url, remote=how)
    if change == "rewritten":
        with CacheWriter(a, features=[FeatureStorageConfig("x")], overwrite=True) as writer:
            writer.write("utt-0", {"x": np.ones((1, 3), np.float32)})
    else:
        featcache.open(a).delete(["utt-1"])
        if change == "compacted twice":
            featcache.open(a).compact()
        featcache.open(a).delete(["utt-2"])
        if change != "deleted":
            featcache.open(a).compact()
    write(a, range(5, 6))
    sync(a, url, remote=how)
    if change == "compacted twice":
        with pytest.raises(CacheError, match="parts were merged several times"):
            sync(b, url, remote=how)
        assert len(featcache.open(b, verify="arrays")) == 3
        return
    sync(b, url, remote=how)
    write(b, range(6, 7))
    assert [*featcache.open(b, verify="arrays").ids] == ["utt-0", "utt-5", "utt-6"]


def test_a_cache_on_a_read_only_disk_is_pushed(
    bucket: str, how: RemoteOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "c", range(3))

    def refused(path: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, "read-only", str(path))

    monkeypatch.setattr("featcache.transfer.to_store.write_durably", refused)
    push(tmp_path / "c", f"{bucket}/train", remote=how)
    assert len(featcache.open(f"{bucket}/train", remote=how)) == 3


def test_an_object_of_the_right_size_that_is_another_is_sent_again(
    bucket: str, how: RemoteOptions, tmp_path: Path, endpoint: str
) -> None:
    write(tmp_path / "c", range(3))
    push(tmp_path / "c", f"{bucket}/train", remote=how)
    for file in (tmp_path / "c").rglob("*.[cnj][opo]*"):
        name = file.relative_to(tmp_path / "c").as_posix()
        if name == "featcache.json" or not name.startswith(("index", "parts")):
            continue
        obstore.put(store_of(bucket, endpoint), f"train/{name}", bytes(file.stat().st_size))
        assert push(tmp_path / "c", f"{bucket}/train", remote=how).files == 1
    pull(f"{bucket}/train", tmp_path / "copy", remote=how)


def test_requests_and_bytes_are_what_a_dry_run_says(
    bucket: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featcache.remote.io.PIECE_BYTES", 5 << 20)
    monkeypatch.setattr("featcache.transfer.to_store.PIECE_BYTES", 5 << 20)
    monkeypatch.setattr("featcache.transfer.to_disk.PIECE_BYTES", 5 << 20)
    url = f"{bucket}/train"
    write(tmp_path / "c", range(3))
    with CacheWriter(tmp_path / "c", features=[FeatureStorageConfig("x")]) as writer:
        writer.write("large", {"x": np.zeros((1 << 20, 3), np.float32)})
    with in_front_of(endpoint) as proxy:
        how = RemoteOptions(endpoint=proxy.url, region="us-east-1")
        for number in (5, 6):
            said = push(tmp_path / "c", url, remote=how, dry_run=True)
            proxy.begin()
            push(tmp_path / "c", url, remote=how)
            puts = [each for each in proxy.asked if each.method in ("PUT", "POST")]
            assert said.requests == len(proxy.asked)
            assert said.nbytes <= sum(each.sent for each in puts) <= said.nbytes + 5000
            said = pull(url, tmp_path / "copy", remote=how, dry_run=True)
            proxy.begin()
            pull(url, tmp_path / "copy", remote=how)
            assert said.requests == len(proxy.asked)
            got = sum(each.received for each in proxy.asked if "/train/" in each.path)
            assert said.nbytes <= got <= said.nbytes + 10000
            write(tmp_path / "c", range(number, number + 1))


@pytest.mark.parametrize("fault", ["lost", "cut", "reset"])
def test_what_breaks_on_the_way_is_asked_for_again(
    fault: str, bucket: str, endpoint: str, tmp_path: Path
) -> None:
    write(tmp_path / "c", range(3))
    with in_front_of(endpoint) as proxy:
        how = RemoteOptions(endpoint=proxy.url, region="us-east-1", retry_s=5.0)
        last = push(tmp_path / "c", f"{bucket}/train", remote=how, dry_run=True).requests - 1
        for at in (1, last):
            proxy.begin(at, fault)
            push(tmp_path / "c", f"{bucket}/{at}", remote=how)
            proxy.begin(at, fault)
            pull(f"{bucket}/{at}", tmp_path / f"{at}", remote=how)
            assert len(featcache.open(tmp_path / f"{at}", verify="arrays")) == 3


def test_a_manifest_that_leads_elsewhere_is_refused(
    bucket: str, how: RemoteOptions, tmp_path: Path, endpoint: str
) -> None:
    url = f"{bucket}/train"
    write(tmp_path / "c", range(3))
    push(tmp_path / "c", url, remote=how)
    content = unpack_json((tmp_path / "c" / "featcache.json").read_bytes(), "")
    assert isinstance(content, dict)
    (part,) = content["parts"]
    for change in (
        {"index": "../x"},
        {"index": "index-../x.columns"},
        {"parts": [{**part, "name": ".."}]},
        {"parts": 3},
        {"previous": "../x"},
        {"tags": {"v1": "../x"}},
        {"files": {"../probe-00000000.bin": "0" * 16}},
        {"write_id": "../x"},
        {"version": 9},
        {"format": "other"},
    ):
        data = pack_json({**content, **change})
        obstore.put(store_of(bucket, endpoint), "train/featcache.json", data)
        for refused in (pull, sync, push):
            where = (url, tmp_path / "d") if refused is pull else (tmp_path / "c", url)
            with pytest.raises(CacheError):
                refused(*where, remote=how)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c"]
