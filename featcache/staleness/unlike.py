"""Arrays of one feature computed twice: alike or not, within a tolerance of the spread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.interface import Array
from featcache.staleness.probe import Rows


class Tolerance(NamedTuple):
    """The distance that two computations may have and still be the same."""

    spread: float  # of the feature's spread, for real numbers
    share: float  # of the frames, for whole ones


# Another device adds in another order and has other approximations of exp and tanh; a batch of
# another size has other kernels. Half precision rounds each step to 11 bits, bfloat16 to 8.
TOLERANCES = {
    "fp32": (Tolerance(1e-4, 0.01), Tolerance(1e-2, 0.05)),
    "tf32": (Tolerance(1e-3, 0.02), Tolerance(1e-2, 0.05)),
    "fp16": (Tolerance(3e-3, 0.02), Tolerance(1e-2, 0.05)),
    "bf16": (Tolerance(3e-2, 0.05), Tolerance(5e-2, 0.1)),
}


def tolerance(precision: str, *, same_device: bool) -> Tolerance:
    """Return the tolerance for a precision, on the same device or another one."""
    same, other = TOLERANCES.get(precision, TOLERANCES["bf16"])
    return same if same_device else other


class Unlike(NamedTuple):
    """A feature of an utterance, computed twice, that differs."""

    id: str
    feature: str
    by: float  # of the spread; of the frames, for whole numbers
    whole: bool  # whether these are whole numbers
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # where these differ
    frames: float = 1.0  # share of the frames that differ
    first: float = 0.0  # place of the first one that does, from 0 to 1

    @property
    def at_the_end(self) -> bool:
        """True if only the last frames differ."""
        return self.shapes is None and self.frames < 0.5 and self.first > 0.5

    def told(self) -> str:
        """Return by how much they differ, as the end of a sentence."""
        if self.shapes is not None:
            before, now = self.shapes
            if before[1:] == now[1:]:
                return f"has {now[0]} frames instead of {before[0]}"
            return f"has the shape {now} instead of {before}"
        if self.whole:
            return f"differs in {self.by:.2g} of its frames"
        where = ", in its last frames" if self.at_the_end else ""
        return f"differs by {self.by:.2g} of its spread{where}"


def spread(arrays: Iterable[Array]) -> float:
    """Return the standard deviation of a feature about the mean of each dimension.

    Of a feature that is constant its magnitude; of zeros 1.
    """
    seen = [array.astype(np.float64) for array in arrays if array.size]
    if not seen or len({array.shape[1:] for array in seen}) > 1:
        return 1.0
    frames = np.concatenate(seen)
    frames[~np.isfinite(frames)] = 0
    candidates = (frames - frames.mean(axis=0)).std(), frames.std(), np.abs(frames).max()
    return next((float(found) for found in candidates if found > 1e-30), 1.0)


def unlike(
    named: tuple[str, str],
    before: Rows,
    now: Rows,
    spread: float,
    tolerance: Tolerance,
    slack: Any = 0.0,
) -> Unlike | None:
    """Compare an array with the same one computed again; None if they are alike.

    Args:
        named: the utterance's id and the feature.
        before: the array of before.
        now: the array of now.
        spread: of the feature.
        tolerance: as far as they may be apart.
        slack: what real numbers may differ by beyond that, for each one or for all.
    """
    id, feature = named
    whole = before.array.dtype.kind != "f" and now.array.dtype.kind != "f"
    shapes = (before.total, *before.array.shape[1:]), (now.total, *now.array.shape[1:])
    if shapes[0] != shapes[1]:
        return Unlike(id, feature, np.inf, whole, shapes)
    rows = min(len(before.array), len(now.array))
    one, other = before.array[:rows], now.array[:rows]
    if not one.size or (one.dtype == other.dtype and one.tobytes() == other.tobytes()):
        return None
    apart = _apart(one, other)
    wrong = apart > (0 if whole else tolerance.spread * spread + slack)
    off = wrong.reshape(rows, -1).any(axis=1)
    share = float(off.mean())
    if share <= (tolerance.share if whole else 0):
        return None
    by = share if whole else float(apart[wrong].max()) / spread
    return Unlike(id, feature, by, whole, None, share, int(off.argmax()) / rows)


def _apart(one: Array, other: Array) -> NDArray[np.float64]:
    """Return the distance of each pair of numbers; infinite where one of them is no number."""
    first, second = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(first - second)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    apart[same] = 0
    apart[np.isnan(apart)] = np.inf
    return apart
