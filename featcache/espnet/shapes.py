"""Keys and shape files of ESPnet: utterances by number, with the lengths that files give them.

Arrays of whole numbers that all of ESPnet's ways of batching use stand here, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from featcache import FeatureTable
from featcache.errors import ConfigError
from featcache.samplers import Batches, LengthsLike, Numbering

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Array = NDArray[Any]


def ends_of(sizes: Sequence[int] | NDArray[np.integer]) -> Ints:
    """Return where each of consecutive groups of these sizes ends, after a 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def counted(sizes: Ints) -> Ints:
    """Number the elements within each of consecutive groups: 0, 1, ... up to each size.

    >>> counted(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ends = ends_of(sizes)
    return np.arange(ends[-1]) - np.repeat(ends[:-1], sizes)


def stable_order(values: Ints) -> Ints:
    """Return the rows by value, rows of one value in order; values are from 0 on."""
    bits, most = len(values).bit_length(), int(values.max(initial=0))
    if most < 2**16 or most.bit_length() + bits > 63:
        # the first kind is sorted by counting
        return np.argsort(values.astype(np.uint16) if most < 2**16 else values, kind="stable")
    # numbers are sorted several times faster than rows by number
    order: Ints = (values << bits) | np.arange(len(values))
    order.sort()
    order &= (1 << bits) - 1
    return order


# The text tables of speech toolkits as spans of one block of bytes.
#
# They have a key, then values, on each line.

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
        self._hashes: Words | None = None

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

    @property
    def hashes(self) -> Words:
        """One 64-bit number for each string."""
        if self._hashes is None:
            self._hashes = self._mixed(np.uint64(0xFF51AFD7ED558CCD))
        return self._hashes

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
            same &= self.other_hashes()[rows] == others.other_hashes()
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
    table = _tokens_of(path)
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


def read_keys(path: str | Path) -> PackedStrings:
    """Read the first word of each line of a UTF-8 text that has any; there may be none."""
    table = _tokens_of(path)
    return table.tokens(table.heads[:-1][table.widths > 0])


def _tokens_of(path: str | Path) -> Table:
    """Read the tokens of a UTF-8 text, line by line."""
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
    return Table(str(path), data, starts, stops, np.append(0, ends_line))


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


# Shapes of utterances as ESPnet's shape files have them.

_LARGEST = 2**62  # sums of two stay within int64


@dataclass(frozen=True)
class Shapes:
    """Lengths of the utterances of one feature, int64, and the shapes of their frames."""

    name: str
    lengths: Ints
    dims: Ints  # (n, dims) or, where all are alike, (1, dims); -1 where an utterance has fewer

    @classmethod
    def of(cls, name: str, shapes: Ints) -> Shapes:
        """Take them from an array of shapes, (n, 1 + dims)."""
        dims = shapes[:, 1:]
        alike = bool((dims == dims[:1]).all())
        return cls(name, np.ascontiguousarray(shapes[:, 0]), dims[:1] if alike else dims)

    def take(self, rows: Ints) -> Shapes:
        """Return the shapes of these rows."""
        dims = self.dims if len(self.dims) == 1 else self.dims[rows]
        return Shapes(self.name, self.lengths[rows], dims)


def elements(shapes: Shapes) -> Ints:
    """Return the numbers that each utterance holds: its length times the shape of a frame."""
    factors = np.where(shapes.dims < 0, 1, shapes.dims)
    most = shapes.lengths.max(initial=0) * factors.prod(1, dtype=np.float64).max(initial=1)
    if most * len(shapes.lengths) > _LARGEST:
        raise ConfigError(f"the elements of {shapes.name} are too many to count in 64 bits")
    counts: Ints = shapes.lengths * factors.prod(1)
    return counts


def require_one_frame_shape(shapes: Shapes) -> None:
    """Raise `ConfigError` where frames differ in shape: they cannot be padded to one array."""
    differing = np.flatnonzero((shapes.dims != shapes.dims[:1]).any(1))
    if len(differing):
        row = int(differing[0])
        one, other = (tuple(dims[dims >= 0].tolist()) for dims in shapes.dims[[0, row]])
        raise ConfigError(
            f"with padding=True all frames must have one shape: {shapes.name} has {one} for the "
            f"first utterance and {other} for number {row + 1}; try padding=False"
        )


def read_shapes(path: str | Path, separator: str = ",") -> tuple[PackedStrings, Shapes]:
    """Read a file of an utterance and its length, or shape, on each line ("utt-1 575,80").

    Args:
        path: the file, UTF-8.
        separator: what stands between the numbers: a comma, or a space, as category samplers read
            them.

    Raises `ConfigError` with file and line for a duplicate, a blank line, a key without numbers, a
    number that is no integer or negative.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = Path(file.name).write_text("utt-1 575,80\\nutt-2 31,80\\n")
    ...     keys, shapes = read_shapes(file.name)
    >>> list(keys), shapes.lengths.tolist(), shapes.dims.tolist()
    (['utt-1', 'utt-2'], [575, 31], [[80]])
    """
    table = read_table(path)
    numbers = _plain_numbers(table, separator)
    if numbers is None:
        numbers = _numbers_by_line(table, separator)
    return table.keys, Shapes.of(f"shape file {table.path!r}", numbers)


def _plain_numbers(table: Table, separator: str) -> Ints | None:
    """Parse lines of one value of equally many numbers of at most 8 digits.

    None where a line is of another kind.
    """
    if not (table.widths == 2).all():
        return None
    starts, stops = table.starts[1::2], table.stops[1::2]
    commas = np.flatnonzero((np.frombuffer(table.data, np.uint8) == 44) & (separator == ","))
    if len(commas) % len(table):
        return None
    between = commas.reshape(len(table), -1)
    if not ((between > starts[:, None]) & (between < stops[:, None])).all():
        return None
    bounds = [starts - 1, *between.T, stops]
    columns = [_digits(table.data, begin + 1, end) for begin, end in pairwise(bounds)]
    parsed = [column for column in columns if column is not None]
    return np.column_stack(parsed) if len(parsed) == len(columns) else None


def _digits(data: bytes, starts: Ints, stops: Ints) -> Ints | None:
    """Parse decimal numbers that end before `stops`; None where one is not of 1 to 8 digits."""
    widths = stops - starts
    if widths.min() < 1 or widths.max() > 8:
        return None
    until: NDArray[np.uint64] = np.ndarray(len(data) - 7, "<u8", data, strides=(1,))[stops - 8]
    blank = (8 * (8 - widths)).astype(np.uint64)
    # one digit a byte, zeros before the first
    number = ((until ^ np.uint64(0x3030303030303030)) >> blank) << blank
    if ((number | (number + np.uint64(0x0606060606060606))) & np.uint64(0xF0F0F0F0F0F0F0F0)).any():
        return None  # a byte that is none of 0 to 9
    # neighbours join to pairs, fours, eights of digits: Lemire, "Quickly parsing eight digits",
    # lemire.me, 2018
    number = (number * np.uint64(10) + (number >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    number = (number * np.uint64(100) + (number >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    number = (number * np.uint64(10000) + (number >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return number.astype(np.int64)


def _numbers_by_line(table: Table, separator: str) -> Ints:
    """Parse lines of any numbers, one after the other; -1 fills lines of fewer numbers."""
    rows: list[list[int]] = []
    for line in range(len(table)):
        value = table.value(line)
        try:
            rows.append([int(number) for number in value.split(separator)])
        except ValueError:
            rows.append([-1])
        if not 0 <= min(rows[-1]) <= max(rows[-1]) <= _LARGEST:
            one = separator == " "
            kind = (
                "this sampler needs one length for each utterance,"
                if one
                else "lengths and shapes are"
            )
            raise ConfigError(
                f"shape file {table.path!r}, line {line + 1}: {value!r} after "
                f"{table.keys[line]!r}; {kind} integers from 0 on, as in "
                f"{'575' if one else '575 or 575,80'}"
            )
    width = max(map(len, rows))
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int64)


# Utterances to batch: of shape files, of arrays of lengths, or of a cache.

Labels = Sequence[str] | Sequence[int] | NDArray[np.generic]


def shapes_of(lengths: LengthsLike) -> tuple[list[Shapes], FeatureTable | None]:
    """Return the shapes of each feature that has a time axis, or of each array; and the table.

    Arrays hold lengths, (utterances,), or shapes, (utterances, 1 + dims). Raises `ConfigError` for
    what is neither, for no utterances and for features of different ones.
    """
    owner, table = _table_of(lengths)
    if table is not None:
        if not len(table):
            raise ConfigError(f"there are no utterances to sample: {table!r} is empty")
        names = [name for name in owner.features if table.has_frames(name)]
        return [
            Shapes(
                f"feature {name!r}",
                _checked(f"lengths of feature {name!r}", table.lengths(name))[:, 0],
                np.array([table.dims(name)], np.int64),
            )
            for name in names
        ], table
    if isinstance(lengths, list | tuple) and len(lengths) > 0 and np.ndim(lengths[0]) > 0:
        arrays = {f"lengths[{number}]": array for number, array in enumerate(lengths)}
    else:
        arrays = {"lengths": lengths}
    shapes = [Shapes.of(name, _checked(name, np.asarray(array))) for name, array in arrays.items()]
    counts = [len(shape.lengths) for shape in shapes]
    if len(set(counts)) > 1:
        raise ConfigError(f"the features have lengths for {counts} utterances; give the same ones")
    return shapes, None


def _table_of(source: object) -> tuple[Any, FeatureTable | None]:
    """Return a data set over a table, and the table; of torch's `Subset` its rows; None of none."""
    if isinstance(source, str | PathLike):
        source = FeatureTable.of(source)
    table = getattr(source, "table", None)
    if table is None and hasattr(source, "dataset") and hasattr(source, "indices"):
        owner, whole = _table_of(source.dataset)
        return owner, None if whole is None else whole.select(source.indices)
    return source, table if isinstance(table, FeatureTable) else None


def _checked(name: str, array: NDArray[np.generic]) -> Ints:
    if array.ndim and not array.size:
        raise ConfigError(f"there are no utterances to sample: {name} is empty")
    if not 1 <= array.ndim <= 2 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"{name} are frames of each utterance, integers (or rows of integers, their shapes), "
            f"not {array.dtype} of shape {array.shape}"
        )
    whole = array.astype(np.int64, copy=False).reshape(len(array), -1)
    if whole.min() < 0:
        row = int(whole.min(1).argmin())
        raise ConfigError(f"{name} cannot be negative: row {row} has {array[row].tolist()}")
    return whole


@dataclass(frozen=True)
class NumberedUtterances:
    """Numbered utterances, with one `Shapes` a shape file, array or feature with a time axis.

    `ids` are the keys of a file, which batches name utterances by, or the table of row numbers.
    """

    name: str
    count: int
    shapes: list[Shapes]
    ids: PackedStrings | FeatureTable | None

    def batches(self, rows: Batches) -> Batches:
        """Return batches of rows by what they name utterances by.

        Row numbers know which utterances they count.
        """
        if isinstance(self.ids, PackedStrings):
            return Batches(rows.items, rows.ends, keys=self.ids)
        lengths = [shapes.lengths for shapes in self.shapes]
        numbering = Numbering(self.count, self.ids, lengths)
        return Batches(rows.items, rows.ends, numbering=numbering)

    def find(self, ids: PackedStrings, where: str) -> Ints:
        """Return the row of each id, -1 where there is none.

        Raises `ConfigError` if rows have no ids.
        """
        if self.ids is None:
            raise ConfigError(
                f"{where} names utterances, but {self.name} has no ids: give a cache, or labels of "
                "rows"
            )
        return self.ids.match(ids) if isinstance(self.ids, PackedStrings) else self.ids.find(ids)

    def without(self, path: str) -> Ints:
        """Return the rows but for those that a file names, an id on each line.

        Raises `ConfigError` if no row is left, or if rows have no ids.
        """
        kept = np.ones(self.count, bool)
        rows = self.find(read_keys(path), f"filtered_key_file {path!r}")
        kept[rows[rows >= 0]] = False
        if not kept.any():
            raise ConfigError(f"filtered_key_file {path!r} names all utterances: none is left")
        return np.flatnonzero(kept)

    def rows(self, ids: PackedStrings, lines: Ints, where: str) -> Ints:
        """Return the row of each id.

        Raises `ConfigError` for ids that are not there, with lines (from 0) of some.
        """
        rows = self.find(ids, where)
        _require_all(rows, ids, lines, f"{where} names", self.name)
        return rows


def _require_all(rows: Ints, ids: PackedStrings, lines: Ints, who: str, where: str) -> None:
    """Raise `ConfigError` with some of the ids whose row is -1, and their lines (from 0)."""
    absent = np.flatnonzero(rows < 0)
    if len(absent):
        some = ", ".join(f"{ids[at]!r} (line {lines[at] + 1})" for at in absent[:3].tolist())
        raise ConfigError(f"{who} {len(absent)} utterances that are not in {where}, such as {some}")


def utterances_of(
    shape_files: Sequence[str] | None,
    lengths: LengthsLike | None,
    separator: str = ",",
    shaped: int | None = None,
) -> NumberedUtterances:
    """Return the utterances of shape files or of `lengths`, of which one is given.

    The first `shaped` shape files are parsed (None: all; 0: only the ids of the first).
    """
    if (shape_files is None) == (lengths is None):
        raise ConfigError(
            "give either shape_files=[...] or lengths=, a cache or arrays, "
            + ("not both" if lengths is not None else "to a sampler")
        )
    if lengths is not None:
        found, table = shapes_of(lengths)
        if table is not None:
            return NumberedUtterances("the cache", len(table), found[:shaped], table)
        return NumberedUtterances("lengths", len(found[0].lengths), found[:shaped], None)
    if isinstance(shape_files, str) or not shape_files:
        raise ConfigError(f"shape_files is a list of one or more files, not {shape_files!r}")
    first = f"shape file {str(shape_files[0])!r}"
    if shaped == 0:
        keys = read_table(shape_files[0]).keys
        return NumberedUtterances(first, len(keys), [], keys)
    keys, shapes = read_shapes(shape_files[0], separator)
    utterances = NumberedUtterances(first, len(keys), [shapes], keys)
    for path in shape_files[1:shaped]:
        others, more = read_shapes(path, separator)
        lines = np.arange(max(len(keys), len(others)))
        rows = others.match(keys)
        _require_all(rows, keys, lines, f"{first} has", more.name)
        if len(others) > len(keys):
            _require_all(keys.match(others), others, lines, f"{more.name} has", first)
        utterances.shapes.append(more.take(rows))
    return utterances


def codes_of(labels: Labels, count: int, argument: str) -> Ints:
    """Number the labels of all rows, in the order that they come in."""
    if len(labels) != count:
        raise ConfigError(f"{argument} has {len(labels)} labels for {count} utterances")
    if count == 0:
        raise ConfigError(f"there are no utterances to sample: {argument} is empty")
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and labels.ndim == 1:
        spread: Ints = labels.astype(np.int64, copy=False) - labels.min()
        if spread.max() < 4 * count:
            return spread
    listed = labels.tolist() if hasattr(labels, "tolist") else labels
    numbers = {label: number for number, label in enumerate(dict.fromkeys(listed))}
    return np.fromiter(map(numbers.__getitem__, listed), np.int64, count)


def category_codes(found: NumberedUtterances, path: str) -> Ints:
    """Return a number for the category of each row.

    The file has an utterance and its category on each line.
    """
    table = read_table(path)
    rows = found.rows(table.keys, np.arange(len(table)), f"category file {path!r}")
    codes = np.full(found.count, -1)
    codes[rows] = codes_of([table.value(line) for line in range(len(table))], len(rows), path)
    if codes.min() < 0:
        row = int(codes.argmin())
        name = repr(found.ids[row]) if isinstance(found.ids, PackedStrings) else f"row {row}"
        raise ConfigError(
            f"category file {path!r} has no category for {np.count_nonzero(codes < 0)} utterances, "
            f"such as {name}"
        )
    return codes
