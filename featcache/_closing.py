"""Closing of resources without hiding the error that is on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


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


@contextmanager
def pool_of(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Make threads for a `with` block, also of a generator that yields within it.

    What is begun is done by its end, and after an error no more. A generator that is closed waits
    for nothing: the garbage collector may do that in a thread that those of the block wait for.
    """
    from concurrent.futures import ThreadPoolExecutor  # whoever only opens a cache is quick without

    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    except BaseException as error:
        pool.shutdown(wait=not isinstance(error, GeneratorExit), cancel_futures=True)
        raise
    pool.shutdown()
