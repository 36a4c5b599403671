"""The text tables of speech toolkits as spans of one block of bytes.

They have a key, then values, on each line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints

Words = NDArray[np.uint64]
PAD = bytes(8)  # before and after the text, so that 8 bytes can be read from anywhere in it
# the first `width` bytes of a word
_KEEP = np.array([(1 << 8 * width) - 1 for width in range(9)], np.uint64)


class PackedStrings(Sequence[str]):
    """Strings as spans of one block of UTF-8 bytes, decoded when looked at.

    A million take 16 MB beside the text.

    >>> keys = PackedStrings.of(["a", "bc"])
    >>> keys[1], keys.match(PackedStrings.of(["bc", "x"])).tolist()
    ('bc', [1, -1])
    """

    def __init__(self, data: bytes, starts: Ints, stops: Ints) -> None:
        """Bytes `starts` to before `stops` of data, which ends in `PAD`."""
        self._data = data
        self._starts = starts
        self._stops = stops

    @classmethod
    def of(cls, strings: Sequence[str]) -> PackedStrings:
        """Copy them from strings."""
        encoded = [string.encode() for string in strings]
        ends = np.cumsum([0, *map(len, encoded)])
        return cls(b"".join(encoded) + PAD, ends[:-1], ends[1:])

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        return self._data[self._starts.item(index) : self._stops.item(index)].decode()

    def words(self) -> Iterator[tuple[Ints | slice, Words]]:
        """Yield rows and 8 bytes of each, from the first bytes on, until all have ended.

        After a string's end come zeros.
        """
        lengths = self._stops - self._starts
        anywhere: Words = np.ndarray(len(self._data) - 7, "<u8", self._data, strides=(1,))
        for begin in range(0, int(lengths.max(initial=0)), 8):
            longer: Ints | slice = slice(None)
            if lengths.min() <= begin:
                longer = np.flatnonzero(lengths > begin)
            yield (
                longer,
                anywhere[self._starts[longer] + begin]
                & _KEEP[np.minimum(lengths[longer] - begin, 8)],
            )

    @cached_property
    def hashes(self) -> Words:
        """One 64-bit number for each string."""
        return self._mixed(np.uint64(0xFF51AFD7ED558CCD))

    @cached_property
    def other_hashes(self) -> Words:
        """Another one: strings that have both in common are the same."""
        return self._mixed(np.uint64(0xC4CEB9FE1A85EC53))

    def _mixed(self, factor: np.uint64) -> Words:
        # the factors are those of MurmurHash3's finaliser, Appleby, public domain
        mixed = (self._stops - self._starts).astype(np.uint64)
        for rows, words in self.words():
            product = (mixed[rows] ^ words) * factor
            product ^= product >> np.uint64(32)
            mixed[rows] = product
        return mixed

    def duplicate(self) -> tuple[int, int] | None:
        """Return the rows of the first string that is there twice, or None."""
        ordered = np.sort(self.hashes)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        seen: dict[str, int] = {}
        for row in np.flatnonzero(np.isin(self.hashes, twice)).tolist() if len(twice) else ():
            if seen.setdefault(self[row], row) != row:
                return seen[self[row]], row
        return None

    def match(self, others: PackedStrings) -> Ints:
        """Return the row of each of `others` among these, which are distinct.

        -1 where there is none.
        """
        if len(self) == len(others) and self._same_hashes(others, np.arange(len(self))).all():
            return np.arange(len(self))
        if len(self) == 0:
            return np.full(len(others), -1)
        mine, theirs = np.argsort(self.hashes), np.argsort(others.hashes)
        ordered, asked = self.hashes[mine], others.hashes[theirs]
        # both in order: the search walks through memory once
        if not np.array_equal(ordered, asked):
            mine = mine[np.minimum(np.searchsorted(ordered, asked), len(mine) - 1)]
        rows = np.empty(len(others), np.int64)
        rows[theirs] = mine
        return np.where(self._same_hashes(others, rows), rows, -1)

    def _same_hashes(self, others: PackedStrings, rows: Ints) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = self.hashes[rows] == others.hashes
        if same.any():
            same &= self.other_hashes[rows] == others.other_hashes
        return same


@dataclass(frozen=True)
class Table:
    """The tokens of a text, line by line; token t is data[starts[t] : stops[t]]."""

    path: str
    data: bytes
    starts: Ints
    stops: Ints
    heads: Ints  # the first token of each line, then the number of tokens

    def __len__(self) -> int:
        return len(self.heads) - 1

    @property
    def widths(self) -> Ints:
        """Tokens of each line, the key among them."""
        return np.diff(self.heads)

    @property
    def keys(self) -> PackedStrings:
        """The first token of each line."""
        return PackedStrings(self.data, self.starts[self.heads[:-1]], self.stops[self.heads[:-1]])

    def tokens(self, chosen: Ints) -> PackedStrings:
        """Return these tokens."""
        return PackedStrings(self.data, self.starts[chosen], self.stops[chosen])

    def value(self, line: int) -> str:
        """Return what follows the key of a line (from 0), with the spaces in it."""
        first, end = self.heads[line] + 1, self.heads[line + 1]
        return "" if first == end else self.data[self.starts[first] : self.stops[end - 1]].decode()


def read_table(path: str | Path) -> Table:
    """Read a UTF-8 text of a key and values on each line.

    Raises `ConfigError` for a file without lines, a blank line or a key that is there twice, with
    the file and the line.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    data, breaks = _broken(raw)
    kinds = np.bincount(np.frombuffer(data, np.uint8)[breaks], minlength=33)
    if not raw.isascii() or kinds[[9, 10, 32]].sum() + 1 < len(breaks):
        data, breaks = _broken(_plain_spaces(raw, str(path)))
    buffer = np.frombuffer(data, np.uint8)
    newline = buffer[breaks[1:]] == 10
    starts, stops = breaks[:-1] + 1, breaks[1:]
    if (filled := stops > starts).all():
        ends_line = np.flatnonzero(newline) + 1
    else:
        starts, stops = starts[filled], stops[filled]
        ends_line = np.cumsum(filled)[newline]
    table = Table(str(path), data, starts, stops, np.append(0, ends_line))
    if len(table) == 0:
        raise ConfigError(
            f"{table.path!r} has no lines: an utterance and its values are expected on each"
        )
    if not table.widths.all():
        raise ConfigError(
            f"{table.path!r}, line {int(table.widths.argmin()) + 1}: a blank line; remove it"
        )
    keys = table.keys
    if (twice := keys.duplicate()) is not None:
        raise ConfigError(
            f"{table.path!r}, line {twice[1] + 1}: {keys[twice[1]]!r} is there twice, first on "
            f"line {twice[0] + 1}"
        )
    return table


def _broken(raw: bytes) -> tuple[bytes, Ints]:
    """Return a text with newlines and `PAD` around it, and where tokens may end.

    There is a newline after each line; ends come after one before it.
    """
    data = b"".join([PAD, raw, b"" if raw.endswith(b"\n") or not raw else b"\n", PAD])
    return data, np.flatnonzero(np.frombuffer(data, np.uint8) <= 32)[len(PAD) - 1 : -len(PAD)]


def _plain_spaces(raw: bytes, path: str) -> bytes:
    """Return a text with no other white space than the space and the newline."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path!r}, line {line}: byte {raw[error.start]:#x} is not UTF-8"
        ) from error
    text = re.sub(r"[^\S\n]", " ", text.replace("\r\n", "\n").replace("\r", "\n"))
    if control := re.search(r"[\0-\x09\x0b-\x1f]", text):
        line = text.count("\n", 0, control.start()) + 1
        raise ConfigError(
            f"{path!r}, line {line}: control character {control[0]!r}; is it a text file?"
        )
    return text.encode()
