"""The shards of a collect-stats run: directories of ESPnet's files, which count once whole.

A shard holds the statistics and shapes of some batches. Its name has eight hexadecimal digits of
the run that cut it::

    split.<run>-00007/
      feats_shape                            "utt-1 575,80", a line an utterance
      feats_stats.npz                        as `FeatureStats.save` writes it
      collect_feats/feats.scp                "utt-1 <path of a .npy>", if features are collected
      shape_keys.txt stats_keys.txt feat_keys_written.txt
      indices.npy                            its utterances, by number in the data set
      done                                   a digest of each of these files; it comes last

While a run is under way there is also `work-run-*` beside `shards`: there the workers make shards,
and note which batch they are at.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import xxhash

from featcache import CacheWriter, FeatureStats
from featcache.container_files import write_durably
from featcache.errors import DuplicateIdError, FeatureError
from featcache.espnet.arrays import Ints

SHARDS = "shards"
SPLIT = "split."  # then 8 hexadecimal digits of the run, and a number
RUN = "work-run-"  # then 8 hexadecimal digits
DONE = "done"
FEATS = "collect_feats"
INDICES = "indices.npy"
PLACED_EVERY_S = 0.25  # to make features durable waits for the disk
SHAPE_KEYS, STATS_KEYS, FEAT_KEYS = "shape_keys.txt", "stats_keys.txt", "feat_keys_written.txt"


class Shard(NamedTuple):
    """A shard that is whole."""

    directory: Path
    indices: Ints  # of its utterances, in their order


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file."""
    # not `splitlines`: ids may hold other line ends
    return path.read_text("utf-8").split("\n")[:-1]


def finish_shard(directory: Path, indices: Ints) -> None:
    """Complete a directory; it is a shard once it lies among them."""
    np.save(directory / INDICES, indices)
    (directory / DONE).write_text(json.dumps(_digests(directory)))


def read_shard(directory: Path) -> Shard | None:
    """Return a shard; None unless it is whole."""
    try:
        if json.loads((directory / DONE).read_bytes()) != _digests(directory):
            return None
        return Shard(directory, np.load(directory / INDICES, allow_pickle=False))
    except (OSError, ValueError):
        return None


def _digests(directory: Path) -> dict[str, str]:
    """Return the digests of all files of a shard but the last, by name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = {path.relative_to(directory).as_posix(): path for path in files}
    return {
        name: xxhash.xxh3_64_hexdigest(path.read_bytes())
        for name, path in names.items()
        if name != DONE
    }


def has_features(shard: Shard, writer: CacheWriter) -> bool:
    """Whether the features of a shard's utterances were collected, and all are in the cache."""
    keys = read_lines(shard.directory / FEAT_KEYS)
    lines = read_lines(shard.directory / f"{keys[0]}_shape") if keys else []
    return bool(keys) and all(line.partition(" ")[0] in writer for line in lines)


class FinishedShards:
    """Shards on their way among the others: the cache has all features of one that is there.

    At the end of a `with` block, also after an error, all that are whole are there.

    Args:
        made: the directory that they are made in.
        shards: the directory of all shards.
        writer: of the cache; None: no features are kept.
    """

    def __init__(self, made: Path, shards: Path, writer: CacheWriter | None) -> None:
        self._made, self._shards, self._writer = made, shards, writer
        self._placed_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._place()

    def place_if_due(self) -> None:
        """Take over those that are whole, a few times a second."""
        if time.monotonic() - self._placed_s >= PLACED_EVERY_S:
            self._place()

    def _place(self) -> None:
        whole = sorted(self._made.glob(f"{SPLIT}*"))
        if self._writer is not None:
            for directory in whole:
                _add_features(directory, self._writer)
            self._writer.commit()
        for directory in whole:
            directory.rename(self._shards / directory.name)
        self._placed_s = time.monotonic()


def _add_features(shard: Path, writer: CacheWriter) -> None:
    """Add the features that a shard lists, but for those of utterances that the cache has."""
    paths: dict[str, dict[str, str]] = {}  # by id and key
    for key in writer.features:
        for line in read_lines(shard / FEATS / f"{key}.scp"):
            id, _, path = line.partition(" ")
            paths.setdefault(id, {})[key] = path
    for id, of_key in paths.items():
        if id not in writer:
            writer.write(id, {key: np.load(path) for key, path in of_key.items()})


def merge_shards(
    shard_dirs: Sequence[Path], target: Path, collected: bool
) -> dict[str, FeatureStats]:
    """Merge shards into the files of a whole split in `target`, and return the statistics.

    Statistics are merged in the given order, lines sorted by the UTF-8 bytes of their ids.
    `collected` says whether to list collected features.

    Raises `FeatureError` if the shards have different keys, `DuplicateIdError` for an id that
    several utterances have.
    """
    shapes, keys = (_common(shard_dirs, name) for name in (SHAPE_KEYS, STATS_KEYS))
    feats = _common(shard_dirs, FEAT_KEYS) if collected else []
    for name in (*(f"{key}_shape" for key in shapes), *(f"{FEATS}/{key}.scp" for key in feats)):
        _merge_lines(shard_dirs, name, target)
    merged = {key: _merged_stats(shard_dirs, key) for key in keys}
    for key, stats in merged.items():
        aside = target / f"{key}_stats.npz.tmp"
        stats.save(aside)
        aside.replace(target / f"{key}_stats.npz")
    lists = {SHAPE_KEYS: shapes, STATS_KEYS: keys, "stats_keys": keys, FEAT_KEYS: feats}
    for name, listed in lists.items():
        write_durably(target / name, "".join(f"{key}\n" for key in listed).encode())
    return merged


def _common(shard_dirs: Sequence[Path], name: str) -> list[str]:
    """Return the keys that all shards list in a file."""
    first = read_lines(shard_dirs[0] / name)
    for directory in shard_dirs[1:]:
        keys = read_lines(directory / name)
        if keys != first:
            raise FeatureError(
                f"the keys in {str(shard_dirs[0] / name)!r} are {', '.join(first) or 'none'}, but "
                f"in {str(directory / name)!r} {', '.join(keys) or 'none'}; every utterance must "
                "have the same"
            )
    return first


def _merged_stats(shard_dirs: Sequence[Path], key: str) -> FeatureStats:
    first, *others = (directory / f"{key}_stats.npz" for directory in shard_dirs)
    stats = FeatureStats.load(first)
    for path in others:
        try:
            stats = stats.merge(FeatureStats.load(path))
        except FeatureError as error:
            raise FeatureError(f"{str(path)!r} does not fit those before: {error}") from error
    return stats


def _merge_lines(shard_dirs: Sequence[Path], name: str, target: Path) -> None:
    """Write the lines of a file of all shards, in the order of their ids."""
    texts = ((directory / name).read_bytes() for directory in shard_dirs)
    lines = [line for text in texts for line in text.split(b"\n")[:-1]]
    lines.sort(key=_id_of)
    for one, other in pairwise(lines):
        if other.startswith(_id_of(one) + b" "):
            raise DuplicateIdError(
                f"two utterances have the id {_id_of(one).decode()!r}: {name!r} would hold "
                f"{one.decode()!r} and {other.decode()!r}"
            )
    write_durably(target / name, b"\n".join([*lines, b""]))


def _id_of(line: bytes) -> bytes:
    return line.partition(b" ")[0]
