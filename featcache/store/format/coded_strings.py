"""Strings of which few differ: a number each, and every text once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.interface import Bytes
from featcache.store.format.id_order import take
from featcache.store.format.strings import Strings, joined_ends

FEW = 4  # text becomes codes where each of its values is in so many rows, on average
TRIED = 65536  # rows of text that are compared with all others to see whether they are few


@dataclass(frozen=True, slots=True)
class Codes:
    """Text r is `texts[codes[r]]`; no text is there twice."""

    codes: NDArray[np.int32]
    texts: Strings

    def __len__(self) -> int:
        return len(self.codes)


def joined_texts(bodies: Sequence[Strings | Codes]) -> Strings | Codes:
    """Join text: as codes where most of it is, and the rest is not too much to be compared."""
    count = sum(map(len, bodies))
    plain = sum(len(each) for each in bodies if isinstance(each, Strings))
    if plain > max(count // 2, TRIED):
        texts = [each if isinstance(each, Strings) else spelled(each) for each in bodies]
        data = np.concatenate([np.empty(0, np.uint8), *(each.data for each in texts)])
        return Strings(joined_ends(each.ends for each in texts), data)
    numbers: dict[str, int] = {}
    codes = [np.empty(0, np.int32)]
    for each in bodies:
        texts_of = each.texts if isinstance(each, Codes) else each
        new = [numbers.setdefault(text, len(numbers)) for text in texts_of]
        into = np.array(new, np.int32)
        codes.append(into[each.codes] if isinstance(each, Codes) and len(into) else into)
    together = Codes(np.concatenate(codes), Strings.of(list(numbers)))
    return together if len(numbers) * FEW <= count else spelled(together)


def few(texts: Sequence[str]) -> Strings | Codes:
    """Pack text, as codes where its values are few."""
    numbers: dict[str, int] = {}
    for start in range(0, len(texts), TRIED):
        numbers |= dict.fromkeys(texts[start : start + TRIED], 0)
        if len(numbers) * FEW > len(texts):
            return Strings.of(texts)
    different = list(numbers)
    numbers = dict(zip(different, range(len(different)), strict=True))
    codes = np.fromiter(map(numbers.__getitem__, texts), np.int32, len(texts))
    return Codes(codes, Strings.of(different)) if different else Strings.of(texts)


def used(body: Codes, null: Bytes | None) -> Codes:
    """Leave out texts that no row has: those of deleted rows must not stay."""
    counts = np.bincount(body.codes if null is None else body.codes[null == 0], minlength=1)
    used = np.flatnonzero(counts)
    if len(used) == len(body.texts):
        return body
    numbers = np.zeros(len(body.texts), np.int32)
    numbers[used] = np.arange(len(used), dtype=np.int32)
    data, ends = take(body.texts.data, body.texts.ends, used)
    codes = numbers[body.codes]
    if null is not None:
        codes[null != 0] = 0
    return Codes(codes, Strings(ends, data))


def spelled(codes: Codes) -> Strings:
    """Turn codes into text again."""
    data, ends = take(codes.texts.data, codes.texts.ends, codes.codes.astype(np.int64))
    return Strings(ends, data)
