"""Features as fairseq's scripts dump them: `<name>.npy` of all frames, and their cut beside it.

On disk::

    <name>.npy    all frames of the utterances, one after the other: (all frames, *dims)
    <name>.len    the number of frames of each utterance, one a line; also called <name>.lengths
    <split>.tsv   a line with a folder, then lines `<path of the audio><tab><samples>`

Shards `<split>_<rank>_<shards>.npy` follow one another. Only the `.tsv` knows ids: the paths of
the audio, without suffix; where there is none beside the shards, ids are numbers from 00000000 on.
"""

from __future__ import annotations

import re

import numpy as np

from featcache.adoptable import Found, Options, Place
from featcache.adoptable.placed_arrays import ArrayColumns
from featcache.adoption.npy_files import check_in_rows, lengths_beside, npy_header_of
from featcache.adoption.scp import is_there, read_text
from featcache.errors import AdoptionError
from featcache.interface import Ints

SHARD = re.compile(r"(.+)_([0-9]{1,6})_([0-9]{1,6})")


class FairseqKind:
    """Frames of all utterances in one array, with the lengths beside it."""

    name = "fairseq"

    def recognises(self, place: Place, what: str) -> bool:
        """Whether this is an array with lengths beside it, or a folder of them alone."""
        arrays = _arrays(place, what)
        return len(arrays) > 0 and all(lengths_beside(place, path) for path in arrays)

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Cut the arrays where their lengths say."""
        arrays = _in_order(place, _arrays(place, what))
        headers = [npy_header_of(place, path, "all") for path in arrays]
        lengths = [_read_lengths(place, path) for path in arrays]
        for path, header, each in zip(arrays, headers, lengths, strict=True):
            check_in_rows(path, header)
            if header.shape[0] != each.sum() or (each < 0).any():
                raise AdoptionError(
                    f"{path!r} has the shape {header.shape}, but the lengths beside it add up to "
                    f"{each.sum():,} frames of {len(each):,} utterances"
                )
        ids = iter(all_ids := _ids(place, arrays[0], sum(map(len, lengths))))
        columns = ArrayColumns(options.feature, 0)
        for number, (header, each) in enumerate(zip(headers, lengths, strict=True)):
            placed, ends = header.placed(), np.cumsum(each)
            for begin, end in zip((ends - each).tolist(), ends.tolist(), strict=True):
                columns.add(next(ids), number, placed, (begin, end))
        return Found(arrays, all_ids, {options.feature: columns.found(all_ids)})


KIND = FairseqKind()


def _arrays(place: Place, what: str) -> list[str]:
    found = [what] if what else list(place.files())
    return [path for path in found if path.endswith(".npy")]


def _in_order(place: Place, paths: list[str]) -> list[str]:
    """Return the shards of a split in the order of their ranks.

    Raises `AdoptionError` where they are of several splits, or some are missing.
    """
    if not paths:
        raise AdoptionError(f"there is no '.npy' file with one of lengths in {place.name!r}")
    matches = [SHARD.fullmatch(path.removesuffix(".npy")) for path in paths]
    shards = [match for match in matches if match is not None]
    if len(paths) == 1:
        return paths
    if len(shards) < len(paths) or len({(match[1], int(match[3])) for match in shards}) > 1:
        raise AdoptionError(
            f"{place.name!r} holds the arrays of several splits, {', '.join(map(repr, paths[:4]))};"
            " a cache is one split: name its files, such as 'train_*.npy'"
        )
    found = {int(match[2]): path for match, path in zip(shards, paths, strict=True)}
    lacks = set(range(int(shards[0][3]))) - set(found)
    if lacks:
        raise AdoptionError(f"{place.name!r}: shard {min(lacks)} of {shards[0][1]!r} is missing")
    return [found[rank] for rank in sorted(found)]


def _read_lengths(place: Place, array: str) -> Ints:
    path = lengths_beside(place, array)
    if not path:
        raise AdoptionError(f"{array!r} has no lengths beside it, {array.removesuffix('.npy')}.len")
    with place.open(path) as source:
        words = read_text(source).split()
    try:
        return np.array([int(word) for word in words], np.int64)
    except (ValueError, OverflowError) as error:
        raise AdoptionError(f"{path!r} holds more than lengths: {error}") from None


def _ids(place: Place, array: str, count: int) -> list[str]:
    stem = array.removesuffix(".npy")
    match = SHARD.fullmatch(stem)
    for path in [f"{stem}.tsv", *([f"{match[1]}.tsv"] if match else [])]:
        if is_there(place, path):
            with place.open(path) as source:
                lines = read_text(source).decode("utf-8", "replace").splitlines()[1:]
            if len(lines) != count:
                raise AdoptionError(
                    f"{path!r} names {len(lines):,} utterances, but there are {count:,} lengths; "
                    "name all shards of the split, or take the tsv away"
                )
            names = [line.partition("\t")[0] for line in lines]
            return [name.rpartition(".")[0] or name for name in names]
    return [f"{number:08d}" for number in range(count)]
