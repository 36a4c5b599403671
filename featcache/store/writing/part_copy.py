"""A copy of what a dead writer had committed: its blocks as they are, in a new part.

It is made where the files of a part cannot be finished where they lie.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import CorruptCacheError, StorageFullError
from featcache.interface import Array, EncodedArray
from featcache.store.format.journal import Journal
from featcache.store.format.journal_lines import Placed, Utterance
from featcache.store.format.manifest import PARTS
from featcache.store.format.part import SEAL, checksum, remove_part
from featcache.store.reading.block_decoding import decoded
from featcache.store.reading.containers import Containers
from featcache.store.writing.free_space import margin
from featcache.store.writing.open_part import OpenPart

RECOVERED = "-recovered"
SPARE_BYTES = 1 << 18  # what must remain beside the copy of a part and its index


def copy_part(
    cache: Path,
    name: str,
    features: Mapping[str, FeatureStorageConfig],
    journal: Journal,
    utterances: Sequence[Utterance],
    *,
    whole: bool,
) -> None:
    """Copy utterances into a new part and seal it.

    Statistics are computed again unless the journal is whole.
    """
    target = cache / PARTS / (name + RECOVERED)
    if (target / SEAL).exists():
        return
    if target.exists():
        remove_part(target)
    _check_space(cache, name, utterances)
    source = Source(cache / PARTS / name, journal)
    part = OpenPart(cache, features, journal.header, target.name)
    try:
        for utterance in utterances:
            encoded = source.encoded(utterance)
            if not whole:
                part.add_to_stats(
                    {
                        key: _decoded(features[key], journal.header.dims[key], each)
                        for key, each in encoded.items()
                    }
                )
            part.append_encoded(utterance.id, encoded)
        part.commit(stats=journal.stats if whole else None)
        part.seal()
    except BaseException:
        part.discard()
        raise


def _check_space(cache: Path, name: str, utterances: Sequence[Utterance]) -> None:
    arrays = (placed for utterance in utterances for placed in utterance.arrays.values())
    needed = sum(extent.nbytes for placed in arrays for extent in placed.extents)
    needed += margin(len(utterances[0].arrays), 2 * len(utterances), SPARE_BYTES)
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise StorageFullError(
            f"{free:,} bytes are free on the disk of {str(cache)!r}; to bring back what a writer "
            f"that died had committed, part {name!r} is copied once, which needs {needed:,}: "
            "free some space and run the same again"
        )


def _decoded(feature: FeatureStorageConfig, dims: tuple[int, ...], array: EncodedArray) -> Array:
    spec = feature.spec(dims)
    if spec.codec is None or not array.blocks:
        flat = np.frombuffer(b"".join(array.blocks), spec.storage_dtype)
        return cast(Array, flat.reshape(array.rows, *dims))
    cut = feature.blocks(dims)
    size = array.rows if cut is None or cut.rows is None else cut.rows
    blocks = [
        decoded(spec.codec, memoryview(block), spec.storage_dtype, dims, size)
        for block in array.blocks
    ]
    return np.concatenate(blocks)[: array.rows]


class Source:
    """The containers of a part that was never sealed."""

    def __init__(self, directory: Path, journal: Journal) -> None:
        arrays = (
            placed for utterance in journal.utterances for placed in utterance.arrays.values()
        )
        paths = sorted({extent.container for placed in arrays for extent in placed.extents})
        self._features = journal.header.dims.keys()
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._containers = Containers(
            directory, paths.__getitem__, [_size(directory / path) for path in paths]
        )

    def holds(self, utterance: Utterance) -> bool:
        """Tell whether an utterance has all features, with the bytes that the journal says."""
        if utterance.arrays.keys() != self._features:
            return False
        try:
            return all(
                checksum(self._blocks(placed)) == placed.checksum
                for placed in utterance.arrays.values()
            )
        except CorruptCacheError:
            return False

    def encoded(self, utterance: Utterance) -> dict[str, EncodedArray]:
        """Return the blocks of an utterance's arrays as they lie there, by feature."""
        return {
            name: EncodedArray(placed.rows, self._blocks(placed))
            for name, placed in utterance.arrays.items()
        }

    def _blocks(self, placed: Placed) -> tuple[memoryview, ...]:
        return tuple(
            np.ascontiguousarray(
                self._containers.view(self._numbers[each.container], each.offset, each.nbytes)
            ).data
            for each in placed.extents
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() and not path.is_symlink() else -1
