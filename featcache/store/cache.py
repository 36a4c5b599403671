"""Reading a cache: ids, lengths, statistics, and arrays straight from their bytes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from numpy.typing import NDArray

from featcache._checks import directory
from featcache.errors import CorruptCacheError, KeyNotFoundError, UnknownNameError, nearest
from featcache.interface import Ints
from featcache.stats import FeatureStats
from featcache.store.format.bfloat16 import from_storage
from featcache.store.format.disk_errors import reading
from featcache.store.reading.expectation import Expectation
from featcache.store.reading.id_sequence import Ids
from featcache.store.reading.joined_sets import damage_of, missing_from
from featcache.store.reading.opening import OpenSettings, open_generation
from featcache.store.reading.reader import FeatureReader
from featcache.store.reading.verify import WHAT_TO_DO, raise_damage

CachePath = str | os.PathLike[str]
VERIFY = ("columns", "arrays")


class PaddedFeatures(NamedTuple):
    """Arrays of several utterances in one, padded at the end of the frame axis.

    data: (utterances, longest, *dims), or (utterances, *dims) without a time axis.
    lengths: frames of each utterance, int64; ones without a time axis.
    """

    data: NDArray[Any]
    lengths: Ints


def open(
    path: CachePath,
    *,
    verify: Literal["columns", "arrays"] | None = None,
    check_reads: bool = False,
    expect: Mapping[str, object] | None = None,
    mapped: bool = True,
) -> Cache:
    """Open a cache for reading; `with featcache.open(path) as cache:` closes it, too.

    Args:
        path: the cache directory.
        verify: None checks the size of each file when it is first read; "columns" those of all
            files now, and the checksums of index and statistics; "arrays" those of every byte of
            every file, which reads the whole cache. All damage is told at once.
        check_reads: compare whatever is read with its checksum: whole arrays by their own, windows
            by those of the pages that they lie on. The index is compared when the cache is opened.
        expect: the fingerprint that the features should have, plain data as `brain.expectation()`
            and `featcache.provenance(function).fingerprint({})` return it: each key of it is
            compared with the cache's. Without it, a cache that nothing has compared in this process
            is told of in the log, once.
        mapped: read through memory maps; False uses pread, for network file systems, where a mapped
            file that shrinks kills the process with SIGBUS.

    Raises `StaleCacheError`, with the differences, for a cache that was made from something else
    than is expected; `NotACacheError`, `FormatVersionError` or `CorruptCacheError`.
    """
    return Cache(path, verify=verify, check_reads=check_reads, expect=expect, mapped=mapped)


def open_features(
    path: Path, features: Iterable[str], expect: Mapping[str, object] | None = None
) -> Cache:
    """Open the feature sets of a cache that have some features, also those not complete yet."""
    cache = Cache.__new__(Cache)
    settings = OpenSettings(features=tuple(features))
    cache.__setstate__((path.absolute(), Expectation.of(expect), settings))
    return cache


class Cache(Mapping[str, dict[str, NDArray[Any]]]):
    """One published generation of a cache.

    Safe to share between threads, to fork and to pickle: it opens again, and refuses a cache that
    was made anew from something else meanwhile.

    A mapping from utterance ids to dicts of arrays, and a context manager. Rows, and with them
    `ids`, iteration and `lengths`, are in the order of the ids' UTF-8 bytes. Where features were
    added later, as a feature set, they are the utterances that all sets have.

    Attributes:
        path: the cache directory.
        opened: manifest, index and containers, for what is built on caches.
    """

    def __init__(
        self,
        path: CachePath,
        *,
        verify: Literal["columns", "arrays"] | None = None,
        check_reads: bool = False,
        expect: Mapping[str, object] | None = None,
        mapped: bool = True,
    ) -> None:
        if verify not in (None, *VERIFY):
            raise UnknownNameError(f"verify has no level {verify!r}; {nearest(verify, VERIFY)}")
        self.path = directory(path, "a cache").absolute()
        self._open(Expectation.of(expect), OpenSettings(mapped, check_reads))
        if verify is not None:
            with reading(self.path):
                raise_damage(damage_of(self.opened, arrays=verify == "arrays"), WHAT_TO_DO)

    def _open(self, expectation: Expectation, settings: OpenSettings) -> None:
        with reading(self.path):
            self.opened = open_generation(self.path, expectation, settings)
        self._manifest, self._index = self.opened.manifest, self.opened.index

    def __getstate__(self) -> tuple[Path, Expectation, OpenSettings]:
        opened = self.opened
        settings = OpenSettings(opened.mapped, opened.check_reads, self.features)
        return self.path, Expectation.of_opened(opened), settings

    def __setstate__(self, state: tuple[Path, Expectation, OpenSettings]) -> None:
        self.path, expectation, settings = state
        self._open(expectation, settings)

    def __repr__(self) -> str:
        state = "complete" if self.complete else "incomplete"
        features = ", ".join(self.features)
        return f"<Cache {str(self.path)!r}: {len(self)} utterances of {features}, {state}>"

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the container files: arrays cannot be read any more, ids and lengths can.

        A cache that nobody holds closes itself. Copies, readers and pickles open their own files.
        """
        self.opened.close()

    __eq__ = object.__eq__  # a mapping would compare all arrays
    __hash__ = object.__hash__

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self._index.find(id) >= 0

    def __getitem__(self, id: str) -> dict[str, NDArray[Any]]:
        row = self.opened.row(id)
        return {
            name: from_storage(arrays.read(row), arrays.declared_dtype)
            for name, arrays in self.opened.features.items()
        }

    @property
    def ids(self) -> Sequence[str]:
        """The utterance ids, in the order of rows; taken out of the index as they are asked for."""
        return Ids(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are stored, as small as their codecs made them."""
        return sum(int(columns.nbytes.sum()) for columns in self._index.features.values())

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(self._manifest.features)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint: what the cache was made from, its declarations under "features"."""
        return copy.deepcopy(dict(self._manifest.fingerprint))

    @property
    def complete(self) -> bool:
        """True if each expected utterance is stored or has failed.

        What the writer said where none are expected.
        """
        return self._manifest.complete

    @property
    def expected(self) -> int | None:
        """Number of utterances that the cache is to hold; None if its writer did not know."""
        return None if self._manifest.expected is None else self._manifest.expected.count

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the expected utterances that could not be computed.

        They are in the order of their UTF-8 bytes.
        """
        return tuple(self.opened.failed)

    def missing(self, feature: str) -> tuple[str, ...]:
        """Return the ids that lack a feature and have others, in the order of their UTF-8 bytes.

        None but in a cache of feature sets, whose rows are the utterances that all of them have.
        """
        self.opened.arrays(feature)
        return tuple(missing_from(self.opened, feature))

    @property
    def generation(self) -> int:
        """Number of this generation, counted up with each publish."""
        return self._manifest.generation

    def dtype(self, feature: str) -> str:
        """Return the declared dtype of a feature."""
        return self.opened.arrays(feature).declared_dtype

    def dims(self, feature: str) -> tuple[int, ...]:
        """Return the shape of one frame, or of the whole array of a feature without a time axis.

        Empty as long as no utterance is stored.
        """
        return self.opened.arrays(feature).dims

    def read(
        self, id: str, feature: str, start: int | None = None, stop: int | None = None
    ) -> NDArray[Any]:
        """Return a writable copy of an array, or of its frames from `start` to before `stop`.

        Shape (frames, *dims), or `dims` without a time axis; declared dtype, bfloat16 as the
        float32 of the same value. Only the bytes of these frames are read, or the blocks that hold
        them where a codec is used.

        Raises `KeyNotFoundError` for an unknown id or feature, `WindowError` unless 0 <= start <=
        stop <= frames.
        """
        opened = self.opened
        arrays = opened.arrays(feature)
        return from_storage(opened.read(id, arrays, start, stop), arrays.declared_dtype)

    def read_batch(self, ids: Iterable[str], feature: str) -> PaddedFeatures:
        """Return the arrays of several utterances, copied into one array padded with zeros.

        Raises `KeyNotFoundError` for an unknown id or feature.
        """
        arrays = self.opened.arrays(feature)
        rows = self.opened.rows(ids)
        lengths = arrays.lengths[rows]
        if len(rows):
            arrays.check_length(int(rows[lengths.argmax()]))
        longest = int(lengths.max(initial=0))
        data = arrays.empty(len(rows), longest)
        for out, row, length in zip(data, rows.tolist(), lengths.tolist(), strict=True):
            arrays.read_into(row, out[:length])
            out[length:] = 0
        if not arrays.has_frames:
            if (lengths != 1).any():
                raise CorruptCacheError(
                    f"cache {str(self.path)!r} is damaged: feature {feature!r} has no time axis, "
                    "but its index tells of several frames"
                )
            data = data.reshape(len(rows), *arrays.dims)
        return PaddedFeatures(from_storage(data, arrays.declared_dtype), lengths)

    def lengths(self, feature: str, *, ids: Iterable[str] | None = None) -> Ints:
        """Return the frames of all utterances in row order, or of those that `ids` lists.

        Ones for a feature without a time axis. Raises `KeyNotFoundError` for an unknown id or
        feature.
        """
        return self.opened.lengths(feature, ids=ids)

    def stats(self, feature: str) -> FeatureStats:
        """Return count, mean and variance over all frames of a feature.

        Of all utterances that have the feature, in a cache of feature sets, too. Raises
        `KeyNotFoundError` if none were collected.
        """
        self.opened.arrays(feature)
        if not self._manifest.features[feature]["stats"]:
            raise KeyNotFoundError(
                f"cache {str(self.path)!r} has no statistics of feature {feature!r}; declare it "
                "with stats: true"
            )
        return self._index.stats[feature]

    def reader(self, feature: str) -> FeatureReader:
        """Return a picklable callable that gives the torch tensor of an id.

        It has this cache's settings.
        """
        self.opened.arrays(feature)
        return FeatureReader.of(self.opened, feature)
