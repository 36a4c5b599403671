"""Faults of a store at every request of reading: no wrong byte, a typed error with the URL, and no
hang; once the store answers again, what is open goes on, or says to open it again.

`make faults` runs it.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from range_server import Fault, Handler, RangeServer, serving
from test_remote_caches import FAULTS

import featcache
from featcache import CacheWriter, FeatureLoader, FeatureStorageConfig, Windows
from featcache.errors import CacheError
from featcache.remote import RemoteOptions, requests_to

FRAME_S = 0.01
STALLED_S = 0.3  # after which an answer is given up
ARRAYS = {
    f"utt-{number}": np.random.default_rng(number).normal(size=(40 + number, 8)).astype(np.float32)
    for number in range(8)
}


def _drip(handler: Handler, data: bytes, status: int) -> bool:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    if status == 206:
        handler.send_header("Content-Range", handler.content_range)
    handler.send_header("ETag", handler.etag)
    handler.send_header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
    handler.end_headers()
    for begin in range(0, len(data), max(len(data) // 4, 1)):
        handler.wfile.write(data[begin : begin + max(len(data) // 4, 1)])
        handler.wfile.flush()
        time.sleep(0.01)
    return True


def _another(handler: Handler, data: bytes, status: int) -> bool:
    """Answer as an object that was replaced a moment ago."""
    more = {"Content-Range": handler.content_range} if status == 206 else {}
    handler.answer(status, data, {**more, "ETag": '"another"'})
    return True


def _stall(_handler: Handler, _data: bytes, _status: int) -> bool:
    time.sleep(2 * STALLED_S)
    return True


def _of_ranges(fault: Fault) -> Fault:
    """Return a fault of ranges alone: of a whole object its server alone knows the size."""
    return lambda handler, data, status: status == 206 and fault(handler, data, status)


KINDS: dict[str, Fault] = {
    **{name: fault for name, (fault, _) in FAULTS.items()},
    "short": _of_ranges(FAULTS["short"][0]),
    "no ranges": _of_ranges(FAULTS["no ranges"][0]),
    "stall": _stall,
    "drip": _drip,
    "new ETag": _another,
}


class Faulty:
    """Lets requests of a server fail: `count` of them, after the first `at`."""

    def __init__(self, server: RangeServer, fault: Fault, at: int, count: int) -> None:
        self._fault, self._first, self._end = fault, at, at + count
        self._numbers = itertools.count()  # whose next is that of one thread
        self.hit = False
        server.fault = self

    def __call__(self, handler: Handler, data: bytes, status: int) -> bool:
        if not self._first <= next(self._numbers) < self._end:
            return False
        self.hit = True
        return self._fault(handler, data, status)


def write(path: Path, ids: range) -> None:
    with CacheWriter(path, [FeatureStorageConfig("fbank", frame_s=FRAME_S)]) as writer:
        for number in ids:
            writer.write(f"utt-{number}", {"fbank": ARRAYS[f"utt-{number}"]})


def _epoch(cache: featcache.Cache) -> None:
    seen = 0
    for batch in FeatureLoader(cache, "fbank", batch_size=3, shuffle=True, seed=1):
        for row, length, id in zip(
            batch["fbank"], batch["fbank_lengths"], batch["id"], strict=True
        ):
            seen += 1
            assert np.array_equal(row[: int(length)].numpy(), ARRAYS[id])
    assert seen == len(cache)


def _windows(cache: featcache.Cache) -> None:
    table = cache.segments(Windows(10 * FRAME_S))
    for batch in FeatureLoader(table, "fbank", batch_size=5):
        for row, length, id in zip(
            batch["fbank"], batch["fbank_lengths"], batch["id"], strict=True
        ):
            whole = ARRAYS[id.partition(":")[0]]
            found = row[: int(length)].numpy()
            pieces = (whole[at : at + len(found)] for at in range(len(whole) - len(found) + 1))
            assert any(np.array_equal(found, piece) for piece in pieces)


SCENES = ("open", "epoch", "windows", "refresh", "verify")


class Scene:
    """A cache behind a URL, and what is done with it while a request fails."""

    def __init__(
        self, name: str, server: RangeServer, root: Path, number: int, kind: str = ""
    ) -> None:
        self.name, self.server = name, server
        self.timeout_s = STALLED_S if kind == "stall" else 10.0  # a busy machine answers late
        self.path = root / "bucket" / f"{name}-{number}"
        self.url = f"{server.url}/{self.path.name}"
        self.pages = root / "pages" / self.path.name
        write(self.path, range(5))
        write(self.path, range(5, 8))
        self.cache: featcache.Cache | None = None
        if name in ("epoch", "windows", "refresh"):
            self.cache = self._opened(None)
        if name == "refresh":
            featcache.open(self.path).delete(["utt-2"])

    def _opened(self, verify: str | None) -> featcache.Cache:
        how = RemoteOptions(pages=self.pages, retry_s=0.1, timeout_s=self.timeout_s)
        return featcache.open(self.url, remote=how, verify=verify)  # type: ignore[arg-type]

    def run(self, *, anew: bool = False) -> None:
        """Do it; with `anew` on a cache that is opened again."""
        if self.cache is None or anew:
            self.cache = self._opened("arrays" if self.name == "verify" else None)
        if self.name == "refresh":
            self.cache.refresh()
            assert "utt-2" not in self.cache
        if self.name == "windows":
            _windows(self.cache)
        else:
            _epoch(self.cache)


def _error(scene: Scene, anew: bool) -> CacheError | None:
    try:
        scene.run(anew=anew)
    except CacheError as error:
        return error
    return None


def _requests(name: str, root: Path) -> int:
    """Return how many requests a scene has."""
    with serving(root / "bucket") as server:
        scene = Scene(name, server, root, 0)
        before = server.asked
        scene.run()
        requests_to.cache_clear()
        return server.asked - before


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(60)
def test_a_fault_at_each_request_gives_no_wrong_byte_and_passes(
    kind: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "bucket").mkdir()
    number, hit = 0, True
    while hit:
        number += 1
        with serving(tmp_path / "bucket") as server:
            scene = Scene(name, server, tmp_path, number, kind)
            faulty = Faulty(server, KINDS[kind], number - 1, 1)
            errors = [error for anew in (False, False, True) if (error := _error(scene, anew))]
            assert all(scene.url in str(error) for error in errors), errors
            assert all("open it again" in str(error) for error in errors[1:]), errors
            assert len(errors) < 3
            hit = faulty.hit
            requests_to.cache_clear()
    assert number > 3


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("kind", ["503", "reset", "stall", "403"])
@pytest.mark.timeout(60)
def test_a_store_that_does_not_answer_any_more_is_an_error_soon(
    kind: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "bucket").mkdir()
    for number in range(_requests(name, tmp_path)):
        with serving(tmp_path / "bucket") as server:
            scene = Scene(name, server, tmp_path, number + 1, kind)
            faulty = Faulty(server, KINDS[kind], number, 1000)
            error = _error(scene, anew=False)
            assert (error is not None) == faulty.hit  # windows may come in fewer requests
            assert error is None or scene.url in str(error)
            server.fault = None
            scene.run()
            requests_to.cache_clear()
