"""Tables of Apache Arrow with a row an utterance: Parquet, Arrow IPC, and HuggingFace's data sets.

Columns of lists of numbers are features: lists (of any depth), fixed-size lists, tensors of a fixed
shape, HuggingFace's `Sequence` and `Array2D`. Columns of text, numbers and bools are annotations;
fields of a struct count as columns, called by the field. Ids are the column `id`, or the first one
of `IDS` that is there.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from featcache.adoptable import (
    COPY,
    Found,
    Options,
    Place,
    Readable,
    Stored,
    Value,
    common_dtype,
    data_files,
    frames_first,
    stored_as,
)
from featcache.adoption.libraries.loads import WAVEFORMS, Loads, array_of
from featcache.adoption.libraries.named_arrays import ArrayInfo
from featcache.adoption.libraries.number_columns import REAL, TEXT, WHOLE, loads_of_rows
from featcache.adoption.libraries.payloads import LOAD_IT, told
from featcache.adoption.place import GatheredValues
from featcache.errors import AdoptionError, MissingDependencyError
from featcache.format.files import as_id
from featcache.interface import Ints

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
PARQUET = (".parquet", ".pq")
IDS = ("id", "ids", "utt_id", "uttid", "utterance_id", "utt", "key", "__key__")
STATE = "state.json"  # of a data set that HuggingFace's `save_to_disk` wrote
SPLITS = "dataset_dict.json"
LOOK_AT = 64
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(\.\w+)")  # as of HuggingFace's hub
_PARTITION = re.compile(r"/([^/=]+)=[^/]*(?=/)")  # a folder that is a value of a column
_log = logging.getLogger("featcache")


class ArrowTables:
    """Files of Parquet or Arrow IPC, or a folder of them."""

    name = "arrow"

    def recognises(self, place: Place, what: str) -> bool:
        """Whether they are called so, or HuggingFace wrote them."""
        if not what and {STATE, SPLITS} & {*place.names("")}:
            return True
        paths = [what] if what else data_files(place, LOOK_AT)
        return bool(paths) and all(path.lower().endswith(SUFFIXES) for path in paths)

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Raise `AdoptionError`: a library reads them."""
        raise AdoptionError(f"{place.name!r} is not read where it lies; {COPY}")

    @contextmanager
    def readable(self, place: Place, what: str, options: Options) -> Iterator[Readable]:
        """Read rows by pyarrow, a row group or a batch at a time."""
        paths = [what] if what else _files(place)
        with ExitStack() as stack:
            groups: list[_Group] = []
            for path in paths:
                groups += _groups(place.local(path), stack)
            index = _Index(place.name, groups, options)
            yield Readable(paths, index.ids, index.stored, index.read, index.annotations)


KIND = ArrowTables()


def _files(place: Place) -> list[str]:
    names = {*place.names("")}
    if SPLITS in names:
        raise AdoptionError(
            f"{place.name!r} holds the splits of a data set; name the folder of one, such as "
            f"{place.name + '/train'!r}"
        )
    if STATE in names:
        with place.open(STATE) as source, told(f"{place.name + '/' + STATE!r}"):
            state = json.loads(source.read(0, source.size))
            return [str(each["filename"]) for each in state["_data_files"]]
    paths = [path for path in place.files() if path.lower().endswith(SUFFIXES)]
    if not paths:
        raise AdoptionError(f"there is no {SUFFIXES[0]} file in {place.name!r}")
    splits = {found[1]: found[2] for found in map(_SHARD.fullmatch, paths) if found}
    if len(splits) > 1:
        first, end = next(iter(splits.items()))
        raise AdoptionError(
            f"{place.name!r} holds shards of {', '.join(map(repr, splits))}, and a cache is one "
            f"split; name those of one, as {f'{place.name}/{first}-*{end}'!r}"
        )
    return paths


# `_Group`: rows that are read together.


class _Group(NamedTuple):
    where: str
    schema: pyarrow.Schema
    rows: int
    read: Callable[[Sequence[str]], pyarrow.Table]  # some columns


def _groups(path: Path, stack: ExitStack) -> Iterator[_Group]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "kind 'arrow' needs 'pyarrow'; try: pip install 'featcache[arrow]'"
        ) from error
    where = repr(str(path))
    with told(where):
        if path.suffix.lower() in PARQUET:
            file = stack.enter_context(parquet.ParquetFile(path))
            for number in range(file.num_row_groups):
                rows = file.metadata.row_group(number).num_rows
                yield _Group(where, file.schema_arrow, rows, _row_group(file, number))
            return
        mapped = stack.enter_context(pyarrow.memory_map(str(path)))
        try:
            opened = pyarrow.ipc.open_file(mapped)
            batches = [opened.get_batch(number) for number in range(opened.num_record_batches)]
        except pyarrow.ArrowInvalid:  # HuggingFace writes streams
            mapped.seek(0)
            opened = pyarrow.ipc.open_stream(mapped)
            batches = list(opened)
        for batch in batches:
            table = pyarrow.Table.from_batches([batch])
            yield _Group(where, opened.schema, batch.num_rows, table.select)


def _row_group(file: Any, number: int) -> Callable[[Sequence[str]], pyarrow.Table]:
    return lambda columns: file.read_row_group(number, columns=list(columns))


# `_Column`: the arrays of a column in a group, as one array of numbers cut by rows.


class _Column(NamedTuple):
    numbers: NDArray[Any]
    starts: Ints  # in numbers, of each row; and the end
    shapes: list[tuple[int, ...]]  # of each row; -1 along an axis of which there is nothing

    def array(self, row: int) -> NDArray[Any]:
        some = self.numbers[self.starts[row] : self.starts[row + 1]]
        return some.reshape([max(length, 0) for length in self.shapes[row]])


def _column(chunk: pyarrow.Array, ids: Sequence[str], where: str) -> _Column:
    """Return the arrays of a column; `AdoptionError`, naming an id, for nulls and ragged ones."""
    axes: list[Ints] = []  # the lengths along each axis, of all that there is of the axis before
    starts = np.arange(len(chunk) + 1)
    while True:
        if chunk.null_count:
            place = int(np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))[0])
            row = int(np.searchsorted(starts, place, "right")) - 1
            raise _refused(ids[row], where, "is null, or holds a null")
        if hasattr(chunk, "storage"):
            _refuse_permuted(chunk.type, where)
            fixed = tuple(chunk.type.shape) if _is_tensor(chunk.type) else ()
            axes += [
                np.full(len(chunk) * math.prod(fixed[:n]), fixed[n]) for n in range(len(fixed))
            ]
            starts = starts * math.prod(fixed)
            chunk = chunk.storage.flatten() if fixed else chunk.storage
        elif _is_list(chunk.type):
            axes.append(_lengths(chunk))
            starts = np.append(0, np.cumsum(axes[-1]))[starts]
            chunk = chunk.flatten()
        else:
            break
    sizes = [axes[0]]
    owners = np.arange(len(axes[0]))
    for before, lengths in pairwise(axes):
        owners = np.repeat(owners, before)
        first = np.full(len(axes[0]), -1)
        first[owners[::-1]] = lengths[::-1]
        if (odd := lengths != first[owners]).any():
            raise _refused(ids[int(owners[odd.argmax()])], where, "is ragged")
        sizes.append(first)
    shapes = list(zip(*(each.tolist() for each in sizes), strict=True))
    return _Column(chunk.to_numpy(zero_copy_only=False), starts, shapes)


def _refused(id: str, where: str, why: str) -> AdoptionError:
    return AdoptionError(
        f"utterance {id!r}, {where} {why}; leave the row out, or mend it: table.filter(...) makes "
        "a table of the rest"
    )


def _refuse_permuted(kind: pyarrow.DataType, where: str) -> None:
    order = getattr(kind, "permutation", None)
    if order is not None and list(order) != sorted(order):
        raise AdoptionError(f"{where} has permuted axes; {LOAD_IT}")


def _is_tensor(kind: pyarrow.DataType) -> bool:
    import pyarrow

    return isinstance(kind, pyarrow.FixedShapeTensorType)


def _lengths(chunk: pyarrow.Array) -> Ints:
    import pyarrow

    if pyarrow.types.is_fixed_size_list(chunk.type):
        return np.full(len(chunk), chunk.type.list_size)
    lengths: Ints = chunk.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _is_list(kind: pyarrow.DataType) -> bool:
    import pyarrow

    types = pyarrow.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _holds_arrays(kind: pyarrow.DataType) -> bool:
    """Whether a column holds numbers in lists."""
    import pyarrow

    types, depth = pyarrow.types, 0
    while True:
        if isinstance(kind, pyarrow.BaseExtensionType):
            kind = kind.storage_type
        elif _is_list(kind):
            kind, depth = kind.value_type, depth + 1
        else:
            break
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return bool(depth and numeric)


# `_Index`: ids, features and annotations of all groups.


@dataclass
class _Held:
    """The group that was read last."""

    number: int
    columns: Mapping[str, _Column]


class _Index:
    """Rows of groups, by number.

    Args:
        source: its name.
        groups: of all files, in order.
        options: of adoption.
    """

    def __init__(self, source: str, groups: Sequence[_Group], options: Options) -> None:
        if not sum(group.rows for group in groups):
            raise AdoptionError(f"{source!r} holds no row")
        self._source, self._groups, self._options = source, groups, options
        self._first = np.cumsum([0, *(group.rows for group in groups)])
        self._held = _Held(-1, {})
        fields = _flat(_empty(groups[0].schema)).schema
        for group in groups:
            if not group.schema.equals(groups[0].schema):
                raise AdoptionError(f"{group.where} has other columns than {groups[0].where}")
        self._features = [each.name for each in fields if _holds_arrays(each.type)]
        if not self._features:
            self._refuse_columns(source, fields)
        self._id = self._id_of(fields)
        values = [each.name for each in fields if _is_value(each.type) and each.name != self._id]
        self._refuse_shapes(fields)
        if others := {*fields.names} - {*self._features, *values, self._id}:
            _log.warning("%r: columns %s are left out", source, ", ".join(sorted(others)))
        self.ids: list[str] = []
        gathered = GatheredValues()
        found: dict[str, list[ArrayInfo]] = {name: [] for name in self._features}
        for number in range(len(groups)):
            self._add(number, values, found, gathered)
        self._refuse_twice()
        self.stored = {name: self._stored_as(name, each) for name, each in found.items()}
        columns = gathered.columns(len(self.ids), without=self._features)
        self.annotations: Mapping[str, Sequence[Value]] = columns

    def read(self, row: int) -> dict[str, NDArray[Any]]:
        """Read the arrays of a row."""
        number = int(np.searchsorted(self._first, row, "right")) - 1
        if self._held.number != number:
            ids = self.ids[self._first[number] : self._first[number + 1]]
            self._held = _Held(number, self._columns(number, ids))
        found = {}
        for name, column in self._held.columns.items():
            array = column.array(row - int(self._first[number]))
            stored = self.stored[name]
            if array.size:
                array = array.transpose(frames_first(array.shape, self._options.time_axis))
            elif stored.has_frames:
                array = array.reshape(stored.rows[row], *stored.dims)
            found[name] = array
        return found

    def _refuse_shapes(self, fields: pyarrow.Schema) -> None:
        """Raise `AdoptionError` where a column says the shape of arrays that were laid flat."""
        for name in self._features:
            whose, _, last = name.replace(".", "_").rpartition("_")
            others = [each for each in fields if each.name != name]
            of_it = [each for each in others if not whose or each.name.startswith(whose)]
            if last == "shape" and of_it:
                shape = f".reshape(a[{name!r}])"
                flat = [each for each in of_it if each.name != self._id_in(fields.names)]
                arrays = {each.name: _loaded(each) + shape for each in flat if _loaded(each)}
                raise AdoptionError(
                    f"{self._source!r}: column {name!r} has the shapes of arrays that were laid "
                    f"flat; {self._by_rows(arrays, fields.names) or LOAD_IT}"
                )

    def _id_in(self, names: Sequence[str]) -> str | None:
        return next((name for name in IDS if name in names), None)

    def _id_of(self, fields: pyarrow.Schema) -> str:
        if found := self._id_in(fields.names):
            return found
        kinds = {each.name: each for each in fields if each.name in self._features}
        line = self._by_rows({name: _loaded(each) for name, each in kinds.items()}, fields.names)
        raise AdoptionError(
            f"{self._source!r} has no column of ids, as {IDS[0]!r} would be, among "
            f"{', '.join(map(repr, fields.names))}; call the one that holds them {IDS[0]!r} "
            f"(Dataset.rename_column, Table.rename_columns), or add one{line and f'; or {line}'}"
        )

    def _by_rows(self, arrays: Mapping[str, str], names: Sequence[str]) -> str:
        """Return the line that loads arrays of rows, each called `a`; "" where none is known."""
        if (
            not arrays
            or not all(arrays.values())
            or Path(self._source).suffix in (".arrow", ".ipc")
        ):
            return ""
        id = self._id_in(names)
        key = "f'{n:08d}'" if id is None else f"a[{id!r}]"
        value = f"{{{', '.join(f'{name!r}: {load}' for name, load in arrays.items())}}}"
        value = value if len(arrays) > 1 else next(iter(arrays.values()))
        line = f"{{{key}: {value} for n, a in enumerate({_rows(self._source)})}}"
        return f"load it yourself, as by featcache.convert({line}, 'features')"

    def _add(
        self,
        number: int,
        values: Sequence[str],
        found: Mapping[str, list[ArrayInfo]],
        gathered: GatheredValues,
    ) -> None:
        """Add the ids, values and shapes of a group."""
        table, begin = self._read(number, [self._id, *values]), len(self.ids)
        for place, id in enumerate(table.column(self._id).to_pylist()):
            if not isinstance(as_id(id), str):
                where = f"{self._groups[number].where}, row {place}"
                raise AdoptionError(f"{where}: its id is {id!r}, no text; leave the row out")
            self.ids.append(str(id))
        for name in values:
            for place, value in enumerate(table.column(name).to_pylist(), begin):
                gathered.add(place, {name: value})
        for name, column in self._columns(number, self.ids[begin:]).items():
            dtype = column.numbers.dtype.name
            found[name].extend(ArrayInfo(shape, dtype) for shape in column.shapes)

    def _columns(self, number: int, ids: Sequence[str]) -> dict[str, _Column]:
        table, found = self._read(number, self._features), {}
        for name in self._features:
            where = f"{self._groups[number].where}, column {name!r},"
            with told(where):
                chunk = table.column(name).combine_chunks()
                if hasattr(chunk, "chunks"):
                    chunk = chunk.chunk(0) if chunk.num_chunks == 1 else _refuse_large(where)
                found[name] = _column(chunk, ids, where)
        return found

    def _read(self, number: int, names: Sequence[str]) -> pyarrow.Table:
        group = self._groups[number]
        whole = _has_structs(group.schema)
        with told(group.where):
            return _flat(group.read(group.schema.names if whole else names))

    def _stored_as(self, name: str, infos: Sequence[ArrayInfo]) -> Stored:
        full = next((each.shape for each in infos if -1 not in each.shape), None)
        shapes = []
        for id, each in zip(self.ids, infos, strict=True):
            shape = each.shape
            if -1 in shape:  # nothing tells the shape of a frame of no frames
                shape = (shape[0], *(full or (0,) * len(shape))[1:])
            try:
                shapes.append(tuple(shape[n] for n in frames_first(shape, self._options.time_axis)))
            except AdoptionError as error:
                raise AdoptionError(f"utterance {id!r}, column {name!r}, {error}") from error
        dtypes = [each.dtype for each in infos]
        widest = common_dtype(dtypes)
        dtypes = dtypes if widest is None else [widest] * len(dtypes)
        return stored_as(name, self.ids, shapes, dtypes, self._options.time_axis)

    def _refuse_columns(self, source: str, fields: pyarrow.Schema) -> NoReturn:
        """Raise `AdoptionError` for a table without lists of numbers, with a line that loads it."""
        import pyarrow

        told = ", ".join(map(str, islice(fields, 4))) + ", ..." * (len(fields) > 4)
        bytes_of = [each.name for each in fields if pyarrow.types.is_binary(each.type)]
        why, way = f"it has no column of numbers in lists ({told})", LOAD_IT
        if {"bytes", "path"} <= {*fields.names}:
            way = f"these are files; {WAVEFORMS.partition('; ')[2]}, where they are waveforms"
        elif bytes_of:
            id, rows = self._id_of(fields), f"{_frame(source)}.to_dict('records')"
            line = f"{{a[{id!r}]: {array_of(f'a[{bytes_of[0]!r}]')} for a in {rows}}}"
            way = f"load it yourself, as by featcache.convert({line}, 'features')"
        elif loads := self._loads_of(source, fields):
            why += f": {loads.why}"
            way = f"load it yourself, as by featcache.convert({loads.whole}, 'features')"
        raise AdoptionError(f"{source!r}: {why}; {way}")

    def _loads_of(self, source: str, fields: pyarrow.Schema) -> Loads | None:
        """Return what loads a table of numbers in columns."""
        folders = {name for group in self._groups for name in _PARTITION.findall(group.where)}
        kinds = dict.fromkeys(sorted(folders), TEXT)
        kinds |= {each.name: kind for each in fields if (kind := _kind_of(each.type))}

        def repeats(name: str) -> bool:
            if name in folders:
                return True
            ids = [
                id for number in range(len(self._groups))
                for id in self._read(number, [name]).column(name).to_pylist()
            ]  # fmt: skip
            return len({*ids}) < len(ids)

        loads = loads_of_rows(kinds, lambda _: _frame(source), repeats)
        if loads is None or loads.whole:
            return loads
        load = loads.each.replace(_frame(source), f"{_reader(source)}(p)")
        return loads._replace(whole=f"{{p.stem: {load} for p in {_paths(source)}}}")

    def _refuse_twice(self) -> None:
        if len(set(self.ids)) < len(self.ids):
            twice = Counter(self.ids).most_common(1)[0][0]
            rows = [row for row, id in enumerate(self.ids) if id == twice][:2]
            groups = np.searchsorted(self._first, rows, "right") - 1
            where = dict.fromkeys(self._groups[group].where for group in groups)
            raise AdoptionError(
                f"{self._source!r} has utterance {twice!r} twice: in {' and in '.join(where)}; "
                "leave one of the rows out"
            )


def _frame(source: str) -> str:
    """Return an expression for a source as a data frame of pandas."""
    path = Path(source)
    if (path / STATE).exists():
        return f"datasets.load_from_disk({source!r}).to_pandas()"
    read = _reader(source)
    if path.is_file() or (path.is_dir() and read.endswith("parquet")):
        return f"{read}({source!r})"
    return f"pandas.concat(map({read}, {_paths(source)}))"


def _rows(source: str) -> str:
    """Return an expression for the rows of a source, as mappings."""
    if (Path(source) / STATE).exists():
        return f"datasets.load_from_disk({source!r})"
    library = "feather" if _reader(source).endswith("feather") else "parquet"
    return f"pyarrow.{library}.read_table({source!r}).to_pylist()"


def _loaded(field: pyarrow.Field) -> str:
    """Return an expression for the array of a field of a row `a`; "" where none is known."""
    import pyarrow

    kind = field.type
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
        return f"numpy.frombuffer(a[{field.name!r}], 'float32')"
    if not _is_list(kind):
        return ""
    while _is_list(kind):
        kind = kind.value_type
    numeric = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
    name = np.dtype(kind.to_pandas_dtype()).name if numeric else ""
    return f"numpy.array(a[{field.name!r}], {name!r})" if numeric else ""


def _reader(source: str) -> str:
    paths = [Path(source), *Path(source).rglob("*")]
    is_parquet = any(path.suffix.lower() in PARQUET for path in paths)
    return "pandas.read_parquet" if is_parquet else "pandas.read_feather"


def _paths(source: str) -> str:
    """Return an expression for the paths of a source."""
    path = Path(source)
    if path.is_file():
        return f"[pathlib.Path({source!r})]"
    if path.is_dir():
        ends = sorted({each.suffix for each in path.rglob("*") if each.suffix.lower() in SUFFIXES})
        return f"sorted(pathlib.Path({source!r}).rglob({'*' + ends[0]!r}))"
    return f"sorted(pathlib.Path({str(path.parent)!r}).glob({path.name!r}))"


def _kind_of(kind: pyarrow.DataType) -> str | None:
    """Return what a column holds, as `loads_of_rows` takes it; None for what is no value."""
    import pyarrow

    types = pyarrow.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_floating(kind) or types.is_integer(kind):
        return REAL if types.is_floating(kind) else WHOLE
    return TEXT if _is_value(kind) else None


def _refuse_large(where: str) -> NoReturn:
    raise AdoptionError(f"{where} holds more numbers in a row group than pyarrow joins; {LOAD_IT}")


def _flat(table: pyarrow.Table) -> pyarrow.Table:
    """Return a table with the fields of structs as columns, called as the field."""
    while _has_structs(table.schema):
        table = table.flatten()
        names = [name.rpartition(".")[2] for name in table.column_names]
        if len({*names}) < len(names):
            raise AdoptionError(f"fields of structs have one name: {', '.join(names)}; {LOAD_IT}")
        table = table.rename_columns(names)
    return table


def _empty(schema: pyarrow.Schema) -> pyarrow.Table:
    import pyarrow

    return pyarrow.Table.from_batches([], schema)


def _has_structs(schema: pyarrow.Schema) -> bool:
    import pyarrow

    return any(pyarrow.types.is_struct(each.type) for each in schema)


def _is_value(kind: pyarrow.DataType) -> bool:
    """Whether a column holds annotations."""
    import pyarrow

    types = pyarrow.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating,
             types.is_boolean)  # fmt: skip
    return any(test(kind) for test in tests)
