"""Steps that a disk takes, one after the other: kept, so that they can be taken again on a copy."""

from __future__ import annotations

from functools import partial
from typing import Any

from crash_disk import ROOT, Disk

Step = partial[Any]  # of a method of `Disk`; the disk itself is still to be given


def is_change(step: Step) -> bool:
    """Say whether readers may see a difference after a step."""
    return step.func not in (Disk.sync, Disk.mark)


def moves_name(step: Step) -> bool:
    """Say whether a step makes a directory, or moves a name."""
    return step.func in (Disk.make_directory, Disk.rename)


def describe(disk: Disk, step: Step) -> str:
    """Return a step that is to come in words, with the path that it is about."""
    given = step.keywords
    path = disk.path(given.get("to", given.get("parent", given.get("number", ROOT))))
    name = given.get("new", given.get("name", given.get("text", "")))
    return f"{step.func.__name__} {'/'.join(filter(None, [path, name]))}"
