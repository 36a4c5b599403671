"""`ChunkIterFactory` and `CategoryChunkIterFactory`: chunks of one length within a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from featcache.errors import ConfigError
from featcache.iterators.category_batches import CategoryBatches
from featcache.iterators.chunker import Chunker
from featcache.iterators.dataset_input import batch_list
from featcache.iterators.epoch_order import BatchList
from featcache.samplers.batches import Batches


@dataclass(repr=False, eq=False)
class ChunkIterFactory(Chunker):
    """Batches of chunks of equal length, cut from utterances with some overlap.

    Of a `FeatureDataset` chunks are planned from the lengths alone, and only their frames are read.

    Args:
        dataset: indexed by what `batches` hold, gives `(id, {name: array})`; or a `FeatureDataset`.
        batch_size: chunks in a batch.
        batches: lists of one id or row each; or the arguments of `build_batch_sampler`, with a
            batch_size of 1.
        chunk_length: frames of a chunk, or several to draw from: "100,150" or "80-120". Utterances
            must be longer.
        chunk_shift_ratio: how far a chunk starts behind the one before it, in chunks.
        num_cache_chunks: how many chunks wait to be shuffled together, per length and category.
        num_samples_per_epoch: how many utterances an epoch takes; epochs go on where the one before
            ended.
        seed: with the epoch it decides order, lengths and where chunks start.
        shuffle: whether utterances, and then waiting chunks, are shuffled, and chunks start at a
            random frame.
        num_workers, pin_memory: as for a DataLoader.
        collate_fn: makes a batch of utterances, by default `CommonCollateFn()`; of chunks for a
            `FeatureDataset`.
        excluded_key_prefixes: names (and numbers may follow) of which every chunk gets all,
            whatever their length.
        discard_short_samples: leave out utterances that are no longer than any chunk; else they are
            chunks themselves, padded by `collate_fn`.
        default_fs: sample rate that `chunk_length` is meant for; that of an utterance is its
            "utt2fs", else 16000.
        chunk_max_abs_length: most frames of a chunk, at any sample rate.

    Names of which utterances have lengths are cut, and must have equal ones; of the others every
    chunk gets all. Chunks of a batch share the number "utt2category" of their utterances.

    Raises `ConfigError` for arguments that cannot work, `FeatureError` for an utterance that cannot
    be cut.

    >>> utterances = {"u": ("u", {"speech": np.arange(8)})}
    >>> factory = ChunkIterFactory(utterances, 2, [["u"]], chunk_length=4)
    >>> [batch["speech"].tolist() for ids, batch in factory.build_iter(epoch=1)]
    [[[0, 1, 2, 3], [2, 3, 4, 5]]]
    """

    batches: BatchList | Mapping[str, object]

    _by_category = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batches = self._batches = batch_list(self.batches, self.dataset)
        for number in _other_than_one(self._batches):
            raise ConfigError(
                f"batches of one utterance are needed, but number {number} is "
                f"{self._batches[number]!r}"
            )

    def _batches_of(self, epoch: int) -> BatchList:
        return self._batches


@dataclass(repr=False, eq=False)
class CategoryChunkIterFactory(Chunker):
    """Batches of chunks of equal length, cut from batches in which categories are balanced.

    Args:
        batches: lists of ids or rows, the same in each epoch; None: `sampler_args` draw them anew
            in each.
        batch_type, sampler_args: as of `CategoryIterFactory`.

    All other arguments are those of `ChunkIterFactory`. Chunks of a batch may be of several
    categories.

    Utterances of a data set of ESPnet's kind are cut as their batch pads them, as ESPnet does it:
    chunks may reach into the padding. Those of a `FeatureDataset` hold nothing but frames of the
    utterance.
    """

    batches: BatchList | Mapping[str, object] | None = None
    chunk_length: int | str = 500
    batch_type: str = "catbel"
    sampler_args: Mapping[str, object] | None = None

    _by_category = False

    def __post_init__(self) -> None:
        super().__post_init__()
        given = None if self.batches is None else batch_list(self.batches, self.dataset)
        self._batches = CategoryBatches(given, self.batch_type, self.sampler_args, self.dataset)

    def _batches_of(self, epoch: int) -> BatchList:
        return self._batches.drawn(epoch) if self._batches.given is None else self._batches.given


def _other_than_one(batches: BatchList) -> Iterator[int]:
    """Give the numbers of batches that have another size than 1."""
    if isinstance(batches, Batches):
        yield from np.flatnonzero(batches.sizes != 1).tolist()
    else:
        yield from (number for number, batch in enumerate(batches) if len(batch) != 1)
