"""WebDataset shards of `.npy` members: a tar file, several, or a folder of them.

Each field `<name>.npy` is a feature. Fields of text, of a number and of JSON are annotations: of
`transcript.txt` the name is transcript, of a bare `txt` text, of a bare `cls` cls; of JSON each
value has its own. All other fields are passed over.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from featcache.adoptable import CONVERT, Found, FoundFeature, Options, Place, one_piece, stored_as
from featcache.adoption.npy_files import read_npy_header
from featcache.adoption.place import GatheredValues, Window
from featcache.adoption.webdataset.samples import annotation_of, id_of, samples
from featcache.adoption.webdataset.tar_walk import TarMember
from featcache.errors import AdoptionError

LOOK_AT = 100  # files of a folder
NPY = "npy"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")  # of a feature


class WebDatasetKind:
    """Tar shards of arrays."""

    name = "webdataset"

    def recognises(self, place: Place, what: str) -> bool:
        """Whether these are tar files; a folder of lhotse's Shar has cuts beside them."""
        if what:
            return what.endswith(".tar")
        try:
            names = [path.rpartition("/")[2] for path in islice(place.files(), LOOK_AT)]
        except AdoptionError:
            return False
        return any(name.endswith(".tar") for name in names) and not any(
            name.startswith("cuts.") for name in names
        )

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Go through the headers of all shards."""
        shards = [what] if what else [path for path in place.files() if path.endswith(".tar")]
        if not shards:
            raise AdoptionError(f"there is no .tar file in {place.name!r}")
        found = _Shards(options.feature)
        for number, path in enumerate(shards):
            with place.open(path) as source:
                found.add(number, Window(source))
        return found.found(shards, options)


KIND = WebDatasetKind()


@dataclass
class _Arrays:
    """Arrays of a field, by sample."""

    sample: array[int] = field(default_factory=lambda: array("q"))
    container: array[int] = field(default_factory=lambda: array("i"))
    offset: array[int] = field(default_factory=lambda: array("q"))
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)


class _Shards:
    def __init__(self, feature: str) -> None:
        self._feature = feature  # of fields without a name
        self._ids: list[str] = []
        self._arrays: dict[str, _Arrays] = {}
        self._annotations = GatheredValues()
        self._others: set[str] = set()  # fields passed over, for a message

    def add(self, shard: int, file: Window) -> None:
        for key, fields in samples(file):
            number = len(self._ids)
            values: dict[str, object] = {}
            seen = set()
            for name, member in fields:
                if name in seen:
                    raise AdoptionError(
                        f"sample {key!r} of {file.path!r} has two fields {name!r}; {CONVERT}"
                    )
                seen.add(name)
                if name.rpartition(".")[2] == NPY:
                    self._add_array(shard, number, key, name, member, file)
                else:
                    values = annotation_of(name, member, file, key) | values
            self._ids.append(id_of(key, values.get("id")))
            self._annotations.add(number, values)
            self._others |= seen

    def _add_array(
        self, shard: int, number: int, key: str, name: str, member: TarMember, file: Window
    ) -> None:
        feature = name.rpartition(".")[0] or self._feature
        where = f"member {member.name!r} of {file.path!r}"
        if not member.is_plain:
            raise AdoptionError(f"{where} is a link, or sparse; {CONVERT}")
        if not NAME.fullmatch(feature):
            raise AdoptionError(
                f"{where}: webdataset cuts a name at its first dot, so this is the field {name!r} "
                f"of the sample {key!r}, and no feature has such a name; {CONVERT}"
            )
        header = read_npy_header(file.read, member.offset, member.nbytes, where)
        arrays = self._arrays.setdefault(feature, _Arrays())
        arrays.sample.append(number)
        arrays.container.append(shard)
        arrays.offset.append(member.offset + header.offset)
        arrays.shapes.append(header.shape)
        arrays.dtypes.append(header.dtype)

    def found(self, shards: list[str], options: Options) -> Found:
        if not self._arrays:
            raise AdoptionError(
                f"the shards {', '.join(map(repr, shards[:3]))} hold no '.npy' members, but the "
                f"fields {', '.join(map(repr, sorted(self._others)[:9])) or 'of no sample'}; "
                f"{CONVERT}"
            )
        features = {name: self._found_feature(name, options) for name in sorted(self._arrays)}
        annotations = self._annotations.columns(len(self._ids), without=features)
        return Found(shards, self._ids, features, annotations)

    def _found_feature(self, name: str, options: Options) -> FoundFeature:
        arrays = self._arrays[name]
        lacks = np.setdiff1d(np.arange(len(self._ids)), np.frombuffer(arrays.sample, np.int64))
        if len(lacks):
            raise AdoptionError(
                f"sample {self._ids[int(lacks[0])]!r} has no field '{name}.npy', which "
                f"{len(arrays.sample):,} of {len(self._ids):,} have; {CONVERT}"
            )
        stored = stored_as(name, self._ids, arrays.shapes, arrays.dtypes, options.time_axis)
        return one_piece(stored, arrays.container, arrays.offset)
