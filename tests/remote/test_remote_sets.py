"""Feature sets behind a URL: an edit of several is seen in all of them, or in none."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from range_server import Handler, RangeServer, serving
from transfer_helpers import values, write

import featcache
from featcache.reading import RemoteCache
from featcache.remote import RemoteOptions, RemotePlace, requests_to

pytest.importorskip("obstore")


def sets_at(path: Path) -> Path:
    write(path, range(4))
    write(path, range(4), feature="y")
    return path


def opened(server: RangeServer, pages: Path) -> featcache.Cache:
    requests_to.cache_clear()
    return featcache.open(f"{server.url}/c", remote=RemoteOptions(pages=pages))


def test_an_edit_comes_in_at_any_request_of_a_reader(tmp_path: Path) -> None:
    before = sets_at(tmp_path / "before")
    for at in range(40):
        shutil.copytree(before, tmp_path / f"{at}" / "c")
        with serving(tmp_path / f"{at}") as server:

            def edit(_handler: Handler, _data: bytes, _status: int, at: int = at) -> bool:
                if len(server.requests) == at + 1:
                    featcache.open(tmp_path / f"{at}" / "c").delete(["utt-1"])
                return False

            server.fault = edit
            assert len(values(opened(server, tmp_path / f"pages-{at}"))) in (3, 4)
            if len(server.requests) <= at:
                break
    assert 6 < at < 40


def test_an_edit_that_was_stopped_anywhere_is_in_all_sets_or_in_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, replace, found = sets_at(tmp_path / "before"), Path.replace, []
    for after in range(40):
        cache = tmp_path / f"{after}" / "c"
        shutil.copytree(before, cache)
        left = [after]

        def some(self: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return replace(self, target)

        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(Path, "replace", some)
            featcache.open(cache).delete(["utt-1"])
        with serving(cache.parent) as server:
            read = opened(server, tmp_path / f"pages-{after}")
            assert values(read) == values(featcache.open(cache))
            found.append(len(read))
            featcache.open(cache).delete(["utt-2"])  # which first ends what was stopped
            read.refresh()
            assert values(read) == values(featcache.open(cache))
        if left[0] >= 0:
            break
    assert found == sorted(found, reverse=True)
    assert {*found} == {3, 4}


@pytest.mark.parametrize("file", ["sets/y/featcache.json", "sets/featcache.json", "featcache.json"])
def test_a_shell_that_another_process_has_half_written_is_made_whole(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = sets_at(tmp_path / "bucket" / "c")
    with serving(tmp_path / "bucket") as server:
        opened(server, tmp_path / "pages")
        remote = RemoteOptions(pages=tmp_path / "pages")
        shell = RemoteCache(RemotePlace.of(f"{server.url}/c", remote)).directory
        old = (shell / file).read_bytes()
        featcache.open(cache).delete(["utt-1"])
        refresh = RemoteCache.refresh

        def overtaken(self: RemoteCache, version: str | None = None) -> None:
            refresh(self, version)
            monkeypatch.setattr(RemoteCache, "refresh", refresh)
            (shell / file).write_bytes(old)

        monkeypatch.setattr(RemoteCache, "refresh", overtaken)
        assert len(values(opened(server, tmp_path / "pages"))) == 3
