"""Errors of the disk as h5py tells them."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Raise as `OSError`, with number and file, what h5py repeats only in words."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        number = getattr(error, "errno", None) or re.search(r"errno = (\d+)", str(error))
        if number is None and isinstance(error, ValueError):
            raise
        code = number if isinstance(number, int) else int(number[1]) if number else errno.EIO
        raise OSError(code, getattr(error, "strerror", None) or str(error), str(path)) from error
