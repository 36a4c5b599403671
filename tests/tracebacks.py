"""Places of featcache in a traceback, for tests that gather many errors."""

from __future__ import annotations

from pathlib import Path


def places(error: BaseException) -> str:
    """Return the innermost places of featcache in the traceback of an error."""
    found, trace = [], error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if {"featcache", "featcache_backends"} & {*file.parts[-4:-1]} and "tests" not in file.parts:
            found.append(f"{file.name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(found[-3:])
