"""Annotations: values of an utterance that are no features. Their kinds, checks, and columns."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError, FeatureError
from featcache.format.columns import (
    Codes,
    ColumnFile,
    Strings,
    ends_of,
    few,
    joined_ends,
    joined_texts,
    take,
    used,
)
from featcache.format.files import newer, within
from featcache.interface import Bytes, Ints

# Annotations: values of an utterance that are no features. Their kinds, and checks of both.
#
# An annotation is text ("str"), a number ("int", of 64 bits, or "float"), "bool", or a list of
# numbers ("ints", "floats"); all utterances of a cache have one kind of it, or none of it. The
# columns that they become are in `annotation_columns`.

Value = str | int | float | bool | list[int] | list[float]
Values = Mapping[str, Value]  # of one utterance, by name; those that are missing are not there
NONE: Values = MappingProxyType({})
KINDS = ("str", "int", "float", "bool", "ints", "floats")
MOST_BYTES = 4 << 20  # of the annotations of one utterance, as `size_of` counts them
_WIDER = {("int", "float"): "float", ("ints", "floats"): "floats"}
_NEEDED = (
    "text, a finite number (integers of 64 bits), a bool or a list of numbers is needed, and None "
    "where it is missing"
)


def check_annotations(
    id: str, annotations: Mapping[str, object], features: Container[str] = ()
) -> dict[str, Value]:
    """Return the annotations of an utterance as plain Python values, without those that are None.

    Raises `FeatureError`, which names the utterance and the annotation, for what is none.

    >>> check_annotations("utt-1", {"text": "hello", "tags": (1, 2.5), "speaker": None})
    {'text': 'hello', 'tags': [1.0, 2.5]}
    """
    if not isinstance(annotations, Mapping):
        raise FeatureError(
            f"the annotations of utterance {id!r} are a mapping of names to values, not "
            f"{annotations!r}"
        )
    found: dict[str, Value] = {}
    for name, given in annotations.items():
        check_name(name, features, f" of utterance {id!r}")
        if given is None:
            continue
        try:
            found[name] = _plain(given)
        except (TypeError, ValueError, OverflowError) as error:
            raise FeatureError(
                f"annotation {name!r} of utterance {id!r} is {_shown(given)}, of type "
                f"{type(given).__name__}: {_NEEDED}"
            ) from error
    if size_of(found) > MOST_BYTES:
        raise FeatureError(
            f"the annotations of utterance {id!r} have more than {MOST_BYTES:,} bytes; store what "
            "is as large as that as a feature"
        )
    return found


def check_name(name: object, features: Container[str] = (), of: str = "") -> None:
    """Raise `FeatureError` for what cannot be the name of an annotation beside these features."""
    try:
        _check_text(name)
    except (TypeError, ValueError) as error:
        raise FeatureError(
            f"annotation {name!r}{of}: a name is text without '/' and NUL, and not '.' or '..'"
        ) from error
    if name == "id" or name in features:
        raise FeatureError(f"annotation {name!r}{of}: this is the name of a feature, or of the ids")


@lru_cache(1024)  # a million utterances have the same few names
def _check_text(name: object) -> None:
    within(name, 1).encode()


def kind_of(value: Value) -> str:
    """Return the kind of a value that `check_annotations` gave.

    >>> kind_of("a"), kind_of(True), kind_of([1, 2]), kind_of([])
    ('str', 'bool', 'ints', 'ints')
    """
    if isinstance(value, list):
        return "floats" if value and type(value[0]) is float else "ints"
    return type(value).__name__


def kind_of_plain(values: Sequence[object]) -> str | None:
    """Return the kind that plain values have in common, "" where all of them are missing.

    None where it takes more to tell, or to refuse them: `check_annotations`.

    >>> [kind_of_plain(values) for values in (["a", None], [1, 2], [1, 2.5], [None])]
    ['str', 'int', None, '']
    """
    there = [value for value in values if value is not None]
    types = {*map(type, there)}
    try:
        if types == {str}:
            "".join(cast(list[str], there)).encode()
            return "str"
        if types == {int}:
            _number(min(cast(list[int], there)))
            _number(max(cast(list[int], there)))
            return "int"
    except (UnicodeEncodeError, OverflowError):
        return None
    if types == {float}:
        return "float" if all(map(math.isfinite, cast(list[float], there))) else None
    return "bool" if types == {bool} else None if types else ""


def wider_kind(first: str | None, second: str | None) -> str | None:
    """Return the kind that holds the values of two, None if there is none: float holds int.

    >>> wider_kind("int", "float"), wider_kind(None, "str"), wider_kind("int", "str")
    ('float', 'str', None)
    """
    if first is None or second is None or first == second:
        return first or second
    return _WIDER.get((first, second)) or _WIDER.get((second, first))


def with_kinds(id: str, values: Values, known: Mapping[str, str]) -> dict[str, str]:
    """Return the kinds of annotations once those of an utterance are among them.

    Raises `FeatureError` for a value of another kind than those before.
    """
    kinds = dict(known)
    for name, value in values.items():
        kind = wider_kind(known.get(name), kind_of(value))
        if kind is None:
            raise FeatureError(
                f"annotation {name!r} of utterance {id!r} is {_shown(value)}, {kind_of(value)}, "
                f"but {known[name]} with the utterances before; give all of them one kind"
            )
        kinds[name] = kind
    return kinds


def kinds_of(utterances: Iterable[tuple[str, Values]]) -> dict[str, str]:
    """Return the kind of each annotation of utterances, given as pairs of id and values."""
    kinds: dict[str, str] = {}
    for id, values in utterances:
        if values:
            kinds = with_kinds(id, values, kinds)
    return kinds


def size_of(values: Values) -> int:
    """Return about how many bytes values take as JSON, and never fewer."""
    return sum(
        len(name) * 4 + (6 * len(each) if isinstance(each, str) else _list_size(each))
        for name, each in values.items()
    )


def most_bytes(name: object, values: Sequence[object]) -> int:
    """Return a bound of `size_of` one of these plain values of an annotation."""
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    return 4 * len(str(name)) + max(26, 6 * longest)


def _list_size(value: object) -> int:
    return 26 * (len(value) + 1) if isinstance(value, list) else 26


def _plain(value: object) -> Value:
    """Return a value as plain Python has it; raises an error for what is no annotation."""
    if isinstance(value, str):
        value.encode()
        return str(value)
    if isinstance(value, bool | int | float):
        return _number(value)
    if not isinstance(value, list | tuple) and hasattr(value, "tolist"):
        inner = value.tolist()  # of NumPy and torch: scalars, and arrays
        if not isinstance(inner, bool | int | float | str | list):
            raise TypeError
        return _plain(inner)
    if not isinstance(value, list | tuple):
        raise TypeError
    return _numbers(value)


def _numbers(value: Sequence[object]) -> list[int] | list[float]:
    if not {*map(type, value)} <= {int, float}:
        if any(isinstance(each, list | tuple) for each in value):  # however deep
            raise TypeError
        value = [_plain(each) for each in value]
        if not {*map(type, value)} <= {int, float}:
            raise TypeError
    numbers = cast(list[float], value)
    if any(type(each) is float for each in numbers):
        numbers = [float(each) for each in numbers]
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    elif numbers:
        _number(min(numbers))
        _number(max(numbers))
    return list(numbers)


def _number(value: float) -> bool | int | float:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise OverflowError
        return int(value)
    if not math.isfinite(value):
        raise ValueError
    return float(value)


def _shown(value: object) -> str:
    try:
        text = repr(value[:60] if isinstance(value, str | list | tuple) else value)
    except RecursionError:
        text = "deeply nested"
    return text if len(text) <= 60 else f"{text[:60]}..."


# Annotations as columns: numbers, text, lists of numbers, and a mask of what is missing.
#
# In a file of columns, that of an index, the annotation <name> is::
#
#     annotations/<name>/values    i8, f8 or u1 (bool): the numbers, or those of all lists
#     annotations/<name>/ends      i8: list or text r is that from ends[r] to ends[r + 1]
#     annotations/<name>/bytes     u1: UTF-8 of all texts
#     annotations/<name>/codes     i4: if it is there, text r is that of the number codes[r]
#     annotations/<name>/null      u1: 1 where there is none; absent where each row has one
#
# Rows without a value have 0, an empty text or list, or code 0.

PREFIX = "annotations/"
DTYPES: Mapping[str, type[np.generic]] = {
    "int": np.int64,
    "float": np.float64,
    "bool": np.uint8,
    "ints": np.int64,
    "floats": np.float64,
    "str": np.uint8,
}
_COLUMNS = ("values", "ends", "bytes", "codes", "null")
_AT_ONCE = 65536
Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Lists:
    """List r is `values[ends[r]:ends[r + 1]]`."""

    ends: Ints
    values: Numbers

    def __len__(self) -> int:
        return len(self.ends) - 1


Body = Numbers | Lists | Strings | Codes


@dataclass(frozen=True, slots=True)
class AnnotationValues:
    """One annotation of all rows."""

    kind: str
    body: Body
    null: Bytes | None = None  # 1 where it is missing

    def __len__(self) -> int:
        return len(self.body)

    @classmethod
    def of(cls, values: Sequence[Value | None], kind: str) -> AnnotationValues:
        """Make a column of values, all of one kind."""
        null = np.fromiter((value is None for value in values), np.uint8, len(values))
        mask = null if null.any() else None
        if kind == "str":
            texts = ["" if value is None else cast(str, value) for value in values]
            return cls(kind, few(texts), mask)
        dtype = DTYPES[kind]
        if kind in ("ints", "floats"):
            lists = [[] if value is None else cast(list[float], value) for value in values]
            joined = [number for each in lists for number in each]
            return cls(kind, Lists(ends_of([*map(len, lists)]), np.array(joined, dtype)), mask)
        numbers = [0 if value is None else value for value in values]
        return cls(kind, np.array(numbers, dtype), mask)

    @classmethod
    def missing(cls, count: int, kind: str) -> AnnotationValues:
        """Make a column of rows without a value."""
        return cls.of([None] * 0, kind).take(np.full(count, -1))

    def take(self, rows: Ints) -> AnnotationValues:
        """Return the column of some rows, in that order; -1 stands for one without a value."""
        there = rows >= 0
        null = (~there).astype(np.uint8)
        if self.null is not None:
            null[there] = self.null[rows[there]]
        return AnnotationValues(
            self.kind, _taken(self.body, rows, there), null if null.any() else None
        )

    def values(self, start: int = 0, stop: int | None = None) -> list[Value | None]:
        """Return the values of rows from `start` to before `stop`, None where there is none."""
        rows = slice(start, len(self) if stop is None else stop)
        found = self._values(rows)
        if self.null is not None:
            for row in np.flatnonzero(self.null[rows]).tolist():
                found[row] = None
        return found

    def __iter__(self) -> Iterator[Value | None]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self.values(start, start + _AT_ONCE)

    def _values(self, rows: slice) -> list[Value | None]:
        body = self.body
        if isinstance(body, Codes):
            codes = body.codes[rows].tolist()
            texts = list(body.texts) if len(codes) > len(body.texts) else body.texts
            return [texts[code] for code in codes]
        if isinstance(body, np.ndarray):
            numbers = body[rows]
            return cast(
                list[Value | None], (numbers > 0 if self.kind == "bool" else numbers).tolist()
            )
        ends = body.ends[rows.start : rows.stop + 1]
        if isinstance(body, Strings):
            return [*Strings(ends - ends[0], body.data[ends[0] : ends[-1]])] if len(ends) else []
        return [body.values[begin:end].tolist() for begin, end in pairwise(ends.tolist())]


def joined(columns: Sequence[AnnotationValues], kind: str) -> AnnotationValues:
    """Put columns one after the other; those of int become float where `kind` is that."""
    if len(columns) == 1 and columns[0].kind == kind:
        return columns[0]
    null = [np.zeros(len(each), np.uint8) if each.null is None else each.null for each in columns]
    mask = np.concatenate([np.empty(0, np.uint8), *null])
    bodies = [each.body for each in columns]
    dtype = DTYPES[kind]
    body: Body
    if kind == "str":
        body = joined_texts(cast(list[Strings | Codes], bodies))
    elif kind in ("ints", "floats"):
        lists = cast(list[Lists], bodies)
        values = np.concatenate([np.empty(0, dtype), *(each.values for each in lists)])
        body = Lists(joined_ends(each.ends for each in lists), values.astype(dtype, copy=False))
    else:
        numbers = cast(list[Numbers], bodies)
        body = np.concatenate([np.empty(0, dtype), *numbers]).astype(dtype, copy=False)
    return AnnotationValues(kind, body, mask if mask.any() else None)


def stored_columns(
    name: str, column: AnnotationValues, *, always: bool = False
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the columns of a file that an annotation becomes; none if no row has a value.

    With `always`, some for an annotation without any value, too.
    """
    if column.null is not None and column.null.all():
        if not always:
            return
        column = AnnotationValues.missing(len(column), column.kind)
    null, body = column.null, column.body
    if null is not None:
        yield f"{PREFIX}{name}/null", null
    if isinstance(body, Codes):
        body = used(body, null)
        yield f"{PREFIX}{name}/codes", body.codes
        body = body.texts
    if isinstance(body, np.ndarray):
        yield f"{PREFIX}{name}/values", body
        return
    yield f"{PREFIX}{name}/ends", body.ends
    if isinstance(body, Strings):
        yield f"{PREFIX}{name}/bytes", body.data
    else:
        yield f"{PREFIX}{name}/values", body.values


def stored_kinds(file: ColumnFile) -> dict[str, str]:
    """Return the kind of each annotation in a file of columns, by name.

    Raises `FormatVersionError` for columns of a kind that is none of these.
    """
    kinds = {}
    for column, dtype in file.dtypes.items():
        if not column.startswith(PREFIX):
            continue
        name, _, what = column.removeprefix(PREFIX).rpartition("/")
        if what == "bytes":
            kinds[name] = "str"
        elif what == "values":
            kinds[name] = {"<i8": "int", "<f8": "float", "|u1": "bool"}.get(dtype, "")
            kinds[name] += "s" * (f"{PREFIX}{name}/ends" in file)
        if what not in _COLUMNS or kinds.get(name, KINDS[0]) not in KINDS:
            raise newer(f"annotation {name!r} in {str(file.path)!r}", f"the column {column!r}")
    return kinds


def read_column(file: ColumnFile, name: str, kind: str, rows: int) -> AnnotationValues:
    """Take an annotation out of a file of columns; raises `CorruptCacheError` if it does not fit.

    Args:
        file: that of an index.
        name: the annotation.
        kind: its kind.
        rows: those of the index.
    """
    begin = f"{PREFIX}{name}/"
    null = file.column(f"{begin}null", np.uint8) if f"{begin}null" in file else None
    body: Body
    if kind == "str":
        texts = Strings(
            file.column(f"{begin}ends", np.int64), file.column(f"{begin}bytes", np.uint8)
        )
        coded = f"{begin}codes" in file
        body = Codes(file.column(f"{begin}codes", np.int32), texts) if coded else texts
    else:
        values: Numbers = file.column(f"{begin}values", DTYPES[kind])
        lists = kind in ("ints", "floats")
        body = Lists(file.column(f"{begin}ends", np.int64), values) if lists else values
    if (null is not None and len(null) != rows) or len(body) != rows or not _fits(body):
        raise CorruptCacheError(
            f"{str(file.path)!r} is damaged: the columns of annotation {name!r} do not fit the "
            "index, or each other"
        )
    return AnnotationValues(kind, body, null)


def read_whole_column(file: ColumnFile, name: str, kind: str, rows: int) -> AnnotationValues:
    """Take an annotation out of a file as `read_column` does, once its checksums are compared."""
    columns = (f"{PREFIX}{name}/{what}" for what in _COLUMNS)
    if damage := file.damage(filter(file.__contains__, columns)):
        raise CorruptCacheError("\n".join(damage))
    return read_column(file, name, kind, rows)


def _fits(body: Body) -> bool:
    """Whether the numbers of a column can be: what is later taken by them is there."""
    if isinstance(body, Codes):
        codes, count = body.codes, len(body.texts)
        in_range = codes.min(initial=0) >= 0 and codes.max(initial=0) < max(count, 1)
        return bool(in_range) and (count > 0 or not len(codes)) and _fits(body.texts)
    if isinstance(body, np.ndarray):
        return True
    ends, values = body.ends, body.data if isinstance(body, Strings) else body.values
    fits = len(ends) > 0 and ends[0] == 0 and ends[-1] == len(values)
    return bool(fits and (ends[1:] >= ends[:-1]).all())


def _taken(body: Body, rows: Ints, there: NDArray[np.bool_]) -> Body:
    if isinstance(body, Codes):
        return Codes(cast(NDArray[np.int32], _taken(body.codes, rows, there)), body.texts)
    if isinstance(body, np.ndarray):
        numbers = np.zeros(len(rows), body.dtype)
        numbers[there] = body[rows[there]]
        return numbers
    values = body.data if isinstance(body, Strings) else body.values
    taken, their_ends = take(values, body.ends, rows[there])
    counts = np.zeros(len(rows), np.int64)
    counts[there] = np.diff(their_ends)
    if isinstance(body, Strings):
        return Strings(ends_of(counts), taken)
    return Lists(ends_of(counts), taken)
