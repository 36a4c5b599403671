"""A reader of caches, written from `docs/format.md` alone, with NumPy, json, zlib and xxhash.

Blocks of Zstandard, Blosc and lilcom are decoded by the libraries of these.
"""

from __future__ import annotations

import importlib
import json
import re
import urllib.request
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

Array = NDArray[Any]


def unsealed(data: bytes) -> Any:
    """Sealed JSON."""
    assert data[:2] == b'["'
    assert data[18:20] == b'",'
    assert data[-1:] == b"]"
    assert xxhash.xxh3_64_hexdigest(data[20:-1]) == data[2:18].decode()
    return json.loads(data[20:-1])


def columns_of(data: bytes, digest: str) -> dict[str, Array]:
    """A column file, with all its checksums."""
    start = int.from_bytes(data[-8:], "little")
    assert xxhash.xxh3_64_hexdigest(data[start:]) == digest
    footer = unsealed(data[start:-8])["columns"]
    ends = [*[offset for _, _, offset, _ in footer.values()][1:], start]
    columns, behind = {}, 0
    for end, (name, (dtype, length, offset, checksum)) in zip(ends, footer.items(), strict=True):
        assert offset % 64 == 0
        assert offset == behind
        assert xxhash.xxh3_64_hexdigest(data[offset:end]) == checksum
        columns[name] = np.frombuffer(data, dtype, length, offset)
        behind = -(-(offset + columns[name].nbytes) // 64) * 64
    assert behind == start
    return columns


def strings_of(columns: dict[str, Array], name: str) -> list[str]:
    data, ends = columns[f"{name}_bytes"].tobytes(), columns[f"{name}_ends"].tolist()
    return [data[a:b].decode() for a, b in pairwise(ends)]


def decoded(
    codec: str, options: dict[str, Any], data: bytes, dtype: np.dtype[Any], width: int
) -> Array:
    """The numbers of a block of frames of `width` numbers."""
    if codec == "int8":
        assert not options
        return int8_numbers(data, width)
    if codec == "lilcom":
        import lilcom

        return np.asarray(lilcom.decompress(data)).reshape(-1)
    if codec == "kaldi":
        return kaldi_numbers(data, options.get("numbers", "kaldiio"))
    if codec in ("zstd", "blosc"):
        data = importlib.import_module(f"numcodecs.{codec}").decompress(data)
    elif codec == "gzip":
        data = zlib.decompress(data)
        assert {*options} <= {"level", "shuffle"}
        if options.get("shuffle", True):
            data = np.frombuffer(data, "u1").reshape(dtype.itemsize, -1).T.tobytes()
    else:
        raise ValueError(codec)
    return np.frombuffer(data, dtype)


def int8_numbers(data: bytes, width: int) -> Array:
    """The numbers of a block of int8."""
    assert data[:4] == b"int8"
    rows, data = int.from_bytes(data[4:8], "little"), data[8:]
    if rows <= 2:
        return np.frombuffer(data, "<f4", rows * width)
    low = np.frombuffer(data, "<f4", width)
    step = (np.frombuffer(data, "<u2", width, 4 * width).astype("<u4") << 16).view("<f4")
    codes = np.frombuffer(data, "u1", rows * width, 6 * width).reshape(rows, width)
    return np.asarray(low + codes.astype("<f4") * step).reshape(-1)


def reordered(data: bytes, dtype: Any, options: Any, shape: tuple[int, ...]) -> Array:
    """The array whose numbers lie in another order."""
    assert {*options} <= {"axes", "big_endian"}
    numbers = np.frombuffer(data, dtype.newbyteorder(">") if options.get("big_endian") else dtype)
    axes = options.get("axes") or range(len(shape))
    stored = numbers.reshape([shape[axis] for axis in axes])
    return np.asarray(np.moveaxis(stored, range(len(shape)), axes), dtype)


def kaldi_numbers(data: bytes, numbers_of: str) -> Array:
    """The numbers of a compressed matrix, or vector of integers, of Kaldi."""
    assert data[:2] == b"\0B"
    if data[2:3] == b"\4":
        return np.frombuffer(data[7:], [("size", "u1"), ("number", "<i4")])["number"].copy()
    kind, data = data[2:].split(b" ", 1)
    if kind[:1] in b"FD":
        head = 10 if kind[1:] == b"M" else 5
        return np.frombuffer(data[head:], {b"F": "<f4", b"D": "<f8"}[kind[:1]])
    least, extent = np.frombuffer(data, "<f4", 2)
    rows, columns = np.frombuffer(data, "<i4", 2, 8)
    if kind != b"CM":
        numbers = np.frombuffer(data[16:], {b"CM2": "<u2", b"CM3": "u1"}[kind])
        if numbers_of == "kaldi":
            step = np.float32(float(extent) * {b"CM2": 1 / 65535, b"CM3": 1 / 255}[kind])
            return np.asarray(least + numbers.astype("f4") * step)
        most = np.float32({b"CM2": 65535, b"CM3": 255}[kind])
        return np.asarray(least + numbers.astype("f4") * extent / most)
    knots = np.frombuffer(data, "<u2", 4 * columns, 16).astype("f4")
    p = least + knots * extent / np.float32(65535)
    wide: type[np.floating[Any]] = np.float32
    if numbers_of == "kaldi":
        p, wide = least + extent * np.float32(1.52590218966964e-05) * knots, np.float64
    p = p.reshape(columns, 1, 4)
    n = np.frombuffer(data[16 + 8 * columns :], "u1").reshape(columns, rows).astype("f4")
    low = p[..., 0] + wide((p[..., 1] - p[..., 0]) * n) * wide(1 / 64)
    middle = p[..., 1] + wide((p[..., 2] - p[..., 1]) * (n - 64)) * wide(1 / 128)
    high = p[..., 2] + wide((p[..., 3] - p[..., 2]) * (n - 192)) * wide(1 / 63)
    found = np.where(n <= 64, low, np.where(n <= 192, middle, high))
    return np.asarray(found.T.reshape(-1), np.float32)


def set_paths(cache: Path) -> list[Path]:
    """The caches of a cache: itself, and those of features that were added."""
    if "sets" not in unsealed((cache / "featcache.json").read_bytes())["requires"]:
        return [cache]
    outer = unsealed((cache / "sets" / "featcache.json").read_bytes())
    assert outer["kind"] == "sets"
    assert not outer.get("requires")
    return [cache, *(cache / "sets" / name for name in outer["sets"])]


def _cut(data: Array, ends: Array) -> list[Array]:
    return [data[a:b] for a, b in pairwise(ends.tolist())]


DECLARED = (
    "name dtype backend codec options codec_options stats time_axis nonfinite dims frame_s offset_s"
)
OF_FEATURES = "rows checksum first container offset nbytes block_rows skip count dims mean m2"


class Reader:
    """A generation: the current one, or that of another manifest in the cache."""

    def __init__(self, cache: Path, manifest: str = "featcache.json") -> None:
        self.cache = cache
        self.manifest = unsealed((cache / manifest).read_bytes())
        assert self.manifest["format"] == "featcache"
        assert self.manifest["version"] == 1
        assert self.manifest.get("kind", "cache") == "cache"
        assert {*self.manifest["requires"]} <= {"adopted", "sets"}
        self.features = self.manifest["fingerprint"]["features"]
        for declared in self.features.values():
            assert {*declared} <= {*DECLARED.split()}
        self.parts = self.manifest["parts"]
        index = (cache / self.manifest["index"]).read_bytes()
        for path, (size, footer) in self.manifest.get("sizes", {}).items():
            data = (cache / path).read_bytes()
            assert len(data) == size
            if path.endswith(".columns"):
                assert int.from_bytes(data[-8:], "little") == size - footer
            else:
                assert footer == 0
        self.columns = columns_of(index, self.manifest["index_digest"])
        for name in self.columns:
            feature, _, what = name.partition(".")
            assert feature not in self.features or what in OF_FEATURES.split()
        self.ids = strings_of(self.columns, "id")
        self.failed = strings_of(self.columns, "failed")
        self.containers = strings_of(self.columns, "container_path")
        assert len(self.ids) == self.manifest["rows"]
        assert self.ids == sorted(set(self.ids), key=str.encode)

    def row(self, id: str) -> int:
        hash_ = np.uint64(xxhash.xxh3_64_intdigest(id.encode()))
        hashes = self.columns["hashes"]
        for place in range(int(np.searchsorted(hashes, hash_)), len(hashes)):
            if hashes[place] != hash_:
                break
            if self.ids[row := int(self.columns["hash_rows"][place])] == id:
                return row
        raise KeyError(id)

    def read(self, id: str, feature: str) -> Array:
        declared, dims = self.features[feature], self.manifest["dims"][feature]
        dtype = np.dtype("<u2" if declared["dtype"] == "bfloat16" else declared["dtype"])
        row = self.row(id)
        rows, blocks = int(self._of(feature, "rows")[row]), self._blocks(feature, row)
        checksum = xxhash.xxh3_64_intdigest(b"".join(blocks))
        collected = all(part.get("adopted", {}).get("collected", True) for part in self.parts)
        assert checksum == self._of(feature, "checksum")[row] or not collected
        skip = int(self.columns.get(f"{feature}.skip", [0] * len(self.ids))[row])
        if declared["codec"] == "raw":
            numbers = np.frombuffer(b"".join(blocks), dtype)
        elif declared["codec"] == "reordered":
            options = declared["codec_options"]
            pieces = [reordered(each, dtype, options, (-1, *dims)).reshape(-1) for each in blocks]
            numbers = np.concatenate([np.empty(0, dtype), *pieces])
            numbers = numbers[skip * int(np.prod(dims)) :]
        else:
            pieces = [
                decoded(
                    declared["codec"], declared["codec_options"], each, dtype, int(np.prod(dims))
                )
                for each in blocks
            ]
            numbers = np.concatenate([np.empty(0, dtype), *pieces])
            numbers = numbers[skip * int(np.prod(dims)) :]
        array: Array = numbers[: rows * int(np.prod(dims))].reshape(rows, *dims)
        if declared["dtype"] == "bfloat16":
            array = (array.astype("<u4") << 16).view("<f4")
        return array if declared["time_axis"] == 0 else array[0]

    def lengths(self, feature: str) -> list[int]:
        return [int(length) for length in self._of(feature, "rows")]

    def stamps(self) -> dict[str, tuple[int, int]]:
        """Stamps of all ids, `input` and `entry`; none where the generation has none."""
        if "input" not in self.columns:
            return {}
        pairs = zip(*(self.columns[name].tolist() for name in ("input", "entry")), strict=True)
        return dict(zip(self.ids, pairs, strict=True))

    def annotation(self, name: str) -> list[Any]:
        """Values of all rows, None where there is none."""
        kind, begin = self.manifest["annotations"][name]["kind"], f"annotations/{name}/"
        column = {
            key.removeprefix(begin): each for key, each in self.columns.items() if begin in key
        }
        if kind == "str":
            texts = [bytes(each).decode() for each in _cut(column["bytes"], column["ends"])]
            codes = column.get("codes", np.arange(len(texts)))
            values: list[Any] = [texts[code] for code in codes]
        elif kind in ("ints", "floats"):
            values = [each.tolist() for each in _cut(column["values"], column["ends"])]
        else:
            values = [bool(each) if kind == "bool" else each for each in column["values"].tolist()]
        null = column.get("null", np.zeros(len(values), "u1"))
        return [None if is_null else value for value, is_null in zip(values, null, strict=True)]

    def file(self, role: str) -> bytes | None:
        for path, digest in self.manifest["files"].items():
            if re.fullmatch(rf"{role}-[0-9a-f]{{8}}\.(bin|json)", path):
                data: bytes = (self.cache / path).read_bytes()
                assert xxhash.xxh3_64_hexdigest(data) == digest
                return data
        return None

    def stats(self, feature: str) -> tuple[int, Array, Array]:
        shape = self._of(feature, "dims").tolist()
        mean, m2 = self._of(feature, "mean"), self._of(feature, "m2")
        return int(self._of(feature, "count")[0]), mean.reshape(shape), m2.reshape(shape)

    def _blocks(self, feature: str, row: int) -> list[bytes]:
        first, last = self._of(feature, "first")[row : row + 2].tolist()
        blocks = []
        for extent in range(first, last):
            offset = int(self._of(feature, "offset")[extent])
            nbytes = int(self._of(feature, "nbytes")[extent])
            found = self._path(int(self._of(feature, "container")[extent]))
            if isinstance(found, bytes):
                blocks.append(found[offset : offset + nbytes])
                continue
            with found.open("rb") as file:
                file.seek(offset)
                blocks.append(file.read(nbytes))
        return blocks

    def _path(self, container: int) -> Path | bytes:
        path, part = (
            self.containers[container],
            self.parts[self.columns["container_part"][container]],
        )
        if "adopted" not in part:
            return self.cache / path
        root = json.loads((self.cache / "adopted.json").read_bytes())[part["adopted"]["root"]]
        if "://" in root:
            return self._object(f"{root}/{path}", container)
        file = Path(root) / path
        status = file.stat()
        assert status.st_size == self.columns["container_size"][container]
        assert status.st_mtime_ns == self.columns["container_mtime"][container]
        return file

    def _object(self, url: str, container: int) -> bytes:
        """All bytes of an object, if it is the one that was adopted."""
        with urllib.request.urlopen(url) as answer:
            data, etag = answer.read(), answer.headers["ETag"]
        state = xxhash.xxh3_64_intdigest(etag.removeprefix("W/").strip('"').encode()) // 2 - 2**63
        assert len(data) == self.columns["container_size"][container]
        assert state == self.columns["container_mtime"][container]
        return bytes(data)

    def _of(self, feature: str, name: str) -> Array:
        return self.columns[f"{feature}.{name}"]
