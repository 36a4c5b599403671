from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader, Dataset

from featcache.errors import ConfigError
from featcache.samplers import Batches, ShuffledBatchSampler
from featcache.samplers.epoch import shuffled_in_groups

Steps = list[tuple[list[Any], ...]]


def numbered(sizes: Iterable[int]) -> Batches:
    """Batches of these sizes over the rows 0, 1, 2, ..."""
    ends = np.cumsum([0, *sizes])
    return Batches(np.arange(ends[-1]), ends)


def steps_of(
    batches: Batches | Sequence[Sequence[Any]], world_size: int, epoch: int = 0, **options: Any
) -> Steps:
    """What the ranks get in each step."""
    options["world_size"] = world_size
    samplers = [ShuffledBatchSampler(batches, rank=rank, **options) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
    return list(zip(*shares, strict=True))


def flat(steps: Steps) -> list[Any]:
    return [item for step in steps for batch in step for item in batch]


@given(
    sizes=st.lists(st.integers(0, 7), max_size=30),
    world_size=st.integers(1, 5),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_ranks_get_every_utterance_once_in_equally_many_batches(
    sizes: list[int], world_size: int, shuffle: bool, epoch: int
) -> None:
    count, utterances = np.count_nonzero(sizes), sum(sizes)
    if count == 0 or -(-count // world_size) * world_size > utterances:
        with pytest.raises(
            ConfigError, match="no batches" if count == 0 else r"use fewer ranks.*or drop_last=True"
        ):
            steps_of(numbered(sizes), world_size, epoch, shuffle=shuffle)
        return
    steps = steps_of(numbered(sizes), world_size, epoch, shuffle=shuffle)
    assert len(steps) == -(-count // world_size)
    alone = steps_of(numbered(sizes), 1, epoch, shuffle=shuffle)
    assert flat(steps) == flat(alone)  # in the same order for every number of ranks
    assert sorted(flat(alone)) == list(range(utterances))
    given = {item: set(batch) for (batch,) in alone for item in batch}
    for step in steps:
        for batch in step:
            assert batch
            assert set(batch) <= given[batch[0]]  # cut smaller, never put together


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=30), world_size=st.integers(1, 5))
def test_drop_last_leaves_out_the_last_step_and_cuts_no_batch(
    sizes: list[int], world_size: int
) -> None:
    if len(sizes) < world_size:
        with pytest.raises(ConfigError, match="drop_last leaves nothing; use fewer ranks"):
            steps_of(numbered(sizes), world_size, drop_last=True)
        return
    alone = [batch for (batch,) in steps_of(numbered(sizes), 1)]
    together = [
        batch for step in steps_of(numbered(sizes), world_size, drop_last=True) for batch in step
    ]
    assert together == alone[: len(sizes) // world_size * world_size]


def test_only_batches_of_the_last_step_are_cut_the_largest_first() -> None:
    steps = steps_of(numbered([2, 8, 2, 4, 6]), 3, shuffle=False)
    assert steps == [
        ([0, 1], [*range(2, 10)], [10, 11]),
        ([12, 13, 14, 15], [16, 17, 18], [19, 20, 21]),
    ]


def test_batches_before_the_last_step_are_cut_where_that_has_too_few_utterances() -> None:
    steps = steps_of(numbered([3, 3, 3, 5, 1]), 2, shuffle=False)
    assert steps == [([0, 1, 2], [3, 4, 5]), ([6, 7, 8], [9, 10]), ([11, 12, 13], [14])]


def test_ids_and_rows_come_as_they_were_given() -> None:
    assert steps_of([["b", "a"], [], ["c"]], 1, shuffle=False) == [(["b", "a"],), (["c"],)]
    assert steps_of([[np.int64(2), 1], (np.int32(0),)], 1, shuffle=False) == [([2, 1],), ([0],)]
    assert steps_of(Batches([1, 0], [0, 1, 2], keys=["x", "y"]), 2, shuffle=False) == [
        (["y"], ["x"])
    ]


@pytest.mark.parametrize(
    ("count", "group", "world_size", "share"),
    [
        (4992, 48, 2, 1),
        (4992, 48, 5, 0.9),
        (4992, 48, 8, 1),
        (4992, 48, 16, 1),
        (400, 12, 2, 0.98),
        (400, 12, 4, 0.98),
        (400, 12, 6, 0.98),
        (400, 12, 8, 0.6),
    ],
)
def test_in_most_steps_the_ranks_get_neighbouring_batches(
    count: int, group: int, world_size: int, share: float
) -> None:
    steps = steps_of([[2 * number, 2 * number + 1] for number in range(count)], world_size)
    near = [max(step)[0] - min(step)[0] < 2 * group for step in steps]
    assert np.mean(near) >= share


@given(count=st.integers(1, 400), seed=st.integers(0, 5))
def test_shuffling_in_groups_is_a_permutation_whose_groups_are_neighbours(
    count: int, seed: int
) -> None:
    order = shuffled_in_groups(count, seed)
    assert sorted(order.tolist()) == list(range(count))
    size = max(size for size in (1, 2, 4, 6, 12) if size * size <= count)
    whole = order[: count - count % size].reshape(-1, size)
    assert (np.ptp(whole, axis=1) < 2 * size).all()


def test_each_epoch_and_seed_has_an_order_of_its_own() -> None:
    orders = [
        tuple(flat(steps_of(numbered([2] * 50), 1, epoch, seed=seed)))
        for epoch in range(3)
        for seed in range(3)
    ]
    assert len(set(orders)) == 9
    assert (
        len(
            {
                tuple(flat(steps_of(numbered([2] * 50), 1, epoch, shuffle=False)))
                for epoch in range(3)
            }
        )
        == 1
    )


def test_every_batch_comes_first_in_some_epoch_and_last_in_another() -> None:
    orders = [flat(steps_of(numbered([1] * 11), 1, epoch)) for epoch in range(80)]
    assert {order[0] for order in orders} == set(range(11))
    # the last group has one batch, five have two
    assert {order[-1] for order in orders} >= {0, 2, 4, 6, 8, 10}


def test_the_order_is_the_same_in_every_process() -> None:
    code = """if True:
        import sys
        from featcache.samplers.shuffled import ShuffledBatchSampler
        sampler = ShuffledBatchSampler([[f"utt-{number}"] for number in range(40)], seed=3)
        sampler.set_epoch(2)
        print(list(sampler), sampler.state_dict(4), "torch" in sys.modules)"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0].rstrip().endswith(b"False")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed must be an integer of at least 0, not -1"),
        ({"seed": 1.0}, "seed must be an integer"),
        ({"rank": 0}, "rank=0 and world_size=None"),
        ({"world_size": 2}, "are given together"),
        ({"rank": 2, "world_size": 2}, "below world_size=2, not 2; ranks count from 0"),
        ({"rank": -1, "world_size": 2}, "rank must be an integer of at least 0"),
        ({"rank": 0, "world_size": 0}, "world_size must be an integer of at least 1"),
        ({"batches": []}, "no batches"),
        ({"batches": [[], []]}, "no batches"),
        ({"batches": ["utt-1", "utt-2"]}, "lists of ids"),
        ({"batches": [["utt-1"], [2]]}, "row numbers, integers, or lists of ids"),
        ({"batches": [[0.5]]}, "lists of row numbers"),
        ({"batches": [[True]]}, "lists of row numbers"),
        ({"batches": [0, 1]}, "lists of row numbers"),
    ],
)
def test_what_cannot_be_sampled_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShuffledBatchSampler(**{"batches": [[0], [1]], **options})


@pytest.mark.parametrize("epoch", [-1, 1.5, "1", None, True])
def test_an_epoch_is_a_number(epoch: Any) -> None:
    with pytest.raises(ConfigError, match=f"epoch must be an integer of at least 0, not {epoch!r}"):
        ShuffledBatchSampler([[0]]).set_epoch(epoch)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "2", "RANK": "1"},  # as torchrun
        {"WORLD_SIZE": "2", "LOCAL_RANK": "1"},  # as Lightning's ddp in its children
        {"WORLD_SIZE": "2"},
        {"LOCAL_RANK": "1"},
    ],
)
def test_processes_that_were_started_together_and_nothing_connects_are_refused(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sampler = ShuffledBatchSampler([[0], [1]])  # they may be connected until it is used
    for use in (lambda: next(iter(sampler)), lambda: len(sampler), sampler.state_dict):
        with pytest.raises(ConfigError, match=r"not connected.*or give it rank and world_size"):
            use()
    assert repr(sampler) == "<ShuffledBatchSampler: <2 batches of 2 utterances>, epoch 0>"
    assert list(ShuffledBatchSampler([[0], [1]], shuffle=False, rank=1, world_size=2)) == [[1]]


def test_ranks_are_those_of_torch_distributed(tmp_path: Path) -> None:
    code = """if True:
        import sys, torch.distributed
        from featcache.samplers.shuffled import ShuffledBatchSampler
        rank, file = int(sys.argv[1]), sys.argv[2]
        sampler = ShuffledBatchSampler([[0], [1], [2], [3]], shuffle=False)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=2
        )
        print(len(sampler), list(sampler))
        torch.distributed.barrier()  # nobody leaves before the other has come
        torch.distributed.destroy_process_group()"""
    arguments = [
        [sys.executable, "-c", code, str(rank), str(tmp_path / "meet")] for rank in range(2)
    ]
    processes = [subprocess.Popen(argument, stdout=subprocess.PIPE) for argument in arguments]
    assert [process.communicate()[0].strip() for process in processes] == [
        b"2 [[0], [2]]",
        b"2 [[1], [3]]",
    ]


class Rows(Dataset[int]):
    """A trivial data set that other processes can import."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> int:
        return row


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine of few cores
@pytest.mark.parametrize(
    ("workers", "start"),
    [(0, None), (1, "fork"), (2, "fork"), (4, "fork"), (1, "forkserver"), (4, "forkserver")],
)
def test_a_data_loader_takes_batches_of_an_epoch_and_of_its_rest(
    workers: int, start: str | None
) -> None:
    sampler, second = (
        ShuffledBatchSampler(numbered([3] * 13 + [1]), rank=1, world_size=2, seed=7)
        for _ in range(2)
    )
    expected = list(sampler)
    second.set_epoch(1)
    loader = DataLoader(
        Rows(),
        batch_sampler=sampler,
        num_workers=workers,
        multiprocessing_context=start,
        persistent_workers=workers > 0,
        collate_fn=torch.tensor,
    )
    assert len(loader) == 7
    sampler.set_epoch(0)
    assert [batch.tolist() for batch in loader] == expected
    assert [batch.tolist() for batch in loader] == list(second)
    sampler.set_epoch(0)
    sampler.load_state_dict(sampler.state_dict(steps=3))
    assert len(loader) == 7
    assert [batch.tolist() for batch in loader] == expected[3:]
