"""Parts of a cache whose containers lie elsewhere: their columns are written, and no other byte."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from featcache.container_files import PAGE_BYTES, Pages, sync_directory
from featcache.errors import CorruptCacheError
from featcache.interface import Ints
from featcache.store.format.annotation_columns import Column, stored_columns
from featcache.store.format.column_file import save_columns
from featcache.store.format.files import make_directory, write_durably
from featcache.store.format.index import Index
from featcache.store.format.index_writer import (
    Columns,
    container_columns,
    index_columns,
    rows_of,
)
from featcache.store.format.journal_lines import Header
from featcache.store.format.manifest import PARTS, Manifest
from featcache.store.format.manifest_entries import Adopted
from featcache.store.format.part import COLUMNS, SEAL, SealedPart, new_part_name, read_part
from featcache.store.format.sealed_json import pack_json
from featcache.store.format.strings import ends_of
from featcache.store.writing.publish import merged_stats

_NOTHING = np.empty(0, np.int64)


def seal_adopted(
    cache: Path,
    header: Header,
    adopted: Adopted,
    index: Index,
    annotations: Mapping[str, Column],
    *,
    pages: Sequence[Pages] | None = None,
    left_out: Ints = _NOTHING,
) -> SealedPart:
    """Write the columns of an adopted part, and seal it.

    Only the holder of the cache's lock may call this. From the moment of its seal, the part counts.

    Args:
        cache: the cache directory.
        header: of the part.
        adopted: the key of the source.
        index: the rows, with paths of containers relative to the source.
        annotations: of the rows of the index, by name.
        pages: the checksums of the pages of each container; None: they are not collected.
        left_out: rows of the index that do not come into the part, ascending.
    """
    name = new_part_name()
    directory = cache / PARTS / name
    make_directory(directory)
    known = [np.empty(0, np.uint64)] * len(index.containers) if pages is None else pages
    rows = rows_of([index], [left_out])
    columns = itertools.chain(
        index_columns([index], rows, list(header.dims), index.stats),
        container_columns([""], [index.containers]),
        _page_columns(known),
        *(stored_columns(each, annotations[each].take(rows.order)) for each in sorted(annotations)),
    )
    content: dict[str, object] = {"name": name, "rows": len(rows.ids), "page_bytes": PAGE_BYTES}
    content |= {"block_rows": dict(header.block_rows), "header": header.to_json()}
    content |= {"adopted": dataclasses.asdict(adopted)}
    try:
        content["columns"] = save_columns(directory / COLUMNS, columns)
        sync_directory(directory)
        write_durably(directory / SEAL, pack_json(content))
    except BaseException:
        if not (directory / SEAL).exists():  # or it counts
            shutil.rmtree(directory)
        raise
    sealed = read_part(cache, name)
    if sealed is None:
        raise CorruptCacheError(f"{str(directory / SEAL)!r} is not there after it was written")
    return sealed


def _page_columns(pages: Sequence[Pages]) -> Columns:
    yield "page_ends", ends_of([len(each) for each in pages])
    yield "pages", np.concatenate([np.empty(0, np.uint64), *pages])


def seal_again(
    cache: Path,
    part: SealedPart,
    manifest: Manifest,
    index: Index | None = None,
    pages: Sequence[Pages] | None = None,
) -> SealedPart:
    """Seal an adopted part once more without the rows that count no more, in its place.

    With an `index` and `pages`, these are what was collected.
    """
    adopted = part.entry.adopted
    if adopted is None:
        raise CorruptCacheError(f"part {part.entry.name!r} is not adopted")
    header = dataclasses.replace(
        part.header,
        build=manifest.build,
        fingerprint=manifest.building_fingerprint,
        replaces=(part.entry.name,),
    )
    if index is not None:
        adopted = dataclasses.replace(adopted, collected=True)
    else:
        index = part.stamped_index(cache, list(manifest.features))
        stats = merged_stats(cache, [part], manifest)
        index = dataclasses.replace(index, stats=stats)
        pages = part.pages(cache)
    annotations = {
        name: part.annotation(cache, name, kind) for name, kind in index.annotations.items()
    }
    left_out = part.tombstones(cache)
    return seal_adopted(cache, header, adopted, index, annotations, pages=pages, left_out=left_out)
