"""Members of shards that NumPy or torch loads, `.npz` and `.pth`, for a copy.

A field `<name>.npz` or `.pth` of one array is the feature `<name>`; each array of several is a
feature called as the array is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from numpy.typing import NDArray

from featcache.adoptable import Options, Place, Readable, frames_first
from featcache.adoptable.names import EACH
from featcache.adoption.libraries.named_arrays import UNNAMED, Arranged, ArrayInfo, Content
from featcache.adoption.libraries.payloads import LOAD_IT, payload
from featcache.adoption.place import Window
from featcache.adoption.webdataset.samples import annotation_of, id_of, samples
from featcache.adoption.webdataset.tar_walk import TarMember
from featcache.errors import AdoptionError

SUFFIXES = frozenset({"npy", "npz", "pth", "pt", "ten"})
PICKLES = frozenset({"pyd", "pkl", "pickle"})


class _Array(NamedTuple):
    shard: int
    member: TarMember
    key: str  # within the member


@contextmanager
def loaded_members(place: Place, shards: Sequence[str], options: Options) -> Iterator[Readable]:
    """Open the arrays of shards; raises `AdoptionError` for members that hold none."""
    contents: list[Content] = []
    found: list[dict[str, _Array]] = []
    for number, path in enumerate(shards):
        with place.open(path) as source:
            file = Window(source)
            for key, fields in samples(file):
                arrays, infos, values = _sample(number, file, key, fields, options)
                found.append(arrays)
                contents.append(Content(id_of(key, values.get("id")), path, infos, values))
    named = Options(options.feature, EACH, options.time_axis)
    arranged = Arranged.of(place.name, contents, named, one=False)

    def read(number: int) -> dict[str, NDArray[Any]]:
        taken = {}
        for name, places in arranged.features.items():
            shard, member, key = found[places[number].file][places[number].key]
            with place.open(shards[shard]) as source:
                data = source.read(member.offset, member.nbytes)
            held = payload(data, _where(member, shards[shard]))
            array = held.read(key)
            held.close()
            taken[name] = array.transpose(frames_first(array.shape, options.time_axis))
        return taken

    yield Readable(shards, arranged.ids, arranged.stored(options), read, arranged.annotations)


def _sample(
    shard: int,
    file: Window,
    key: str,
    fields: Sequence[tuple[str, TarMember]],
    options: Options,
) -> tuple[dict[str, _Array], dict[str, ArrayInfo], dict[str, object]]:
    """Return the arrays of a sample, what they are like, and its other values."""
    arrays: dict[str, _Array] = {}
    infos: dict[str, ArrayInfo] = {}
    values: dict[str, object] = {}
    for field, member in fields:
        stem, _, suffix = field.rpartition(".")
        where = _where(member, file.path)
        if suffix in PICKLES:
            raise AdoptionError(f"{where} is a pickle, which may run code; {LOAD_IT}")
        if suffix not in SUFFIXES:
            values = annotation_of(field, member, file, key) | values
            continue
        if not member.is_plain:
            raise AdoptionError(f"{where} is a link, or sparse; {LOAD_IT}")
        held = payload(file.read(member.offset, member.nbytes), where)
        inside = held.arrays()
        for each, info in inside.items():
            unnamed = options.feature if each in UNNAMED else each
            name = stem if stem and len(inside) == 1 else unnamed
            if name in arrays:
                raise AdoptionError(f"{where}: sample {key!r} has feature {name!r} twice")
            arrays[name], infos[name] = _Array(shard, member, each), info
        held.close()
    return arrays, infos, values


def _where(member: TarMember, path: str) -> str:
    return f"member {member.name!r} of {path!r}"
