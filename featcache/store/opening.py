"""`featcache.open`: a cache, or a version of it, opened for reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from featcache.store.cache import Cache, CachePath
from featcache.store.reading.containers import NO_ROOTS


def open(
    path: CachePath,
    *,
    verify: Literal["columns", "arrays"] | None = None,
    check_reads: bool = False,
    expect: Mapping[str, object] | None = None,
    version: str | None = None,
    mapped: bool = True,
    roots: Mapping[str, CachePath] = NO_ROOTS,
) -> Cache:
    """Open a cache for reading; `with featcache.open(path) as cache:` closes it, too.

    Args:
        path: the cache directory.
        verify: None checks the size of each file when it is first read; "columns" those of all
            files now, and the checksums of index and statistics; "arrays" those of every byte of
            every file, which reads the whole cache. All damage is told at once. Utterances whose
            features, by their `frame_s`, end more than two frames apart are named in the log.
        check_reads: compare whatever is read with its checksum: whole arrays by their own, windows
            by those of the pages that they lie on. The index is compared when the cache is opened.
        expect: the fingerprint that the features should have, plain data as `brain.expectation()`
            and `featcache.provenance(function).fingerprint({})` return it: each key of it is
            compared with the cache's. Without it, a cache that nothing has compared in this process
            is told of in the log, once.
        version: a tag: the generation that it names is opened, not the current one.
        mapped: read through memory maps; False uses pread, for network file systems, where a mapped
            file that shrinks kills the process with SIGBUS.
        roots: where adopted sources lie now, by the keys that the cache has for them
            (`adopted.json`), if they lie elsewhere than when they were adopted.

    Raises `StaleCacheError`, with the differences, for a cache that was made from something else
    than is expected; `NotACacheError`, `FormatVersionError` or `CorruptCacheError`.
    """
    return Cache(
        path,
        verify=verify,
        check_reads=check_reads,
        expect=expect,
        version=version,
        mapped=mapped,
        roots=roots,
    )
