"""Description of plain values; text that is a path or a device counts for nothing."""

from __future__ import annotations

import math
import re
from typing import Any

from featcache.store.format.files import digest

_MOST_SEED = 1 << 48  # larger ones were drawn by the system
NOTHING = object()  # a value that does not count
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|meta)(:\d+)?$")
# absolute or beginning with a place, or with a file's suffix behind a slash
_PATH = re.compile(
    r"([/~]\w|\.{1,2}[/\\]|[A-Za-z]:[/\\]|\\\\)|[^\s]*[/\\][^/\\]*\.[A-Za-z]\w{0,5}$"
)
_PLACE = re.compile(r"path|dir|folder|file|root|dest|source|save|output|location", re.IGNORECASE)


def plain_of(value: Any, name: str) -> object:
    """Describe a plain value; `NOTHING` for paths and devices."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes {digest(value)}"
    if isinstance(value, str):
        value = str(value)
        return NOTHING if is_path(value, name) or _DEVICE.match(value) else unicode_of(value)
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >> 64:
        return hex(value)
    return value


def is_path(text: str, name: str = "") -> bool:
    """Tell whether text is a path: an absolute one, a file's, or one by the name that it has."""
    if "://" in text:
        return False
    slashed = "/" in text or "\\" in text
    return bool(_PATH.match(text)) or (slashed and bool(_PLACE.search(name.rpartition(".")[2])))


def unicode_of(text: str) -> str:
    """Return text as valid Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()


def seed_of(generator: Any) -> object:
    """Describe a generator by the seed that the user gave; its state changes while it is used."""
    if hasattr(generator, "initial_seed"):  # of torch
        seed: object = generator.initial_seed()
    else:
        sequence = getattr(generator, "bit_generator", generator).seed_seq
        seed = getattr(sequence, "entropy", None)
    given = isinstance(seed, int) and seed < _MOST_SEED
    return {"class": type(generator).__qualname__, "seed": seed} if given else NOTHING
