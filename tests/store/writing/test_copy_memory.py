"""Copies stay as they are for as long as anybody looks at them; then their memory is used again."""

from __future__ import annotations

import numpy as np

from featcache.writing.arrays import BLOCK_BYTES, LEAST_BYTES, CopyMemory


def test_copies_that_are_held_never_change() -> None:
    memory = CopyMemory()
    random = np.random.default_rng(0)
    held: dict[int, tuple[object, int]] = {}
    for number in range(400):
        value = number % 251
        array = np.full(random.integers(1, BLOCK_BYTES // 3), value, np.uint8)
        copy = memory.copy(array)
        assert not np.shares_memory(copy, array)
        # as the backends hold them: a piece of a view of the bytes
        held[int(random.integers(0, 12))] = copy.reshape(-1).view(np.uint8).data[5:], value
        for view, expected in held.values():
            octets = np.frombuffer(view, np.uint8)  # type: ignore[call-overload]
            assert (octets[:: len(octets) // 7 + 1] == expected).all()


def test_memory_is_used_again() -> None:
    memory = CopyMemory()
    array = np.ones((LEAST_BYTES, 4), np.float32)
    places = {memory.copy(array).ctypes.data for _ in range(200)}
    assert len(places) <= 2 * BLOCK_BYTES // array.nbytes


def test_any_order_and_shape_is_copied_as_it_looks() -> None:
    memory = CopyMemory()
    array = np.arange(6 * LEAST_BYTES, dtype=np.int16).reshape(3, -1, 2)
    for view in (array, array[::-1], array.transpose(2, 1, 0), array[:, :0], array[:, 7]):
        copy = memory.copy(view)
        np.testing.assert_array_equal(copy, view, strict=True)
        assert copy.flags.c_contiguous
