"""Facts of a cache that its report tells, gathered once: columns are all read, arrays as chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from featcache.errors import CacheError, CorruptCacheError
from featcache.interface import Ints, storage_dtype
from featcache.reading import Generation, open_again
from featcache.report_page.histograms import BATCH, Annotations, LengthCounts, annotations_of
from featcache.report_page.rules import Oddity, odd_dims, oddities
from featcache.report_page.values import (
    Chosen,
    FeatureValues,
    Sample,
    choose,
    read_values,
)
from featcache.store import Cache
from featcache.tables import FeatureTable, Selection

MOST_IDS = 100  # of a finding
MOST_NAMES = 5
BUCKETS = 8
MUCH_PADDING = 0.2
TOLD_AFTER_S = 10  # of reading, a bar


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
