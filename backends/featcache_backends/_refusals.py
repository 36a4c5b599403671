"""Errors that the formats share: for an option, a missing library, a damaged block."""

from __future__ import annotations

import importlib
import struct
import zlib
from types import ModuleType

from featcache.errors import ConfigError, CorruptCacheError, MissingDependencyError

# whatever a decoder raises for bytes that no encoder made
DAMAGE = (
    *(ValueError, RuntimeError, ArithmeticError, SystemError, MemoryError),
    *(struct.error, zlib.error),
)


def check_range(name: str, value: object, least: int, most: int) -> None:
    """Raise `ConfigError` for an option that is no integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{name} must be an integer from {least} to {most}, not {value!r}")


def import_library(module: str, user: str, extra: str) -> ModuleType:
    """Import a library; raises `MissingDependencyError` with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{user} needs {module.partition('.')[0]!r}; try: pip install 'featcache[{extra}]'"
        ) from error


def damaged_block(codec: str, data: memoryview, error: Exception) -> CorruptCacheError:
    """Return the error for a block that cannot be decoded."""
    return CorruptCacheError(
        f"{codec}: a block of {len(data)} bytes cannot be decompressed: {error}"
    )
