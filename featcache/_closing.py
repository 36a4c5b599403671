"""Closing of resources without hiding the error that is on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def close_after(error: BaseException | None, close: Callable[[], object]) -> None:
    """Close after an error, if there was one; an error of `close` is a note on it then."""
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
    try:
        yield
    except BaseException as error:
        close_after(error, close)
        raise
    close_after(None, close)
