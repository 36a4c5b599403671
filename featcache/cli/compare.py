"""The verbs that compare: verify, a cache with its checksums; diff, two caches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from featcache._progress import bar
from featcache.cli.output import Told, duration, hint, print_json, say, shown, value_text
from featcache.cli.verb import (
    CACHES,
    IMPOSSIBLE,
    JSON,
    NO,
    end,
    found,
    in_words,
    opened,
    place,
    tell_pending,
    verb,
)
from featcache.errors import CorruptCacheError, FeatcacheError, bytes_text, counted

if TYPE_CHECKING:
    from featcache.inspect import Diff
    from featcache.reading import Damage, PageDamage
    from featcache.store import Cache

_NAMED = 20  # arrays of a container that are damaged


@verb
@CACHES
@click.option("--columns", is_flag=True, help="Sizes, and checksums of index and statistics alone.")
@click.option("--sample", metavar="N", type=click.IntRange(1), help="So many utterances alone.")
@JSON
def verify(caches: tuple[str, ...], columns: bool, sample: int | None, as_json: bool) -> None:
    """Compare all bytes of caches with their checksums. Exit code 1: damage.

    A cache that could not be read is told of, the others are compared; exit code 2 then.
    """
    if columns and sample is not None:
        raise click.UsageError("--columns or --sample, not both")
    checked = "columns" if columns else "arrays" if sample is None else "sample"
    told: list[dict[str, Any]] = []
    paths, unread = found(caches)
    for path in paths:
        try:
            told.append(_verified(path, checked, sample))
        except FeatcacheError as error:
            if len(paths) == 1 and not unread:
                raise
            unread = True
            say(shown(in_words(str(error)), lines=True), fg="red", err=True)
            continue
        if not as_json:
            _print_verified(told[-1])
    if as_json:
        print_json("verify", {"caches": told})
    if unread or any(_is_damaged(each) for each in told):
        end(IMPOSSIBLE if unread else NO)


def _verified(path: str, checked: str, sample: int | None) -> dict[str, object]:
    told: dict[str, Any] = {"path": path, "checked": checked, "bytes": 0, "utterances": 0}
    told["unpublished"] = None  # of a cache that cannot be opened nobody knows
    begun = time.perf_counter()
    damaged: list[dict[str, Any]] = []
    elsewhere: list[dict[str, Any]] = []
    errors: list[str] = []
    pages = 0
    try:
        cache = opened(path)
        count = len(cache) if sample is None else min(sample, len(cache))
        told |= {"utterances": len(cache), "utterances_checked": count}
        told["unpublished"] = tell_pending(cache)
        begun = time.perf_counter()  # what is told is the time of reading
        if checked == "sample":
            told["bytes"], damaged, errors = _of_sample(path, cache, count)
        else:
            told["bytes"], all_damage = _of_all(path, cache, arrays=checked == "arrays")
            for each in all_damage:
                if isinstance(each, str):
                    errors.append(each)
                else:
                    damaged += _arrays_of(each)
                    elsewhere += _elsewhere(each)
                    pages += len(each.pages or ())
    except CorruptCacheError as error:
        errors += in_words(str(error)).splitlines()
    return told | {
        "seconds": time.perf_counter() - begun,
        "damaged_pages": pages,
        "damaged": damaged,
        "elsewhere": elsewhere,
        "errors": errors,
    }


def _of_all(path: str, cache: Cache, *, arrays: bool) -> tuple[int, list[Damage]]:
    """Compare what `featcache.open(verify=...)` does; return bytes of containers, and damage."""
    from featcache.format import reading
    from featcache.reading import damage_of, tell_unequal_ends

    generation = cache.opened
    if arrays:
        generation.check_collected("verify")
    total = generation.container_bytes if arrays else 0
    alone = cache.version is not None
    with reading(cache.path), bar(f"verify {shown(path)}", total, shown=arrays) as told:
        found = damage_of(generation, arrays=arrays, alone=alone, tell=told.update)
        damage = list(dict.fromkeys(found))
    tell_unequal_ends(cache.path, generation.manifest, generation.index)
    return total, damage


def _of_sample(
    path: str, cache: Cache, sample: int
) -> tuple[int, list[dict[str, object]], list[str]]:
    """Read some utterances, drawn at random, and compare them with their checksums."""
    table = opened(path, check_reads=True).table.sample(sample)
    nbytes = 0
    damaged: list[dict[str, Any]] = []
    errors: list[str] = []
    what = shown(f"verify {sample:,} of {path}")
    with bar(what, sample, unit=" utterances") as told:
        for id in table:
            for feature in table.features:
                try:
                    array = table.read(id, feature, copy=False)
                    nbytes += array.nbytes
                except CorruptCacheError as error:
                    damaged.append({"id": id, "feature": feature, "container": None, "pages": []})
                    errors.append(in_words(str(error)))
            told.update()
    return nbytes, damaged, errors


def _arrays_of(damage: PageDamage) -> list[dict[str, object]]:
    return [
        {
            "id": array.id,
            "feature": array.feature,
            "container": damage.container,
            "pages": list(array.pages),
        }
        for array in damage.arrays
    ]


def _elsewhere(damage: PageDamage) -> list[dict[str, object]]:
    """Return the pages that are damaged and hold none of the damaged arrays."""
    of_arrays = {page for array in damage.arrays for page in array.pages}
    pages = [page for page in damage.pages or () if page not in of_arrays]
    return [{"container": damage.container, "pages": pages}] if pages else []


def _is_damaged(told: Mapping[str, object]) -> bool:
    return bool(told["damaged"] or told["elsewhere"] or told["errors"])


def _print_verified(told: Told) -> None:
    from featcache.reading import IN_A_STORE
    from featcache.remote import is_url

    path, seconds = shown(told["path"]), told["seconds"]
    what = counted(told["utterances"], "utterance")
    if told["checked"] == "sample":
        what = f"{told['utterances_checked']:,} of {what}"
    if not _is_damaged(told):
        speed = (
            f", {bytes_text(told['bytes'] / seconds)}/s" if told["bytes"] and seconds > 0.1 else ""
        )
        columns = told["checked"] == "columns"
        read = "index and statistics alone" if columns else bytes_text(told["bytes"])
        state = click.style("whole", fg="green")
        say(f"{state}  {path}: {what}, {read}, {duration(seconds)}{speed}")
        return
    ids = {each["id"] for each in told["damaged"]}
    words = [f"{len(ids):,} of {what}"] if ids or not told["errors"] else []
    words += [counted(told["damaged_pages"], "page")] if told["damaged_pages"] else []
    more = f": {', '.join(words)}" if words else ""  # of a file that is lost nobody has counted
    say(f"{click.style('DAMAGED', fg='red', bold=True)}  {path}{more}")
    containers = dict.fromkeys(
        each["container"] for each in (*told["damaged"], *told["elsewhere"]) if each["container"]
    )
    for container in containers:
        _print_container(told, container)
    for error in told["errors"]:
        say(f"  {shown(error)}")
    rest = "all else is whole; " if containers and not told["errors"] else ""
    if is_url(told["path"]):
        hint(f"{rest}{IN_A_STORE}")
    elif _has_manifest(told["path"]):  # repair begins at it
        hint(f"{rest}see: featcache repair {told['path']} --dry-run")


def _has_manifest(path: str) -> bool:
    from featcache.format import every_directory, read_manifest

    cache = Path(path.rpartition("@")[0] or path)
    try:
        for each in every_directory(Path(path) if Path(path).exists() else cache):
            read_manifest(each)
    except FeatcacheError:
        return False
    return True


def _print_container(told: Told, container: str) -> None:
    def its(key: str) -> list[Told]:
        return [each for each in told[key] if each["container"] == container]

    arrays = its("damaged")
    others = [page for each in its("elsewhere") for page in each["pages"]]
    pages = sorted({page for each in arrays for page in each["pages"]}.union(others))
    where = f"  pages {_listed(pages)}" if pages else "  (checksums of its pages are damaged, too)"
    none = f" ({_listed(others)}: none of the arrays)" if others and arrays else ""
    below = Path(told["path"]).absolute()
    path = Path(container)
    name = str(path.relative_to(below)) if path.is_relative_to(below) else container
    say(f"  {shown(name)}{where}{none}")
    for each in arrays[:_NAMED]:
        say(f"    {click.style(shown(each['id']), fg='cyan')} {shown(each['feature'])}")
    if len(arrays) > _NAMED:
        say(f"    and {len(arrays) - _NAMED:,} more (--json lists all)")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_NAMED])) + ", ..." * (len(numbers) > _NAMED)


@verb
@place("a")
@place("b")
@click.option("--values", is_flag=True, help="Read and compare all arrays that both have.")
@click.option("--atol", metavar="X", type=float, default=0.0, help="Differences up to X are none.")
@click.option("--ids", is_flag=True, help="List the ids that only one has.")
@JSON
def diff(a: str, b: str, values: bool, atol: float, ids: bool, as_json: bool) -> None:
    """Compare two caches: ids, features, what they were made from. Exit code 1: they differ.

    What was recorded of the runs that made them, such as versions of libraries, is shown and makes
    no difference.
    """
    from featcache import inspect

    first, second = opened(a), opened(b)
    told = inspect.diff(first, second, values=values or atol > 0, atol=atol)
    counts = told["ids"]
    same = not (
        counts["only_a"] or counts["only_b"] or told["features"] or told["fingerprint"]
        or told["values"]
    )  # fmt: skip
    if as_json:
        made = {key: told[key] for key in ("fingerprint", "recorded", "sources")}
        content: dict[str, Any] = {key: told[key] for key in ("ids", "features", "values")}
        if ids:
            content["ids"] = {**counts, "of_a": _only(first, second), "of_b": _only(second, first)}
        print_json("diff", {"same": same, **content, "made_from": made})
    else:
        _print_diff(told, [name for name in first.features if name in second.features])
        if ids:
            for sign, one, other in (("-", first, second), ("+", second, first)):
                for id in _only(one, other):
                    say(f"{sign} {shown(id)}")
    if not same:
        end(NO)


def _only(one: Cache, other: Cache) -> list[str]:
    from featcache.format import rows_of_ids

    rows = rows_of_ids(other.opened.index, one.opened.index)
    return [one.id(row) for row in (rows < 0).nonzero()[0].tolist()]


def _print_diff(told: Diff, shared: Sequence[str]) -> None:
    counts, values = told["ids"], told["values"]
    same = [counted(counts["both"], "id")]
    for name in [] if values is None else [name for name in shared if name not in values]:
        longer = cast(Sequence[int], told["features"].get(name, {}).get("lengths", ()))
        count = counts["both"] - sum(longer)
        some = "" if count == counts["both"] else f" where it is as long ({count:,})"
        same += [f"the values of {name}{some}"] if count else []
    alike = [name for name in shared if name not in told["features"]]
    if alike:
        same.append(f"how {' and '.join(alike)} {'is' if len(alike) == 1 else 'are'} stored")
    same += [] if told["fingerprint"] else ["what they were made from"]
    _print_lines("same", same if counts["both"] else same[1:], "green", joined=True)
    lines = [
        f"{counted(count, 'id')} only in the {which}"
        for which, count in (("first", counts["only_a"]), ("second", counts["only_b"]))
        if count
    ]
    for name, changed in told["features"].items():
        if "name" in changed:
            which = "second" if changed["name"][0] is None else "first"
            lines.append(f"{name}: only in the {which}")
            continue
        lines.append(f"{name}: {', '.join(_change(key, *pair) for key, pair in changed.items())}")
    for name, each in (values or {}).items():
        largest = "not finite in one" if each["largest"] is None else value_text(each["largest"])
        lines.append(
            f"{name}: largest difference {largest} ({each['id']}, frame {each['frame']}, "
            f"dim {each['dim']}), in {counted(each['utterances'], 'utterance')}"
        )
    made = [line for line in told["fingerprint"] if not line.startswith("features.")]
    _print_lines("differs", [*lines, *made], "yellow")
    _print_lines("recorded", told["recorded"], None)
    _print_lines("code", told["sources"], None)


def _change(key: str, was: object, now: object) -> str:
    if key == "lengths":
        return f"longer in the first {was:,}, in the second {now:,}"
    if key == "bytes" and isinstance(was, int) and isinstance(now, int):
        return f"{bytes_text(was)} -> {bytes_text(now)}"
    return f"{key} {was} -> {now}"


def _print_lines(word: str, lines: Sequence[str], colour: str | None, joined: bool = False) -> None:
    lines = [", ".join(lines)] if joined and lines else lines
    for number, line in enumerate(lines):
        head = click.style(f"{'' if number else word:<9}", fg=colour)
        say(f"{head}  {shown(line)}")
