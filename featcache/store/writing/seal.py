"""Sealing a part: its finished files get an index, and `part.json` names that."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from featcache.container_files import PAGE_BYTES, Pages, sync_directory
from featcache.errors import CacheError, CorruptCacheError
from featcache.interface import Extent, Ints
from featcache.stats import FeatureStats
from featcache.store.format import journal, lock
from featcache.store.format.column_file import save_columns
from featcache.store.format.files import open_within, remove_unfinished, write_durably
from featcache.store.format.index import ContainerColumns, Index
from featcache.store.format.index_writer import (
    Columns,
    annotation_columns,
    container_columns,
    index_columns,
    index_of,
    rows_of,
)
from featcache.store.format.journal_lines import Header, Utterance
from featcache.store.format.manifest import PARTS
from featcache.store.format.pages import container_digest, page_count, pages_of
from featcache.store.format.part import COLUMNS, SEAL, SealedPart, read_part
from featcache.store.format.sealed_json import pack_json
from featcache.store.format.strings import Strings, ends_of


class Content(Protocol):
    """Utterances of a part that is being sealed."""

    def __len__(self) -> int: ...

    def paths(self) -> set[str]:
        """Return the containers that their arrays lie in."""

    def index(
        self,
        containers: ContainerColumns,
        stats: Mapping[str, FeatureStats],
        names: Sequence[str],
    ) -> Index:
        """Return their index, in the order in which they were written."""

    def annotations(self, order: Ints) -> Columns:
        """Give their annotations as columns, in the order of the rows that they become."""


class Listed:
    """Utterances that are objects."""

    def __init__(self, utterances: Sequence[Utterance]) -> None:
        self._utterances = utterances

    def __len__(self) -> int:
        return len(self._utterances)

    def paths(self) -> set[str]:
        """Return the containers that their arrays lie in."""
        return {extent.container for extent in extents_of(self._utterances)}

    def index(
        self,
        containers: ContainerColumns,
        stats: Mapping[str, FeatureStats],
        names: Sequence[str],
    ) -> Index:
        """Return their index."""
        return index_of(self._utterances, containers, stats, names)

    def annotations(self, order: Ints) -> Columns:
        """Give their annotations as columns."""
        ids = [utterance.id for utterance in self._utterances]
        return annotation_columns(ids, [each.annotations for each in self._utterances], order)


_NO_CONTAINERS = (journal.NAME, lock.NAME, lock.SOFT_NAME, lock.HOLDER, COLUMNS, SEAL)


def seal_directory(
    cache: Path,
    name: str,
    header: Header,
    content: Content,
    stats: Mapping[str, FeatureStats],
    pages: Mapping[str, Pages],
) -> SealedPart:
    """Seal a part whose containers are finished, as holder of its lock.

    Writes the columns, names them in `part.json`, and removes the journal. `pages` are those that
    are known; those of other files are read.
    """
    directory = cache / PARTS / name
    if not (directory / journal.NAME).exists():
        raise CacheError(
            f"part {str(directory)!r} was taken over by another writer while this one was at work; "
            "see that one writer at a time works, and run the same again"
        )
    (directory / COLUMNS).unlink(missing_ok=True)  # of one who died here before
    remove_unfinished(directory)
    told = {
        "name": name,
        "rows": len(content),
        "page_bytes": PAGE_BYTES,
        "block_rows": dict(header.block_rows),
        "header": header.to_json(),
        "columns": _save_columns(directory, list(header.dims), content, stats, pages),
    }
    sync_directory(directory)
    write_durably(directory / SEAL, pack_json(told))
    sealed = read_part(cache, name)
    if sealed is None:
        raise CorruptCacheError(f"{str(directory / SEAL)!r} is not there after it was written")
    (directory / journal.NAME).unlink(missing_ok=True)
    return sealed


def _save_columns(
    directory: Path,
    names: list[str],
    content: Content,
    stats: Mapping[str, FeatureStats],
    known_pages: Mapping[str, Pages],
) -> str:
    pages = dict(_all_pages(directory, known_pages))
    sizes = {path: (directory / path).stat().st_size for path in pages}
    for path in sorted(content.paths() - pages.keys()):
        raise CorruptCacheError(
            f"container {str(directory / path)!r} is not there: another writer took the part over, "
            "which can be where locks do not count (see docs/format.md); run the same again"
        )
    for path, size in sizes.items():
        if page_count(size) != len(pages[path]):
            raise CorruptCacheError(
                f"container {str(directory / path)!r} has {size} bytes, not what was written"
            )
    digests = b"".join(container_digest(pages[path], sizes[path]) for path in pages)
    containers = ContainerColumns(
        paths=Strings.of(list(pages)),
        sizes=np.array(list(sizes.values()), np.int64),
        digests=np.frombuffer(digests, np.uint8),
        parts=np.zeros(len(pages), np.int32),
    )
    index = content.index(containers, stats, names)
    rows = rows_of([index], [])
    columns = itertools.chain(
        index_columns([index], rows, names, stats),
        container_columns([""], [containers]),
        [
            ("page_ends", ends_of([len(each) for each in pages.values()])),
            ("pages", np.concatenate([np.empty(0, np.uint64), *pages.values()])),
        ],
        content.annotations(rows.order),
    )
    return save_columns(directory / COLUMNS, columns)


def extents_of(utterances: Iterable[Utterance]) -> Iterator[Extent]:
    """Give the extents of all arrays of utterances."""
    for utterance in utterances:
        for placed in utterance.arrays.values():
            yield from placed.extents


def _all_pages(directory: Path, known: Mapping[str, Pages]) -> Iterator[tuple[str, Pages]]:
    """Give the pages of all files below a part's directory, in the order of their paths."""
    below = (entry for entry in directory.rglob("*") if not entry.is_dir())
    for path in sorted(entry.relative_to(directory).as_posix() for entry in below):
        if path in known:
            yield path, known[path]
        elif path not in _NO_CONTAINERS:
            with os.fdopen(open_within(directory, path), "rb") as file:
                yield path, pages_of(file.fileno())
