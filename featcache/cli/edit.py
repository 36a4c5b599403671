"""The verbs that edit a cache where it is: recover, delete, compact, tag, annotate, accept."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import click

from featcache.cli.output import Told, hint, print_json, print_table, say, shown
from featcache.cli.verb import (
    CACHE,
    JSON,
    NO,
    WHERE,
    end,
    in_words,
    json_of,
    opened,
    tell_pending,
    verb,
)
from featcache.errors import CacheError, ConfigError, FeatcacheError, bytes_text, counted

if TYPE_CHECKING:
    from featcache.store import Cache
    from featcache.writing.repair import Repair

_LISTED = 20  # lost ids that are printed
_NAMED = 5  # ids that a question names
_YES = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


def _ask(question: str, *, yes: bool) -> None:
    """Ask, on stderr, unless it is answered already; no ends the verb."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # click 8.1.0 prints a space to stdout
            if not yes and not click.confirm(shown(question), err=True):
                end(NO)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise ConfigError("there is nobody to answer; --yes answers") from None


@verb
@CACHE
@JSON
def recover(cache: str, as_json: bool) -> None:
    """Publish what a writer that was killed has left; the cache may still be incomplete."""
    from featcache import inspect
    from featcache._checks import directory
    from featcache.writing import edit

    path = directory(cache, "a cache")
    before = inspect.info(path)
    edit.recover(path)
    after = inspect.info(cache)
    if as_json:
        counts = {"before": before["utterances"], "utterances": after["utterances"]}
        print_json("recover", {"path": after["path"], **counts, "state": after["state"]})
    else:
        say(
            f"{shown(cache)}: {counted(_utterances(after), 'utterance')}, "
            f"{_utterances(after) - _utterances(before):,} more than before, {after['state']}"
        )


def _utterances(told: Told) -> int:
    return int(told["utterances"] or 0)


@verb
@CACHE
@click.option("--dry-run", is_flag=True, help="Tell what is damaged, and change nothing.")
@click.option(
    "--list",
    "file",
    metavar="FILE",
    type=click.File("w", encoding="utf-8"),
    help="Write the ids that are lost, one a line.",
)
@JSON
def repair(cache: str, dry_run: bool, file: IO[str] | None, as_json: bool) -> None:
    """Save all utterances whose bytes are intact; damaged files are set aside, none is deleted.

    Exit code 1: something is lost.
    """  # fmt: skip
    from featcache.store import repair as repaired

    told = repaired(cache, dry_run=dry_run)
    pending = None
    with contextlib.suppress(FeatcacheError):  # what is damaged cannot tell of it
        pending = tell_pending(opened(cache))
    if file is not None:
        file.writelines(f"{id}\n" for id in told.lost_ids)
    if as_json:
        content: dict[str, Any] = {
            "path": str(Path(cache).absolute()),
            "done": told.done,
            "saved": told.saved,
            "lost": [asdict(array) for array in told.lost],
            "unnamed": told.unnamed,
            "unpublished": pending,
            "elsewhere": [{"container": e.container, "pages": e.pages} for e in told.elsewhere],
        }
        for name in ("rebuilt", "annotations", "set_aside", "left"):
            content[name] = getattr(told, name)
        print_json("repair", content)
    else:
        _print_repair(cache, told)
    if told.lost or told.unnamed or told.annotations:
        end(NO)


def _print_repair(cache: str, told: Repair) -> None:
    if told.is_whole:
        say(str(told), fg="green")
        try:
            opened(cache).opened.check_collected("repair")
        except CacheError as error:  # then nobody knows whether its bytes are whole
            hint(in_words(str(error)))
        return
    would = "" if told.done else "would be "
    lost = len(told.lost_ids) + told.unnamed
    say(f"{counted(told.saved, 'utterance')} {would}saved, {lost:,} lost", bold=True)
    for id in told.lost_ids[:_LISTED]:
        features = ", ".join(array.feature for array in told.lost if array.id == id)
        say(f"  {click.style(shown(id), fg='cyan')} {shown(features)}")
    if len(told.lost_ids) > _LISTED:
        say(f"  and {len(told.lost_ids) - _LISTED:,} more (--list FILE has all)")
    words = {"rebuilt": "made anew", "set_aside": "set aside", "annotations": "values lost of"}
    for name, word in words.items():
        for each in getattr(told, name):
            say(f"  {would}{word}: {shown(each)}")
    for sentence in told.left:
        say(f"  {shown(sentence)}", fg="yellow")


@verb
@CACHE
@click.argument("ids", metavar="ID...", nargs=-1)
@click.option(
    "--ids", "file", metavar="FILE", type=click.File(encoding="utf-8"), help="An id a line."
)
@WHERE
@_YES
@JSON
def delete(
    cache: str,
    ids: tuple[str, ...],
    file: IO[str] | None,
    where: tuple[str, ...],
    yes: bool,
    as_json: bool,
) -> None:
    """Delete utterances, after asking: ids, those of a file, or those that a comparison finds.

    Their bytes stay in the files until `featcache compact`.
    """
    from featcache.cli.where import matching

    if (bool(ids), file is not None, bool(where)).count(True) != 1:
        raise click.UsageError("give ids, or --ids FILE, or --where EXPR")
    whole = opened(cache)
    chosen = list(matching(whole, where)) if where else list(ids or _lines(file or ()))
    if not chosen:
        hint("there is nothing to delete")
        end(NO)
    named = ", ".join(map(repr, chosen[:_NAMED])) + ", ..." * (len(chosen) > _NAMED)
    _ask(f"delete {len(chosen):,} of {counted(len(whole), 'utterance')} ({named})?", yes=yes)
    whole.delete(chosen)
    if as_json:
        print_json("delete", {"path": str(whole.path), "deleted": len(chosen), "left": len(whole)})
    else:
        say(f"deleted {counted(len(chosen), 'utterance')}, {len(whole):,} are left")


def _lines(file: Iterable[str]) -> Iterator[str]:
    return (id for line in file if (id := line.rstrip("\r\n")))


@verb
@CACHE
@JSON
def collect(cache: str, as_json: bool) -> None:
    """Read the sources of an adopted cache once: it has checksums and statistics then."""
    whole = opened(cache)
    whole.collect()
    if as_json:
        print_json("collect", {"path": str(whole.path), "bytes": whole.nbytes})
    else:
        say(f"{shown(cache)}: {counted(len(whole), 'utterance')}, {bytes_text(whole.nbytes)}")


@verb
@CACHE
@click.option("--dry-run", is_flag=True, help="Tell what it would do, and do nothing.")
@click.option("--drop-tags", is_flag=True, help="Take away tags that hold what was deleted.")
@JSON
def compact(cache: str, dry_run: bool, drop_tags: bool, as_json: bool) -> None:
    """Rewrite what holds deleted utterances, and small parts; their bytes are gone then."""
    whole = opened(cache)
    before = _stored(whole)
    if not dry_run:
        whole.compact(drop_tags=drop_tags)
    after = _stored(whole)
    freed = before["spare_bytes"] if dry_run else before["file_bytes"] - after["file_bytes"]
    if as_json:
        content = {"path": str(whole.path), "dry_run": dry_run, "freed_bytes": freed}
        print_json("compact", {**content, "deleted": before["deleted"], "parts": after["parts"]})
    elif dry_run:
        deleted = counted(before["deleted"], "deleted or replaced utterance")
        say(
            f"{counted(before['parts'], 'part')} with {deleted}; about "
            f"{bytes_text(max(freed, 0))} would be freed"
        )
    else:
        say(f"{bytes_text(max(freed, 0))} freed, {counted(after['parts'], 'part')}")


def _stored(cache: Cache) -> dict[str, int]:
    """Return what a cache has in its files, and how much of it no utterance has."""
    sets = cache.opened.sets.values() or (cache.opened,)
    parts = [part for each in sets for part in each.manifest.parts if part.adopted is None]
    deleted = sum(part.tombstones.rows for part in parts if part.tombstones is not None)
    sizes = sum(int(each.index.containers.sizes.sum()) for each in sets)
    arrays = sum(int(f.nbytes.sum()) for each in sets for f in each.index.features.values())
    spare = sizes - arrays if deleted else 0
    return {"parts": len(parts), "deleted": deleted, "file_bytes": sizes, "spare_bytes": spare}


@verb
@CACHE
@click.argument("name", required=False)
@click.option("--delete", is_flag=True, help="Take the name away.")
@JSON
def tag(cache: str, name: str | None, delete: bool, as_json: bool) -> None:
    """Give the current generation the name NAME, or list the names that there are.

    CACHE@NAME opens it for ever, whatever is changed.
    """
    if delete and name is None:
        raise click.UsageError("--delete takes the NAME of a tag")
    whole = opened(cache)
    if name is not None and delete:
        whole.untag(name)
    elif name is not None:
        whole.tag(name)
    if as_json:
        print_json("tag", {"path": str(whole.path), "tags": whole.tags})
    elif name is None:
        rows = [[each, str(number)] for each, number in whole.tags.items()]
        print_table(["tag", "generation"], rows, right=["generation"])
    elif delete:
        say(f"tag {shown(name)} is taken away")
    else:
        say(f"tag {shown(name)}: generation {whole.tags[name]}")


@verb
@CACHE
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--unknown",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    help="skip: pass over ids that are not in the cache.",
)
@JSON
def annotate(cache: str, file: str, unknown: Literal["raise", "skip"], as_json: bool) -> None:
    """Give utterances the values of FILE (.csv, .tsv, .jsonl) with a column "id".

    An empty cell takes a value away; what FILE does not name stays.
    """  # fmt: skip
    whole = opened(cache)
    before = set(whole.annotations)
    whole.annotate(file, unknown=unknown)
    if as_json:
        kinds = {name: whole.annotation(name).kind for name in whole.annotations}
        print_json("annotate", {"path": str(whole.path), "annotations": kinds})
        return
    new = [name for name in whole.annotations if name not in before]
    told = f", new: {', '.join(new)}" if new else ""
    say(shown(f"annotations: {', '.join(whole.annotations) or 'none'}{told}"))


@verb
@CACHE
@click.option(
    "--fingerprint",
    metavar="FILE",
    required=True,
    type=click.File(encoding="utf-8"),
    help="JSON of what it counts as made from.",
)
@_YES
@JSON
def accept(cache: str, fingerprint: IO[str], yes: bool, as_json: bool) -> None:
    """Take the cache for made from FILE, after showing what differs, and asking.

    For changes that compute the same values, as somebody has to know. Exit code 1: it was not
    accepted.
    """  # fmt: skip
    from featcache.format import cache_fingerprint, differences
    from featcache.writing.session import accept as accepted

    wanted = json_of(fingerprint)
    if not isinstance(wanted, dict):
        raise ConfigError("a fingerprint is a JSON object")
    whole = opened(cache)
    if whole.opened.sets:
        raise CacheError(
            f"features of cache {str(whole.path)!r} were added later, each with what it was made "
            f"from; name the directory of one, such as {str(whole.path / 'sets')!r}/NAME"
        )
    manifest = whole.opened.manifest
    wanted.pop("features", None)  # how they are stored cannot be accepted
    content = cache_fingerprint(manifest.declared, wanted)
    changed = [str(each) for each in differences(manifest.fingerprint, content)]
    if changed:
        _print_changed(changed)
        _ask(f"does {whole.path} hold what this computes?", yes=yes)
        accepted(whole.path, manifest.declared, wanted)
    if as_json:
        print_json("accept", {"path": str(whole.path), "accepted": changed})
    else:
        say(f"{shown(cache)}: {'accepted' if changed else 'nothing differs'}")


def _print_changed(changed: Sequence[str]) -> None:
    for line in changed:
        say(f"  {shown(line)}", fg="yellow", err=True)
