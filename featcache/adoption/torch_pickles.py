"""The pickle in a file of `torch.save`, read without running it: tensors, text and numbers.

A stack machine of the few opcodes that torch writes for tensors and dicts of them. Names are
compared with a list and never looked up; nothing is imported or called. Whatever else stands in a
pickle is a `ValueError`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

DTYPES = {
    "torch FloatStorage": "float32",
    "torch DoubleStorage": "float64",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
}
TENSOR, ORDERED = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
VALUES = {
    "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE"
}  # fmt: skip
CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}
IGNORED = {"PROTO", "FRAME", "STOP"}
MOST_BYTES = 1 << 20
MOST_NUMBERS = 1 << 56
_MARK = object()


class SavedTensor(NamedTuple):
    """A tensor in C order: where its numbers lie in its storage."""

    dtype: str
    shape: tuple[int, ...]
    storage: str  # name of the file of its storage
    first: int  # number of the storage where it begins


class _Name(NamedTuple):
    name: str


class _Storage(NamedTuple):
    dtype: str
    key: str


@dataclass(slots=True)
class _Machine:
    stack: list[object] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)

    def to_mark(self) -> list[object]:
        """Take what was pushed since the last mark."""
        at = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken

    def last(self, count: int) -> list[object]:
        """Take what was pushed last."""
        taken = self.stack[-count:]
        if len(taken) < count:
            raise ValueError("it takes more than there is")
        del self.stack[-count:]
        return taken

    def top(self, kind: type) -> object:
        """Return what was pushed last, which must be of this kind."""
        if not isinstance(self.stack[-1], kind):
            raise ValueError("it puts values into what holds none")
        return self.stack[-1]

    def put_items(self, items: list[object]) -> None:
        """Put keys and values, which follow one another, into the dict on the stack."""
        held = cast(dict[str, object], self.top(dict))
        if not all(isinstance(key, str) for key in items[::2]):
            raise ValueError("keys of a dict are not text")
        held.update(zip(cast(list[str], items[::2]), items[1::2], strict=True))

    def extend(self, items: list[object]) -> None:
        """Put values into the list on the stack."""
        cast(list[object], self.top(list)).extend(items)

    def reduce(self) -> object:
        """Return what a call of one of two names gives."""
        name, arguments = self.last(2)
        if name == _Name(ORDERED) and arguments == ():
            return {}
        if name == _Name(TENSOR) and isinstance(arguments, tuple):
            return _tensor(arguments)
        raise ValueError(f"it calls {name}")


_ACTIONS: dict[str, Callable[[_Machine], object]] = {
    "MARK": lambda machine: machine.stack.append(_MARK),
    "EMPTY_DICT": lambda machine: machine.stack.append({}),
    "EMPTY_LIST": lambda machine: machine.stack.append([]),
    "TUPLE": lambda machine: machine.stack.append(tuple(machine.to_mark())),
    "TUPLE1": lambda machine: machine.stack.append(tuple(machine.last(1))),
    "TUPLE2": lambda machine: machine.stack.append(tuple(machine.last(2))),
    "TUPLE3": lambda machine: machine.stack.append(tuple(machine.last(3))),
    "SETITEM": lambda machine: machine.put_items(machine.last(2)),
    "SETITEMS": lambda machine: machine.put_items(machine.to_mark()),
    "APPEND": lambda machine: machine.extend(machine.last(1)),
    "APPENDS": lambda machine: machine.extend(machine.to_mark()),
    "BINPERSID": lambda machine: machine.stack.append(_storage(machine.last(1)[0])),
    "REDUCE": lambda machine: machine.stack.append(machine.reduce()),
}


def saved(data: bytes) -> object:
    """Return what a pickle holds, a `SavedTensor` for each tensor.

    Raises `ValueError` for what is not of the opcodes and names known here.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"its pickle has {len(data):,} bytes")
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            _step(machine, opcode.name, argument)
        return machine.last(1)[0]
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"its pickle is damaged: {error!r}") from None


def _step(machine: _Machine, name: str, argument: object) -> None:
    if name in VALUES:
        machine.stack.append(argument)
    elif name in CONSTANTS:
        machine.stack.append(CONSTANTS[name])
    elif name in _ACTIONS:
        _ACTIONS[name](machine)
    elif name == "GLOBAL":
        machine.stack.append(_name(str(argument)))
    elif name in ("BINPUT", "LONG_BINPUT"):
        machine.memo[cast(int, argument)] = machine.stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        machine.stack.append(machine.memo[cast(int, argument)])
    elif name not in IGNORED:
        raise ValueError(f"its pickle has the opcode {name}")


def _name(name: str) -> _Name:
    if name not in (TENSOR, ORDERED) and name not in DTYPES:
        raise ValueError(f"it holds {name.replace(' ', '.')!r}")
    return _Name(name)


def _storage(told: object) -> _Storage:
    if isinstance(told, tuple) and len(told) == 5 and told[0] == "storage":
        kind, key = told[1:3]
        if isinstance(kind, _Name) and kind.name in DTYPES and isinstance(key, str):
            return _Storage(DTYPES[kind.name], key)
    raise ValueError("its pickle names a storage that is none")


def _tensor(arguments: tuple[object, ...]) -> SavedTensor:
    if len(arguments) != 6:
        raise ValueError("it holds a tensor that is conjugated, negated, or of another version")
    storage, first, shape, strides = arguments[:4]
    if not (isinstance(storage, _Storage) and isinstance(shape, tuple)):
        raise ValueError("its pickle holds a tensor that is none")
    numbers = (first, *shape, *cast(tuple[object, ...], strides))
    if not all(type(number) is int and 0 <= number < MOST_NUMBERS for number in numbers):
        raise ValueError("its pickle holds a tensor that is none")
    step = 1
    for length, stride in zip(shape[::-1], cast(tuple[int, ...], strides)[::-1], strict=True):
        if length > 1 and stride != step and 0 not in shape:
            raise ValueError("it holds a tensor that is not in C order")
        step *= length
    return SavedTensor(storage.dtype, shape, storage.key, cast(int, first))
