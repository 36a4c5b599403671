"""Sections on distributions: lengths and padding, values and tokens, annotations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from featcache.interface import Ints
from featcache.report_page.charts import (
    BARS,
    IN_FULL,
    Axis,
    Child,
    Html,
    Mark,
    View,
    as_table,
    band,
    bar_in_cell,
    bars,
    curve,
    element,
    facts_list,
    field_of_bins,
    hours_text,
    joined,
    json_block,
    number,
    percent,
    percent_text,
    python,
    short,
    table,
)
from featcache.report_page.facts import BUCKETS, odd_dims
from featcache.report_page.histograms import (
    BATCH,
    LENGTH_BINS,
    Groups,
    Histogram,
    LengthCounts,
    Quantity,
    TextLengths,
    histogram,
    nice_edges,
)
from featcache.report_page.histograms import BUCKETS as BUCKET_NUMBERS
from featcache.report_page.values import FeatureValues, Floats

MOST_POINTS = 256  # of a line over dims
MOST_TOKENS = 30
MOST_DIMS = 120  # odd ones that are named
FAR_TEXTS = 20

# Lengths.


def lengths(view: View) -> Html:
    """Return histograms of lengths, padding, and the choice of a cut."""
    facts = view.facts
    if not facts.lengths:
        return element("p", "No feature has frames: each utterance is one array of a fixed shape.")
    parts: list[Html] = []
    alike: dict[bytes, list[str]] = {}
    for name, counts in facts.lengths.items():
        if not counts.utterances:
            parts.append(element("p", f"{name}: there are no utterances, so there are no lengths."))
            continue
        alike.setdefault(counts.lengths.tobytes() + counts.counts.tobytes(), []).append(name)
    groups = list(alike.values())
    for first, *others in groups[:IN_FULL]:
        parts.append(_lengths_of(view, first, facts.lengths[first]))
        if others:
            names = ", ".join(others[:10]) + f" and {len(others) - 10:,} more" * (len(others) > 10)
            parts.append(element("p", f"{names}: as many frames as {first}, length for length."))
    if left := [name for names in groups[IN_FULL:] for name in names]:
        heads = ["feature", "shortest", "median", "longest", "mean"]
        rows = (_length_row(view, name, facts.lengths[name]) for name in left)
        parts.append(_others(f"Lengths of {len(left):,} other features", heads, rows))
    return joined(*parts)


def _others(title: str, heads: list[str], rows: Iterator[list[Child]]) -> Html:
    """Return features that are not shown in full, one row each."""
    inner = table(heads, rows, label=title, sorts=True)
    return element("div", element("h3", title), element("div", inner, class_="high"))


def _length_row(view: View, name: str, counts: LengthCounts) -> list[Child]:
    row: list[Child] = [element("code", name)]
    for what in ("shortest", "median", "longest"):
        row.append(number(counts.quantile(SHARES[what]), view.named(f"{name} {what}")))
    return [*row, number(counts.frames / counts.utterances, view.named(f"{name} mean"))]


def _lengths_of(view: View, name: str, counts: LengthCounts) -> Html:
    frame_s = next(each.frame_s for each in view.facts.features if each.name == name)
    edges = view.scales.length_edges[name]
    binned = histogram(counts.lengths, counts.counts, edges)
    beyond = counts.utterances - int(binned.counts.sum())
    low, high, rare = (counts.quantile(share) for share in (0.1, 0.9, 0.99))
    said = f"Eight of ten utterances have {low:,} to {high:,} frames of {name}; " + (
        f"one in a hundred has more than {rare:,}."
        if rare < counts.lengths[-1]
        else f"the longest has {rare:,}."
    )
    if len(counts.lengths) == 1:
        said = f"Each has {rare:,} frames of {name}."
    more = ""
    if beyond:
        are = "is" if beyond == 1 else "are"
        more = f" The chart ends before the longest: {beyond:,} {are} beyond it."
    unit = "frames" if frame_s is None else f"frames of {frame_s:g} s"
    x = Axis(float(edges[0]), float(edges[-1]), unit, whole=True)
    y = Axis(0, view.scales.tallest[name] * 1.05 or 1, "utterances", whole=True)
    borders = counts.borders(BUCKETS)
    marks = [Mark(each, f"bucket up to {each:,} frames") for each in borders if each < edges[-1]]
    rows = _bins(binned, view.named(name), whole=True)
    chart = bars(f"Lengths of {name}", said + more, edges, binned.counts, (x, y), marks)
    return element(
        "div",
        element("h3", f"Lengths of {name}"),
        element("p", said, more, f" Dashed: borders of {BUCKETS} buckets of as many frames each."),
        chart,
        as_table("utterances by frames", table(["frames", "utterances"], rows, label="lengths")),
        element(
            "div",
            _quantiles(view, name, counts, frame_s),
            _paddings(view, name, counts),
            class_="side",
        ),
        _cut(view, name, counts),
        python(f"cache.lengths({name!r})"),
    )


def _bins(binned: Histogram, name: str, *, whole: bool = False) -> Iterator[tuple[Child, Child]]:
    """Yield the rows of a table of bins; whole numbers end one before the next bin."""
    for left, right, count in zip(binned.edges[:-1], binned.edges[1:], binned.counts, strict=True):
        end = right - 1 if whole else right
        yield f"{short(left)} to {short(end)}", number(int(count), f"{name} bin {short(left)}")


SHARES = {"shortest": 0.0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99,
          "longest": 1.0}  # fmt: skip


def _quantiles(view: View, name: str, counts: LengthCounts, frame_s: float | None) -> Html:
    rows: list[list[Child]] = []
    for what, share in SHARES.items():
        length = counts.quantile(share)
        row: list[Child] = [what, number(length, view.named(f"{name} {what}"))]
        rows.append(row if frame_s is None else [*row, f"{length * frame_s:.2f} s"])
    mean = counts.frames / counts.utterances
    last: list[Child] = ["mean", number(mean, view.named(f"{name} mean"))]
    rows.append(last if frame_s is None else [*last, f"{mean * frame_s:.2f} s"])
    heads = ["of all", "frames", "seconds"][: 2 if frame_s is None else 3]
    return table(heads, rows, label=f"lengths of {name}")


def _paddings(view: View, name: str, counts: LengthCounts) -> Html:
    rows = []
    for buckets in BUCKET_NUMBERS:
        borders = counts.borders(buckets)
        share = counts.padding(buckets)
        rows.append(
            [
                "none" if buckets == 1 else f"{buckets}",
                percent(share, view.named(f"{name} padding {buckets}")),
                bar_in_cell(share),
                ", ".join(map(short, borders)) if 1 < buckets <= 8 else "",
            ]
        )
    heads = ["buckets", "padding", BARS, "longest of each"]
    return element(
        "div",
        table(heads, rows, label=f"padding of {name}"),
        element("p", f"Expected in batches of {BATCH} utterances at random within a bucket.",
                class_="note"),
    )  # fmt: skip


def _cut(view: View, name: str, counts: LengthCounts) -> Html:
    """Return the controls that need the script, and the counts that they answer from."""
    longest, utterances, frames = counts.binned(4096)
    data = {"longest": longest.tolist(), "utterances": utterances.tolist(),
            "frames": frames.tolist(), "batch": BATCH, "feature": name}  # fmt: skip
    least, most = int(counts.lengths[0]), int(counts.lengths[-1])
    own = view.anchor(f"cut-{name}")
    steps = "" if len(longest) == len(counts.lengths) else (
        f" (cuts are exact at {len(longest):,} lengths)"
    )  # fmt: skip
    return element(
        "form",
        element("label", "cut below ", element("input", type="number", name="least", min=0,
                value=least, step=1), class_="inline"),
        element("label", " and above ", element("input", type="number", name="most", min=0,
                value=most, step=1), " frames", class_="inline"),
        element("label", " buckets ", element("input", type="range", name="buckets", min=1, max=32,
                value=BUCKETS), element("span", str(BUCKETS), class_="buckets"), class_="inline"),
        element("output", steps.strip(), aria_live="polite"),
        python(f"cache.filter({_keyword(name, f'({least}, {most})')})"),
        json_block(data, own),
        class_="cut script",
        data_counts=own,
    )  # fmt: skip


def _keyword(name: str, value: str) -> str:
    return f"{name}={value}" if name.isidentifier() else f"**{{{name!r}: {value}}}"


# Values.


def values(view: View) -> Html:
    """Return charts of values by dim, and of tokens; of many features, one row each."""
    found = view.facts.values
    full = found if len(found) <= IN_FULL else _to_show(found)
    parts = [_values_of(view, each) for each in full]
    if left := [each for each in found if not any(each is one for one in full)]:
        heads = ["feature", "mean", "deviation", "least", "largest", "not finite", "odd dims"]
        rows = (_value_row(view, each) for each in left)
        parts += [_others(f"Values of {len(left):,} other features", heads, rows)]
        parts += [view.sampled()]
    return joined(*parts)


def _to_show(found: Sequence[FeatureValues]) -> list[FeatureValues]:
    """Return features to show in full: those with odd dims before others."""
    order = sorted(found, key=lambda each: not odd_dims(each))[:IN_FULL]
    return [each for each in found if any(each is one for one in order)]


def _value_row(view: View, found: FeatureValues) -> list[Child]:
    u, name = found.utterances, found.name
    ends: list[Child] = ["-", "-"]
    if np.isfinite(u.least).any():
        values = float(np.nanmin(u.least)), float(np.nanmax(u.most))
        ends = [number(value, view.named(f"{name} {what}"))
                for value, what in zip(values, ("least", "largest"), strict=True)]  # fmt: skip
    flat = np.asarray(found.frames, np.float64)
    middle: list[Child] = ["-", "-"]
    if flat.size:
        middle = [number(float(flat.mean())), number(float(flat.std()))]
    bad = number(int(u.not_finite.sum()), view.named(f"{name} not finite"))
    return [element("code", name), *middle, *ends, bad, number(len(odd_dims(found)))]


def _values_of(view: View, found: FeatureValues) -> Html:
    if not len(found.utterances.rows):
        text = "nothing was read of it" if found.damaged else "there are no values"
        return element("div", element("h3", found.name), element("p", f"{found.name}: {text}."))
    if found.tokens is not None:
        return _tokens(view, found)
    return _quantities(view, found)


def _quantities(view: View, found: FeatureValues) -> Html:
    odd = odd_dims(found)
    u, stats = found.utterances, found.stats
    bad = int(u.not_finite.sum())
    pairs: list[tuple[str, Child]] = []
    numbers: list[tuple[str, float]] = [("not finite", bad)]
    if np.isfinite(u.least).any():
        ends = float(np.nanmin(u.least)), float(np.nanmax(u.most))
        numbers = [("least", ends[0]), ("largest", ends[1]), *numbers]
    pairs += [
        (what, [number(value, view.named(f"{found.name} {what}")), view.sampled()])
        for what, value in numbers
    ]
    low, high = found.scale
    pairs.append(
        ("colours of pictures",
         [f"from {short(low)} to {short(high)}: the 1st and 99th percentile of "
          f"{len(found.frames):,} frames"])
    )  # fmt: skip
    parts: list[Html] = [element("h3", f"Values of {found.name}")]
    if stats is not None and stats.count:
        parts += _band(view, found)
    parts.append(facts_list(pairs))
    if odd:
        rows = ((number(dim), said) for dim, said in odd[:MOST_DIMS])
        parts.append(table(["dim", "what is odd"], rows, label=f"odd dims of {found.name}"))
    elif stats is not None and found.width > 1:
        parts.append(element("p", "No dimension is dead, loud or clipped."))
    parts.append(python(f"cache.stats({found.name!r})"))
    return element("div", *parts)


def _band(view: View, found: FeatureValues) -> list[Html]:
    stats = found.stats
    assert stats is not None
    mean, std = stats.mean.reshape(-1), stats.std.reshape(-1)
    feature = next(each for each in view.facts.features if each.name == found.name)
    unit = "frames" if feature.has_frames else "arrays"
    of: Child = [f"over all {stats.count:,} {unit}"]
    if not found.stats_are_whole:
        of = [f"over {stats.count:,} finite {unit}", view.sampled()]
    if len(mean) == 1:
        text = [
            "mean ", number(float(mean[0]), view.named(f"{found.name} mean 0")), ", deviation ",
            number(float(std[0]), view.named(f"{found.name} deviation 0")), ", ", *of,
        ]  # fmt: skip
        return [element("p", text), _value_histogram(view, found)]
    at, low, middle, high, each = _points(mean, std)
    top = view.scales.values[found.name]
    margin = 0.03 * (top[1] - top[0]) or 1.0
    x = Axis(0, len(mean) - 1, "dim" if each == 1 else f"dim, {each} a point")
    y = Axis(top[0] - margin, top[1] + margin, "value")
    said = (
        f"means from {short(float(np.nanmin(mean)))} to {short(float(np.nanmax(mean)))}, "
        f"deviations from {short(float(np.nanmin(std)))} to {short(float(np.nanmax(std)))}"
    )
    rows = (
        (number(dim), number(float(mean[dim]), view.named(f"{found.name} mean {dim}")),
         number(float(std[dim]), view.named(f"{found.name} deviation {dim}")))
        for dim in range(min(len(mean), 1024))
    )  # fmt: skip
    chart = band(
        f"Mean and deviation of {found.name} by dim", said, at, (low, middle, high), (x, y)
    )
    line = element("p", "Line: the mean of each dim; band: one deviation below and above it; ", of,
                   f". {said[0].upper()}{said[1:]}.")  # fmt: skip
    inner = table(["dim", "mean", "deviation"], rows, label=f"dims of {found.name}")
    return [line, chart, as_table("mean and deviation by dim", inner)]


def _points(mean: Floats, std: Floats) -> tuple[Ints, Floats, Floats, Floats, int]:
    """Return dims, lower end, line and upper end, so many dims a point that they are few."""
    each = -(-len(mean) // MOST_POINTS)
    starts = np.arange(0, len(mean), each)
    counts = np.diff(np.append(starts, len(mean)))
    low, high = np.minimum.reduceat(mean - std, starts), np.maximum.reduceat(mean + std, starts)
    return starts, low, np.add.reduceat(mean, starts) / counts, high, each


def _value_histogram(view: View, found: FeatureValues) -> Html:
    """Return the histogram of a feature of one number a frame."""
    flat = np.asarray(found.frames, np.float64).reshape(-1)
    edges = nice_edges(float(flat.min()), float(flat.max()), LENGTH_BINS, whole=False)
    binned = histogram(flat, None, edges)
    x = Axis(float(edges[0]), float(edges[-1]), "value")
    y = Axis(0, binned.tallest * 1.05 or 1, "frames")
    said = f"{len(flat):,} frames, from {short(float(flat.min()))} to {short(float(flat.max()))}"
    rows = _bins(binned, view.named(f"{found.name} value"))
    return joined(
        bars(f"Values of {found.name}", said, edges, binned.counts, (x, y)),
        element("p", f"{said}, evenly spread over the utterances that were read.", class_="note"),
        as_table("frames by value", table(["value", "frames"], rows, label="values")),
    )


def _tokens(view: View, found: FeatureValues) -> Html:
    tokens = found.tokens
    assert tokens is not None
    name, (order, counts) = found.name, tokens.most_frequent()
    total = max(tokens.total, 1)
    covered = np.cumsum(counts) / total
    half, most = (int(np.searchsorted(covered, share)) + 1 for share in (0.5, 0.9))
    said = f"{half:,} of {len(order):,} tokens make half of all, {most:,} make nine tenths"
    shown = list(zip(order[:MOST_TOKENS].tolist(), counts[:MOST_TOKENS].tolist(), strict=True))
    left = max(len(order) - MOST_TOKENS, 0)
    first = ", ".join(f"{token} ({percent_text(count / total)})" for token, count in shown[:5])
    pairs: list[tuple[str, Child]] = [
        ("used", [number(len(order), view.named(f"{name} used")), view.sampled()]),
        ("never used",
         [number(tokens.unused, view.named(f"{name} unused")), f" of 0 to {int(order.max()):,}",
          view.sampled()]),
        ("tokens read", number(tokens.total, view.named(f"{name} tokens"))),
        ("most frequent", f"{first}{', ...' * (len(order) > 5)}"),
    ]  # fmt: skip
    rows = (
        (number(token), number(count, view.named(f"{name} token {token}")),
         percent(count / total, view.named(f"{name} share {token}")),
         bar_in_cell(count / counts[0]))
        for token, count in shown
    )  # fmt: skip
    charts = _token_charts(name, said, first, covered, counts)
    more = f" and {left:,} others" if left else ""
    return element(
        "div",
        element("h3", f"Tokens of {name}"),
        element("p", f"{said[0].upper()}{said[1:]}.", view.sampled()),
        facts_list(pairs),
        element("div", *charts, class_="side even"),
        as_table(f"the {len(shown)} most frequent{more}",
                 table(["token", "times", "share", BARS], rows, label=f"tokens of {name}",
                       sorts=True)),
        python(f"cache.read(id, {name!r})"),
    )  # fmt: skip


def _token_charts(
    name: str, said: str, first: str, covered: Floats, counts: Ints
) -> tuple[Html, Html]:
    """Return the bars of the most frequent tokens, and the curve of coverage."""
    some = counts[:MOST_TOKENS]
    edges = np.arange(len(some) + 1, dtype=np.float64) + 0.5
    by_rank = (
        Axis(0.5, len(some) + 0.5, f"rank, the {len(some)} most frequent"),
        Axis(0, float(some[0]) * 1.05, "times"),
    )
    step = max(len(covered) // MOST_POINTS, 1)
    at = [0.0, *(np.arange(len(covered))[::step] + 1.0).tolist(), float(len(covered))]
    shares = [0.0, *covered[::step].tolist(), 1.0]
    axes = (
        Axis(0, float(len(covered)), "so many tokens, the most frequent first"),
        Axis(0, 1.05, "make this share of all"),
    )
    return (
        bars(f"Most frequent tokens of {name}", first, edges, some, by_rank),
        curve(f"Coverage of {name}", said, at, shares, axes),
    )


# Annotations.


def who_and_what(view: View) -> Html:
    """Return who speaks and what: hours by value, numbers in bins, texts against frames."""
    facts, found = view.facts, view.facts.annotations
    parts = [_groups(view, each) for each in found.groups]
    parts += [_quantity(view, each) for each in found.quantities]
    parts += [_text(view, each) for each in found.texts]
    if found.others:
        named = ", ".join(f"{name} ({kind})" for name, kind in found.others.items())
        parts.append(element("p", f"Not summed up: {named}."))
    if not parts:
        return joined(
            element("p", "It has no annotations. With speakers, texts or durations beside the "
                    "features, the page tells who dominates, and which texts do not fit."),
            python("cache.annotate('speakers.csv')"),
        )  # fmt: skip
    return joined(*parts, python(f"cache.annotation({next(iter(facts.table.annotations))!r})"))


def _groups(view: View, found: Groups) -> Html:
    facts = view.facts
    total = max(int(next(iter(facts.lengths.values())).frames) if facts.lengths
                else len(facts.table), 1)  # fmt: skip
    hours = facts.hours
    unit = "hours" if hours is not None else "frames" if facts.lengths else "utterances"
    share = found.frames[0] / total if len(found.frames) else 0.0
    largest = Html("")
    if found.values:
        part = percent(share, view.named(f"{found.name} largest share"))
        largest = joined("; the largest, ", found.values[0], ", has ", part, f" of all {unit}")
    said: Child = [
        number(found.groups, view.named(f"values of {found.name}")),
        f" value{'s' * (found.groups != 1)}",
        largest,
        f"; {found.missing:,} utterances have none" if found.missing else "",
        ".",
    ]
    most = max(int(found.frames.max(initial=0)), 1)
    rows = []
    for value, count, frames in zip(found.values, found.utterances, found.frames, strict=True):
        amount = frames / total * hours if hours is not None else frames
        named = view.named(f"{found.name} {value}")
        rows.append(
            (value, number(int(count), f"{named} utterances"),
             number(float(amount) if hours is not None else int(amount), f"{named} {unit}",
                    hours_text(float(amount)) if hours is not None else None),
             percent(frames / total, f"{named} share"), bar_in_cell(frames / most))
        )  # fmt: skip
    left = found.groups - len(found.values)
    heads = [found.name, "utterances", unit, "share", BARS]
    return element(
        "div",
        element("h3", found.name),
        element("p", said),
        table(heads, rows, label=f"{unit} by {found.name}", sorts=True),
        element("p", f"and {left:,} others", class_="note") if left else "",
    )


def _quantity(view: View, found: Quantity) -> Html:
    edges, binned = found.bins.edges, found.bins
    x = Axis(float(edges[0]), float(edges[-1]), found.name)
    y = Axis(0, binned.tallest * 1.05 or 1, "utterances", whole=True)
    named = ("least", "median", "mean", "most")
    said = ", ".join(f"{what} {short(getattr(found, what))}" for what in named)
    rows = _bins(binned, view.named(found.name))
    numbers = [
        [
            ", " if place else "",
            f"{what} ",
            number(getattr(found, what), view.named(f"{found.name} {what}")),
        ]
        for place, what in enumerate(named)
    ]
    none = f"; {found.missing:,} utterances have none" if found.missing else ""
    return element(
        "div",
        element("h3", found.name),
        element("p", *numbers, none, "."),
        bars(found.name, said, edges, binned.counts, (x, y)),
        as_table(f"utterances by {found.name}",
                 table([found.name, "utterances"], rows, label=found.name)),
    )  # fmt: skip


def _text(view: View, found: TextLengths) -> Html:
    facts = view.facts
    x = Axis(float(found.frame_edges[0]), float(found.frame_edges[-1]), "frames")
    y = Axis(float(found.character_edges[0]), float(found.character_edges[-1]), "characters")
    rate = found.frames_a_character
    said = f"the median is {short(rate)} frames a character; light bins hold more utterances"
    far = [
        each
        for each in facts.oddities
        if (each.kind, each.annotation) == ("speech rate", found.name)
    ]
    rows = [
        (element("code", facts.table.id(int(each.rows[place]))), each.says(place))
        for each in far for place in range(min(FAR_TEXTS, len(each.rows)))
    ]  # fmt: skip
    numbers = [
        number(found.total, view.named(f"{found.name} characters")), " characters; the median is ",
        number(rate, view.named(f"{found.name} rate")), " frames a character",
        f"; {found.missing:,} utterances have no text" if found.missing else "",
        ". Light bins hold more utterances.",
    ]  # fmt: skip
    counts = found.bins
    bins = ((f"{short(found.character_edges[up])} to {short(found.character_edges[up + 1] - 1)}",
             f"{short(found.frame_edges[across])} to {short(found.frame_edges[across + 1] - 1)}",
             number(int(counts[up, across]), view.named(f"{found.name} bin {up} {across}")))
            for up, across in sorted(zip(*np.nonzero(counts), strict=True),
                                     key=lambda at: -counts[at])[:100])  # fmt: skip
    return element(
        "div",
        element("h3", f"{found.name} against frames"),
        element("p", numbers),
        field_of_bins(f"Characters of {found.name} against frames", said, counts, (x, y)),
        as_table("the fullest bins",
                 table(["characters", "frames", "utterances"], bins, label="bins")),
        table(["id", "furthest from the median"], rows, label="texts that fit badly")
        if rows else element("p", "No text fits its length badly."),
    )  # fmt: skip
