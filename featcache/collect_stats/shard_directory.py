"""`ShardDirectory`: the shards of a split on disk, those that are done and those to be made."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from featcache.collect_stats.shard_task import ShardTask
from featcache.collect_stats.shards import FEATS, SHARDS, Shard, has_features, read_shard
from featcache.errors import StaleCacheError
from featcache.interface import Ints
from featcache.store.format.files import make_directory, write_durably
from featcache.store.format.fingerprint import canonical, differences
from featcache.store.format.manifest import NAME as CACHE
from featcache.store.format.sealed_json import pack_json, unpack_json
from featcache.store.writing.cache_writer import CacheWriter

MADE_FROM = "made_from.json"
# whatever the number of workers, so that the same numbers are added in the same order
MOST_SHARDS = 512


class ShardDirectory:
    """The directory `shards` of a split."""

    def __init__(self, split: Path) -> None:
        self._split = split
        self.path = split / SHARDS

    def create(self) -> None:
        """Make the directory, unless it is there."""
        make_directory(self.path)

    def clear(self) -> None:
        """Remove all shards, and the cache of their features."""
        shutil.rmtree(self.path, ignore_errors=True)
        if (self._split / FEATS / CACHE).exists():
            shutil.rmtree(self._split / FEATS)

    def new_attempts(self) -> Path:
        """Make a directory for the attempts of a run."""
        directory = self.path / f"run-{secrets.token_hex(4)}"
        directory.mkdir()
        return directory

    def require_made_from(self, made_from: Mapping[str, object]) -> None:
        """Note what the statistics are made from, or compare it with what is noted."""
        path, new = self.path / MADE_FROM, canonical(made_from)
        changed = (
            differences(unpack_json(path.read_bytes(), repr(str(path))), new)
            if path.exists()
            else []
        )
        if changed and any(map(read_shard, self.path.glob("split.*"))):
            lines = "".join(f"\n  {line}" for line in changed)
            raise StaleCacheError(
                f"what is done in {str(self._split)!r} was made from something else than it "
                f"would be now:{lines}\n"
                "start anew (resume=False), or give another directory"
            )
        if changed:  # but nothing is done: what failed at once was mended
            self.clear()
            self.create()
        if not path.exists():
            write_durably(path, pack_json(new))

    def done(self, wanted: Ints, writer: CacheWriter | None) -> list[Shard]:
        """Return the shards that are done, by their first utterances.

        Removes those that are of no use.
        """
        places = np.full(wanted.max() + 1, -1)  # of the utterances that are still to be found
        places[wanted] = np.arange(len(wanted))
        found: dict[int, Shard] = {}
        for directory in sorted(self.path.glob("*/")):
            shard = read_shard(directory)
            if (
                shard is None
                or not shard.is_within(places)
                or not (writer is None or has_features(shard, writer))
            ):
                _remove(directory)
                continue
            found[int(places[shard.indices[0]])] = shard
            places[shard.indices] = -1
        return [found[place] for place in sorted(found)]


def cut_shards(wanted: Ints, rest: Ints, batch_size: int) -> list[ShardTask]:
    """Cut utterances into shards of whole batches, less those that are done.

    Those of a run that goes on are the same.
    """
    size = batch_size * -(-len(wanted) // (batch_size * MOST_SHARDS))
    left, run = np.isin(wanted, rest), secrets.token_hex(4)
    ranges = [slice(start, start + size) for start in range(0, len(wanted), size)]
    return [
        ShardTask(f"split.{run}-{k:05d}", wanted[r][left[r]])
        for k, r in enumerate(ranges)
        if left[r].any()
    ]


def _remove(directory: Path) -> None:
    # from under a worker that was lost
    gone = directory.rename(directory.with_name(f"removed-{secrets.token_hex(4)}"))
    shutil.rmtree(gone, ignore_errors=True)
