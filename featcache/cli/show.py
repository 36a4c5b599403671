"""The verb `show`: single utterances as numbers and as a picture of characters."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from featcache.cli.output import has_unicode, hint, plain, print_json, room, say, shown, value_text
from featcache.cli.verb import CACHE, JSON, opened, verb

if TYPE_CHECKING:
    from featcache.store import Cache

_SHADES = " ░▒▓█"
_ASCII_SHADES = " .:*#"
_WORDS = {"mean": "mean", "std": "deviation", "min": "least", "max": "most"}
_HEIGHT = 10  # lines of a picture
_NAMED = 5  # runs of equal frames
_SHOWN = 64  # values of a sequence


@verb
@CACHE
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--feature", metavar="FEATURE", multiple=True, help="Only these features.")
@click.option("--frames", metavar="START:STOP", help="Only these frames.")
@click.option(
    "-o",
    "output",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write an array (.npy), or its picture (.png).",
)
@JSON
def show(
    cache: str, ids: tuple[str, ...], feature: tuple[str, ...], frames: str | None,
    output: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show single utterances: shapes, values, a picture, annotations."""
    whole = opened(cache)
    start, stop = _frames(frames)
    features = feature or tuple(whole.features)
    if output is not None and (len(ids), len(features)) != (1, 1):
        raise click.UsageError(f"-o writes one array: one ID, --feature {' or '.join(features)}")
    if output is not None and Path(output).suffix not in (".npy", ".png"):
        raise click.UsageError(f"-o writes .npy or .png, not {output!r}")
    whole.rows(ids)  # all ids are there, before anything is printed
    for id in ids:
        arrays = {name: _read(whole, id, name, start, stop) for name in features}
        told = {name: _described(array) for name, array in arrays.items()}
        row = int(whole.rows([id])[0])
        notes = {name: whole.annotation(name)[row] for name in whole.annotations}
        if as_json:
            print_json("show", {"id": id, "features": told, "annotations": plain(notes)})
        else:
            _print(id, arrays, told, notes)
        if output is not None:
            _write(Path(output), arrays[features[0]])


def _write(file: Path, array: NDArray[Any]) -> None:
    """Write an array as .npy, or its picture as .png."""
    if file.suffix == ".npy":
        np.save(file, array)
        return
    from featcache.report_page.charts import picture

    frames = array.reshape(len(array), -1).astype(np.float64)
    finite = frames[np.isfinite(frames)]
    low, high = np.percentile(finite, (1, 99)) if finite.size else (0.0, 1.0)
    url, _, _ = picture(frames, float(low), float(high))
    file.write_bytes(base64.b64decode(url.partition(",")[2]))


def _frames(text: str | None) -> tuple[int, int | None] | tuple[None, None]:
    if text is None:
        return None, None
    start, colon, stop = text.partition(":")
    if not colon or not all(each.isdecimal() or not each for each in (start, stop)):
        raise click.UsageError(f"--frames takes START:STOP, such as 0:200, not {text!r}")
    return int(start or 0), int(stop) if stop else None


def _read(cache: Cache, id: str, feature: str, start: int | None, stop: int | None) -> NDArray[Any]:
    if start is None or not cache.has_frames(feature):
        return cache.read(id, feature)
    return cache.read(id, feature, start, stop)


def _described(array: NDArray[Any]) -> dict[str, Any]:
    """Return what is true of the values of an array; None stands for what it has not."""
    with np.errstate(all="ignore"):
        values = array.astype(np.float64).ravel()
        finite = values[np.isfinite(values)]
        numbers = (finite.mean(), finite.std(), finite.min(), finite.max()) if finite.size else ()
    known = dict(zip(("mean", "std", "min", "max"), map(float, numbers), strict=False))
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        **{name: known.get(name) for name in ("mean", "std", "min", "max")},
        "not_finite": int(values.size - finite.size),
        "constant_frames": _equal_runs(array) if array.ndim > 1 else None,
    }


def _equal_runs(array: NDArray[Any]) -> list[list[int]]:
    """Return runs of three and more equal frames: the first one, and the one behind the last.

    >>> _equal_runs(np.array([[1], [2], [2], [2], [3]])), _equal_runs(np.zeros((2, 4)))
    ([[1, 4]], [])
    """
    frames = array.reshape(len(array), -1)
    same = np.zeros(len(frames) + 1, np.int8)
    same[1:-1] = (frames[1:] == frames[:-1]).all(axis=1)
    bounds = np.flatnonzero(np.diff(same, append=0))
    runs = zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True)
    return [[first, last + 1] for first, last in runs if last + 1 - first >= 3]


def _print(
    id: str,
    arrays: Mapping[str, NDArray[Any]],
    told: Mapping[str, Mapping[str, Any]],
    notes: Mapping[str, object],
) -> None:
    say(shown(id), fg="cyan", bold=True)
    for name, value in notes.items():
        say(shown(f"  {name}: {'-' if value is None else value}"))
    for name, each in told.items():
        line = f"  {name} {tuple(each['shape'])} {each['dtype']}"
        for word, key in (
            ("mean", "mean"),
            ("deviation", "std"),
            ("least", "min"),
            ("most", "max"),
        ):
            line += f"   {word} {value_text(each[key])}"
        warning = _warning(each)
        say(shown(line) + (click.style(warning, fg="yellow") if warning else ""))
        array = arrays[name]
        if array.size and array.ndim > 1:
            _print_picture(array)
        elif array.size:
            values = " ".join(map(str, array.ravel()[:_SHOWN].tolist()))
            say(f"    {values}{' ...' * (array.size > _SHOWN)}")


def _warning(told: Mapping[str, Any]) -> str:
    runs = told["constant_frames"] or []
    words = [f"{told['not_finite']:,} values are not finite"] if told["not_finite"] else []
    if runs:
        named = ", ".join(f"{first}-{behind - 1}" for first, behind in runs[:_NAMED])
        words.append(f"equal frames {named}{', ...' * (len(runs) > _NAMED)}")
    return "".join(f"   {each}" for each in words)


def _print_picture(array: NDArray[Any]) -> None:
    """Print the values of frames, from left to right, in five shades; high dims are above."""
    space = (room() or 80) - 12
    frames = array.reshape(len(array), -1).astype(np.float64)
    picture = _means(_means(frames, max(space, 10)).T, _HEIGHT)[::-1]
    finite = np.isfinite(picture)
    least = picture[finite].min(initial=np.inf)
    most = picture[finite].max(initial=-np.inf)
    if not least < most:
        return
    scaled = (np.where(finite, picture, least) - least) / (most - least)
    levels = np.minimum((scaled * len(_SHADES)).astype(int), len(_SHADES) - 1)
    shades = _SHADES if has_unicode() else _ASCII_SHADES
    for number, row in enumerate(levels):
        side = "high" if number == 0 else "low" if number == len(levels) - 1 else ""
        say(f"{side:>8}  {''.join(shades[level] for level in row)}".rstrip())
    if len(frames) > space:
        hint(f"          {len(frames):,} frames in {picture.shape[1]} columns of their means")


def _means(rows: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Return at most so many rows, each the mean of several."""
    if len(rows) <= most:
        return rows
    starts = np.arange(most) * len(rows) // most
    with np.errstate(all="ignore"):
        sums = np.add.reduceat(rows, starts, axis=0)
    means: NDArray[np.float64] = sums / np.diff(starts, append=len(rows))[:, None]
    return means
