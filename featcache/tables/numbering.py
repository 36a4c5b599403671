"""Row numbers that know which utterances they count: none is taken for a row of other data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.store.format.files import digest
from featcache.tables.table import FeatureTable


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
