"""Sharing of an epoch's batches among ranks, shuffled so that the ranks' batches are alike."""

from __future__ import annotations

import os
import sys

import numpy as np

from featcache._checks import whole_number
from featcache.errors import ConfigError
from featcache.interface import Ints

# Up to 48, each divisible by many numbers of ranks: the batches of a step are then in one group.
GROUP_SIZES = (1, 2, 4, 6, 12, 24, 48)


def share_out(ends: Ints, position: int, world_size: int, drop_last: bool) -> Ints:
    """Return where the batches from `position` on begin and end, a multiple of `world_size`.

    The incomplete last step's batches are cut into as many as there are ranks, from the largest on;
    where they have too few utterances, those of the steps before it as well. Raises `ConfigError`
    where that cannot be done.

    >>> share_out(np.array([0, 4, 8, 13]), 0, 2, False).tolist()
    [0, 4, 8, 10, 13]
    """
    rest = np.concatenate([[position], ends[np.searchsorted(ends, position, "right") :]])
    count = len(rest) - 1
    over = count % world_size
    if over == 0:
        return rest
    if drop_last and (position or count > over):
        return rest[: count - over + 1]
    missing = world_size - over
    sizes = np.diff(rest)
    # more batches that can be made of the last one, the last two, ...
    spare = np.cumsum(sizes[::-1] - 1)
    if drop_last or spare[-1] < missing:
        raise ConfigError(
            f"{count} batches of {rest[-1] - position} utterances cannot be shared by {world_size} "
            f"ranks{', and drop_last leaves nothing' if drop_last else ''}; use fewer ranks, "
            f"smaller batches{'' if drop_last else ', or drop_last=True'}"
        )
    enough = int(np.searchsorted(spare, missing)) + 1
    first = count - over - max(-(-(enough - over) // world_size), 0) * world_size
    pieces = np.ones(count - first, np.int64)
    for _ in range(missing):
        pieces[np.argmax(sizes[first:] / pieces)] += 1
    cuts = [
        begin + size * np.arange(1, parts + 1) // parts
        for begin, size, parts in zip(rest[first:-1], sizes[first:], pieces, strict=True)
    ]
    return np.concatenate([rest[: first + 1], *cuts])


def shuffled_in_groups(count: int, random: np.random.Generator) -> Ints:
    """Return the numbers below `count` in random order: groups of neighbours, each shuffled, too.

    The size of a group depends on `count` alone, so that any number of ranks sees one order. It is
    at most the square root of `count`: larger groups leave little to shuffle, smaller ones give few
    ranks batches that are alike. Numbers that fill no group (6 here) come last, so that all groups
    begin at a multiple of their size.

    >>> shuffled_in_groups(9, np.random.default_rng(5)).tolist()
    [1, 0, 7, 8, 3, 2, 5, 4, 6]
    """
    size = max(size for size in GROUP_SIZES if size * size <= max(count, 1))
    groups, over = divmod(count, size)
    begin = int(random.integers(groups + 1)) * size
    order = np.arange(count)
    whole = np.delete(order, slice(begin, begin + over)).reshape(groups, size)
    last = order[begin : begin + over]
    random.shuffle(whole)
    return np.concatenate([random.permuted(whole, axis=1).ravel(), random.permutation(last)])


def split_up(ends: Ints, count: int) -> Ints:
    """Return the ends of `count` batches: the largest are halved until there are enough.

    >>> split_up(np.array([0, 4, 5, 9]), 5).tolist()
    [0, 2, 4, 5, 7, 9]
    """
    while (missing := count - (len(ends) - 1)) > 0:
        sizes = np.diff(ends)
        largest = np.argsort(-sizes, kind="stable")[:missing]
        largest = largest[sizes[largest] > 1]
        if not len(largest):
            return ends
        ends = np.sort(np.concatenate([ends, ends[largest] + sizes[largest] // 2]))
    return ends


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and number of ranks: those given, else those of `torch.distributed`, else 0 of 1.

    Raises `ConfigError` for one without the other, a rank that there is not, and for one of several
    processes that a launcher started but nothing has connected.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"rank and world_size are given together, not rank={rank!r} and "
            f"world_size={world_size!r}"
        )
    if rank is not None:
        size, number = whole_number("world_size", world_size, 1), whole_number("rank", rank, 0)
        if number >= size:
            raise ConfigError(
                f"rank must be below world_size={size}, not {number}; ranks count from 0"
            )
        return number, size
    return connected_rank(
        "call torch.distributed.init_process_group before the sampler is used, or give it rank "
        "and world_size"
    )


def connected_rank(advice: str) -> tuple[int, int]:
    """Return rank and number of ranks of `torch.distributed`; 0 of 1 without it.

    Raises `ConfigError`, with `advice`, for one of several processes that a launcher started but
    nothing has connected.
    """
    torch = sys.modules.get("torch")  # a process that has not loaded it is in no group
    if (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if _launched_with_others():
        # alone, each of them would train on everything
        raise ConfigError(f"several processes were started, but they are not connected; {advice}")
    return 0, 1


def _launched_with_others() -> bool:
    """Tell whether a launcher's variables name other processes.

    torchrun sets all of them, Lightning's ddp the last two.
    """
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    found = {name: os.environ.get(name, "") for name in alone}
    return any(value.isdigit() and int(value) > alone[name] for name, value in found.items())
