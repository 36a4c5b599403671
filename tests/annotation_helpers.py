"""What the tests of annotations share: values of utterances, and the comparison of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from store_helpers import FINGERPRINT, arrays_of, id_of, two_features

import featcache
from featcache import CacheWriter
from featcache.writing.part_writer import PartWriter

Values = dict[str, Any]
KINDS = {
    "text": "str",
    "speaker": "str",
    "channel": "int",
    "duration": "float",
    "clean": "bool",
    "units_of": "ints",
    "peaks": "floats",
}


def annotations_of(number: int) -> Values:
    """One value of each kind; some are missing, empty, or as large as they can be."""
    return {
        "text": "" if number % 11 == 0 else f"utterance {number}, größer: 数 \0 end",
        "speaker": f"spk{number % 5}",
        "channel": None if number % 4 == 3 else (-1) ** number * (2**63 - 1 - number),
        "duration": number if number % 3 == 0 else number + 0.1,
        "clean": None if number % 6 == 0 else number % 2 == 0,
        "units_of": None if number % 7 == 2 else list(range(-number, number % 3)),
        "peaks": [number / 7, -1.5e300, 5e-324] if number % 2 else [],
    }


def open_writer(path: Path, **settings: Any) -> CacheWriter:
    return CacheWriter(path, two_features(), FINGERPRINT, **settings)


def write(writer: CacheWriter | PartWriter, numbers: Iterable[int]) -> None:
    """Write utterances with their annotations."""
    for number in numbers:
        writer.write(id_of(number), arrays_of(number), annotations=annotations_of(number))


def make_annotated(path: Path, numbers: Iterable[int], **settings: Any) -> Path:
    """Write a complete cache of annotated utterances."""
    with open_writer(path, **settings) as writer:
        write(writer, numbers)
    return path


def found_in(path: Path, **settings: Any) -> dict[str, Values]:
    """What a cache says of each id, without what is missing; all its checksums are verified."""
    cache = featcache.open(path, verify="arrays", **settings)
    columns = {name: list(cache.annotation(name)) for name in cache.annotations}
    return {
        id: {name: values[row] for name, values in columns.items() if values[row] is not None}
        for row, id in enumerate(cache)
    }


def expected(numbers: Iterable[int], **more: Values) -> dict[str, Values]:
    """What `found_in` gives for utterances that were written, `more` by id."""
    found = {id_of(number): annotations_of(number) for number in numbers}
    return without_none({id: values | more.pop(id, {}) for id, values in found.items()} | more)


def without_none(values: Mapping[str, Values]) -> dict[str, Values]:
    return {
        id: {name: each for name, each in of.items() if each is not None}
        for id, of in values.items()
    }
