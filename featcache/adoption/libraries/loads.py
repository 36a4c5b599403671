"""Ways to load what featcache does not read, by first bytes and names: expressions of Python.

Here are binary files and folders of other libraries; `refused` has texts, and makes the lines.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import sqlite3
import struct
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from featcache.adoption.libraries.lmdb_store import DATA, values_of

RUNS_CODE = "pickles may run code when they are loaded"
LISTS = "lists of numbers have no dtype"
ONE_ARRAY = "one array is no data set"
WAVEFORMS = "these are waveforms; featcache.extract computes features of them"
IDS = ("id", "ID", "utt_id", "utt", "key", "name", "audio_id", "utterance_id", "uttid", "__key__")
MOST_BYTES = 1 << 20  # that are looked at
SOUND = (
    *(".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".sph", ".aiff", ".aif", ".au"),
    *(".webm", ".mp4", ".ecdc"),
)
WAVES = (b"RIFF", b"RIFX", b"fLaC", b"OggS", b"NIST")
_PICKLE = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "MARK")  # opcodes without values


# what readers raise for bytes that no writer wrote
BROKEN = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(RuntimeError, MemoryError, SyntaxError, tokenize.TokenError, struct.error, zlib.error),
    *(zipfile.BadZipFile, tarfile.TarError),
)


class Loads(NamedTuple):
    """Expressions that load a file: `<path>`, `<bytes>` and `<lines>` stand for it."""

    why: str  # featcache does not read it
    whole: str = ""  # gives a mapping of ids; "": the file is one utterance
    each: str = ""  # gives the array of an utterance, or its features; "": it has no such file


def numbered(rows: str, row: str = "a") -> str:
    """Return an expression for a mapping of rows that have no ids."""
    return f"{{f'{{n:08d}}': {row} for n, a in enumerate({rows})}}"


def named(columns: Sequence[str], rows: str, load: str = "COLUMN") -> str:
    """Return an expression for a mapping of rows that are mappings themselves.

    Args:
        columns: of arrays, and maybe of ids.
        rows: gives them, each called `a`.
        load: the array of a column, which is called COLUMN.
    """
    id = next((name for name in IDS if name in columns), None)
    arrays = [name for name in columns if name != id]
    if id is None:
        key, rows = "f'{n:08d}'", f"n, a in enumerate({rows})"
    else:
        key, rows = f"a[{id!r}]", f"a in {rows}"
    loads = [load.replace("COLUMN", f"a[{name!r}]") for name in arrays]
    pairs = (f"{name!r}: {each}" for name, each in zip(arrays, loads, strict=True))
    value = loads[0] if len(arrays) == 1 else f"{{{', '.join(pairs)}}}"
    return f"{{{key}: {value} for {rows}}}"


def loads_of_folder(folder: Path) -> Loads | None:
    """Return what loads a folder that is one store of a library."""
    described = _json_at(folder / "index.json")
    if shards := described.get("shards"):
        return _of_mds(shards)
    if "chunks" in described and "config" in described:
        return _of_litdata(described["config"])
    for name in ("zarr.json", ".zarray"):
        array = _json_at(folder / name)
        if isinstance(array.get("shape"), list):
            return _of_zarr(len(array["shape"]))
    if any((each / name).exists() for each in folder.glob("*.zarr") for name in _OF_ZARR):
        load = "zarr.open_array(p, mode='r')[...]"
        whole = f"{{p.stem: {load} for p in pathlib.Path(<path>).glob('*.zarr')}}"
        return Loads("groups of Zarr are read, and no folders of arrays", whole)
    return _of_lmdb(folder) if (folder / DATA).exists() else None


def _of_lmdb(path: Path) -> Loads | None:
    """Return what loads LMDB, as the first value tells."""
    with values_of(path / DATA if path.is_dir() else path) as values:
        others = [key for key in _ABOUT_LMDB if values.has(key)]
        pairs = islice(values.items(), 16)
        keys = (value for _, key, value in pairs if key[:2] != b"__" and key not in others)
        data = next(keys, None)
    if data is None or data[:6] == b"\x93NUMPY" or _is_npz(data) or _is_plain_torch(data):
        return None
    rows = f"lmdb.open(<path>, readonly=True, lock=False, subdir={path.is_dir()}).begin().cursor()"
    which = f"k[:2] != b'__'{f' and k not in {others}' if others else ''}"
    load = f"{{k.decode(): {of_bytes(data, 'v')} for k, v in {rows} if {which}}}"
    return Loads("its values are no arrays of numpy.save", load)


_ABOUT_LMDB = (b"keys", b"len", b"length", b"num_samples", b"num-samples")  # keys of no array
_TAR_FIELDS = ("npy.gz", "json", "mp", "msg", "pyd", "pickle", "pkl", "ten", "tb")


def _of_tar(path: Path) -> Loads | None:
    """Return what loads members of WebDataset that webdataset decodes."""
    fields: dict[str, bool] = {}
    sounds = False
    with suppress(*BROKEN), tarfile.open(path, "r:") as file:
        for member in islice(file, _MEMBERS):
            field = member.name.rpartition("/")[2].partition(".")[2]
            sounds |= member.name.lower().endswith(SOUND)
            if member.isfile() and field.endswith(_TAR_FIELDS):
                read = file.extractfile(member)
                front = read.read(16) if read else b""
                fields[field] = not field.endswith("json") or front.lstrip()[:1] == b"["
    columns = [field for field, is_array in fields.items() if is_array]
    if not columns:
        return Loads(WAVEFORMS) if sounds else None
    rows = "webdataset.WebDataset([str(<path>)], shardshuffle=False).decode()"
    whole = named(["__key__", *columns], rows, "numpy.array(COLUMN)")
    for field in columns:
        if field.endswith(("ten", "tb")):  # a list of arrays
            whole = whole.replace(f"a[{field!r}]", f"a[{field!r}][0]")
    return Loads("webdataset reads it", whole)


def loads_of_binary(path: Path, front: bytes) -> Loads | None:
    """Return what loads a file whose first bytes, or name, tell more than that it is data."""
    for begin, data, loads_of in _BY_BYTES:
        if front[begin : begin + len(data)] == data:
            return loads_of(path, front)
    by_name = _BY_SUFFIX.get(path.suffix.lower())
    if by_name is not None:
        return by_name(path, front)
    if "tfrecord" in path.name.lower():
        return _of_tfrecord(path)
    return _of_htk(front, path.stat().st_size)


_MODULE = re.compile(rb"c([\w.]+)\n\w+\n")  # of what a pickle looks up
_TUPLE = re.compile(rb"[t\x85-\x87](q.|r.{4}|\x94)?\.\Z", re.DOTALL)  # the end of a pickle of one
_PLAIN = {"torch", "collections", "numpy", "_codecs", "builtins"}
_TORCH = (".pt", ".pth", ".ckpt")
_OF_ZARR = ("zarr.json", ".zarray")
_MEMBERS = 64  # of a tar
_END_BYTES = 16  # of a pickle, which tell a tuple


def _json_at(path: Path) -> dict[str, Any]:
    """Return what a description holds; nothing where it is none."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        return cast(dict[str, Any], found) if isinstance(found, dict) else {}
    return {}


def _of_mds(shards: Any) -> Loads | None:
    """Return what loads the shards of MosaicML's streaming."""
    with suppress(*BROKEN):
        columns = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=False))
        arrays = [name for name, kind in columns.items() if kind.startswith("ndarray")]
        ids = [name for name, kind in columns.items() if name in IDS and kind in ("str", "int")]
        rows = "streaming.LocalDataset(<path>)"
        return Loads("shards of MDS are not read", named([*ids[:1], *arrays], rows))
    return None


def _of_litdata(config: Any) -> Loads | None:
    """Return what loads the chunks of litdata."""
    rows = "litdata.StreamingDataset(<path>)"
    with suppress(*BROKEN):
        kinds = [each.partition(":")[0] for each in config["data_format"]]
        spec = json.loads(config["data_spec"])[1]
        if not str(spec["type"]).endswith("dict"):
            return Loads("chunks of litdata are not read", numbered(rows))
        columns = dict(zip(json.loads(spec["context"]), kinds, strict=True))
        arrays = [k for k, v in columns.items() if "numpy" in v or "tensor" in v]
        ids = [name for name in columns if name in IDS]
        return Loads("chunks of litdata are not read", named([*ids[:1], *arrays], rows))
    return None


def _of_zarr(axes: int) -> Loads:
    """Return what loads one array of Zarr, which is an utterance, or several ones."""
    load = "zarr.open_array(<path>, mode='r')[...]"
    if axes > 2:
        return Loads(ONE_ARRAY, numbered(load))
    return Loads(ONE_ARRAY, "", load)


def _of_zip(path: Path) -> Loads | None:
    """Return what loads a Zarr group in a zip, and what torch has that is no plain tensor."""
    try:
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
            pickle = next((name for name in names if name.endswith("/data.pkl")), None)
            pickled = b"" if pickle is None else file.open(pickle).read(MOST_BYTES)
    except BROKEN:
        return None
    if any(name.endswith("/constants.pkl") for name in names):
        state = "torch.jit.load(<path>).state_dict()"
        return Loads("it is TorchScript, whose code torch alone runs", state, state)
    if pickle is not None:
        return None if path.suffix == ".zip" else _of_torch(pickled)
    if {"indptr.npy", "format.npy"} <= {*names}:
        load = "scipy.sparse.load_npz(<path>).toarray()"
        return Loads("sparse arrays are not read", "", load)
    if path.suffix == ".npz":
        return _of_npz(path)
    if not {*names} & {"zarr.json", ".zgroup", ".zarray"}:
        return None
    store = "zarr.storage.ZipStore(<path>, mode='r')"
    members = f"zarr.open_group({store}, mode='r').members(max_depth=None)"
    load = f"{{k: a[...] for k, a in {members} if isinstance(a, zarr.Array)}}"
    return Loads("Zarr in a zip is not read", load)


def _of_npz(path: Path) -> Loads | None:
    """Return what loads an array of objects, maybe with ids beside it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            objects = [name for name in file.files if _holds_objects(file, name)]
            ids = next((name for name in file.files if name in ("ids", "keys", "names")), None)
    except BROKEN:
        return None
    if len(objects) != 1:
        return None
    rows = f"numpy.load(<path>, allow_pickle=True)[{objects[0]!r}]"
    if ids is None:
        return Loads(RUNS_CODE, numbered(rows))
    return Loads(RUNS_CODE, f"dict(zip(numpy.load(<path>)[{ids!r}].tolist(), {rows}))")


def _holds_objects(file: Any, name: str) -> bool:
    with file.zip.open(f"{name}.npy") as member:
        return b"'|O'" in member.read(256)


_LOAD = "torch.load(<path>, weights_only=False)"
_OF_TENSORS = {
    b"_rebuild_sparse": ("sparse tensors are not read", "", f"{_LOAD}.to_dense()"),
    b"ComplexFloatStorage": ("complex numbers are not read", "", "PARTS"),
    b"ComplexDoubleStorage": ("complex numbers are not read", "", "PARTS"),
    b"_rebuild_qtensor": ("quantized tensors are not read", "", f"{_LOAD}.dequantize()"),
    b"_rebuild_nested_tensor": (
        "nested tensors are not read", numbered(f"{_LOAD}.unbind()"), "",
    ),
    b"PackedSequence": (
        "packed sequences are not read",
        numbered(f"torch.nn.utils.rnn.unpack_sequence({_LOAD})"), "",
    ),
}  # fmt: skip


def _parts(load: str) -> str:
    return f"{{x: getattr({load}, x) for x in ('real', 'imag')}}"


def _of_torch(pickled: bytes) -> Loads | None:
    """Return what loads tensors that are not laid out as arrays are, and lists of dicts of them."""
    top, words = _top(pickled)
    for name, (why, whole, each) in _OF_TENSORS.items():
        if name in pickled and top != "dict":
            return Loads(why, whole, _parts(_LOAD) if each == "PARTS" else each)
    if top == "rows" and (id := next((name for name in IDS if name in words), None)):
        return Loads("rows are no mapping of ids", _rows(id, _LOAD))
    if top == "pairs":
        return Loads("pairs are no mapping of ids", f"{{a[0]: a[1] for a in {_LOAD}}}")
    if top in ("list", "rows", "tuple"):
        return _of_items("lists and tuples have no names", _LOAD)
    modules = {name.decode().partition(".")[0] for name in _MODULE.findall(pickled)}
    if top == "dict" and not modules:
        dtype = ", 'float32'" if "BINFLOAT" in _opcodes(pickled) else ""
        return Loads(LISTS, f"{{k: numpy.array(v{dtype}) for k, v in {_LOAD}.items()}}")
    if top == "dict" and any(each.startswith("BININT") for each in _opcodes(pickled)[1:2]):
        named = f"{{f'item{{k}}': v for k, v in {_LOAD}.items()}}"
        return Loads("numbers are no names of features", "", named)
    if top == "dict" and not modules <= _PLAIN:
        tensors = f"{{k: v for k, v in {_LOAD}.items() if torch.is_tensor(v)}}"
        return Loads(RUNS_CODE, tensors, tensors)
    return None


def _opcodes(pickled: bytes) -> list[str]:
    """Return the first opcodes of a pickle that have values; nothing is run."""
    names: list[str] = []
    with suppress(*BROKEN):
        for opcode, _, _ in islice(pickletools.genops(pickled), 256):
            names += [opcode.name] if opcode.name not in _PICKLE else []
    return names


def _rows(id: str, rows: str) -> str:
    return f"{{a[{id!r}]: {{k: v for k, v in a.items() if k != {id!r}}} for a in {rows}}}"


def _top(pickled: bytes) -> tuple[str, list[str]]:
    """Return what a pickle holds: "dict", "tuple" or "list", "rows" or "pairs" in one, or "other".

    Nothing is run. Beside it are the first words of text.
    """
    steps: list[tuple[str, object]] = []
    with suppress(*BROKEN):
        for opcode, argument, _ in islice(pickletools.genops(pickled), 256):
            if opcode.name not in _PICKLE:
                steps.append((opcode.name, argument))
    names = [name for name, _ in steps[:2]]
    words = [each for name, each in steps if isinstance(each, str) and "UNICODE" in name]
    if names[:1] == ["EMPTY_DICT"]:
        return "dict", words
    if names[:1] == ["EMPTY_LIST"]:
        second = names[-1]
        is_text = "UNICODE" in second and words[0].partition(".")[0] not in _PLAIN
        is_pairs = is_text and _holds_arrays(pickled)
        rows = "rows" if second == "EMPTY_DICT" else "pairs" if is_pairs else "list"
        return rows, words
    return "tuple" if _TUPLE.search(pickled) else "other", words


def _holds_arrays(pickled: bytes) -> bool:
    """Whether a pickle names what makes arrays: of NumPy by protocol 4 or 5, or of torch."""
    return any(name in pickled for name in (b"ndarray", b"_frombuffer", b"_rebuild_tensor"))


def _of_pickle(path: Path) -> Loads | None:
    """Return what loads a pickle; torch's own are read, where they hold plain values."""
    if path.suffix in _TORCH:
        return None
    with path.open("rb") as file:
        front = file.read(MOST_BYTES)
        file.seek(max(path.stat().st_size - _END_BYTES, 0))
        end = file.read(_END_BYTES)
    if b"joblib.numpy_pickle" in front[:4096]:
        return Loads(RUNS_CODE, "joblib.load(<path>)", "joblib.load(<path>)")
    load, (top, words) = "pickle.loads(<bytes>)", _top(front)
    top = "tuple" if top == "other" and _TUPLE.search(end) else top
    if b"pandas" in front[:4096]:
        rows = f"{load}.itertuples(index=False)"
        why = f"{RUNS_CODE} (ids and arrays are the first two columns, in this line)"
        return Loads(why, f"{{a[0]: a[1] for a in {rows}}}")
    if top == "rows" and (id := next((name for name in IDS if name in words), None)):
        return Loads(RUNS_CODE, _rows(id, load))
    if top == "pairs":
        return Loads(RUNS_CODE, f"{{a[0]: a[1] for a in {load}}}")
    if top in ("list", "rows", "tuple"):
        return (
            _of_items(RUNS_CODE, load)
            if _holds_arrays(front) or top == "rows"
            else Loads(RUNS_CODE, numbered(load, "numpy.array(a)"), f"numpy.array({load})")
        )
    return Loads(RUNS_CODE, load, load)


def _of_items(why: str, load: str) -> Loads:
    """Return what loads a list or a tuple of arrays, maybe beside texts and numbers."""
    return Loads(why, numbered(load), f"{{f'item{{n}}': a for n, a in enumerate({load})}}")


def _of_npy(path: Path) -> Loads | None:
    """Return what loads an array that is no plain one, or that holds several utterances."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0
            read = read if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
    except BROKEN:
        return None
    load = "numpy.load(<path>)"
    if dtype.hasobject and dtype.names is None:
        load = "numpy.load(<path>, allow_pickle=True)"
        item = f"{load}.item()"
        stacked = f"numpy.array({load}.tolist())"
        return Loads(RUNS_CODE, *((numbered(load), stacked) if shape else (item, item)))
    if dtype.names is not None:
        return _of_fields(dtype)
    if dtype.kind == "c":
        return Loads("complex numbers are not read", "", _parts(load))
    if dtype.kind in "fuiMm" and (dtype.itemsize > 8 or dtype.kind in "Mm"):
        wide = "float64" if dtype.kind == "f" else "int64"
        return Loads(f"no cache holds numbers of {dtype}", "", f"{load}.astype({wide!r})")
    return Loads(ONE_ARRAY, numbered(load)) if len(shape) > 2 else None


def _of_fields(dtype: np.dtype[Any]) -> Loads:
    """Return what loads an array of several fields."""
    why, names = "arrays of several fields are not read", dtype.names or ()
    id = next((name for name in names if dtype[name].kind in "US"), None)
    if id is not None:
        key = f"str(a[{id!r}])" if dtype[id].kind == "U" else f"a[{id!r}].decode()"
        fields = [f"{name!r}: a[{name!r}]" for name in names if dtype[name].kind not in "USO"]
        return Loads(why, f"{{{key}: {{{', '.join(fields)}}} for a in numpy.load(<path>)}}")
    return Loads(why, "", "{k: a[k] for a in [numpy.load(<path>)] for k in a.dtype.names}")


def _of_htk(front: bytes, size: int) -> Loads | None:
    """Return what loads HTK's parameters: a big-endian header of 12 bytes, numbers after it.

    Of compressed ones these are two rows of float32, a scale and a bias, then int16.
    """
    frames, frame_bytes = int.from_bytes(front[:4], "big"), int.from_bytes(front[8:10], "big")
    kind = int.from_bytes(front[10:12], "big")
    checksum = 2 if kind & 0o10000 else 0
    if not frames or not frame_bytes or size != 12 + frames * frame_bytes + checksum:
        return None
    data = "<bytes>[:-2]" if checksum else "<bytes>"
    load = f"numpy.frombuffer({data}, '>f4', offset=12).reshape(-1, {frame_bytes // 4})"
    if kind & 0o2000:
        dims = frame_bytes // 2
        scale, bias = (f"numpy.frombuffer(<bytes>, '>f4', {dims}, {12 + n * dims})" for n in (0, 4))
        load = f"numpy.frombuffer({data}, '>i2', offset={12 + 8 * dims}).reshape(-1, {dims})"
        load = f"({load} + {bias}) / {scale}"
    elif frame_bytes % 4:
        return None
    return Loads("HTK's files are not read", "", load)


def _of_indexed(path: Path) -> Loads | None:
    """Return what loads tokens of Megatron: `.bin`, and the lengths of its sequences in `.idx`."""
    index, numbers = path.with_suffix(".idx"), path.with_suffix(".bin")
    if not index.is_file() or not numbers.is_file():
        return None
    with index.open("rb") as file:
        magic, _, code, count = struct.unpack("<9sQBQ", file.read(26).ljust(26, b"\0"))
    dtype = dict(enumerate(_OF_MEGATRON, 1)).get(code)
    if magic != _MEGATRON or dtype is None:
        return None
    read = f"numpy.fromfile({str(index)!r}, 'int32', {count}, offset=34)[:-1].cumsum()"
    rows = f"numpy.split(numpy.fromfile({str(numbers)!r}, {dtype!r}), {read})"
    return Loads("Megatron's tokens are not read", numbered(rows))


_MEGATRON = b"MMIDIDX\0\0"
_OF_MEGATRON = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")


def _of_avro(path: Path, front: bytes) -> Loads | None:
    """Return what loads records of Avro, by their schema."""
    try:
        at = front.index(b"avro.schema") + len(b"avro.schema")
        size, at = _varint(front, at)
        fields = json.loads(front[at : at + size // 2])["fields"]
        kinds = {field["name"]: json.dumps(field["type"]) for field in fields}
    except BROKEN:
        return None
    arrays = [name for name, kind in kinds.items() if '"array"' in kind]
    data = [name for name, kind in kinds.items() if '"bytes"' in kind]
    ids = [name for name in IDS if name in kinds]
    if not arrays and not data:
        return None
    load = "numpy.array(COLUMN)" if arrays else array_of("COLUMN")
    rows = "fastavro.reader(open(<path>, 'rb'))"
    return Loads("Avro is not read", named([*ids[:1], *(arrays or data)], rows, load))


def array_of(data: str) -> str:
    """Return an expression for the array that bytes are, which are called so in it."""
    is_npy = f"{data}[:6] == b'\\x93NUMPY'"
    return f"numpy.load(io.BytesIO({data})) if {is_npy} else numpy.frombuffer({data}, 'float32')"


def _of_safetensors(front: bytes) -> Loads | None:
    """Return what loads tensors of dtypes that torch alone has, or of complex numbers."""
    load, head = (
        "safetensors.torch.load_file(<path>)",
        front[: 8 + int.from_bytes(front[:8], "little")],
    )
    if b'"F8_' in head:
        whole = f"{{k: v.float() for k, v in {load}.items()}}"
        return Loads("no cache holds numbers of eight bits with a point", whole, whole)
    if b'"C64"' in head:
        return Loads(
            "complex numbers are not read", f"{{k: {_parts('v')} for k, v in {load}.items()}}"
        )
    return None


def _of_msgpack(front: bytes) -> Loads:
    """Return what loads msgpack, whose arrays are lists, or of msgpack_numpy."""
    if b"nd" in front and b"shape" in front:
        load = "msgpack.unpackb(<bytes>, object_hook=msgpack_numpy.decode)"
        return Loads("msgpack is not read", load, load)
    load = "msgpack.unpackb(<bytes>)"
    whole = f"{{k: numpy.array(v) for k, v in {load}.items()}}"
    return Loads("msgpack is not read", whole, f"numpy.array({load})")


def _of_sqlite(path: Path) -> Loads | None:
    """Return what loads the first table that has texts beside bytes."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as db,
    ):
        for (table,) in db.execute(
            "select name from sqlite_master where type = 'table'"
        ).fetchall():
            found = db.execute(f'select * from "{table}"')
            row = dict(
                zip((each[0] for each in found.description), found.fetchone() or (), strict=False)
            )
            id = next((name for name, value in row.items() if isinstance(value, str)), None)
            data = next((name for name, value in row.items() if isinstance(value, bytes)), None)
            if id is not None and data is not None and not {"'", '"'} & {*f"{table}{id}{data}"}:
                load = of_bytes(row[data], "v")
                rows = (
                    f"""sqlite3.connect(<path>).execute('select "{id}", "{data}" from "{table}"')"""
                )
                return Loads("databases are not read", f"{{k: {load} for k, v in {rows}}}")
    return None


def _is_npz(data: bytes) -> bool:
    return data[:4] == b"PK\3\4" and b".npy" in data[:256]


def _is_plain_torch(data: bytes) -> bool:
    """Whether bytes are those of `torch.save`, of tensors and nothing that runs code."""
    with suppress(*BROKEN), zipfile.ZipFile(io.BytesIO(data)) as file:
        pickled = next(file.read(name) for name in file.namelist() if name.endswith("/data.pkl"))
        modules = {name.decode().partition(".")[0] for name in _MODULE.findall(pickled)}
        is_odd = any(name in pickled for name in _OF_TENSORS)
        return modules <= _PLAIN and b"_rebuild_tensor" in pickled and not is_odd
    return False


def of_bytes(data: bytes, name: str) -> str:
    """Return an expression for the array that bytes are, which are called so in it."""
    if data[:6] == b"\x93NUMPY":
        return f"numpy.load(io.BytesIO({name}))"
    if _is_npz(data):
        return f"dict(numpy.load(io.BytesIO({name})))"
    if data[:4] == b"PK\3\4":
        return f"torch.load(io.BytesIO({name}), weights_only=False)"
    if data[:2] == b"\x1f\x8b":
        return f"numpy.frombuffer(gzip.decompress({name}), 'float32')"
    if data[:1] in (b"\xdc", b"\xdd"):  # of 16 numbers or more
        return f"numpy.array(msgpack.unpackb({name}))"
    is_pickle = data[:1] == b"\x80" and data[-1:] == b"."
    return f"pickle.loads({name})" if is_pickle else f"numpy.frombuffer({name}, 'float32')"


# TFRecord: a record is its length in 8 bytes, a checksum of 4, the bytes, and a checksum of 4.


def _of_tfrecord(path: Path) -> Loads | None:
    """Return what loads examples of TensorFlow, by the fields of the first one."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        file.read(4)
        record = file.read(min(size, MOST_BYTES))
    if len(record) < size or not size:
        return None
    try:
        features = dict(_entries(next(data for field, data in _fields(record) if field == 1)))
    except (StopIteration, *BROKEN):
        return None
    id = next((name for name in IDS if features.get(name, (0, b""))[0] == 1), None)
    key = "f'{n:08d}'" if id is None else f"bytes(a[{id!r}]).decode()"
    loads = []
    for name, (kind, data) in features.items():
        shape = next((each for each in (f"{name}_shape", "shape") if each in features), None)
        load = f"a[{name!r}]" if kind != 1 else of_bytes(data, f"bytes(a[{name!r}])")
        is_text = kind == 1 and (data.isascii() or name == id)
        if not is_text and not (name == "shape" or name.endswith("_shape")):
            loads.append((name, load + (f".reshape(a[{shape!r}])" if shape else "")))
    value = f"{{{', '.join(f'{name!r}: {load}' for name, load in loads)}}}"
    value = loads[0][1] if len(loads) == 1 else value
    rows = "enumerate(tfrecord.tfrecord_loader(<path>, None))"
    return Loads("TFRecord is not read", f"{{{key}: {value} for n, a in {rows}}}")


def _entries(features: bytes) -> Iterator[tuple[str, tuple[int, bytes]]]:
    """Yield the names of features, 1 for bytes, 2 for floats or 3 for integers, and the bytes."""
    for _, entry in _fields(features):
        parts = dict(_fields(entry))
        kind, values = next(iter(_fields(parts[2])), (0, b""))
        yield parts[1].decode(), (kind, next((data for _, data in _fields(values)), b""))


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a message of protobuf that hold bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 != 2:  # numbers
            return
        size, at = _varint(message, at)
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _of_duckdb(path: Path, front: bytes) -> Loads:
    """Return what loads the first table of DuckDB."""
    rows = "db.table(db.sql('show tables').fetchall()[0][0]).fetchall()"
    connected = "db in [duckdb.connect(<path>, read_only=True)]"
    load = f"{{a[0]: numpy.array(a[1]) for {connected} for a in {rows}}}"
    return Loads("databases are not read: ids and arrays are two columns, in this line", load)


def _of_matlab(path: Path, front: bytes) -> Loads:
    """Return what loads MATLAB's HDF5."""
    arrays = "{k: v[()].T for k, v in h5py.File(<path>).items() if k[:1] != '#'}"
    return Loads("MATLAB stores arrays transposed", arrays, arrays)


def _of_netcdf(path: Path, front: bytes) -> Loads:
    """Return what loads netCDF of before HDF5."""
    arrays = "scipy.io.netcdf_file(<path>, mmap=False).variables.items()"
    load = f"{{k: v.data.copy() for k, v in {arrays}}}"
    return Loads("SciPy reads it", load, load)


def _of_hdf5(path: Path, front: bytes) -> Loads | None:
    """Return what loads netCDF in HDF5; all else is adopted, or its kind says why it is not."""
    if b"pandas_type" in front:
        keys = "pandas.HDFStore(<path>, 'r').keys()"
        load = f"{{k[1:]: pandas.read_hdf(<path>, k).to_numpy() for k in {keys}}}"
        return Loads(
            "pandas reads it (a frame an utterance, without its index, in this line)", load, load
        )
    if path.suffix not in (".nc", ".nc4", ".cdf"):
        return None
    scale = "d.attrs.get('CLASS') != b'DIMENSION_SCALE'"
    load = f"{{k: d[()] for k, d in h5py.File(<path>).items() if {scale}}}"
    return Loads("netCDF's dimensions are no arrays", load, load)


_LoadsOf = Callable[[Path, bytes], Loads | None]
_BY_BYTES: tuple[tuple[int, bytes, _LoadsOf], ...] = (
    (0, b"\x93NUMPY", lambda path, front: _of_npy(path)),
    (0, b"SQLite format 3\0", lambda path, front: _of_sqlite(path)),
    (8, b"DUCK", _of_duckdb),
    (0, b"MATLAB 7.3", _of_matlab),
    (0, b"CDF\1", _of_netcdf),
    (0, b"CDF\2", _of_netcdf),
    (0, b"\x89HDF\r\n\x1a\n", _of_hdf5),
    (0, b"PK\3\4", lambda path, front: _of_zip(path)),
    (0, _MEGATRON, lambda path, front: _of_indexed(path)),
    (0, b"Obj\1", _of_avro),
    *((0, bytes([128, version]), lambda path, front: _of_pickle(path)) for version in range(2, 6)),
)
_BY_SUFFIX: dict[str, _LoadsOf] = {
    ".tar": lambda path, front: _of_tar(path),
    ".bin": lambda path, front: _of_indexed(path),
    ".mdb": lambda path, front: None if path.name == "lock.mdb" else _of_lmdb(path),
    ".lmdb": lambda path, front: _of_lmdb(path),
    ".safetensors": lambda path, front: _of_safetensors(front),
    ".msgpack": lambda path, front: _of_msgpack(front),
    ".mpk": lambda path, front: _of_msgpack(front),
}
