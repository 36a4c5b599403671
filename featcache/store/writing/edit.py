"""Edits of a published cache: utterances deleted, generations tagged, parts rewritten.

Each takes the cache's lock, brings back first what a killed writer had committed, and is durable
when it returns. The declarations are those of the cache itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from featcache._checks import are_listed
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import (
    CacheError,
    ConfigError,
    CorruptCacheError,
    KeyNotFoundError,
    UnknownNameError,
    nearest,
)
from featcache.store.format.disk_errors import explained, reading
from featcache.store.format.feature_sets import set_directories, set_names
from featcache.store.format.kept_files import of_role, read_kept
from featcache.store.format.lock import WriterLock
from featcache.store.format.manifest import (
    PARTS,
    Manifest,
    check_writable,
    generation_number,
    manifest_file,
    read_manifest,
)
from featcache.store.format.named_generations import tags_of
from featcache.store.format.part import SEAL
from featcache.store.format.roots import NO_ROOTS, Roots
from featcache.store.reading.generation import Generation
from featcache.store.writing.changes import Changes
from featcache.store.writing.collect import collect_parts
from featcache.store.writing.compact import compact as compact_parts
from featcache.store.writing.compact import refused_tags
from featcache.store.writing.completeness import Outcome
from featcache.store.writing.forgotten_lines import forget_lines
from featcache.store.writing.new_sets import remove_left
from featcache.store.writing.session import WriteSession
from featcache.store.writing.together import write_together

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_MOST_TOLD = 5
_MOST_LOOKED_FOR = 100  # ids in a probe: each look goes through all of it


def delete(cache: Path, ids: Iterable[str], roots: Roots = NO_ROOTS) -> None:
    """Delete utterances, durably, from all feature sets at once; they are no more expected.

    Those that have failed are forgotten, and so are lines that name one of them in files of those
    who work in the cache. A probe that names one goes, too. Raises `KeyNotFoundError`, and deletes
    nothing, if one is neither stored nor has failed.
    """
    if not are_listed(ids):
        raise ConfigError(f"the ids are a list of strings, not {ids!r}")
    listed = list(dict.fromkeys(ids))
    with ExitStack() as stack:
        sessions = [stack.enter_context(_editing(directory)) for directory in _directories(cache)]
        failed = {each.path: {*Generation(each.path).failed} for each in sessions}
        missing = [
            id
            for id in listed
            if not isinstance(id, str)
            or all(id not in each.parts and id not in failed[each.path] for each in sessions)
        ]
        if missing:
            told = ", ".join(map(repr, missing[:_MOST_TOLD]))
            raise KeyNotFoundError(
                f"of {len(listed)} utterances to delete, {len(missing)} are not in cache "
                f"{str(cache)!r}: {told}{', ...' * (len(missing) > _MOST_TOLD)}; none was deleted"
            )
        after: dict[Path, Manifest] = {}
        for session in sessions:
            place, its = session.path, failed[session.path]
            mine = [id for id in listed if id in session.parts]
            if mine or not its.isdisjoint(listed):
                manifest = read_manifest(place)
                outcome = _without(manifest, its, listed)
                probes = _probes(place, manifest, listed)
                changes = Changes(deleted=mine, files=probes, roots=roots)
                after[place] = session.without(outcome, changes)
        for place in after:
            forget_lines(place, listed)
        with explained(cache, lambda: "nothing was deleted"):
            write_together(cache, after)


def compact(cache: Path, *, drop_tags: bool) -> None:
    """Rewrite what holds deleted utterances, and small parts, as `Cache.compact` says."""
    directories = _directories(cache)
    if cache not in directories:
        remove_left(cache)  # the first names of files that are in a set now
    with ExitStack() as stack:
        sessions = [stack.enter_context(_editing(directory)) for directory in directories]
        manifests = {each.path: read_manifest(each.path) for each in sessions}
        held = {tag for each in manifests.items() for tag in refused_tags(*each, drop_tags)}
        if held and len(sessions) > 1:  # a version goes with all its sets
            having = {each: manifests[each] for each in manifests if held & {*manifests[each].tags}}
            write_together(cache, {each: _untagged(having[each], held) for each in having})
        for session in sessions:
            compact_parts(session.path, session.features, read_manifest(session.path))
    if cache not in directories and (left := sorted((cache / PARTS).glob("*"))):
        raise CacheError(
            f"cache {str(cache)!r} is compacted, but {', '.join(map(repr, map(str, left)))} belong "
            "to none of its feature sets, and may hold what was deleted; remove them"
        )


def collect(cache: Path, roots: Roots) -> None:
    """Collect checksums and statistics of adopted parts, as `Cache.collect` says."""
    with ExitStack() as stack:
        for directory in _directories(cache):
            if not read_manifest(directory).is_collected:
                session = stack.enter_context(_editing(directory))
                collect_parts(directory, session.features, read_manifest(directory), roots)


def tags(cache: Path) -> dict[str, int]:
    """Return the tags of a cache, and the numbers of the generations that they name."""
    numbers: dict[str, int] = {}
    for directory in _directories(cache):
        for tag, name in tags_of(directory).items():
            numbers[tag] = numbers.get(tag, 0) + generation_number(name)
    return numbers


def tag(cache: Path, name: str, generations: Collection[str]) -> None:
    """Give a generation a name, or one of each feature set; it stays until that is taken away."""
    if not (isinstance(name, str) and _TAG.fullmatch(name)):
        raise ConfigError(
            f"the name of a tag has 1 to 64 letters, digits, '_', '-' and '.', and begins with "
            f"none of the last two, not {name!r}"
        )
    with ExitStack() as stack:
        places = {each: stack.enter_context(_locked(each)) for each in _directories(cache)}
        tagged = {
            place: generation
            for place, manifest in places.items()
            for generation in generations
            if generation == manifest.name or _is_whole(place, generation)
        }
        for place, manifest in places.items():
            known = manifest.tags.get(name)
            if known not in (None, tagged.get(place)):
                raise ConfigError(
                    f"tag {name!r} of cache {str(cache)!r} names generation {known!r} already; "
                    "untag that first, or give another name"
                )
        if gone := [each for each in generations if each not in tagged.values()]:
            raise CacheError(
                f"generation {gone[0]!r} of cache {str(cache)!r} is no longer there; refresh() "
                "the cache and tag the one that is"
            )
        given = {
            place: replace(places[place], tags={**places[place].tags, name: generation})
            for place, generation in tagged.items()
            if name not in places[place].tags
        }
        write_together(cache, given)


def untag(cache: Path, name: str) -> None:
    """Take a name away from a generation, and remove what only that kept."""
    with ExitStack() as stack:
        places = {each: stack.enter_context(_locked(each)) for each in _directories(cache)}
        having = [place for place, manifest in places.items() if name in manifest.tags]
        if not having:
            known = {tag for manifest in places.values() for tag in manifest.tags}
            raise UnknownNameError(
                f"cache {str(cache)!r} has no tag {name!r}; {nearest(name, sorted(known))}"
            )
        write_together(cache, {place: _untagged(places[place], [name]) for place in having})


def _untagged(manifest: Manifest, names: Collection[str]) -> Manifest:
    tags = {tag: each for tag, each in manifest.tags.items() if tag not in names}
    return replace(manifest, tags=tags)


def _directories(cache: Path) -> list[Path]:
    """Return the directories of all feature sets, also of those not complete; or the cache's."""
    with reading(cache):
        names = set_names(cache)
        return [cache] if names is None else list(set_directories(cache, names).values())


@contextmanager
def _editing(cache: Path) -> Iterator[WriteSession]:
    """Write to a cache as it is declared."""
    with reading(cache):
        manifest = read_manifest(cache)
    if manifest.building > manifest.build:
        raise CacheError(
            f"cache {str(cache)!r} is being overwritten: finish that (overwrite=True, with what it "
            "is made from), or give it up by opening a CacheWriter without overwrite"
        )
    declared = {
        name: FeatureStorageConfig.from_json(each) for name, each in manifest.features.items()
    }
    made_from = {key: each for key, each in manifest.fingerprint.items() if key != "features"}
    owner = _Owner()
    session = WriteSession(owner, cache, declared, made_from, False)
    try:
        with explained(cache, lambda: "what is published stays as it is"):
            yield session
    finally:
        session.close(False, publish=False)


class _Owner:
    """An edit, which a session belongs to until it ends."""


@contextmanager
def _locked(cache: Path) -> Iterator[Manifest]:
    """Hold a cache's lock for a change of its manifest alone."""
    with explained(cache, lambda: "the cache is as it was"):
        lock = WriterLock(cache)
        try:
            manifest = read_manifest(cache)
            check_writable(cache, manifest)
            yield manifest
        finally:
            lock.release()


def _is_whole(cache: Path, generation: str) -> bool:
    """Tell whether a generation's index and parts are there."""
    with suppress(CacheError):
        manifest = read_manifest(cache, manifest_file(generation))
        seals = (cache / PARTS / part.name / SEAL for part in manifest.parts)
        return all(path.exists() for path in (cache / manifest.index, *seals))
    return False


def _without(manifest: Manifest, failed: Collection[str], ids: Collection[str]) -> Outcome:
    """Say what is expected of a cache without some ids: the others.

    Where some were still to come, which ones they are is not known.
    """
    if manifest.expected is None or not manifest.complete:
        return Outcome(manifest.complete, forgotten=ids)
    return Outcome(complete=True, expected=tuple({*failed}.difference(ids)))


def _probes(cache: Path, manifest: Manifest, ids: Collection[str]) -> list[str]:
    """Return the files of probes that may name one of some ids: their content is not known here."""
    found: list[str] = []
    for files in (manifest.files, manifest.building_files):
        data: bytes | None = None
        with suppress(CorruptCacheError):
            data = read_kept(cache, files, "probe")
        if data is None or len(ids) > _MOST_LOOKED_FOR or any(map(_Names(data), ids)):
            found += of_role(files, "probe")
    return found


class _Names:
    """Tells whether bytes name an id, as JSON has it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __call__(self, id: str) -> bool:
        forms = (json.dumps(id), json.dumps(id, ensure_ascii=False))
        return any(form.encode() in self._data for form in forms)
