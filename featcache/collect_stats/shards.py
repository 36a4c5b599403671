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

While a run is under way, there are two more kinds of directories beside them: `run-*`, which says
which worker is at which batch, and `attempt-*`, in which a shard is being made.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from featcache.errors import CorruptCacheError, DuplicateIdError, FeatureError
from featcache.interface import Ints
from featcache.stats import FeatureStats
from featcache.store.format.files import digest_file, write_durably
from featcache.store.format.sealed_json import pack_json, unpack_json
from featcache.store.writing.cache_writer import CacheWriter

SHARDS = "shards"
DONE = "done"
FEATS = "collect_feats"
INDICES = "indices.npy"
SHAPE_KEYS, STATS_KEYS, FEAT_KEYS = "shape_keys.txt", "stats_keys.txt", "feat_keys_written.txt"


class Shard(NamedTuple):
    """A shard that is whole."""

    directory: Path
    indices: Ints  # of its utterances, in their order

    def is_within(self, places: Ints) -> bool:
        """Say whether `places` has one for all of its utterances; one that it lacks is -1."""
        return bool(self.indices.max() < len(places) and (places[self.indices] >= 0).all())


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file of some lines, whole or not at all."""
    write_durably(path, "".join(f"{line}\n" for line in lines).encode())


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file."""
    # not `splitlines`: ids may hold other line ends
    return path.read_text("utf-8").split("\n")[:-1]


def finish_shard(attempt: Path, final: Path, indices: Ints) -> None:
    """Rename the directory that an attempt has filled; drop it if another attempt was earlier."""
    np.save(attempt / INDICES, indices)
    digests = {name: digest_file(attempt / name) for name in _files(attempt)}
    (attempt / DONE).write_bytes(pack_json(digests))
    try:
        attempt.rename(final)
    except OSError:
        if read_shard(final) is None:
            raise
        shutil.rmtree(attempt)


def read_shard(directory: Path) -> Shard | None:
    """Return a shard; None unless it is whole."""
    try:
        digests = cast(
            Mapping[str, str], unpack_json((directory / DONE).read_bytes(), str(directory))
        )
        if dict(digests) != {name: digest_file(directory / name) for name in _files(directory)}:
            return None
        return Shard(directory, np.load(directory / INDICES, allow_pickle=False))
    except (OSError, CorruptCacheError):
        return None


def has_features(shard: Shard, writer: CacheWriter) -> bool:
    """Say whether the features of a shard's utterances were collected, and all are in the cache."""
    keys = read_lines(shard.directory / FEAT_KEYS)
    if not keys:
        return False
    return all(
        line.partition(" ")[0] in writer
        for line in read_lines(shard.directory / f"{keys[0]}_shape")
    )


def left_over(wanted: Ints, shards: Sequence[Shard]) -> Ints:
    """Return the utterances that are in none of some shards, in their order."""
    missing = np.zeros(wanted.max() + 1, bool)
    missing[wanted] = True
    for shard in shards:
        missing[shard.indices] = False
    return wanted[missing[wanted]]


def _files(directory: Path) -> list[str]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(
        name for name in (path.relative_to(directory).as_posix() for path in found) if name != DONE
    )


def merge_shards(
    shard_dirs: Sequence[Path], target: Path, collected: bool
) -> dict[str, FeatureStats]:
    """Merge shards into the files of a whole split in `target`, and return the statistics.

    Statistics are merged in the given order, lines sorted by the UTF-8 bytes of their ids.
    `collected` says whether to list collected features.

    Raises `FeatureError` if the shards have different keys, `DuplicateIdError` for an id that
    several utterances have.
    """
    for name in (SHAPE_KEYS, STATS_KEYS):
        write_lines(target / name, _common(shard_dirs, name))
    write_lines(target / FEAT_KEYS, _common(shard_dirs, FEAT_KEYS) if collected else [])
    for key in read_lines(target / SHAPE_KEYS):
        _merge_lines(shard_dirs, f"{key}_shape", target)
    for key in read_lines(target / FEAT_KEYS):
        _merge_lines(shard_dirs, f"{FEATS}/{key}.scp", target)
    merged = {}
    for key in read_lines(target / STATS_KEYS):
        stats = _merged_stats(shard_dirs, key)
        aside = target / f"{key}_stats.npz.tmp"
        stats.save(aside)
        aside.replace(target / f"{key}_stats.npz")
        merged[key] = stats
    write_lines(target / "stats_keys", merged)
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
    lines = [
        line
        for directory in shard_dirs
        for line in (directory / name).read_bytes().split(b"\n")[:-1]
    ]
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
