"""Memory of large arrays: used again, never while anything refers to it, and bounded."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureStorageConfig
from featcache._recycled import COUNTS, LEAST_BYTES, MOST_BYTES, RECYCLED, RecycledMemory

pytestmark = [
    pytest.mark.skipif(not COUNTS, reason="this Python counts no references"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
FRAMES = 500
# what is made over an array's memory, and holds it
HOLDERS: dict[str, Callable[[np.ndarray], Any]] = {
    "itself": lambda array: array,
    "a view": lambda array: array[3:, ::2],
    "a view of a view": lambda array: array[1:][2:].T[1:],
    "one frame": lambda array: array[-1],
    "memoryview": lambda array: array.data,
    "tensor": lambda array: torch.from_numpy(array)[2:],
    "DLPack": lambda array: torch.utils.dlpack.from_dlpack(array),
    # over a memoryview in a cycle it is a bug of Python: it crashes when that is collected
    "buffer of a pickle": lambda array: pickle.PickleBuffer(cast(Any, array)),
    "bytes": lambda array: array.reshape(-1).view(np.uint8).data[5:],
    "base": lambda array: array if array.base is None else array.base,
}


def octets(held: Any) -> np.ndarray:
    """Some bytes of what is held, of the base those that every array has."""
    some = np.ascontiguousarray(np.asarray(held)).reshape(-1).view(np.uint8)
    return some[: 200 * 80 : 511]


def make_cache(path: Path, count: int = 40) -> Path:
    half = FeatureStorageConfig("half", dtype="bfloat16")
    with CacheWriter(path, [FeatureStorageConfig("x"), half]) as writer:
        for number in range(count):
            array = np.full((FRAMES + number, 80), number, "f4")
            writer.write(f"{number:03}", {"x": array, "half": array})
    return path


class Recycling(RuleBasedStateMachine):
    """Arrays that hold one number each, by whatever holds them; others are made meanwhile."""

    @initialize()
    def begin(self) -> None:
        self.memory = RecycledMemory(10 * LEAST_BYTES)
        self.held: list[tuple[Any, int]] = []
        self.number = 0

    @rule(
        frames=st.integers(210, 400),
        holder=st.sampled_from(sorted(HOLDERS)),
        copied=st.booleans(),
    )
    def make(self, frames: int, holder: str, copied: bool) -> None:
        self.number = self.number % 100 + 1
        number = self.number * 0x01010101  # the same in all bytes
        full = np.full((frames, 80), number, np.int32)
        if copied:
            array = self.memory.copy(full)
        else:
            array = self.memory.empty((frames, 80), np.dtype(np.int32))
            array[...] = full
        assert type(array) is np.ndarray
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.shape == (frames, 80)
        self.held.append((HOLDERS[holder](array), self.number))

    @rule(place=st.integers(0, 1 << 20))
    def drop(self, place: int) -> None:
        if self.held:
            self.held.pop(place % len(self.held))

    @rule()
    def drop_all(self) -> None:
        self.held.clear()

    @rule(place=st.integers(0, 1 << 20))
    def drop_in_a_circle(self, place: int) -> None:
        if self.held:
            circle: list[Any] = [self.held.pop(place % len(self.held))]
            circle.append(circle)

    @rule()
    def collect(self) -> None:
        gc.collect()

    @rule()
    def forget(self) -> None:
        self.memory.clear()

    @invariant()
    def nothing_is_written_over(self) -> None:
        for held, number in getattr(self, "held", []):
            assert (octets(held) == number).all()

    @invariant()
    def bounded(self) -> None:
        assert not hasattr(self, "memory") or self.memory.known_bytes <= 10 * LEAST_BYTES


TestRecycling = Recycling.TestCase
TestRecycling.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("holder", sorted(HOLDERS))
def test_memory_is_used_again_once_its_last_holder_is_gone(holder: str) -> None:
    memory, shape, dtype = RecycledMemory(1 << 22), (FRAMES, 80), np.dtype(np.float32)
    array = memory.empty(shape, dtype)
    where, held = array.ctypes.data, HOLDERS[holder](array)
    del array
    assert memory.empty(shape, dtype).ctypes.data != where
    del held
    others = [memory.empty(shape, dtype) for _ in range(2)]
    assert where in [other.ctypes.data for other in others]


def test_an_array_that_is_dropped_at_once_leaves_its_memory_to_the_next() -> None:
    memory = RecycledMemory(1 << 22)
    held = [memory.empty((FRAMES, 80), np.dtype("f4")) for _ in range(3)]
    places = {memory.empty((FRAMES, 80), np.dtype("f4")).ctypes.data for _ in range(20)}
    assert len(places) == 1
    assert len({*places, *(array.ctypes.data for array in held)}) == 4


def test_memory_of_arrays_that_are_dropped_together_is_used_again() -> None:
    memory = RecycledMemory(1 << 24)
    places = set()
    for _ in range(5):
        held = [memory.copy(np.ones((FRAMES + n, 80), "f4")) for n in range(32)]
        places |= {array.ctypes.data for array in held}
        del held
    assert len(places) <= 33


def test_what_a_process_keeps_is_bounded_whatever_it_holds(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path))
    ids = list(cache)
    held = [cache.read(ids[n % len(ids)], "x") for n in range(700)]  # 112 MB
    assert RECYCLED.known_bytes <= MOST_BYTES
    assert all((array == n % len(ids)).all() for n, array in enumerate(held))
    held.clear()
    large = RECYCLED.empty((MOST_BYTES + 1,), np.dtype(np.uint8))
    assert large.flags.owndata  # malloc's own, which goes when it is dropped


@pytest.mark.parametrize(
    "what", ["whole", "window", "batch", "item", "reader", "bfloat16", "converted", "collated"]
)
def test_what_is_read_stays_as_it_is_while_others_are_read(tmp_path: Path, what: str) -> None:
    cache = featcache.open(make_cache(tmp_path))
    dataset, reader = FeatureDataset(cache), cache.reader("x")
    reads: dict[str, Callable[[str], Any]] = {
        "whole": lambda id: cache.read(id, "x"),
        "window": lambda id: cache.read(id, "x", 10, 400),
        "batch": lambda id: cache.read_batch([id, id], "x").data,
        "item": lambda id: dataset[id]["x"],
        "reader": reader,
        "bfloat16": lambda id: cache.read(id, "half"),
        "converted": cache.reader("half", dtype="float32"),
        "collated": lambda id: FeatureDataset.collate([dataset[id]])["half"][0],
    }
    read, held = reads[what], []
    for turn in range(4):
        for number, id in enumerate(cache):
            found = read(id)
            found[0] = found[0]  # it may be written to
            if number % 3 == turn % 3:
                held.append((found[5:], number))
    for array, number in held:
        assert (array == number).all()


def test_any_order_and_shape_is_copied_as_it_looks() -> None:
    memory = RecycledMemory(1 << 22)
    array = np.arange(6 * LEAST_BYTES, dtype=np.int16).reshape(3, -1, 2)
    for view in (array, array[::-1], array.transpose(2, 1, 0), array[:, :0], array[:, 7]):
        copy = memory.copy(view)
        np.testing.assert_array_equal(copy, view, strict=True)
        assert copy.flags.c_contiguous


def test_an_error_while_an_array_is_made_costs_nobody_its_memory() -> None:
    memory = RecycledMemory(1 << 22)
    held = memory.copy(np.ones((FRAMES, 80)))
    for shape in ((-FRAMES, -80), (-FRAMES, 80)):
        with pytest.raises(ValueError, match="negative dimensions"):
            memory.empty(shape, np.dtype(np.float64))
    memory.copy(np.zeros((FRAMES, 80)))
    assert (held == 1).all()


def test_what_is_kept_may_become_less_while_an_array_is_made() -> None:
    class Watched(RecycledMemory):
        is_less = False

        @property
        def known_bytes(self) -> int:
            known = super().known_bytes
            if not self.is_less:  # between a look at the most and at what there is
                self.is_less = True
                self._most_bytes = 1 << 20
            return known

    for known in (0, 1 << 17):
        memory = Watched(1 << 22)
        first = memory.empty((known,), np.dtype(np.uint8))
        memory._most_bytes, memory.is_less = 1 << 22, False
        assert memory.empty((3 << 20,), np.dtype(np.uint8)).nbytes == 3 << 20
        del first


def test_what_is_kept_becomes_less_at_once() -> None:
    memory = RecycledMemory(1 << 24)
    held = [memory.empty((1 << 20,), np.dtype(np.uint8)) for _ in range(12)]
    assert memory.known_bytes == 12 << 20
    memory.keep(3 << 20)
    assert memory.known_bytes == 3 << 20
    assert all(array.nbytes == 1 << 20 for array in held)
    held.clear()
    memory.empty((1 << 20,), np.dtype(np.uint8))
    assert memory.known_bytes == 3 << 20


def test_threads_never_share_memory() -> None:
    memory, wrong = RecycledMemory(1 << 23), []

    def work(number: int) -> None:
        held = []
        for turn in range(400):
            value = number * 1000 + turn
            held.append((memory.copy(np.full(40_000, value)), value))
            if len(held) > number:
                array, expected = held.pop(turn % len(held))
                if not (array == expected).all():
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_parent_and_child_do_not_share_what_both_write(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path))
    held, dropped = cache.read("007", "x"), cache.read("008", "x")
    del dropped
    go, done = get_context("fork").Event(), get_context("fork").Event()

    def child() -> None:
        own = [cache.read(id, "x") for id in cache]
        for array in own:
            array[...] = -1
        assert (held == 7).all()
        held[...] = -2
        done.set()
        assert go.wait(60)
        assert (held == -2).all()
        assert all((array == -1).all() for array in own)

    process = get_context("fork").Process(target=child)
    process.start()
    assert done.wait(60)
    assert (held == 7).all()
    found = [cache.read(id, "x") for id in cache]
    assert all((array == number).all() for number, array in enumerate(found))
    held[...] = 9
    go.set()
    process.join(60)
    assert process.exitcode == 0
    assert (held == 9).all()


def test_a_tensor_that_goes_to_another_process_is_whole(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path))
    context = torch.multiprocessing.get_context("fork")
    queue, answers = context.Queue(), context.Queue()

    def child() -> None:
        torch.set_num_threads(1)
        for _ in range(20):
            number, tensor, array = queue.get(timeout=60)
            answers.put(bool((tensor == number).all()) and bool((array == number).all()))

    process = context.Process(target=child)
    process.start()
    for number in range(20):
        array = cache.read(f"{number:03}", "x")
        queue.put((number, torch.from_numpy(cache.read(f"{number:03}", "x")), array))
        del array
    assert all(answers.get(timeout=60) for _ in range(20))
    process.join(60)
    assert process.exitcode == 0


def test_a_pickle_and_a_copy_are_arrays_of_their_own(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path))
    array = cache.read("003", "x")
    again, copy = pickle.loads(pickle.dumps(array, protocol=5)), array.copy()  # noqa: S301
    del array
    for id in cache:
        cache.read(id, "x")
    assert (again == 3).all()
    assert (copy == 3).all()
    assert copy.flags.owndata
