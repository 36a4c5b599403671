"""`convert`: a cache, or a view of caches, in other formats, codecs or dtypes; read back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from featcache._checks import directory
from featcache.adoption.as_cache import as_cache, foreign_source
from featcache.cluster.config import ParallelConfig, config_or_client
from featcache.declaration.feature_config import Features, FeatureStorageConfig
from featcache.errors import ConfigError
from featcache.extraction.converting.carried import carried_fingerprint, declared_as, keep_record
from featcache.extraction.converting.conversion import Conversion
from featcache.extraction.converting.conversion_run import ConversionRun
from featcache.extraction.table_rows import TableRows, table_of
from featcache.store.cache import Cache, CachePath
from featcache.store.writing.cache_writer import CacheWriter
from featcache.tables.table import FeatureTable

if TYPE_CHECKING:
    from distributed import Client

_log = logging.getLogger("featcache")


def convert(
    src: FeatureTable | Cache | CachePath,
    dst: str | PathLike[str],
    *,
    features: Features | Iterable[str | FeatureStorageConfig] | None = None,
    parallel: ParallelConfig | Mapping[str, object] | Client | None = None,
    adopting: Mapping[str, object] | None = None,
    overwrite: bool = False,
    progressbar: bool = True,
) -> Cache:
    """Store what a cache or a table holds once more, in other formats, codecs or dtypes.

    Values stay as they are, to the bit, unless a declaration asks for less: a smaller dtype, or a
    lossy codec. Then the largest difference of a number is measured, and kept under "converted" in
    `featcache.made_from(dst)["recorded"]`. All that was written is compared with the source before
    the cache is published as complete. Stopped or killed at any moment, the same call goes on.

    Annotations, stamps, failed ids, the record of what made the features and the fingerprint are
    those of the source. So `extract` and `cache_features`, with the new declarations, go on with a
    converted cache, unless numbers were rounded on their way that would not have been otherwise:
    then the fingerprint has the key "converted". Where no byte of an array changes, encoded blocks
    are copied as they are, and compared with their checksums on the way. A log line tells bytes and
    time before it begins.

    A source that is no cache is adopted for the while, as by `featcache.adopt`. What cannot be
    adopted as it lies, such as an HDF5 file whose chunks cut frames, is first copied, where its
    own library can read it: that takes room at `dst` for all arrays, uncompressed.

    Returns the new cache. One that is not complete stays so.

    Args:
        src: a cache or its path; a view, segments or caches put together, whose rows become
            utterances; or a file or folder of features that others wrote.
        dst: the directory of the new cache.
        features: names of features that stay as they are declared, and declarations of those that
            change; `frame_s` and `dims` need not be said again. None: all as they are.
        parallel: encodes on Dask's workers, as `extract` does; None: in this process.
        adopting: settings of `featcache.adopt` for a source that is no cache, such as
            `{"pattern": "{feature}/{id}"}`.
        overwrite: begins a cache at `dst` anew; readers have the old one until the new one is
            whole.
        progressbar: shows one bar over the utterances.

    Raises `KeyNotFoundError` for a feature that the source has not; `FeatureError`, naming the
    utterance, for numbers that do not fit what is declared; `CorruptCacheError` for damage of the
    source, and where what is read back is not what the source holds; `StaleCacheError` if `dst`
    was made from something else; `StorageFullError` before it begins if the disk is too small.

    >>> import numpy as np, tempfile, featcache
    >>> folder = tempfile.mkdtemp()
    >>> with featcache.CacheWriter(f"{folder}/a", [featcache.FeatureStorageConfig("f")]) as writer:
    ...     writer.write("utt-1", {"f": np.ones((300, 80), np.float32)})
    >>> half = featcache.FeatureStorageConfig("f", "float16", backend="hdf5")
    >>> new = featcache.convert(f"{folder}/a", f"{folder}/b", features=[half], progressbar=False)
    >>> new["utt-1"]["f"].dtype
    dtype('float16')
    """
    path = directory(dst, "a cache").absolute()
    workers = None if parallel is None else config_or_client(parallel)
    foreign = foreign_source(src)
    if foreign is None:
        return _converted(src, path, features, workers, overwrite, progressbar)
    with as_cache(foreign, path, adopting or {}) as source:
        return _converted(source, path, features, workers, overwrite, progressbar)


def _converted(
    src: FeatureTable | Cache | CachePath,
    path: Path,
    features: Features | Iterable[str | FeatureStorageConfig] | None,
    workers: ParallelConfig | Client | None,
    overwrite: bool,
    progressbar: bool,
) -> Cache:
    table = table_of(src)
    _refuse_source(table, path)
    declared = declared_as(table, features)
    rows = TableRows(table, tuple(declared))
    made_from = carried_fingerprint(rows, declared)
    with CacheWriter(path, declared, made_from, overwrite=overwrite) as writer:
        conversion = Conversion(rows, writer.path, declared, made_from)
        errors = ConversionRun(writer, conversion, workers, progressbar).convert()
        keep_record(writer, rows, errors, len(table))
        if table.complete:
            failed = _failed(table)
            writer.expect([*table.ids, *failed])
            for id in failed:
                writer.fail(id)
        writer.close(complete=table.complete)
    if not table.complete:
        _log.warning("cache %r is incomplete, as what it was converted from", str(path))
    return Cache(path)


def _refuse_source(table: FeatureTable, path: Path) -> None:
    """Raise `ConfigError` for a cache that would be converted onto itself, or into itself."""
    for cache in table.selection.blocks.as_opened:
        if path.resolve().is_relative_to(cache.path.resolve()):
            where = "is" if path.resolve() == cache.path.resolve() else "lies in"
            raise ConfigError(f"{str(path)!r} {where} the source itself; give another directory")


def _failed(table: FeatureTable) -> list[str]:
    """Return the ids that failed in caches that are converted whole."""
    selection = table.selection
    if selection.row_map is not None or selection.cuts is not None:
        return []
    failed = {id for cache in selection.blocks.as_opened for id in cache.failed}
    return sorted(failed.difference(table.ids))
