"""Plots of a table, with matplotlib: arrays of an utterance, lengths, statistics by dimension."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcache._checks import whole_number
from featcache.errors import ConfigError, FeatcacheError, MissingDependencyError, counted
from featcache.interface import Ints
from featcache.tables.shown import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcache.tables.table import FeatureTable

BINS = 64


def axes_for(ax: Axes | None) -> Axes:
    """Return axes, new ones of a figure of their own if none are given."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError(
            "plotting needs 'matplotlib'; try: pip install 'featcache[plot]'"
        ) from error
    figure, axes = pyplot.subplots(figsize=(8, 3), layout="constrained")
    del figure
    return axes


def plot_utterance(table: FeatureTable, id: str, feature: str, ax: Axes | None) -> Axes:
    """Plot an array: frames from left to right, dimensions upwards; a line where it has one."""
    axes, frames = axes_for(ax), table.read(id, feature)
    has_frames = table.has_frames(feature)
    flat = frames.reshape(len(frames), -1) if has_frames else frames.reshape(1, -1)
    if has_frames and flat.shape[1] > 1 and len(flat):
        shown = flat.T.astype(np.float32)
        image = axes.imshow(shown, origin="lower", aspect="auto", interpolation="none")
        axes.figure.colorbar(image, ax=axes, pad=0.01)
        axes.set_ylabel("dimension")
    else:
        axes.plot(flat.reshape(-1), drawstyle="steps-mid", linewidth=1)
        axes.set_ylabel("value")
        axes.margins(x=0)
    axes.set_xlabel(_along(table, feature) if has_frames else "dimension")
    axes.set_title(f"{_plain(id)}   {feature} {frames.shape} {table.dtype(feature)}", loc="left")
    return axes


def plot_lengths(table: FeatureTable, feature: str, buckets: int, ax: Axes | None) -> Axes:
    """Plot a histogram of frames, with the borders of buckets of as many utterances each."""
    axes, lengths = axes_for(ax), table.lengths(feature)
    count = whole_number("buckets", buckets, 1)
    if not len(lengths):
        raise ConfigError(f"{table!r} has no utterances, so there are no lengths to plot")
    least, most = int(lengths.min()), int(lengths.max())
    width = -(-(most - least + 1) // BINS)  # whole, or bins would hold more lengths than others
    axes.hist(lengths, bins=np.arange(least, most + width + 1, width), color="C0", alpha=0.8)
    borders, filled = bucket_borders(lengths, count)
    for border in borders[:-1].tolist():
        axes.axvline(border, color="0.4", linewidth=1, linestyle="--")
    axes.set_xlabel(f"frames of {feature}")
    axes.set_ylabel("utterances")
    alone = lengths.mean() / max(lengths.max(), 1)
    axes.set_title(
        f"{counted(len(lengths), 'utterance')}: {1 - filled:.0%} padding at most in "
        f"{counted(len(borders), 'bucket')}, {1 - alone:.0%} in one",
        loc="left",
    )
    return axes


def bucket_borders(lengths: Ints, buckets: int) -> tuple[Ints, float]:
    """Cut lengths into buckets of as many utterances each.

    Returns the longest of each bucket, and the share of the places that is filled where all of a
    bucket are padded to that.

    >>> bucket_borders(np.array([1, 2, 3, 4]), 2)
    (array([2, 4]), 0.8333333333333334)
    """
    parts = [part for part in np.array_split(np.sort(lengths), buckets) if len(part)]
    longest = np.array([part[-1] for part in parts], np.int64)
    places = int((longest * [len(part) for part in parts]).sum())
    return np.unique(longest), int(lengths.sum()) / places if places else 1.0


def plot_stats(table: FeatureTable, feature: str, ax: Axes | None) -> Axes:
    """Plot the mean of each dimension within a band of one standard deviation."""
    axes, stats = axes_for(ax), table.stats(feature)
    mean, deviation = stats.mean.reshape(-1), np.sqrt(stats.var.reshape(-1))
    dims = np.arange(len(mean))
    marker: dict[str, Any] = {"marker": "o"} if len(mean) == 1 else {}
    axes.fill_between(dims, mean - deviation, mean + deviation, alpha=0.25, linewidth=0)
    axes.plot(dims, mean, linewidth=1.2, **marker)
    dead = np.flatnonzero(_is_dead(deviation))
    if len(dead):
        axes.plot(dead, mean[dead], "x", color="C3", label=f"constant: {_listed(dead)}")
        axes.legend(loc="best", frameon=False)
    axes.margins(x=0.01)
    axes.set_xlabel("dimension")
    axes.set_ylabel("mean, one deviation")
    axes.set_title(f"{feature}: {counted(stats.count, 'frame')}", loc="left")
    return axes


def _is_dead(deviation: NDArray[np.float64]) -> NDArray[np.bool_]:
    return deviation < 1e-6


def _listed(numbers: Ints) -> str:
    told = ", ".join(map(str, numbers[:5].tolist()))
    return told + ", ..." * (len(numbers) > 5)


def _along(table: FeatureTable, feature: str) -> str:
    times = None
    with suppress(FeatcacheError):  # joined caches may say different things
        times = table.selection.blocks.frame_times(feature)
    return "frame" if times is None else f"frame ({times.frame_s * 1000:g} ms)"


def _plain(text: str) -> str:
    """Return an id as matplotlib shows it as it is: a dollar sign would begin mathematics."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return shortened(shown).replace("$", r"\$")
