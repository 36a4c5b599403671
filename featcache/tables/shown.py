"""Tables as one line, as HTML for notebooks, and as plots.

Lines and HTML are short, without script, and nothing is read for them. Ids, paths and annotations
are strangers': they are escaped, and cut where they are long. Plots need matplotlib.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcache._checks import whole_number
from featcache.declaration import DeclaredFeature
from featcache.errors import (
    ConfigError,
    FeatcacheError,
    MissingDependencyError,
    bytes_text,
    counted,
    written_out,
)
from featcache.interface import Ints
from featcache.reading import Generation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcache.tables.table import FeatureTable


def shortened(text: str, most: int = 60) -> str:
    """Return text, its middle cut out where it is long.

    >>> shortened("a/very/long/path", 11)
    'a/ver.../path'
    """
    half = most // 2
    return text if len(text) <= most + 2 else f"{text[:half]}...{text[-half:]}"


# What a table holds, as far as it is known without a long read.

MOST_COUNTED = 1_000_000  # rows whose lengths are added up, or drawn
_FEW = 3  # features that a line names
MANY = 20  # and a table


def lengths_known(table: FeatureTable, feature: str) -> Ints | None:
    """Return the frames of the rows of a feature, the first million; None where there are none."""
    try:
        if not table.has_frames(feature):
            return None
        if len(table) <= MOST_COUNTED:
            return table.lengths(feature)
        return table.lengths(feature, rows=np.arange(MOST_COUNTED))
    except FeatcacheError:  # told when it is read; a repr must not fail
        return None


def whole_of(table: FeatureTable) -> Generation | None:
    """Return the generation that a table is all of, in its own order; None if it is a view."""
    selection = table.selection
    blocks = selection.blocks.blocks
    alone = selection.row_map is None and selection.cuts is None and len(blocks) == 1
    return blocks[0].members[0].opened if alone and len(blocks[0].members) == 1 else None


def frames_known(table: FeatureTable, feature: str) -> int | None:
    """Return the frames of all rows; None where that is not known at once."""
    generation = whole_of(table)
    if generation is not None and not generation.sets and feature in generation.index.stats:
        return generation.index.stats[feature].count
    if len(table) > MOST_COUNTED:
        return None
    lengths = lengths_known(table, feature)
    return None if lengths is None else int(lengths.sum())


def hours_known(table: FeatureTable) -> float | None:
    """Return the hours of the first feature that says how long its frames are."""
    for name in table.features:
        with suppress(FeatcacheError):  # joined caches may say different things
            times = table.selection.blocks.frame_times(name)
            frames = None if times is None else frames_known(table, name)
            if times is not None and frames is not None:
                return frames * times.frame_s / 3600
    return None


def bytes_known(table: FeatureTable) -> int | None:
    """Return the bytes of the arrays of a whole cache; None of a view, and of very many rows."""
    generation = whole_of(table)
    if generation is None or len(table) > MOST_COUNTED:
        return None
    return sum(int(columns.nbytes.sum()) for columns in generation.index.features.values())


def shape_of(table: FeatureTable, feature: str) -> str:
    """Return the shape of an array of a feature, as text: `(frames, 80)`."""
    opened = table.selection.blocks.blocks[0].features[feature].opened
    if feature not in opened.manifest.dims:  # nothing is stored yet
        return "(...)"
    sizes = ["frames"] * table.has_frames(feature) + [*map(str, table.dims(feature))]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def features_line(table: FeatureTable) -> str:
    """Return shape, dtype and backend of the features, the first of many."""
    told = [
        f"{name} {shape_of(table, name)} {table.dtype(name)} {_declared(table, name)['backend']}"
        for name in table.features[:_FEW]
    ]
    more = len(table.features) - len(told)
    return ", ".join([*told, f"and {more} more"] if more else told)


def _declared(table: FeatureTable, feature: str) -> DeclaredFeature:
    opened = table.selection.blocks.blocks[0].features[feature].opened
    return opened.manifest.features[feature]


def view_line(table: FeatureTable) -> str:
    """Return what a table is of its caches: rows, frames, share of all."""
    selection, paths = table.selection, table.paths
    first = repr(shortened(str(paths[0]), 100)) + (
        f" and {len(paths) - 1} more" if paths[1:] else ""
    )
    text = f"{selection.said} of {first}"
    if selection.plan is not None:
        return text
    timed = next((name for name in table.features if table.has_frames(name)), None)
    frames = None if timed is None else frames_known(table, timed)
    if timed is None or frames is None or not len(table):
        return text
    text += f", {counted(frames, 'frame')}"
    if selection.row_map is None or len(selection.blocks) > MOST_COUNTED:
        return text
    of_all = int(selection.blocks.lengths(timed).sum())
    return f"{text}, {frames / of_all:.0%} of all" if of_all else text


# HTML, inside of whatever page: colours are those of the page, so dark ones work.

_QUIET = "opacity:.65"
WIDTH, HEIGHT = 320, 60
BINS = 40


def escaped(text: object, most: int = 60) -> str:
    """Return text as HTML has it, cut where it is long; control characters are shown."""
    return html.escape(shortened(written_out(str(text)), most))


def boxed(*pieces: str) -> str:
    """Return pieces of HTML as one."""
    return (
        '<div style="font:13px/1.5 system-ui,sans-serif;color:currentColor;max-width:60em">'
        f"{''.join(pieces)}</div>"
    )


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a row of figures, each with its words."""
    spans = (
        f'<span style="white-space:nowrap"><b>{escaped(figure)}</b> {escaped(words)}</span>'
        for figure, words in pairs
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:2px 18px">{"".join(spans)}</div>'


def grid(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, bold: Iterable[int] = (), more: int = 0
) -> str:
    """Return a table; columns of numbers are set to the right, some rows in bold."""
    loud = {*bold}
    sides = [
        "right" if rows and all(_is_number(row[column]) for row in rows) else "left"
        for column in range(len(head))
    ]
    lines = [_line(head, sides, "i")]
    lines += [_line(row, sides, "b" if at in loud else "") for at, row in enumerate(rows)]
    rest = f'<div style="{_QUIET}">and {more:,} more</div>' if more else ""
    style = "margin:4px 0;color:inherit;font:inherit"
    return f'<table cellpadding="3" style="{style}">{"".join(lines)}</table>{rest}'


def _line(cells: Sequence[str], sides: Sequence[str], tag: str) -> str:
    first, last = (f"<{tag}>", f"</{tag}>") if tag else ("", "")
    inner = (
        f'<td align="{side}">{first}{escaped(cell)}{last}</td>'  # shorter than a style in each
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(inner)}</tr>"


def _is_number(text: str) -> bool:
    return text == "-" or text[:1].isdigit()


def histogram(lengths: Ints, of: int, feature: str) -> str:
    """Return a histogram of lengths; it says beside it if these are not all."""
    if not len(lengths):
        return ""
    least, most = int(lengths.min()), int(lengths.max())
    width = -(-(most - least + 1) // BINS)  # whole, or bins would hold more lengths than others
    counts = np.bincount((lengths - least) // width)
    bins = len(counts)
    step, tallest = WIDTH / bins, max(int(counts.max()), 1)
    heights = np.maximum(counts / tallest * HEIGHT, counts > 0).tolist()
    path = "".join(
        f"M{at * step:.1f} {HEIGHT}v-{height:.1f}h{step * 0.9:.1f}V{HEIGHT}z"
        for at, height in enumerate(heights)
        if height
    )
    middle = int(np.median(lengths))
    words = f"{least:,} to {most:,} frames of {feature}, half of them up to {middle:,}"
    if len(lengths) < of:
        words += f"; of the first {len(lengths):,} of {of:,} utterances"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escaped(words, 200)}">'
        f'<path d="{path}" fill="currentColor" fill-opacity=".6"/></svg>'
        f'<div style="{_QUIET}">{escaped(words, 200)}</div>'
    )


def table_html(table: FeatureTable, version: str = "", state: str = "") -> str:
    """Return a table of utterances as HTML: figures, features, lengths, annotations."""
    head = f"<b>{escaped(', '.join(map(str, table.paths)), 120)}</b>{escaped(version)}"
    made = f'<div style="{_QUIET}">{escaped(table.made, 120)}</div>' if table.made else ""
    names = table.features[:MANY]
    rows = [_feature_row(table, name) for name in names]
    columns = ["feature", "frames", "dims", "dtype", "backend", "codec"]
    timed = next((name for name in table.features if table.has_frames(name)), None)
    lengths = None if timed is None else lengths_known(table, timed)
    notes = [escaped(name, 30) for name in table.annotations[:MANY]]
    notes += ["..."] if len(table.annotations) > MANY else []
    said = f'<div style="{_QUIET}">annotations: {", ".join(notes)}</div>' if notes else ""
    return boxed(
        f"<div>{head}</div>",
        made,
        tiles(_figures(table, state)),
        grid(columns, rows, more=len(table.features) - len(names)),
        "" if lengths is None or timed is None else histogram(lengths, len(table), timed),
        said,
    )


def _feature_row(table: FeatureTable, name: str) -> list[str]:
    frames, declared = frames_known(table, name), _declared(table, name)
    dims = shape_of(table, name).strip("()").rstrip(",").removeprefix("frames").strip(", ")
    count = "-" if frames is None or not table.has_frames(name) else f"{frames:,}"
    return [name, count, dims or "-", table.dtype(name), declared["backend"], declared["codec"]]


def _figures(table: FeatureTable, state: str) -> Iterator[tuple[str, str]]:
    selection = table.selection
    of = "" if selection.row_map is None else f" of {len(selection.blocks):,}"
    what = "segments" if selection.cuts is not None else "utterances"
    if selection.plan is not None:
        yield f"{selection.plan.size:,}", "rows an epoch"
        return
    yield f"{len(table):,}{of}", what
    if (hours := hours_known(table)) is not None:
        yield f"{hours:,.2f}", "hours"
    if (nbytes := bytes_known(table)) is not None:
        figure, unit = bytes_text(nbytes).split(" ")
        yield figure, unit
    if state:
        yield state, ""


def cache_line(table: FeatureTable, place: str, state: str) -> str:
    """Return a cache as a line."""
    hours, nbytes = hours_known(table), bytes_known(table)
    size = [counted(len(table), "utterance"), *([f"{hours:,.2f} h"] if hours is not None else [])]
    parts = [", ".join(size), features_line(table)]
    parts += [bytes_text(nbytes)] if nbytes is not None else []
    return f"{place!r}: {'; '.join(filter(None, [*parts, state]))}"


# Plots of a table, with matplotlib: arrays of an utterance, lengths, statistics by dimension.

PLOT_BINS = 64


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
    return pyplot.subplots(figsize=(8, 3), layout="constrained")[1]


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
    width = -(
        -(most - least + 1) // PLOT_BINS
    )  # whole, or bins would hold more lengths than others
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
    return shortened(written_out(text)).replace("$", r"\$")
