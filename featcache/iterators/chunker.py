"""Batches of chunks: cut from loaded utterances, or read chunk by chunk from a `FeatureDataset`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from featcache.errors import FeatureError
from featcache.iterators.chunk_rule import Chunk, ChunkRule, UtteranceToCut, chunk_batches
from featcache.iterators.dataset_input import Collate, ItemDataset, as_array, epoch_loader
from featcache.iterators.epoch_order import BatchList, EpochRule, random_state
from featcache.loading.collate import CommonCollateFn, PaddedBatch
from featcache.loading.dataset import FeatureDataset

CATEGORY, SAMPLE_RATE = "utt2category", "utt2fs"


class _Loaded(NamedTuple):
    """An utterance in memory, and the names that chunks are cut of; of the others they get all."""

    id: str
    arrays: Mapping[str, torch.Tensor]
    names: Sequence[str]

    def cut(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return a chunk."""
        return {
            name: value[start:stop] if name in self.names else value
            for name, value in self.arrays.items()
        }


@dataclass(frozen=True)
class Chunker:
    """Gives an epoch's batches of chunks; the arguments are those of `ChunkIterFactory`."""

    dataset: ItemDataset
    rule: ChunkRule
    epochs: EpochRule
    by_category: bool
    excluded_key_prefixes: Sequence[str] | None
    num_workers: int
    collate_fn: Collate | None
    pin_memory: bool

    def chunks(self, batches: BatchList, epoch: int, shuffle: bool | None) -> Iterator[PaddedBatch]:
        """Give the batches of chunks that an epoch makes of `batches`."""
        shuffled = self.epochs.shuffle if shuffle is None else shuffle
        taken = self.epochs.batches(batches, epoch, shuffle)
        draw = partial(
            chunk_batches,
            rule=self.rule,
            state=random_state(epoch, self.epochs.seed),
            shuffle=shuffled,
        )
        seed = epoch + self.epochs.seed
        if isinstance(self.dataset, FeatureDataset) and not any(
            map(self._excluded, self._timed(self.dataset))
        ):
            return self._read(self.dataset, taken, draw, seed)
        return self._cut(taken, draw, seed)

    def _read(
        self,
        dataset: FeatureDataset,
        batches: BatchList,
        draw: Callable[[Iterable[UtteranceToCut[int]]], Iterator[list[Chunk[int]]]],
        seed: int,
    ) -> Iterator[PaddedBatch]:
        """Read just the frames of each chunk."""
        windows = (
            [(row, slice(start, stop)) for row, start, stop in chunks]
            for chunks in draw(self._measured(dataset, batches))
        )
        loader = epoch_loader(
            dataset, self.collate_fn, self.num_workers, self.pin_memory, windows, seed
        )
        for ids, batch in loader:
            if self.rule.discard_short_samples:
                batch = {
                    name: value for name, value in batch.items() if not name.endswith("_lengths")
                }
            yield ids, batch

    def _measured(
        self, dataset: FeatureDataset, batches: BatchList
    ) -> Iterator[UtteranceToCut[int]]:
        """Give rows and lengths of a `FeatureDataset`, without reading any frames."""
        table = dataset.table
        lengths = {name: table.lengths(name) for name in self._timed(dataset)}
        numbered = CATEGORY in dataset.features or SAMPLE_RATE in dataset.features
        for batch in batches:
            for row in table.numbers(batch).tolist():
                frames = {name: int(column[row]) for name, column in lengths.items()}
                numbers = dataset[row, slice(0, 0)] if numbered else {}
                yield self._to_cut(row, table.id(row), frames, numbers)

    def _cut(
        self,
        batches: BatchList,
        draw: Callable[[Iterable[UtteranceToCut[_Loaded]]], Iterator[list[Chunk[_Loaded]]]],
        seed: int,
    ) -> Iterator[PaddedBatch]:
        """Load whole utterances and cut them."""
        collate = self.collate_fn or CommonCollateFn()
        loader = epoch_loader(
            self.dataset, collate, self.num_workers, self.pin_memory, batches, seed
        )
        for chunks in draw(self._loaded(loader)):
            pieces = [(source.id, source.cut(start, stop)) for source, start, stop in chunks]
            if self.rule.discard_short_samples:
                yield [id for id, _ in pieces], _stacked(pieces)
            else:
                yield collate(
                    [
                        (id, {name: as_array(value) for name, value in piece.items()})
                        for id, piece in pieces
                    ]
                )

    def _loaded(self, loader: Iterable[PaddedBatch]) -> Iterator[UtteranceToCut[_Loaded]]:
        for ids, batch in loader:
            cut = [
                name for name in batch if f"{name}_lengths" in batch and not self._excluded(name)
            ]
            for place, id in enumerate(ids):
                arrays = {
                    name: value[place]
                    for name, value in batch.items()
                    if not name.endswith("_lengths")
                }
                frames = {name: len(arrays[name]) for name in cut}
                yield self._to_cut(_Loaded(id, arrays, cut), id, frames, arrays)

    def _to_cut(
        self, source: Any, id: str, frames: Mapping[str, int], numbers: Mapping[str, torch.Tensor]
    ) -> UtteranceToCut[Any]:
        if not frames:
            raise FeatureError(f"utterance {id!r} has nothing with a time axis to cut chunks from")
        if len(set(frames.values())) > 1:
            listed = ", ".join(f"{name!r} {length}" for name, length in frames.items())
            raise FeatureError(
                f"utterance {id!r} cannot be cut into chunks, as its lengths differ: {listed}"
            )
        category = _number(id, CATEGORY, numbers, 0) if self.by_category else 0
        return UtteranceToCut(
            source,
            id,
            next(iter(frames.values())),
            _number(id, SAMPLE_RATE, numbers, 16000),
            category,
        )

    def _timed(self, dataset: FeatureDataset) -> list[str]:
        return [name for name in dataset.features if dataset.table.has_frames(name)]

    @property
    def excluded_key_pattern(self) -> str:
        """Regular expression for the names of which chunks get all, as ESPnet writes it."""
        given = list(self.excluded_key_prefixes or ())
        prefixes = [*given, *(name for name in (CATEGORY, SAMPLE_RATE) if name not in given)]
        return "|".join(f"({prefix}[0-9]*)" for prefix in prefixes)

    def _excluded(self, name: str) -> bool:
        return re.fullmatch(self.excluded_key_pattern, name) is not None


def _number(id: str, name: str, numbers: Mapping[str, torch.Tensor], default: int) -> int:
    if name not in numbers:
        return default
    if numbers[name].numel() != 1:
        raise FeatureError(
            f"utterance {id!r}, {name!r}: one number is needed, not {numbers[name].tolist()!r}"
        )
    return int(numbers[name].item())


def _stacked(pieces: Sequence[tuple[str, Mapping[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    (first_id, first), *others = pieces
    for id, piece in others:
        for name in {**first, **piece}:
            shapes = [
                tuple(chunk[name].shape) if name in chunk else None for chunk in (first, piece)
            ]
            if shapes[0] != shapes[1]:
                raise FeatureError(
                    f"utterance {id!r}, {name!r}: shape {shapes[1]} in a chunk does not fit "
                    f"{shapes[0]} of {first_id!r}"
                )
    return {name: torch.stack([piece[name] for _, piece in pieces]) for name in first}
