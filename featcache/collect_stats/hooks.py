"""`Hooks`: the four steps of a collect-stats run that may be overridden.

Override them as static methods of a subclass of `CollectStatsRunner`, whose own are the default.
They are called in this order, in the process that makes a shard::

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

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from featcache.collect_stats.shard_writers import TakesFeatures


class Hooks(Protocol):
    """The static methods of `CollectStatsRunner`, which a subclass may override: see above."""

    @staticmethod
    def forward(
        batch_indices: Iterable[int] | int,
        dataset: Any,
        model: Any,
        collate_fn: Any,
        device: Any = None,
        write_collected_feats: bool = False,
        collect_stats_kwargs: Mapping[str, Any] | None = None,
        **env: Any,
    ) -> tuple[Any, ...]:
        """Compute a batch; one number instead of several where there is no batch size."""
        ...

    @staticmethod
    def open_writers(
        shard_dir: Path | None,
        write_collected_feats: bool = False,
        feats_dir: Path | None = None,
        part_writer: TakesFeatures | None = None,
        **env: Any,
    ) -> dict[str, Any]:
        """Begin a shard in an empty directory."""
        ...

    @staticmethod
    def write_record(
        writers: dict[str, Any], result: Any, state: dict[str, Any], **env: Any
    ) -> None:
        """Take what `forward` returned; `state` is empty at the first batch of a shard."""
        ...

    @staticmethod
    def close_writers(writers: dict[str, Any]) -> None:
        """Write the files of the shard."""
        ...
