"""`FeatureTable`: numbered rows of one or several caches, in whatever order, with their columns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from featcache.declaration import FEW_FRAMES
from featcache.errors import ConfigError
from featcache.format.files import digest
from featcache.interface import Bytes, Ints
from featcache.reading.annotation import Annotation
from featcache.reading.generation import PaddedFeatures
from featcache.stats import FeatureStats
from featcache.store import Cache, CachePath
from featcache.tables.blocks import (
    Block,
    BlockMember,
    TableBlocks,
    all_complete,
    only_cache,
    opened,
    require_all_complete,
)
from featcache.tables.columns import (
    Columns,
    Value,
    arrow_table,
    data_frame,
    order_by,
    rows_that_meet,
    sampled_rows,
    split_rows,
    what_keeps_nothing,
)
from featcache.tables.segments import SegmentSource, segments_of
from featcache.tables.selection import NumberedRows, Selection, chosen_rows, stats_of_rows
from featcache.tables.times import Align, Alignment

if TYPE_CHECKING:
    import pandas
    import pyarrow


# The utterances of one or several caches, or some of them, as numbered rows.

_log = logging.getLogger("featcache")


class FeatureTable(NumberedRows, Mapping[str, dict[str, NDArray[Any]]]):
    """Features of numbered utterances: of one cache or several, or a view of some of them.

    Several are joined over the same ids, or come one after another. Made by `Cache.table`,
    `FeatureTable.of`, `join` and `concat`; a view by the methods of another table. A view holds
    row numbers and no data. The rows of one cache are in the order of its ids' UTF-8 bytes, as in
    `Cache.lengths`. Threads, forks and pickles may share it, and workers share the row numbers.

    As a cache is, a mapping from utterance ids to dicts of arrays.

    Attributes:
        features: the names of the features.
        selection: the rows and the caches below, for what is built on tables.
    """

    def __init__(self, selection: Selection) -> None:
        self.features = selection.blocks.features
        self.selection = selection
        self._stats: dict[str, FeatureStats] = {}

    @classmethod
    def of(cls, source: FeatureTable | Cache | CachePath) -> FeatureTable:
        """Return the table of a cache, opened where a path is given; a table as it is."""
        if isinstance(source, FeatureTable):
            return source
        needed = "a cache, its path, or caches put together by join or concat are needed"
        return cls(Selection(TableBlocks([Block([BlockMember.of(opened(source, needed))])])))

    def __repr__(self) -> str:
        return f"<FeatureTable: {self.selection.said} of {', '.join(self.features)}>"

    def __getitem__(self, id: str) -> dict[str, NDArray[Any]]:
        return {name: self.read(id, name) for name in self.features}

    __eq__ = object.__eq__  # a mapping would compare all arrays
    __hash__ = object.__hash__

    @property
    def caches(self) -> tuple[tuple[Cache, ...], ...]:
        """The caches below: blocks that follow each other, of caches that are side by side."""
        return self.selection.blocks.caches

    @property
    def cache(self) -> Cache:
        """The one cache below; raises `ConfigError` where there are several."""
        return only_cache(self.selection.blocks, repr(self))

    @property
    def complete(self) -> bool:
        """True if all caches below are complete."""
        return all_complete(self.selection.blocks)

    @property
    def annotations(self) -> tuple[str, ...]:
        """Names of the annotations."""
        return self.selection.annotations

    def annotation(self, name: str) -> Annotation:
        """Return the values of an annotation in the order of rows, None where there is none.

        Of joined caches, those of the first that has it. Raises `KeyNotFoundError` for an unknown
        annotation.
        """
        return self.selection.annotation(name)

    def require_complete(self) -> None:
        """Raise `IncompleteError` for a cache that its writer has not finished."""
        require_all_complete(self.selection.blocks)

    def has_frames(self, feature: str) -> bool:
        """Whether a feature has a time axis."""
        return self.selection.blocks.has_frames(feature)

    def dims(self, feature: str) -> tuple[int, ...]:
        """Return the shape of one frame, or of the whole array of a feature without a time axis."""
        return self.selection.blocks.dims(feature)

    def dtype(self, feature: str) -> str:
        """Return the declared dtype of a feature."""
        return self.selection.blocks.of_feature(feature)[0].declared_dtype

    def lengths(
        self, feature: str, *, ids: Iterable[str] | None = None, rows: Ints | None = None
    ) -> Ints:
        """Return the frames of all rows, int64, read-only; or of those that `ids` or `rows` list.

        All of one cache are its mapped column. Some are checked against what is stored first.
        """
        rows = rows if ids is None else self.rows(ids)
        if rows is None:
            return self.selection.lengths(feature)
        return self.selection.checked_lengths(feature, rows)

    def read(
        self,
        id: str,
        feature: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        copy: bool = True,
    ) -> NDArray[Any]:
        """Return a writable copy of an array, or of its frames from `start` to before `stop`.

        As `Cache.read` does; with `copy=False` read-only, and the mapped bytes themselves where
        they are the array.
        """
        self.selection.blocks.require(feature)
        return self.selection.read(int(self.rows([id])[0]), feature, start, stop, copy=copy)

    def read_batch(self, ids: Iterable[str], feature: str) -> PaddedFeatures:
        """Return the arrays of several utterances, copied into one array padded with zeros.

        Raises `KeyNotFoundError` for an unknown id or feature.
        """
        self.selection.blocks.require(feature)
        return self.selection.read_padded(self.rows(ids), feature)

    def stats(self, feature: str) -> FeatureStats:
        """Return count, mean and variance over all frames of a feature; exact.

        For a view, the arrays of the cache that it holds, or the others, if they are fewer, are
        read once. The table keeps them; more than 5 s are told in the log.

        Raises `KeyNotFoundError` if none were collected.
        """
        self.selection.blocks.require(feature)
        if feature not in self._stats:
            self._stats[feature] = stats_of_rows(self.selection, feature)
        return self._stats[feature]

    def read_into(self, rows: Ints, feature: str, starts: Ints, lengths: Ints, out: Bytes) -> None:
        """Read `lengths` frames from `starts` on of each row into the bytes of a row of `out`.

        Zeros fill the rest of the bytes.
        """
        self.selection.read_into(rows, feature, starts, lengths, out)

    def select(self, keys: Iterable[str] | Iterable[int]) -> FeatureTable:
        """Return the view of these utterances, ids or row numbers, in their order.

        Raises `KeyNotFoundError` or `RowError` for one that is not there, and `ConfigError` for
        one that comes twice.
        """
        return self._take(chosen_rows(self, keys))

    def filter(
        self, where: Callable[[Mapping[str, Value]], object] | None = None, **conditions: object
    ) -> FeatureTable:
        """Return the view of the utterances that meet all conditions, in their order.

        Args:
            where: called with each utterance that meets the others, a mapping of "id", of features
                to their frames and of annotations to their values; keeps it where it returns true.
            conditions: by name "id", a feature, whose frames count, or an annotation: a range
                `(least, most)`, both included, None for no end; a set or a list of values; or one
                value. None stands for a missing value, which is in no range.

        >>> table.filter(fbank=(100, 3000), speaker={"anna", "ben"})  # doctest: +SKIP
        """
        rows = rows_that_meet(self, conditions, where)
        if not len(rows) and len(self):
            said = [f"{name}={condition!r:.80}" for name, condition in conditions.items()]
            said += [f"where={where!r:.80}"] if where is not None else []
            self._tell_nothing(f"filter({', '.join(said)}) keeps", what_keeps_nothing(conditions))
        return self._take(rows)

    def sample(self, amount: float, *, seed: int = 0) -> FeatureTable:
        """Return a view of a share of the utterances, 0.1, or of a number of them, 500, at random.

        They are in the order of this table, and depend on the ids and the seed alone.
        """
        rows = sampled_rows(self, amount, seed)
        if not len(rows) and len(self):
            self._tell_nothing(f"sample({amount!r}) draws", "draw more")
        return self._take(rows)

    def split(
        self, shares: Mapping[str, float], *, by: str | None = None, seed: int = 0
    ) -> dict[str, FeatureTable]:
        """Return views that share out all utterances at random, by name.

        Args:
            shares: the share of each view, `{"train": 0.9, "valid": 0.1}`; together 1.
            by: an annotation: no value of it is in two views, e.g. "speaker". Sizes are then as
                near to the shares as its values allow, and the log tells where that is far; no view
                is empty.
            seed: draws others. The same ids and seed give the same views everywhere.
        """
        parts = split_rows(self, shares, by, seed)
        return {name: self._take(rows) for name, rows in parts.items()}

    def sort(self, by: str, *, descending: bool = False) -> FeatureTable:
        """Return the view in the order of "id", of the frames of a feature or of an annotation.

        Utterances of one value stay in their order; those without one come last.
        """
        return self._take(order_by(Columns(self)[by], by, descending=descending))

    def segments(
        self, source: SegmentSource, *, align: Align = "trim", tolerance_frames: int = FEW_FRAMES
    ) -> FeatureTable:
        """Return a view of segments, with ids of their own, cut by `frame_s` and `offset_s`.

        A cut goes to the nearest boundary between frames, half-way to the later one: neighbours
        share no frame and leave none out. Features without a time axis are given whole.

        Args:
            source: `{id: (recording, start_s, stop_s)}`, a CSV file with these columns, or
                `Windows(10.0, hop_s=5.0)` of all recordings. Further columns, or a dict as fourth
                value, are annotations of the segments; all others are those of the recording.
            align: "trim" ends all features of a recording where the first of them ends; "error"
                refuses a segment of which any feature lacks a frame.
            tolerance_frames: most frames, of the longest, that "trim" takes off; else refused.

        Raises `WindowError` for a stop beyond the end, and for a listed segment without a frame of
        some feature. Frames without `frame_s` are not read.
        """
        segments = segments_of(self, source, Alignment(align, tolerance_frames))
        if not len(segments.rows) and len(self):
            self._tell_nothing(f"segments({source!r:.80}) cuts", "see what should list them")
        return FeatureTable(self.selection.cut(segments))

    def to_arrow(self) -> pyarrow.Table:
        """Return a `pyarrow.Table` of ids, frames of the features and annotations.

        >>> pyarrow.parquet.write_table(table.to_arrow(), "train.parquet")  # doctest: +SKIP
        """
        return arrow_table(self)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `pandas.DataFrame` of ids, frames of the features and annotations."""
        return data_frame(self)

    @property
    def digest(self) -> str:
        """A digest of the ids in their order: of those below, and of what was made of them."""
        return self.selection.digest

    def _tell_nothing(self, what: str, advice: str) -> None:
        _log.warning("%s nothing of %r: the view is empty; %s", what, self, advice)

    def _take(self, rows: Ints) -> FeatureTable:
        return FeatureTable(self.selection.take(rows))


# Data sets over the rows of a table: the table of each, whoever made it smaller.


@runtime_checkable
class HasTable(Protocol):
    """A data set over the rows of a table, as `FeatureDataset` is."""

    @property
    def table(self) -> FeatureTable:
        """The rows that it reads."""

    @property
    def features(self) -> Sequence[str]:
        """Names of the features that it reads."""


@runtime_checkable
class HasSome(Protocol):
    """Some items of a data set, as torch's `Subset` and what its `random_split` gives."""

    @property
    def dataset(self) -> object:
        """The data set that they are of."""

    @property
    def indices(self) -> Sequence[int]:
        """Their places in it."""


def within_table(dataset: object) -> tuple[HasTable, FeatureTable] | None:
    """Return the data set over a table that this one is or is made of, and the view that it is.

    None for other data sets.
    """
    if isinstance(dataset, HasTable):
        return dataset, dataset.table
    found = within_table(dataset.dataset) if isinstance(dataset, HasSome) else None
    if found is None:
        return None
    return found[0], found[1].select(cast(HasSome, dataset).indices)


# Row numbers that know which utterances they count: none is taken for a row of other data.


class Numbering:
    """The utterances that row numbers count: rows of a table, or of arrays of lengths alone."""

    def __init__(
        self, count: int, table: FeatureTable | None = None, lengths: Sequence[Ints] = ()
    ) -> None:
        self._count = count
        self._lengths = lengths
        self.table = table

    @cached_property
    def proof(self) -> tuple[object, ...]:
        """Digests of what is counted: whether it is a table, how many, and what of."""
        if self.table is not None:
            return True, len(self.table), self.table.digest
        return False, self._count, *map(column_digest, self._lengths)

    @classmethod
    def of_proof(cls, proof: tuple[object, ...]) -> Numbering:
        """Return a numbering of which nothing but its proof is known, as in another process."""
        numbering = cls(0)
        numbering.proof = proof
        return numbering

    def __reduce__(self) -> tuple[object, ...]:
        return Numbering.of_proof, (self.proof,)


class Rows(list[int]):
    """Row numbers of a batch: a list that also says what they number."""

    __slots__ = ("numbering",)

    def __init__(self, rows: Iterable[int], numbering: Numbering) -> None:
        super().__init__(rows)
        self.numbering = numbering

    def __reduce__(self) -> tuple[object, ...]:
        return Rows, (list(self), self.numbering)


def require_rows_of(table: FeatureTable, numbering: Numbering) -> None:
    """Raise `ConfigError` unless the numbers are proved to be rows of this table.

    Lengths alone prove it where they are those of all its rows, in their order.
    """
    if numbering.table is table:
        return
    of_table, count, *digests = numbering.proof
    if of_table:
        if digests != [table.digest]:
            raise ConfigError(
                f"the batch sampler numbers {count} utterances of a cache, which are not those of "
                f"{table!r}: give both the same caches, opened once, as one may grow in between"
            )
        return
    names = [name for name in table.features if table.has_frames(name)]
    columns = {column_digest(table.lengths(name)) for name in names}
    if count != len(table) or not columns.issuperset(digests):
        raise ConfigError(
            f"the batch sampler numbers the {count} utterances of a list of lengths, and nothing "
            f"tells that these are the rows of {table!r} in their order: make the sampler from the "
            "cache, or have it name its utterances: BucketBatchSampler(lengths, ids=[...])"
        )


def column_digest(column: Ints) -> str:
    """Return a digest of lengths."""
    return digest(np.ascontiguousarray(column, np.int64).data)
