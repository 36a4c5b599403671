"""`HasTable`: a data set over the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from featcache.tables.table import FeatureTable


@runtime_checkable
class HasTable(Protocol):
    """A data set over a feature table, as `FeatureDataset` is."""

    @property
    def table(self) -> FeatureTable:
        """The rows that it reads."""

    @property
    def features(self) -> Sequence[str]:
        """Names of the features that it reads."""
