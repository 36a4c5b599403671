"""`Hooks`: the four steps of a collect-stats run that may be overridden, and what they do here.

Override them as static methods of a subclass of `CollectStatsRunner`. They are called in this
order, in the process that makes a shard::

    writers = open_writers(shard_dir, **env)
    for each batch:
        result = forward(batch_indices, **env)
        write_record(writers, result, state, **env)
    close_writers(writers)

`env` is the environment of the provider, and "write_collected_feats", "feats_dir", "part_writer".
`writers`, `result` and `state` belong to the hooks alone, with two exceptions: `close_writers`
leaves the files that `merge_shards` reads, and where features are collected `forward` returns them
third, as the default does: the dtypes of the first batch declare the cache. `forward` takes batches
of any size: one that fails is tried again, utterance by utterance.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcache.collect_stats.batch_stats import (
    ArraysByKey,
    collated,
    computed,
    lengths_of_inputs,
    stats_of,
    unpadded,
)
from featcache.collect_stats.collected_feats import NewFeatures, NpyWriter
from featcache.collect_stats.shards import FEAT_KEYS, FEATS, SHAPE_KEYS, STATS_KEYS
from featcache.errors import ConfigError, FeatureError
from featcache.interface import Array
from featcache.loading.device import to_device
from featcache.stats import FeatureStats

if TYPE_CHECKING:
    import torch


class Hooks:
    """The static methods of `CollectStatsRunner`, which a subclass of that may override."""

    @staticmethod
    def forward(
        batch_indices: Iterable[int] | int,
        dataset: Any,
        model: Any,
        collate_fn: Any,
        device: torch.device | str | None = None,
        write_collected_feats: bool = False,
        collect_stats_kwargs: Mapping[str, object] | None = None,
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
            env: the rest of the environment, which is ignored.

        Raises `ConfigError` for a model or collate function of another kind, `FeatureError` for
        what they return.
        """
        indices = [batch_indices] if isinstance(batch_indices, int) else batch_indices
        ids, batch = collated([dataset[index] for index in indices], collate_fn)
        if device is not None:
            batch = to_device(batch, device)
        feats = computed(model, batch, collect_stats_kwargs or {})
        arrays = unpadded(ids, feats)
        shapes = {
            key: {id: array.shape for id, array in of_key.items()} for key, of_key in arrays.items()
        }
        shapes |= lengths_of_inputs(ids, batch, feats)
        stats = {key: stats_of(key, of_key) for key, of_key in arrays.items()}
        return (stats, shapes, arrays) if write_collected_feats else (stats, shapes)

    @staticmethod
    def open_writers(
        shard_dir: Path | None,
        write_collected_feats: bool = False,
        feats_dir: Path | None = None,
        part_writer: NewFeatures | None = None,
        **env: object,
    ) -> dict[str, Any]:
        """Return the writers of a shard, under the names that ESPnet3 gives them.

        "_shard_dir", "_write_feats", "shape_handles", "feat_writers", ... The directory is empty,
        or made by `close_writers`. Features go to `feats_dir` (None: `shard_dir/collect_feats`)
        and, unless None, to `part_writer`.
        """
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

    @staticmethod
    def write_record(
        writers: dict[str, Any], result: object, state: dict[str, FeatureStats], **env: object
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
    def close_writers(writers: dict[str, Any]) -> None:
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


def _write_feats(writers: dict[str, Any], feats: ArraysByKey) -> None:
    by_id: dict[str, dict[str, Array]] = defaultdict(dict)
    for key, of_key in feats.items():
        if key not in writers["feat_writers"]:
            writers["feat_writers"][key] = NpyWriter(writers["_feats_dir"] / f"data_{key}")
        for id, array in of_key.items():
            writers["feat_writers"][key][id] = array
            by_id[id][key] = array
    if writers["_part_writer"] is not None:
        for id, arrays in by_id.items():
            writers["_part_writer"].write(id, arrays)
