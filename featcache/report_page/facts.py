"""Facts of a cache that its report tells, gathered once, and which utterances are odd.

What to look at first, and which utterances are odd, by how much: rules over these facts, each with
a limit and a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from featcache.declaration import FEW_FRAMES, FrameTimes
from featcache.errors import CacheError, CorruptCacheError
from featcache.interface import Ints, storage_dtype
from featcache.reading import Generation, open_again
from featcache.report_page.histograms import BATCH, Annotations, LengthCounts, annotations_of
from featcache.report_page.values import (
    Chosen,
    FeatureValues,
    Floats,
    Sample,
    choose,
    read_values,
)
from featcache.store import Cache
from featcache.tables import FeatureTable, Selection

# Rules: which rows are odd, by how much, and a sentence on each.

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


MOST_IDS = 100  # of a finding
MOST_NAMES = 5
BUCKETS = 8
MUCH_PADDING = 0.2
TOLD_AFTER_S = 10  # of reading, a bar


# Facts of a cache.


@dataclass(frozen=True)
class Finding:
    """Something to look at first.

    Attributes:
        kind: "doubled", "equal frames", "padding", ...; the same in all versions.
        count: utterances, dims or per cent of padding.
        ids: some of the utterances, the worst first; empty where it is not about utterances.
        text: a sentence.
        level: "fault", "look" or "fine".
        section: of the page, where more is said.
        cache: path of the cache.
    """

    kind: str
    count: int
    ids: tuple[str, ...]
    text: str
    level: str
    section: str
    cache: str = ""


@dataclass(frozen=True)
class FeatureFacts:
    """Declaration and sizes of a feature."""

    name: str
    dtype: str
    dims: tuple[int, ...] | None  # None: no array told yet
    has_frames: bool
    backend: str
    codec: str
    frame_s: float | None
    frames: int  # utterances where there is no time axis
    stored: int  # bytes of all arrays as they are stored
    raw: int  # bytes of all arrays without a codec

    @property
    def shape(self) -> str:
        """The shape of its arrays in words."""
        if self.dims is None:
            return "unknown"
        axes = ["frames"] * self.has_frames + [f"{size:,}" for size in self.dims]
        return f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"


@dataclass(frozen=True)
class CacheFacts:
    """All facts of a cache, of one generation."""

    path: str
    made_from: Mapping[str, object]  # as `featcache.inspect.made_from` returns it
    table: FeatureTable
    features: list[FeatureFacts]
    lengths: dict[str, LengthCounts]
    hours: float | None
    hours_of: str  # what says how long a frame is
    chosen: Chosen
    checked: bool  # whether what was read was compared with its checksums
    values: list[FeatureValues]
    annotations: Annotations
    oddities: list[Oddity]
    files: int  # bytes of all container files
    containers: int
    parts: int

    @property
    def opened(self) -> Generation:
        """Manifest and columns."""
        return self.table.selection.blocks.generations[0]

    @property
    def main(self) -> str | None:
        """The feature by whose frames utterances are counted and cut: the first that has some."""
        return next(iter(self.lengths), None)

    @property
    def odd_rows(self) -> Ints:
        """The rows of all odd utterances, ascending."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *(o.rows for o in self.oddities)]))


def facts_of(
    cache: Cache, made_from: Mapping[str, object], sample: Sample, seed: int
) -> CacheFacts:
    """Gather all facts of a cache: read its columns, and arrays of all utterances or a sample."""
    opened, checked = _checking(cache.opened)
    table = FeatureTable(Selection.of(opened))
    features = sorted((_feature(opened, name) for name in opened.features), key=_rank)
    columns = {each.name: table.lengths(each.name) for each in features if each.has_frames}
    main = next(iter(columns.values()), None)
    chosen = choose(table, main, sum(each.raw for each in features), sample, seed)
    total = sum(_raw(opened, each, chosen.rows) for each in features)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="reading", delay=TOLD_AFTER_S, disable=None
    ) as bar:
        values = [read_values(opened, each.name, chosen, bar.update) for each in features]
    annotations = annotations_of(table, main)
    hours, hours_of = _hours(features, annotations)
    sets = list(opened.sets.values()) or [opened]
    return CacheFacts(
        path=opened.place,
        made_from=made_from,
        table=table,
        features=features,
        lengths={name: LengthCounts.of(each) for name, each in columns.items()},
        hours=hours,
        hours_of=hours_of,
        chosen=chosen,
        checked=checked,
        values=values,
        annotations=annotations,
        oddities=oddities(table, columns, values, annotations),
        files=sum(int(each.index.containers.sizes.sum()) for each in sets),
        containers=sum(len(each.index.containers) for each in sets),
        parts=sum(len(each.manifest.parts) for each in sets),
    )


def _checking(opened: Generation) -> tuple[Generation, bool]:
    """Open the same generation so that what is read is compared with its checksums."""
    try:
        return open_again(opened, check_reads=True), True
    except CorruptCacheError:
        raise
    except CacheError:  # adopted, and its bytes were not read yet
        return opened, False


def _feature(opened: Generation, name: str) -> FeatureFacts:
    declared, columns = opened.manifest.features[name], opened.index.features[name]
    known = opened.manifest.dims.get(name, declared.get("dims"))
    dims = None if known is None else tuple(known)
    frames = int(columns.rows.sum())
    raw = frames * storage_dtype(declared["dtype"]).itemsize * math.prod(dims or ())
    return FeatureFacts(
        name,
        declared["dtype"],
        dims,
        declared["time_axis"] is not None,
        declared["backend"],
        declared["codec"],
        declared.get("frame_s"),
        frames,
        int(columns.nbytes.sum()),
        raw,
    )


def _rank(feature: FeatureFacts) -> tuple[bool, bool]:
    """Return what features are ordered by: those with frames first, and tokens behind others."""
    return not feature.has_frames, "float" not in feature.dtype


def _raw(opened: Generation, feature: FeatureFacts, rows: Ints) -> int:
    frames = int(opened.index.features[feature.name].rows[rows].sum())
    return frames * storage_dtype(feature.dtype).itemsize * math.prod(feature.dims or ())


def _hours(features: Iterable[FeatureFacts], annotations: Annotations) -> tuple[float | None, str]:
    for each in features:
        if each.has_frames and each.frame_s is not None:
            return each.frames * each.frame_s / 3600, f"{each.name}, {each.frame_s:g} s a frame"
    if annotations.durations is not None:
        name, seconds = annotations.durations
        return float(np.nansum(seconds)) / 3600, f"annotation {name!r}"
    return None, ""


# What to look at first: worst first, and at the end what is fine.


def findings(facts: CacheFacts) -> list[Finding]:
    """Return what a person should look at first in a cache."""
    found = [*_of_state(facts), *_of_utterances(facts), *_of_dims(facts), *_of_padding(facts)]
    order = ["fault", "look", "fine"]
    named = (replace(each, cache=facts.path) for each in found)
    return sorted(named, key=lambda each: order.index(each.level))


def _of_state(facts: CacheFacts) -> Iterator[Finding]:
    manifest, failed = facts.opened.manifest, list(facts.opened.failed)
    expected = manifest.expected
    if not len(facts.table):
        yield Finding("no utterances", 0, (), "it holds no utterances", "fault", "origin")
    if not manifest.complete:
        of = "" if expected is None else f" of {expected.count:,}"
        text = f"incomplete: {len(facts.table):,}{of} utterances are there"
        yield Finding("incomplete", len(facts.table), (), text, "fault", "origin")
    if failed:
        text = f"{_count(len(failed))} could not be computed"
        yield Finding("failed", len(failed), tuple(failed[:MOST_IDS]), text, "fault", "origin")


_TEXTS = {
    "damaged": ("fault", "{} damaged"),
    "not finite": ("fault", "{} with NaN or infinity"),
    "empty": ("fault", "{} without a frame"),
    "constant": ("fault", "{} constant"),
    "equal frames": ("look", "{} with equal frames in a row"),
    "doubled": ("look", "{} with the same array as another one"),
    "out of step": ("look", "{} with features that end apart"),
    "clipped": ("look", "{} clipped"),
    "level": ("look", "{} of another level than the rest"),
    "spread": ("look", "{} of another spread than the rest"),
    "length": ("look", "{} much shorter or longer than the rest"),
    "speech rate": ("look", "{} with a text that fits its length badly"),
}


# what is known of utterances alone whose arrays were read
READ = {"damaged", "not finite", "constant", "equal frames", "clipped", "level", "spread"}


def _of_utterances(facts: CacheFacts) -> Iterator[Finding]:
    for kind, (level, text) in _TEXTS.items():
        mine = [each for each in facts.oddities if each.kind == kind]
        rows: list[int] = []
        for each in mine:
            rows.extend(row for row in each.rows[:MOST_IDS].tolist() if row not in rows)
        if mine:
            count = len(np.unique(np.concatenate([each.rows for each in mine])))
            ids = tuple(facts.table.id(row) for row in rows[:MOST_IDS])
            names = list(dict.fromkeys(each.feature for each in mine))
            of = ", ".join(names[:MOST_NAMES]) + ", ..." * (len(names) > MOST_NAMES)
            said = f"{text.format(_count(count))} ({of}){_among(facts) if kind in READ else ''}"
            yield Finding(kind, count, ids, said, level, "odd")
    if not facts.oddities and len(facts.table):
        said = f"no utterance is odd{_among(facts)}"
        yield Finding("no odd utterance", 0, (), said, "fine", "odd")


def _of_dims(facts: CacheFacts) -> Iterator[Finding]:
    counted = [each for each in facts.values if each.stats is not None and each.stats.count]
    for each in counted:
        among = "" if each.stats_are_whole else _among(facts)
        for kind, level in (("dead", "fault"), ("loud", "look"), ("clipped", "look")):
            dims = [dim for dim, said in odd_dims(each) if said.startswith(kind)]
            if dims:
                some = ", ".join(map(str, dims[:MOST_NAMES])) + ", ..." * (len(dims) > MOST_NAMES)
                what = f"{len(dims)} {kind} dimension{'s' * (len(dims) > 1)} of {each.name}: {some}"
                yield Finding(f"{kind} dims", len(dims), (), what + among, level, "values")
    if counted and not any(map(odd_dims, counted)):
        yield Finding("no odd dims", 0, (), "no dead, loud or clipped dimension", "fine", "values")


def _of_padding(facts: CacheFacts) -> Iterator[Finding]:
    if facts.main is None or not len(facts.table):
        return
    counts = facts.lengths[facts.main]
    random, bucketed = counts.padding(1), counts.padding(BUCKETS)
    text = (
        f"padding {100 * random:.0f} % in random batches of {BATCH}, {100 * bucketed:.0f} % with "
        f"{BUCKETS} buckets"
    )
    level = "look" if random > MUCH_PADDING else "fine"
    yield Finding("padding", round(100 * random), (), text, level, "lengths")


def _among(facts: CacheFacts) -> str:
    """Return what is said beside a number of a sample."""
    chosen = facts.chosen
    return "" if chosen.is_all else f", among {len(chosen.rows):,} that were read"


def _count(number: int) -> str:
    return f"{number:,} utterance{'s' * (number != 1)}"


def differences_of(facts: Sequence[CacheFacts]) -> dict[str, int]:
    """Return how many ids two caches have in common, and each has alone."""
    first, second = (each.table for each in facts)
    found = first.find(list(second.ids)) if len(second) else np.empty(0, np.int64)
    both = int((found >= 0).sum())
    return {"both": both, "first": len(first) - both, "second": len(second) - both}
