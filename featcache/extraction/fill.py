"""`fill`: a job is run, from what its cache lacks to the published cache; `compare`: its check.

Opening, progress, publishing, failures, resuming and computing in this process are here;
`compute_on_workers` computes elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from featcache._closing import close_after, closed_after
from featcache._progress import Interval
from featcache.container_files.lock import is_locked
from featcache.errors import (
    ComputeError,
    ConfigError,
    IncompleteError,
    MissingDependencyError,
    StaleCacheError,
    counted,
    describe,
)
from featcache.extraction.checking import Checking
from featcache.extraction.computation import (
    Computation,
    DatasetBatches,
    LoadedBatch,
    batches_of_stream,
    learnt_ids,
)
from featcache.extraction.datasets import IdNumbers, named
from featcache.extraction.destination import (
    ChangedInputs,
    ChangedUtterances,
    Destination,
    RowsOfIds,
    is_overwriting,
    refusal_explained,
    refusal_passed_over,
    refuse_another,
    retry_while_locked,
    tell_other_splits,
    view_of,
)
from featcache.extraction.job import (
    FAILURES,
    Failure,
    Job,
    Outcome,
    ProgressBar,
    RunOptions,
    read_failures,
    write_failures,
)
from featcache.extraction.on_workers import compute_on_workers
from featcache.extraction.process_part import ProcessPart, WhileFilling
from featcache.extraction.run import (
    DatasetAnnotations,
    Opened,
    Publish,
    Ranks,
    Run,
    check_lengths,
    longest_first,
    remove_runs,
)
from featcache.format import Manifest, committed, stored_sets
from featcache.interface import Ints
from featcache.reading import container_damage, own_containers, raise_damage
from featcache.staleness.watch import Watch
from featcache.store import Cache
from featcache.store import open as open_cache
from featcache.tables import FeatureTable
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.part_writer import PartWriter
from featcache.writing.sets import name_set

EMPTY = "the data set is empty: not one utterance came of it; look at what filters or feeds it"
_log = logging.getLogger("featcache")


def fill(
    job: Job, destination: Destination, options: RunOptions, ranks: Ranks | None = None
) -> FeatureTable:
    """Compute the utterances that a cache lacks, and publish them; return those of the data set.

    Args:
        job: what is computed.
        destination: the cache; features that are stored apart are computed set by set.
        options: how the run goes about it.
        ranks: the processes that make the run together; None: this one alone.

    Raises what `featcache.extract` raises.
    """
    ranks = Ranks(alone=True) if ranks is None else ranks
    find = partial(destination.shares, overwrite=options.overwrite)
    shares = ranks.together(find)[0]
    for number, share in enumerate(shares):
        some = options if number == 0 else replace(options, annotations=())  # stored once
        filling = _Filling(job, share, some, ranks, is_last=number == len(shares) - 1)
        ids = filling.run()
        view = filling.view(ids, of_all=False)
    return view if len(shares) == 1 else filling.view(ids, of_all=True)


def compare(job: Job, destination: Destination, options: RunOptions) -> None:
    """Compare a cache with what a job would compute now, and write nothing.

    Raises `StaleCacheError`, with the differences, and `NotACacheError` if there is none.
    """
    for share in destination.shares(overwrite=False):
        cache = share.stored()
        inputs = ChangedInputs(job, refuses=True)
        Checking(job, share, inputs, options, cache.opened.manifest).compare_only(cache)


class _Open(NamedTuple):
    """A cache as the first rank has opened it.

    Args:
        opened: what all ranks know.
        writer: publishes; None: nothing is missing.
        checking: has computed utterances again, to compare them.
        numbers: of the ids, where utterances have ids and numbers.
        annotations: of the data set, if any.
    """

    opened: Opened
    writer: CacheWriter | None
    checking: Checking
    numbers: IdNumbers | None
    annotations: DatasetAnnotations


class _Filling:
    """One run: a cache, or a set of its features, is filled."""

    def __init__(
        self, job: Job, to: Destination, options: RunOptions, ranks: Ranks, *, is_last: bool
    ) -> None:
        self._job, self._to, self._options, self._ranks = job, to, options, ranks
        self._is_last = is_last
        self._cache: Cache | None = None  # with all that was written, on rank 0
        self._inputs = ChangedInputs(job, refuses=options.on_changed == "raise")
        self._rows = RowsOfIds()

    def run(self) -> Sequence[str] | None:
        """Fill the cache; return the ids of the data set, as far as they are known now."""
        to, ranks = self._to, self._ranks
        here = ranks.each(self._open)
        told = ranks.gather(None if here is None else self._told(here))[0]
        opened, is_lacking = cast(tuple[Opened, bool], told)
        if opened.ids is None:
            opened = opened._replace(ids=self._job.ids)
        ids = opened.ids
        if is_lacking:
            try:
                ids = self._fill(Run(self._job, to, self._options, ranks, opened), here)
            except BaseException as error:
                if ranks.rank == 0:
                    add_resume_note(error, to.path, ids)
                raise
        if here is not None and not is_overwriting(to.path):
            self._cache = to.cache()
            here.checking.end(self._cache)
        if self._options.annotations:
            ranks.together(partial(self._annotate, here))
        return ids

    def view(self, ids: Sequence[str] | None, *, of_all: bool) -> FeatureTable:
        """Return the utterances of the data set as the cache holds them; a warning of others.

        With these features, or with all of the storage.
        """
        to = self._to
        # who appends knows of them; where others are stored apart, the view of all tells
        tells = self._ranks.rank == 0 and not self._options.append and (of_all or not to.beside)
        level = logging.WARNING if tells else logging.DEBUG
        apart = to.beside and not of_all  # what is stored here, and nothing of other sets
        if not apart and to.path != to.storage.path(to.split):
            cache = to.whole()
        else:
            cache = self._cache or to.cache()
        return view_of(cache, ids, self._rows, level)

    def _annotate(self, here: _Open | None) -> None:
        """On rank 0, store the annotations that the cache lacks, or has others of."""
        if here is None or self._cache is None:
            return
        if unlike := here.annotations.unlike(self._cache):
            self._cache.annotate(unlike)

    # Opening, on rank 0.

    def _open(self) -> _Open | None:
        """On rank 0, open the cache for writing."""
        if self._ranks.rank:
            return None
        to, job, options = self._to, self._job, self._options
        declared = to.storage.features
        beside = DatasetAnnotations(job.source, job.ids, options.annotations, declared)
        # the sets of the cache as they are now, for all that looks at them before it is written
        stored = dict(stored_sets(to.storage.path(to.split)))
        found = stored.get(to.path)
        if not options.overwrite:
            self._refuse_another(found, job.ids)
        beside.refuse_other_kinds(stored)
        checking = Checking(job, to, self._inputs, options, found)
        opened = Opened(checking.fingerprint, checking.seed, self._ids(checking.fingerprint))
        numbers = None
        if opened.ids is not None and job.by_number:
            numbers = checking.numbers or IdNumbers(opened.ids)
        try:
            opened, writer = self._opened(opened, checking, stored)
        except StaleCacheError as error:
            raise checking.explained(error) from error
        return _Open(opened, writer, checking, numbers, beside)

    def _told(self, here: _Open) -> tuple[Opened, bool]:
        """Return what other ranks are told: not the ids that they know."""
        known = here.opened.ids is self._job.ids
        opened = here.opened._replace(ids=None) if known else here.opened
        return opened, here.writer is not None

    def _ids(self, fingerprint: Mapping[str, object]) -> Sequence[str] | None:
        """Return the ids; loads all of a data set that shows none, to compare it with a cache."""
        job, to = self._job, self._to
        if job.ids is not None or self._options.overwrite:
            return job.ids
        cache = to.current(fingerprint)
        if cache is None or not cache.complete:
            return None
        _log.warning(
            "the data set shows no ids: all of it is loaded, to see whether it is what cache %r "
            "holds; give it an attribute `ids`, a list of strings, and this takes no time",
            str(to.path),
        )
        ids = learnt_ids(job.source, job.loader_kwargs)
        self._refuse_another(cache.opened.manifest, ids)
        return ids

    def _refuse_another(self, found: Manifest | None, ids: Sequence[str] | None) -> None:
        """Raise `ConfigError` for ids of which a complete cache has none; nothing is computed."""
        if found is not None and ids is not None and len(ids) and not self._options.append:
            refuse_another(self._to.path, found, ids, self._to.split)

    def _opened(
        self, opened: Opened, checking: Checking, stored: Mapping[Path, Manifest]
    ) -> tuple[Opened, CacheWriter | None]:
        """Open the cache, with what `checking` keeps in it; no writer if nothing is missing.

        `stored` are the feature sets that were there before.

        Raises `ConfigError` for a data set that seems to belong to another split, `CacheError` for
        a cache that lacks something and cannot be written to, `StaleCacheError` for utterances that
        have changed.
        """
        to, options, ids = self._to, self._options, opened.ids
        # of a stream; others have been looked at before
        if ids is not None and not len(ids):
            raise ConfigError(EMPTY)
        missing, found = ids, ChangedUtterances()
        cache = None if options.overwrite else to.current(opened.fingerprint)
        if cache is not None:
            opened = opened._replace(full=cache.complete)
            if options.skips_failures and len(cache) and (options.resume or opened.full):
                opened = opened._replace(accepted=frozenset(cache.failed))
            missing = self._missing_from(cache, opened)
            if opened.full:
                found = self._inputs.find_in(cache, ids, opened.seed)
                checking.admit(found.changed, cache)
                if missing is not None and not len(missing) and not found.changed:
                    self._keep_whole(cache, opened, found)
                    return opened, None
        if ids is not None and missing is ids and not options.append:
            self._refuse_other_sets(ids, stored)
        if missing is not None and to.has_splits:
            tell_other_splits(to.storage.root, to.split, to.features, missing)
        with refusal_explained(to.path, None if missing is None else [*missing, *found.changed]):
            if not options.resume and not options.overwrite:
                # what a killed run left is published; the cache is then built anew beside that
                self._writer(opened, overwrite=False).close(complete=False)
            writer = self._writer(opened, overwrite=options.overwrite or not options.resume)
        self._begin(writer, opened, found, checking)
        return opened, writer

    def _refuse_other_sets(self, ids: Sequence[str], stored: Mapping[Path, Manifest]) -> None:
        """Raise `ConfigError` if another set of features is complete without any of the ids."""
        for directory, manifest in stored.items():
            if manifest.features.keys().isdisjoint(self._to.features):
                refuse_another(directory, manifest, ids, self._to.split)

    def _missing_from(self, cache: Cache, opened: Opened) -> Sequence[str] | None:
        """Return the ids that are to be computed; None if they are not known."""
        ids = opened.ids
        if ids is None:
            return None
        rows = self._rows.of(cache, ids)
        lacking = [ids[number] for number in np.flatnonzero(rows < 0).tolist()]
        failed = {*cache.failed}.intersection(lacking)
        tell_left_out(self._to.path, sorted(failed & opened.accepted))
        return [id for id in lacking if id not in opened.accepted]

    def _keep_whole(self, cache: Cache, opened: Opened, found: ChangedUtterances) -> None:
        """Look at a cache in which nothing is missing; it may well be one to be read only.

        Utterances that only look changed get new stamps, where this user may write them.
        """
        index, to = cache.opened.index, self._to
        own = own_containers(index.containers, cache.opened.manifest.parts)
        raise_damage(container_damage(cache.path, index.containers, own))
        with refusal_passed_over():
            if found.alike:
                with to.writer(opened.fingerprint) as writer:
                    if opened.ids is not None:
                        writer.expect(opened.ids)
                    found.apply(writer)
        # if its writer was killed before; who declares its features sees it anyway
        with refusal_passed_over():
            name_set(to.path)

    def _writer(self, opened: Opened, *, overwrite: bool) -> CacheWriter:
        to = self._to
        make = partial(to.writer, opened.fingerprint, overwrite=overwrite)
        # a part's writer that has lost its run ends soon; another run of the cache does not
        there = to.path if to.path.exists() else to.storage.path(to.split)
        return retry_while_locked(make, unless=partial(is_locked, there))

    def _begin(
        self, writer: CacheWriter, opened: Opened, found: ChangedUtterances, checking: Checking
    ) -> None:
        """Check what a cache holds, and make way for what is computed again."""
        ids, overwrite, path = opened.ids, self._options.overwrite, self._to.path
        with contextlib.ExitStack() as stack:
            stack.push(writer)
            if ids is not None:
                writer.expect(ids)
            if not opened.full:  # what a killed run left has been recovered, and is compared, too
                # nothing is refused where all is to be computed anew
                inputs = ChangedInputs(self._job, refuses=False) if overwrite else self._inputs
                found = inputs.find_sealed(path, ids, opened.seed)
                if not checking.admit(found.changed, writer, overwrite=overwrite):
                    found = ChangedUtterances([id for id in ids or () if id in writer])
            # first: of utterances that are gone nobody could tell that they had changed
            checking.keep(writer)
            found.apply(writer)
            stack.pop_all()  # it stays open
        # more than the probe is computed again at the end
        if self._is_last and self._job.in_workers and self._options.check in ("probe", None):
            self._job.forget()

    # Computing and publishing.

    def _fill(self, run: Run, here: _Open | None) -> Sequence[str] | None:
        """Compute what is missing, and publish it; return the ids, known by now."""
        failures: list[Failure] = []
        outcome = Outcome()
        try:
            missing = self._ranks.together(partial(_missing, run, here))[0]
            outcome = _compute(run, here, missing, failures)
        except BaseException as error:
            close_after(error, partial(self._finish, run, here, failures, outcome, error))
            raise
        return self._finish(run, here, failures, outcome)

    def _finish(
        self,
        run: Run,
        here: _Open | None,
        failures: Sequence[Failure],
        outcome: Outcome,
        error: BaseException | None = None,
    ) -> Sequence[str] | None:
        """Wait for all ranks, and publish what they have written."""
        text = None if error is None else describe(error)
        ends = self._ranks.gather((text, failures, outcome))
        failed = [failure for _, some, _ in ends for failure in some]
        of_all = Outcome.of_all([outcome for _, _, outcome in ends])
        interrupted = isinstance(error, KeyboardInterrupt)
        self._ranks.together(partial(_publish, run, here, failed, of_all, interrupted))
        self._ranks.refuse_failures(text for text, _, _ in ends)
        if run.opened.ids is None and of_all.seen is not None:
            return sorted(of_all.seen)  # of a stream; now they are known
        return run.opened.ids


def _missing(run: Run, here: _Open | None) -> Ints | None:
    """On rank 0, return the utterances to be computed; None if they have no numbers.

    They are not committed, nor left out because they failed before.
    """
    if here is None or not run.job.by_number:
        return None
    if here.numbers is None:
        return np.arange(run.job.size or 0)
    missing = ~here.numbers.committed(run.destination.path)
    missing[here.numbers.find(run.opened.accepted)] = False
    return np.flatnonzero(missing)


def _compute(
    run: Run, here: _Open | None, missing: Ints | None, failures: list[Failure]
) -> Outcome:
    """Compute this rank's share."""
    ranks, job, options, total, known = run.ranks, run.job, run.options, run.job.size, 0
    if missing is not None:
        known = (total or 0) - len(missing)
        missing = missing[ranks.rank :: ranks.size]
        total = known + len(missing)
    publishing = Interval(options.publish_every_s)

    def publish_if_due(seal: Callable[[], object]) -> None:
        """Publish what is sealed, on rank 0 that of all ranks; not beside an old cache, whole."""
        if publishing.due():
            seal()
            if here is not None and here.writer and not is_overwriting(run.destination.path):
                here.writer.publish()

    of_ranks = f", rank 0 of {ranks.size}" if ranks.size > 1 else ""
    text = f"caching {run.destination.name}{of_ranks}"
    shown = options.progressbar and ranks.rank == 0
    bar = ProgressBar(text, total, known, failures, shown=shown, colour=options.colour)
    with bar.bar:
        if isinstance(job.by, Watch):
            return compute_here(run, job.by, missing, bar, publish_if_due)
        return compute_on_workers(run, job.by, cast(Ints, missing), bar, publish_if_due)


def _publish(
    run: Run, here: _Open | None, failures: Sequence[Failure], outcome: Outcome, interrupted: bool
) -> None:
    """On rank 0, gather what all have written, those that died included, and publish it.

    After Ctrl-C nobody waits for those that still write: the next run gathers that.
    """
    if here is None or here.writer is None:
        return
    writer, path = here.writer, run.destination.path
    try:
        retry_while_locked(writer.recover, unless=lambda: interrupted)
        remove_runs(path)
        lost = 0 if outcome.stopped else _lost(run, here, outcome.left_out, failures)
        outcome = outcome._replace(stopped=outcome.stopped or lost > 0)
        _close(run, writer, failures, outcome)
    except BaseException:
        writer.abort()  # of nothing: what is sealed stays
        raise
    if lost:
        raise IncompleteError(
            f"{counted(lost, 'utterance')} of {str(path)!r} are neither stored nor reported as "
            "failures: were parts of it removed? The cache is not complete; the same call computes "
            "them"
        )


def _lost(run: Run, here: _Open, left_out: int, failures: Sequence[Failure]) -> int:
    """Count utterances that are neither stored, nor failed, nor left out."""
    missing = None if here.numbers is None else _missing(run, here)
    if missing is None:
        return 0
    return len(missing) - left_out - len({failure["id"] for failure in failures})


def _close(run: Run, writer: CacheWriter, failures: Sequence[Failure], outcome: Outcome) -> None:
    """Publish what was written, and say what could not be computed in this run."""
    left_out, stopped, seen = outcome
    path, opened = run.destination.path, run.opened
    if stopped and (is_overwriting(path) or (opened.full and opened.ids is None)):
        # the old cache stays as it is; the parts of the new one wait for the same call
        writer.abort()
        return
    if seen is not None and not stopped:
        if not seen:
            writer.abort()
            raise ConfigError(EMPTY)
        writer.expect(seen)
    failed = {failure["id"] for failure in failures}
    for id in opened.accepted | failed - {None}:
        writer.fail(cast(str, id))
    writer.close(complete=not (None in failed or left_out or stopped))
    if left_out:
        text = f"{counted(left_out, 'utterance')} were not in the given sampler"
        _log.warning("%s: %r stays incomplete", text, str(path))
    if failures or (path / FAILURES).exists():
        note_failures(open_cache(path), failures)


# Failures that a cache keeps lines of, and what a run that stopped says.


def note_failures(cache: Cache, failures: Sequence[Failure]) -> None:
    """Keep a line for each utterance that failed, now or earlier, and tell of those of now."""
    still = set(cache.failed) - {failure["id"] for failure in failures}
    earlier = [line for line in read_failures(cache.path) if line["id"] in still]
    write_failures(cache.path, [*earlier, *failures])
    if not failures:
        return
    path, first = str(cache.path / FAILURES), failures[0]
    told = f"{first['id']!r} with {first['type']}: {first['error']}"
    text = f"{counted(len(failures), 'utterance')} failed, see {path!r}; the first, {told}"
    if not len(cache):
        raise ComputeError(f"all {text}")
    _log.warning("%s", text)


def tell_left_out(path: Path, failed: Sequence[str]) -> None:
    """Log which utterances are not tried again."""
    if failed:
        are = "is" if len(failed) == 1 else "are"
        text = f"{counted(len(failed), 'utterance')} failed earlier and {are} left out"
        some, where = named(failed, 3), str(path / FAILURES)
        _log.warning("%s: %s, see %r; on_error='raise' tries again", text, some, where)


def add_resume_note(error: BaseException, path: Path, ids: Sequence[str] | None) -> None:
    """Add a note to an error: what is kept of a cache's `ids`, and that the same call goes on."""
    # the same call would end in the same way
    if isinstance(error, ConfigError | MissingDependencyError):
        return
    # a cache that cannot be read says nothing of how to go on
    with contextlib.suppress(OSError):
        stored, cache = sum(1 for _ in committed(path)), f"cache {str(path)!r}"
        number = counted(stored, "utterance")
        if ids is not None:
            number = f"{stored} of {counted(len(ids), 'utterance')}"
        text = f"{number} {'is' if stored == 1 else 'are'} in {cache}"
        if is_overwriting(path):
            text = f"{cache} is as it was; what was computed anew waits beside it"
        text += "; the same call goes on from there"
        error.add_note(text)
        if isinstance(error, KeyboardInterrupt):
            _log.warning("stopped: %s", text)


# One pass over the data set in this process, on one or several ranks.


def compute_here(
    run: Run, watch: Watch, missing: Ints | None, bar: ProgressBar, publish_if_due: Publish
) -> Outcome:
    """Compute and store utterances; whatever happens, all parts are sealed in the end.

    Args:
        run: what is computed, and where it is stored.
        watch: compares what features are made with.
        missing: their numbers in the data set; None: whatever comes of the data set.
        bar: progress and failures are reported to it.
        publish_if_due: to be called often, with what seals the parts of this process.
    """
    job, options, ids = run.job, run.options, run.opened.ids
    part, filling = ProcessPart(), WhileFilling(run.destination.path, watch)
    # not inference_mode, as in `FeatureCacheMixin`
    with closed_after(part.finish), torch.no_grad():
        # nobody writes before all ranks can
        writer, batches = run.ranks.each(partial(_open_here, run, missing, part, filling))
        computation = Computation(
            job.compute,
            batches if isinstance(batches, DatasetBatches) else None,
            writer,
            skip_failures=options.skips_failures,
            # what is known is not even loaded
            only_missing=ids is not None and job.by_number,
            retries=options.retries,
            check_new=partial(_check_new, run),
            seed=run.opened.seed,
            beside=run.destination.beside,
            filling=filling,
        )
        try:
            with contextlib.closing(iter(batches)) as loaded:
                for number, batch in enumerate(loaded, start=1):
                    computation.process(batch)
                    publish_if_due(part.seal)
                    bar.update(computation.progress())
                    if number == options.most_batches:
                        return Outcome()
        finally:
            bar.end(computation.progress(), computation.failures)
        wanted = job.size or 0 if missing is None else len(missing)
        left_out = max(wanted - computation.processed, 0)
        return Outcome(left_out, stopped=False, seen=computation.seen if ids is None else None)


def _open_here(
    run: Run, missing: Ints | None, part: ProcessPart, filling: WhileFilling
) -> tuple[PartWriter, DatasetBatches | Generator[LoadedBatch, None, None]]:
    """Open a part of the cache, and prepare the batches of this rank for it."""
    job = run.job
    if missing is None and run.ranks.size > 1:
        raise ConfigError(
            "under torchrun cache_features needs a map-style dataset, to share it out to ranks"
        )
    filling.begin()
    writer = part.writer(run.open_part, filling)
    if missing is None:
        return writer, batches_of_stream(job.source, job.loader_kwargs, job.mentioned)
    writer.expect_more(len(missing))
    lengths = None if job.lengths is None else check_lengths(job.lengths, len(job.source))
    order, ids = longest_first(missing, lengths), run.opened.ids
    return writer, DatasetBatches(job.source, order, job.loader_kwargs, ids, run.loading)


def _check_new(run: Run, ids: Sequence[str]) -> None:
    """Raise `ConfigError` if the cache must not be given a data set that shows no ids."""
    # those that show them were compared when the cache was opened
    if run.opened.ids is None and run.opened.full and not run.options.append:
        raise ConfigError(
            f"cache {str(run.destination.path)!r} is complete without {named(ids, 3)}, and this "
            "data set shows no ids by which the two could be compared; give it an attribute "
            "`ids`, or append=True to add what is new"
        )
