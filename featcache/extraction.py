"""One pass over a dataset that computes and writes what a cache lacks, on one or several ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from tqdm import tqdm

from featcache.batches import (
    Batch,
    DatasetBatches,
    LoaderBatches,
    batches_of_stream,
    checked_utterances,
    is_map_style,
    size_of,
    to_device,
    visible_ids,
    worker_failed,
)
from featcache.config import FeatureStorage
from featcache.errors import (
    CacheError,
    ComputeError,
    ConfigError,
    FeatureError,
    IncompleteError,
    KeyNotFoundError,
    NotACacheError,
    StaleCacheError,
)
from featcache.ranks import Ranks, describe
from featcache.store.cache import Cache
from featcache.store.files import write_durably
from featcache.store.fingerprint import cache_fingerprint, differences
from featcache.store.manifest import read_manifest
from featcache.store.part_writer import PartWriter, close_after
from featcache.store.verify import verify_containers

FAILURES = "failures.jsonl"
_log = logging.getLogger("featcache")


class Failure(TypedDict):
    """A line of `failures.jsonl`: an utterance that could not be computed."""

    id: str | None  # None if the loader does not show it
    error: str
    type: str
    traceback: str


@dataclass
class Extraction:
    """Computes the features of a dataset with `owner.compute_features` and writes them."""

    owner: Any
    source: Any  # a dataset or loader
    stage: Any
    storage: FeatureStorage
    split: str
    loader_kwargs: Mapping[str, Any]
    skip_failures: bool
    progressbar: bool
    ranks: Ranks

    def __post_init__(self) -> None:
        self._path = self.storage.path(self.split)
        self._ids = visible_ids(self.source)
        self._chosen = self._ids is not None and is_map_style(self.source)  # what is known is not even loaded
        self._fingerprint: Mapping[str, object] = {}
        self._failures: list[Failure] = []
        self._behind = 0  # utterances of this rank that were written, failed, or were known already
        self._left_out = 0  # utterances that a given sampler did not ask for
        self._cut_short = False  # by --debug
        self._new: set[str] = set()  # ids written now, unless `_chosen`

    def run(self, fingerprint: Callable[[], Mapping[str, object]], *, resume: bool, overwrite: bool) -> Cache:
        """Do it, and open the cache; see `FeatureCacheMixin.cache_features`."""
        start = partial(self._start, fingerprint, resume, overwrite)
        complete, self._fingerprint = self.ranks.together(start)[0]
        if not complete:
            error = self._work()
            close_after(error, self._finish if error is None else partial(self._finish, error))
            if error is not None:
                self._say_how_to_go_on(error)
                raise error
        return self.storage.cache(self.split)

    def _start(
        self, fingerprint: Callable[[], Mapping[str, object]], resume: bool, overwrite: bool
    ) -> tuple[bool, Mapping[str, object]]:
        """On rank 0, open the cache for writing unless nothing is missing; returns whether, and the fingerprint."""
        if self.ranks.rank:
            return False, {}
        self._fingerprint = fingerprint()
        if not overwrite and self._is_complete():
            return True, self._fingerprint
        if not resume and not overwrite:
            # what a killed run left becomes part of the cache, which is then built anew beside it
            self.storage.writer(self.split, self._fingerprint).close(complete=False)
            overwrite = True
        self._publisher = self.storage.writer(self.split, self._fingerprint, overwrite=overwrite)
        return False, self._fingerprint

    def _is_complete(self) -> bool:
        try:
            cache = self.storage.cache(self.split)
        except (NotACacheError, StaleCacheError):  # the writer starts one, or says all that differs
            return False
        declared = cache_fingerprint(self.storage.features, self._fingerprint)
        if not cache.complete or differences(cache.fingerprint, declared):
            return False
        verify_containers(cache.path, read_manifest(cache.path))
        if self._ids is not None:
            return _holds_all(cache, self._ids)
        return len(cache) >= (size_of(self.source) or 0)

    def _work(self) -> BaseException | None:
        """Compute this rank's share; returns the error that ended it."""
        try:
            with contextlib.ExitStack() as stack:
                self.ranks.together(partial(self._join, stack))  # nobody writes before all know what is missing
                self._compute()
        except BaseException as error:
            return error
        return None

    def _join(self, stack: contextlib.ExitStack) -> None:
        """Find this rank's share, and open a part of the cache for it."""
        self._writer = stack.enter_context(PartWriter(self._path, self.storage.features, self._fingerprint))
        if is_map_style(self.source):
            missing: Sequence[int] = range(len(self.source))
            if self._ids is not None:
                missing = [number for number, id in enumerate(self._ids) if id not in self._writer]
            share = missing[self.ranks.rank :: self.ranks.size]
            self._batches: DatasetBatches | LoaderBatches = DatasetBatches(
                self.source, share, self.loader_kwargs, self._ids
            )
            self._writer.expect(len(share))
        elif self.ranks.size > 1:
            raise ConfigError(
                "under torchrun cache_features needs a map-style dataset, to give each rank its share of it"
            )
        else:
            self._batches = batches_of_stream(self.source, self.loader_kwargs)

    def _compute(self) -> None:
        debug = getattr(self.owner, "debug", False)
        colours = getattr(self.owner, "tqdm_barcolor", {})
        with tqdm(
            desc=f"caching {self.split}",
            total=self._batches.total,
            unit="utt",
            dynamic_ncols=True,
            disable=not self.progressbar or self.ranks.rank > 0,
            colour=colours.get(str(getattr(self.stage, "name", self.stage)).lower()),
        ) as bar:
            for number, batch in enumerate(self._batches, start=1):
                self._process(batch)
                if not bar.disable:
                    megabytes = self._writer.bytes_written / 1e6 / max(bar.format_dict["elapsed"], 1e-3)
                    bar.set_postfix_str(f"{megabytes:.1f} MB/s", refresh=False)
                    bar.update(self._behind - bar.n)
                if debug and number == getattr(self.owner, "debug_batches", 2):
                    self._cut_short = True
                    return
        if isinstance(self._batches, DatasetBatches):
            self._left_out = self._batches.total - self._behind

    def _process(self, batch: Batch) -> None:
        """Compute and write one batch, or what of it can be computed."""
        if batch.ids and all(map(self._was_known, batch.ids)):
            self._behind += len(batch.ids)
            return
        try:
            utterances = self._features(batch)
        except Exception as error:
            if worker_failed(error):
                raise
            if not self.skip_failures:
                raise ComputeError(
                    f"computing the features of {_named(batch.ids)} failed with {describe(error)}"
                ) from error
            if isinstance(self._batches, DatasetBatches) and len(batch.indices) > 1:
                for single in self._batches.singly(batch):  # perhaps it is one of them, perhaps they were too many
                    self._process(single)
            else:
                for id in batch.ids or (None,):
                    self._fail(id, error)
        else:
            for id, arrays in utterances:
                self._write(id, arrays)

    def _features(self, batch: Batch) -> list[tuple[str, dict[str, Any]]]:
        if batch.error is not None:
            raise batch.error
        with getattr(self.owner, "evaluation_ctx", None) or contextlib.nullcontext():
            data = to_device(batch.data, self.owner.device)
            return checked_utterances(self.owner.compute_features(data, self.stage), batch.ids)

    def _write(self, id: str, arrays: Mapping[str, Any]) -> None:
        if self._was_known(id):
            self._behind += 1
            return
        try:
            self._writer.write(id, arrays)
        except FeatureError as error:
            if not self.skip_failures:
                raise
            self._fail(id, error)
            return
        self._behind += 1
        if not self._chosen:
            self._new.add(id)

    def _was_known(self, id: str) -> bool:
        # one that was written in this run is not known: the writer says where it came from the first time
        return not self._chosen and id not in self._new and id in self._writer

    def _fail(self, id: str | None, error: Exception) -> None:
        text = "".join(traceback.format_exception(error))
        self._failures.append({"id": id, "error": str(error), "type": type(error).__name__, "traceback": text})
        self._behind += 1

    def _finish(self, error: BaseException | None = None) -> None:
        """Wait for all ranks, and publish what they have written."""
        text = None if error is None else describe(error)
        reports = self.ranks.gather((text, self._failures, self._cut_short, self._left_out))
        self.ranks.together(partial(self._publish, reports))
        for rank, (text, *_) in enumerate(reports):
            if text is not None and rank != self.ranks.rank:
                raise IncompleteError(f"rank {rank} failed with {text}; what was computed is kept")

    def _publish(self, reports: Sequence[tuple[str | None, list[Failure], bool, int]]) -> None:
        if self.ranks.rank:
            return
        failures = [failure for _, failed, _, _ in reports for failure in failed]
        left_out = sum(number for *_, number in reports)
        stopped = any(text is not None or cut_short for text, _, cut_short, _ in reports)
        if stopped and self._builds_aside():
            self._publisher.abort()  # the old cache stays; the parts of the new one wait for the same call
            return
        self._publisher.close(complete=not (failures or left_out or stopped))
        if left_out:
            _log.warning("%d utterances were not in the given sampler: %r stays incomplete", left_out, str(self._path))
        self._record(failures)

    def _record(self, failures: Sequence[Failure]) -> None:
        path = self._path / FAILURES
        if not failures:
            path.unlink(missing_ok=True)
            return
        lines = [json.dumps(failure, ensure_ascii=False) + "\n" for failure in failures]
        write_durably(path, "".join(lines).encode("utf-8", "backslashreplace"))
        first = f"{failures[0]['id']!r} with {failures[0]['type']}: {failures[0]['error']}"
        if not len(Cache(self._path)):
            raise ComputeError(f"all {len(failures)} utterances failed, see {str(path)!r}; the first, {first}")
        _log.warning("%d utterances failed, see %r; the first, %s", len(failures), str(path), first)

    def _builds_aside(self) -> bool:
        manifest = read_manifest(self._path)
        return manifest.building > manifest.build

    def _say_how_to_go_on(self, error: BaseException) -> None:
        with contextlib.suppress(CacheError):  # a cache that cannot be read says nothing of how to go on
            if self.ranks.rank:
                return
            if self._builds_aside():
                text = f"cache {str(self._path)!r} is as it was; what was computed anew waits beside it"
            else:
                of_all = "" if self._ids is None else f" of {len(self._ids)}"
                text = f"{len(Cache(self._path))}{of_all} utterances are in cache {str(self._path)!r}"
            text += "; the same call goes on from there"
            error.add_note(text)
            if isinstance(error, KeyboardInterrupt):
                _log.warning("stopped: %s", text)


def _named(ids: Sequence[str] | None) -> str:
    if not ids:
        return "a batch"
    return ", ".join(map(repr, ids[:10])) + (f" and {len(ids) - 10} more" if len(ids) > 10 else "")


def _holds_all(cache: Cache, ids: Sequence[str]) -> bool:
    feature = cache.features[0]
    try:
        for start in range(0, len(ids), 100_000):
            cache.lengths(feature, ids[start : start + 100_000])
    except KeyNotFoundError:
        return False
    return True
