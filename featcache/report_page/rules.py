"""Odd utterances and what to look at first: rules over numbers that were found, each with a limit.

A rule says which rows are odd, by how much, and a sentence on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from featcache.declaration import FEW_FRAMES, FrameTimes
from featcache.interface import Ints
from featcache.report_page.histograms import Annotations
from featcache.report_page.values import FeatureValues, Floats
from featcache.tables import FeatureTable

EQUAL_FRAMES = 3  # in a row
CLIPPED = 0.01  # of the values of an utterance
DEVIATIONS = 6.0  # of means and deviations from those of others
LOG_DEVIATIONS = 4.0  # of logarithms: of frames, and of frames a character
# The limit of n values is higher by FEW / n^2, since few of them tell the median distance badly:
# with it, one of n normal numbers, 5 to 50, is odd in 1 of 10,000 samples (simulated, 40,000 of
# each n), without it in 8 of 100 samples of 5 and 4 of 1,000 samples of 20.
FEW = 1500.0
SAME_LENGTHS = 0.9  # of the utterances, for features without frame_s to go in step
TOKENS_ALIKE = 10  # frames of one token all along
DEAD = 1e-6  # deviation of a dim
LOUD = 10.0  # medians of the deviations of dims
DIM_CLIPPED = 0.1

# what an oddity is called, worst first, and the rule
RULES = {
    "damaged": "its bytes are not what was written, or cannot be read",
    "not finite": "it holds NaN or infinity",
    "empty": "it has no frames",
    "constant": f"all its values are equal; of tokens, from {TOKENS_ALIKE} frames on",
    "equal frames": f"{EQUAL_FRAMES} or more frames in a row are equal, in features of 4 or more "
    "numbers a frame",
    "doubled": "another utterance has the same array (equal checksums)",
    "out of step": f"features, or its duration, end more than {FEW_FRAMES} frames apart",
    "clipped": f"more than {100 * CLIPPED:.0f} % of its values are the least or the largest of "
    "the cache, and more than one, if that is not zero",
    "level": f"its mean is more than {DEVIATIONS:.0f} robust deviations from the median "
    f"(1.4826 times the median distance to it; of n utterances {FEW:,.0f} / n² more)",
    "spread": f"its deviation is more than {DEVIATIONS:.0f} robust deviations from the median, "
    "as above",
    "length": f"the logarithm of its frames is more than {LOG_DEVIATIONS:.0f} robust deviations "
    "from the median, as above",
    "speech rate": "the logarithm of its frames a character is more than "
    f"{LOG_DEVIATIONS:.0f} robust deviations from the median, as above",
}


@dataclass(frozen=True)
class Oddity:
    """Rows that are odd by one rule, in one feature; the worst first."""

    kind: str
    feature: str
    rows: Ints
    amounts: Floats  # in what the rule counts
    says: Callable[[int], str]  # a sentence on the row at a place here
    annotation: str = ""  # with which the feature was compared

    @classmethod
    def of(
        cls,
        kind: str,
        feature: str,
        rows: Ints,
        amounts: Floats,
        says: Callable[[int], str],
        annotation: str = "",
    ) -> Iterator[Oddity]:
        """Yield one, ordered by its amounts, unless there are no rows."""
        if not len(rows):
            return
        order = np.argsort(-amounts, kind="stable")
        places = order.tolist()

        def of_place(place: int) -> str:
            return says(places[place])

        yield cls(kind, feature, rows[order], amounts[order], of_place, annotation)


def robust_deviations(values: Floats) -> Floats:
    """Return how far each value is from the median, in 1.4826 median distances; NaN stays NaN."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.full(len(values), np.nan)
    median = np.median(known)
    spread = 1.4826 * np.median(np.abs(known - median))
    distance = np.abs(values - median)
    return distance / spread if spread else np.zeros(len(values))


def far_away(away: Floats, limit: float) -> Ints:
    """Return the places of robust deviations beyond a limit, which rises where few are known."""
    known = max(int(np.isfinite(away).sum()), 1)
    return np.flatnonzero(away > limit + FEW / known**2)


def oddities(
    table: FeatureTable,
    lengths: Mapping[str, Ints],
    values: Sequence[FeatureValues],
    annotations: Annotations,
) -> list[Oddity]:
    """Return all that is odd in a table, worst rule first."""
    found = [each for one in values for each in _of_values(one)]
    for name, frames in lengths.items():
        found.extend(_of_lengths(name, frames))
    found.extend(_doubled(table, values))
    found.extend(_out_of_step(table, lengths, annotations))
    if lengths:
        name, frames = next(iter(lengths.items()))
        for text in annotations.texts:
            found.extend(_speech_rate(name, frames, text.name, text.characters))
    order = list(RULES)
    return sorted(found, key=lambda each: order.index(each.kind))


def _of_values(found: FeatureValues) -> Iterator[Oddity]:
    u, name = found.utterances, found.name
    rows = np.array(sorted(found.damaged), np.int64)
    ones = np.ones(len(rows))
    yield from Oddity.of("damaged", name, rows, ones, lambda at: found.damaged[int(rows[at])])
    bad = np.flatnonzero(u.not_finite)
    yield from Oddity.of(
        "not finite", name, u.rows[bad], u.not_finite[bad].astype(float),
        lambda at: f"{u.not_finite[bad[at]]:,} of its values are NaN or infinite",
    )  # fmt: skip
    least_frames = TOKENS_ALIKE if found.tokens is not None else 1
    alike = (u.least == u.most) & (u.frames * found.width > 1) & (u.frames >= least_frames)
    same = np.flatnonzero(alike)
    yield from Oddity.of(
        "constant", name, u.rows[same], u.frames[same].astype(float),
        lambda at: f"all its values are {u.least[same[at]]:.4g}",
    )  # fmt: skip
    if found.tokens is None and len(u.rows):
        yield from _of_quantities(found, ~alike)


def _of_quantities(found: FeatureValues, varies: Ints) -> Iterator[Oddity]:
    u, name = found.utterances, found.name
    runs = np.flatnonzero(varies & (u.equal_frames >= EQUAL_FRAMES))
    first, last = u.equal_from, u.equal_from + u.equal_frames - 1
    yield from Oddity.of(
        "equal frames", name, u.rows[runs], u.equal_frames[runs].astype(float),
        lambda at: f"frames {first[runs[at]]:,} to {last[runs[at]]:,} are equal",
    )  # fmt: skip
    if np.isfinite(u.least).any():
        yield from _clipped(found, varies)
    numbers = (("level", "mean", u.mean), ("spread", "deviation", u.std))
    for kind, what, values in numbers:
        kept = np.where(varies, values, np.nan)
        away = robust_deviations(kept)
        far = far_away(away, DEVIATIONS)
        usual = np.nanmedian(kept) if np.isfinite(kept).any() else 0.0

        def says(at: int, what=what, values=values, far=far, away=away, usual=usual) -> str:  # type: ignore[no-untyped-def]
            here = far[at]
            return (
                f"its {what} is {values[here]:.4g}, {away[here]:.1f} robust deviations from "
                f"{usual:.4g}"
            )

        yield from Oddity.of(kind, name, u.rows[far], away[far], says)


def _clipped(found: FeatureValues, varies: Ints) -> Iterator[Oddity]:
    u = found.utterances
    least, most = np.nanmin(u.least), np.nanmax(u.most)
    size = np.maximum(u.frames * found.width, 1)
    # zeros are meant: silence, frames without a pitch, what a rectifier leaves
    low = np.where((u.least == least) & (least != 0), u.at_least, 0) / size
    high = np.where((u.most == most) & (most != 0), u.at_most, 0) / size
    share = np.maximum(low, high)
    # the one largest value of a cache is in some utterance, however short that is
    far = np.flatnonzero(varies & (share > CLIPPED) & (share * size > 1.5))

    def says(at: int) -> str:
        here = far[at]
        end, value = ("least", least) if low[here] >= high[here] else ("largest", most)
        return f"{100 * share[here]:.1f} % of its values are the {end} of the cache, {value:.4g}"

    yield from Oddity.of("clipped", found.name, u.rows[far], share[far], says)


def _of_lengths(name: str, frames: Ints) -> Iterator[Oddity]:
    none = np.flatnonzero(frames == 0)
    yield from Oddity.of("empty", name, none, np.ones(len(none)), lambda at: "it has no frames")
    logs = np.full(len(frames), np.nan)
    logs[frames > 0] = np.log(frames[frames > 0])
    away = robust_deviations(logs)
    far = far_away(away, LOG_DEVIATIONS)
    usual = float(np.median(frames)) if len(frames) else 0.0
    yield from Oddity.of(
        "length", name, far, away[far],
        lambda at: f"it has {frames[far[at]]:,} frames, the median is {usual:,.0f}",
    )  # fmt: skip


def _doubled(table: FeatureTable, values: Sequence[FeatureValues]) -> Iterator[Oddity]:
    """Compare the checksums of the feature that tells most: the first that holds no tokens."""
    feature = next((each.name for each in values if each.tokens is None), None)
    if feature is None:
        return
    opened = table.selection.blocks.generations[0]
    columns = opened.index.features[feature]
    checksums = np.where(columns.rows > 0, columns.checksum, 0)  # 0: not known
    ordered = np.sort(checksums)
    twice = np.unique(ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] > 0)])
    if not len(twice):
        return
    rows = np.flatnonzero(np.isin(checksums, twice))
    rows = rows[np.argsort(checksums[rows], kind="stable")]
    kinds = checksums[rows]
    first = np.searchsorted(kinds, kinds)
    number = np.searchsorted(kinds, kinds, side="right") - first

    def says(at: int) -> str:
        other = rows[first[at] + (1 if first[at] == at else 0)]
        more = f" and {number[at] - 2:,} more" if number[at] > 2 else ""
        return f"the same array as {table.id(int(other))!r}{more}"

    yield from Oddity.of("doubled", feature, rows, number.astype(float), says)


def _out_of_step(
    table: FeatureTable, lengths: Mapping[str, Ints], annotations: Annotations
) -> Iterator[Oddity]:
    """Compare the ends of features in seconds; of those that do not know them, equal lengths."""
    declared = table.selection.blocks.generations[0].manifest.features
    times = {name: FrameTimes.declared(declared[name]) for name in lengths}
    first = next(iter(lengths), None)
    for name, frames in lengths.items():
        mine, other = times[name], times[first or name]
        if name != first and first is not None:
            if mine is not None and other is not None:
                longer = max(mine.frame_s, other.frame_s)
                apart = (mine.ends_s(frames) - other.ends_s(lengths[first])) / longer
            else:
                apart = (frames - lengths[first]).astype(np.float64)
                if np.count_nonzero(np.abs(apart) <= FEW_FRAMES) < SAME_LENGTHS * len(apart):
                    continue
            yield from _apart(name, apart, first)
        if mine is not None and annotations.durations is not None and name == first:
            what, seconds = annotations.durations
            yield from _apart(name, (mine.ends_s(frames) - seconds) / mine.frame_s, what)


def _apart(name: str, frames: Floats, other: str) -> Iterator[Oddity]:
    far = np.flatnonzero(np.abs(frames) > FEW_FRAMES + 1e-6)

    def says(at: int) -> str:
        here = float(frames[far[at]])
        when = "after" if here > 0 else "before"
        return f"it ends {abs(here):,.1f} frames {when} {other}".replace(".0 frames", " frames")

    yield from Oddity.of("out of step", name, far, np.abs(frames[far]), says)


def _speech_rate(feature: str, frames: Ints, text: str, characters: Ints) -> Iterator[Oddity]:
    there = (frames > 0) & (characters > 0)
    rates = np.full(len(frames), np.nan)
    rates[there] = frames[there] / characters[there]
    away = robust_deviations(np.log(rates))
    far = far_away(away, LOG_DEVIATIONS)
    usual = float(np.median(rates[there])) if there.any() else 0.0

    def says(at: int) -> str:
        here = far[at]
        told = f"{characters[here]:,} characters" if characters[here] != 1 else "1 character"
        return (
            f"{rates[here]:.3g} frames a character of {text} ({frames[here]:,} frames, {told}); "
            f"the median is {usual:.3g}"
        )

    yield from Oddity.of("speech rate", feature, far, away[far], says, text)


# Dims of a feature that say nothing, or too much.


def odd_dims(found: FeatureValues) -> list[tuple[int, str]]:
    """Return the numbers of odd dims of a feature, each with what is wrong."""
    if found.stats is None or not found.stats.count:
        return []
    mean, std = found.stats.mean.reshape(-1), found.stats.std.reshape(-1)
    usual = float(np.median(std)) if len(std) else 0.0
    clipped = found.dim_clipped
    said = []
    for dim in np.flatnonzero(~(std >= DEAD)).tolist():
        said.append((dim, f"dead: its deviation is {std[dim]:.2g}, it is always {mean[dim]:.4g}"))
    for dim in np.flatnonzero(std > LOUD * usual).tolist() if usual > 0 else []:
        said.append((dim, f"loud: its deviation is {std[dim]:.4g}, {std[dim] / usual:.0f} medians"))
    for dim in np.flatnonzero((clipped > DIM_CLIPPED) & (std >= DEAD)).tolist():
        said.append(
            (
                dim,
                f"clipped: {100 * clipped[dim]:.0f} % of {len(found.frames):,} frames are at its "
                "least or its most",
            )
        )
    return said
