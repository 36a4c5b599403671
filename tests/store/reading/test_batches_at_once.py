"""Batches copied from mapped files by the system in one call, and what happens where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_helpers import id_of, make_cache

import featcache
from featcache.reading.places import AT_ONCE, Places

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux copies pieces in one call")


def in_a_process(script: str, *arguments: Path) -> str:
    """Run a script that may be killed; returns what it printed."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache", range(1, 21))


@LINUX
@pytest.mark.parametrize("count", [1, 7, AT_ONCE, 2 * AT_ONCE + 3])
def test_pieces_are_copied_to_their_places_with_zeros_behind(count: int) -> None:
    random = np.random.default_rng(count)
    source = random.integers(1, 255, 1 << 16, np.uint8)
    nbytes = random.integers(0, 100, count)
    begins = random.integers(0, len(source) - 100, count)
    ends = np.concatenate([[0], np.cumsum(nbytes + random.integers(0, 50, count))])
    data = np.full(ends[-1], 255, np.uint8)
    places = Places.between(data, ends)
    assert places.fill((begins + source.ctypes.data).tolist(), nbytes.tolist())
    places.clear_behind(nbytes)
    for place, begin, size in zip(places, begins.tolist(), nbytes.tolist(), strict=True):
        np.testing.assert_array_equal(place[:size], source[begin : begin + size])
        assert not place[size:].any()


@pytest.mark.parametrize(
    ("ends", "nbytes"),
    [([0, 4, 8], [5, 4]), ([0, 4, 8], [4, -1]), ([0, 4, 9], [4, 4]), ([-1, 4, 8], [4, 4])],
    ids=["too long", "negative", "beyond the memory", "before it"],
)
def test_nothing_is_written_beside_a_place(ends: list[int], nbytes: list[int]) -> None:
    memory = np.full(24, 7, np.uint8)
    places = Places.between(memory[8:16], np.array(ends))
    assert not places.fill([memory.ctypes.data] * 2, nbytes)
    places.clear_behind(np.array(nbytes))
    assert (memory[[*range(8), *range(16, 24)]] == 7).all()


CUT = """
import os, sys
import featcache
cache = featcache.open(sys.argv[1])
ids = list(cache)
cache.read_batch(ids, "fbank")
os.truncate(sys.argv[2], 0)
try:
    cache.read_batch(ids, "fbank")
except featcache.FeatcacheError as error:
    print(type(error).__name__, error)
"""


@LINUX
def test_a_file_that_is_cut_while_it_is_mapped_is_an_error_of_the_batch(cache: Path) -> None:
    (file,) = cache.glob("parts/*/fbank.npy")
    told = in_a_process(CUT, cache, file)
    assert told.startswith(f"CorruptCacheError container {str(file)!r} ends before byte")


REFUSED = """
import ctypes, platform, struct, sys
import featcache
from featcache.reading import places
number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges, as seccomp wants it
assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0
cache = featcache.open(sys.argv[1])
for _ in range(2):
    print(cache.read_batch(list(cache), "fbank").data.tobytes().hex())
    assert places._refused
"""


@LINUX
def test_a_sandbox_that_refuses_the_call_gets_the_same_batches(cache: Path) -> None:
    ids = sorted(map(id_of, range(1, 21)))
    batch = featcache.open(cache).read_batch(ids, "fbank")
    assert in_a_process(REFUSED, cache).split() == [batch.data.tobytes().hex()] * 2
