"""Arrays in memory, or loaded when they are asked for: a mapping of ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from featcache.adoptable import Options, Readable, frames_first
from featcache.adoptable.names import EACH
from featcache.adoption.libraries.named_arrays import Arranged, Content
from featcache.adoption.libraries.payloads import LoadedArrays
from featcache.errors import AdoptionError
from featcache.format.files import as_id

MAPPING = "mapping"
Arrays = Mapping[str, object]  # of an id: an array or a tensor, or such by feature


def arrays_in_memory(arrays: Arrays, options: Options) -> Readable:
    """Return the arrays of a mapping by id, or by id and feature; a pattern says it otherwise.

    Each value is looked up once for its shape, and again when it is stored.
    """
    if not arrays:
        raise AdoptionError("the mapping holds no utterance")
    keys = [*arrays]
    contents = []
    for key in keys:
        if not isinstance(id := as_id(key), str):
            raise AdoptionError(f"the mapping has key {key!r}; ids are text")
        held = LoadedArrays(arrays[key], _where(key))
        contents.append(Content(id, id, held.arrays(), held.values()))
    named = replace(options, pattern=options.pattern or EACH)
    arranged = Arranged.of("the mapping", contents, named, one=False)

    def read(number: int) -> dict[str, NDArray[Any]]:
        found = {}
        for name, places in arranged.features.items():
            each = places[number]
            key = keys[each.file]
            array = LoadedArrays(arrays[key], _where(key)).read(each.key)
            found[name] = array.transpose(frames_first(array.shape, options.time_axis))
        return found

    return Readable([], arranged.ids, arranged.stored(options), read, arranged.annotations)


def _where(key: object) -> str:
    return f"the mapping's {key!r}"
