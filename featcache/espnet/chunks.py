"""Chunks of equal length that ESPnet cuts utterances into."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from featcache import FeatureDataset
from featcache.errors import ConfigError, FeatureError
from featcache.espnet.dataset_input import (
    BatchList,
    Collate,
    CommonCollateFn,
    EpochRule,
    ItemDataset,
    PaddedBatch,
    as_arrays,
    epoch_loader,
    random_state,
)

# ESPnet's rules for chunks, by lengths alone: where utterances are cut, how chunks are batched.

Source = TypeVar("Source")
WHOLE = 0  # the width under which utterances that are too short for any chunk are kept
_log = logging.getLogger("featcache")


class UtteranceToCut(NamedTuple, Generic[Source]):
    """An utterance to cut; `source` is the row or the arrays that the caller cuts."""

    source: Source
    id: str
    length: int
    sample_rate_hz: int = 16000
    category: int = 0


class Chunk(NamedTuple, Generic[Source]):
    """Frames `start` to before `stop` of an utterance."""

    source: Source
    start: int
    stop: int


@dataclass
class ChunkRule:
    """Lengths of chunks, and their way into batches; the arguments of `ChunkIterFactory`."""

    chunk_length: int | str
    batch_size: int
    chunk_shift_ratio: float
    num_cache_chunks: int
    discard_short_samples: bool
    default_fs: int | None
    chunk_max_abs_length: int | None

    def __post_init__(self) -> None:
        for name in ("batch_size", "default_fs", "chunk_max_abs_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value!r}")
        self.lengths = parse_chunk_lengths(self.chunk_length)
        if self.default_fs is None:
            self._shift(min(self._capped(self.lengths)))

    def cut(
        self, utterance: UtteranceToCut[Source], state: np.random.RandomState, shuffle: bool
    ) -> list[Chunk[Source]]:
        """Return the chunks of an utterance, all of one width; none if it is to be left out."""
        lengths = [length for length in self._scaled(utterance) if length < utterance.length]
        if not lengths:
            whole = Chunk(utterance.source, 0, utterance.length)
            return [] if self.discard_short_samples else [whole]
        widths = self._capped(lengths)
        # the draw of ESPnet's `state.choice(widths, 1)`
        width = widths[int(state.randint(0, len(widths), size=1)[0])]
        shift = self._shift(width)
        spare = utterance.length - width
        first = int(state.randint(0, spare % shift + 1)) if shuffle else 0
        # the offset moves all chunks: the last one still ends within the utterance, as first is at
        # most spare % shift
        starts = range(first, first + spare // shift * shift + 1, shift)
        return [Chunk(utterance.source, start, start + width) for start in starts]

    def _scaled(self, utterance: UtteranceToCut[Source]) -> list[int]:
        """Return the lengths at the utterance's sample rate."""
        rate, default = utterance.sample_rate_hz, self.default_fs
        if default is None:
            return self.lengths
        if rate < 1 or (rate % default and default % rate):
            raise FeatureError(
                f"utterance {utterance.id!r}: sample rate {rate} and default_fs {default} are not "
                "multiples of each other"
            )
        return [length * rate // default for length in self.lengths]

    def _capped(self, lengths: list[int]) -> list[int]:
        most = self.chunk_max_abs_length
        return lengths if most is None else [min(length, most) for length in lengths]

    def _shift(self, width: int) -> int:
        shift = int(width * self.chunk_shift_ratio)
        if shift < 1:
            raise ConfigError(
                f"chunks of {width} frames would not move on with chunk_shift_ratio "
                f"{self.chunk_shift_ratio!r}; make chunk_length or the ratio larger"
            )
        return shift


def parse_chunk_lengths(chunk_length: int | str) -> list[int]:
    """Return the lengths that a number, or a text such as "100,150" or "80-120", names.

    Both ends of a range are among them.

    >>> parse_chunk_lengths("100,150-152")
    [100, 150, 151, 152]
    """
    lengths: list[int] = []
    try:
        for part in str(chunk_length).split(","):
            first, *rest = map(int, part.split("-"))
            last = rest[0] if rest else first
            if len(rest) > 1 or not 1 <= first <= last:
                raise ValueError(part)
            lengths += range(first, last + 1)
    except ValueError:
        raise ConfigError(
            "chunk_length is a number of frames of at least 1, or such as '100,150' or '80-120', "
            f"not {chunk_length!r}"
        ) from None
    return lengths


def chunk_batches(
    utterances: Iterable[UtteranceToCut[Source]],
    rule: ChunkRule,
    state: np.random.RandomState,
    shuffle: bool,
) -> Iterator[list[Chunk[Source]]]:
    """Cut utterances and give batches of `batch_size` chunks of one category and width.

    Chunks wait, by category and width, until there are more than `num_cache_chunks`, which are then
    shuffled. In the end what waits is given, too, except for chunks that are too few for a batch.
    """
    waiting: dict[int, dict[int, list[Chunk[Source]]]] = {}
    discarded: list[str] = []
    for utterance in utterances:
        chunks = rule.cut(utterance, state, shuffle)
        if not chunks:
            discarded.append(utterance.id)
            continue
        width = chunks[0].stop - chunks[0].start
        by_width = waiting.setdefault(utterance.category, {})
        ready = by_width.setdefault(width if width < utterance.length else WHOLE, [])
        ready += chunks
        if len(ready) > max(rule.num_cache_chunks, rule.batch_size):
            yield from _drain(ready, rule.batch_size, state, shuffle)
    if discarded:
        _log.warning(
            "%d utterances are no longer than chunks of %s frames and left out, the first is %r",
            len(discarded),
            rule.chunk_length,
            discarded[0],
        )
    for by_width in waiting.values():
        for ready in by_width.values():
            yield from _drain(ready, rule.batch_size, state, shuffle)


def _drain(
    ready: list[Chunk[Source]], batch_size: int, state: np.random.RandomState, shuffle: bool
) -> Iterator[list[Chunk[Source]]]:
    """Yield full batches; what is left stays in `ready`."""
    if shuffle:
        ready[:] = [ready[place] for place in state.permutation(len(ready)).tolist()]
    full = len(ready) // batch_size * batch_size
    for start in range(0, full, batch_size):
        yield ready[start : start + batch_size]
    del ready[:full]


# `Chunker`: arguments and chunks of both factories of `chunk_factories`.
#
# Chunks are cut from loaded utterances, or read one by one from a `FeatureDataset`.

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
    excluded_key_pattern: str | None = field(default=None, kw_only=True)

    _by_category: ClassVar[bool]  # whether chunks of a batch are of one category
    _into_padding = True  # utterances are as long as their batch

    def __post_init__(self) -> None:
        if self.excluded_key_pattern is None:
            names = [*(self.excluded_key_prefixes or ()), CATEGORY, SAMPLE_RATE]
            # as ESPnet writes it
            patterns = (f"({name}[0-9]*)" for name in dict.fromkeys(names))
            self.excluded_key_pattern = "|".join(patterns)
        elif self.excluded_key_prefixes is not None:
            raise ConfigError("give either excluded_key_prefixes or excluded_key_pattern")
        try:
            self._is_excluded = re.compile(self.excluded_key_pattern).fullmatch
        except re.error as error:
            raise ConfigError(
                f"excluded_key_pattern {self.excluded_key_pattern!r}: {error}"
            ) from None
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

    def build_iter(self, epoch: int, shuffle: bool | None = None) -> Iterator[PaddedBatch]:
        """Yield the batches of an epoch, counted from 1: ids and tensors (batch_size, chunk, ...).

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
        self, collate: Collate | None, batches: Iterable[object], seed: int
    ) -> Iterable[PaddedBatch]:
        return epoch_loader(self.dataset, collate, self.num_workers, self.pin_memory, batches, seed)

    def _measured(
        self, dataset: FeatureDataset, batches: BatchList
    ) -> Iterator[UtteranceToCut[int]]:
        """Yield rows and lengths of a `FeatureDataset`, without reading any frames."""
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
        """Yield whole utterances out of padded batches."""
        for ids, batch in loader:
            cut = [
                name for name in batch if f"{name}_lengths" in batch and not self._excluded(name)
            ]
            values = _without_lengths(batch)
            for place, id in enumerate(ids):
                arrays = {name: value[place] for name, value in values.items()}
                if not self._into_padding:
                    ends = {name: int(batch[f"{name}_lengths"][place]) for name in cut}
                    arrays |= {name: arrays[name][:end] for name, end in ends.items()}
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
        self, source: object, id: str, frames: Mapping[str, int], numbers: Tensors
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
        return self._is_excluded(name) is not None


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
