"""Stamps of inputs: digests of files, tensors and items that features are computed from."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache._tensors import is_tensor
from featcache.interface import Array

if TYPE_CHECKING:
    import torch

# Digests of what `compute_features` is given of an utterance, by name.


class _Unknown(Exception):  # noqa: N818  # never leaves this module
    """A value that nothing describes."""


def input_digests(data: object, id: str, mentioned: frozenset[str] | None = None) -> dict[str, str]:
    """Return the xxh3-64 of each named value of a batch of one utterance.

    Values that nothing describes are left out, and so is the id.

    Args:
        data: the batch: a mapping, an object such as SpeechBrain's `PaddedBatch`, or a sequence.
        id: of the utterance.
        mentioned: names that count; None: all.

    >>> sorted(input_digests({"id": ["u1"], "sig": np.zeros(3), "text": "yes"}, "u1"))
    ['sig', 'text']
    """
    found = {}
    for name, value in _named(data):
        if not (mentioned is None or name in mentioned or name.isdigit()):
            continue
        if isinstance(value, str) and value == id:
            continue
        state = xxhash.xxh3_64()
        try:
            _feed(state, value)
        except (_Unknown, RecursionError):
            continue
        found[name] = state.hexdigest()
    return found


def _named(data: object) -> Iterator[tuple[str, object]]:
    """Iterate over the values of a batch by name, or by place where they have none."""
    while isinstance(data, list | tuple) and len(data) == 1 and not hasattr(data, "_fields"):
        data = data[0]
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        for place, value in enumerate(data):
            if isinstance(value, Mapping):
                yield from _named(value)
            else:
                yield str(place), value
        return
    fields = _fields(data)
    if fields is None:
        yield "0", data
        return
    own = type(data).__module__.startswith("speechbrain.")  # a batch's notes of itself
    for name, value in fields.items():
        if name != "id" and not (own and name.startswith("_")):
            yield name, value


def _fields(value: object) -> dict[str, object] | None:
    """Return the items of a mapping or the attributes of an object that holds values."""
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in value.items()}
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return dict(zip(names, value, strict=True))
    if dataclasses.is_dataclass(value) or type(value).__module__.startswith("speechbrain."):
        return dict(vars(value))
    plain = hasattr(value, "shape") or isinstance(value, str | bytes | int | float | None)
    return None if plain or not hasattr(value, "__dict__") else dict(vars(value))


def _feed(state: xxhash.xxh3_64, value: object) -> None:
    """Add a value to a digest, the same in every process."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        state.update(str(tensor.dtype).encode())
        value = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            raise _Unknown
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(array.data.cast("B") if array.size and array.ndim else array.tobytes())
    elif isinstance(value, str):
        state.update(b"s" if _is_path(value) else b"s" + value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        state.update(b"b" + bytes(value))
    elif isinstance(value, bool | int | float | complex | None):
        state.update(f"{type(value).__name__} {value!r}".encode())
    elif isinstance(value, Set):
        state.update(" ".join(sorted(map(repr, value))).encode())
    elif isinstance(value, list | tuple):
        state.update(f"[{len(value)}".encode())
        for inner in value:
            _feed(state, inner)
    else:
        _feed_fields(state, value)


def _feed_fields(state: xxhash.xxh3_64, value: object) -> None:
    fields = _fields(value)
    if fields is None:
        raise _Unknown
    for name, inner in sorted(fields.items()):
        state.update(f"{{{name}".encode())
        _feed(state, inner)


def _is_path(text: str) -> bool:
    """Whether a text is where something lies: the same data may lie elsewhere."""
    if not {"/", "\\"}.intersection(text) or len(text) > 4096 or "\0" in text:
        return False
    return Path(text).is_absolute() or Path(text).exists()


# Stamps: digests of an utterance's input, and of its entry in the data set.
#
# The input is the item as the data set delivered it: samples and other values, by their bytes.
# The entry is what the data set lists of an utterance (a path, a duration, a text), with size and
# time of change of the files that it names: it is digested without loading anything. Both are
# xxh3-64 numbers, the same in every process, and never 0, which says that nothing is known.

UNKNOWN = 0
_ENTRIES_AT_ONCE = 4096
_SLOW_STAT_S = 50e-6  # of a disk in the network: many files are asked for at a time
_ASKING = 32  # threads, which only wait
_SOME = 64  # files that are timed
_READ_BYTES = 1 << 20
_MAY_BE_PATH = re.compile(r"[/\\]|\.\w{1,5}\Z").search
_IS_PATH = re.compile(r"/.*|[A-Za-z]:\\.*|\S*\.\w{1,5}").fullmatch
_LONGEST_PATH = 4096
_SAMPLES = 1024  # shorter arrays are labels, embeddings, tokens
_TIMES = (datetime.date, datetime.time, datetime.timedelta)
_PLAIN = (int, float, range, slice, decimal.Decimal, uuid.UUID, *_TIMES)
_COMPLETE_REPR = frozenset({bool, int, float, complex, type(None)})


def input_stamp(item: object, mentioned: frozenset[str] = frozenset()) -> int:
    """Return the digest of an item as the data set delivered it; 0 if something in it has none.

    Such is an object of an unknown class, or a file that is not there, where the item is its path.

    Of a mapping the keys that are `mentioned` count, all but "id" where none of them is. Paths of
    files do not count beside samples, which came from there: a move, or another lossless format,
    changes nothing. Where an item has no samples, or its path is mentioned, the file's content
    counts.

    >>> item = {"id": "a", "sig": np.zeros(4), "text": "four"}
    >>> sig = frozenset({"sig"})
    >>> input_stamp(item, sig) == input_stamp({"sig": np.zeros(4), "text": "4"}, sig)
    True
    """
    named_paths: set[str] = set()
    if isinstance(item, Mapping):
        named = mentioned.intersection(item) - {"id"}
        item = {key: item[key] for key in item if (key in named if named else key != "id")}
        values = item.values() if named else ()
        named_paths = {os.fsdecode(each) for each in values if isinstance(each, str | os.PathLike)}
    digest = _Digest()
    try:
        digest.add(item)
    except (_Unknown, RecursionError):
        return UNKNOWN
    if digest.lacks_file and not digest.samples:
        return UNKNOWN
    for path in digest.paths:
        if path in named_paths or not digest.samples:
            digest.add_content(path)
    return digest.number


def entry_stamps(entries: Iterable[object]) -> NDArray[np.uint64]:
    """Return the digests of entries, and of size and time of change of the files that they name.

    0 for an entry in which something has no digest, such as an object of an unknown class.

    >>> entry_stamps([{"wav": "a.wav"}, {"wav": "b.wav"}, object()]).astype(bool).tolist()
    [True, True, False]
    """
    found: list[int] = []
    states: dict[str, bytes] = {}  # of files; several utterances may name one
    rest = iter(entries)
    while some := [_entry(entry) for entry in islice(rest, _ENTRIES_AT_ONCE)]:
        paths = (path for digest in some if digest is not None for path in digest.paths)
        new = list(dict.fromkeys(path for path in paths if path not in states))
        states.update(zip(new, _states(new), strict=True))
        for digest in some:
            if digest is None:
                found.append(UNKNOWN)
                continue
            for path in digest.paths:
                digest.update(states[path])
            found.append(digest.number)
    return np.array(found, np.uint64)


def entry_digest(entry: object) -> int:
    """Return the digest of an entry alone, be its files as they may; 0 if something in it has none.

    >>> entry_digest(["a.wav", "yes"]) == entry_digest(("a.wav", "yes"))
    True
    """
    digest = _entry(entry)
    return UNKNOWN if digest is None else digest.number


def _entry(entry: object) -> _Digest | None:
    digest = _Digest(is_file=None)
    try:
        digest.add(entry)
    except (_Unknown, RecursionError):
        return None
    return digest


class _Digest:
    """Digest of a value, all that it holds included.

    Args:
        is_file: says which texts are left to `paths`, without being digested; None: all that look
            like paths are in `paths`, and digested, too.
    """

    def __init__(self, is_file: Callable[[str], bool] | None = os.path.isfile) -> None:
        self._hash = xxhash.xxh3_64()
        self.update = self._hash.update
        self._is_file = is_file
        self.paths: list[str] = []
        self.lacks_file = False  # whether a text is the path of a file that is not there
        self.samples = False  # whether an array is as long as those of audio

    @property
    def number(self) -> int:
        """The digest so far, never 0."""
        return self._hash.intdigest() or 1

    def add(self, value: Any) -> None:
        """Add a value; raises `_Unknown` if nothing describes it."""
        kind = type(value)
        if kind is str:
            self._add_text(value)
        elif kind in _COMPLETE_REPR:
            self.update(b"%r;" % value)
        elif kind is dict or isinstance(value, Mapping):
            self._add_mapping(value)
        elif kind is list or isinstance(value, list | tuple):
            self.update(b"[%d" % len(value))
            for each in value:
                self.add(each)
        else:
            self._add_other(value)

    def add_content(self, path: str) -> None:
        """Add what is in a file."""
        try:
            found = os.stat(path)  # noqa: PTH116  # of each utterance
            self.update(_content(path, found.st_size, found.st_mtime_ns))
        except OSError:
            self.update(b"gone")

    def _add_text(self, text: str) -> None:
        if len(text) < _LONGEST_PATH and _MAY_BE_PATH(text) and "\0" not in text:
            if self._is_file is None:
                self.paths.append(text)
            elif self._is_file(text):
                self.paths.append(text)
                self.update(b"file;")
                return
            else:
                self.lacks_file |= _IS_PATH(text) is not None
        self._add_bytes(b"s", text.encode("utf-8", "surrogatepass"))

    def _add_bytes(self, kind: bytes, data: bytes | bytearray) -> None:
        self.update(b"%b%d:" % (kind, len(data)))
        self.update(data)

    def _add_mapping(self, value: Mapping[object, object]) -> None:
        self.update(b"{%d" % len(value))
        keys = list(value)
        try:
            keys.sort()
        except TypeError:
            keys.sort(key=repr)
        for key in keys:
            self.add(key)
            self.add(value[key])

    def _add_other(self, value: object) -> None:
        if isinstance(value, np.ndarray | np.generic):
            self._add_array(np.asarray(value))
        elif is_tensor(value):
            self._add_tensor(value)
        elif isinstance(value, bytes | bytearray):
            self.samples |= len(value) >= _SAMPLES
            self._add_bytes(b"b", value)
        elif isinstance(value, enum.Enum):
            self._add_bytes(b"e", f"{type(value).__qualname__}.{value.name}".encode())
        elif isinstance(value, str | os.PathLike):
            self._add_text(os.fsdecode(value))
        elif isinstance(value, set | frozenset):
            self._add_set(value)
        elif isinstance(value, _PLAIN):
            self._add_bytes(b"r", repr(value).encode())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._add_bytes(b"d", type(value).__qualname__.encode())
            self.add({part.name: getattr(value, part.name) for part in dataclasses.fields(value)})
        else:
            raise _Unknown

    def _add_array(self, array: Array) -> None:
        self.samples |= array.size >= _SAMPLES
        if array.dtype.hasobject:
            self.update(b"o%d" % array.ndim)
            self.add(array.tolist())
            return
        self.update(f"a{array.dtype.str}{array.shape}".encode())
        if array.nbytes:
            self.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        import torch

        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise _Unknown
        self.samples |= tensor.numel() >= _SAMPLES
        self.update(f"t{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
        self.update(flat.view(torch.uint8).numpy().data)

    def _add_set(self, values: Iterable[object]) -> None:
        numbers: list[int] = []
        for value in values:
            digest = _Digest(self._is_file)
            digest.add(value)
            numbers.append(digest.number)
            self.paths += digest.paths
            self.samples |= digest.samples
            self.lacks_file |= digest.lacks_file
        self.add(["set", *sorted(numbers)])


def _states(paths: list[str]) -> list[bytes]:
    """Return size and time of change of files, many at a time where the disk is slow."""
    started = time.perf_counter()
    found = [_state(path) for path in paths[:_SOME]]
    rest = paths[_SOME:]
    if not rest or time.perf_counter() - started < _SLOW_STAT_S * _SOME:
        return found + [_state(path) for path in rest]
    pieces = [rest[start : start + _SOME] for start in range(0, len(rest), _SOME)]
    with ThreadPoolExecutor(_ASKING) as pool:
        states = pool.map(lambda piece: [_state(path) for path in piece], pieces)
        return [*found, *(state for piece in states for state in piece)]


def _state(path: str) -> bytes:
    try:
        found = os.stat(path)  # noqa: PTH116  # of each utterance
    except (OSError, ValueError):  # gone, or no path at all
        return b"none;"
    if not stat.S_ISREG(found.st_mode):
        return b"none;"
    return b"%d,%d;" % (found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4096)  # many utterances may be segments of one file
def _content(path: str, size: int, changed_ns: int) -> bytes:
    """Return the digest of a file's bytes."""
    digest = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # of each utterance
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.digest()
