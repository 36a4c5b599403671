"""Features of items that are made of stored ones: one of several versions, layers, random crops.

Here is decided which stored feature and which of its frames an item has. All of it is drawn of
seed, epoch and row, so that a resume draws the same, on any worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np

from featcache._recycled import RECYCLED
from featcache.declaration import FrameTimes, Seconds64
from featcache.errors import ConfigError
from featcache.interface import Bytes, Ints, storage_dtype
from featcache.reading.containers import Wanted
from featcache.tables.columns import mixed
from featcache.tables.order import drawn
from featcache.tables.table import FeatureTable
from featcache.tables.times import require_times

UINT8 = np.dtype(np.uint8)
MOST_FRAMES = 2.0**62  # of a crop: all of any utterance
HALF = 0.5 + 1e-6  # halves are rounded up, also where they come a little short
Draw = tuple[int, int]  # seed and epoch
Named = Mapping[str, Sequence[str]]


class Span(NamedTuple):
    """First frame and number of frames of each item, and how many its utterance has."""

    starts: Ints
    lengths: Ints
    wholes: Ints


class _Kind(NamedTuple):
    """Dtype and shape of the arrays of a feature, in an item."""

    dtype: str
    has_frames: bool
    dims: tuple[int, ...]


class Choices:
    """The features that items have, made of those of a table.

    Args:
        table: the rows.
        features: names of stored features to read; None: all that `variants` and `layers` do not
            name.
        variants: by name, stored features of which each item has one, drawn by epoch and row.
        layers: by name, stored features that are stacked behind the frames, as axis 1.
        random_crop_s: seconds of which each item has the frames, at random; all of a shorter one.

    Raises `ConfigError` for features that do not go together.
    """

    def __init__(
        self,
        table: FeatureTable,
        features: Sequence[str] | None,
        variants: Named | None,
        layers: Named | None,
        random_crop_s: float | None,
    ) -> None:
        self._table = table
        self.random_crop_s = random_crop_s
        self.variants = _lists("variants", variants)
        self.layers = _lists("layers", layers)
        made = {**self.variants, **self.layers}
        for name, some in made.items():
            self._check_alike(name, some)
        if features is None:
            taken = {stored for some in made.values() for stored in some}
            features = [name for name in table.features if name not in taken]
        self.features = (*features, *(name for name in made if name not in features))
        if len(made) < len(self.variants) + len(self.layers):
            raise ConfigError(f"variants and layers have a name in common: {', '.join(made)}")
        self._kinds = {name: self._kind(name) for name in self.features}
        # of features that are cropped
        self._times: dict[str, FrameTimes] = {}
        self._crop_frames = {} if random_crop_s is None else self._frames_of(random_crop_s)

    @property
    def are_stored(self) -> bool:
        """Whether all features are stored ones, whole."""
        return not (self.variants or self.layers or self._crop_frames)

    def stored(self, name: str) -> list[str]:
        """Return the stored features that one of an item is made of."""
        return self.variants.get(name) or self.layers.get(name) or [name]

    def dtype(self, name: str) -> str:
        """Return the declared dtype of a feature."""
        return self._kinds[name].dtype

    def has_frames(self, name: str) -> bool:
        """Whether a feature has a time axis."""
        return self._kinds[name].has_frames

    def dims(self, name: str) -> tuple[int, ...]:
        """Return the shape of one frame, or of the whole array of a feature without a time axis."""
        return self._kinds[name].dims

    def _kind(self, name: str) -> _Kind:
        stored = self.stored(name)[0]
        dims = self._table.dims(stored)
        if name in self.layers:
            dims = (len(self.layers[name]), *dims)
        return _Kind(self._table.dtype(stored), self._table.has_frames(stored), dims)

    def over(self, table: FeatureTable) -> Choices:
        """Return the same features of another table."""
        return Choices(table, self.features, self.variants, self.layers, self.random_crop_s)

    def lengths(self, name: str) -> Ints:
        """Return the most frames that an item of each row can have."""
        columns = [self._table.lengths(stored) for stored in self.stored(name)]
        longest = columns[0] if len(columns) == 1 else np.max(columns, axis=0)
        most = self._crop_frames.get(name)
        return longest if most is None else np.minimum(longest, most)

    def spans(self, rows: Ints, draw: Draw) -> dict[str, Span]:
        """Return the frames that items of these rows have, by feature."""
        wholes = {name: self._wholes(name, rows, draw) for name in self.features}
        spans = {
            name: Span(np.zeros_like(whole), whole.copy(), whole) for name, whole in wholes.items()
        }
        if not self._crop_frames:
            return spans
        key = drawn(draw[0], "crop", draw[1])
        shares = (mixed(rows.astype(np.uint64), key) >> np.uint64(11)) * np.float64(2.0**-53)
        begins_s = {name: self._begins_s(name, rows) for name in self._crop_frames}
        starts_s = self._starts_s(wholes, begins_s, shares)
        for name, most in self._crop_frames.items():
            lengths = np.minimum(wholes[name], most)
            starts = np.rint((starts_s - begins_s[name]) / self._times[name].frame_s)
            starts = np.clip(starts.astype(np.int64), 0, wholes[name] - lengths)
            spans[name] = Span(starts, lengths, wholes[name])
        return spans

    def _starts_s(
        self, wholes: Mapping[str, Ints], begins_s: Mapping[str, Seconds64], shares: Seconds64
    ) -> Seconds64:
        """Return the times at which crops start: where a frame of the longest frames begins.

        Within the time that all features have frames of; those without any do not count.
        """
        have = [wholes[name] > 0 for name in self._times]
        begin_s = [begins_s[name] for name in self._times]
        last_s = [  # begin of a crop that goes to the end
            begins_s[name] + np.maximum(wholes[name] - self._crop_frames[name], 0) * times.frame_s
            for name, times in self._times.items()
        ]
        coarse = max(self._times, key=lambda name: self._times[name].frame_s)
        zero_s, frame_s = begins_s[coarse], self._times[coarse].frame_s
        from_s = np.max(np.where(have, begin_s, -np.inf), axis=0)
        to_s = np.min(np.where(have, last_s, np.inf), axis=0)
        is_empty = np.isinf(from_s)  # none of its features has frames
        first, last = (
            np.floor((np.where(is_empty, zero_s, s) - zero_s) / frame_s + HALF)
            for s in (from_s, to_s)
        )
        places = np.maximum(last - first, 0) + 1
        return np.asarray(zero_s + (first + np.floor(shares * places)) * frame_s)

    def _begins_s(self, name: str, rows: Ints) -> Seconds64:
        """Return the time at which the first frame of each row begins."""
        times = self._times[name]
        span = self._table.selection.span(self.stored(name)[0], rows)
        first = np.zeros_like(rows) if span is None else span[0]
        return np.asarray(times.offset_s + first * times.frame_s, np.float64)

    def _wholes(self, name: str, rows: Ints, draw: Draw) -> Ints:
        """Return the frames of the utterances that a feature is read of, before any crop."""
        if name not in self.layers and name not in self.variants:
            return self._table.lengths(name, rows=rows)
        if name in self.variants:
            lengths = np.empty(len(rows), np.int64)
            for stored, places in self._chosen(name, rows, draw):
                lengths[places] = self._table.lengths(stored, rows=rows[places])
            return lengths
        first, *others = self.layers[name]
        lengths = self._table.lengths(first, rows=rows)
        for other in others:
            unlike = np.flatnonzero(self._table.lengths(other, rows=rows) != lengths)
            if len(unlike):
                raise ConfigError(
                    f"features {first!r} and {other!r} of utterance "
                    f"{self._table.id(int(rows[unlike[0]]))!r} differ in length, so they cannot be "
                    "layers of one array; read them as features of their own"
                )
        return lengths

    def read_into(
        self,
        rows: Ints,
        name: str,
        span: tuple[Ints, Ints],
        draw: Draw,
        out: Sequence[Bytes],
    ) -> None:
        """Read frames of each row into the bytes of a row of `out`, zeros behind them."""
        if name in self.layers:
            self._read_layers(rows, self.layers[name], span, out)
            return
        starts, lengths = span
        if name not in self.variants:
            self._table.read_into(rows, name, starts, lengths, out)
            return
        for stored, places in self._chosen(name, rows, draw):
            some = [out[place] for place in places.tolist()]
            self._table.read_into(rows[places], stored, starts[places], lengths[places], some)

    def want(
        self, rows: Ints, name: str, span: tuple[Ints, Ints], draw: Draw, wanted: Wanted
    ) -> None:
        """Add what `read_into` will read of object stores to what is wanted of them."""
        starts, lengths = span
        parts: list[tuple[str, Ints | slice]] = [(name, slice(None))]
        if name in self.layers:
            parts = [(stored, slice(None)) for stored in self.layers[name]]
        elif name in self.variants:
            parts = [*self._chosen(name, rows, draw)]
        for stored, places in parts:
            selection = self._table.selection
            selection.want(rows[places], stored, starts[places], lengths[places], wanted)

    def _read_layers(
        self,
        rows: Ints,
        stored: Sequence[str],
        span: tuple[Ints, Ints],
        out: Sequence[Bytes],
    ) -> None:
        size = storage_dtype(self._table.dtype(stored[0])).itemsize
        frame_bytes = size * math.prod(self._table.dims(stored[0]))
        for number, name in enumerate(stored):
            read = [RECYCLED.empty((n * frame_bytes,), UINT8) for n in span[1].tolist()]
            self._table.read_into(rows, name, *span, read)
            for row, layer, frames in zip(out, read, span[1].tolist(), strict=True):
                end = frames * frame_bytes * len(stored)
                row[:end].reshape(frames, len(stored), frame_bytes)[:, number] = layer.reshape(
                    frames, frame_bytes
                )
                row[end:] = 0

    def _chosen(self, name: str, rows: Ints, draw: Draw) -> list[tuple[str, Ints]]:
        """Return the stored features that rows have of a feature, and the places of these rows."""
        stored = self.stored(name)
        key = drawn(draw[0], "variant", name, draw[1])
        number = mixed(rows.astype(np.uint64), key) % np.uint64(len(stored))
        places = ((each, np.flatnonzero(number == at)) for at, each in enumerate(stored))
        return [(each, some) for each, some in places if len(some)]

    def _check_alike(self, name: str, stored: Sequence[str]) -> None:
        if not stored or len(set(stored)) < len(stored):
            raise ConfigError(f"{name!r} is made of {stored!r}: name stored features, each once")
        if name in self._table.features and name not in stored:
            raise ConfigError(f"{name!r} is a feature itself, and none of {', '.join(stored)}")
        table = self._table
        kinds = [(table.has_frames(each), table.dtype(each), table.dims(each)) for each in stored]
        for each, kind in zip(stored, kinds, strict=True):
            if kind != kinds[0]:
                raise ConfigError(
                    f"{name!r} is made of features of one dtype and shape, but {stored[0]!r} is "
                    f"{kinds[0][1]} {kinds[0][2]} and {each!r} {kind[1]} {kind[2]}"
                )

    def require_same_times(self) -> None:
        """Raise `ConfigError` where one of an item is made of features with frames of other times.

        Cuts in seconds would be other seconds of each.
        """
        for name in filter(self.has_frames, {**self.variants, **self.layers}):
            blocks = self._table.selection.blocks
            times = [(each, blocks.frame_times(each)) for each in self.stored(name)]
            for each, found in times:
                if found != times[0][1]:
                    raise ConfigError(
                        f"{name!r} is made of features whose frames are at other times, so it "
                        f"cannot be cut in seconds: {times[0][0]!r} has {times[0][1]} and {each!r} "
                        f"{found}"
                    )

    def _frames_of(self, random_crop_s: float) -> dict[str, int]:
        is_number = isinstance(random_crop_s, Real) and not isinstance(random_crop_s, bool)
        if not is_number or not 0 < random_crop_s < np.inf:
            raise ConfigError(
                f"random_crop_s is a number of seconds above 0, not {random_crop_s!r}"
            )
        self.require_same_times()
        blocks, frames = self._table.selection.blocks, {}
        for name in filter(self.has_frames, self.features):
            for stored in self.stored(name):
                require_times(blocks, stored)
            times = blocks.frame_times(self.stored(name)[0])
            assert times is not None
            self._times[name] = times
            frames[name] = max(round(min(random_crop_s / times.frame_s, MOST_FRAMES)), 1)
        return frames


def _lists(setting: str, named: Named | None) -> dict[str, list[str]]:
    """Return stored features by the name of what is made of them; else raise `ConfigError`."""
    lists = {} if named is None else named
    if not isinstance(lists, Mapping) or any(
        isinstance(some, str) or not isinstance(some, Sequence) for some in lists.values()
    ):
        raise ConfigError(
            f"{setting} names lists of stored features, {{'ssl': ['ssl-6', 'ssl-9']}}, "
            f"not {named!r}"
        )
    return {name: list(some) for name, some in lists.items()}
