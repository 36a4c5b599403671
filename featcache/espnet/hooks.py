"""Collecting from batches: statistics, shapes and features, and the shards that hold them.

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

import hashlib
import io
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import numpy as np
import torch
import xxhash

from featcache import CacheWriter, FeatureStats
from featcache.container_files import write_durably
from featcache.errors import ConfigError, DuplicateIdError, FeatureError
from featcache.espnet.shapes import Array, Ints

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


# Statistics and shapes of one batch: collate it, compute its features, measure them.

ShapesByKey = dict[str, dict[str, tuple[int, ...]]]  # by key and id
CollatedBatch = Mapping[str, Any]  # tensors by name, as a collate function makes them
ShardWriters = dict[str, Any]  # under the names that ESPnet3 gives them
ArraysByKey = dict[str, dict[str, Array]]  # by key and id
LENGTHS = "_lengths"


def collated(
    items: list[object], collate_fn: Callable[[list[Any]], Any]
) -> tuple[list[str], CollatedBatch]:
    """Return the ids and the inputs of a batch; raises errors for what cannot be right."""
    match collate_fn(items):
        case (ids, Mapping() as inputs):
            return _checked_ids(ids, len(items)), dict(inputs)
        case other:
            raise ConfigError(
                f"collate_fn returns (ids, batch), not {type(other).__name__!r}; "
                "see CommonCollateFn"
            )


def _checked_ids(given: Iterable[str], size: int) -> list[str]:
    ids = list(given)
    for id in ids:
        if not _is_usable(id):
            raise FeatureError(
                f"utterance id {id!r} is not usable: shape files need a string of valid Unicode "
                "without white space or NUL"
            )
    for id, times in Counter(ids).items():
        if times > 1:
            raise DuplicateIdError(f"{times} utterances of a batch have the id {id!r}")
    if len(ids) != size:
        raise FeatureError(f"collate_fn made a batch of {len(ids)} utterances out of {size}")
    return ids


def _is_usable(id: object) -> bool:
    """Whether a line of a shape file can begin with the id."""
    if not isinstance(id, str) or id.split() != [id] or "\0" in id:
        return False
    return id.encode(errors="replace").decode() == id


def moved(value: Any, device: torch.device | str) -> Any:
    """Return a batch with its tensors, those of dicts, lists and tuples, too, on a device."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(inner, device) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(moved(inner, device) for inner in value)
    return value


def computed(
    model: Any, batch: Mapping[str, object], kwargs: Mapping[str, object]
) -> Mapping[str, object]:
    """Return what the model makes of a batch, by key."""
    if not callable(getattr(model, "collect_feats", None)):
        raise ConfigError(
            f"the model needs a method collect_feats, which {type(model).__name__!r} does not have"
        )
    if getattr(model, "training", False):
        model.eval()
    with torch.no_grad():
        feats = model.collect_feats(**batch, **kwargs)
    if not isinstance(feats, Mapping):
        raise FeatureError(
            f"collect_feats returns a dict of arrays by key, not {type(feats).__name__!r}"
        )
    return feats


def unpadded(ids: list[str], feats: Mapping[str, object], all_keys: bool = False) -> ArraysByKey:
    """Return the arrays of keys and ids, (frames, *dims) each, without their padding.

    `all_keys`: those of `<key>_lengths`, too, (1,) each.
    """
    keys = [key for key in feats if all_keys or not key.endswith(LENGTHS)]
    arrays = {key: dict(_arrays(ids, feats, key)) for key in keys}
    if not arrays:
        raise FeatureError(
            "collect_feats returned no features, only "
            f"{', '.join(map(repr, feats)) or 'an empty dict'}"
        )
    return arrays


def lengths_of_inputs(
    ids: list[str], batch: CollatedBatch, feats: Mapping[str, object]
) -> ShapesByKey:
    """Return the shapes `(length,)` of those inputs that are integers and have lengths.

    Inputs that are features, too, are left out.
    """
    return {
        key: {id: (int(length),) for id, length in zip(ids, batch[f"{key}{LENGTHS}"], strict=True)}
        for key, value in batch.items()
        if key not in feats and batch.get(f"{key}{LENGTHS}") is not None and _is_whole(value)
    }


def shapes_of_inputs(
    ids: list[str], batch: CollatedBatch, feats: Mapping[str, object]
) -> ShapesByKey:
    """Return the shapes of all inputs that are tensors, without their padding."""
    shapes: ShapesByKey = {}
    for key, value in batch.items():
        if key in feats or key.endswith(LENGTHS) or not isinstance(value, torch.Tensor):
            continue
        ends = batch.get(f"{key}{LENGTHS}", [None] * len(ids))
        shapes[key] = {
            id: tuple(row.shape if end is None else row[: int(end)].shape)
            for id, row, end in zip(ids, value, ends, strict=True)
        }
    return shapes


def _is_whole(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def stats_of(key: str, arrays: Mapping[str, Array]) -> FeatureStats:
    """Return the statistics of a key's arrays by id; raises `FeatureError` for NaN or infinity."""
    of_each = {id: FeatureStats.of(array) for id, array in arrays.items()}
    for id, stats in of_each.items():
        if not (np.isfinite(stats.mean).all() and np.isfinite(stats.m2).all()):
            raise FeatureError(f"utterance {id!r}: {key!r} holds NaN or infinity")
    return reduce(FeatureStats.merge, of_each.values())


def _arrays(ids: list[str], feats: Mapping[str, object], key: str) -> Iterator[tuple[str, Array]]:
    """Iterate over the ids and arrays of a key."""
    value, lengths = _as_array(feats[key]), feats.get(f"{key}{LENGTHS}")
    if value.ndim == 0 or len(value) != len(ids):
        raise FeatureError(
            f"collect_feats returned {key!r} of shape {value.shape} for {len(ids)} utterances"
        )
    if value.dtype.kind not in "biuf":
        raise FeatureError(
            f"collect_feats returned {key!r} of {value.dtype}; statistics need real numbers"
        )
    if lengths is None:
        yield from zip(ids, value[:, np.newaxis], strict=True)
        return
    ends = _as_array(lengths)
    if ends.shape != (len(ids),) or ends.dtype.kind not in "iu":
        raise FeatureError(
            f"'{key}{LENGTHS}' are {len(ids)} whole numbers, not {ends.dtype} of shape {ends.shape}"
        )
    for id, array, end in zip(ids, value, ends.tolist(), strict=True):
        if array.ndim == 0 or not 0 <= end <= len(array):
            raise FeatureError(
                f"utterance {id!r}: {key!r} of shape {array.shape} has no {end} frames"
            )
        yield id, array[:end]


def _as_array(value: object) -> Array:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        value = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(value)


# Collected features of a collect-stats run in `.npy` files.

_LONGEST_NAME = 240  # of files, in bytes: most file systems take 255


class NpyWriter:
    """Writes one `.npy` an utterance, and lists them as ESPnet's `npy` reader wants it."""

    def __init__(self, directory: Path) -> None:
        self.lines: list[str] = []
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def __setitem__(self, id: str, array: Array) -> None:
        path = self._directory / f"{_file_name(id)}.npy"
        aside = path.with_suffix(".tmp")
        with aside.open("wb") as file:
            np.save(file, array, allow_pickle=False)
        aside.replace(path)
        self.lines.append(f"{id} {path}\n")


def _file_name(id: str) -> str:
    r"""Return a file name for an id: percent-encoded, beyond the length of file names a digest.

    >>> _file_name("spk1/utt.7")
    'spk1%2Futt.7'
    """
    name = quote(id, safe="")
    return name if len(name) <= _LONGEST_NAME else hashlib.sha256(id.encode()).hexdigest()


# `Hooks`: the four steps of a collect-stats run that may be overridden, and what they do here.
#
# Override them as static methods of a subclass of `CollectStatsRunner`. They are called in this
# order, in the process that makes a shard::
#
#     writers = open_writers(shard_dir, **env)
#     for each batch:
#         result = forward(batch_indices, **env)
#         write_record(writers, result, state, **env)
#     close_writers(writers)
#
# `env` is the environment of the provider, with "write_collected_feats" and "feats_dir". `writers`,
# `result` and `state` belong to the hooks alone, with two exceptions: `close_writers` leaves the
# files that the driver reads, and where features are collected `forward` returns them third, as the
# default does: the dtypes of the first batch declare the cache. `forward` takes batches of any
# size: one that fails is tried again, utterance by utterance.


class Hooks:
    """The static methods of `CollectStatsRunner`, which a subclass of that may override."""

    @staticmethod
    def forward(
        batch_indices: Iterable[int] | int,
        dataset: Any,
        model: object,
        collate_fn: Any,
        device: torch.device | str | None = None,
        write_collected_feats: bool = False,
        collect_stats_kwargs: Mapping[str, object] | None = None,
        all_keys: bool = False,
        **env: object,
    ) -> tuple[Any, ...]:
        """Return statistics and shapes of a batch, and its features where they are wanted.

        `(stats, shape_info)` or `(stats, shape_info, feats)`: by key a `FeatureStats`, in float64
        and utterance by utterance; by key and id the shapes; by key and id the arrays without their
        padding. A key without `<key>_lengths` beside it is one frame an utterance. Integer inputs
        with lengths, as tokens are, get shapes, too.

        Args:
            batch_indices: numbers of utterances in the data set; one number instead of several
                where the runner has no batch size.
            dataset, model, collate_fn: of the environment.
            device: where the batch is moved to; None leaves it where it is.
            write_collected_feats: whether features are returned.
            collect_stats_kwargs: further arguments of `model.collect_feats`.
            all_keys: whether `<key>_lengths` is a key, too, and all inputs get shapes.
            env: the rest of the environment, which is ignored.

        Raises `ConfigError` for a model or collate function of another kind, `FeatureError` for
        what they return.
        """
        indices = [batch_indices] if isinstance(batch_indices, int) else batch_indices
        ids, batch = collated([dataset[index] for index in indices], collate_fn)
        if device is not None:
            batch = moved(batch, device)
        feats = computed(model, batch, collect_stats_kwargs or {})
        arrays = unpadded(ids, feats, all_keys)
        shapes = {
            key: {id: array.shape for id, array in of_key.items()} for key, of_key in arrays.items()
        }
        shapes |= (shapes_of_inputs if all_keys else lengths_of_inputs)(ids, batch, feats)
        stats = {key: stats_of(key, of_key) for key, of_key in arrays.items()}
        return (stats, shapes, arrays) if write_collected_feats else (stats, shapes)

    @staticmethod
    def open_writers(
        shard_dir: Path | None,
        write_collected_feats: bool = False,
        feats_dir: Path | None = None,
        **env: object,
    ) -> ShardWriters:
        """Return the writers of a shard, under the names that ESPnet3 gives them.

        "_shard_dir", "_write_feats", "shape_handles", "feat_writers", ... The directory is empty,
        or made by `close_writers`. Features go to `feats_dir` (None: `shard_dir/collect_feats`).
        """
        if shard_dir is None:
            raise ConfigError("a shard of collect-stats needs a directory to be written to")
        return {
            "_shard_dir": Path(shard_dir),
            "_write_feats": write_collected_feats,
            "shape_handles": defaultdict(io.StringIO),
            "feat_writers": {},
            "_feats_dir": feats_dir or Path(shard_dir) / FEATS,
            "_state": {},
        }

    @staticmethod
    def write_record(
        writers: ShardWriters, result: object, state: dict[str, FeatureStats], **env: object
    ) -> None:
        """Add what `forward` returned to the writers, and its statistics to `state`.

        `state` holds a `FeatureStats` by key; it is empty at the first batch of a shard.
        """
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise ConfigError(
                f"forward returns (stats, shape_info) or (stats, shape_info, feats), not {result!r}"
            )
        stats, shapes = result[:2]
        for key, of_key in shapes.items():
            for id, shape in of_key.items():
                writers["shape_handles"][key].write(f"{id} {','.join(map(str, shape))}\n")
        if writers["_write_feats"]:
            _write_feats(writers, result[2])
        for key, value in stats.items():
            try:
                state[key] = state[key].merge(value) if key in state else value
            except FeatureError as error:
                raise FeatureError(
                    f"{key!r} of utterances {', '.join(map(repr, shapes.get(key, ())))}: {error}"
                ) from error
        writers["_state"] = state

    @staticmethod
    def close_writers(writers: ShardWriters) -> None:
        """Write the shapes, the statistics and the lists of keys of a shard."""
        directory, stats = writers["_shard_dir"], writers["_state"]
        shapes, feats = writers["shape_handles"], writers["feat_writers"]
        texts = {f"{key}_shape": lines.getvalue() for key, lines in shapes.items()}
        texts |= {f"{FEATS}/{key}.scp": "".join(writer.lines) for key, writer in feats.items()}
        for name, keys in ((SHAPE_KEYS, shapes), (STATS_KEYS, stats), (FEAT_KEYS, feats)):
            texts[name] = "".join(f"{key}\n" for key in sorted(keys))
        (directory / FEATS if feats else directory).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            # not durably: after a power cut the digests tell
            (directory / name).write_bytes(text.encode())
        for key, value in stats.items():
            value.save(directory / f"{key}_stats.npz")


def _write_feats(writers: ShardWriters, feats: ArraysByKey) -> None:
    for key, of_key in feats.items():
        if key not in writers["feat_writers"]:
            writers["feat_writers"][key] = NpyWriter(writers["_feats_dir"] / f"data_{key}")
        for id, array in of_key.items():
            writers["feat_writers"][key][id] = array
