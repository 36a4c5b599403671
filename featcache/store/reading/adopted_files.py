"""Files of adopted sources: opened where they lie, if they are as they were when adopted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from featcache.errors import CorruptCacheError
from featcache.store.format.files import open_within
from featcache.store.format.index import ContainerColumns
from featcache.store.format.manifest_entries import PartEntry
from featcache.store.format.roots import NO_ROOTS, Root, Roots, roots_of

_SECOND = 10**9  # nanoseconds


class AdoptedFiles:
    """The containers of an index that lie below the roots of adopted parts.

    Args:
        columns: the containers.
        roots: of each part, in the manifest's order; None: its containers lie in the cache.
    """

    def __init__(self, columns: ContainerColumns, roots: Sequence[Root | None]) -> None:
        self._columns = columns
        self._roots = roots
        self._parts, self._sizes = columns.parts.data, columns.sizes.data
        if columns.mtimes is None:
            raise CorruptCacheError("the index of an adopted part is damaged: it lacks times")
        self._mtimes = columns.mtimes.data

    @classmethod
    def of(
        cls,
        cache: Path,
        parts: Sequence[PartEntry],
        columns: ContainerColumns,
        elsewhere: Roots = NO_ROOTS,
    ) -> AdoptedFiles | None:
        """Return the adopted ones of the containers of some parts; None if there are none."""
        roots = roots_of(cache, parts, elsewhere)
        return cls(columns, roots) if len(columns) and any(roots) else None

    def __contains__(self, number: int) -> bool:
        part = self._parts[number]
        return 0 <= part < len(self._roots) and self._roots[part] is not None

    def path(self, number: int) -> str:
        """Return where a container is looked for."""
        root, path = self._root(number), self._columns.path(number)
        return f"<{root.key}>/{path}" if root.path is None else f"{root.path}/{path}"

    def open(self, number: int) -> int:
        """Open a container for reading, and return its descriptor.

        Raises `CorruptCacheError` if it is not there, or not as it was when it was adopted.
        """
        root, path, size = self._root(number), self._columns.path(number), self._sizes[number]
        if root.path is None:
            raise CorruptCacheError(
                f"adopted file {self.path(number)!r}: nothing says where its source lies; if "
                f"{_moved(root)}"
            )
        try:
            descriptor = open_within(root.path, path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptCacheError(
                f"adopted file {self.path(number)!r} is not there; if {_moved(root)}"
            ) from error
        except CorruptCacheError as error:
            raise CorruptCacheError(
                f"adopted file {self.path(number)!r} is another one now (a link, or no regular "
                "file); adopt its source again"
            ) from error
        status = os.fstat(descriptor)
        if status.st_size != size or not _is_same(status.st_mtime_ns, self._mtimes[number]):
            os.close(descriptor)
            raise CorruptCacheError(
                f"{self.path(number)!r} has changed since it was adopted ({size} bytes then, "
                f"{status.st_size} now, or another time of change); adopt its source again"
            )
        return descriptor

    def _root(self, number: int) -> Root:
        root = self._roots[self._parts[number]]
        if root is None:
            raise CorruptCacheError(f"container {number} belongs to no adopted part")
        return root


def _moved(root: Root) -> str:
    return (
        f"the source {root.key!r} lies elsewhere now, open the cache with "
        f"roots={{{root.key!r}: <its directory>}}"
    )


def _is_same(found: int, noted: int) -> bool:
    """Compare times of change; tar and some file systems keep whole seconds."""
    return found == noted or (found % _SECOND == 0 and found == noted - noted % _SECOND)
