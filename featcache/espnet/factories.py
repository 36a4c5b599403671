"""ESPnet's iterator factories: sequences, chunks, categories, several one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader

from featcache.errors import ConfigError, nearest
from featcache.espnet.batch_samplers import RELEASES, build_category_batch_sampler
from featcache.espnet.chunks import Chunker
from featcache.espnet.dataset_input import (
    BatchList,
    Collate,
    EpochRule,
    ItemDataset,
    PaddedBatch,
    batch_list,
    check_names,
    epoch_loader,
    random_state,
    reshuffled,
    with_lengths,
)
from featcache.samplers import Batches, resolve_rank

# `CategoryBatches`: batches that a category sampler draws anew for each epoch.

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


# `SequenceIterFactory` and `CategoryIterFactory`: whole utterances, batch by batch.


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
    >>> from featcache.espnet import CommonCollateFn
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
            batches = reshuffled(batches, epoch, self._epochs.seed)
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


# `ChunkIterFactory` and `CategoryChunkIterFactory`: chunks of one length within a batch.


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
        excluded_key_pattern: in place of prefixes, a regular expression for the whole of a name.

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
        release: "202511", or "202611" for the chunks of that release of ESPnet.

    All other arguments are those of `ChunkIterFactory`. Chunks of a batch may be of several
    categories.

    Utterances of a data set of ESPnet's kind are cut as their batch pads them, as ESPnet did it
    until release 202611: chunks may reach into the padding. Those of a `FeatureDataset` hold
    nothing but frames of the utterance.
    """

    batches: BatchList | Mapping[str, object] | None = None
    chunk_length: int | str = 500
    batch_type: str = "catbel"
    sampler_args: Mapping[str, object] | None = None
    release: str = field(default="202511", kw_only=True)

    _by_category = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.release not in RELEASES:
            raise ConfigError(f"release is one of {', '.join(RELEASES)}, not {self.release!r}")
        self._into_padding = self.release == RELEASES[0]
        given = None if self.batches is None else batch_list(self.batches, self.dataset)
        self._batches = CategoryBatches(given, self.batch_type, self.sampler_args, self.dataset)

    def _batches_of(self, epoch: int) -> BatchList:
        return self._batches.drawn(epoch) if self._batches.given is None else self._batches.given


def _other_than_one(batches: BatchList) -> Iterator[int]:
    """Yield the numbers of batches that have another size than 1."""
    sizes = batches.sizes if isinstance(batches, Batches) else np.array([*map(len, batches)])
    yield from np.flatnonzero(sizes != 1).tolist()


# `MultipleIterFactory` and `ShardedIterFactory`: several data sets in turn, a shard per epoch.


class IterFactory(Protocol):
    """A factory of the batches of an epoch."""

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterable[PaddedBatch]:
        """Return the batches of an epoch, counted from 1."""
        ...


class MultipleIterFactory:
    """Gives the batches of several factories one after the other; each is made when its turn comes.

    Args:
        build_funcs: functions that each return a factory.
        seed: with the epoch it decides the order of the factories.
        shuffle: whether the factories, and the batches of each, are shuffled.

    >>> from functools import partial
    >>> from featcache.espnet import SequenceIterFactory
    >>> utterances = {id: (id, {}) for id in "abc"}
    >>> halves = [[["a"], ["b"]], [["c"]]]
    >>> build_funcs = [partial(SequenceIterFactory, utterances, half) for half in halves]
    >>> [ids for ids, batch in MultipleIterFactory(build_funcs).build_iter(epoch=1)]
    [('a',), ('b',), ('c',)]
    """

    def __init__(
        self,
        build_funcs: Collection[Callable[[], IterFactory]],
        seed: int = 0,
        shuffle: bool = False,
    ) -> None:
        self._build_funcs = list(build_funcs)
        self._seed, self._shuffle = seed, shuffle

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[PaddedBatch]:
        """Yield the batches of an epoch, from 1 on; `shuffle` overrides that of all factories."""
        shuffled = self._shuffle if shuffle is None else shuffle
        functions = self._build_funcs
        if shuffled:
            order = random_state(epoch, self._seed).permutation(len(functions))
            functions = [functions[number] for number in order.tolist()]
        for function in functions:
            yield from _factory(function()).build_iter(epoch, shuffled)


class ShardedIterFactory:
    """Gives the batches of one shard of the data per epoch; each rank takes another shard.

    Epoch 1 takes shard 0 (on rank 0; then follow the other ranks' shards), epoch 2 the next, and so
    on around.

    Args:
        build: returns the factory of a shard, whose number it is given.
        num_shards: how many shards there are, a multiple of the number of ranks.

    Raises `ConfigError` for a number of shards that the ranks cannot share.
    """

    def __init__(self, build: Callable[[int], IterFactory], num_shards: int) -> None:
        self._build = build
        if type(num_shards) is not int or num_shards < 1:
            raise ConfigError(f"num_shards must be an integer of at least 1, not {num_shards!r}")
        self._num_shards = num_shards

    def shard(self, epoch: int) -> int:
        """Return the number of the shard that this rank takes in an epoch."""
        rank, world_size = resolve_rank(None, None)
        if self._num_shards % world_size:
            raise ConfigError(
                f"{self._num_shards} shards cannot be shared evenly by {world_size} ranks; make "
                "num_shards a multiple"
            )
        return ((epoch - 1) * world_size + rank) % self._num_shards

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterable[PaddedBatch]:
        """Return the batches of an epoch, counted from 1."""
        return _factory(self._build(self.shard(epoch))).build_iter(epoch, shuffle)


def _factory(made: IterFactory) -> IterFactory:
    if not hasattr(made, "build_iter"):
        raise ConfigError(
            f"a function must return a factory with build_iter, not {type(made).__name__}"
        )
    return made


# `build_iter_factory`: factories as ESPnet3's `dataloader` configuration declares them.

KEYS = ("iter_factory", "multiple_iterator", "num_shards")
SHARD = "{shard_idx}"


def build_iter_factory(config: Mapping[str, object], dataset: ItemDataset) -> IterFactory:
    """Make what a block such as `dataloader.train` of an ESPnet3 configuration declares.

    Args:
        config: "iter_factory", with "_target_" and arguments (nested ones too); with
            "multiple_iterator: true" an epoch takes one of "num_shards" shards, whose number stands
            for `{shard_idx}` in any text. A dict, or OmegaConf's.
        dataset: data set of all shards.

    Raises `ConfigError` for what is not such a block, or names what cannot be imported.

    >>> target = "featcache.espnet.SequenceIterFactory"
    >>> block = {"iter_factory": {"_target_": target, "batches": [["a"]]}}
    >>> [ids for ids, batch in build_iter_factory(block, {"a": ("a", {})}).build_iter(epoch=1)]
    [('a',)]
    """
    for name in config:
        if name not in KEYS:
            raise ConfigError(
                f"a block with an iter_factory has no {name!r}; {nearest(name, KEYS)}"
            )
    declared, shards = config.get("iter_factory"), config.get("num_shards", 1)
    if not isinstance(declared, Mapping):
        raise ConfigError(f"iter_factory is a block with a _target_, not {declared!r}")
    build = partial(_shard_factory, declared, dataset)
    if not config.get("multiple_iterator", False):
        if shards != 1:
            raise ConfigError(f"num_shards is {shards!r}, for which multiple_iterator must be true")
        return build(None)
    if shards != 1 and not _mentions(declared):
        raise ConfigError(
            f"with {shards!r} shards, shape_files or another argument must name {SHARD!r}"
        )
    return ShardedIterFactory(build, shards)  # type: ignore[arg-type]


def _shard_factory(
    declared: Mapping[str, object], dataset: ItemDataset, shard: int | None
) -> IterFactory:
    factory: IterFactory = _called(declared, {**_arguments(declared, shard), "dataset": dataset})
    return factory


def _arguments(declared: Mapping[str, object], shard: int | None) -> dict[str, Any]:
    for name in declared:
        if name.startswith("_") and name != "_target_":
            raise ConfigError(
                f"{name!r} of a configuration is not understood here; make the object with Hydra"
            )
    return {name: _made(value, shard) for name, value in declared.items() if name != "_target_"}


def _made(value: object, shard: int | None) -> object:
    """Return a value of the configuration with objects made of blocks that have a `_target_`."""
    if isinstance(value, str):
        return value if shard is None else value.replace(SHARD, str(shard))
    if isinstance(value, Mapping):
        arguments = _arguments(value, shard)
        return _called(value, arguments) if "_target_" in value else arguments
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_made(item, shard) for item in value]
    return value


def _called(declared: Mapping[str, object], arguments: dict[str, object]) -> Any:
    target = str(declared.get("_target_"))
    module, _, name = target.rpartition(".")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"_target_ {target!r} cannot be imported: {error}") from error
    return function(**arguments)


def _mentions(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_mentions, value.values()))
    if isinstance(value, str) or not isinstance(value, Sequence):
        return isinstance(value, str) and SHARD in value
    return any(map(_mentions, value))
