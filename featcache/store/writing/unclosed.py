"""Writers that nobody closed: closed when they are dropped, and when their process ends."""

from __future__ import annotations

import atexit
import logging
import threading
import warnings
from collections.abc import Callable
from multiprocessing.util import Finalize, is_exiting
from typing import TypeVar

from featcache.store.writing.background import THREAD

W = TypeVar("W")
CACHES = 10  # before multiprocessing waits for child processes, which may wait for the lock
PARTS = 11  # before the writers of caches, which publish them
PATIENCE_S = 5.0  # of who drops a writer, which goes on being closed then
_log = logging.getLogger("featcache")
_unclosed: list[tuple[int, Finalize]] = []  # priority, and what closes a writer
_ending = False  # the process


def close_at_exit(
    writer: W,
    what: str,
    close: Callable[[W], None],
    owner: object = None,
    *,
    expected: bool = False,
) -> Callable[[], object]:
    """Have a writer closed when its process ends, with a warning; returns what calls that off.

    There is no warning where that is the `expected` end of a writer.

    The writer of a cache has an `owner`, which it must not know, and is closed as soon as that is
    collected.

    `atexit` alone would not do: a process of `multiprocessing`, such as a worker of a DataLoader,
    leaves by `os._exit`, after it has run these. In a process that was forked from the writer's
    nothing is run.
    """
    priority = PARTS if owner is None else CACHES
    finalizer = Finalize(owner, _close, (writer, what, close, expected), exitpriority=priority)
    _unclosed[:] = [each for each in _unclosed if each[1].still_active()]
    _unclosed.append((priority, finalizer))
    return finalizer.cancel


def close_before_libraries_end() -> None:
    """Have writers closed before the libraries that are loaded by now take leave at exit.

    h5py takes its type conversions away then, and the thread that still writes crashes the process.
    """
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # what is registered last runs first


def _close_all() -> None:
    global _ending
    _ending = True
    for _, finalizer in sorted(_unclosed, key=lambda each: -each[0]):
        finalizer()


def _close(writer: W, what: str, close: Callable[[W], None], expected: bool) -> None:
    """Close a writer when its process ends, or from the middle of whatever collected it.

    That may be its own thread, for which closing would wait, or a call of h5py, whose lock its
    thread would wait for. So another thread closes it.
    """
    told: list[str] = []
    thread = threading.Thread(target=_closed, args=(writer, what, close, expected, told))
    if _ending or is_exiting():
        thread.run()
    else:
        thread.start()
        if threading.current_thread().name != THREAD:
            thread.join(PATIENCE_S)
    for text in told:
        warnings.warn(text, ResourceWarning, stacklevel=2)


def _closed(
    writer: W, what: str, close: Callable[[W], None], expected: bool, told: list[str]
) -> None:
    """Close a writer, and log and note what there is to tell of it."""
    text = (
        f"{what} was not closed: what it had taken is stored now; close it, or use it in a `with` "
        "block"
    )
    try:
        close(writer)
        if expected:
            return
    except Exception as error:  # there is nobody to raise it to
        text = f"{what} was not closed, and closing it now failed: {error}"
    _log.warning("%s", text)
    told.append(text)
