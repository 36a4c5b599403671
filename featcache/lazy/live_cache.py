"""A cache that others are filling: what is published and beside it, and whether it is stale."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from featcache._tensors import ArrayLike
from featcache.errors import (
    CacheError,
    CorruptCacheError,
    FeatureError,
    NotACacheError,
    StaleCacheError,
    describe,
    indented,
)
from featcache.extraction.checking import RunRecord, are_code_or_settings
from featcache.extraction.destination import is_refused
from featcache.extraction.process_part import WhileFilling
from featcache.format import (
    ADOPTED,
    NAME,
    BuildState,
    Difference,
    Manifest,
    Stamps,
    are_by_other_rules,
    are_rules_alone,
    canonical,
    committed_builds,
    differences,
    reading,
    set_of,
)
from featcache.interface import Array
from featcache.lazy.arguments import Call
from featcache.lazy.results import ONE, Features, Results, as_read_back, text_bytes
from featcache.reading import Generation, Unpublished, joined_mapping, note_compared
from featcache.writing.arrays import check_features
from featcache.writing.part_writer import PartWriter

if TYPE_CHECKING:
    from featcache.staleness.probe import ProbeRows
    from featcache.staleness.provenance import Provenance
    from featcache.staleness.watch import Watch


# What results are made from.


@dataclass(frozen=True)
class MadeFrom:
    """The fingerprint of results, found out when it is first asked for.

    It is kept for this process: what computing leaves behind is no part of it.

    Args:
        find: finds what the results are made with; several where data sets compute otherwise.
        given: what else they are made from.
    """

    find: Callable[[], Sequence[Provenance]]
    given: Mapping[str, object]
    _found: list[Watch] = field(default_factory=list, init=False, repr=False, compare=False)

    def __call__(self) -> Mapping[str, object]:
        """Return it, as plain data."""
        return self.watch().fingerprint

    def watch(self) -> Watch:
        """Return what compares the results' making with how it was."""
        found = next(iter(self._found), None)  # another thread may clear them
        if found is None:
            from featcache.staleness.watch import Watch

            found = Watch(self.find(), self.find, self.given)
            self._found.append(found)
        return found

    def record(self, path: Path) -> RunRecord:
        """Return the record of what the results are made with, of a cache and of now."""
        return RunRecord(path, self._witnesses)

    def _witnesses(self) -> Mapping[str, object]:
        from featcache.staleness.witnesses import witnesses

        found = [witnesses(each, each.extractor) for each in self.find()]
        return joined_mapping({str(number): each for number, each in enumerate(found)})

    def begin(self) -> None:
        """Find it out anew if it has changed since; when a share begins."""
        for found in [*self._found]:
            with found.deciding():
                if found.differences().lines:
                    self._found.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.find, self.given)


# Caches that were made from something else than is declared now: told, and accepted if wanted.

_PATIENCE_S = 60.0  # for another process that has the lock


def changed_since(
    manifest: Manifest, features: Features | None, fingerprint: Mapping[str, object]
) -> list[Difference]:
    """Return in what a cache differs from what is declared now; without features, as they are."""
    expected = {**fingerprint, "features": manifest.fingerprint["features"]}
    if features is not None:
        expected["features"] = {name: each.to_json() for name, each in features.items()}
    if "results" in manifest.fingerprint:  # of the first result
        expected["results"] = manifest.fingerprint["results"]
    return differences(manifest.fingerprint, canonical(expected))


CURE = "remove it to compute everything again, or give another directory"


def stale(
    path: Path, manifest: Manifest, changed: Sequence[Difference], record: RunRecord, why: str = ""
) -> StaleCacheError:
    """Return the error of a cache that differs from what is declared now."""
    told = [*map(str, changed), *record.since()]
    if may_compute_the_same(manifest, changed):
        told += record.changed_code()
        why = why or "if its results are the same, accept=True keeps the cache"
    text = f"cache {str(path)!r} was made from something else than is declared now:"
    return StaleCacheError(f"{text}{indented(told)}\n{CURE}{why and f'; {why}'}")


def may_compute_the_same(manifest: Manifest, changed: Sequence[Difference]) -> bool:
    """Whether differences are ones of code and settings, or the cache is an adopted one."""
    if ADOPTED in manifest.fingerprint:  # nothing is known of what made it
        return not any(each.path[0] == "features" for each in changed)
    return are_code_or_settings(changed)


def accept_if_same(
    path: Path,
    names: Sequence[str],
    features: Features | None,
    made_from: MadeFrom,
    id: str,
    compute: Callable[[], object],
    *,
    is_asked: bool,
) -> None:
    """Take a cache for one of the function of now, if that computes an utterance of it to the bit.

    Unless that `is_asked`, only a cache whose fingerprint other rules made, of another version of
    featcache. Raises `StaleCacheError` if the utterance is another one, if the cache does not hold
    it, and where more than code and settings has changed.
    """
    place = set_of(path, names[0])
    with reading(place):
        try:
            generation = Generation.at(place)
        except NotACacheError:
            return
        manifest = generation.manifest
        changed = changed_since(manifest, features, made_from())
        if not (changed and manifest.rows and (is_asked or are_by_other_rules(changed))):
            return  # where it is another one, it is refused when it is opened
        record = made_from.record(place)
        refused = partial(stale, place, manifest, changed, record)
        if not may_compute_the_same(manifest, changed):
            raise refused("accept=True is for code and settings alone")
        results = manifest.fingerprint.get("results")
        if not are_rules_alone(changed):
            results = _compared(generation, id, compute(), refused).to_json()
    of_now = {**made_from(), **({} if results is None else {"results": results})}
    try:
        record.accept(manifest.declared, of_now, changed, patience_s=_PATIENCE_S)
    except OSError as error:
        if is_asked or not is_refused(error):
            raise


def _compared(
    generation: Generation, id: str, value: object, refused: Callable[[str], StaleCacheError]
) -> Results:
    manifest, declared = generation.manifest, generation.manifest.declared
    row = generation.index.find(id)
    if row < 0:
        other = generation.index.id(0)
        raise refused(f"an utterance is compared, and {id!r} is not stored; read {other!r} first")
    content = manifest.fingerprint.get("results")
    results = Results.from_json(content, list(declared))
    if content is None:
        results = Results.of(id, value, list(declared))
    arrays, texts = results.parted(results.arrays(id, value))
    check_features(id, arrays, declared)
    changed = [name for name, text in texts.items() if generation.annotation(name)[row] != text]
    for name, feature in declared.items():
        stored = generation.features[name].read(row)
        now = as_read_back(id, arrays[name], feature)
        if stored.shape != now.shape or stored.tobytes() != now.tobytes():
            changed.append(name)
    if changed:
        raise refused(f"utterance {id!r}, feature {changed[0]!r}: computed now it is another one")
    return results


# A cache that others are filling: what is published, and what lies in parts beside it.

ABSENT = object()
_TRIES = 3  # of what another publisher may take away meanwhile


class LiveCache:
    """The current generation of a cache, and what is written beside it.

    `look` is called by one thread at a time.

    Attributes:
        path: the cache directory, or that of the feature set in it.
        features: the declarations, by name.
        results: the form of the results that they are of.
        has_form: whether that was recorded; a cache that others filled says nothing of it.
    """

    def __init__(self, path: Path, generation: Generation) -> None:
        manifest = generation.manifest
        self.path = path
        self.features: Features = manifest.declared
        made_from = manifest.fingerprint
        self.results = Results.from_json(made_from.get("results"), list(self.features))
        self.has_form = made_from.get("results") is not None
        self._made_from = made_from
        self._converters = self.results.converters(self.features)
        self._is_one = self.results.form == ONE
        self._texts = self.results.texts
        self._seen = _stamp(path)
        self._show(generation)
        self._unpublished = Unpublished(path, self.features)
        self._unpublished.look(manifest)

    @classmethod
    def opened(
        cls, path: Path, names: Sequence[str], features: Features | None, made_from: MadeFrom
    ) -> Self | None:
        """Open a cache; None if there is none, or one without anything, made from something else.

        Raises `StaleCacheError`, with the differences, for one of another function or other
        declarations.
        """
        place = set_of(path, names[0])
        with reading(place):
            try:
                generation = Generation.at(place)
            except NotACacheError:
                return None
            manifest = generation.manifest
            changed = changed_since(manifest, features, made_from())
            if changed and not (manifest.rows or committed_builds(place)):
                return None
        if not are_rules_alone(changed):
            raise stale(place, manifest, changed, made_from.record(place))
        note_compared(place, manifest)
        return cls(place, generation)

    def read(self, id: str, entry: int) -> object:
        """Return a published result of arguments with this entry; `ABSENT` if there is none."""
        _, find, columns, stamps, entry_of = self._shown
        row = find(id)
        if row < 0 or (stamps is not None and entry_of(row) != entry):
            return ABSENT
        if self._is_one:
            arrays, convert = columns[0]
            return convert(arrays.read(row))
        return self.results.of_values([convert(arrays.read(row)) for arrays, convert in columns])

    def published(self, call: Call) -> object:
        """Return the result of a published utterance; `ABSENT` if there is none.

        Raises `StaleCacheError` if it was computed with other arguments than those of the call.
        """
        # at once: another thread may show a newer generation
        generation, find, columns, stamps, entry_of = self._shown
        row = find(call.id)
        if row < 0:
            return ABSENT
        if stamps is not None and entry_of(row) != call.entry:
            call.check(Stamps(stamps.input.item(row), entry_of(row)), self.path)
        try:
            values = [convert(arrays.read(row)) for arrays, convert in columns]
        except CorruptCacheError:
            # small parts became one since, twice: the files of this generation may be gone
            now = Generation.at(self.path)
            if now.manifest.write_id == generation.manifest.write_id:
                raise
            self._show(now)
            return self.published(call)
        return self.results.of_values(values)

    def unpublished(self, call: Call) -> object:
        """Return the result of an utterance that is stored, and not published; or `ABSENT`."""
        found = self._unpublished.read(call.id)
        if found is None:
            return ABSENT
        call.check(self._unpublished.stamps(call.id), self.path)
        if self._texts:
            texts = self._unpublished.annotations(call.id, self._texts)
            found |= {name: text_bytes(call.id, name, text) for name, text in texts.items()}
        return self.result_of(found)

    def result_of(self, arrays: Mapping[str, Array]) -> object:
        """Return arrays, as they are stored and in the user's shape, as a result."""
        return self.results.of_values([convert(arrays[name]) for name, convert in self._converters])

    @property
    def has_left(self) -> bool:
        """Whether there are parts beside the generation, of writers that live or died."""
        return bool(self._unpublished.parts)

    @property
    def is_overwritten(self) -> bool:
        """Whether somebody overwrites the cache, or has given that up: what is new waits for it."""
        return self._shown[0].manifest.state is BuildState.ASIDE

    def look(self) -> None:
        """Find out what others have published and written since the last look.

        Raises `StaleCacheError` if the cache was made anew from something else.
        """
        seen = _stamp(self.path)
        if seen != self._seen:
            with reading(self.path):
                generation = Generation.at(self.path)
            if changed := differences(self._made_from, generation.manifest.fingerprint):
                raise StaleCacheError(
                    f"cache {str(self.path)!r} was made anew meanwhile, from something else than "
                    f"this process computes with (was: here, now: there):{indented(changed)}\n"
                    "give each of the two a directory of its own, or remove the cache and start "
                    "one of them"
                )
            self._show(generation)
            self._seen = seen
        with reading(self.path):
            self._unpublished.look(self._shown[0].manifest)

    def _show(self, generation: Generation) -> None:
        columns = [
            (_Texts(generation, name) if name in self._texts else generation.features[name], each)
            for name, each in self._converters
        ]
        index = generation.index
        entry_of = _no_entry if index.stamps is None else index.stamps.entry.item
        self._shown = generation, index.find, columns, index.stamps, entry_of

    def part_writer(self) -> PartWriter:
        """Return a writer of a part of its own, which needs no lock of the cache."""
        made_from = {key: each for key, each in self._made_from.items() if key != "features"}
        left = _TRIES
        while True:
            try:
                writer = PartWriter(self.path, self.features, made_from)
                writer.forget()  # closed by who has it
                return writer
            except StaleCacheError:
                raise
            except CacheError:  # others may publish, and take away what was named before
                left -= 1
                if not left:
                    raise


@dataclass(frozen=True, slots=True)
class _Texts:
    """An annotation of a generation, read like a feature."""

    generation: Generation
    name: str

    def read(self, row: int) -> Array:
        """Return the UTF-8 bytes of a row's text; raises `CacheError` if it was taken away."""
        text, id = self.generation.annotation(self.name)[row], self.generation.index.id(row)
        if text is None:
            raise CacheError(
                f"utterance {id!r} of cache {str(self.generation.cache_path)!r} has no text "
                f"{self.name!r} any more, an annotation that its function has computed; annotate "
                "it, or delete it to have it computed again"
            )
        return text_bytes(id, self.name, text)


def _no_entry(row: int) -> int:
    return 0


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes with each publish."""
    try:
        found = os.stat(path / NAME)  # noqa: PTH116  # each miss waits
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


# Results that are computed again: the first ones of a process, whether computed or read.
#
# A result that is another one each time is refused, since a cache would freeze it: the first one
# that a process computes is computed again, and further ones while the function draws from the
# global random generators, which are left as one computing leaves them. A stored result that is
# another one now is refused, since the cache is stale: the first one that a process reads is
# computed again, and up to three more while three seconds last; so are those of a data set whose
# entries have changed.

_MOST = 8  # results that are computed twice
_LAST_BITS = 1e-6  # of single precision

Taken = Callable[[str, object], Mapping[str, ArrayLike]]  # a result as arrays by feature
PROBE = 4  # stored results that are computed again
PROBE_S = 3.0  # after so many seconds no further one is
_log = logging.getLogger("featcache")


class StoredAgain:
    """Computes stored results again, the first ones that a process reads.

    Attributes:
        is_over: whether nothing more is computed again.
        told: how the first one that is another now differs; empty while there is none.
    """

    def __init__(self) -> None:
        self._left = PROBE
        self._spent_s = 0.0
        self._at_it = threading.Lock()  # held by one thread; the others read
        self.is_over = False
        self.told = ""

    def compare(self, call: Call, found: object, live: LiveCache) -> None:
        """Compare a stored result with what a call computes now."""
        if self.told or self.is_over or not self._at_it.acquire(blocking=False):
            return
        try:
            begin = time.monotonic()
            self.told = self._differs(call, found, live)
            if self.told and call.is_doubted:
                self.told += f"; its entry in the data set, or a file of {call.id!r}, has changed"
            self._spent_s += time.monotonic() - begin
            self._left -= 1
            enough = self._left <= 0 or self._spent_s >= PROBE_S
            self.is_over = not self.told and (self.is_over or enough)
        finally:
            self._at_it.release()

    def _differs(self, call: Call, found: object, live: LiveCache) -> str:
        from featcache.extraction.datasets import kept_random_state
        from featcache.extraction.probing import spreads_of, unlike_stored
        from featcache.staleness.probe import Probed, tolerance

        id, results = call.id, live.results
        stored, texts = results.parted(results.arrays(id, found))
        with kept_random_state():
            try:
                value = call.copied().compute()
            except Exception as error:  # a cache may outlive its recordings
                self.is_over = True
                _log.warning(
                    "cache %r: utterance %r cannot be computed again (%s): nothing tells whether "
                    "what is stored is still the same",
                    str(live.path), id, describe(error),
                )  # fmt: skip
                return ""
            now, now_texts = results.parted(results.arrays(id, value))
            alone = Probed({}, _copied(now))
        spreads = spreads_of({id: alone}, list(live.features))
        limit = tolerance("fp32", same_device=True)
        unlike = unlike_stored(id, stored, alone, spreads, limit, live.features)
        told = [f"{each.feature!r} of {id!r} {each.told()}" for each in unlike]
        told += [
            f"{name!r} of {id!r} is {now_texts[name]!r:.60}, and {text!r:.60} is stored"
            for name, text in texts.items()
            if now_texts[name] != text
        ]
        return "; ".join(told)


class TwiceComputed:
    """Computes results, the first ones twice."""

    def __init__(self) -> None:
        self._left = _MOST
        self._at_it = threading.Lock()  # held by one thread: all draw from the same generators

    def compute(self, call: Call, taken: Taken, filling: WhileFilling) -> object:
        """Compute a call; raises `FeatureError` if the result is another one each time.

        Args:
            call: the call.
            taken: takes a result apart.
            filling: computes, and compares what that is done with before and after.
        """

        def compared(call: Call) -> object:
            return filling.compute(repr(call.id), call.compute)

        if self._left <= 0 or not self._at_it.acquire(blocking=False):
            return compared(call)
        try:
            value = self._compute_twice(call, taken, compared)
            filling.vouch()  # for others to see it at once
            return value
        finally:
            self._at_it.release()

    def _compute_twice(
        self, call: Call, taken: Taken, compared: Callable[[Call], object]
    ) -> object:
        from featcache.extraction.datasets import RandomState, kept_random_state

        again, before = call.copied(), RandomState.now()
        value = compared(call)
        steady = before.is_now()  # else what is drawn may count for the next result only
        first = _copied(taken(call.id, value))
        with kept_random_state():
            told = _unlike(call.id, first, _copied(taken(call.id, compared(again.copied()))))
            if told:
                before.put_back()
                third = _copied(taken(call.id, compared(again)))
                is_drawn = not steady and not _unlike(call.id, first, third)
                raise FeatureError(_refusal(call.id, told, is_drawn=is_drawn))
        self._left = 0 if steady else self._left - 1
        return value


def _refusal(id: str, told: str, *, is_drawn: bool) -> str:
    if is_drawn:
        return (
            f"utterance {id!r} comes out another way each time: {told}. The function draws from "
            "the global random generators, and a cache would keep one draw for ever: call eval() "
            "on its modules, leave augmentation to what comes behind the cache, or seed it by the "
            "id within the function (torch.manual_seed(zlib.crc32(id.encode())))"
        )
    return (
        f"utterance {id!r} comes out another way each time: {told}. The function has a random "
        "generator of its own, or changes something that it computes with, such as running "
        "statistics or its arguments: a cache would keep what depends on the order of the calls; "
        "make it a function of the utterance alone"
    )


def _copied(arrays: Mapping[str, ArrayLike]) -> dict[str, ProbeRows]:
    """Return copies, as functions may use their memory again; what is no number is left out."""
    from featcache.staleness.probe import as_rows

    found: dict[str, ProbeRows] = {}
    for name, array in arrays.items():
        with contextlib.suppress(TypeError):  # refused when it is stored
            found[name] = as_rows(array)
    return found


def _unlike(id: str, one: Mapping[str, ProbeRows], other: Mapping[str, ProbeRows]) -> str:
    """Return how two results differ, beyond the last bits; empty if they do not."""
    from featcache.staleness.probe import spread, tolerance, unlike

    if one.keys() != other.keys():
        return f"its features are {[*one]}, then {[*other]}"
    for name, before in one.items():
        array = before.array
        limit = tolerance("fp32", same_device=True)
        size = np.abs(array[np.isfinite(array)]).max(initial=0)
        found = unlike((id, name), before, other[name], spread([array]), limit, _LAST_BITS * size)
        if found is not None:
            return f"{name!r} {found.told()}"
    return ""
