"""Data sets over the rows of a table: the table of each, whoever made it smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

from featcache.tables.table import FeatureTable


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
