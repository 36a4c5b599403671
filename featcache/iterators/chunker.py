"""`Chunker`: arguments and chunks of both factories of `chunk_factories`.

Chunks are cut from loaded utterances, or read one by one from a `FeatureDataset`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from featcache.errors import FeatureError
from featcache.iterators.chunk_rule import Chunk, ChunkRule, UtteranceToCut, chunk_batches
from featcache.iterators.dataset_input import Collate, ItemDataset, as_arrays, epoch_loader
from featcache.iterators.epoch_order import BatchList, EpochRule, random_state
from featcache.loading.collate import CommonCollateFn, PaddedBatch
from featcache.loading.dataset import FeatureDataset

CATEGORY, SAMPLE_RATE = "utt2category", "utt2fs"
Tensors = Mapping[str, torch.Tensor]


class _Loaded(NamedTuple):
    """An utterance in memory, and the names that chunks are cut of; of the others they get all."""

    id: str
    arrays: Tensors
    names: Sequence[str]

    def chunk(self, start: int, stop: int) -> tuple[str, Tensors]:
        """Return the id and the arrays of a chunk."""
        cut = {name: self.arrays[name][start:stop] for name in self.names}
        return self.id, {**self.arrays, **cut}


@dataclass(repr=False, eq=False)  # a constructor, no value
class Chunker(ABC):
    """Base of the factories of chunks; `ChunkIterFactory` describes the arguments."""

    dataset: ItemDataset
    batch_size: int
    batches: BatchList | Mapping[str, object] | None
    chunk_length: int | str
    chunk_shift_ratio: float = 0.5
    num_cache_chunks: int = 1024
    num_samples_per_epoch: int | None = None
    seed: int = 0
    shuffle: bool = False
    num_workers: int = 0
    collate_fn: Collate | None = None
    pin_memory: bool = False
    excluded_key_prefixes: Sequence[str] | None = None
    discard_short_samples: bool = True
    default_fs: int | None = None
    chunk_max_abs_length: int | None = None

    _by_category: ClassVar[bool]  # whether chunks of a batch are of one category

    def __post_init__(self) -> None:
        self._epochs = EpochRule(self.num_samples_per_epoch, self.seed, self.shuffle)
        self._rule = ChunkRule(
            chunk_length=self.chunk_length,
            batch_size=self.batch_size,
            chunk_shift_ratio=self.chunk_shift_ratio,
            num_cache_chunks=self.num_cache_chunks,
            discard_short_samples=self.discard_short_samples,
            default_fs=self.default_fs,
            chunk_max_abs_length=self.chunk_max_abs_length,
        )

    @abstractmethod
    def _batches_of(self, epoch: int) -> BatchList:
        """Return the batches of utterances from which epoch `epoch` takes its own."""

    @property
    def excluded_key_pattern(self) -> str:
        """Regular expression for the names of which every chunk gets all, as ESPnet writes it."""
        names = dict.fromkeys([*(self.excluded_key_prefixes or ()), CATEGORY, SAMPLE_RATE])
        return "|".join(f"({name}[0-9]*)" for name in names)

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[PaddedBatch]:
        """Give the batches of an epoch, counted from 1: ids and tensors (batch_size, chunk, ...).

        Their number varies with the epoch. `shuffle` overrides that of the factory.
        """
        shuffled = self.shuffle if shuffle is None else shuffle
        batches = self._epochs.batches(self._batches_of(epoch), epoch, shuffled)
        state, seed = random_state(epoch, self.seed), epoch + self.seed
        if isinstance(self.dataset, FeatureDataset) and not any(
            map(self._excluded, _timed(self.dataset))
        ):
            measured = self._measured(self.dataset, batches)
            return self._read(chunk_batches(measured, self._rule, state, shuffled), seed)
        collate = self.collate_fn or CommonCollateFn()
        loaded = self._loaded(self._loader(collate, batches, seed))
        return self._cut(chunk_batches(loaded, self._rule, state, shuffled), collate)

    def _loader(
        self, collate: Collate | None, batches: Iterable[Any], seed: int
    ) -> Iterable[PaddedBatch]:
        return epoch_loader(self.dataset, collate, self.num_workers, self.pin_memory, batches, seed)

    def _measured(
        self, dataset: FeatureDataset, batches: BatchList
    ) -> Iterator[UtteranceToCut[int]]:
        """Give rows and lengths of a `FeatureDataset`, without reading any frames."""
        table = dataset.table
        lengths = {name: table.lengths(name) for name in _timed(dataset)}
        numbered = CATEGORY in dataset.features or SAMPLE_RATE in dataset.features
        for batch in batches:
            for row in table.numbers(batch).tolist():
                frames = {name: int(column[row]) for name, column in lengths.items()}
                numbers = dataset[row, slice(0, 0)] if numbered else {}
                yield self._to_cut(row, table.id(row), frames, numbers)

    def _read(self, batches: Iterable[list[Chunk[int]]], seed: int) -> Iterator[PaddedBatch]:
        """Read just the frames of each chunk."""
        windows = ([(row, slice(start, stop)) for row, start, stop in chunks] for chunks in batches)
        for ids, batch in self._loader(self.collate_fn, windows, seed):
            yield ids, _without_lengths(batch) if self.discard_short_samples else batch

    def _loaded(self, loader: Iterable[PaddedBatch]) -> Iterator[UtteranceToCut[_Loaded]]:
        """Give whole utterances out of padded batches."""
        for ids, batch in loader:
            cut = [
                name for name in batch if f"{name}_lengths" in batch and not self._excluded(name)
            ]
            values = _without_lengths(batch)
            for place, id in enumerate(ids):
                arrays = {name: value[place] for name, value in values.items()}
                frames = {name: len(arrays[name]) for name in cut}
                yield self._to_cut(_Loaded(id, arrays, cut), id, frames, arrays)

    def _cut(
        self, batches: Iterable[list[Chunk[_Loaded]]], collate: Collate
    ) -> Iterator[PaddedBatch]:
        """Cut chunks from utterances in memory."""
        for chunks in batches:
            pieces = [source.chunk(start, stop) for source, start, stop in chunks]
            if self.discard_short_samples:
                yield [id for id, _ in pieces], _stacked(pieces)
            else:
                yield collate([(id, as_arrays(piece)) for id, piece in pieces])

    def _to_cut(
        self, source: Any, id: str, frames: Mapping[str, int], numbers: Tensors
    ) -> UtteranceToCut[Any]:
        if not frames:
            raise FeatureError(f"utterance {id!r} has nothing with a time axis to cut chunks from")
        if len(set(frames.values())) > 1:
            listed = ", ".join(f"{name!r} {length}" for name, length in frames.items())
            raise FeatureError(
                f"utterance {id!r} cannot be cut into chunks, as its lengths differ: {listed}"
            )
        length, rate_hz = next(iter(frames.values())), _number(id, SAMPLE_RATE, numbers, 16000)
        category = _number(id, CATEGORY, numbers, 0) if self._by_category else 0
        return UtteranceToCut(source, id, length, rate_hz, category)

    def _excluded(self, name: str) -> bool:
        return re.fullmatch(self.excluded_key_pattern, name) is not None


def _timed(dataset: FeatureDataset) -> list[str]:
    return [name for name in dataset.features if dataset.table.has_frames(name)]


def _without_lengths(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if not name.endswith("_lengths")}


def _number(id: str, name: str, numbers: Tensors, default: int) -> int:
    if name not in numbers:
        return default
    if numbers[name].numel() != 1:
        raise FeatureError(
            f"utterance {id!r}, {name!r}: one number is needed, not {numbers[name].tolist()!r}"
        )
    return int(numbers[name].item())


def _stacked(pieces: Sequence[tuple[str, Tensors]]) -> dict[str, torch.Tensor]:
    (first_id, first), *others = pieces
    for id, piece in others:
        for name in {**first, **piece}:
            shape, expected = (
                tuple(chunk[name].shape) if name in chunk else None for chunk in (piece, first)
            )
            if shape != expected:
                raise FeatureError(
                    f"utterance {id!r}, {name!r}: shape {shape} in a chunk does not fit "
                    f"{expected} of {first_id!r}"
                )
    return {name: torch.stack([piece[name] for _, piece in pieces]) for name in first}
