"""Hooks of collect-stats: what it does with a batch.

Statistics and shapes of each utterance, and where they are written.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import torch

from featcache.collect_stats.shards import FEAT_KEYS, FEATS, SHAPE_KEYS, STATS_KEYS
from featcache.errors import ConfigError, DuplicateIdError, FeatureError
from featcache.extraction.dataset_batches import to_device
from featcache.extraction.provenance import find_ingredients
from featcache.interface import Array
from featcache.stats import FeatureStats
from featcache.store.format.ids import check_id

Stats = dict[str, FeatureStats]
Shapes = dict[str, dict[str, tuple[int, ...]]]  # by key and id
Feats = dict[str, dict[str, Array]]  # by key and id
LENGTHS = "_lengths"
_LONGEST_NAME = 240  # of files, in bytes: most file systems take 255


class TakesFeatures(Protocol):
    """Where collected features are stored beside their files."""

    def write(self, id: str, arrays: Mapping[str, Array]) -> None:
        """Store the features of an utterance."""
        ...


def collect_stats_batch(
    indices: Iterable[int],
    *,
    dataset: Any,
    model: Any,
    collate_fn: Callable[[list[Any]], Any],
    device: torch.device | str | None = None,
    collect_stats_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Stats, Shapes, Feats]:
    """Compute the features of some utterances, and take statistics and shapes.

    Statistics are taken in float64, utterance by utterance.

    Returns by key the statistics, then by key and id the shapes and the arrays without their
    padding. What has no `<key>_lengths` beside it is one frame an utterance. Integer inputs with
    lengths, as tokens are, get shapes, too.

    Raises `ConfigError` for a model or collate function of another kind, `FeatureError` for what
    they return.
    """
    items = [dataset[index] for index in indices]
    collated = collate_fn(items)
    if (
        not isinstance(collated, tuple | list)
        or len(collated) != 2
        or not isinstance(collated[1], Mapping)
    ):
        raise ConfigError(
            f"collate_fn returns (ids, batch), not {type(collated).__name__!r}; see CommonCollateFn"
        )
    ids, batch = _checked_ids(collated[0], len(items)), dict(collated[1])
    if device is not None:
        batch = to_device(batch, device)
    if not callable(getattr(model, "collect_feats", None)):
        raise ConfigError(
            f"the model needs a method collect_feats, which {type(model).__name__!r} does not have"
        )
    if getattr(model, "training", False):
        model.eval()
    with torch.no_grad():
        feats = model.collect_feats(**batch, **(collect_stats_kwargs or {}))
    if not isinstance(feats, Mapping):
        raise FeatureError(
            f"collect_feats returns a dict of arrays by key, not {type(feats).__name__!r}"
        )
    arrays: Feats = {
        key: dict(_unpadded(ids, feats, key)) for key in feats if not key.endswith(LENGTHS)
    }
    if not arrays:
        raise FeatureError(
            "collect_feats returned no features, only "
            f"{', '.join(map(repr, feats)) or 'an empty dict'}"
        )
    shapes: Shapes = {
        key: {id: array.shape for id, array in of_key.items()} for key, of_key in arrays.items()
    }
    stats = {key: _stats(key, of_key) for key, of_key in arrays.items()}
    for key, value in batch.items():
        lengths = batch.get(f"{key}{LENGTHS}")
        if (
            key not in feats
            and lengths is not None
            and isinstance(value, torch.Tensor)
            and _is_whole(value)
        ):
            shapes[key] = {id: (int(length),) for id, length in zip(ids, lengths, strict=True)}
    return stats, shapes, arrays


def _is_whole(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex()


def _checked_ids(given: Iterable[str], size: int) -> list[str]:
    ids = list(given)
    for id in ids:
        check_id(id)
        if id.split() != [id]:
            raise FeatureError(
                f"utterance id {id!r} is not usable: shape files need one without white space"
            )
    id, number = Counter(ids).most_common(1)[0] if ids else ("", 0)
    if number > 1:
        raise DuplicateIdError(f"{number} utterances of a batch have the id {id!r}")
    if len(ids) != size:
        raise FeatureError(f"collate_fn made a batch of {len(ids)} utterances out of {size}")
    return ids


def _unpadded(ids: list[str], feats: Mapping[str, Any], key: str) -> Iterator[tuple[str, Array]]:
    """Iterate over the arrays of a key, (frames, *dims) each."""
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


def _as_array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        value = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(value)


def _stats(key: str, arrays: Mapping[str, Array]) -> FeatureStats:
    found = []
    for id, array in arrays.items():
        found.append(FeatureStats.of(array))
        if not (np.isfinite(found[-1].mean).all() and np.isfinite(found[-1].m2).all()):
            raise FeatureError(f"utterance {id!r}: {key!r} holds NaN or infinity")
    return reduce(FeatureStats.merge, found)


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


def _write_feats(writers: dict[str, Any], feats: Feats) -> None:
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


def made_from_what(env: Mapping[str, Any]) -> dict[str, object]:
    """Return the fingerprint of what `collect_feats` of the model makes.

    It covers its code and the modules that it names.
    """
    model, found = env["model"], {}
    function = getattr(type(model), "collect_feats", None)
    if isinstance(function, FunctionType):
        stand_in: Any = object.__new__(
            type(type(model).__name__, (type(model),), {"compute_features": function})
        )
        vars(stand_in).update(vars(model))
        found = find_ingredients(stand_in).fingerprint({})
    kwargs = env.get("collect_stats_kwargs") or {}
    return {**found, "collect_stats_kwargs": {name: repr(value) for name, value in kwargs.items()}}
