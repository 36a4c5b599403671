"""`push`, `pull` and `sync`: a cache copied to an object store, from there to a disk, or both.

What never changes goes first and is skipped where it is there already, the manifest last: a reader
sees the generation before or the new one, and what was killed goes on where it was.
"""

from __future__ import annotations

from featcache._checks import directory
from featcache.errors import CacheError, NotACacheError
from featcache.format import explained
from featcache.reading import CachePath
from featcache.remote import DEFAULT, RemoteOptions, RemotePlace, requests_to
from featcache.transfer.to_disk import Pull
from featcache.transfer.to_store import (
    Push,
    Transfer,
    stored_at,
    strange_to_cache,
    strange_to_store,
    way_out,
)

__all__ = ["Transfer", "pull", "push", "sync"]
KEPT = "what is there already is kept: try again"


def push(
    cache: CachePath, url: str, *, remote: RemoteOptions = DEFAULT, dry_run: bool = False
) -> Transfer:
    """Copy the current generation of a cache to an object store, where it is opened by its URL.

    Killed at any moment, the store has the generation before or the new one; the next push goes on.
    Of two at once, one is first and the other is refused. Nothing is deleted there. Skipped is what
    is there with its digest; what somebody else has put in its place is sent again. The bucket
    needs a lifecycle rule for uploads that were not finished.

    Args:
        cache: the cache directory.
        url: where to, `"s3://bucket/train"`.
        remote: how the store is asked.
        dry_run: only say what would be copied.

    Raises `CacheError` for a cache of adopted sources (convert it), and where the store has a
    generation that this one does not come from.
    """
    requests = requests_to(RemotePlace.of(url, remote))
    path = directory(cache, "a cache").absolute()
    with explained(path, lambda: KEPT):
        return Push(path, requests).copy(stored_at(requests), dry_run)


def pull(
    url: str, cache: CachePath, *, remote: RemoteOptions = DEFAULT, dry_run: bool = False
) -> Transfer:
    """Copy the current generation of a cache in an object store to a directory.

    That is a new one, or holds a generation which the one in the store comes from: then what it
    lacks is fetched, and published there. All that is fetched is compared with its checksums before
    it counts. Killed at any moment, the directory holds what it held, or the whole new generation;
    the next pull goes on. Whoever reads the generation before goes on, as beside a writer.

    Args:
        url: where from, `"s3://bucket/train"`.
        cache: the directory.
        remote: how the store is asked.
        dry_run: only say what would be copied.

    Raises `NotACacheError` where there is no cache, `CacheError` where the directory holds another
    one, or parts that are not published, `CorruptCacheError` for bytes that are not what was
    written, `CacheLockedError` while somebody else writes the cache.
    """
    requests = requests_to(RemotePlace.of(url, remote))
    path = directory(cache, "a cache").absolute()
    there = stored_at(requests)
    if there is None:
        raise NotACacheError(f"{requests.place.url} holds no cache: there is no 'featcache.json'")
    with explained(path, lambda: KEPT):
        return Pull(path, requests, there).copy(dry_run)


def sync(
    cache: CachePath, url: str, *, remote: RemoteOptions = DEFAULT, dry_run: bool = False
) -> Transfer:
    """Copy the later generation of a cache to where the earlier one is: `push`, or `pull`.

    Nothing is copied where both are the same.

    Args:
        cache: the cache directory; one that holds no cache is pulled into.
        url: of the cache in an object store; where there is none it is pushed to.
        remote: how the store is asked.
        dry_run: only say what would be copied.

    Raises what `push` and `pull` raise, and `CacheError` where neither generation comes from the
    other.
    """
    requests = requests_to(RemotePlace.of(url, remote))
    path = directory(cache, "a cache").absolute()
    there = stored_at(requests)
    with explained(path, lambda: KEPT):
        if there is None:
            return Push(path, requests).copy(None, dry_run)
        target = Pull(path, requests, there)
        here = {name: each.write_id for name, each in target.here.items()}
        if not here or here == there.sets:
            return target.copy(dry_run)
        theirs = strange_to_cache(path, target.here, requests, there)
        if theirs is None:
            return Push(path, requests).copy(there, dry_run)
        mine = strange_to_store(target.here, requests, there)
        if mine is None:
            return target.copy(dry_run)
    raise CacheError(
        f"generation {mine} of {str(path)!r} and {theirs} of {requests.place.url} do not come from "
        "each other: both were changed since they were the same; "
        f"{way_out(path, target.here, requests, there)}"
    )
