"""The verb `info`: what caches hold, and how far they are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import click

from featcache.cli.output import (
    Told,
    ago,
    duration,
    has_unicode,
    is_quiet,
    number,
    print_json,
    print_table,
    room,
    say,
    shown,
)
from featcache.cli.verb import (
    CACHES,
    IMPOSSIBLE,
    JSON,
    NO,
    end,
    found,
    in_words,
    json_of,
    opened,
    verb,
)
from featcache.errors import StaleCacheError, bytes_text, counted
from featcache.remote import is_url

Info = dict[str, Any]  # as `inspect.info` returns it
_REQUIREMENTS = ("complete", "fresh")
_COLUMNS = (
    *("cache", "state", "utterances", "hours", "feature", "frames", "dims", "dtype", "backend"),
    *("bytes", "made"),
)
_NUMBERS = ("utterances", "hours", "frames", "dims", "bytes")
_BAR = 18  # characters


@verb
@CACHES
@click.option("--watch", is_flag=True, help="Again each second, while one is being written.")
@click.option(
    "--require", metavar="WHAT", default="", help="complete, fresh, or both: exit 1 if one is not."
)
@click.option(
    "--fingerprint",
    metavar="FILE",
    type=click.File(encoding="utf-8"),
    help="JSON of what a fresh cache was made from, for --require fresh.",
)
@JSON
def info(
    caches: tuple[str, ...], watch: bool, require: str, fingerprint: IO[str] | None, as_json: bool
) -> None:
    """Show what caches hold, and how far they are; a folder stands for the caches in it."""
    required = [each for each in require.split(",") if each]
    if unknown := {*required} - {*_REQUIREMENTS}:
        raise click.UsageError(f"--require takes complete or fresh, not {sorted(unknown)[0]!r}")
    if ("fresh" in required) != (fingerprint is not None):
        raise click.UsageError("--require fresh and --fingerprint FILE go together")
    expected = None if fingerprint is None else json_of(fingerprint)
    paths, unread = found(caches)
    told = _watched(paths) if watch and not as_json else [_info(path) for path in paths]
    if as_json:
        print_json("info", {"caches": told})
    else:
        _print(told, _names(paths))
    for each in told:
        if each["error"]:
            say(shown(in_words(each["error"]), lines=True), fg="red", err=True)
    if unread or any(each["state"] == "damaged" for each in told):
        end(IMPOSSIBLE)
    lacking = [each for each in told if "complete" in required and each["state"] != "complete"]
    if lacking or (expected is not None and not _all_fresh(paths, expected)):
        end(NO)


def _info(path: str) -> Info:
    from featcache import inspect

    return inspect.info(opened(path) if "@" in path and not Path(path).exists() else path)


def _all_fresh(paths: list[str], expected: Mapping[str, object]) -> bool:
    import featcache

    fresh = True
    for path in paths:
        try:
            featcache.open(path, expect=expected)
        except StaleCacheError as error:
            say(shown(str(error), lines=True), fg="yellow", err=True)
            fresh = False
    return fresh


def _names(paths: list[str]) -> list[str]:
    """Return what tells caches apart, as short as it is one of several."""
    short = [Path(path).name for path in paths]
    return short if len(paths) > 1 and len({*short}) == len(short) else paths


def _print(told: list[Info], names: list[str]) -> None:
    if len(told) > 1:
        known = [each for each in told if each["state"] != "damaged"]
        frames = sum(f["frames"] or 0 for each in known for f in each["features"][:1])
        hours = [each["hours"] for each in known if each["hours"] is not None]
        words = [
            f"{len(told)} caches",
            counted(sum(each["utterances"] for each in known), "utterance"),
            *([f"{sum(hours):,.2f} hours"] if hours else []),
            counted(frames, "frame"),
            bytes_text(sum(each["bytes"] for each in known)),
        ]
        say(", ".join(words), bold=True)
    rows: list[list[str]] = []
    for name, each in zip(names, told, strict=True):
        made = each["made"]
        by = f" by {made['by']}" if made and made["by"] else ""
        front = [name, each["state"], number(each["utterances"]), number(each["hours"])]
        last = f"{ago(made['when'])}{by}" if made else "-"
        for feature in each["features"] or [None]:
            rows.append([*front, *_cells(feature), last])
            front, last = [""] * len(front), ""
    print_table(_COLUMNS, rows, right=_NUMBERS)
    for name, each in zip(names, told, strict=True):
        _print_more(name, each)


def _print_more(name: str, told: Info) -> None:
    """Print what is true of few caches."""
    if told["writer"]:
        say(_writer_line(told, None))
    if told["expected"] is not None and told["state"] == "incomplete":
        say(shown(f"{name}: {told['utterances']:,} of {told['expected']:,} expected"))
    for key, place in told["adopted"].items():
        is_there = place is not None and (is_url(place) or Path(place).is_dir())
        where = (
            f"the bytes of {key!r} stay in {place}" if place else f"nothing says where {key!r} is"
        )
        missing = "" if is_there else ", which is not there; adopted.json says where it is"
        say(shown(f"{name}: adopted, {where}{missing}"), fg=None if is_there else "red")
    if told["unpublished"] and not told["writer"]:
        left = counted(told["unpublished"], "utterance")
        say(shown(f"{name}: {left} left by a killed writer; see: featcache recover {told['path']}"))
    if told["failed"]:
        say(shown(f"{name}: {counted(told['failed'], 'utterance')} failed"))
    if told["tags"]:
        tags = ", ".join(f"{tag} (generation {each})" for tag, each in told["tags"].items())
        say(shown(f"{name}: tags {tags}"))


def _cells(feature: Told | None) -> list[str]:
    if feature is None:
        return ["-"] * 6
    dims = feature["dims"]
    codec = "" if feature["codec"] == "raw" else f" {feature['codec']}"
    return [
        feature["name"],
        number(feature["frames"]),
        "-" if not dims else "x".join(map(str, dims)),
        feature["dtype"],
        f"{feature['backend']}{codec}",
        bytes_text(feature["bytes"]),
    ]


# A cache that is being written.


def _done(told: Info) -> int:
    return int(told["utterances"] + (told["writer"] or {"utterances": 0})["utterances"])


def _writer_line(told: Info, rate: float | None) -> str:
    """Return how far a cache is, and who writes it; with a rate, when it will be there."""
    writer, done, expected = told["writer"], _done(told), told["expected"]
    words = [f"{Path(told['path']).name}: being written"]
    if expected:
        words += [_bar(done / expected), f"{done:,} of {expected:,}"]
    else:
        words.append(f"{counted(done, 'utterance')} so far")
    if rate:
        words.append(f"{rate:,.0f}/s")
        if expected and expected > done:
            words.append(f"{duration((expected - done) / rate)} left")
    since = f", since {_clock(writer['since'])}" if writer["since"] else ""
    words.append(f"by {writer['host']}, process {writer['pid']}{since}")
    return shown("   ".join(words))


def _clock(when: str) -> str:
    """Return a time as the clock here shows it, with its day unless that is today."""
    time = datetime.fromisoformat(when).astimezone()
    today = time.date() == datetime.now().astimezone().date()
    return f"{time:%H:%M}" if today else f"{time:%Y-%m-%d %H:%M}"


def _bar(share: float) -> str:
    full = min(round(share * _BAR), _BAR)
    dark, light = "█░" if has_unicode() else "#."
    return dark * full + light * (_BAR - full)


def _watched(paths: list[str]) -> list[Info]:
    """Print each second how far caches are, until none is being written; return what is then."""
    begun: dict[str, tuple[float, int]] = {}
    drawn = 0
    while True:
        told = [_info(path) for path in paths]
        writing = [each for each in told if each["writer"]]
        if not writing:
            return told
        lines = []
        for each in writing:
            now, done = time.monotonic(), _done(each)
            since, before = begun.setdefault(each["path"], (now, done))
            lines.append(
                _writer_line(each, (done - before) / (now - since) if now > since else None)
            )
        if not is_quiet():
            _draw(lines, again=drawn == len(lines))
            drawn = len(lines)
        time.sleep(1)


def _draw(lines: list[str], *, again: bool) -> None:
    """Print lines; in a terminal, in place of those that were printed before."""
    space = room()
    if space is not None:
        up = f"\033[{len(lines)}A" * again
        lines = [f"\r\033[2K{line[:space]}" for line in lines]
        lines[0] = up + lines[0]
    say("\n".join(lines), color=True)
