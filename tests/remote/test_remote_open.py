"""Opening by a URL: each file in a GET for 16 MiB of it, compared before it counts, no more."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from range_server import Handler, RangeServer, serving

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CacheError, CorruptCacheError, StorageFullError
from featcache.format import FileSize, digest, read_manifest, write_manifest
from featcache.reading import shell as reading_shell
from featcache.remote import RemoteOptions, files, requests_to

pytest.importorskip("obstore")
ROLES = {"probe": bytes(range(256)), "made-from": b'{"command": "train.py"}'}
PARTS, EACH = 3, 4


def array_of(number: int) -> NDArray[np.float32]:
    return np.full((30 + number, 8), number, np.float32)


def write(path: Path) -> Path:
    with CacheWriter(path, [FeatureStorageConfig("fbank")]) as writer:
        for role, data in ROLES.items():
            writer.keep_file(role, data)
        for part in range(PARTS):
            for number in range(part * EACH, (part + 1) * EACH):
                writer.write(f"utt-{number:02d}", {"fbank": array_of(number)})
            writer.publish()
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write(tmp_path / "bucket" / "c")


@pytest.fixture
def server(cache: Path) -> Iterator[RangeServer]:
    with serving(cache.parent) as state:
        yield state
        requests_to.cache_clear()


@pytest.fixture
def opened(server: RangeServer, tmp_path: Path) -> Callable[..., featcache.Cache]:
    """Return what opens the cache by its URL."""
    remote = RemoteOptions(pages=tmp_path / "pages", retry_s=5.0, hedge=False)
    return lambda **more: featcache.open(f"{server.url}/c", remote=remote, **more)


def shell(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "pages").glob("http:/*/c")
    return found


def names(server: RangeServer) -> list[str]:
    """Return what was asked for, without the folder."""
    return sorted(name.removeprefix("c/") for name, _, _ in server.requests)


def file_of(cache: Path, kind: str, id: str = "utt-00") -> str:
    """Return a file of a kind that the manifest names; of a part the one with an utterance."""
    here = featcache.open(cache).opened
    columns, row = here.index.features["fbank"], here.index.find(id)
    container = int(columns.container[columns.first[row]])
    part = here.manifest.parts[int(here.index.containers.parts[container])].name
    return next(path for path in here.manifest.sizes if kind.replace("*", part) in path)


Open = Callable[..., featcache.Cache]


# Requests


@pytest.mark.parametrize("most_bytes", [16 << 20, 1000, 500])
def test_a_cold_open_asks_for_each_file_once_in_ranges_of_at_most_so_many_bytes(
    most_bytes: int,
    cache: Path,
    server: RangeServer,
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", most_bytes)
    server.delay_s = 0.3  # while which all of them begin, on a busy machine, too
    there = opened()
    assert server.most > len(ROLES)  # at a time
    manifest = read_manifest(cache)
    sizes = {path: (cache / path).stat().st_size for path in (manifest.index, *manifest.files)}
    pieces = [path for path, size in sizes.items() for _ in range(-(-size // most_bytes))]
    assert names(server) == sorted(["featcache.json", *pieces])
    assert server.asked == len(server.requests)  # nor was anything asked for that is not there
    wanted = (cache / "featcache.json").stat().st_size + sum(sizes.values())
    assert server.nbytes == wanted
    assert max(nbytes for _, range_, nbytes in server.requests if range_) <= most_bytes
    assert {role: there.opened.file(role) for role in ROLES} == ROLES
    assert len(there) == PARTS * EACH


def test_opening_again_and_a_refresh_are_one_request_without_a_body(
    server: RangeServer, opened: Open
) -> None:
    opened()
    asked, nbytes = server.asked, server.nbytes
    there = opened()
    assert (server.asked, server.nbytes) == (asked + 1, nbytes)
    there.refresh()
    assert (server.asked, server.nbytes) == (asked + 2, nbytes)


def test_a_refresh_of_what_was_published_asks_for_manifest_and_index_alone(
    cache: Path, server: RangeServer, opened: Open
) -> None:
    there = opened()
    featcache.open(cache).delete(["utt-01"])
    server.requests.clear()
    there.refresh()
    assert names(server) == ["featcache.json", read_manifest(cache).index]
    assert "utt-01" not in there


def test_a_cache_of_before_without_sizes_is_opened_by_as_many_requests(
    cache: Path, server: RangeServer, opened: Open
) -> None:
    write_manifest(cache, replace(read_manifest(cache), sizes={}))
    there = opened(check_reads=True)
    assert len(server.requests) == 2 + len(ROLES)
    assert np.array_equal(there.read("utt-07", "fbank"), array_of(7))


def test_a_large_cache_of_before_without_sizes_says_what_to_do(
    cache: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(cache, replace(read_manifest(cache), sizes={}))
    monkeypatch.setattr("featcache.reading.shell.MOST_BYTES", 1000)
    with pytest.raises(CacheError, match=r"publish it again.*push it again"):
        opened()
    featcache.open(cache).tag("again")
    assert "utt-07" in opened()


# Checksums


def test_checksums_of_pages_come_with_the_first_use_of_their_part_and_are_counted(
    server: RangeServer, opened: Open
) -> None:
    there = opened(check_reads=True)
    remote = there.opened.settings.remote
    assert remote is not None
    counts = requests_to(remote.place).counts
    assert not [name for name in names(server) if name.startswith("parts/")]
    for number, of_parts in ((0, 1), (1, 1), (EACH, 2), (2 * EACH, 3), (2, 3)):
        window = there.read(f"utt-{number:02d}", "fbank", 3, 5)
        assert np.array_equal(window, array_of(number)[3:5])
        seals = server.of("part.json"), server.of("/index.columns")
        assert [*map(len, seals)] == [of_parts, of_parts]
        assert (counts.gets, counts.nbytes) == (len(server.requests), server.nbytes)
    there.close()


def test_threads_fetch_the_checksums_of_a_part_once(server: RangeServer, opened: Open) -> None:
    there = opened(check_reads=True)
    server.delay_s = 0.02
    begin = threading.Barrier(8)

    def read(number: int) -> bool:
        begin.wait()
        return bool((there.read(f"utt-{number % EACH:02d}", "fbank", 0, 9) == number % EACH).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(8)))
    assert len(server.of("part.json")) == len(server.of("/index.columns")) == 1


# Damage


def flip(path: Path, place: int = 5) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["index-", "probe-", "*/part.json", "*/index.columns"])
def test_what_comes_is_compared_before_it_counts(
    kind: str, cache: Path, opened: Open, tmp_path: Path
) -> None:
    path = file_of(cache, kind)

    def read() -> NDArray[np.float32]:
        return np.asarray(opened(check_reads=True).read("utt-00", "fbank", 0, 2))

    flip(cache / path)
    for _ in range(2):
        with pytest.raises(CorruptCacheError, match=rf"http.*{path} is damaged.* push"):
            read()
    assert not [*(tmp_path / "pages").rglob("*.tmp")]
    flip(cache / path)
    assert np.array_equal(read(), array_of(0)[:2])


@pytest.mark.parametrize("kind", ["index-", "probe-", "*/part.json", "*/index.columns"])
@pytest.mark.parametrize("times", [0.5, 2, 1 << 40])
def test_a_size_that_a_file_has_not_is_damage_and_takes_no_room(
    kind: str, times: float, cache: Path, server: RangeServer, opened: Open, tmp_path: Path
) -> None:
    manifest = read_manifest(cache)
    path = file_of(cache, kind)
    size = manifest.sizes[path]
    wrong = FileSize(int(size.nbytes * times), 0)
    write_manifest(cache, replace(manifest, sizes={**manifest.sizes, path: wrong}))
    error = StorageFullError if times > 2 and kind != "probe-" else CorruptCacheError
    with pytest.raises(error):
        opened(check_reads=True).read("utt-00", "fbank", 0, 2)
    assert not [*(tmp_path / "pages").rglob("*.tmp")]
    assert server.nbytes < 1 << 20


def test_a_manifest_of_more_than_any_has_is_refused_before_it_is_read(
    server: RangeServer, opened: Open
) -> None:
    def claim(handler: Handler, data: bytes, status: int) -> bool:
        handler.send_response(status)
        handler.send_header("Content-Length", str(600 << 20))
        handler.send_header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
        handler.end_headers()
        handler.wfile.write(data)  # who waits for the rest gets none
        handler.close_connection = True
        return True

    server.fault = claim
    with pytest.raises(CorruptCacheError, match=r"featcache.json has 629,145,600 bytes, and .* at"):
        opened()
    assert names(server) == ["featcache.json"]


def test_a_generation_that_is_published_while_a_cache_is_opened_is_opened(
    cache: Path, server: RangeServer, opened: Open
) -> None:
    def publish(handler: Handler, _data: bytes, _status: int) -> bool:
        server.fault = None
        for id in ("utt-01", "utt-02"):  # twice: so the index that was named goes
            featcache.open(cache).delete([id])
        return False

    server.fault = publish
    assert len(opened()) == PARTS * EACH - 2


def test_an_index_that_another_process_removes_from_the_shell_is_fetched_again(
    cache: Path, server: RangeServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_here = reading_shell._write

    def write_between(path: Path, data: bytes) -> None:
        write_here(path, data)
        if path.name == "featcache.json":  # another process was here first, with a later one
            (path.parent / read_manifest(cache).index).unlink()

    monkeypatch.setattr(reading_shell, "_write", write_between)
    assert np.array_equal(opened().read("utt-05", "fbank"), array_of(5))
    assert len(server.of(".columns")) == 2


def test_an_index_that_is_named_and_not_there_is_said(cache: Path, opened: Open) -> None:
    (cache / read_manifest(cache).index).unlink()
    with pytest.raises(CacheError, match=r"http.*/c/index-.* is missing"):
        opened()


def test_verification_passes_over_files_of_later_versions(
    cache: Path, server: RangeServer, opened: Open
) -> None:
    manifest = read_manifest(cache)
    (cache / "later.bin").write_bytes(b"later")
    named = {"later.bin": digest(b"later"), "etags.json": digest(b"{}")}
    write_manifest(cache, replace(manifest, files={**manifest.files, **named}))
    assert len(opened(verify="arrays")) == PARTS * EACH
    assert not {"later.bin", "etags.json"}.intersection(names(server))


# What stays in the shell


def in_shell(tmp_path: Path) -> set[str]:
    here = shell(tmp_path)
    paths = (path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file())
    return {path for path in paths if path != "etags.json"}


def test_what_no_generation_leads_to_any_more_goes_and_who_has_it_open_reads_on(
    cache: Path, opened: Open, tmp_path: Path
) -> None:
    featcache.open(cache).tag("first")
    there = [opened(check_reads=True)]
    sent = pickle.dumps(there[0])
    assert there[0].read("utt-00", "fbank", 0, 1)[0, 0] == 0
    indexes = [read_manifest(cache).index]
    for id in ("utt-01", "utt-02", "utt-03"):
        featcache.open(cache).delete([id])
        there.append(opened())
        indexes.append(read_manifest(cache).index)
    kept = {path for path in in_shell(tmp_path) if path.startswith("index-")}
    assert kept == {indexes[0], *indexes[2:]}  # of the tag, the one before, the current one
    for number, each in enumerate(there):
        assert len(each) == PARTS * EACH - number
        assert np.array_equal(each.read("utt-09", "fbank"), array_of(9))
    assert len(pickle.loads(sent)) == PARTS * EACH  # noqa: S301  # which the tag keeps
    featcache.open(cache).untag("first")
    opened()
    assert {path for path in in_shell(tmp_path) if path.startswith("index-")} == {*indexes[2:]}
    assert len(pickle.loads(sent)) == PARTS * EACH - 3  # noqa: S301  # as on a disk


def test_what_a_killed_process_left_in_a_shell_goes_after_an_hour(
    cache: Path, opened: Open, tmp_path: Path
) -> None:
    opened()
    here = shell(tmp_path)
    old, young = here / "index-000009-aaaaaaaa.columns.1.tmp", here / "probe-aaaaaaaa.bin.2.tmp"
    for path in (old, young):
        path.write_bytes(b"")
    os.utime(old, (time.time() - 4000,) * 2)
    featcache.open(cache).tag("now")
    opened()
    assert (old.exists(), young.exists()) == (False, True)


def test_a_shell_that_others_have_emptied_is_filled_again(opened: Open, tmp_path: Path) -> None:
    there = opened(check_reads=True)
    shutil.rmtree(shell(tmp_path))
    assert np.array_equal(there.read("utt-05", "fbank", 1, 2), array_of(5)[1:2])
    assert len(opened()) == PARTS * EACH
