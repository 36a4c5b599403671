"""`SharedColumn`: an annotation of rows that no cache has, in arrays that processes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.store.format.annotation_columns import Body, Column, Lists
from featcache.store.format.coded_strings import Codes
from featcache.store.format.files import digest
from featcache.store.format.strings import Strings
from featcache.tables.shared_array import SharedArray


@dataclass(frozen=True)
class SharedColumn:
    """A column of annotations that is cheap to fork and to pickle.

    Attributes:
        kind: that of its values.
        arrays: those of the column: "values" (of texts, their UTF-8); "ends" of texts and lists;
            "codes" and "null" where it has them.
    """

    kind: str
    arrays: Mapping[str, SharedArray[Any]]

    @classmethod
    def of(cls, column: Column) -> SharedColumn:
        """Take the arrays of a column."""
        arrays: dict[str, NDArray[Any]] = {}
        body = column.body
        if isinstance(body, Codes):
            arrays["codes"], body = body.codes, body.texts
        if isinstance(body, np.ndarray):
            arrays["values"] = body
        else:
            arrays["ends"] = body.ends
            arrays["values"] = body.data if isinstance(body, Strings) else body.values
        if column.null is not None:
            arrays["null"] = column.null
        return cls(column.kind, {name: SharedArray(array) for name, array in arrays.items()})

    @cached_property
    def column(self) -> Column:
        """The column; nothing is copied."""
        arrays = {name: shared.values for name, shared in self.arrays.items()}
        body: Body = arrays["values"]
        if self.kind == "str":
            body = Strings(arrays["ends"], arrays["values"])
            body = Codes(arrays["codes"], body) if "codes" in arrays else body
        elif "ends" in arrays:
            body = Lists(arrays["ends"], arrays["values"])
        return Column(self.kind, body, arrays.get("null"))

    @cached_property
    def digest(self) -> str:
        """A digest of the values."""
        parts = [self.kind, *(name + array.digest for name, array in sorted(self.arrays.items()))]
        return digest("".join(parts).encode())

    def __reduce__(self) -> tuple[object, ...]:
        return SharedColumn, (self.kind, self.arrays)
