"""Writers of a shard: what `forward` returned for its batches, as ESPnet's files."""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from featcache.collect_stats.batch_stats import ArraysByKey
from featcache.collect_stats.shards import FEAT_KEYS, FEATS, SHAPE_KEYS, STATS_KEYS
from featcache.errors import ConfigError, FeatureError
from featcache.interface import Array

_LONGEST_NAME = 240  # of files, in bytes: most file systems take 255


class TakesFeatures(Protocol):
    """A store of collected features, beside their files."""

    def write(self, id: str, arrays: Mapping[str, Array]) -> None:
        """Store the features of an utterance."""
        ...


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
        self.lines.append(f"{id} {path}")


def _file_name(id: str) -> str:
    r"""Return a file name for an id: percent-encoded, beyond the length of file names a digest.

    >>> _file_name("spk1/utt.7")
    'spk1%2Futt.7'
    """
    name = quote(id, safe="")
    return name if len(name) <= _LONGEST_NAME else hashlib.sha256(id.encode()).hexdigest()


def open_writers(
    shard_dir: Path | None,
    write_collected_feats: bool,
    feats_dir: Path | None,
    part_writer: TakesFeatures | None,
) -> dict[str, Any]:
    """Return the writers of a shard, under the names that ESPnet3 gives them."""
    if shard_dir is None:
        raise ConfigError("a shard of collect-stats needs a directory to be written to")
    return {
        "_shard_dir": Path(shard_dir),
        "_write_feats": write_collected_feats,
        "shape_handles": defaultdict(io.StringIO),
        "feat_writers": {},
        "_feats_dir": feats_dir or Path(shard_dir) / FEATS,
        "_part_writer": part_writer,
        "_state": {},
    }


def write_record(writers: dict[str, Any], result: Any, state: dict[str, Any]) -> None:
    """Take what `forward` returned for a batch."""
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


def _write_feats(writers: dict[str, Any], feats: ArraysByKey) -> None:
    by_id: dict[str, dict[str, Array]] = defaultdict(dict)
    for key, of_key in feats.items():
        for id, array in of_key.items():
            by_id[id][key] = array
    for id, arrays in by_id.items():
        if writers["_part_writer"] is not None:
            writers["_part_writer"].write(id, arrays)
        for key, array in arrays.items():
            if key not in writers["feat_writers"]:
                writers["feat_writers"][key] = NpyWriter(writers["_feats_dir"] / f"data_{key}")
            writers["feat_writers"][key][id] = array


def close_writers(writers: dict[str, Any]) -> None:
    """Write the files of a shard."""
    directory, stats, shapes = writers["_shard_dir"], writers["_state"], writers["shape_handles"]
    directory.mkdir(parents=True, exist_ok=True)
    texts = {f"{key}_shape": lines.getvalue() for key, lines in shapes.items()}
    for name, keys in (
        (SHAPE_KEYS, shapes),
        (STATS_KEYS, stats),
        (FEAT_KEYS, writers["feat_writers"]),
    ):
        texts[name] = "".join(f"{key}\n" for key in sorted(keys))
    for key, writer in writers["feat_writers"].items():
        (directory / FEATS).mkdir(exist_ok=True)
        texts[f"{FEATS}/{key}.scp"] = "".join(f"{line}\n" for line in writer.lines)
    for name, text in texts.items():
        # not durably: after a power cut the digests tell
        (directory / name).write_bytes(text.encode())
    for key, value in stats.items():
        value.save(directory / f"{key}_stats.npz")
