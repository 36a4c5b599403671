"""Rows of a table shared out: a sample of them, or several parts that have nothing in common."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from numbers import Integral, Real
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featcache._checks import whole_number
from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.store.format.index import hash_of
from featcache.tables.columns import Columns
from featcache.tables.ordering import drawn_parts, mixed

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable

Sizes = NDArray[np.float64]
ROUNDING = 1e-6  # that shares may be away from 1 together
MOST_EXCHANGES = 1000


def sampled_rows(table: FeatureTable, amount: float, seed: int) -> Ints:
    """Return some rows at random, in their order: a share of them (float), or a number (int)."""
    whole = isinstance(amount, Integral)
    if isinstance(amount, bool) or not isinstance(amount, Real):
        raise ConfigError(f"a sample is a share, 0.1, or a number of utterances, not {amount!r}")
    count = int(amount) if whole else round(float(amount) * len(table)) if 0 <= amount <= 1 else -1
    if not 0 <= count <= len(table):
        raise ConfigError(
            f"a sample of {amount!r} cannot be drawn from {len(table)} utterances; give a share "
            "from 0.0 to 1.0, or a number of them"
        )
    whole_number("seed", seed, 0)
    return drawn_parts(table.selection.hashes(), seed, [count])[0]


def split_rows(
    table: FeatureTable, shares: Mapping[str, float], by: str | None, seed: int
) -> dict[str, Ints]:
    """Return the rows of each part, in their order; no value of the column `by` is in two parts."""
    whole_number("seed", seed, 0)
    _check_shares(shares)
    wanted = np.array(list(shares.values()), float) * len(table) / sum(shares.values())
    if by is None:
        parts = drawn_parts(table.selection.hashes(), seed, _whole_sizes(wanted))
        return dict(zip(shares, parts, strict=True))
    codes, distinct = Columns(table)[by].codes()
    if codes.min(initial=0) < 0:
        raise ConfigError(
            f"utterance {table.id(int(codes.argmin()))!r} has no {by!r}, so nothing tells which "
            "part it belongs to; leave such utterances out with filter"
        )
    sizes = np.bincount(codes, minlength=len(distinct))
    used = np.flatnonzero(sizes)
    if len(used) < len(shares):
        raise ConfigError(f"there are {len(used)} values of {by!r} for {len(shares)} parts")
    names = [repr(distinct[code]).encode("utf-8", "surrogatepass") for code in used.tolist()]
    hashes = np.fromiter(map(hash_of, names), np.uint64, len(names))
    part_of_code = np.zeros(len(sizes), np.int8 if len(shares) < 128 else np.int64)
    part_of_code[used] = _assigned(sizes[used], np.argsort(mixed(hashes, seed)), wanted)
    part_of = part_of_code[codes]
    return {name: np.flatnonzero(part_of == part) for part, name in enumerate(shares)}


def _check_shares(shares: Mapping[str, float]) -> None:
    if not isinstance(shares, Mapping) or not shares:
        raise ConfigError(f"a split is a mapping of names to shares, not {shares!r}")
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, Real) or not share > 0:
            raise ConfigError(f"the share of {name!r} is a number above 0, not {share!r}")
    if abs(sum(shares.values()) - 1) > ROUNDING:
        raise ConfigError(
            f"shares of a split add up to 1, not to {sum(shares.values()):g}: {dict(shares)!r}"
        )


def _whole_sizes(wanted: Sizes) -> Ints:
    """Round sizes so that their sum stays: the largest remainders are rounded up."""
    sizes = np.floor(wanted + ROUNDING).astype(np.int64)
    lacking = round(float(wanted.sum())) - int(sizes.sum())
    sizes[np.argsort(sizes - wanted, kind="stable")[:lacking]] += 1
    return sizes


def _assigned(sizes: Ints, order: Ints, wanted: Sizes) -> Ints:
    """Return the part of each group: in a drawn order, then exchanged until sizes fit best."""
    middles = np.cumsum(sizes[order]) - sizes[order] / 2
    part_of = np.empty(len(sizes), np.int64)
    part_of[order] = np.minimum(np.cumsum(wanted).searchsorted(middles), len(wanted) - 1)
    for part in range(len(wanted)):
        if not (part_of == part).any():  # a part without anything is no part
            many = np.bincount(part_of, minlength=len(wanted)).argmax()
            groups = np.flatnonzero(part_of == many)
            part_of[groups[sizes[groups].argmin()]] = part
    for _ in range(MOST_EXCHANGES):
        if not _exchanged(part_of, sizes, wanted):
            break
    return part_of


def _exchanged(part_of: Ints, sizes: Ints, wanted: Sizes) -> bool:
    """Move one group to another part, or exchange two, if sizes are nearer then."""
    over = np.bincount(part_of, sizes, minlength=len(wanted)) - wanted
    pairs = permutations(range(len(wanted)), 2)
    for here, there in sorted(pairs, key=lambda pair: over[pair[1]] - over[pair[0]]):
        difference = over[here] - over[there]
        if difference <= 0:
            return False
        mine, others = np.flatnonzero(part_of == here), np.flatnonzero(part_of == there)
        change, group, other = _nearest(sizes, mine, others, difference / 2)
        after = abs(over[here] - change) + abs(over[there] + change)
        if after < abs(over[here]) + abs(over[there]) - ROUNDING:
            part_of[group] = there
            if other >= 0:
                part_of[other] = here
            return True
    return False


def _nearest(sizes: Ints, mine: Ints, others: Ints, wanted: float) -> tuple[int, int, int]:
    """Return the change of size nearest to the wanted one, and the groups: one of each part.

    The other is -1 where one group alone moves; none is the last one of its part.
    """
    others = others[np.argsort(sizes[others], kind="stable")]
    alone = [-1] if len(mine) > 1 else []
    others = np.concatenate([np.array(alone, np.int64), others])
    back = np.where(others < 0, 0, sizes[others])
    places = np.clip(back.searchsorted(sizes[mine] - wanted), 1, len(back))
    candidates = np.minimum(np.stack([places - 1, places]), len(back) - 1)
    change = sizes[mine] - back[candidates]
    side, which = np.unravel_index(np.abs(change - wanted).argmin(), change.shape)
    return int(change[side, which]), int(mine[which]), int(others[candidates[side, which]])
