"""HuggingFace `datasets`: a cache as a data set that names its arrays, and a cache of a data set.

The arrays stay where they are: a row holds the path of a cache and an id, and is read when it is
asked for. Data sets of audio become cuts in `featcache.interop.huggingface`.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from featcache.declaration import Features, by_name
from featcache.errors import ConfigError, FeatureError, MissingDependencyError, nearest
from featcache.format import as_id
from featcache.interface import Array
from featcache.interop.in_caches import caches_of_rows, opened
from featcache.store import Cache
from featcache.store import open as open_cache
from featcache.tables import FeatureTable
from featcache.writing.cache_writer import CacheWriter

try:
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc
    from datasets.features.features import register_feature
except ImportError as error:
    raise MissingDependencyError(
        f"HuggingFace data sets need 'datasets'; {error}; try: pip install 'featcache[huggingface]'"
    ) from error

_log = logging.getLogger("featcache")
LENGTH = "length"  # by which HuggingFace's Trainer groups
_ROWS = 256  # of a data set that are taken at once


@dataclass
class CachedArray:
    """Feature type of `datasets`: the name of an array, which is read from its cache at access.

    Args:
        feature: that of the cache.
        decode: False gives the path of the cache and the id.
    """

    feature: str
    decode: bool = True
    id: str | None = field(default=None, repr=False)
    # as `datasets` wants them of each type
    dtype: ClassVar[str] = "numpy.ndarray"
    pa_type: ClassVar[Any] = pa.struct({"path": pa.string(), "id": pa.string()})
    _type: str = field(default="CachedArray", init=False, repr=False)

    def __call__(self) -> object:
        """Return the type of Arrow."""
        return self.pa_type

    def encode_example(self, value: object) -> Mapping[str, object]:
        """Return the name of an array; raises `ConfigError` for the array itself."""
        if isinstance(value, Mapping) and value.keys() == {"path", "id"}:
            return value
        raise ConfigError(
            f"a column of {self!r} names arrays of a cache, and holds none; to_hf_dataset makes it"
        )

    def decode_example(self, value: Mapping[str, str], token_per_repo_id: object = None) -> Array:
        """Return the array; raises what `cache.read` raises."""
        return opened(value["path"]).read(value["id"], self.feature)

    def cast_storage(self, storage: object) -> object:
        """Return names as they are stored, which is in one form alone."""
        return storage

    def embed_storage(self, storage: object, *others: object, **options: object) -> object:
        """Return the names, and log that they are what is saved or uploaded."""
        _tell_what_is_saved(self.feature)
        return storage


@cache
def _tell_what_is_saved(feature: str) -> None:
    _log.warning(
        "column %r of the data set: saved are the paths of caches and ids, not the arrays; keep "
        "the caches at these paths, and import featcache.interop.hf_dataset before you load it",
        feature,
    )


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that the register is experimental
    register_feature(CachedArray, "CachedArray")


def to_hf_dataset(
    table: FeatureTable, features: str | Sequence[str] | None = None, *, length: str | None = None
) -> datasets.Dataset:
    """Return a HuggingFace data set, as `FeatureTable.to_hf_dataset` describes it."""
    names = [features] if isinstance(features, str) else [*(features or table.features)]
    counted = length or next(filter(table.has_frames, names), None)
    columns: dict[str, Any] = {"id": list(table)}
    columns |= {name: list(table.annotation(name)) for name in table.annotations}
    if counted is not None:
        if LENGTH in columns:
            raise ConfigError(
                f"the table has an annotation {LENGTH!r}, the name of the column that the Trainer "
                "groups by; annotate it under another name"
            )
        columns[LENGTH] = table.lengths(counted).tolist()
    told = pa.table({name: pa.array(values) for name, values in columns.items()})
    told = told.set_column(0, "id", told["id"].cast(pa.string()))  # of no rows it would be null
    types = datasets.Features.from_arrow_schema(told.schema)
    for name in names:
        ids = told["id"].combine_chunks()
        named = pa.StructArray.from_arrays([_paths(table, name), ids], ["path", "id"])
        told, types[name] = told.append_column(name, named), CachedArray(name)
    return datasets.Dataset(told, datasets.DatasetInfo(features=types))


def _paths(table: FeatureTable, feature: str) -> object:
    caches, numbers = caches_of_rows(table, feature)
    paths = pa.array([str(cache.path) for cache in caches], pa.string())
    return paths.take(pa.array(numbers, pa.int64()))


def from_hf_dataset(
    dataset: datasets.Dataset,
    path: str | os.PathLike[str],
    features: Features,
    *,
    id: str | None = None,
    annotations: Sequence[str] | None = None,
    fingerprint: Mapping[str, object] | None = None,
) -> Cache:
    """Store array columns of a HuggingFace data set in a cache, and open that.

    A second run goes on where an interrupted one stopped.

    Args:
        dataset: with columns of nested lists, or `Array2D` and its like.
        path: the directory of the cache.
        features: declarations, named as the columns.
        id: the column of ids; None: "id" where there is one, else the numbers of the rows.
        annotations: the columns to keep as annotations; None: all of text, numbers and bools.
        fingerprint: what the features are made from.

    Raises `ConfigError` for a column that is not there or of no arrays, `FeatureError` for rows
    whose arrays are ragged or have nulls, and what `CacheWriter` raises.

    >>> import featcache, tempfile
    >>> rows = {"id": ["a", "b"], "fbank": [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]]}
    >>> declared = [featcache.FeatureStorageConfig("fbank")]
    >>> cache = from_hf_dataset(datasets.Dataset.from_dict(rows), tempfile.mkdtemp(), declared)
    >>> cache.read("b", "fbank").tolist()
    [[3.0, 4.0], [5.0, 6.0]]
    """
    declared = by_name(features)
    _refuse_others(dataset, [*declared])
    known = dataset.column_names
    for name in (*declared, *(annotations or ()), *(() if id is None else (id,))):
        if name not in known:
            raise ConfigError(f"the data set has no column {name!r}; {nearest(name, known)}")
    column = "id" if id is None and "id" in known else id
    others = {*declared, column}
    told = [n for n in known if n not in others and _is_told(dataset.features[n])]
    told = told if annotations is None else [*annotations]
    kept = [*declared, *told, *(() if column is None else (column,))]
    rows = dataset.with_format("arrow").select_columns(kept)
    with CacheWriter(Path(path), declared, fingerprint) as writer:
        for begin in range(0, len(rows), _ROWS):
            batch = rows[begin : begin + _ROWS]
            ids = range(begin, begin + len(batch)) if column is None else batch[column].to_pylist()
            values = [dict(zip(told, each, strict=True)) for each in _tuples(batch, told)]
            arrays = {name: batch[name].combine_chunks() for name in declared}
            for number, utterance in enumerate(map(str, map(as_id, ids))):
                if utterance not in writer:
                    found = {n: _array(utterance, n, arrays[n], number) for n in declared}
                    writer.write(utterance, found, annotations=values[number])
    return open_cache(path)


def _refuse_others(dataset: object, names: Sequence[str]) -> None:
    """Raise `ConfigError` for what is no split, or holds no arrays, with the way to store it."""
    if not isinstance(dataset, datasets.Dataset):
        raise ConfigError(
            f"one split is stored, a datasets.Dataset, not a {type(dataset).__name__}"
            f"{_way_of_other(dataset, names)}"
        )
    for name in names:
        if isinstance(dataset.features.get(name), CachedArray):
            raise ConfigError(
                f"column {name!r} names arrays that lie in caches, and has none of its own: store "
                "its rows by featcache.convert(featcache.open(...).select(dataset['id']), path), "
                "with the cache that to_hf_dataset was called on"
            )


def _way_of_other(dataset: object, names: Sequence[str]) -> str:
    """Return the end of a message: how data sets other than those of one split are stored."""
    if isinstance(dataset, Mapping) and dataset:
        return f"; give one of them, dataset[{next(iter(dataset))!r}]"
    if not isinstance(dataset, datasets.IterableDataset):
        return ""
    arrays = ", ".join(f"{name!r}: np.array(row[{name!r}])" for name in names)
    return (
        ", whose rows come one by one: with featcache.CacheWriter(path, features) as writer: "
        f"[writer.write(row['id'], {{{arrays}}}) for row in dataset]"
    )


def _is_told(feature: object) -> bool:
    kinds = ("string", "large_string", "bool", "int", "uint", "float")
    return isinstance(feature, datasets.Value) and feature.dtype.startswith(kinds)


def _tuples(batch: Any, names: Sequence[str]) -> Iterator[tuple[object, ...]]:
    columns = [batch[name].to_pylist() for name in names]
    return zip(*columns, strict=True) if columns else iter([()] * len(batch))


def _array(id: str, name: str, column: Any, row: int) -> NDArray[Any]:
    """Return the array of a row of nested lists."""
    storage = getattr(column, "storage", column)  # of an extension type, Array2D
    if not hasattr(storage, "flatten") or not _is_list(storage.type):
        raise ConfigError(f"column {name!r} is of {storage.type}, not of arrays")
    values = storage[row].values
    shape = [0 if values is None else len(values)]
    while values is not None and _is_list(values.type):
        sizes = {*pc.list_value_length(values).to_pylist()}
        if len(sizes) != 1 or None in sizes:
            raise FeatureError(
                f"{name!r} of {id!r} has frames of the sizes {sizes}, and not of one"
            )
        shape.append(sizes.pop())
        values = values.flatten()
    if values is None or values.null_count:
        raise FeatureError(f"{name!r} of {id!r} has nulls")
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array.reshape(shape)


def _is_list(type_: object) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(type_) for is_kind in kinds)
