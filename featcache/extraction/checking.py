"""Checking of a cache before it is filled: fingerprint, probe, and changes that are accepted."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import json
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

import torch

from featcache._cached import cached_property
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CacheError, StaleCacheError, indented
from featcache.extraction.datasets import IdNumbers, kept_random_state, tell_random
from featcache.extraction.destination import ChangedInputs, Destination, refusal_passed_over
from featcache.extraction.job import Job, RunOptions
from featcache.extraction.probing import (
    Computed,
    ProbeSource,
    again,
    cause_of,
    choice,
    new_probe,
    spreads_of,
    told,
    unlike_stored,
)
from featcache.format import (
    ABSENT,
    RULES,
    BuildState,
    Difference,
    Manifest,
    are_by_other_rules,
    are_rules_alone,
    cache_fingerprint,
    canonical,
    committed,
    differences,
    fingerprint_digest,
    read_building_file,
    read_kept,
    read_manifest,
)
from featcache.reading import ROLE, Generation, witnesses
from featcache.staleness.probe import Comparison, Probe, Probed, Unlike, compare, tolerance
from featcache.staleness.watch import DATA_SETS
from featcache.staleness.witnesses import changes
from featcache.store import Cache
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.session import accept, says_when

# The probe that a cache keeps: one for each build.

PROBE_ROLE = "probe"


def kept_probe(
    to: Destination,
    manifest: Manifest,
    fingerprint: Mapping[str, object],
    seed: int,
    options: RunOptions,
) -> Probe | None:
    """Return the probe of what a run will go on with; None if it begins anew, or none was kept.

    `manifest` is that of the cache.
    """
    if options.overwrite:
        given = (fingerprint, {"seed": seed, **fingerprint})
        same = {fingerprint_digest(cache_fingerprint(to.features, each)) for each in given}
        left = manifest.state is BuildState.ASIDE and manifest.building_fingerprint in same
        goes_on = left and any(True for _ in committed(to.path))
    else:
        goes_on = (options.resume or manifest.complete) and (
            manifest.rows > 0 or any(True for _ in committed(to.path))
        )
    return read_probe(to.path, manifest, building=options.overwrite) if goes_on else None


def keep_probe(writer: CacheWriter, probe: Probe) -> None:
    """Keep the probe of the build that is being written, in place of an earlier one."""
    writer.keep_file(PROBE_ROLE, probe.to_bytes())


def read_probe(cache: Path, manifest: Manifest, *, building: bool) -> Probe | None:
    """Return the probe of the cache that readers see, or of the build that is being written."""
    current = building or manifest.state is BuildState.CURRENT
    files = manifest.building_file(PROBE_ROLE) if current else manifest.files
    data = read_kept(cache, files, PROBE_ROLE)
    return None if data is None else Probe.from_bytes(data)


# The record that a cache keeps of what it was made with; it explains and never refuses.
#
# Kept as the file of role "made-from": witnesses (`featcache.staleness.witnesses`), and under
# "accepted" each change that was accepted later.

MOST_LINES = 12  # of changed code that an error shows
MOST_CHANGES = 8  # that an error names
_CONTEXT = 1


class RunRecord:
    """The record of a cache, and that of this run.

    Args:
        path: the cache directory.
        make: makes the record of this run.
    """

    def __init__(self, path: Path, make: Callable[[], Mapping[str, object]]) -> None:
        self._path, self._make = path, make

    @cached_property
    def now(self) -> Mapping[str, object]:
        """The record of this run."""
        return self._make()

    @cached_property
    def kept(self) -> Mapping[str, object]:
        """The record that the cache keeps; empty where it keeps none that can be read."""
        with contextlib.suppress(OSError):
            return witnesses(Generation.at(self._path))
        return {}

    def keep(self, writer: CacheWriter) -> None:
        """Keep the record of this run with a cache that is begun, or has none."""
        if read_building_file(writer.path, ROLE) is None:
            writer.keep_file(ROLE, _as_json(self.now))

    def accept(
        self,
        features: Mapping[str, FeatureStorageConfig],
        fingerprint: Mapping[str, object],
        changed: Sequence[Difference],
        *,
        patience_s: float = 0.0,
    ) -> None:
        """Take a fingerprint for that of the cache, and add to its history what has changed.

        Whoever calls this has seen that both compute the same.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        earlier = cast(list[object], self.kept.get("accepted", []))
        history = [*earlier, {"when": now, "changes": [*map(str, changed)]}]
        files = {ROLE: _as_json({**self.now, "accepted": history})}
        if accept(self._path, features, fingerprint, files=files, patience_s=patience_s):
            _log.warning("cache %r: accepted %s", str(self._path), "; ".join(map(str, changed)))

    def changes(self) -> list[str]:
        """Return what has changed since the cache was made, the most telling first."""
        return changes(self.kept, self.now) if self.kept else []

    def since(self) -> list[str]:
        """Return a line that tells what has changed since the cache was made; none if nothing."""
        changes = self.changes()
        more = f"; and {len(changes) - MOST_CHANGES} more" if len(changes) > MOST_CHANGES else ""
        return [f"changed since: {'; '.join(changes[:MOST_CHANGES])}{more}"] if changes else []

    def changed_code(self) -> list[str]:
        """Return the first lines of code that has changed, as `diff -u` prints them."""
        was, now = (
            cast(Mapping[str, str], each.get("sources", {})) for each in (self.kept, self.now)
        )
        lines: list[str] = []
        for name in sorted(was.keys() & now.keys()):
            lines += _changed(name, was[name].splitlines(), now[name].splitlines())
        more = len(lines) - MOST_LINES
        return [*lines[:MOST_LINES], *([f"... and {more} lines more"] if more > 0 else [])]


def _as_json(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, indent=1).encode()


def _changed(name: str, was: Sequence[str], now: Sequence[str]) -> list[str]:
    found = list(difflib.unified_diff(was, now, lineterm="", n=_CONTEXT))
    return [name, *(line for line in found[2:] if not line.startswith("@@"))] if found else []


# Changes of code and settings that compute the same bits: a user may accept them for a cache.

# sections of a fingerprint that are code and settings; weights, declarations but for the times of
# frames, and what the user names by himself cannot be accepted
_SECTIONS = ("source", "constants", "hparams", "attributes", "given", "torch", "modules", RULES)
_CODE = ("source", "constants")
OFFER = "if the change cannot matter, accept=True keeps the cache"
_log = logging.getLogger("featcache")


def may_be_accepted(changed: Sequence[Difference], comparison: Comparison | None) -> bool:
    """Whether differences are ones of code and settings, and the probe computes the same.

    The same to the bit; where other rules described the code, as nearly as where nothing differs.
    """
    if are_rules_alone(changed):
        return True
    if comparison is None or not comparison.ids or not are_code_or_settings(changed):
        return False
    return comparison.alike if are_by_other_rules(changed) else comparison.same_bits


def are_code_or_settings(changed: Sequence[Difference]) -> bool:
    """Whether differences are ones of code and settings, and none of weights.

    >>> are_code_or_settings(differences({"source": {"f": 1}}, {"source": {"f": 2}, "torch": {}}))
    True
    >>> are_code_or_settings([Difference(("modules", "hubert", "weights"), 1, 2)])
    False
    """
    return all(
        (_section(each) in _SECTIONS or says_when(each)) and each.path[-1] != "weights"
        for each in changed
    )


def _section(difference: Difference) -> str:
    path = difference.path
    return path[2] if path[0] == DATA_SETS and len(path) > 2 else path[0]


def is_more_code(changed: Sequence[Difference]) -> bool:
    """Whether differences are ones of code, which may change where it computes one more thing.

    What it names besides may be new, but no setting that was there is another one.

    >>> is_more_code(differences({"source": {"f": 1}}, {"source": {"f": 2}, "hparams": 0}))
    True
    >>> is_more_code([Difference(("hparams", "layer"), 9, 10)])
    False
    """
    return all(each.path[0] in _CODE or each.was is ABSENT or says_when(each) for each in changed)


def changed_fields(to: Destination, fingerprint: Mapping[str, object]) -> list[Difference]:
    """Return in what a fingerprint differs from that of a cache; nothing if there is none."""
    try:
        there = read_manifest(to.path).fingerprint
    except CacheError:  # the writer begins one, or says what is wrong
        return []
    return differences(there, cache_fingerprint(to.features, fingerprint))


def accept_changes(
    to: Destination,
    record: RunRecord,
    fingerprint: Mapping[str, object],
    comparison: Comparison | None,
) -> None:
    """Take a fingerprint for that of a cache, and record since when and what has changed.

    Raises `StaleCacheError` if more than code and settings has changed, or the probe does not
    compute the same bits.
    """
    changed = changed_fields(to, fingerprint)
    if not changed:
        return
    if not may_be_accepted(changed, comparison):
        raise StaleCacheError(
            f"cache {str(to.path)!r} was made from something else than there is now, which cannot "
            f"be accepted:{indented(changed)}\naccept=True is for changes of code and settings "
            f"alone, where utterances that are computed again are the same to the bit; {_CURE}"
        )
    record.accept(to.features, fingerprint, changed)


# `Checking`: a run's probe is compared with the one that the cache keeps, and with what is
# stored.
#
# On rank 0, in the process that drives the run, whoever computes the rest.

PROBE = 4  # utterances
_CURE = "overwrite it (overwrite=True), or give another directory"
_told: set[str] = set()  # caches of which it was said that they cannot be checked


class Checking:
    """Checks one cache in one run: once made, the probe is computed, and changes are accepted.

    Where features are random the fingerprint gets the seed. `admit` compares the probe with the one
    that is kept.

    Args:
        job: computes utterances alone.
        destination: the cache.
        inputs: tell which utterances have changed.
        options: how many are checked, and whether changes of code and settings are accepted that
            compute the same bits.
        found: the manifest of the cache; None: there is none, or one that the writer refuses.

    Attributes:
        fingerprint: of the run.
        seed: of random features.
        numbers: of the ids in the data set, once they were needed.
    """

    def __init__(
        self,
        job: Job,
        destination: Destination,
        inputs: ChangedInputs,
        options: RunOptions,
        found: Manifest | None,
    ) -> None:
        # as it is now: computing may change what it was read from
        seed, self.fingerprint = torch.initial_seed(), canonical(job.fingerprint)
        self.seed: int | None = None
        self.numbers: IdNumbers | None = None
        self._job, self._to, self._inputs = job, destination, inputs
        self._found, self._check = found, options.check
        self._source = ProbeSource(job, list(destination.features))
        self._record = RunRecord(destination.path, job.witnesses)
        self._kept: Probe | None = None  # by the cache
        self._now = Computed()
        self._in_batch: Sequence[Unlike] = ()  # otherwise in a batch than alone
        self._wrote = self._compared = False
        self._beside: Probe | None = None  # kept, but of utterances that the data set lacks
        if not self._source.by_id:
            self._tell_once("is of a data set whose utterances cannot be picked by id")
            return
        overwrite = options.overwrite
        if found is not None:
            self._kept = kept_probe(destination, found, self.fingerprint, seed, options)
        random = self._kept is not None and self._kept.seed is not None
        if self._check is not None:
            self._compute(seed, overwrite)
            random = random or self._now.probe.seed is not None
        if random:
            self.fingerprint.setdefault("seed", seed)
            self.seed = seed
        if found is not None and not overwrite:
            self._accept_if(options.accept)

    def _accept_if(self, is_asked: bool) -> None:
        # as it is now: others may have written the cache while the probe was computed
        changed = changed_fields(self._to, self.fingerprint)
        may_be = may_be_accepted(changed, self._now.comparison)
        # code alone changed with features that were added, and computes the same
        grew = self._to.others_added and is_more_code(changed)
        if is_asked or (grew and may_be):
            self._accept(changed)
        elif are_by_other_rules(changed) and may_be:  # of another version of featcache
            with refusal_passed_over():
                self._accept(changed)
                return
            # one that nobody here may write to is read as what it was made from
            self.fingerprint = read_manifest(self._to.path).made_from

    def admit(
        self, changed: Sequence[str], stored: Cache | CacheWriter, *, overwrite: bool = False
    ) -> bool:
        """Raise `StaleCacheError` if the probe says that the cache is stale.

        Utterances that are computed in this run anyway do not count: those that have changed, and
        those that are not stored and have another entry in the data set than before.

        Args:
            changed: ids of utterances that are computed again.
            stored: the ids of the cache.
            overwrite: an interrupted overwrite of the cache goes on: return False instead.
        """
        comparison = self._now.comparison
        if comparison is None or comparison.alike:
            return True
        new = [id for id in self._now.other_entries if id not in stored]
        comparison = comparison.without([*changed, *new])
        if not comparison.alike and not overwrite:
            raise self._stale(comparison.told())
        self._now = replace(self._now, comparison=comparison)
        self._kept = None  # it is kept anew
        return comparison.alike

    def explained(self, error: StaleCacheError) -> StaleCacheError:
        """Return the error of another fingerprint, with what the probe and the record say to it."""
        changed, comparison = changed_fields(self._to, self.fingerprint), self._now.comparison
        if not (changed and error.cure):  # it is about utterances
            return error
        told, cure = () if comparison is None else comparison.told(), error.cure
        lines = [error.message + indented(told), *self._record.since()]
        if may_be_accepted(changed, comparison):
            lines += [f"  {line}" for line in self._record.changed_code()]
            cure = f"{cure}; {OFFER}"
        return StaleCacheError("\n".join(lines), cure=cure)

    def keep(self, writer: CacheWriter) -> None:
        """Keep the probe with a cache that is begun, and look at its utterances as one batch."""
        self._wrote = True
        probe, numbers = self._now.probe, self._now.numbers[: self._source.batch_size]
        if self._beside is not None:
            keep_probe(writer, self._beside.with_more(probe))
            self._tell_once("holds nothing yet of this data set by which it could be checked")
        elif self._kept is None and probe.utterances:
            keep_probe(writer, probe)
            tell_random(self._now.probe, self._now.twice)
        self._record.keep(writer)
        if len(numbers) > 1 and probe.seed is None and probe.repeatable:
            with kept_random_state():
                together = self._source.together(numbers)
            near = tolerance(probe.precision, same_device=True)
            self._in_batch = compare(probe.utterances, together, near).features
        if self._source.in_workers and self._check == "probe":
            self._source.forget()

    def end(self, cache: Cache) -> None:
        """Compare what is stored with what is computed alone, and warn of what differs.

        Raises `StaleCacheError` if nothing was computed in this run, and no batches can be why.
        """
        if self._compared and not self._wrote:  # before changes were accepted
            return
        text = self._unlike_stored(cache)
        if text is None:
            return
        if not self._wrote and self._kept is not None and not self._kept.batched:
            raise self._stale([text])
        warnings.warn(f"cache {str(cache.path)!r}: {text}", stacklevel=2)

    def _unlike_stored(self, cache: Cache, but: Collection[str] = ()) -> str | None:
        """Return which stored utterances are others than computed alone; None if none are."""
        probe, declared = self._now.probe, self._to.features
        if self._check is None or not self._source.by_id or not probe.repeatable:
            return None
        near = tolerance(probe.precision, same_device=self._job.same_device)
        spreads = spreads_of(probe.utterances, list(declared))
        found: list[Unlike] = []
        compared = 0
        with kept_random_state():
            for id, alone in self._alone():
                if id in cache and id not in but:
                    compared += 1
                    stored = {name: cache.read(id, name) for name in declared}
                    found += unlike_stored(id, stored, alone, spreads, near, declared)
        if not found:
            return None
        return told(compared, found, cause_of(found, self._source, self._in_batch))

    def _accept(self, changed: Sequence[Difference]) -> None:
        """Accept changes, once all utterances that are checked are found to be the same."""
        to, ids, comparison = self._to, self._job.ids, self._now.comparison
        if self._check != "probe" and may_be_accepted(changed, comparison):
            cache = to.cache()
            text = self._unlike_stored(cache, self._inputs.find_in(cache, ids, self.seed).changed)
            if text is not None:
                raise self._stale([text])
            self._compared = cache.complete
        accept_changes(to, self._record, self.fingerprint, comparison)

    def compare_only(self, cache: Cache) -> None:
        """Check a cache, and write nothing; raises `StaleCacheError` with the differences."""
        declared = cache_fingerprint(self._to.features, self.fingerprint)
        if changed := differences(cache.fingerprint, declared):
            text = f"cache {str(cache.path)!r} was made from something else than there is now:"
            raise self.explained(StaleCacheError(f"{text}{indented(changed)}", cure=_CURE))
        self.admit((), cache)
        self.end(cache)

    def _compute(self, seed: int, overwrite: bool) -> None:
        """Compute the utterances of the kept probe, or those of a new one."""
        count = PROBE if self._check in ("probe", "all") else int(cast(int, self._check))
        if self._kept is None and not overwrite and self._is_complete():
            self._tell_once("was made without a probe")
            if self._check == "probe":
                return
        self.numbers = IdNumbers(self._source.ids or ())
        with kept_random_state():
            if self._kept is None:
                self._now = new_probe(self._source, self.numbers, count, seed)
            elif len(self.numbers.find(self._kept.utterances)) or not self._kept.utterances:
                self._now = again(self._source, self.numbers, self._kept, seed)
            else:  # part of the data set that the cache was made from, or what is appended to it
                self._now = new_probe(self._source, self.numbers, count, seed)
                self._beside = self._kept

    def _alone(self) -> Iterator[tuple[str, Probed]]:
        """Iterate over the utterances of the probe, then over those that are checked beyond it."""
        probe, seed = self._now.probe, self.seed
        yield from probe.utterances.items()
        if self.numbers is None or self._check == "probe":
            return
        count = self._source.size if self._check == "all" else int(cast(int, self._check))
        numbers = (n for n in choice(self._source, self.numbers) if n not in self._now.numbers)
        more = islice(numbers, max(count - len(self._now.numbers), 0))
        for id, probed in self._source.alone(more, torch.initial_seed() if seed is None else seed):
            if isinstance(probed, Probed):
                yield id, probed

    def _stale(self, lines: Sequence[str]) -> StaleCacheError:
        cache = f"cache {str(self._to.path)!r}"
        text = f"{cache} was made from something else than there is now:{indented(lines)}"
        return StaleCacheError("\n".join([text, *self._record.since()]), cure=_CURE)

    def _is_complete(self) -> bool:
        # without rows, all has failed
        return self._found is not None and self._found.complete and self._found.rows > 0

    def _tell_once(self, why: str) -> None:
        path = str(self._to.path)
        if self._check is not None and path not in _told:
            _told.add(path)
            text = "cache %r %s: none are computed again to see whether they are still the same"
            _log.warning(text, path, why)
