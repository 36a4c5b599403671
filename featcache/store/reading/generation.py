"""`Generation`: a published generation of a cache, open for reading: manifest, index, bytes.

`Cache` (NumPy), `FeatureReader` (torch), `FeatureTable` (rows) and `PartWriter` stand on it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from featcache.errors import CacheError, CorruptCacheError, KeyNotFoundError, WindowError, nearest
from featcache.interface import Array, Ints
from featcache.store.format.annotation_columns import Column, read_column
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.index import Index, read_index, read_strings
from featcache.store.format.kept_files import read_kept
from featcache.store.format.manifest import Manifest, manifest_file, read_manifest
from featcache.store.format.stamps import StampColumns
from featcache.store.format.strings import Strings
from featcache.store.reading.checksums import Checks
from featcache.store.reading.containers import Containers
from featcache.store.reading.feature_arrays import FeatureArrays
from featcache.store.reading.verify import raise_damage


class Generation:
    """A generation of a cache: the one that is current when it is opened, or an earlier one.

    Reads the manifest and maps the index; containers are opened when their bytes are first read.
    Safe to share between threads and to fork.

    Args:
        path: the cache directory.
        mapped: map index and containers into memory; False reads them.
        check_reads: compare the index with its checksums now, and arrays when they are read.
        name: that of the generation; None: the current one.
    """

    def __init__(
        self,
        path: Path,
        *,
        mapped: bool = True,
        check_reads: bool = False,
        name: str | None = None,
    ) -> None:
        self.path = path
        self.mapped = mapped
        self.check_reads = check_reads
        opened = _opened(path, mapped, check_reads, name)
        self.manifest, self.index, self.failed, self._file = opened
        self._annotations: dict[str, Column] = {}
        columns = self.index.containers
        self.containers = Containers.of(path, columns, mapped)
        checks = Checks(path, self.manifest, columns, self.containers) if check_reads else None
        self.features = {
            name: FeatureArrays(self.manifest, name, self.index, self.containers, checks)
            for name in self.manifest.features
        }

    @property
    def stamps(self) -> StampColumns | None:
        """Stamps in row order, `input` and `entry`, 0 where unknown; None if there are none."""
        return self.index.stamps

    def annotation(self, name: str) -> Column:
        """Return the column of an annotation; raises `KeyNotFoundError` for an unknown one."""
        column = self._annotations.get(name)
        if column is None:
            try:
                entry = self.manifest.annotations[name]
            except (KeyError, TypeError):
                raise KeyNotFoundError(
                    f"no annotation {name!r} in cache {str(self.path)!r}",
                    hint=partial(nearest, name, self.manifest.annotations),
                ) from None
            column = read_column(self._file, name, entry.kind, len(self.index))
            self._annotations[name] = column
        return column

    def file(self, role: str) -> bytes | None:
        """Read the file of a role, "probe" or "made-from"; None if there is none.

        Raises `CorruptCacheError` if it is missing or is not what was written.
        """
        return read_kept(self.path, self.manifest.files, role)

    def arrays(self, feature: str) -> FeatureArrays:
        """Return the arrays of a feature; raises `KeyNotFoundError` for an unknown one."""
        try:
            return self.features[feature]
        except (KeyError, TypeError):  # a list, such as that of ids
            raise KeyNotFoundError(
                f"no feature {feature!r} in cache {str(self.path)!r}",
                hint=partial(nearest, feature, self.features),
            ) from None

    def row(self, id: str) -> int:
        """Return the row of an id; raises `KeyNotFoundError` for an unknown one."""
        row = self.index.find(id) if isinstance(id, str) else -1
        if row < 0:
            raise self._not_found(id)
        return row

    def find(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids, -1 where there is none.

        Raises `KeyNotFoundError` for what is no list of strings.
        """
        return self.index.find_many(self._listed(ids))

    def rows(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids; raises `KeyNotFoundError` for an unknown one."""
        listed = self._listed(ids)
        rows = self.index.find_many(listed)
        if len(rows) and rows.min() < 0:
            raise self._not_found(listed[int(rows.argmin())])
        return rows

    def read(
        self, id: str, arrays: FeatureArrays, start: int | None = None, stop: int | None = None
    ) -> Array:
        """Return a copy of an array as it is stored, or of its frames `start` to before `stop`.

        Raises `KeyNotFoundError` for an unknown id, `WindowError` unless 0 <= start <= stop <=
        frames.
        """
        row = self.row(id)
        if start is None and stop is None:
            return arrays.read(row)
        if not arrays.has_frames:
            raise WindowError(
                f"feature {arrays.name!r} has no time axis, so there are no frames to choose from"
            )
        length = int(arrays.lengths[row])
        return arrays.read(row, *window(id, arrays.name, length, start, stop))

    def lengths(self, feature: str, *, ids: Iterable[str] | None = None) -> Ints:
        """Return the frames of all utterances in row order, or of some."""
        arrays = self.arrays(feature)
        lengths = arrays.lengths.copy() if ids is None else arrays.lengths[self.rows(ids)]
        if len(lengths) and lengths.min() < 0:
            raise CorruptCacheError(
                f"cache {str(self.path)!r} is damaged: feature {feature!r} has negative lengths"
            )
        return lengths

    def close(self) -> None:
        """Let go of the container files: arrays cannot be read any more."""
        self.containers.close()

    def _listed(self, ids: Iterable[str]) -> list[str]:
        if isinstance(ids, str):
            raise KeyNotFoundError(f"ids are a list of strings, not the one string {ids!r}")
        listed = list(ids)
        if others := [id for id in listed if not isinstance(id, str)]:
            raise self._not_found(others[0])
        return listed

    def _not_found(self, id: str) -> KeyNotFoundError:
        if not isinstance(id, str):
            return KeyNotFoundError(
                f"utterance ids are strings, not {id!r}; rows by number are what "
                "featcache.FeatureDataset gives"
            )
        more = "" if self.manifest.complete else "; it is incomplete, more may come"
        return KeyNotFoundError(
            f"no utterance {id!r} in cache {str(self.path)!r}",
            hint=lambda: self.index.nearest(id) + more,
        )


def _manifest_of(path: Path, name: str | None) -> Manifest:
    """Read the manifest of a generation; that of the current one is what counts of it."""
    current = read_manifest(path)
    if name is None or name == current.name:
        return current
    return read_manifest(path, manifest_file(name))


def _opened(
    path: Path, mapped: bool, checked: bool, name: str | None
) -> tuple[Manifest, Index, Strings, ColumnFile]:
    """Read manifest, index and failed ids, while others may publish.

    The file of columns comes, too: those of annotations are taken out of it when they are needed.
    With `checked`, all of the index is compared with its checksums.
    """
    manifest = _manifest_of(path, name)
    while True:
        try:
            file = ColumnFile(path, manifest.index, mapped=mapped, expected=manifest.index_digest)
            break
        except FileNotFoundError as error:
            # others may have published since: the columns of the generation before go then
            newer = _manifest_of(path, name)
            if newer.write_id == manifest.write_id:
                raise CacheError(
                    f"cache {str(path)!r} lacks {error.filename!r}; put it back, or remove "
                    "featcache.json and write the cache again: what is sealed is kept"
                ) from error
            manifest = newer
    with file.until_read(later=bool(manifest.annotations)):
        if checked:
            raise_damage(file.damage())
        index, failed = read_index(file, list(manifest.features)), read_strings(file, "failed")
    for wrong in _misfits(manifest, index):
        raise CorruptCacheError(f"cache {str(path)!r} is damaged: {wrong}")
    return manifest, index, failed, file


def _misfits(manifest: Manifest, index: Index) -> Iterator[str]:
    """Say in what an index is not what its manifest says."""
    if len(index) != manifest.rows:
        yield f"{len(index)} of {manifest.rows} rows"
    parts = index.containers.parts
    if len(parts) and not 0 <= int(parts.min()) <= int(parts.max()) < len(manifest.parts):
        yield "its containers are in parts that are not there"
    for name, feature in manifest.features.items():
        if feature["stats"] and name not in index.stats:
            yield f"it has no statistics of {name!r}"


def window(
    id: str, feature: str, length: int, start: int | None, stop: int | None
) -> tuple[int, int]:
    """Return the first frame and the one after the last of a window into `length` frames.

    Raises `WindowError` unless 0 <= start <= stop <= length, whole numbers.
    """
    try:
        begin = 0 if start is None else operator.index(start)
        end = length if stop is None else operator.index(stop)
    except TypeError:
        wrong = (
            f"give whole numbers of frames, from start to before stop, not {start!r} and {stop!r}"
        )
    else:
        if 0 <= begin <= end <= length:
            return begin, end
        wrong = f"frames {begin} to {end} are not within 0 to {length}"
    raise WindowError(f"utterance {id!r}, feature {feature!r}: {wrong}")
