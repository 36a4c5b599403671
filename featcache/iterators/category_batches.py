"""`CategoryBatches`: batches that a category sampler draws anew for each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcache.errors import ConfigError, nearest
from featcache.iterators.dataset_input import ItemDataset, check_names, with_lengths
from featcache.iterators.epoch_order import BatchList
from featcache.samplers.espnet.build import build_category_batch_sampler
from featcache.samplers.ranks import resolve_rank

CATEGORY_TYPES = ("catbel", "catpow", "catpow_balance_dataset")


class CategoryBatches:
    """Batches of a category factory: those that it was given, and those drawn for an epoch."""

    def __init__(
        self,
        given: BatchList | None,
        batch_type: str,
        sampler_args: Mapping[str, object] | None,
        dataset: ItemDataset,
    ) -> None:
        if batch_type not in CATEGORY_TYPES:
            raise ConfigError(
                f"no batch_type {batch_type!r}; {nearest(batch_type, CATEGORY_TYPES)}"
            )
        if given is None and sampler_args is None:
            raise ConfigError("batches are needed, or sampler_args from which they are drawn")
        self.given, self._type = given, batch_type
        self._arguments = (
            None if sampler_args is None else _builder_arguments(batch_type, sampler_args, dataset)
        )

    def drawn(self, epoch: int) -> BatchList:
        """Draw the batches of an epoch; where they are "distributed", this rank's share of each."""
        if self._arguments is None:
            raise ConfigError(
                f"the batches of epoch {epoch} are drawn anew, for which sampler_args are needed"
            )
        batches, _ = build_category_batch_sampler(self._type, **self._arguments | {"epoch": epoch})
        batches = batches[: self._arguments.get("num_batches")]
        if not self._arguments.get("distributed"):
            return batches
        rank, world_size = resolve_rank(None, None)
        if len(batches) and batches.sizes.min() < world_size:
            raise ConfigError(
                f"epoch {epoch} has a batch of {batches.sizes.min()} utterances, too few for "
                f"{world_size} ranks to share; make batch_size or min_batch_size larger"
            )
        return [batch[rank::world_size] for batch in batches]


def _builder_arguments(
    batch_type: str, sampler_args: Mapping[str, object], dataset: ItemDataset
) -> dict[str, Any]:
    """Return the arguments of `build_category_batch_sampler`, also out of ESPnet's samplers'."""
    arguments = dict(sampler_args)
    arguments.pop("utt2dataset_file", None)  # ESPnet's sampler reads it, and makes nothing of it
    file = arguments.pop("dataset2utt_file", None)
    if file is not None:
        if Path(str(file)).name != "dataset2utt":
            raise ConfigError(f"dataset2utt_file must be named 'dataset2utt', not {str(file)!r}")
        arguments["dataset2utt_parent_dir"] = str(Path(str(file)).parent)
    check_names("sampler_args", arguments, build_category_batch_sampler)
    return arguments if batch_type == "catbel" else with_lengths(arguments, dataset)
