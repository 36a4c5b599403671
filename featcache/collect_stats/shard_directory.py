"""`ShardDirectory`: the shards of a split on disk, those that are done and those to be made."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.collect_stats.shard_maker import ShardTask
from featcache.collect_stats.shards import FEATS, RUN, SHARDS, Shard, has_features, read_shard
from featcache.errors import StaleCacheError
from featcache.interface import Ints
from featcache.store.format.files import make_directory, write_durably
from featcache.store.format.fingerprint import canonical, differences
from featcache.store.format.manifest import NAME as CACHE
from featcache.store.format.sealed_json import pack_json, unpack_json
from featcache.store.writing.cache_writer import CacheWriter

Mask = NDArray[np.bool_]
MADE_FROM = "made_from.json"
# whatever the number of workers, so that the same numbers are added in the same order
MOST_SHARDS = 512


class ShardDirectory:
    """The directory `shards` of a split."""

    def __init__(self, split: Path) -> None:
        self._split = split
        self.path = split / SHARDS

    def create(self, *, anew: bool = False) -> None:
        """Make the directory, unless it is there.

        `anew` removes all shards first, and the cache of their features.
        """
        if anew:
            shutil.rmtree(self.path, ignore_errors=True)
            if (self._split / FEATS / CACHE).exists():
                shutil.rmtree(self._split / FEATS)
        make_directory(self.path)

    @contextmanager
    def attempts(self) -> Iterator[Path]:
        """Give a directory for the attempts of a run, which ends with it."""
        for left in self._split.glob(f"{RUN}*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        directory = self._split / f"{RUN}{secrets.token_hex(4)}"
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # NFS keeps files that are open

    def require_made_from(self, made_from: Mapping[str, object]) -> None:
        """Note what the statistics are made from, or compare it with what is noted."""
        path, new = self.path / MADE_FROM, canonical(made_from)
        if path.exists():
            changed = differences(unpack_json(path.read_bytes(), repr(str(path))), new)
            if not changed:
                return
            if any(map(read_shard, self.path.glob("split.*"))):
                lines = "".join(f"\n  {line}" for line in changed)
                raise StaleCacheError(
                    f"what is done in {str(self._split)!r} was made from something else than it "
                    f"would be now:{lines}\n"
                    "start anew (resume=False), or give another directory"
                )
            self.create(anew=True)  # nothing is done: what failed at once was mended
        write_durably(path, pack_json(new))

    def done(self, wanted: Ints, writer: CacheWriter | None) -> tuple[list[Shard], Mask]:
        """Return the shards that are done, by their first utterances, and what of `wanted` is not.

        Removes shards that are of no use: damaged, of other utterances, or without features where
        a `writer` of these is given.
        """
        places = np.full(wanted.max() + 1, -1)  # of the utterances that are still to be found
        places[wanted] = np.arange(len(wanted))
        found: dict[int, Shard] = {}
        for directory in sorted(self.path.glob("*/")):
            shard = read_shard(directory)
            if (
                shard is not None
                and shard.indices.max() < len(places)
                and (places[shard.indices] >= 0).all()
                and (writer is None or has_features(shard, writer))
            ):
                found[int(places[shard.indices[0]])] = shard
                places[shard.indices] = -1
            else:  # renamed first: a worker that was lost may be at it
                gone = directory.rename(directory.with_name(f"removed-{secrets.token_hex(4)}"))
                shutil.rmtree(gone, ignore_errors=True)
        return [found[place] for place in sorted(found)], places[wanted] >= 0


def cut_shards(wanted: Ints, missing: Mask, batch_size: int) -> list[ShardTask]:
    """Cut utterances into shards of whole batches, then leave out those that are not missing.

    So a run that goes on has the shards that it had.
    """
    size = batch_size * -(-len(wanted) // (batch_size * MOST_SHARDS))
    starts, run = range(0, len(wanted), size), secrets.token_hex(4)
    cut = [wanted[start : start + size][missing[start : start + size]] for start in starts]
    return [
        ShardTask(f"split.{run}-{number:05d}", indices)
        for number, indices in enumerate(cut)
        if len(indices)
    ]
