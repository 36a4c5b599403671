"""Sections on a cache as a whole: tiles, what to look at first, origin, makings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from featcache.report_page.charts import (
    Html,
    element,
    hours_text,
    joined,
    nbytes,
    number,
)
from featcache.report_page.facts import FeatureFacts, Finding
from featcache.report_page.rules import RULES
from featcache.report_page.view import Child, View, day, facts_list, python, table

# Tiles, and what to look at first.


def tiles(view: View) -> Html:
    """Return the row of tiles."""
    facts, manifest = view.facts, view.facts.opened.manifest
    hours: Child = "unknown"
    if facts.hours is not None:
        hours = number(facts.hours, view.named("hours"), hours_text(facts.hours))
    state = "complete" if manifest.complete else "incomplete"
    damaged = sum(each.kind == "damaged" for each in facts.oddities)
    whole = "damaged" if damaged else "whole" if facts.checked and facts.chosen.is_all else ""
    some = [
        ("utterances", number(len(facts.table), view.named("utterances")), ""),
        ("hours", hours, facts.hours_of or "a feature with frame_s would tell"),
    ]
    first = facts.features[0] if facts.features else None
    if first is not None:
        unit = "frames" if first.has_frames else "arrays"
        some.append((unit, number(first.frames, view.named(f"frames of {first.name}")), first.name))
        some.append((first.dtype, _frame_shape(first), first.name))
    stored = sum(each.stored for each in facts.features)
    backends = ", ".join(dict.fromkeys(each.backend for each in facts.features))
    some.append(("stored", nbytes(stored, view.named("bytes")), backends))
    tone = "bad" if damaged else "good" if manifest.complete else "warn"
    said = f"{whole}: all that was read has its checksum" if whole == "whole" else whole
    some.append(("state", element("span", state, class_=tone), said))
    return element(
        "ul",
        (
            element(
                "li",
                element("span", what, class_="tile-what"),
                element("span", value, class_="tile-value"),
                element("span", note, class_="tile-note"),
            )
            for what, value, note in some
        ),
        class_="tiles",
    )


def _frame_shape(feature: FeatureFacts) -> str:
    """Return the shape of a frame in words."""
    if feature.dims is None:
        return "unknown"
    if not feature.dims:
        return "1 number"
    return f"{' x '.join(f'{size:,}' for size in feature.dims)} dims"


SIGNS = {"fault": ("!!", "fault"), "look": ("!", "look at"), "fine": ("✓", "fine")}


def look_first(view: View, found: Sequence[Finding]) -> Html:
    """Return the findings, each with a link to where more is said; eight at most."""
    fine = [each for each in found if each.level == "fine"]
    shown = [*found[: 8 - min(len(fine), 2)]] if len(found) > 8 else list(found)
    shown += [each for each in fine if each not in shown][: 8 - len(shown)]
    items = (
        element(
            "li",
            element("span", SIGNS[each.level][0], class_="sign", aria_hidden="true"),
            element("span", SIGNS[each.level][1], class_="level"),
            element("a", each.text, href=f"#{view.anchor(each.section)}"),
            class_=each.level,
        )
        for each in shown
    )
    left = dict.fromkeys(each.kind for each in found if each not in shown)
    more = element("p", f"and {len(left)} more: {', '.join(left)}", class_="note")
    return joined(element("ul", items, class_="findings"), more if left else "")


# Origin: whether it is the right cache.


def origin(view: View) -> Html:
    """Return what tells whether this is the cache that is wanted."""
    facts, manifest = view.facts, view.facts.opened.manifest
    recorded = cast(Mapping[str, object], facts.made_from.get("recorded", {}))
    command = recorded.get("command")
    words = command if isinstance(command, list) else [command] if command else []
    by = " ".join(map(str, words or filter(None, [facts.made_from["by"]])))
    expected = manifest.expected
    missing = None
    if expected is not None:
        missing = max(expected.count - len(facts.table) - len(facts.opened.failed), 0)
    chosen = facts.chosen
    checks = "adopted: its bytes were never read as a whole, so nothing tells whether they changed"
    if facts.checked:
        checks = (
            f"the arrays of {'all ' if chosen.is_all else ''}{len(chosen.rows):,} utterances were "
            "compared with their checksums"
        )
    pairs: list[tuple[str, Child]] = [
        ("directory", element("code", facts.path)),
        ("made", day(facts.made_from["made"])),
        ("by", element("code", by) if by else "not recorded"),
        ("generation", number(manifest.generation, view.named("generation"))),
        (
            "expected",
            "not known" if expected is None else number(expected.count, view.named("expected")),
        ),
        ("missing", "not known" if missing is None else number(missing, view.named("missing"))),
        ("failed", _failed(view)),
        ("checked now", checks),
    ]
    return joined(
        facts_list(pairs),
        element(
            "p",
            "Whether it fits the code of now, only that code can tell: open it with what it would "
            "make, and it is refused where they differ.",
        ),
        python(f"featcache.open({facts.path!r}, expect=brain.expectation())"),
    )


def _failed(view: View) -> Html:
    failed = list(view.facts.opened.failed)
    counted = number(len(failed), view.named("failed"))
    if not failed:
        return counted
    some = ", ".join(failed[:10]) + ", ..." * (len(failed) > 10)
    return joined(counted, ": ", element("code", some))


# What it was made from, and how the page was made.


def made_from(view: View) -> Html:
    """Return what the cache was made from: compared, recorded, and source."""
    told = view.facts.made_from
    fingerprint = dict(cast(Mapping[str, object], told.get("fingerprint", {})))
    declared = fingerprint.pop("features", {})
    recorded = dict(cast(Mapping[str, object], told.get("recorded", {})))
    sources = recorded.pop("sources", {})
    compared = [(key, _value(each)) for key, each in fingerprint.items()]
    parts = [
        element("h3", "Compared whenever it is written or opened"),
        facts_list([*compared, ("declarations", _folded("as JSON", declared))])
        if compared
        else joined(element("p", "Nothing but the declarations of its features was recorded."),
                    _folded("declarations", declared)),
        element("h3", "Recorded, and compared by nobody"),
        element("details", element("summary", f"{len(recorded)} records of the run"),
                facts_list((key, _value(each)) for key, each in recorded.items()))
        if recorded else element("p", "Nothing was recorded."),
    ]  # fmt: skip
    if isinstance(sources, Mapping) and sources:
        parts.append(element("h3", "Source"))
        parts += [
            element("details", element("summary", element("code", str(name))),
                    element("pre", element("code", str(code)), tabindex="0"))
            for name, code in sources.items()
        ]  # fmt: skip
    return joined(*parts, python(f"featcache.inspect.made_from({view.facts.path!r})"))


def _value(value: object) -> Html:
    if isinstance(value, str | int | float | bool) or value is None:
        return element("code", str(value))
    text = json.dumps(value, default=str)
    return element("code", text) if len(text) <= 100 else _folded("as JSON", value)


def _folded(what: str, value: object) -> Html:
    text = json.dumps(value, indent=1, default=str, ensure_ascii=False)
    return element("details", element("summary", what),
                   element("pre", element("code", text), tabindex="0"))  # fmt: skip


def rules() -> Html:
    """Return the rules by which utterances are odd."""
    rows = ((element("span", kind, class_="kind"), f"An utterance, if {said}.")
            for kind, said in RULES.items())  # fmt: skip
    return element("details", element("summary", "rules for odd utterances"),
                   table(["why", "rule"], rows, label="rules"))  # fmt: skip
