"""WebDataset shards of `.npy` members: a tar file, several, or a folder of them.

The key of a sample is the name up to the first dot of its last step, the field what is behind, in
lower case: `spk.a/utt1.fbank.npy` is the field `fbank.npy` of `spk.a/utt1`. Members of a sample
stand side by side. Names without a dot, or such as `__meta__/...`, are no samples.

Each field `<name>.npy` is a feature. Fields of text, of a number and of JSON are annotations: of
`transcript.txt` the name is transcript, of a bare `txt` text, of a bare `cls` cls; of JSON each
value has its own. All other fields are passed over.
"""

from __future__ import annotations

import logging
import re
from contextlib import AbstractContextManager
from itertools import islice

from featcache.adoptable import CONVERT, COPY, Found, Options, Place, Readable
from featcache.adoptable.placed_arrays import ArrayColumns
from featcache.adoption.npy_files import read_npy_header
from featcache.adoption.place import GatheredValues, Window
from featcache.adoption.webdataset.loaded_members import PICKLES, SUFFIXES, loaded_members
from featcache.adoption.webdataset.samples import annotation_of, id_of, samples
from featcache.adoption.webdataset.tar_walk import TarMember
from featcache.errors import AdoptionError

# The kind of store.

LOOK_AT = 100  # files of a folder
NPY = "npy"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")  # of a feature


_log = logging.getLogger("featcache")


class WebDatasetKind:
    """Tar shards of arrays."""

    name = "webdataset"

    def recognises(self, place: Place, what: str) -> bool:
        """Whether these are tar files; a folder of lhotse's Shar has cuts beside them."""
        if what:
            return what.endswith(".tar")
        names = [path.rpartition("/")[2] for path in islice(place.files(), LOOK_AT)]
        return any(name.endswith(".tar") for name in names) and not any(
            name.startswith("cuts.") for name in names
        )

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Go through the headers of all shards."""
        shards = _shards(place, what)
        found = _Shards(options)
        for number, path in enumerate(shards):
            with place.open(path) as source:
                found.add(number, Window(source))
        return found.found(shards)

    def readable(
        self, place: Place, what: str, options: Options
    ) -> AbstractContextManager[Readable]:
        """Read members of NumPy and torch, such as `.npz` and `.pth`, by these."""
        return loaded_members(place, _shards(place, what), options)


KIND = WebDatasetKind()


def _shards(place: Place, what: str) -> list[str]:
    shards = [what] if what else [path for path in place.files() if path.endswith(".tar")]
    if not shards:
        raise AdoptionError(f"there is no .tar file in {place.name!r}")
    return shards


class _Shards:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._ids: list[str] = []
        self._arrays: dict[str, ArrayColumns] = {}
        self._annotations = GatheredValues()
        self._others: set[str] = set()  # fields passed over, for a message

    def add(self, shard: int, file: Window) -> None:
        for key, fields in samples(file):
            values: dict[str, object] = {}
            arrays: dict[str, TarMember] = {}
            seen = set()
            for name, member in fields:
                if name in seen:
                    raise AdoptionError(
                        f"sample {key!r} of {file.path!r} has two fields {name!r}; {CONVERT}"
                    )
                seen.add(name)
                if name.rpartition(".")[2] == NPY:
                    arrays[name] = member
                else:
                    values = annotation_of(name, member, file, key) | values
            id = id_of(key, values.get("id"))
            for name, member in arrays.items():
                self._add_array(shard, id, key, name, member, file)
            self._annotations.add(len(self._ids), values)
            self._ids.append(id)
            self._others |= seen

    def _add_array(
        self, shard: int, id: str, key: str, name: str, member: TarMember, file: Window
    ) -> None:
        feature = name.rpartition(".")[0] or self._options.feature
        where = f"member {member.name!r} of {file.path!r}"
        if not member.is_plain:
            raise AdoptionError(f"{where} is a link, or sparse; {CONVERT}")
        if not NAME.fullmatch(feature):
            raise AdoptionError(
                f"{where}: webdataset cuts a name at its first dot, so this is the field {name!r} "
                f"of the sample {key!r}, and no feature has such a name; {CONVERT}"
            )
        header = read_npy_header(file.read, member.offset, member.nbytes, where)
        columns = ArrayColumns(feature, self._options.time_axis, CONVERT)
        self._arrays.setdefault(feature, columns).add(id, shard, header.placed(member.offset))

    def _loadable(self) -> set[str]:
        return {name for name in self._others if name.rpartition(".")[2] in SUFFIXES - {NPY}}

    def found(self, shards: list[str]) -> Found:
        if not self._arrays:
            raise AdoptionError(
                f"the shards {', '.join(map(repr, shards[:3]))} hold no '.npy' members, but the "
                f"fields {', '.join(map(repr, sorted(self._others)[:9])) or 'of no sample'}; "
                f"{COPY if self._loadable() else CONVERT}"
            )
        if self._loadable():
            fields = ", ".join(map(repr, sorted(self._loadable())[:9]))
            raise AdoptionError(
                f"{', '.join(map(repr, shards[:3]))}: beside '.npy' members there are the fields "
                f"{fields}, which libraries read; {COPY}"
            )
        if pickles := {name for name in self._others if name.rpartition(".")[2] in PICKLES}:
            _log.warning(
                "%s: the fields %s are left out: pickles are never run",
                ", ".join(shards[:3]), ", ".join(sorted(pickles)),
            )  # fmt: skip
        features = {
            name: each.found(self._ids, files=shards) for name, each in sorted(self._arrays.items())
        }
        annotations = self._annotations.columns(len(self._ids), without=features)
        return Found(shards, self._ids, features, annotations)
