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

While a run is under way there are also `attempt-*` beside them, in which a shard is being made, and
beside `shards` itself `work-run-*`, which says which worker is at which batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache import CacheWriter, FeatureStats
from featcache.container_files import write_durably
from featcache.errors import CorruptCacheError, DuplicateIdError, FeatureError
from featcache.espnet.arrays import Ints
from featcache.format.files import digest_file, pack_json, unpack_json

SHARDS = "shards"
RUN = "work-run-"  # then 8 hexadecimal digits
DONE = "done"
FEATS = "collect_feats"
INDICES = "indices.npy"
SHAPE_KEYS, STATS_KEYS, FEAT_KEYS = "shape_keys.txt", "stats_keys.txt", "feat_keys_written.txt"


class Shard(NamedTuple):
    """A shard that is whole."""

    directory: Path
    indices: Ints  # of its utterances, in their order


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file."""
    # not `splitlines`: ids may hold other line ends
    return path.read_text("utf-8").split("\n")[:-1]


def finish_shard(attempt: Path, final: Path, indices: Ints) -> None:
    """Rename the directory that an attempt has filled; drop it if another attempt was earlier."""
    np.save(attempt / INDICES, indices)
    (attempt / DONE).write_bytes(pack_json(_digests(attempt)))
    try:
        attempt.rename(final)
    except OSError:
        if read_shard(final) is None:
            raise
        shutil.rmtree(attempt)


def read_shard(directory: Path) -> Shard | None:
    """Return a shard; None unless it is whole."""
    try:
        digests = unpack_json((directory / DONE).read_bytes(), str(directory))
        if digests != _digests(directory):
            return None
        return Shard(directory, np.load(directory / INDICES, allow_pickle=False))
    except (OSError, CorruptCacheError):
        return None


def _digests(directory: Path) -> dict[str, str]:
    """Return the digests of all files of a shard but the last, by name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = {path.relative_to(directory).as_posix(): path for path in files}
    return {name: digest_file(path) for name, path in names.items() if name != DONE}


def has_features(shard: Shard, writer: CacheWriter) -> bool:
    """Whether the features of a shard's utterances were collected, and all are in the cache."""
    keys = read_lines(shard.directory / FEAT_KEYS)
    lines = read_lines(shard.directory / f"{keys[0]}_shape") if keys else []
    return bool(keys) and all(line.partition(" ")[0] in writer for line in lines)


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
