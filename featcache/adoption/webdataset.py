"""WebDataset shards of `.npy` members: a tar file, several, or a folder of them.

The key of a sample is the name up to the first dot of its last step, the field what is behind, in
lower case: `spk.a/utt1.fbank.npy` is the field `fbank.npy` of `spk.a/utt1`. Members of a sample
stand side by side. Names without a dot, or such as `__meta__/...`, are no samples.

Each field `<name>.npy` is a feature. Fields of text, of a number and of JSON are annotations: of
`transcript.txt` the name is transcript, of a bare `txt` text, of a bare `cls` cls; of JSON each
value has its own. A field `<name>.npz` or `.pth` of one array is the feature `<name>` of a copy;
each array of several is a feature called as the array is. All other fields are passed over.

On disk, each member is a header of 512 bytes, then its bytes, then zeros up to a multiple of 512.
Before its header may stand headers of type `x` (PAX records of the name, the size, the times, as
webdataset's own writer makes them) or `L` (GNU: a long name), each with its bytes. Two blocks of
zeros end the file.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import NamedTuple
from urllib.parse import unquote

from featcache.adoptable import CONVERT, COPY, Found, Options, Place, Readable, frames_first
from featcache.adoptable.names import EACH
from featcache.adoptable.placed_arrays import ArrayColumns
from featcache.adoption.libraries.named_arrays import UNNAMED, Arranged, ArrayInfo, Content
from featcache.adoption.libraries.payloads import LOAD_IT, payload
from featcache.adoption.npy_files import read_npy_header
from featcache.adoption.place import GatheredValues, Window
from featcache.errors import AdoptionError
from featcache.interface import Array

# The members of a tar file: names and where their bytes lie, told by the headers alone.

BLOCK_BYTES = 512
MOST_RECORD_BYTES = 1 << 20
ZEROS = bytes(BLOCK_BYTES)
FILES = b"0\0" + b"7"  # types of an ordinary file
LINKS, SPARSE = b"12", b"S"


class TarMember(NamedTuple):
    """A member that is a file, or a link to one."""

    name: str
    offset: int  # of its first byte in the tar
    nbytes: int
    is_plain: bool  # False: a link, or its bytes are not side by side


def members(file: Window) -> Iterator[TarMember]:
    """Go through the members of a tar file; directories and the like are left out.

    Raises `AdoptionError` where the tar file is damaged, or has no end.
    """
    at = 0
    said: dict[str, bytes] = {}  # of the next member, by the headers before it
    while True:
        block = _block(file, at)
        if block == ZEROS:
            return
        kind = block[156:157]
        size = int(said["size"]) if "size" in said and kind not in b"xL" else _size(block, file, at)
        begin = at + BLOCK_BYTES
        at = begin + size + -size % BLOCK_BYTES
        if begin + size > file.size:
            raise _damaged(file, begin - BLOCK_BYTES, f"a member of {size:,} bytes is cut short")
        if kind in (b"x", b"L"):
            record = _record(file, begin, size)
            said |= _pax(record, file, begin) if kind == b"x" else {"path": record.rstrip(b"\0")}
        elif kind in FILES or kind in LINKS + SPARSE:
            name = said.get("path") or _name(block)
            is_plain = kind in FILES and not any(key.startswith("GNU.sparse") for key in said)
            yield TarMember(name.decode("utf-8", "replace"), begin, size, is_plain)
            said = {}
        elif kind not in (b"g", b"K"):
            said = {}


def _block(file: Window, at: int) -> bytes:
    if at + BLOCK_BYTES > file.size:
        raise _damaged(file, at, "it has no end: it is cut short, or still being written")
    block = file.read(at, BLOCK_BYTES)
    if block == ZEROS:
        return block
    try:
        stored = int(block[148:156].strip(b"\0 "), 8)
    except ValueError:
        stored = -1
    # POSIX.1-1988: the sum of all bytes, where those of the sum count as spaces
    if stored != sum(block) - sum(block[148:156]) + 8 * 0x20:
        raise _damaged(file, at, "there is no header of a member")
    return block


def _size(block: bytes, file: Window, at: int) -> int:
    field = block[124:136]
    try:
        if field[0] == 0x80:  # GNU: base 256, for what octal digits do not hold
            return int.from_bytes(field[1:], "big")
        size = int(field.strip(b"\0 ") or b"0", 8)
        if size < 0:
            raise ValueError
    except ValueError:
        raise _damaged(file, at, "the size of a member is no number") from None
    return size


def _name(block: bytes) -> bytes:
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0":  # GNU's own headers have other things there
        prefix = block[345:500].partition(b"\0")[0]
        return prefix + b"/" + name if prefix else name
    return name


def _record(file: Window, begin: int, size: int) -> bytes:
    if size > MOST_RECORD_BYTES:
        raise _damaged(file, begin, f"a header has {size:,} bytes")
    return file.read(begin, size)


def _pax(record: bytes, file: Window, at: int) -> dict[str, bytes]:
    """Return PAX records: `<length> <key>=<value>\\n`, where the length counts all of that."""
    found: dict[str, bytes] = {}
    begin = 0
    while begin < len(record):
        length = record[begin : begin + 20].partition(b" ")[0]
        if not length.isdigit() or not 0 < int(length) <= len(record) - begin:
            raise _damaged(file, at, "a PAX header is damaged")
        end = begin + int(length)
        key, _, value = record[begin + len(length) + 1 : end - 1].partition(b"=")
        found[key.decode("utf-8", "replace")] = value
        begin = end
    if not found.get("size", b"0").isdigit() or len(found.get("size", b"")) > 18:
        raise _damaged(file, at, "a PAX header is damaged")
    return found


def _damaged(file: Window, at: int, what: str) -> AdoptionError:
    return AdoptionError(f"tar {file.path!r}, byte {at}: {what}")


# Samples of a shard: members side by side, by key and field, as webdataset cuts names.

KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
NO_SAMPLE = re.compile(r"__[^/]*__(?:$|/)")
MOST_BYTES = 1 << 22  # of a field that is read
TEXT = frozenset({"txt", "text", "transcript"})  # as webdataset decodes fields by default
NUMBER = frozenset({"cls", "cls2", "class", "count", "index", "inx"})


def samples(file: Window) -> Iterator[tuple[str, list[tuple[str, TarMember]]]]:
    """Go through the samples of a shard: the key, and field and member of each."""
    key = ""
    fields: list[tuple[str, TarMember]] = []
    for member in members(file):
        match = KEY.fullmatch(member.name)
        if match is None or NO_SAMPLE.match(member.name):
            continue
        if match[1] != key and fields:
            yield key, fields
            fields = []
        key = match[1]
        fields.append((match[2].lower(), member))
    if fields:
        yield key, fields


def annotation_of(field: str, member: TarMember, file: Window, key: str) -> dict[str, object]:
    """Return the values of a member of text, a number or JSON; none of any other."""
    stem, _, suffix = field.rpartition(".")
    if not member.is_plain or suffix not in TEXT | NUMBER | {"json", "jsn"}:
        return {}
    if member.nbytes > MOST_BYTES:
        raise AdoptionError(
            f"sample {key!r} of {file.path!r}: its field {field!r} has {member.nbytes:,} bytes, "
            f"which is more than an annotation may have; {CONVERT}"
        )
    data = file.read(member.offset, member.nbytes)
    try:
        if suffix in TEXT:
            return {stem or "text": data.decode()}
        if suffix in NUMBER:
            return {stem or suffix: int(data)}
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdoptionError(
            f"sample {key!r} of {file.path!r}: its field {field!r} cannot be read: {error}"
        ) from None
    return found if isinstance(found, dict) else {}


def id_of(key: str, said: object) -> str:
    """Return the id of a sample: its key, or what its JSON calls its id if that is the key encoded.

    featcache's own shards have percent-encoded keys, and the id beside them.

    >>> id_of("a%2Eb", "a.b"), id_of("a%2Eb", "utt-7")
    ('a.b', 'a%2Eb')
    """
    return said if isinstance(said, str) and said and unquote(key) == said else key


# Members of shards that NumPy or torch loads, `.npz` and `.pth`, for a copy.

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

    def read(number: int) -> dict[str, Array]:
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
