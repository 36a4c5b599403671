"""Arguments of a cached function behind the id: one result an id, so the same ones each time.

They are stored with the result as its stamps. `entry` is the xxh3-64 of all of them, by name, as
they are; those that equal their defaults are none. Paths of recordings may change without another
input, as data move: so the upper half of `input` is a digest in which paths count by the names of
their files, and the lower half one of the beginnings of these files; 0 where there are none.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import inspect
import math
import os
import pathlib
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache._tensors import is_tensor
from featcache.errors import FeatureError, StaleCacheError
from featcache.format import UNKNOWN, Stamps

_SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None)})
_EXACT = frozenset({bool, int, str, bytes, type(None)})  # equal ones have one `repr`
_BY_REPR = (
    range,
    slice,
    decimal.Decimal,
    uuid.UUID,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    np.dtype,
)
_OF_TORCH = {("torch", "dtype"), ("torch", "device"), ("torch", "Size")}
_MOST_KNOWN = 1 << 14  # digests
_MOST_KEY = 64  # characters, bytes or items of an argument whose digest is kept
_SHORT = 1024  # numbers of a list of tokens or labels; longer arrays are data
_BEGINNING = 1 << 16  # bytes of a file
_IS_PATH = re.compile(r"/.+|[A-Za-z]:\\.+|\S*[/\\]\S*\.\w{1,5}").fullmatch
_HALF = (1 << 32) - 1
_SHOWN = 3

Named: TypeAlias = list[tuple[str, object]]


class Arguments:
    """The arguments that a function takes behind the id.

    Args:
        function: the function; None: one of which the id alone says what it computes.
    """

    def __init__(self, function: Callable[..., object] | None) -> None:
        self._names: tuple[str, ...] = ()
        self._defaults: dict[str, object] = {}
        self._plain_entry = functools.lru_cache(_MOST_KNOWN, typed=True)(self._entry_to_keep)
        self._known: dict[object, int] = {}  # of others
        self.counts = function is not None
        if function is None:
            return
        try:
            _, *others = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some builtins tell nothing
            return
        self.counts = bool(others)
        places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = tuple(each.name for each in others if each.kind in places)
        for each in others:
            if each.default is not each.empty:
                self._defaults[each.name] = each.default

    def named(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Named:
        """Return arguments by name, in the order of the names, as plain values.

        Raises `FeatureError` for an object of which nothing tells whether it is another one.
        """
        found: Named = []
        names = self._names
        for place, value in enumerate(args):
            name = names[place] if place < len(names) else f"*{place - len(names)}"
            if not self._is_default(name, value):
                found.append((name, value if type(value) in _SIMPLE else _plain(name, value)))
        for name, value in kwargs.items():
            if not self._is_default(name, value):
                found.append((name, value if type(value) in _SIMPLE else _plain(name, value)))
        if len(found) > 1:
            found.sort(key=_first)
        return found

    def entry(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> int:
        """Return the digest of arguments; 0 where there are none to compare.

        Those of plain values and of tensors, which come again, are kept.
        """
        if not self.counts:
            return 0
        try:
            return self._plain_entry(*args, **kwargs)
        except TypeError:  # lists and dicts are no keys, and of others none is kept
            return self._other_entry(args, kwargs)

    def _entry_to_keep(self, *args: object, **kwargs: object) -> int:
        values = (*args, *kwargs.values())
        if not (_SIMPLE.issuperset(map(type, values)) and all(map(_may_be_key, values))):
            raise TypeError("not kept")
        return _digest(self.named(args, kwargs))

    def _other_entry(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> int:
        values = (*args, *kwargs.values())
        keys = (*map(_key_of, values),)
        if None in keys:
            return _digest(self.named(args, kwargs))
        key = (keys, (len(args), *kwargs), *map(type, values))
        known = self._known.get(key)
        if known is None:
            known = _digest(self.named(args, kwargs))
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = known
        return known

    def _is_default(self, name: str, value: object) -> bool:
        if name not in self._defaults:
            return False
        default = self._defaults[name]
        if value is default:
            return True
        if type(value) in _SIMPLE or type(default) in _SIMPLE:
            return type(value) is type(default) and repr(value) == repr(default)
        try:
            return repr(_plain(name, value)) == repr(_plain(name, default))
        except FeatureError:
            return False


class ItemEntries(Arguments):
    """Entries of a data set's items, in place of arguments: the number of an item is none.

    Args:
        stamps: of each item, by number; 0 where nothing is known.
    """

    def __init__(self, stamps: NDArray[np.uint64]) -> None:
        super().__init__(None)
        self._stamps = stamps

    def __reduce__(self) -> tuple[object, ...]:
        return ItemEntries, (self._stamps,)

    def entry(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> int:
        """Return the stamp of the item whose number is the argument."""
        (number,) = args
        return self._stamps.item(cast(int, number))


class Call:
    """A call of a cached function: what it computes, and with what.

    Attributes:
        id: of the utterance.
        entry: that of the arguments behind it.
        is_doubted: whether the stored result is of another entry of a data set, or of files that
            have changed since.
    """

    __slots__ = ("_args", "_arguments", "_function", "_kwargs", "entry", "id", "is_doubted")

    def __init__(
        self,
        function: Callable[..., object],
        arguments: Arguments,
        id: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> None:
        self.id = id
        self._function, self._args, self._kwargs = function, args, kwargs
        self._arguments = arguments
        self.entry = arguments.entry(args, kwargs)
        self.is_doubted = False

    def compute(self) -> object:
        """Call the function."""
        return self._function(self.id, *self._args, **self._kwargs)

    def copied(self) -> Call:
        """Return the call with copies of its arguments, as functions may change theirs."""
        args, kwargs = tuple(map(_copy, self._args)), _copy(dict(self._kwargs))
        return Call(self._function, self._arguments, self.id, args, kwargs)

    def stamps(self) -> Stamps:
        """Return what is stored of the arguments."""
        if not self.entry:
            return UNKNOWN
        return Stamps(_input(self._arguments.named(self._args, self._kwargs)), self.entry)

    def check(self, stored: Stamps, path: Path) -> None:
        """Raise `StaleCacheError` if what is stored in cache `path` is of other arguments.

        What is stored of another entry of a data set is doubted alone: it may have moved.
        """
        if not (self.entry and stored.entry) or stored.entry == self.entry:
            return
        if isinstance(self._arguments, ItemEntries):
            self.is_doubted = True
            return
        named = self._arguments.named(self._args, self._kwargs)
        if _may_have_moved(stored.input, named):
            return
        shown = ", ".join(f"{name}={value!r:.60}" for name, value in named[:_SHOWN])
        shown += ", ..." if len(named) > _SHOWN else ""
        raise StaleCacheError(
            f"utterance {self.id!r} of cache {str(path)!r} was computed with other arguments than "
            f"now ({shown or 'the defaults alone'}); a cache has one result an id: give another "
            "setting a directory of its own, as in featcache.through(directory, "
            "functools.partial(function, setting=value)), and another input an id of its own, or "
            f"compute it again after featcache.open({str(path)!r}).delete([{self.id!r}])"
        )


def _copy(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    if type(value) is dict:
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.detach().clone() if is_tensor(value) else value


def _first(pair: tuple[str, object]) -> str:
    return pair[0]


def _digest(named: Named) -> int:
    text = repr(named).encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(text) or 1


_NONE = _digest([])  # of no arguments but defaults


def _input(named: Named) -> int:
    """Return the stamp of arguments whose files may move; 0 where none of them is one."""
    contents = [_beginning(path) for path in _paths(named)]
    if not contents or None in contents:
        return 0
    of_files = _digest([("", content) for content in contents]) & _HALF
    return (_digest(_by_file_name(named)) & _HALF) << 32 | of_files


def _may_have_moved(stored: int, named: Named) -> bool:
    """Whether arguments are those of a stamp but for the folders of their files.

    A file that is not there is taken for a moved one: nothing else can be computed from it.
    """
    if not stored or _digest(_by_file_name(named)) & _HALF != stored >> 32:
        return False
    contents = [_beginning(path) for path in _paths(named)]
    if None in contents:
        return True
    return _digest([("", content) for content in contents]) & _HALF == stored & _HALF


def _beginning(path: str) -> str | None:
    """Return the size of a file and a digest of its beginning; None if it is not there."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # of each utterance
            size = os.fstat(file.fileno()).st_size
            return f"{size} {xxhash.xxh3_64_hexdigest(file.read(_BEGINNING) or b'')}"
    except (OSError, ValueError):
        return None


def _paths(value: object) -> Iterator[str]:
    """Yield the texts of plain values that are paths."""
    if isinstance(value, str):
        if "\0" not in value and _IS_PATH(value):
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _paths(each)


def _by_file_name(value: object) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_by_file_name, value))
    if isinstance(value, str) and _IS_PATH(value):
        return value.replace("\\", "/").rpartition("/")[2]
    return value


def _plain(name: str, value: Any) -> object:
    """Return a value as numbers and texts, whose `repr` says all of it, the same anywhere."""
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if kind in (list, tuple) and _SIMPLE.issuperset(map(type, value)):
        return list(value)
    if isinstance(value, np.ndarray | np.generic) or is_tensor(value):
        return _plain_array(name, value)
    if isinstance(value, list | tuple | Mapping | set | frozenset):
        return _plain_items(name, value)
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}"
    if isinstance(value, str | pathlib.PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(part.name, getattr(value, part.name)) for part in dataclasses.fields(value)]
        return (kind.__qualname__, [(label, _plain(name, part)) for label, part in parts])
    if isinstance(value, _BY_REPR) or (kind.__module__, kind.__name__) in _OF_TORCH:
        return f"{kind.__name__} {value}"
    raise FeatureError(
        f"nothing tells whether the argument {name!r}, a {kind.__name__!r}, is the same each time; "
        "bind it before, as in featcache.through(directory, functools.partial(function, "
        f"{name.lstrip('*')}=...)), which has it compared with the code, or take plain values, "
        "arrays and tensors"
    )


def _may_be_key(value: Any) -> bool:
    """Whether a plain value may be one: 0.0 is -0.0 there, and what is long is data."""
    kind = type(value)
    if kind in (str, bytes):
        return len(value) <= _MOST_KEY
    return kind is not complex and (kind is not float or value != 0)


def _key_of(value: Any) -> object:
    """Return what tells a value from others as `_plain` does, in less time; None if nothing does.

    Only of what comes as an argument each time: recordings, and lists of tokens and labels.
    """
    kind = type(value)
    if kind in _SIMPLE:
        return (kind, value) if _may_be_key(value) else None
    if kind in (list, tuple):
        if len(value) > _MOST_KEY or not all(map(_may_be_key, value)):
            return None
        types = (*map(type, value),)
        return (types, *value) if _EXACT.issuperset(types) else None
    if (kind is np.ndarray or is_tensor(value)) and value.ndim:
        name = str(value.dtype) if kind is np.ndarray else _name_of(value.dtype)
        return (kind, name, *value.shape) if "float" in name else None
    return None


@functools.lru_cache
def _name_of(dtype: object) -> str:
    return str(dtype)


def _plain_items(name: str, value: Any) -> object:
    if isinstance(value, Mapping):
        pairs = [(_plain(name, key), _plain(name, each)) for key, each in value.items()]
        return ("mapping", sorted(pairs, key=repr))
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    return ("set", sorted(repr(_plain(name, each)) for each in value))


def _plain_array(name: str, value: Any) -> object:
    """Return labels and tokens by value, and of data, which may differ in last bits, the shape."""
    if not value.ndim:
        return _plain(name, value.item()) if type(value.item()) in _SIMPLE else repr(value)
    kind, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    whole = "int" in kind or kind == "bool"
    if getattr(value.dtype, "kind", "") in ("O", "U", "S"):
        return _plain(name, value.tolist())
    if whole and math.prod(shape) <= _SHORT:
        return (kind, shape, value.tolist())
    return (kind, shape)
