"""Tables for other libraries: ids, frames and annotations as Arrow and pandas hold them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from featcache.errors import MissingDependencyError
from featcache.tables.columns import Column, Columns

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from featcache.tables.table import FeatureTable

_ARROW = {
    "str": "large_string",
    "int": "int64",
    "float": "float64",
    "bool": "bool_",
    "ints": "int64",
    "floats": "float64",
}


def arrow_table(table: FeatureTable) -> pyarrow.Table:
    """Return ids, frames and annotations of all rows."""
    arrow: Any = _imported("pyarrow", "to_arrow")
    packed = table.selection.packed_ids(np.arange(len(table)))
    buffers = map(arrow.py_buffer, (packed.ends, packed.data))
    made = {"id": arrow.LargeStringArray.from_buffers(len(packed), *buffers)}
    for name, column in _without_ids(table).items():
        kind = getattr(arrow, _ARROW[column.kind])()
        kind = arrow.list_(kind) if column.kind in ("ints", "floats") else kind
        made[name] = arrow.array(_values(column), kind)
    return arrow.table(made)


def data_frame(table: FeatureTable) -> pandas.DataFrame:
    """Return ids, frames and annotations of all rows."""
    pandas: Any = _imported("pandas", "to_pandas")
    made: dict[str, Any] = {"id": list(table)}
    for name, column in _without_ids(table).items():
        values = _values(column)
        kind = {"int": "Int64", "float": "Float64", "bool": "boolean"}.get(column.kind)
        missing = kind is not None and isinstance(values, list)
        made[name] = pandas.array(values, dtype=kind) if missing else values
    return pandas.DataFrame(made)


def _without_ids(table: FeatureTable) -> dict[str, Column]:
    return {name: column for name, column in Columns(table).items() if name != "id"}


def _values(column: Column) -> Any:
    """Return the numbers of a column where none is missing, else a list of its values."""
    if column.kind in ("int", "float", "bool"):
        numbers, missing = column.numbers()
        if missing is None:
            return numbers
    return list(column)


def _imported(library: str, method: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise MissingDependencyError(
            f"{method} needs {library!r}; try: pip install {library}"
        ) from error
