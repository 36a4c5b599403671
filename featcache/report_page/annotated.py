"""Annotations of utterances, summed up: hours by speaker, numbers in bins, texts against frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.format.annotation_columns import Column
from featcache.format.columns import Codes, Strings
from featcache.interface import Ints
from featcache.report_page.lengths import Histogram, histogram, nice_edges
from featcache.tables.table import FeatureTable

MOST_GROUPS = 20  # that are named
FEW_VALUES = 1000  # distinct whole numbers; more are quantities
SMALL = 100_000  # texts, of which distinct ones are looked for
BINS = 40
TEXT_BINS = (60, 40)  # of frames and of characters
TEXTS = ("text", "transcript", "transcription", "sentence", "words", "normalized_text")


@dataclass(frozen=True)
class Groups:
    """Utterances and frames by the value of an annotation, the largest first."""

    name: str
    values: list[str]
    utterances: Ints
    frames: Ints
    groups: int  # in all; more than are named
    missing: int  # utterances without a value


@dataclass(frozen=True)
class Quantity:
    """Numbers of an annotation, in bins."""

    name: str
    least: float
    median: float
    most: float
    mean: float
    missing: int
    bins: Histogram


@dataclass(frozen=True)
class TextLengths:
    """Characters of a text against frames."""

    name: str
    characters: Ints  # of each row; -1 without a text
    total: int
    missing: int
    bins: NDArray[np.int64]  # utterances, (characters, frames)
    frame_edges: NDArray[np.float64]
    character_edges: NDArray[np.float64]
    frames_a_character: float  # the median


@dataclass(frozen=True)
class Annotations:
    """All that is told of annotations."""

    groups: list[Groups]
    quantities: list[Quantity]
    texts: list[TextLengths]
    others: dict[str, str]  # kinds of those that are only named
    durations: tuple[str, NDArray[np.float64]] | None  # seconds of each row, NaN without


def annotations_of(table: FeatureTable, frames: Ints | None) -> Annotations:
    """Sum up the annotations of a table; `frames` of each row, None where no feature has any."""
    found = Annotations([], [], [], {}, None)
    weights = np.ones(len(table), np.int64) if frames is None else frames
    for name in table.annotations:
        column = table.annotation(name)
        if name.lower() in ("duration", "duration_s") and column.kind in ("int", "float"):
            seconds = np.asarray(column.to_numpy(), np.float64)
            found = Annotations(
                found.groups, found.quantities, found.texts, found.others, (name, seconds)
            )
        kind = _kind(column, name)
        if kind == "groups":
            found.groups.append(_groups(name, column, weights))
        elif kind == "quantity":
            found.quantities.extend(_quantity(name, column))
        elif kind == "text" and frames is not None:
            found.texts.append(_text(name, column, frames))
        else:
            found.others[name] = column.kind
    return found


def _kind(column: Column, name: str) -> str:
    if column.kind in ("ints", "floats"):
        return "list"
    if column.kind == "str":
        if name.lower() in TEXTS:
            return "text"
        body, _ = column.stored()
        if isinstance(body, Codes):
            return "groups"
        if len(column) <= SMALL and 2 * len(column.codes()[1]) <= len(column) + 1:
            return "groups"
        return "text" if isinstance(body, Strings) and _has_spaces(body) else "many texts"
    if column.kind == "float":
        return "quantity"
    values, _ = column.numbers()
    distinct = int(values.max(initial=0)) - int(values.min(initial=0)) + 1
    return "groups" if column.kind == "bool" or distinct <= FEW_VALUES else "quantity"


def _has_spaces(texts: Strings) -> bool:
    end = int(texts.ends[min(len(texts), 1000)])
    return bool((texts.data[:end] == ord(" ")).any())


def _groups(name: str, column: Column, frames: Ints) -> Groups:
    codes, values = column.codes()
    there = codes >= 0
    kept = codes if there.all() else codes[there]
    weights = frames if there.all() else frames[there]
    utterances = np.bincount(kept, minlength=len(values))
    sums = np.bincount(kept, weights, minlength=len(values)).astype(np.int64)
    order = np.lexsort((-utterances, -sums))
    order = order[utterances[order] > 0]
    first = order[:MOST_GROUPS]
    return Groups(
        name,
        [str(values[code]) for code in first.tolist()],
        utterances[first],
        sums[first],
        len(order),
        int((~there).sum()),
    )


def _quantity(name: str, column: Column) -> Iterator[Quantity]:
    values, missing = column.numbers()
    there = values if missing is None else values[~missing]
    numbers = np.asarray(there, np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return
    least, most = float(finite.min()), float(finite.max())
    edges = nice_edges(least, most, BINS, whole=column.kind == "int")
    bins = histogram(finite, None, edges)
    lost = len(column) - len(finite)
    with np.errstate(all="ignore"):  # of numbers that are as large as they can be
        median, mean = float(np.median(finite)), float((finite / len(finite)).sum())
    yield Quantity(name, least, median, most, mean, lost, bins)


def _text(name: str, column: Column, frames: Ints) -> TextLengths:
    characters = _characters(column)
    there = characters >= 0
    if there.all():
        some, lengths = characters, frames
    else:
        some, lengths = characters[there], frames[there]
    across, up = TEXT_BINS
    frame_edges = nice_edges(0, int(lengths.max(initial=1)), across, whole=True)
    edges = nice_edges(0, int(some.max(initial=1)), up, whole=True)
    # whole numbers and `bincount`: `histogram2d` takes thirty times as long
    columns = len(frame_edges) - 1
    places = (some // _width(edges)) * columns + lengths // _width(frame_edges)
    bins = np.bincount(places, minlength=(len(edges) - 1) * columns).reshape(-1, columns)
    spoken = (some > 0) & (lengths > 0)
    rate = float(np.median(lengths[spoken] / some[spoken])) if spoken.any() else 0.0
    return TextLengths(
        name, characters, int(some.sum()), int((~there).sum()), bins, frame_edges, edges, rate
    )


def _width(edges: NDArray[np.float64]) -> int:
    return max(round(float(edges[1] - edges[0])), 1)


def _characters(column: Column) -> Ints:
    """Return the number of characters of each text, -1 where there is none."""
    body, null = column.stored()
    if isinstance(body, Codes):
        counts = _characters_of(body.texts)[body.codes]
    elif isinstance(body, Strings):
        counts = _characters_of(body)
    else:
        counts = np.array([len(str(value)) for value in column.values()], np.int64)
    if null is not None:
        counts = np.where(null != 0, -1, counts)
    return counts


AT_ONCE = 1 << 16


def _characters_of(texts: Strings) -> Ints:
    counts = np.diff(texts.ends)
    for begin in range(0, len(texts), AT_ONCE):
        ends = texts.ends[begin : begin + AT_ONCE + 1]
        data = texts.data[ends[0] : ends[-1]]
        inner = (data & 0xC0) == 0x80  # all but the first byte of a character
        if inner.any():
            sums = np.append(0, np.cumsum(inner))
            counts[begin : begin + AT_ONCE] -= np.diff(sums[ends - ends[0]])
    return counts
