"""Tables of numbers in columns, a row a frame or a row an utterance: the line that loads one.

Which column is which is told by its name, and else by what it holds; the message says all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from featcache.adoption.libraries.loads import IDS, Loads

TEXT, WHOLE, REAL = "text", "whole", "real"  # what a column holds
# names, in small letters and without signs, of the column that frames are in the order of
_ORDER = frozenset(
    ("frame", "frames", "frameid", "frameidx", "frameindex", "framenumber", "framenum", "frameno",
     "frametime", "t", "time", "times", "timestamp", "timestep", "step", "start", "starts",
     "startsec", "begin", "onset", "index", "idx", "pos", "position", "seconds", "sec", "ms"),
)  # fmt: skip
# of others that are no numbers of a frame
_BESIDE = frozenset(
    ("end", "ends", "endsec", "stop", "duration", "dur", "length", "nframes", "offset", "channel",
     "channels", "numsamples", "nsamples", "samplerate", "sr", "label", "labels", "class", "fold",
     "spkid", "speakerid"),
)  # fmt: skip
_OF_FILES = ("utterance", "file", "filename", "file_name", "path", "audio", "wav", "segment")


class NumberColumns(NamedTuple):
    """Columns of a table by what they are."""

    id: str | None
    order: str | None
    numbers: Sequence[str]
    left: Sequence[str]  # out


def columns_of(kinds: Mapping[str, str]) -> NumberColumns | None:
    """Return which columns are which, by what each holds; None where few have numbers.

    >>> columns_of({"utt": "text", "frame": "whole", "c0": "real", "c1": "real", "spk": "whole"})
    NumberColumns(id='utt', order='frame', numbers=['c0', 'c1'], left=['spk'])
    """
    by_name = {name.lower(): name for name in kinds}
    known = [by_name[name.lower()] for name in (*IDS, *_OF_FILES) if name.lower() in by_name]
    id = next(iter([*known, *(name for name, kind in kinds.items() if kind == TEXT)]), None)
    plain = {name: "".join(filter(str.isalnum, name.lower())) for name in kinds if name != id}
    order = next((name for name, each in plain.items() if each in _ORDER), None)
    others = [name for name, each in plain.items() if each not in _ORDER | _BESIDE]
    numbers = [name for name in others if kinds[name] == REAL]
    numbers = numbers or [name for name in others if kinds[name] == WHOLE]
    left = [name for name in plain if name not in (order, *numbers)]
    if not numbers or len(left) > len(numbers):  # a table of other things, with some numbers
        return None
    return NumberColumns(id, order, numbers, left)


def loads_of_rows(
    kinds: Mapping[str, str],
    table: Callable[[str | None], str],
    repeats: Callable[[str], bool],
    dtype: str = "",
) -> Loads | None:
    """Return what loads a table; None where few columns have numbers.

    Args:
        kinds: of the columns, by name.
        table: returns an expression for it as a data frame of pandas, by the column of ids.
        repeats: whether a column has a value twice.
        dtype: of reals; "": that of the table.
    """
    found = columns_of(kinds)
    if found is None:
        return None
    frame = table(found.id)
    dtype = repr(dtype) if dtype and kinds[found.numbers[0]] == REAL else ""
    numbers = f"{_numbers(found.numbers, [*kinds])}.to_numpy({dtype})"
    without = f"; without {', '.join(map(repr, found.left))}" if found.left else ""
    if found.id is not None and not repeats(found.id):
        rows = f"zip(t[{found.id!r}], t{numbers})"
        load = f"{{k: v for t in [{frame}.reset_index()] for k, v in {rows}}}"
        return Loads(f"a row is an utterance, called by {found.id!r}{without}", load)
    why = "a row is a frame"
    if found.order is not None:
        why += f", in the order of {found.order!r}"
        frame += f".sort_values({found.order!r}, kind='stable')"
    if found.id is None:
        return Loads(f"{why}{without}", "", f"{frame}{numbers}")
    groups = f"{frame}.groupby({found.id!r}, sort=False, dropna=False)"
    load = f"{{k: g{numbers} for k, g in {groups}}}"
    return Loads(f"{why}, of the utterance {found.id!r}{without}", load)


def _numbers(names: Sequence[str], columns: Sequence[str]) -> str:
    """Return an expression for some columns of a data frame, as the end of one."""
    first = columns.index(names[0])
    if len(names) == 1:
        return f"[{names[0]!r}]"
    if list(names) == list(columns[first : first + len(names)]):
        return f".loc[:, {names[0]!r}:{names[-1]!r}]"
    return f"[{list(names)!r}]"
