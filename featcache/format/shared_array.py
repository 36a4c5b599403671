"""`SharedArray`: numbers that processes share: none of them has a copy of its own."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.format.files import digest

SMALL_BYTES = 1 << 20  # less is pickled by value: a file costs a descriptor in each process

Number = TypeVar("Number", bound=np.generic)


class SharedArray(Generic[Number]):
    """A read-only array of one axis that workers of this machine share.

    A forked process has the pages of this one. To one that is spawned, an array over 1 MiB goes as
    an open file without a name, which both map; there is nothing that could be left behind. All
    other pickles hold the numbers: they may be read later, or on another machine.
    """

    def __init__(self, values: NDArray[Number]) -> None:
        self.values: NDArray[Number] = np.ascontiguousarray(values).view()
        self.values.flags.writeable = False
        self._file: int | None = None

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def digest(self) -> str:
        """A digest of the numbers."""
        return digest(self.values.data)

    def __reduce__(self) -> tuple[object, ...]:
        if (
            self.values.nbytes <= SMALL_BYTES
            or os.name != "posix"
            or context.get_spawning_popen() is None
        ):
            return SharedArray, (self.values,)
        return _mapped, (cast(Any, reduction).DupFd(self._in_file()), self.values.dtype)

    def _in_file(self) -> int:
        """Return a file that holds the numbers, which are mapped from it then."""
        if self._file is None:
            self._file = _nameless_file()
            with os.fdopen(os.dup(self._file), "wb") as file:
                file.write(self.values.data)
            self.values = _map(self._file, self.values.dtype)
        return self._file

    def __del__(self, close: Callable[[int], object] = os.close) -> None:
        if (file := getattr(self, "_file", None)) is not None:
            close(file)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("featcache-rows")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _map(file: int, dtype: np.dtype[Number]) -> NDArray[Number]:
    return np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ), dtype)


def _mapped(file: Any, dtype: np.dtype[Number]) -> SharedArray[Number]:
    descriptor = file.detach()
    try:
        return SharedArray(_map(descriptor, dtype))
    finally:
        os.close(descriptor)
