"""The dtypes that features can have, and the names under which NumPy and torch know them."""

from __future__ import annotations

import numpy as np

from featcache.errors import UnknownNameError, nearest

DTYPES = (
    *("float16", "float32", "float64", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "bool",
)
_CODES = {np.dtype(name).str[1:]: name for name in DTYPES if name != "bfloat16"}  # "f4"
# of any byte order: on disk all are little-endian
_ALIASES = {f"{order}{code}": name for code, name in _CODES.items() for order in "<>=|"}
_ALIASES |= {"half": "float16", "single": "float32", "double": "float64"}


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype that features can have.

    Understands names, NumPy's codes with a byte order ("<f4"), and dtypes of NumPy and torch.
    "float" and "int" are refused: they have 64 bits in NumPy and 32 in torch.

    >>> dtype_name("half"), dtype_name(np.int16), dtype_name(np.dtype("<f4"))
    ('float16', 'int16', 'float32')
    """
    name = _name(dtype)
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        hint = f"did you mean {_CODES[name]!r}?" if name in _CODES else nearest(name, DTYPES)
        raise UnknownNameError(f"dtype {dtype!r} cannot be used; {hint}")
    return name


def _name(dtype: object) -> str:
    if isinstance(dtype, type):
        return np.dtype(dtype).name if issubclass(dtype, np.generic) else dtype.__name__
    if isinstance(dtype, np.dtype):
        return dtype.name
    return str(dtype).removeprefix("torch.")
