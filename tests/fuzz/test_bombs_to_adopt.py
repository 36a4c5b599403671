"""Small sources that claim, or inflate to, gigabytes: refused in a second, before they take memory.

The pattern of each: a size stands in a header or in a directory, and few bytes or none behind it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h5py
import lilcom
import numpy as np
import pytest
import torch
from fuzz_children import run_inputs

import featcache
from featcache.errors import AdoptionError

HUGE = 1 << 55
MAKERS: dict[str, Callable[[Path], str]] = {}  # writes a source in a folder, returns its name
ZEROS = bytes(1 << 20)


def bomb(make: Callable[[Path], str]) -> Callable[[Path], str]:
    MAKERS[make.__name__] = make
    return make


def _member_deflated(folder: Path, name: str) -> str:
    torch.save(torch.ones(3, 4), folder / "whole")
    with (
        zipfile.ZipFile(folder / "whole") as whole,
        zipfile.ZipFile(folder / "utt.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
    ):
        for info in whole.infolist():
            if not info.filename.endswith(name):
                file.writestr(zipfile.ZipInfo(info.filename), whole.read(info))
        with file.open(f"whole/{name}", "w", force_zip64=True) as member:
            for _ in range(400):
                member.write(ZEROS)
    (folder / "whole").unlink()
    return ""


@bomb
def pickle_deflated(folder: Path) -> str:
    return _member_deflated(folder, "data.pkl")


@bomb
def byteorder_deflated(folder: Path) -> str:
    return _member_deflated(folder, "byteorder")


@bomb
def numbers_deflated(folder: Path) -> str:
    return _member_deflated(folder, "data/0")


def _pickled(folder: Path, content: bytes) -> str:
    with zipfile.ZipFile(folder / "utt.pt", "w") as file:
        file.writestr("a/data.pkl", b"\x80\x02" + content + b".")
        file.writestr("a/data/0", bytes(64))
        file.writestr("a/byteorder", "little")
    return ""


def tensor_of(shape: bytes, strides: bytes) -> bytes:
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\x10tQ"
    end = b"\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + shape + strides + end


@bomb
def marks_and_tuples(folder: Path) -> str:
    return _pickled(folder, b"(" * 300_000 + b"(t" * 300_000)


@bomb
def tuples_that_double(folder: Path) -> str:
    """Print of 2 ** 60 elements, where a function is called that is none."""
    return _pickled(folder, b")" + b"q\0h\0\x86" * 60 + b")R")


@bomb
def a_list_of_one_long_text(folder: Path) -> str:
    text = b"X" + struct.pack("<I", 1 << 19) + b"a" * (1 << 19)
    return _pickled(folder, b"}X\1\0\0\0a](" + text + b"q\0" + b"h\0" * 90_000 + b"es")


@bomb
def lists_in_lists(folder: Path) -> str:
    return _pickled(folder, b"}X\1\0\0\0a" + b"]" * 50_000 + b"a" * 49_999 + b"s")


@bomb
def a_tensor_of_frames_without_numbers(folder: Path) -> str:
    long = b"\x8a\x08" + struct.pack("<q", HUGE)
    return _pickled(folder, tensor_of(b"(" + long + b"K\0t", b"(K\1K\1t"))


@bomb
def a_tensor_of_many_axes(folder: Path) -> str:
    long = b"\x8a\x07" + struct.pack("<q", HUGE)[:7]
    return _pickled(
        folder, tensor_of(b"(" + long * 60_000 + b"K\0t", b"(" + b"K\1" * 60_001 + b"t")
    )


def npy(descr: str, shape: str, length: int = 0) -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\2\0" + struct.pack("<I", len(header)) + header + bytes(length)


@bomb
def npy_frames_without_numbers(folder: Path) -> str:
    (folder / "utt.npy").write_bytes(npy("<f4", f"({HUGE}, 0)"))
    return ""


@bomb
def npy_of_many_axes(folder: Path) -> str:
    (folder / "utt.npy").write_bytes(npy("<f4", f"({'1, ' * 3_000})", 4))
    return ""


@bomb
def npy_header_of_megabytes(folder: Path) -> str:
    (folder / "utt.npy").write_bytes(npy("<f4", f"({'1, ' * 3_000_000})", 4))
    return ""


@bomb
def kaldi_frames_without_numbers(folder: Path) -> str:
    head = b"".join(struct.pack("<Bi", 4, size) for size in ((1 << 31) - 1, 0))
    (folder / "feats.ark").write_bytes(b"utt \0BFM " + head)
    return "feats.ark"


@bomb
def compressed_frames_without_numbers(folder: Path) -> str:
    (folder / "feats.ark").write_bytes(
        b"utt \0BCM2 " + struct.pack("<ffii", 0, 1, (1 << 31) - 1, 0)
    )
    return "feats.ark"


@bomb
def hdf5_frames_without_numbers(folder: Path) -> str:
    with h5py.File(folder / "feats.h5", "w") as file:
        file.create_dataset("utt", (HUGE, 0), "f4")
    return "feats.h5"


@bomb
def hdf5_chunks_without_any(folder: Path) -> str:
    with h5py.File(folder / "feats.h5", "w") as file:
        file.create_dataset("utt", (1 << 40, 4), "f4", chunks=(1024, 4))
    return "feats.h5"


@bomb
def hdf5_chunk_of_gigabytes(folder: Path) -> str:
    with h5py.File(folder / "feats.h5", "w") as file:
        rows = 1 << 26
        made = file.create_dataset("utt", (rows, 4), "f4", chunks=(rows, 4), compression="gzip")
        made.id.write_direct_chunk((0, 0), b"x\x9cc`\0\0\0\1\0\1")
    return "feats.h5"


def cut(number: int, **features: object) -> str:
    whole = {
        **{"type": "fbank", "num_frames": 100, "num_features": 4, "frame_shift": 0.01},
        **{"sampling_rate": 16000, "start": 0, "duration": 1, "storage_type": "lilcom_files"},
        **{"storage_path": "feats", "storage_key": "a.llc", "recording_id": "r", "channels": 0},
        **features,
    }
    content = {"id": f"cut-{number}", "start": 0, "duration": 1, "channel": 0, "supervisions": []}
    return json.dumps(content | {"type": "MonoCut", "features": whole}) + "\n"


def _gzipped(folder: Path, *pieces: bytes, times: int = 1) -> str:
    """Write a manifest of lines, the last of which is there many times."""
    *once, last = map(gzip.compress, pieces)  # members of a gzip file follow one another
    (folder / "cuts.jsonl.gz").write_bytes(b"".join(once) + last * times)
    return "cuts.jsonl.gz"


def _stored(folder: Path) -> dict[str, object]:
    np.save(folder / "a.npy", np.ones((100, 4), np.float32))
    return {"storage_type": "numpy_files", "storage_path": str(folder), "storage_key": "a.npy"}


@bomb
def manifest_of_one_line(folder: Path) -> str:
    return _gzipped(folder, cut(0, **_stored(folder)).encode(), ZEROS, times=400)


@bomb
def manifest_of_empty_lines(folder: Path) -> str:
    line = cut(0, **_stored(folder)).encode()
    return _gzipped(folder, line, b"\n" * (1 << 20), times=400)


@bomb
def manifest_of_one_cut_many_times(folder: Path) -> str:
    line = cut(0, **_stored(folder)).encode()
    return _gzipped(folder, line * 2_000, times=400)


@bomb
def manifest_of_long_texts(folder: Path) -> str:
    stored = _stored(folder)
    lines = [cut(number, **stored, more="x" * (1 << 21)).encode() for number in range(20)]
    return _gzipped(folder, *lines)


@bomb
def manifest_of_many_axes(folder: Path) -> str:
    stored = _stored(folder)
    array = {**stored, "shape": [1 << 47] * 200_000 + [0]}
    line = json.loads(cut(0, **stored))
    (folder / "cuts.jsonl").write_text(json.dumps(line | {"custom": {"a": array}}) + "\n")
    return "cuts.jsonl"


@bomb
def lilcom_block_of_gigabytes(folder: Path) -> str:
    zeros = lilcom.compress(np.zeros((1, 1_000_000), np.float32), tick_power=20)
    (folder / "a.llc").write_bytes(zeros)
    stored = {"storage_path": str(folder), "num_frames": 1 << 30, "num_features": 1 << 10}
    (folder / "cuts.jsonl").write_text(cut(0, **stored, duration=1 << 20))
    return "cuts.jsonl"


@bomb
def tar_json_of_megabytes(folder: Path) -> str:

    with tarfile.open(folder / "a.tar", "w") as file:
        for name, data in (
            ("u.npy", npy("<f4", "(1, 1)", 4)),
            ("u.json", b"[" + b"[]," * (1 << 23)),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return "a.tar"


def _with_a_hole(path: Path) -> str:
    """Make a file longer, by bytes that take no place on the disk."""
    os.truncate(path, 1 << 36)
    return path.name


@bomb
def scp_with_a_hole(folder: Path) -> str:
    (folder / "feats.ark").write_bytes(b"utt \0BFV \4\1\0\0\0" + bytes(4))
    (folder / "feats.scp").write_text("utt feats.ark:4\n")
    return _with_a_hole(folder / "feats.scp")


@bomb
def texts_with_a_hole(folder: Path) -> str:
    scp_with_a_hole(folder)
    (folder / "feats.scp").write_text("utt feats.ark:4\n")
    (folder / "text").write_text("utt a word\n")
    _with_a_hole(folder / "text")
    return "feats.scp"


@bomb
def lengths_with_a_hole(folder: Path) -> str:
    (folder / "a.npy").write_bytes(npy("<f4", "(1, 1)", 4))
    (folder / "a.len").write_text("1\n")
    _with_a_hole(folder / "a.len")
    return "a.npy"


@bomb
def archive_with_a_hole(folder: Path) -> str:
    scp_with_a_hole(folder)
    return _with_a_hole(folder / "feats.ark")


@bomb
def manifest_with_a_hole(folder: Path) -> str:
    (folder / "cuts.jsonl").write_text(cut(0, **_stored(folder)))
    return _with_a_hole(folder / "cuts.jsonl")


def _adopt(root: Path) -> Callable[[int, Path], str | None]:
    names = [*MAKERS]

    def work(number: int, directory: Path) -> str | None:
        source = root / names[number]
        into = directory / names[number]
        try:
            with featcache.adopt(source / (source / "named").read_text(), into) as cache:
                cache.collect()
                return f"was adopted: {cache.lengths('feats')[:3]}"
        except AdoptionError as error:
            return "was not recognised" if "recognised" in str(error) else None

    return work


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_bomb_to_adopt_is_refused_before_it_takes_time_or_memory(tmp_path: Path) -> None:
    for name, make in MAKERS.items():
        (tmp_path / name).mkdir()
        named = make(tmp_path / name)
        (tmp_path / name / "named").write_text(named)
    with suppress(AdoptionError):  # modules are imported before the time is taken
        featcache.adopt(tmp_path / "npy_of_many_axes", tmp_path / "none")
    outcomes = [*run_inputs(_adopt(tmp_path), range(len(MAKERS)), tmp_path / "work")]
    bad = [f"{[*MAKERS][each.number]}: {each.what} {each.where}" for each in outcomes if each.what]
    print(f"fuzz, bombs to adopt: {len(outcomes)} inputs: {len(bad)} did harm", *bad, sep="\n  ")
    assert len(outcomes) == len(MAKERS)
    assert not bad
