"""Storing utterances: checks in the caller's thread, encoding and writing in another, part after part."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from featcache.errors import (
    ConfigError,
    CorruptCacheError,
    DuplicateIdError,
    FeatureError,
    StaleCacheError,
    StorageFullError,
)
from featcache.feature import FeatureStorageConfig
from featcache.interface import Array
from featcache.store.arrays import ArrayLike, check_features, check_id, to_storage
from featcache.store.background import Background
from featcache.store.cache import load_generation
from featcache.store.closing import close_after
from featcache.store.fingerprint import cache_fingerprint, fingerprint_digest
from featcache.store.manifest import PARTS
from featcache.store.merge import sealed_parts
from featcache.store.part import OpenPart, header_for, new_part_name, remove_part

COMMIT_INTERVAL_S = 2.0  # what a killed writer loses at most, in time
QUEUE_BYTES = 256 << 20  # arrays that wait for the disk
PART_BYTES = 8 << 30  # a killed writer's part is copied once when it is recovered
PART_ROWS = 100_000  # the notes on these stay in memory until the part is sealed, about 1 KB each
GO_ON = "free some space and run the same again, it goes on from there"

Features = Mapping[str, FeatureStorageConfig] | Iterable[FeatureStorageConfig]


class PartWriter:
    """Adds utterances to a cache whose `CacheWriter` is open in another process.

    What is written is in the cache once the `CacheWriter` publishes, after this one was closed.

    Args:
        path: the cache directory.
        features: the declarations, the same as the `CacheWriter`'s.
        fingerprint: what the features are made from, the same as the `CacheWriter`'s.
    """

    def __init__(self, path: str | Path, features: Features, fingerprint: Mapping[str, object] | None = None) -> None:
        self.path = Path(path).absolute()
        self.features = by_name(features)
        self.bytes_written = 0
        self._one_at_a_time = threading.RLock()  # threads may share a writer
        manifest, index = load_generation(self.path)
        self._build = manifest.building
        self._fingerprint = fingerprint_digest(cache_fingerprint(self.features, fingerprint))
        if self._fingerprint != manifest.building_fingerprint:
            raise StaleCacheError(
                f"cache {str(self.path)!r} is being written with other declarations or another fingerprint than given "
                "here; give those of its CacheWriter"
            )
        stored = sealed_parts(self.path, self._build, self._fingerprint)
        published = {entry.name for entry in manifest.parts} if manifest.build == manifest.building else set()
        if not published <= {part.entry.name for part in stored}:
            published = set()  # somebody removed a part: what it held is to be computed again
        self._stored = [part.index(self.path, []) for part in stored if part.entry.name not in published]
        if published:
            self._stored.append(index)
        self._dims = stored[0].header.dims if stored else {}
        self._numbers: dict[str, int] = {}  # id -> how many utterances this writer took before it
        self._expected: int | None = None
        self.closed = False
        self._part: OpenPart | None = None  # takes what is written now; the thread may still be at the one before
        self._part_bytes = self._part_rows = 0
        self._unsealed: list[OpenPart] = []  # oldest first, as the thread works them off
        self._sealed: list[str] = []
        self._sealed_rows = 0
        self._committed = 0
        self._background = Background(self._commit, COMMIT_INTERVAL_S, QUEUE_BYTES)

    def __contains__(self, id: str) -> bool:
        """Say whether an utterance is stored already, or was written now."""
        return id in self._numbers or any(index.find(id) >= 0 for index in self._stored)

    def write(self, id: str, arrays: Mapping[str, ArrayLike]) -> None:
        """Store the features of one utterance, as `CacheWriter.write` does."""
        check_id(id)
        check_features(id, arrays, self.features)
        stored = {name: to_storage(id, arrays[name], feature) for name, feature in self.features.items()}
        with self._one_at_a_time:
            self._take(id, stored)

    def _take(self, id: str, stored: dict[str, Array]) -> None:
        self._check_open()
        self._check_new(id)
        self._check_dims(id, stored)
        nbytes = sum(array.nbytes for array in stored.values())
        self._check_space(nbytes)
        part = self._start_part(stored) if self._part is None else self._part
        # in this thread, so that a refused utterance is an error of its own `write`
        encoded = part.encode_lossy(id, stored)
        self._put(partial(part.append, id, stored, encoded), nbytes)
        self._numbers[id] = len(self._numbers)
        self.bytes_written += nbytes
        self._part_bytes += nbytes
        self._part_rows += 1
        if self._part_bytes >= PART_BYTES or self._part_rows >= PART_ROWS:
            self._end_part()

    def expect(self, utterances: int) -> None:
        """Say how many utterances are still to come, so that a disk that is too small is noticed early."""
        self._check_open()
        self._expected = len(self._numbers) + utterances

    def commit(self) -> int:
        """Make all that was written durable; returns how many utterances this writer has made so."""
        self._check_open()
        self._put(self._commit, 0)
        self._drain()
        return self._committed

    def seal(self) -> None:
        """Finish the files of what was written so far, ready to be published; what follows goes to new ones."""
        with self._one_at_a_time:
            self._seal_all()

    def _seal_all(self) -> None:
        self._check_open()
        self._end_part()
        self._drain()
        if self._committed < len(self._numbers):  # never: a promise worth a comparison
            raise CorruptCacheError(
                f"{len(self._numbers)} utterances were written to {str(self.path)!r} but {self._committed} are stored"
            )

    def close(self) -> None:
        """Seal what was written and stop."""
        with self._one_at_a_time:  # or what another thread writes meanwhile would be lost
            if not self.closed:
                try:
                    self.seal()
                finally:
                    self._stop(finish=True)

    def published(self) -> None:
        """Take note that what was sealed is published: `abort` leaves it alone from now on."""
        self._sealed.clear()

    def abort(self) -> None:
        """Remove what this writer has written and what is not published."""
        if not self.closed:
            self._stop(finish=False)
            for name in [part.name for part in self._unsealed] + self._sealed:
                remove_part(self.path / PARTS / name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_after(error, self.close)

    def _check_open(self) -> None:
        if self.closed:
            raise ConfigError(f"the writer of {str(self.path)!r} is closed")

    def _check_new(self, id: str) -> None:
        if id in self._numbers:
            raise DuplicateIdError(
                f"utterance {id!r} was given twice: as number {self._numbers[id]} and as number {len(self._numbers)} "
                f"of this run (counted from 0)"
            )
        if id in self:
            raise DuplicateIdError(
                f"utterance {id!r} was given as number {len(self._numbers)} of this run (counted from 0), but is in "
                f"{str(self.path)!r} from an earlier one; skip it (`id in writer` tells), or overwrite the cache"
            )

    def _check_dims(self, id: str, arrays: Mapping[str, Array]) -> None:
        for name, array in arrays.items():
            dims = self._dims.get(name, array.shape[1:])
            if array.shape[1:] != dims:
                axes = "frames" if self.features[name].time_axis == 0 else "arrays"
                raise FeatureError(
                    f"utterance {id!r}, feature {name!r}: {axes} have shape {array.shape[1:]}, "
                    f"those before have {dims}; overwrite the cache if they are wrong"
                )

    def _check_space(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        coming = self._background.queued_bytes + nbytes
        if coming > free:
            raise StorageFullError(
                f"{free:,} bytes are free on the disk of {str(self.path)!r}, too few for the {coming:,} "
                f"that are coming; {self._kept()}"
            )
        if self._expected is not None and len(self._numbers) >= 100:
            needed = self.bytes_written * (self._expected - len(self._numbers)) // len(self._numbers)
            if needed > free:
                warnings.warn(
                    f"{str(self.path)!r} will need about {needed:,} more bytes, only {free:,} are free on its disk",
                    stacklevel=3,
                )
                self._expected = None

    def _kept(self) -> str:
        return f"{self._committed} utterances of this run are committed and kept: {GO_ON}"

    def _put(self, task: Callable[[], object], nbytes: int) -> None:
        with full_disk_explained(self.path, self._kept):
            self._background.put(task, nbytes)

    def _drain(self) -> None:
        with full_disk_explained(self.path, self._kept):
            self._background.drain()

    def _start_part(self, arrays: Mapping[str, Array]) -> OpenPart:
        # here rather than in the thread, so that a missing library is an error of the first `write`
        dims = {name: array.shape[1:] for name, array in arrays.items()}
        header = header_for(self.features, dims, self._build, self._fingerprint)
        with full_disk_explained(self.path, self._kept):
            self._part = OpenPart(self.path, new_part_name(), self.features, header)
        self._unsealed.append(self._part)
        self._dims = dims
        return self._part

    def _end_part(self) -> None:
        if self._part is not None:
            self._put(partial(self._seal, self._part), 0)
            self._part = None
            self._part_bytes = self._part_rows = 0

    def _stop(self, finish: bool) -> None:
        self.closed = True
        self._background.stop(finish)
        for part in self._unsealed:
            part.release()

    # in the background thread:

    def _commit(self) -> None:
        if self._unsealed:
            self._committed = self._sealed_rows + self._unsealed[0].commit()

    def _seal(self, part: OpenPart) -> None:
        sealed = part.seal()
        self._unsealed.remove(part)
        if sealed is not None:
            self._sealed.append(sealed.entry.name)
            self._sealed_rows += sealed.entry.rows
            self._committed = self._sealed_rows


@contextlib.contextmanager
def full_disk_explained(path: Path, kept: Callable[[], str]) -> Iterator[None]:
    """Raise `StorageFullError`, saying what is kept, for the system's error about a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(f"the disk of {str(path)!r} is full; {kept()}") from error
        raise


def by_name(features: Features) -> dict[str, FeatureStorageConfig]:
    """Return declarations by feature name; raises `ConfigError` for two that files could not tell apart."""
    if not isinstance(features, Iterable) or isinstance(features, str):
        raise ConfigError(f"features are a list of FeatureStorageConfig, not {features!r}")
    named = features.items() if isinstance(features, Mapping) else ((None, feature) for feature in features)
    found: dict[str, FeatureStorageConfig] = {}
    for name, feature in named:
        if not isinstance(feature, FeatureStorageConfig):
            raise ConfigError(f"a feature is declared by a FeatureStorageConfig, not by {feature!r}")
        if name not in (None, feature.name):
            raise ConfigError(f"feature {feature.name!r} is listed as {name!r}; give it one name")
        for other in found:  # WebDataset and some file systems do not tell upper from lower case
            if other.lower() == feature.name.lower():
                raise ConfigError(f"features {other!r} and {feature.name!r} have the same name but for upper case")
        found[feature.name] = feature
    if not found:
        raise ConfigError("a cache needs at least one feature, declared by a FeatureStorageConfig")
    return found
