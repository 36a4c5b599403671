"""Utterances that could not be computed: for people, a line each in `work-failures.jsonl`."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

from featcache.store.format.files import write_durably

FAILURES = "work-failures.jsonl"


class Failure(TypedDict):
    """A line of the file: an utterance that could not be computed."""

    id: str | None  # None if the loader does not show it
    error: str
    type: str
    traceback: str


def failure_of(id: str | None, error: Exception) -> Failure:
    """Return the line for an utterance that ended in an error."""
    text = "".join(traceback.format_exception(error))
    return {"id": id, "error": str(error), "type": type(error).__name__, "traceback": text}


def read_failures(cache: Path) -> list[Failure]:
    """Return the lines of a cache's file that can be read; none if it has no file."""
    found: list[Failure] = []
    with contextlib.suppress(OSError):
        for line in (cache / FAILURES).read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError):
                failure = json.loads(line)
                if isinstance(failure, dict) and "id" in failure:
                    found.append(cast(Failure, failure))
    return found


def write_failures(cache: Path, failures: Sequence[Failure]) -> None:
    """Replace the file; without failures there is none."""
    path = cache / FAILURES
    if not failures:
        path.unlink(missing_ok=True)
        return
    lines = [json.dumps(failure, ensure_ascii=False) + "\n" for failure in failures]
    write_durably(path, "".join(lines).encode("utf-8", "backslashreplace"))
