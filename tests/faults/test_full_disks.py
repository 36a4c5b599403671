"""A disk that fills up: what was committed is published by the writer itself, or by the next."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from eight_layouts import LAYOUTS, open_writer, write, write_missing, wrong_ids
from store_helpers import FINGERPRINT, free_space, id_of

import featcache
from featcache import CacheWriter
from featcache.errors import StorageFullError

PAGES = range(16)  # free ones at the moment of sealing
COMMITTED, EVERYTHING = range(8), range(13)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A small file system that this process may mount as often as it likes."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "tmpfs", path], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a small file system needs root")
    subprocess.run(["umount", path], check=True)
    yield path
    gc.collect()
    subprocess.run(["umount", "--lazy", path], capture_output=True, check=False)


def leave_free(path: Path, pages: int) -> None:
    """Fill a disk but for some pages."""
    with (path / "filling").open("ab", buffering=0) as file:
        while (free := os.statvfs(path).f_bavail - pages) > 0:
            file.write(bytes(4096 * min(free, 256)))


def broken(error: BaseException | None, path: Path) -> list[str]:
    text = "" if error is None else "\n".join([str(error), *getattr(error, "__notes__", ())])
    if error is None or (
        isinstance(error, StorageFullError) and str(path) in text and "again" in text
    ):
        return []
    return [f"not a StorageFullError with path and remedy: {error!r}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_free_pages_when_sealing_is_enough_or_said(full: Path, layout: str) -> None:
    found = []
    for pages in PAGES:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", full], check=True)
        found += [f"{layout}, {pages} pages: {what}" for what in _sealed_with(full, layout, pages)]
        gc.collect()
        subprocess.run(["umount", full], check=True)
    assert not found, "\n".join(found)


def _sealed_with(disk: Path, layout: str, pages: int) -> list[str]:
    path, error = disk / "cache", None
    try:
        with open_writer(path, layout) as writer:
            write(writer, COMMITTED)
            writer.commit()
            leave_free(disk, pages)
    except BaseException as caught:
        error = caught.with_traceback(None)
    found = broken(error, path)
    if error is None and wrong_ids(featcache.open(path, verify="arrays"), COMMITTED):
        found.append("published something else than was committed")
    free_space(disk)
    with open_writer(path, layout) as writer:
        if lost := [number for number in COMMITTED if id_of(number) not in writer]:
            found.append(f"lost {lost}")
        write_missing(writer, EVERYTHING)
    if wrong := wrong_ids(featcache.open(path, verify="arrays"), EVERYTHING):
        found.append(f"wrong in the end: {wrong}")
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_writer_that_filled_the_disk_publishes_what_it_committed(
    full: Path, layout: str
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", full], check=True)
    path, done = full / "cache", [0]
    with pytest.raises(StorageFullError, match=r"again"):
        _fill(path, layout, done)
    (committed,) = done
    cache = featcache.open(path, verify="arrays")  # nothing was freed
    assert not cache.complete
    assert not wrong_ids(cache, range(committed))
    del cache
    gc.collect()
    free_space(full)
    with CacheWriter(path, LAYOUTS[layout], FINGERPRINT) as writer:
        write(writer, [number for number in range(committed + 200) if id_of(number) not in writer])
    assert not wrong_ids(featcache.open(path, verify="arrays"), range(committed + 200))


def _fill(path: Path, layout: str, committed: list[int]) -> None:
    with open_writer(path, layout) as writer:
        for number in range(100_000):
            write(writer, [number])
            if number % 50 == 0:
                writer.commit()
                committed[0] = number + 1
