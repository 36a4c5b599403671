"""Ways to load archives of Kaldi that hold other objects than matrices and vectors of floats.

In binary archives an object follows `<id> ` and the bytes 00 "B". Each number is behind its size;
lists, posteriors and pairs begin with how many there are, as vectors of integers do: what fits all
objects that are looked at is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from featcache.adoption.libraries.loads import MOST_BYTES, WAVEFORMS, WAVES, Loads

# by what kaldi_native_io calls them, the array of an object, which is `v`
_ARRAYS = {
    "Bool": "v",
    "Double": "v",
    "Int32": "v, 'int32'",
    "Float": "v, 'float32'",
    "Int8Vector": "v, 'int8'",
    "Int32VectorVector": "[[t, i] for t, some in enumerate(v) for i in some]).reshape(-1, 2",
    "Posterior": "[[t, i, w] for t, some in enumerate(v) for i, w in some]).reshape(-1, 3",
    "GaussPost": "[[t, i, w] for t, some in enumerate(v) for i, ws in some for w in ws]",
    "Int32PairVector": "v).reshape(-1, 2",
    "FloatPairVector": "v, 'float32').reshape(-1, 2",
}
_Layout = str | list[Any] | tuple[Any, ...]  # a leaf; a list, behind its length; one after another
_LEAVES = {"i": ((b"\4",), 4), "c": ((b"\1",), 1), "d": ((b"\x08",), 8), "b": ((b"T", b"F"), 0),
           "v": ((b"FV \4",), 4)}  # fmt: skip
# where objects fit several, the first one is taken
_LAYOUTS: dict[str, _Layout] = {
    "Bool": "b",
    "Double": "d",
    "Int8Vector": ["c"],
    "Int32VectorVector": [["i"]],
    "Posterior": [[("i", "i")]],
    "GaussPost": [[("i", "v")]],
    "Int32PairVector": [("i", "i")],
    "Int32": "i",
}
_OR_FLOATS = {"Int32PairVector": "FloatPairVector", "Int32": "Float"}
_NOTHING = b"\4\0\0\0\0"
_NUMBER = np.dtype([("size", "u1"), ("number", "<i4")])
_BINARY = b"\0B"
_ID_BYTES, _LOOKED_AT = 4096, 1 << 16
_WHOLE_FLOATS = 1 << 24  # above, an integer is the bits of a float
_ANNOTATE = "texts are annotations of the cache that has these ids, as by cache.annotate"


def loads_of_kaldi(path: Path) -> Loads | None:
    """Return what loads archives, or an scp of such, by the first objects."""
    if path.name == "wav.scp":
        return Loads(WAVEFORMS)
    with path.open("rb") as file:
        id, _, rest = file.readline(MOST_BYTES).partition(b" ")
        if path.suffix == ".scp":
            place, _, offset = rest.strip().decode(errors="replace").rpartition(":")
            if rest.rstrip()[-1:] in (b"|", b"]") or not Path(place or offset).is_file():
                return None
            with Path(place or offset).open("rb") as named:
                named.seek(int(offset) if place else 0)
                front = named.read(MOST_BYTES)
        else:
            file.seek(len(id) + 1)
            front = file.read(MOST_BYTES)
    if front[:4] in WAVES:
        return Loads(WAVEFORMS)
    what = _object_in(front[:_LOOKED_AT]) if front[:2] == _BINARY else _text_in(front)
    if what is None:
        return None
    rows = f"kaldi_native_io.Sequential{what}Reader({f'{path.suffix[1:]}:'!r} + str(<path>))"
    if what == "TokenVector":
        texts = f"{{k: {{'text': ' '.join(v)}} for k, v in {rows}}}"
        return Loads(f"{_ANNOTATE}({texts.replace('<path>', repr(str(path)))})")
    return Loads(
        "Kaldi's library reads it", f"{{k: numpy.array({_ARRAYS[what]}) for k, v in {rows}}}"
    )


def _text_in(front: bytes) -> str | None:
    """Return what a text archive holds; None for numbers, vectors and matrices."""
    line = front.partition(b"\n")[0].strip()
    words = [word for word in line.split() if word not in (b"[", b"]", b";")]
    numbers = all(re.fullmatch(rb"[-+.\de]+|[-+]?(nan|inf)", word.lower()) for word in words)
    if not numbers:
        is_text = b"[" not in line and front[:2] not in (b"PK", b"NP") and b"\0" not in front
        return "Bool" if line in (b"T", b"F") else "TokenVector" if is_text else None
    if re.match(rb"\d+ \d+ \d+ +\[", line):
        return "GaussPost"
    if line.count(b"[") > 1:
        return "Posterior"
    if b";" not in front.partition(b"[")[0]:
        return None
    if line.endswith(b";"):
        return "Int32VectorVector"
    return "FloatPairVector" if re.search(rb"\d\.\d", front) else "Int32PairVector"


def _object_in(data: bytes) -> str | None:
    """Return what a binary archive holds whose first object is at the begin of some bytes."""
    for what, layout in _LAYOUTS.items():
        try:
            found = [*_objects(data, layout)]
        except ValueError:
            continue
        if {*found} <= {_NOTHING}:  # zeros, or lists of nothing
            return None
        if what not in _OR_FLOATS:
            return what
        behind = 5 if layout != "i" else 0  # how many there are
        numbers = np.concatenate([
            np.frombuffer(each[behind:], _NUMBER, (len(each) - behind) // 5) for each in found
        ])["number"]  # fmt: skip
        return _OR_FLOATS[what] if (np.abs(numbers) > _WHOLE_FLOATS).any() else what
    return None


def _objects(data: bytes, layout: _Layout) -> Iterator[bytes]:
    """Yield objects up to the first one that is cut; raises `ValueError` for another layout."""
    at, cut = 0, False
    while at < len(data) and not cut:
        begin = at + len(_BINARY)
        end = _end(layout, data, begin)
        cut = end > len(data) or b" " not in data[end : end + _ID_BYTES]
        if not cut:
            id, _, _ = data[end : end + _ID_BYTES].partition(b" ")
            at = end + len(id) + 1
            is_next = _BINARY.startswith(data[at : at + len(_BINARY)])
            if min(id, default=0) <= ord(" ") or not is_next:
                raise ValueError("no object begins where it ends")
        elif end < len(data) or (end > len(data) and len(data) < _LOOKED_AT):
            raise ValueError("it does not end where the file does")
        yield data[begin:end]


def _end(layout: _Layout, data: bytes, at: int) -> int:
    """Return where an object ends that begins at a byte; behind the bytes for one that is cut."""
    if at >= len(data):
        return len(data) + 1
    if isinstance(layout, tuple):
        for each in layout:
            at = _end(each, data, at)
        return at
    if isinstance(layout, list):
        at, count = _end("i", data, at), int.from_bytes(data[at + 1 : at + 5], "little")
        for _ in range(count):
            if at > len(data):
                break
            at = _end(layout[0], data, at)
        return at
    marks, size = _LEAVES[layout]
    mark = next((each for each in marks if data.startswith(each, at)), None)
    if mark is None:
        raise ValueError(f"there is no {layout!r}")
    if layout == "v":
        size = 4 * int.from_bytes(data[at + 4 : at + 8], "little") + size
    return at + len(mark) + size
