"""Memory that workers hand over and use again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing as mp
from torch.utils.data import DataLoader

from featcache import CacheWriter, FeatureDataset, FeatureStorageConfig
from featcache.loading.memory import AVAILABLE, MOST_FREE, SharedTensors

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="no memfd or no /proc on this system"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def in_child(task: Callable[[Any, Any], None]) -> tuple[Any, Any]:
    """Run `task(queue, done)` in a process of its own, which lives until `done` is set."""
    context = mp.get_context("fork")
    queue, done = context.Queue(), context.Event()

    def alone() -> None:
        # as in a DataLoader's worker: the threads of this process do not survive a fork
        torch.set_num_threads(1)
        task(queue, done)

    context.Process(target=alone, daemon=True).start()
    return queue, done


def filled(tensor: torch.Tensor, number: int) -> torch.Tensor:
    tensor.fill_(number)
    return tensor  # `fill_` gives an ordinary one


def test_memory_is_free_once_nothing_here_refers_to_it() -> None:
    take = SharedTensors()
    tensor = take((200, 300), torch.float32)
    where, view = tensor.data_ptr(), tensor[1:].numpy()
    del tensor
    assert take((200, 300), torch.float32).data_ptr() != where
    del view
    assert take((300, 400), torch.bfloat16).data_ptr() == where


def test_what_is_computed_from_it_is_an_ordinary_tensor() -> None:
    for shape in ((2, 3), (200, 300)):
        tensor = SharedTensors()(shape, torch.float32)
        assert {
            type(found) for found in (tensor[0], tensor + 1, tensor.long(), tensor.clone())
        } == {torch.Tensor}


def test_memory_that_nobody_holds_is_bounded() -> None:
    take = SharedTensors()
    tensors = [take((1 << 20,), torch.uint8) for _ in range(3 * MOST_FREE)]
    del tensors
    take((5 << 20,), torch.uint8)
    assert len(take._segments) <= MOST_FREE


def test_what_the_other_process_holds_is_not_written_over() -> None:
    queue, done = in_child(numbered)
    kept = []
    while (found := queue.get(timeout=60)) is not None:
        number, tensor = found
        assert type(tensor) is torch.Tensor
        assert (tensor == number).all()
        if number % 5 == 0:
            kept.append((number, tensor[1:]))
    done.set()
    for number, view in kept:
        assert (view == number).all()


def numbered(queue: Any, done: Any) -> None:
    take = SharedTensors()
    for number in range(60):
        queue.put((number, filled(take((1000, 50), torch.float32), number)))
    queue.put(None)
    done.wait(60)


def test_memory_that_came_back_is_used_again() -> None:
    def one_after_another(queue: Any, done: Any) -> None:
        take = SharedTensors()
        for _ in range(20):
            queue.put(take((1000, 50), torch.float32))
            done.wait(60)
            done.clear()
        queue.put(len(take._segments))

    queue, done = in_child(one_after_another)
    for _ in range(20):
        queue.get(timeout=60)
        done.set()
    assert queue.get(timeout=60) <= 3


def test_tensors_of_all_sizes_and_also_twice_arrive_as_they_are() -> None:
    shapes = [(0, 3), (), (2, 3), (300, 400)]

    def send(queue: Any, done: Any) -> None:
        take = SharedTensors()
        for shape in shapes:
            for dtype in (torch.bfloat16, torch.bool, torch.int64):
                tensor = filled(take(shape, dtype), 1)
                queue.put((tensor, [tensor]))
        done.wait(60)

    queue, done = in_child(send)
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.bool, torch.int64):
            first, (second,) = queue.get(timeout=60)
            assert torch.equal(first, torch.ones(shape, dtype=dtype))
            assert torch.equal(first, second)
            first.zero_()  # it may be written to
            assert type(first) is torch.Tensor
    done.set()


def test_batches_outlive_their_workers_and_leave_no_descriptor(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("x")]) as writer:
        for number in range(40):
            writer.write(f"{number:02}", {"x": np.full((400 + number, 80), number)})
    batches = [list(range(first, first + 4)) for first in range(0, 40, 4)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    loader = DataLoader(
        FeatureDataset(tmp_path),
        batch_sampler=batches,
        num_workers=2,
        collate_fn=FeatureDataset.collate,
    )
    kept = list(loader)
    for batch, rows in zip(kept, batches, strict=True):
        assert batch["x_lengths"].tolist() == [400 + row for row in rows]
        for array, row in zip(batch["x"], rows, strict=True):
            assert (array[: 400 + row] == row).all()
            assert not array[400 + row :].any()
    kept.clear()
    del loader, batch, array
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
