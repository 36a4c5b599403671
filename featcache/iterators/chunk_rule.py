"""ESPnet's rules for chunks, by lengths alone: where utterances are cut, how chunks are batched."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from featcache.errors import ConfigError, FeatureError

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
    """Give full batches; what is left stays in `ready`."""
    if shuffle:
        ready[:] = [ready[place] for place in state.permutation(len(ready)).tolist()]
    full = len(ready) // batch_size * batch_size
    for start in range(0, full, batch_size):
        yield ready[start : start + batch_size]
    del ready[:full]
