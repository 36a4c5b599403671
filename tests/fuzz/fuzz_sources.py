"""Sources of every kind that is adopted, small ones, and mutations of their files.

A mutation knows what a file is: it changes numbers of headers to extreme ones, members and lines,
and puts the file together again, with checksums that are right. Random flips come beside.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import h5py
import kaldiio
import lhotse
import numpy as np
import torch
import zarr
from fuzz_mutations import LIMITS, mutated_bytes, mutated_json
from lhotse.features import io as lhotse_io
from lhotse_stores import cut_of
from numpy.typing import NDArray

IDS = [f"utt-{number}" for number in range(4)]
BLOCK = 512  # of a tar
NUMBERS = (
    *(b"0", b"-1", b"1", b"3", b"255", b"65536", b"4294967296", b"36028797018963968", b"1e400"),
    *(b"9223372036854775807", b"18446744073709551616", b"9" * 30, b"1" + b"0" * 5000, b"nan", b""),
)
OPCODES = (
    *(b"(", b")", b"t", b"]", b"}", b"e", b"s", b"u", b"0", b"1", b"2", b"q\0", b"h\0", b"R", b"Q"),
    *(b"\x85", b"\x86", b"\x87", b"\x88", b"N", b"K\xff", b"J\xff\xff\xff\xff", b"a", b".", b"b"),
    *(b"\x8a\x08" + bytes(7) + b"\x40", b"\x8a\xff" + b"\x7f" * 255, b"cos\nsystem\n", b"\x81"),
)
WORDS = (
    *(
        b"",
        b" ",
        b"\0",
        b"x" * 5000,
        b"../../x",
        b"-",
        b"a |",
        b"/dev/zero",
        b"\xff",
        b"feats.ark:0",
    ),
    *(b"feats.ark:0", b"[0:1]", b"feats.ark:9[2:99999999]", b"(" * 300, b">f4", b"|O"),
)
TAR_SIZES = (
    *(b"77777777777\0", b"00000000000\0", b"\x80" + b"\xff" * 11, b"-0000000001\0", b"9" * 12),
)
NAMES = ("", "a", "../x", "/etc/passwd", "data.pkl", "a/data.pkl", "utt-1.npy", "u" * 300, "a\0b")
BROKEN = (zipfile.BadZipFile, EOFError, OSError, zlib.error, LookupError, ValueError)
MADE: dict[str, tuple[str, Callable[[Path], str]]] = {}  # kind, and what writes a source
Array = NDArray[Any]


def source(kind: str) -> Callable[[Callable[[Path], str]], Callable[[Path], str]]:
    def keep(make: Callable[[Path], str]) -> Callable[[Path], str]:
        MADE[make.__name__] = kind, make
        return make

    return keep


def arrays(dims: int = 3) -> dict[str, Array]:
    random = np.random.default_rng(0)
    return {
        id: random.standard_normal((5 + 40 * number, dims), np.float32)
        for number, id in enumerate(IDS)
    }


@source("npy")
def npy(folder: Path) -> str:
    for id, array in arrays().items():
        np.save(folder / f"{id}.npy", array)
    return ""


@source("npy")
def npy_in_fortran_order(folder: Path) -> str:
    for id, array in arrays().items():
        np.save(folder / f"{id}.npy", np.asfortranarray(array.astype(">f4")))
    return ""


@source("flat_npy")
def flat_npy(folder: Path) -> str:
    np.save(folder / "feats.npy", np.concatenate([*arrays().values()]))
    np.save(folder / "lengths.npy", [len(array) for array in arrays().values()])
    np.save(folder / "ids.npy", IDS)
    return ""


@source("zarr")
def zarr_2(folder: Path) -> str:
    group = zarr.open_group(folder, mode="w", zarr_format=2)
    for id, array in arrays().items():
        options = {"chunks": (9, 3), "compressors": None}
        group.create_array(id, shape=array.shape, dtype="f4", **options)[...] = array
    return ""


@source("zarr")
def zarr_3(folder: Path) -> str:
    group = zarr.open_group(folder, mode="w", zarr_format=3)
    for id, array in arrays().items():
        group.create_array(id, shape=array.shape, dtype="f4", compressors=None)[...] = array
    return ""


@source("espnet")
def espnet(folder: Path) -> str:
    (folder / "collect_feats").mkdir()
    lines = ""
    for id, array in arrays().items():
        np.save(folder / "collect_feats" / f"{id}.npy", array)
        lines += f"{id} collect_feats/{id}.npy\n"
    (folder / "collect_feats" / "feats.scp").write_text(lines)
    (folder / "stats_keys").write_text("feats\nfeats_lengths\n")
    return ""


@source("fairseq")
def fairseq(folder: Path) -> str:
    found = [*arrays().values()]
    for rank in range(2):
        some = found[rank * 2 : rank * 2 + 2]
        np.save(folder / f"train_{rank}_2.npy", np.concatenate(some))
        lengths = "".join(f"{len(array)}\n" for array in some)
        (folder / f"train_{rank}_2.len").write_text(lengths)
    (folder / "train.tsv").write_text("/audio\n" + "".join(f"{id}.wav\t9\n" for id in IDS))
    return ""


def kaldi(folder: Path, content: dict[str, Array], **options: Any) -> str:
    ark, scp = folder / "feats.ark", folder / "feats.scp"
    kaldiio.save_ark(str(ark), content, scp=str(scp), **options)
    lines = scp.read_text().replace(f"{folder}/", "")
    if options or next(iter(content.values())).ndim == 2:
        lines += f"part {lines.split()[1]}[1:3]\n"
    scp.write_text(lines)
    (folder / "text").write_text("".join(f"{id} a word\n" for id in IDS))
    (folder / "utt2dur").write_text("".join(f"{id} 1.25\n" for id in IDS))
    (folder / "frame_shift").write_text("0.01\n")
    return "feats.scp"


@source("kaldi")
def kaldi_matrices(folder: Path) -> str:
    return kaldi(folder, arrays())


@source("kaldi")
def kaldi_archive(folder: Path) -> str:
    kaldi(folder, {id: array.astype(np.float64) for id, array in arrays().items()})
    return "feats.ark"


@source("kaldi")
def kaldi_compressed(folder: Path) -> str:
    return kaldi(folder, arrays(), compression_method=2)


@source("kaldi")
def kaldi_compressed_bytes(folder: Path) -> str:
    return kaldi(folder, arrays(), compression_method=5)


@source("kaldi")
def kaldi_integers(folder: Path) -> str:
    return kaldi(folder, {id: np.arange(3 + 9 * n, dtype="i4") for n, id in enumerate(IDS)})


@source("pt")
def pt(folder: Path) -> str:
    for id, array in arrays().items():
        torch.save(torch.from_numpy(array), folder / f"{id}.pt")
    return ""


@source("pt")
def pt_of_dicts(folder: Path) -> str:
    for id, array in arrays().items():
        content = {"feats": torch.from_numpy(array), "xvector": torch.ones(7), "text": "a b"}
        torch.save(content | {"codes": [1, 2, 3], "snr": 1.5}, folder / f"{id}.pt")
    return ""


@source("pt")
def pt_transposed(folder: Path) -> str:
    tensors = {id: torch.from_numpy(array.T.copy()).T for id, array in arrays().items()}
    torch.save(tensors, folder / "all.pt")
    return "all.pt"


@source("hdf5")
def hdf5_flat(folder: Path) -> str:
    with h5py.File(folder / "feats.h5", "w") as file:
        file.create_dataset("feats", data=np.concatenate([*arrays().values()]), chunks=(9, 3))
        file["offsets"] = np.cumsum([0, *(len(array) for array in arrays().values())])
        file["ids"] = IDS
    return "feats.h5"


@source("hdf5")
def hdf5(folder: Path) -> str:
    with h5py.File(folder / "feats.h5", "w") as file:
        for id, array in arrays().items():
            file[id] = array
    return "feats.h5"


@source("hdf5")
def hdf5_chunks(folder: Path) -> str:
    with h5py.File(folder / "feats.h5", "w") as file:
        for id, array in arrays().items():
            file.create_dataset(id, data=array, chunks=(4, 3), compression="gzip", shuffle=True)
    return "feats.h5"


def _lhotse(storage: str, folder: Path, suffix: str) -> str:
    with getattr(lhotse_io, storage)(folder / "feats") as writer:
        cuts = [_cut(id, writer, folder, array) for id, array in arrays(5).items()]
    name = f"cuts{suffix}"
    lhotse.CutSet.from_cuts(cuts).to_file(folder / name)
    return name


def _cut(id: str, writer: Any, folder: Path, array: Array) -> Any:
    cut = cut_of(id, writer, array)
    cut.features.storage_path = str(Path(writer.storage_path).relative_to(folder))
    cut.custom = {"snr": 3.5, "codes": [1, 2], "path": {"not": "plain"}}
    return cut


def _add_lhotse(storage: str, suffix: str) -> None:
    def make(folder: Path) -> str:
        return _lhotse(storage, folder, suffix)

    MADE[f"lhotse_{storage.removesuffix('Writer')}"] = "lhotse", make


for _number, _storage in enumerate(
    ["NumpyHdf5", "LilcomHdf5", "ChunkedLilcomHdf5", "LilcomChunky", "NumpyFiles", "LilcomFiles"]
):
    _add_lhotse(f"{_storage}Writer", (".jsonl", ".jsonl.gz", ".json", ".yaml")[_number % 4])


@source("lhotse")
def lhotse_shar(folder: Path) -> str:
    name = _lhotse("LilcomChunkyWriter", folder, ".jsonl")
    loaded = lhotse.CutSet.from_file(folder / name).to_eager()
    for cut in loaded:
        cut.features.storage_path = f"{folder}/{cut.features.storage_path}"
    (folder / "shar").mkdir()
    loaded.to_shar(folder / "shar", fields={"features": "lilcom"}, shard_size=2)
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    return "shar"


@source("webdataset")
def webdataset(folder: Path) -> str:
    for shard in range(2):
        members: dict[str, bytes] = {}
        for id in IDS[shard * 2 : shard * 2 + 2]:
            buffer = io.BytesIO()
            np.save(buffer, arrays()[id])
            members |= {f"{id}.feats.npy": buffer.getvalue(), f"{id}.txt": b"a word"}
            members |= {f"{id}.cls": b"3", f"{id}.json": b'{"snr": 1.5, "codes": [1, 2]}'}
        (folder / f"{shard}.tar").write_bytes(_tar(members))
    return ""


def _tar(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1.5  # a header of PAX before each
            file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def mutated(path: Path, other: bytes, chance: Random) -> bytes:
    """Return other bytes for a file of a source; `other` are those of another one."""
    data = path.read_bytes()
    if data and chance.random() < 0.75:
        with suppress(*BROKEN):  # where it was mutated before
            return _put_together(path.name, data, chance)
    return mutated_bytes(data, other, chance)


def _put_together(name: str, data: bytes, chance: Random) -> bytes:
    if name.endswith(".jsonl.gz"):
        return _regzipped(data, chance)
    if name.endswith((".jsonl", ".json", ".zarray", ".zgroup")):
        return _other_lines(data, chance)
    if name.endswith(".yaml"):
        return _other_text(data, chance)
    if name.endswith(".pt"):
        return _other_zip(data, chance)
    if name.endswith(".tar"):
        return _other_tar(data, chance)
    if name.endswith((".npy", ".scp", ".len", ".tsv", "text", "utt2dur", "frame_shift", "_keys")):
        return _other_text(data, chance)
    if name.endswith(".ark"):
        return _other_archive(data, chance)
    return _other_words(data, chance)


def _other_words(data: bytes, chance: Random) -> bytes:
    """Set numbers of 1, 2, 4 or 8 bytes to extreme ones, at the front above all."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        size = chance.choice((1, 2, 4, 8, 8))
        end = chance.choice((64, 512, len(changed), len(changed)))
        at = chance.randrange(max(min(end, len(changed)) - size, 1))
        at -= chance.choice((0, at % size))
        limit = chance.choice((*LIMITS, 2, 3, 16, 1 << 20, 1 << 31, 1 << 40, 1 << 55, len(data)))
        changed[at : at + size] = (limit % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(changed)


def _other_archive(data: bytes, chance: Random) -> bytes:
    """Change the head of an object of Kaldi's."""
    heads = [match.start() for match in re.finditer(rb"\0B", data)]
    if not heads:
        return _other_words(data, chance)
    at = chance.choice(heads)
    kinds = (b"FM ", b"DM ", b"FV ", b"DV ", b"CM ", b"CM2 ", b"CM3 ", b"\4\1\0\0\0", b"T", b"\x08")
    head = bytearray(data[at : at + 24])
    if chance.random() < 0.4:
        kind = chance.choice(kinds)
        head[2 : 2 + len(kind)] = kind
    else:
        place = chance.randrange(2, 20)
        head[place : place + 4] = struct.pack("<I", chance.choice(LIMITS) % (1 << 32))
    return data[:at] + bytes(head) + data[at + 24 :]


def _other_text(data: bytes, chance: Random) -> bytes:
    """Change a number that is written in digits, or lines."""
    front, rest = data[:4096], data[4096:]
    found = [*re.finditer(rb"\d+", front)]
    if found and chance.random() < 0.7:
        match = chance.choice(found)
        number = chance.choice((*NUMBERS, match[0] * 2, match[0][:-1]))
        return front[: match.start()] + number + front[match.end() :] + rest
    lines = front.split(b"\n")
    at = chance.randrange(len(lines))
    line = lines[at].split(b" ")
    line[chance.randrange(len(line))] = chance.choice((*WORDS, *lines))
    lines[at : at + 1] = chance.choice(([b" ".join(line)], [], [lines[at]] * 2, [lines[at]] * 500))
    return b"\n".join(lines) + rest


def _other_lines(data: bytes, chance: Random) -> bytes:
    """Change values of lines of JSON."""
    lines = data.splitlines()
    at = chance.randrange(len(lines))
    try:
        other = mutated_json(json.loads(lines[at]), chance)
        lines[at] = json.dumps(other).encode()
    except (ValueError, RecursionError):
        return _other_text(data, chance)
    return b"\n".join(lines * chance.choice((1, 1, 1, 2))) + b"\n" * chance.choice((0, 1, 1, 200))


def _regzipped(data: bytes, chance: Random) -> bytes:
    changed = gzip.compress(_other_lines(gzip.decompress(data), chance), 1)
    match chance.randrange(8):
        case 0:
            return changed + gzip.compress(bytes(1 << 22), 1)
        case 1:
            return changed[: chance.randrange(len(changed))]
    return changed


def _other_pickle(data: bytes, chance: Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2))):
        at = chance.randrange(2, len(data))
        put = chance.choice(OPCODES) * chance.choice((1, 1, 1, 3, 3000))
        match chance.randrange(3):
            case 0:
                data = data[:at] + put + data[at:]
            case 1:
                data = data[:at] + put + data[at + len(put) :]
            case _:
                data = re.sub(rb"K.", lambda _: chance.choice(OPCODES), data, count=1, flags=re.S)
    return data


def _other_zip(data: bytes, chance: Random) -> bytes:
    """Put members of a `.pt` together again: changed, deflated, doubled, renamed, or lost."""
    if chance.random() < 0.3:  # sizes, offsets and flags of the directory
        at = data.rfind(b"PK\1\2", 0, chance.choice((len(data), max(len(data) // 2, 64))))
        at = max(at, 0)
        return data[:at] + _other_words(data[at : at + 46], chance) + data[at + 46 :]
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(out, "w") as new,
        warnings.catch_warnings(action="ignore", category=UserWarning),  # of one name twice
    ):
        infos = old.infolist()
        chosen = chance.choice([info.filename for info in infos] + [infos[0].filename] * 4)
        for info in infos:
            content, name = old.read(info), info.filename
            way = zipfile.ZIP_STORED
            if name == chosen:
                match chance.randrange(7):
                    case 0:
                        way = zipfile.ZIP_DEFLATED
                    case 1:
                        content, way = content + bytes(1 << 21), zipfile.ZIP_DEFLATED
                    case 2:
                        name = f"archive/{chance.choice(NAMES)}"
                    case 3:
                        continue
                    case 4:
                        content = mutated_bytes(content, content, chance)
                    case _ if name.endswith(".pkl"):
                        content = _other_pickle(content, chance)
                    case _:
                        content = content[: chance.randrange(len(content) + 1)]
            new.writestr(zipfile.ZipInfo(name), content, way)
    return out.getvalue()


def _other_tar(data: bytes, chance: Random) -> bytes:
    """Change a field of a header, with a checksum that is right, or the bytes of a member."""
    headers = [at for at in range(0, len(data), BLOCK) if data[at + 257 : at + 262] == b"ustar"]
    at = chance.choice(headers)
    if chance.random() < 0.3:  # the bytes of the member
        begin = at + BLOCK
        return (
            data[:begin] + _other_text(data[begin : begin + BLOCK], chance) + data[begin + BLOCK :]
        )
    block = bytearray(data[at : at + BLOCK])
    match chance.randrange(3):
        case 0:
            block[124:136] = chance.choice((*TAR_SIZES, b"%011o\0" % chance.randrange(1 << 14)))
        case 1:
            block[156:157] = chance.choice([bytes([kind]) for kind in b"01256xgLKSV7\0"])
        case _:
            block[:100] = chance.choice(NAMES).encode()[:100].ljust(100, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return data[:at] + bytes(block) * chance.choice((1, 1, 1, 2)) + data[at + BLOCK :]
