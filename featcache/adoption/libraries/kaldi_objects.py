"""Ways to load archives of Kaldi that hold other objects than matrices and vectors of floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from featcache.adoption.libraries.loads import MOST_BYTES, WAVEFORMS, WAVES, Loads

_KALDI = {
    "Posterior": "[[t, i, w] for t, some in enumerate(v) for i, w in some]).reshape(-1, 3",
    "Int32VectorVector": "[[t, i] for t, some in enumerate(v) for i in some]).reshape(-1, 2",
    "Int32PairVector": "v).reshape(-1, 2",
    "FloatPairVector": "v, 'float32').reshape(-1, 2",
    "Int8Vector": "v, 'int8'",
    "Int32": "v, 'int32'",
    "Float": "v, 'float32'",
    "Double": "v",
}


def loads_of_kaldi(path: Path) -> Loads | None:
    """Return what loads archives, or an scp of such, by the first object."""
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
    what = _object_of_kaldi(front)
    if what is None:
        return None
    rows = f"kaldi_native_io.Sequential{what}Reader({f'{path.suffix[1:]}:'!r} + str(<path>))"
    return Loads(
        "Kaldi's library reads it", f"{{k: numpy.array({_KALDI[what]}) for k, v in {rows}}}"
    )


def _object_of_kaldi(data: bytes) -> str | None:
    if data[:1] != b"\0":  # text
        return "Posterior" if data.partition(b"\n")[0].count(b"[") > 1 else None
    if data[2:3] == b"\x08":
        return "Double"
    if data[2:3] == b"\4" and data[7:8] == b"\1":
        return "Int8Vector"
    # integers, or floats, each behind its size
    found = np.frombuffer(
        data[2 : 2 + (len(data) - 2) // 5 * 5], [("size", "u1"), ("number", "<i4")]
    )
    sized = np.cumprod(found["size"] == 4).astype(bool)  # up to the next id
    first, *rest = found["number"][sized].tolist() or [0]
    is_float = any(abs(each) > 1 << 24 for each in rest or [first])
    if not rest:
        return ("Float" if is_float else "Int32") if first else None
    for what, numbers in (("Int32VectorVector", 1), ("Posterior", 2)):
        at = 0
        for _ in range(first):
            at += 1 + numbers * rest[at] if at < len(rest) and rest[at] >= 0 else len(rest) + 1
        if at == len(rest):
            return what
    if len(rest) == 2 * first:
        return "FloatPairVector" if is_float else "Int32PairVector"
    return None
