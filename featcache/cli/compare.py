"""The verbs that compare: verify, a cache with its checksums; diff, two caches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli.output import bar, duration, hint, print_json, say, shown, size, value_text
from featcache.cli.verb import CACHES, JSON, NO, end, found, opened, verb
from featcache.errors import (
    CorruptCacheError,
    FormatVersionError,
    NotACacheError,
    counted,
)

if TYPE_CHECKING:
    from featcache.inspect import Diff
    from featcache.reading.verify import Damage, PageDamage
    from featcache.store import Cache

_NAMED = 20  # arrays of a container that are damaged


@verb
@CACHES
@click.option("--columns", is_flag=True, help="Sizes, and checksums of index and statistics alone.")
@click.option("--sample", metavar="N", type=click.IntRange(1), help="So many utterances alone.")
@JSON
def verify(caches: tuple[str, ...], columns: bool, sample: int | None, as_json: bool) -> None:
    """Compare all bytes of caches with their checksums. Exit code 1: damage."""
    if columns and sample is not None:
        raise click.UsageError("--columns or --sample, not both")
    checked = "columns" if columns else "arrays" if sample is None else "sample"
    told = []
    for path in found(caches):
        told.append(_verified(path, checked, sample))
        if not as_json:
            _print_verified(told[-1])
    if as_json:
        print_json("verify", {"caches": told})
    if any(_is_damaged(each) for each in told):
        end(NO)


def _verified(path: str, checked: str, sample: int | None) -> dict[str, Any]:
    begun = time.perf_counter()
    told: dict[str, Any] = {"path": path, "checked": checked, "bytes": 0, "utterances": 0}
    damaged: list[dict[str, Any]] = []
    elsewhere: list[dict[str, Any]] = []
    errors: list[str] = []
    pages = 0
    try:
        cache = opened(path)
        told |= {"utterances": len(cache)}
        if checked == "sample":
            told["bytes"], damaged, errors = _of_sample(cache, sample or 0)
        else:
            told["bytes"], all_damage = _of_all(path, cache, arrays=checked == "arrays")
            for each in all_damage:
                if isinstance(each, str):
                    errors.append(each)
                else:
                    damaged += _arrays_of(each)
                    elsewhere += _elsewhere(each)
                    pages += len(each.pages or ())
    except (NotACacheError, FormatVersionError):
        raise
    except CorruptCacheError as error:
        errors += str(error).splitlines()
    return told | {
        "seconds": time.perf_counter() - begun,
        "damaged_pages": pages,
        "damaged": damaged,
        "elsewhere": elsewhere,
        "errors": errors,
    }


def _of_all(path: str, cache: Cache, *, arrays: bool) -> tuple[int, list[Damage]]:
    """Compare what `featcache.open(verify=...)` does; return bytes of containers, and damage."""
    from featcache.format.files import reading
    from featcache.reading.opening import damage_of
    from featcache.reading.verify import tell_unequal_ends

    generation = cache.opened
    if arrays:
        generation.check_collected("verify")
    sets = generation.sets.values() or (generation,)
    total = sum(int(each.index.containers.sizes.sum()) for each in sets) if arrays else 0
    alone = cache.version is not None
    with reading(cache.path), bar(f"verify {path}", total) as tell:
        damage = list(dict.fromkeys(damage_of(generation, arrays=arrays, alone=alone, tell=tell)))
    tell_unequal_ends(cache.path, generation.manifest, generation.index)
    return total, damage


def _of_sample(cache: Cache, sample: int) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Read some utterances, drawn at random, and compare them with their checksums."""
    checking = opened(cache.path, version=cache.version, check_reads=True)
    table = checking.table.sample(min(sample, len(checking)))
    nbytes = 0
    damaged: list[dict[str, Any]] = []
    errors: list[str] = []
    with bar(f"verify {sample} of {cache.path}", 0) as tell:
        for id in table:
            for feature in table.features:
                try:
                    array = table.read(id, feature, copy=False)
                    nbytes += array.nbytes
                    tell(array.nbytes)
                except CorruptCacheError as error:
                    damaged.append({"id": id, "feature": feature, "container": None, "pages": []})
                    errors.append(str(error))
    return nbytes, damaged, errors


def _arrays_of(damage: PageDamage) -> list[dict[str, Any]]:
    return [
        {
            "id": array.id,
            "feature": array.feature,
            "container": damage.container,
            "pages": list(array.pages),
        }
        for array in damage.arrays
    ]


def _elsewhere(damage: PageDamage) -> list[dict[str, Any]]:
    """Return the pages that are damaged and hold none of the damaged arrays."""
    of_arrays = {page for array in damage.arrays for page in array.pages}
    pages = [page for page in damage.pages or () if page not in of_arrays]
    return [{"container": damage.container, "pages": pages}] if pages else []


def _is_damaged(told: Mapping[str, Any]) -> bool:
    return bool(told["damaged"] or told["elsewhere"] or told["errors"])


def _print_verified(told: Mapping[str, Any]) -> None:
    path, seconds = shown(told["path"]), told["seconds"]
    what = counted(told["utterances"], "utterance")
    if not _is_damaged(told):
        how = {"columns": "index and statistics alone", "sample": "a sample alone"}
        speed = f", {size(told['bytes'] / seconds)}/s" if told["bytes"] and seconds > 0.1 else ""
        read = how.get(told["checked"], f"{size(told['bytes'])}")
        state = click.style("whole", fg="green")
        say(f"{state}  {path}: {what}, {read}, {duration(seconds)}{speed}")
        return
    ids = {each["id"] for each in told["damaged"]}
    pages = f", {counted(told['damaged_pages'], 'page')}" if told["damaged_pages"] else ""
    say(f"{click.style('DAMAGED', fg='red', bold=True)}  {path}: {len(ids):,} of {what}{pages}")
    containers = dict.fromkeys(
        each["container"] for each in (*told["damaged"], *told["elsewhere"]) if each["container"]
    )
    for container in containers:
        _print_container(told, container)
    for error in told["errors"]:
        say(f"  {shown(error)}")
    rest = "all else is whole; " if containers and not told["errors"] else ""
    hint(f"{rest}see: featcache repair {told['path']} --dry-run")


def _print_container(told: Mapping[str, Any], container: str) -> None:
    def its(key: str) -> list[Mapping[str, Any]]:
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
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
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
    from featcache.format.index import rows_of_ids

    rows = rows_of_ids(other.opened.index, one.opened.index)
    return [one.id(row) for row in (rows < 0).nonzero()[0].tolist()]


def _print_diff(told: Diff, shared: Sequence[str]) -> None:
    counts, values = told["ids"], told["values"]
    same = [counted(counts["both"], "id")]
    equal = [] if values is None else [name for name in shared if name not in values]
    same += [f"the values of {name}" for name in equal]
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
        return f"{size(was)} -> {size(now)}"
    return f"{key} {was} -> {now}"


def _print_lines(word: str, lines: Sequence[str], colour: str | None, joined: bool = False) -> None:
    lines = [", ".join(lines)] if joined and lines else lines
    for number, line in enumerate(lines):
        head = click.style(f"{'' if number else word:<9}", fg=colour)
        say(f"{head}  {shown(line)}")
