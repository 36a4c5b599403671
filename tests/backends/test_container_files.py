"""`featcache.container_files`: whole, durable files whose page digests are known when closed."""

from __future__ import annotations

import _thread
import errno
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import example, given

from featcache.container_files import (
    PAGE_BYTES,
    PagedFile,
    create,
    cut,
    paged_file,
    sync_directory,
    sync_file,
    sync_together,
    system,
    write_all,
    write_durably,
)

SIZES = st.integers(0, 3 * PAGE_BYTES) | st.sampled_from(
    [1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES]
)


def page_digests(path: Path) -> list[int]:
    data = path.read_bytes()
    pages = (data[start : start + PAGE_BYTES] for start in range(0, len(data), PAGE_BYTES))
    return [xxhash.xxh3_64_intdigest(page) for page in pages]


def octets(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@given(sizes=st.lists(SIZES, max_size=6), at_once=st.sampled_from([1, PAGE_BYTES, 1 << 30]))
@example(sizes=[], at_once=1)
@example(sizes=[PAGE_BYTES, 0, PAGE_BYTES], at_once=PAGE_BYTES)
@example(sizes=[5 * PAGE_BYTES + 1, PAGE_BYTES - 1, 1], at_once=1)
def test_the_pages_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], at_once: int
) -> None:
    """Whatever of it the system is asked to bring to the disk meanwhile."""
    path = tmp_path_factory.mktemp("file") / "x"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paged_file, "AT_ONCE_BYTES", at_once)
        check_pages(path, sizes)


def check_pages(path: Path, sizes: list[int]) -> None:
    file = PagedFile(path)
    written = b""
    for seed, size in enumerate(sizes):
        data = octets(size, seed)
        assert file.append(data if seed % 2 else memoryview(data)) == len(written)
        written += data
        assert file.size == len(written)
    before = file.pages.tolist()
    file.close()
    assert path.read_bytes() == written
    assert file.pages.dtype == np.uint64
    assert file.pages.tolist() == before == page_digests(path)


@given(
    size=st.integers(1, 3 * PAGE_BYTES + 7),
    start=st.integers(0, 3 * PAGE_BYTES),
    length=st.integers(0, 2 * PAGE_BYTES),
    more=SIZES,
)
@example(size=256, start=0, length=256, more=0)
@example(size=256, start=0, length=256, more=PAGE_BYTES)
@example(size=2 * PAGE_BYTES, start=PAGE_BYTES - 1, length=2, more=1)
def test_a_patch_changes_the_bytes_and_their_pages(
    tmp_path_factory: pytest.TempPathFactory, size: int, start: int, length: int, more: int
) -> None:
    path = tmp_path_factory.mktemp("file") / "x"
    start = min(start, size)
    patch = octets(min(length, size - start), seed=1)
    file = PagedFile(path)
    file.append(octets(size))
    file.patch(start, patch)
    assert file.append(octets(more, seed=2)) == size
    file.close()
    first = octets(size)
    assert path.read_bytes() == first[:start] + patch + first[start + len(patch) :] + octets(
        more, 2
    )
    assert file.pages.tolist() == page_digests(path)


def test_a_patch_reads_no_other_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PagedFile(tmp_path / "x")
    file.append(octets(5 * PAGE_BYTES))
    read: list[tuple[int, int]] = []
    preadv = os.preadv

    def recorded(descriptor: int, buffers: list[bytearray], offset: int) -> int:
        read.append((sum(map(len, buffers)), offset))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", recorded)
    file.patch(PAGE_BYTES, b"new")
    file.close()
    assert read == [(PAGE_BYTES, PAGE_BYTES)]


def test_a_patch_never_vouches_for_bytes_that_were_not_written(tmp_path: Path) -> None:
    file = PagedFile(tmp_path / "x")
    file.append(octets(300))
    file.write_out()
    with (tmp_path / "x").open("r+b") as other:
        other.seek(200)
        other.write(b"\0")
    with pytest.raises(OSError, match="page 0 is not what was written") as caught:
        file.patch(0, b"new")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "x"))
    file.abort()


def test_only_what_was_written_can_be_patched(tmp_path: Path) -> None:
    file = PagedFile(tmp_path / "x")
    file.append(b"12345")
    for start, data in ((4, b"ab"), (-1, b"a"), (6, b"")):
        with pytest.raises(ValueError, match="are not all written yet"):
            file.patch(start, data)
    file.abort()


def test_a_file_is_made_new_and_its_name_is_durable_with_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="old"):
        PagedFile(tmp_path / "old")
    synced: list[bool] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(
            Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path
            and (tmp_path / "new").exists()
        )
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    file = PagedFile(tmp_path / "new")
    file.flush()
    assert True in synced
    count = len(synced)
    file.close()
    assert not any(synced[count:])


def test_syncs_of_a_slow_disk_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_is_quick", False)
    all_begun = threading.Barrier(4, timeout=60)
    sync_together(*[all_begun.wait] * 4)


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_an_error_of_any_sync_is_raised_once_no_thread_is_at_work(
    monkeypatch: pytest.MonkeyPatch, number: int, is_quick: bool
) -> None:
    monkeypatch.setattr(system, "_is_quick", is_quick)
    threads = _thread._count()
    syncs: list[Callable[[], object]] = [partial(time.sleep, 0.01)] * 3
    syncs[number] = failing(errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        sync_together(*syncs)
    assert _thread._count() == threads


def test_a_whole_file_comes_after_its_copy_and_all_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append(("sync", path.name.partition(".")[0]))

    def renamed(source: Path, target: Path) -> None:
        replace(source, target)
        done.append(("rename", Path(target).name))

    kept, columns = tmp_path / "kept", tmp_path / "columns"
    kept.mkdir()
    columns.write_bytes(b"columns")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_durably(tmp_path / "own", b"data", after=[columns], copy=kept / "copy")
    place = tmp_path.name
    assert sorted(done[:4]) == [
        ("sync", name) for name in sorted(["columns", "copy", "own", place])
    ]
    assert done[4:] == [("rename", "copy"), ("sync", "kept"), ("rename", "own"), ("sync", place)]
    assert (kept / "copy").read_bytes() == (tmp_path / "own").read_bytes() == b"data"


@given(
    sizes=st.lists(st.integers(0, 9), max_size=12),
    a_call=st.sampled_from([1, 2, 5, 1 << 18]),
    pieces_a_call=st.sampled_from([1, 2, 1024]),
)
def test_pieces_are_written_whole_in_calls_of_few_bytes(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], a_call: int, pieces_a_call: int
) -> None:
    """Large calls make Linux look for large pages, which can cost more than the copy."""
    path = tmp_path_factory.mktemp("file") / "x"
    pieces = [octets(size, seed) for seed, size in enumerate(sizes)]
    asked = []

    def writev(descriptor: int, buffers: list[memoryview]) -> int:
        asked.append(sum(map(len, buffers)))
        return written(descriptor, buffers)

    written = os.writev
    with pytest.MonkeyPatch.context() as patched, create(path) as file:
        patched.setattr(system, "WRITTEN_AT_ONCE", a_call)
        patched.setattr(system, "_PIECES_AT_ONCE", pieces_a_call)
        patched.setattr(os, "writev", writev)
        system.write_each(file, [memoryview(piece) for piece in pieces])
    assert path.read_bytes() == b"".join(pieces)
    assert max(asked, default=0) <= a_call


@given(sizes=st.lists(st.integers(0, 5)), cuts=st.lists(st.integers(0, 20)), seed=st.integers(0, 9))
def test_pieces_are_cut_anew_anywhere(sizes: list[int], cuts: list[int], seed: int) -> None:
    data = octets(sum(sizes), seed)
    ends = sorted(min(end, len(data)) for end in cuts)
    pieces = [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]
    found = [bytes(each) for each in cut(pieces, sizes)]
    assert [len(each) for each in found] == sizes
    assert b"".join(found) == data


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        name = "short"
        data = b""

        def write(self, data: memoryview) -> int:
            self.data += data[:7]
            return min(7, len(data))

    short = Short()
    write_all(short, octets(100))  # type: ignore[arg-type]
    assert short.data == octets(100)


def failing(number: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_every_error_of_the_disk_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = PagedFile(tmp_path / "x")
    file.append(b"12345")
    monkeypatch.setattr(os, "fsync", failing(number))
    monkeypatch.setattr(os, "preadv", failing(number))
    actions: list[tuple[Path, Callable[[], object]]] = [
        (tmp_path / "x", file.flush),
        (tmp_path / "x", file.close),
        (tmp_path / "x", lambda: file.patch(0, b"1")),
        (tmp_path, lambda: create(tmp_path / "y")),
        (tmp_path, lambda: sync_directory(tmp_path)),
    ]
    for path, action in actions:
        with pytest.raises(OSError, match=re.escape(repr(str(path)))) as caught:
            action()
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
    file.abort()


def test_a_failed_write_names_its_file(tmp_path: Path) -> None:
    file = PagedFile(tmp_path / "x")
    file.append(octets(2000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        file.append(octets(2000))
        with pytest.raises(OSError, match="File too large") as caught:
            file.write_out()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / "x")
    file.abort()
    file.abort()


def test_plain_files_are_synced(tmp_path: Path) -> None:
    with create(tmp_path / "x") as file:
        write_all(file, b"abc")
        sync_file(file)
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index")  # which nobody ever opens to write
    with pytest.raises(OSError, match=r"/index'$"):
        write_durably(tmp_path / "manifest", b"{}", after=[tmp_path / "index"])
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
