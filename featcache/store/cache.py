"""Reading a cache: ids, lengths, statistics, and arrays straight from their bytes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from numpy.typing import NDArray

from featcache._checks import directory
from featcache.errors import CacheError, KeyNotFoundError, UnknownNameError, nearest
from featcache.interface import Ints
from featcache.stats import FeatureStats
from featcache.store.format.bfloat16 import from_storage
from featcache.store.format.disk_errors import reading
from featcache.store.format.manifest import generation_number
from featcache.store.format.named_generations import is_of_current_build, name_of, tags_of
from featcache.store.reading.annotation import Annotation, BlockRows
from featcache.store.reading.expectation import Expectation
from featcache.store.reading.generation import Generation
from featcache.store.reading.id_sequence import Ids
from featcache.store.reading.padded import PaddedFeatures, read_padded
from featcache.store.reading.reader import FeatureReader
from featcache.store.reading.unequal_ends import tell_unequal_ends
from featcache.store.reading.verify import WHAT_TO_DO, all_damage, raise_damage
from featcache.store.writing import edit
from featcache.store.writing.annotate import annotate
from featcache.store.writing.annotation_sources import AnnotationSource

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable

CachePath = str | os.PathLike[str]
VERIFY = ("columns", "arrays")
_State = tuple[Path, Expectation, bool, bool, str | None, str | None]  # pickled


class Cache(Mapping[str, dict[str, NDArray[Any]]]):
    """One published generation of a cache.

    Safe to share between threads, to fork and to pickle: the same generation is opened again, or
    the current one where that is gone, unless it was made anew from something else meanwhile.

    A mapping from utterance ids to dicts of arrays, and a context manager. Rows, and with them
    `ids`, iteration and `lengths`, are in the order of the ids' UTF-8 bytes.

    Attributes:
        path: the cache directory.
        version: the tag that it was opened by; None: none.
        opened: manifest, index and containers, for what is built on caches.
    """

    def __init__(
        self,
        path: CachePath,
        *,
        verify: Literal["columns", "arrays"] | None = None,
        check_reads: bool = False,
        expect: Mapping[str, object] | None = None,
        version: str | None = None,
        mapped: bool = True,
    ) -> None:
        if verify not in (None, *VERIFY):
            raise UnknownNameError(f"verify has no level {verify!r}; {nearest(verify, VERIFY)}")
        self.path = directory(path, "a cache").absolute()
        self.version = version
        self._open(Expectation.of(expect), check_reads, mapped, name_of(self.path, version))
        if verify is not None:
            with reading(self.path):
                manifest, arrays = self._manifest, verify == "arrays"
                if version is not None:  # that generation alone
                    manifest = replace(manifest, previous=None, tags={})
                damage = all_damage(self.path, manifest, self._index, arrays=arrays)
                raise_damage(damage, WHAT_TO_DO)
                tell_unequal_ends(self.path, self._manifest, self._index)

    def _open(
        self, expectation: Expectation, check_reads: bool, mapped: bool, name: str | None
    ) -> None:
        with reading(self.path):
            opened = Generation(self.path, mapped=mapped, check_reads=check_reads, name=name)
            expectation.check(opened)
        self._show(opened)

    def _show(self, opened: Generation) -> None:
        self.opened = opened
        self._manifest, self._index = opened.manifest, opened.index

    def __getstate__(self) -> _State:
        opened, same = self.opened, Expectation.of_opened(self.opened)
        version = self.version, self._manifest.name
        return self.path, same, opened.check_reads, opened.mapped, *version

    def __setstate__(self, state: _State) -> None:
        self.path, expectation, check_reads, mapped, self.version, name = state
        if self.version is None and not (name and is_of_current_build(self.path, name)):
            name = None
        self._open(expectation, check_reads, mapped, name)

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
    def table(self) -> FeatureTable:
        """All utterances as a table, of which views are made: `cache.table.select(ids)`."""
        from featcache.tables.table import FeatureTable

        return FeatureTable.of(self)

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
        return read_padded(self.opened, ids, feature)

    def lengths(self, feature: str, *, ids: Iterable[str] | None = None) -> Ints:
        """Return the frames of all utterances in row order, or of those that `ids` lists.

        Ones for a feature without a time axis. Raises `KeyNotFoundError` for an unknown id or
        feature.
        """
        return self.opened.lengths(feature, ids=ids)

    @property
    def annotations(self) -> tuple[str, ...]:
        """Names of the annotations."""
        return tuple(self._manifest.annotations)

    def annotation(self, name: str) -> Annotation:
        """Return the values of an annotation in row order, None where an utterance has none.

        Raises `KeyNotFoundError` for an unknown annotation.
        """
        column = self.opened.annotation(name)
        return Annotation(name, column.kind, [BlockRows(column, None, len(self))])

    def annotate(
        self, source: AnnotationSource, *, unknown: Literal["raise", "skip"] = "raise"
    ) -> None:
        """Give utterances annotations, atomically and durably, as a new generation.

        `featcache.open` reads it; this one stays as it is. Annotations and utterances that are not
        in the source keep what they have; None, or an empty cell, takes a value away. Later writers
        keep values by id, through overwrites, too; a deleted utterance loses them.

        Args:
            source: `{"utt-1": {"speaker": "anna", "snr": 13.5}, ...}`; or a file with a column "id"
                or "ID", .csv, .tsv or .jsonl; or an Arrow table with one.
            unknown: "raise" refuses ids that are not in the cache, "skip" passes over them.

        Raises `KeyNotFoundError` with the unknown ids, `FeatureError` for values of no kind or not
        of that which is there, `ConfigError` for no source, `DuplicateIdError` for an id that comes
        twice, `CacheLockedError` while the cache is written; then nothing is changed.
        """
        annotate(self.path, source, unknown)

    def stats(self, feature: str) -> FeatureStats:
        """Return count, mean and variance over all frames of a feature.

        Raises `KeyNotFoundError` if none were collected.
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

    def refresh(self) -> None:
        """Read the current generation from now on, or what `version` names now.

        Tables and loaders that were made of it before go on with what they have.
        """
        opened = self.opened
        same = Expectation.of_opened(opened)
        self._open(same, opened.check_reads, opened.mapped, name_of(self.path, self.version))

    def delete(self, ids: Iterable[str]) -> None:
        """Delete utterances, durably, as a new generation; they are no more expected.

        Readers see it from their next open or `refresh`, this one too. The bytes stay in the files
        until `compact`. An utterance that a data set still lists is computed again when
        `cache_features` or `extract` fills the cache again.

        Raises `KeyNotFoundError`, and deletes nothing, for an id that is not stored;
        `CacheLockedError` while the cache is written.
        """
        if self.version is not None:
            raise CacheError(
                f"version {self.version!r} of cache {str(self.path)!r} does not change; open the "
                "cache without version= to delete from it"
            )
        edit.delete(self.path, ids)

    @property
    def tags(self) -> dict[str, int]:
        """Tags of the cache as it is now, and the numbers of the generations that they name."""
        return {tag: generation_number(name) for tag, name in tags_of(self.path).items()}

    def tag(self, name: str) -> None:
        """Give this generation a name, by which `featcache.open(path, version=name)` opens it.

        It stays whole through appends, deletions, overwrites and `compact`, until `untag`. Raises
        `ConfigError` for a name that another generation has.
        """
        edit.tag(self.path, name, self._manifest.name)

    def untag(self, name: str) -> None:
        """Take a tag away, and remove what only that kept."""
        edit.untag(self.path, name)

    def compact(self, *, drop_tags: bool = False) -> None:
        """Rewrite what holds deleted utterances, and small parts, and remove the old files.

        Afterwards no file of the cache holds a byte of what was deleted or replaced. Who has an
        earlier generation open must open the cache again.

        Args:
            drop_tags: take away the tags that hold what was deleted; without this, they are an
                error.

        Raises `CacheError` for such tags, and for leftovers that only a person may remove;
        `StorageFullError` if the disk has no room for the copies.
        """
        edit.compact(self.path, drop_tags=drop_tags)


def cache_as_of(opened: Generation, version: str | None = None) -> Cache:
    """Return a cache of a generation that is open; it shares the open files of that."""
    cache = object.__new__(Cache)
    cache.path, cache.version = opened.path, version
    cache._show(opened)
    return cache
