"""Closing of resources without hiding the error that is on its way.

An error that is on its way stays the one that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def close_after(error: BaseException | None, close: Callable[[], object]) -> None:
    """Close after an error, if there was one.

    An error of `close` does not hide it, but is noted on it.
    """
    try:
        close()
    except Exception as second:
        if error is None:
            raise
        if second is not error:
            error.add_note(f"then closing the cache failed: {second}")


@contextmanager
def closed_after(close: Callable[[], object]) -> Iterator[None]:
    """Close at the end of a `with` block, as `close_after` does."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as failure:
        error = failure
        raise
    finally:
        close_after(error, close)
