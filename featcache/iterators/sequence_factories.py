"""`SequenceIterFactory` and `CategoryIterFactory`: whole utterances, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch.utils.data import DataLoader

from featcache.iterators.category_batches import CategoryBatches
from featcache.iterators.dataset_input import Collate, ItemDataset, batch_list, epoch_loader
from featcache.iterators.epoch_order import BatchList, EpochRule, mixed
from featcache.loading.collate import PaddedBatch


class SequenceIterFactory:
    """A torch DataLoader for each epoch, over its share of the batches in an order of its own.

    Args:
        dataset: indexed by what `batches` hold, gives `(id, {name: array})`; or a `FeatureDataset`.
        batches: lists of ids or rows; or the arguments of `build_batch_sampler`, which makes them.
            For a `FeatureDataset` these need no shape files: its lengths are known.
        num_iters_per_epoch: how many batches an epoch takes; epochs go on where the one before
            ended.
        seed: with the epoch it decides the order.
        shuffle: whether batches are shuffled.
        shuffle_within_batch: whether utterances of all batches are mixed, into batches as large as
            the first.
        num_workers, pin_memory: as for a DataLoader.
        collate_fn: makes a batch of utterances; for a `FeatureDataset` it may be left out, padding
            is then zero.

    Raises `ConfigError` for arguments that cannot work.

    >>> import numpy as np
    >>> from featcache.loading.collate import CommonCollateFn
    >>> utterances = {id: (id, {"speech": np.ones(2)}) for id in "abc"}
    >>> factory = SequenceIterFactory(utterances, [["a"], ["b", "c"]], collate_fn=CommonCollateFn())
    >>> [ids for ids, batch in factory.build_iter(epoch=1)]
    [['a'], ['b', 'c']]
    """

    def __init__(
        self,
        dataset: ItemDataset,
        batches: BatchList | Mapping[str, object],
        num_iters_per_epoch: int | None = None,
        seed: int = 0,
        shuffle: bool = False,
        shuffle_within_batch: bool = False,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.batches = batch_list(batches, dataset)
        self._epochs = EpochRule(num_iters_per_epoch, seed, shuffle)
        self._mix = shuffle_within_batch
        self._loader = partial(epoch_loader, dataset, collate_fn, num_workers, pin_memory)

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> DataLoader[PaddedBatch]:
        """Return the batches of an epoch, counted from 1: (ids, tensors), or as `collate_fn` says.

        `shuffle` overrides that of the factory. Raises `ConfigError` for an epoch for which there
        is no seed.
        """
        batches = self._epochs.batches(self.batches, epoch, shuffle)
        if self._mix:
            batches = mixed(batches, epoch, self._epochs.seed)
        return self._loader(batches, epoch + self._epochs.seed)


class CategoryIterFactory:
    """A torch DataLoader for each epoch, over batches that a category sampler draws for it.

    Args:
        dataset, num_iters_per_epoch, seed, shuffle, num_workers, collate_fn, pin_memory: as of
            `SequenceIterFactory`.
        batches: those of the first epoch; drawn as for the others where they are left out.
        sampler_args: the arguments of `build_category_batch_sampler`; with "distributed" each rank
            takes its share of every batch.
        batch_type: "catbel", "catpow" or "catpow_balance_dataset".

    Raises `ConfigError` for arguments that cannot work.
    """

    def __init__(
        self,
        dataset: ItemDataset,
        batches: BatchList | None = None,
        num_iters_per_epoch: int | None = None,
        seed: int = 0,
        sampler_args: Mapping[str, object] | None = None,
        batch_type: str = "catbel",
        shuffle: bool = False,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
    ) -> None:
        given = None if batches is None else batch_list(batches, dataset)
        self._batches = CategoryBatches(given, batch_type, sampler_args, dataset)
        self._epochs = EpochRule(num_iters_per_epoch, seed, shuffle)
        self._loader = partial(epoch_loader, dataset, collate_fn, num_workers, pin_memory)

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> DataLoader[PaddedBatch]:
        """Return the batches of an epoch, counted from 1: (ids, tensors), or as `collate_fn` says.

        `shuffle` overrides that of the factory. Raises `ConfigError` where the sampler refuses its
        arguments.
        """
        batches = self._batches.given
        if batches is None or epoch > 1:
            batches = self._batches.drawn(epoch)
        return self._loader(
            self._epochs.batches(batches, epoch, shuffle), epoch + self._epochs.seed
        )
