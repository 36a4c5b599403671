"""The page of a report: one file of HTML that needs no network, of one cache or of two."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import numpy as np

from featcache.report_page import distributions, sections
from featcache.report_page.charts import (
    Html,
    Scales,
    View,
    day,
    element,
    joined,
    nbytes,
    number,
    percent_text,
    python,
    table,
)
from featcache.report_page.facts import CacheFacts, Finding, differences_of, findings
from featcache.report_page.values import Sample

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)
MOST_IDS = 100_000  # that can be searched; of more, so many and the odd ones:
SOME_IDS = 50_000


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        path: the file.
        bytes: its size.
        sampled: utterances whose arrays were read; fewer than `of` where that would take long.
        of: utterances of the cache, or of both caches.
        findings: what to look at first, the worst first.
    """

    path: Path
    bytes: int
    sampled: int
    of: int
    findings: tuple[Finding, ...]


def write_page(
    caches: Sequence[CacheFacts],
    path: Path,
    *,
    pictures: int,
    sample: Sample,
    seed: int,
    changed: Mapping[str, Sequence[str]],
) -> Report:
    """Write the page of one cache, or of two with what differs; return what was found.

    Args:
        caches: their facts.
        path: the file, which is replaced when the page is whole.
        pictures: most pictures of utterances, of each cache.
        sample: as it was asked for.
        seed: with which utterances were drawn.
        changed: in what the makings of two caches differ, as `featcache.inspect.diff` returns it.
    """
    found = [findings(each) for each in caches]
    text = _document(caches, found, pictures, sample, seed, changed)
    data = text.encode("utf-8", "backslashreplace")
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(data)
        aside.replace(path)
    except OSError as error:
        error.filename = str(path)  # which is the one that was named
        raise
    finally:
        aside.unlink(missing_ok=True)
    read = sum(len(each.chosen.rows) for each in caches)
    of = sum(len(each.table) for each in caches)
    return Report(path, len(data), read, of, tuple(one for each in found for one in each))


def _document(
    caches: Sequence[CacheFacts],
    found: Sequence[Sequence[Finding]],
    pictures: int,
    sample: Sample,
    seed: int,
    changed: Mapping[str, Sequence[str]],
) -> str:
    scales = Scales.of(caches)
    views = [View(each, scales, place, len(caches) > 1) for place, each in enumerate(caches)]
    title = " and ".join(_name(each) for each in caches)
    body = joined(
        element("header", _head(views, title)),
        element("main", *_sections(views, found, pictures, sample, seed, changed)),
        element("footer", "Made by featcache; this file needs no network, and sends nothing."),
        *(_ids_block(view) for view in views),
    )
    head = joined(
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title}: report of a feature cache"),
        element("style", Html(_asset("page.css"))),
    )
    script = element("script", Html(_asset("page.js")))
    document = element("html", element("head", head), element("body", body, script), lang="en")
    return f"<!doctype html>\n{document}\n"


def _asset(name: str) -> str:
    return resources.files("featcache.report_page").joinpath(name).read_text("utf-8")


def _name(facts: CacheFacts) -> str:
    return "/".join(Path(facts.path).parts[-2:])


def _head(views: Sequence[View], title: str) -> Html:
    facts = views[0].facts
    generation, by = facts.opened.manifest.generation, facts.made_from["by"]
    made = f"made {day(facts.made_from['made'])}{f' by {by}' if by else ''}"
    lines = f"generation {generation}, {made}"
    if len(views) > 1:
        lines = "two caches, one below the other, on the same axes"
    return joined(
        element("div", element("p", "feature cache", class_="over"), element("h1", title),
                element("p", lines, class_="under"), class_="named"),
        element("button", "light or dark", type="button", id="theme", class_="script"),
    )  # fmt: skip


def _sections(
    views: Sequence[View],
    found: Sequence[Sequence[Finding]],
    pictures: int,
    sample: Sample,
    seed: int,
    changed: Mapping[str, Sequence[str]],
) -> list[Html]:
    places = {view.place: found[view.place] for view in views}
    rows = {view.place: sections.odd_rows(view.facts) for view in views}
    made: list[tuple[str, str, str, Callable[[View], Html]]] = [
        ("first", "Look at first", "What a person should see before training; worst first.",
         lambda view: sections.look_first(view, places[view.place])),
        ("origin", "Is it the right one", "When and by what it was made, and whether it is whole.",
         sections.origin),
        ("lengths", "Lengths", "Will it pad, and where to cut.", distributions.lengths),
        ("values", "Values", "Whether a dimension is dead or shifted.", distributions.values),
        ("odd", "Odd ones",
         "Utterances that differ from the rest; the rules are at the end of the page.",
         lambda view: sections.odd(view, rows[view.place], pictures, seed)),
        ("annotations", "Who and what", "Who dominates, and whether texts fit their lengths.",
         distributions.who_and_what),
        ("storage", "Storage", "Where the bytes are, and what other ways would take.",
         sections.storage),
        ("made-from", "Made from",
         "What makes it stale where it changes, and what explains it.", sections.made_from),
    ]  # fmt: skip
    parts = [_tiles(view) for view in views]
    links = (element("a", title, href=f"#{id}") for id, title, *_ in made)
    parts.append(element("nav", links, aria_label="sections"))
    if len(views) == 2:
        parts.append(_differences(views, changed))
    parts += [
        _section(place, id, title, said, views, say)
        for place, (id, title, said, say) in enumerate(made, 1)
    ]
    parts.append(_how(len(made) + 1, views, pictures, sample, seed))
    return parts


def _tiles(view: View) -> Html:
    label = _name(view.facts)
    chosen = view.facts.chosen
    sampled: str | Html = ""
    if not chosen.is_all:
        share = len(chosen.rows) / chosen.of
        sampled = element(
            "p",
            "Values are from ",
            number(len(chosen.rows), view.named("sampled")),
            f" of {chosen.of:,} utterances ({percent_text(share)}): a fault of fewer than 1 in "
            f"{max(int(len(chosen.drawn) / 4.6), 1):,} may be missed. Lengths, annotations and "
            "doubles are of all.",
            class_="banner",
        )
    heading = element("h2", label) if view.several else element("h2", "Overview", class_="hidden")
    return element("section", heading, sections.tiles(view), sampled, class_="overview")


def _section(
    place: int, id: str, title: str, said: str, views: Sequence[View], say: Callable[[View], Html]
) -> Html:
    parts = []
    for view in views:
        label = element("p", _name(view.facts), class_="which") if view.several else Html("")
        parts.append(element("div", label, say(view), id=view.anchor(id), class_="of-cache-part"))
    return element(
        "section",
        element("h2", element("span", str(place), class_="number"), " ", title),
        element("p", said, class_="said") if said else Html(""),
        *parts,
        id=id,
        aria_label=title,
    )


def _differences(views: Sequence[View], changed: Mapping[str, Sequence[str]]) -> Html:
    first, second = (view.facts for view in views)
    ids = differences_of([first, second])
    rows: list[tuple[str, str | Html, str | Html]] = [
        ("utterances", number(len(first.table), "first utterances"),
         number(len(second.table), "second utterances")),
        ("only in this one", number(ids["first"], "only in first"),
         number(ids["second"], "only in second")),
    ]  # fmt: skip
    names = dict.fromkeys(each.name for facts in (first, second) for each in facts.features)
    for name in names:
        told: list[str | Html] = []
        for which, facts in (("first", first), ("second", second)):
            one = next((each for each in facts.features if each.name == name), None)
            told.append("is not there" if one is None else joined(
                number(one.frames, f"{which} frames of {name}"),
                f" {'frames' if one.has_frames else 'arrays'}, {one.shape} {one.dtype} ",
                f"{one.backend} {one.codec}, ", nbytes(one.stored, f"{which} bytes of {name}"),
            ))  # fmt: skip
        rows.append((name, told[0], told[1]))
    heads = ["", _name(first), _name(second)]
    lines = [line for key in ("fingerprint", "recorded") for line in changed.get(key, ())]
    listed = element("ul", (element("li", element("code", line)) for line in lines))
    return element(
        "section",
        element("h2", "What differs"),
        element("p", number(ids["both"], "in both"), " ids are in both."),
        table(heads, rows, label="what differs"),
        joined(element("p", "They were made from something else:"), listed) if lines
        else element("p", "They were made from the same, as far as it was recorded."),
        python(f"featcache.inspect.diff({first.path!r}, {second.path!r})"),
        aria_label="What differs",
    )  # fmt: skip


def _how(place: int, views: Sequence[View], pictures: int, sample: Sample, seed: int) -> Html:
    paths = [view.facts.path for view in views]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    given = repr(paths[0]) if len(paths) == 1 else repr(paths)
    more = "" if sample is None else f", sample={sample!r}"
    more += "" if pictures == 48 else f", pictures={pictures}"
    said = []
    for view in views:
        chosen = view.facts.chosen
        of = f" of {_name(view.facts)}" if view.several else ""
        said.append(
            f"All {chosen.of:,} utterances{of} were read." if chosen.is_all else
            f"{len(chosen.drawn):,} utterances{of} with the smallest hash of seed {seed} and "
            f"id were read, and {len(chosen.ends):,} of the shortest and longest."
        )  # fmt: skip
    return element(
        "section",
        element("h2", element("span", str(place), class_="number"), " How this was made"),
        element("p", f"By featcache {_version()}, {now}. ", *(f"{each} " for each in said)),
        sections.rules(),
        python(f"featcache.inspect.report({given}, 'report.html', seed={seed}{more})"),
        aria_label="How this was made",
    )


def _version() -> str:
    return importlib.metadata.version("featcache")


def _ids_block(view: View) -> Html:
    """Return ids, frames and oddities for the search, deflated."""
    facts = view.facts
    count = len(facts.table)
    rows = np.arange(count)
    if count > MOST_IDS:
        sampled = facts.table.rows(facts.table.sample(SOME_IDS, seed=0).ids)
        rows = np.union1d(sampled, facts.odd_rows[:SOME_IDS])
    frames = [] if facts.main is None else facts.table.lengths(facts.main)[rows].tolist()
    kinds: dict[int, list[str]] = {}
    for each in facts.oddities:
        for at in np.flatnonzero(np.isin(rows, each.rows)).tolist():
            kinds.setdefault(at, []).append(each.kind)
    data = {
        "ids": list(facts.table.selection.packed_ids(rows)),
        "frames": frames,
        "odd": {str(at): ", ".join(dict.fromkeys(each)) for at, each in kinds.items()},
        "rows": rows.tolist() if len(rows) < count else None,
        "of": count,
        "feature": facts.main or "",
    }
    packed = zlib.compress(json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(), 6)
    text = base64.b64encode(packed).decode()
    return element("script", Html(text), type="text/plain", id=view.anchor("ids"))
