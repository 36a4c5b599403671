"""Row numbers that know which utterances they count, and data sets over the rows of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from featcache._cached import cached_property
from featcache.errors import ConfigError
from featcache.format.files import digest
from featcache.interface import Ints
from featcache.tables.table import FeatureTable

K = TypeVar("K")

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
    if isinstance(dataset, FeatureTable | HasTable):
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


class BatchOf(list[K]):
    """Row numbers or ids of a batch: a list that also says what its numbers count, and its draw.

    Attributes:
        numbering: the utterances that row numbers count, where that is known.
        draw: seed and epoch of the sampler, where it has them: what is random for the utterances of
            the batch is drawn of these, in whatever process.
    """

    __slots__ = ("draw", "numbering")

    def __init__(
        self, keys: Iterable[K], numbering: Numbering | None, draw: tuple[int, int] | None
    ) -> None:
        super().__init__(keys)
        self.numbering = numbering
        self.draw = draw

    def __reduce__(self) -> tuple[object, ...]:
        return BatchOf, (list(self), self.numbering, self.draw)


def require_rows_of(table: FeatureTable, numbering: Numbering) -> None:
    """Raise `ConfigError` unless the numbers are proved to be rows of this table.

    Lengths alone prove it where they are those of all its rows, in their order.
    """
    if numbering.table is not None and numbering.table.selection is table.selection:
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
