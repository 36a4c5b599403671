"""Datasets that are no plain arrays of whole frames are refused, each by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_stores import adopted

from featcache.errors import AdoptionError

h5py = pytest.importorskip("h5py")

ZEROS = np.zeros((3, 5), np.float32)


def variable_length(file: Any) -> None:
    file.create_dataset("bad", (2,), h5py.vlen_dtype(np.float32))[0] = np.ones(3, np.float32)


def compound(file: Any) -> None:
    file["bad"] = np.zeros(3, [("a", "f4"), ("b", "f4")])


def big_endian(file: Any) -> None:
    file["bad"] = ZEROS.astype(">f4")


def complex_numbers(file: Any) -> None:
    file["bad"] = ZEROS.astype("c8")


def text(file: Any) -> None:
    file["bad"] = "hello"


def opaque(file: Any) -> None:
    file["bad"] = np.void(b"12345")


def external_link(file: Any) -> None:
    file["bad"] = h5py.ExternalLink("other.h5", "/x")


def soft_link(file: Any) -> None:
    file["bad"] = h5py.SoftLink("/good")


def external_file(file: Any) -> None:
    file.create_dataset("bad", (3, 5), np.float32, external=[("raw.bin", 0, 60)])[...] = 1


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((3, 5), np.float32)
    layout[...] = h5py.VirtualSource(".", "good", (3, 5))
    file.create_virtual_dataset("bad", layout)


def never_written(file: Any) -> None:
    file.create_dataset("bad", (3, 5), np.float32)


def chunks_never_written(file: Any) -> None:
    file.create_dataset("bad", (30, 5), np.float32, chunks=(10, 5))[20:] = 1


def no_shape(file: Any) -> None:
    file["bad"] = h5py.Empty("f4")


def lzf(file: Any) -> None:
    file.create_dataset("bad", data=ZEROS, chunks=(3, 5), compression="lzf")


def fletcher32(file: Any) -> None:
    file.create_dataset("bad", data=ZEROS, chunks=(3, 5), fletcher32=True)


def filters_left_out(file: Any) -> None:
    made = file.create_dataset("bad", (3, 5), np.float32, chunks=(3, 5), compression="gzip")
    made.id.write_direct_chunk((0, 0), bytes(60), filter_mask=1)


def compact(file: Any) -> None:
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((3, 5))
    dataset = h5py.h5d.create(file.id, b"bad", h5py.h5t.IEEE_F32LE, space, made)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, ZEROS)


def numbers_of_24_bits(file: Any) -> None:
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_precision(24)
    h5py.h5d.create(file.id, b"bad", kind, h5py.h5s.create_simple((3, 5)))
    file["bad"][...] = 1


def other_axes(file: Any) -> None:
    file["bad"] = ZEROS[:, :, np.newaxis]


def other_dims(file: Any) -> None:
    file["bad"] = ZEROS[:, :4]


def other_dtype(file: Any) -> None:
    file["bad"] = ZEROS.astype(np.float64)


def other_filters(file: Any) -> None:
    file.create_dataset("bad", data=ZEROS, chunks=(3, 5), compression="gzip")


NOT_HERE = "is stored in other files"
REFUSED: list[tuple[Callable[[Any], None], str]] = [
    (variable_length, "variable length"),
    (compound, "compound"),
    (big_endian, "big-endian"),
    (complex_numbers, "c8"),
    (text, "variable length"),
    (opaque, "opaque bytes"),
    (external_link, "is a link"),
    (soft_link, "is a link"),
    (external_file, NOT_HERE),
    (virtual, NOT_HERE),
    (never_written, "never written"),
    (chunks_never_written, "never written"),
    (no_shape, "no shape"),
    (lzf, "filters lzf"),
    (fletcher32, "filters fletcher32"),
    (filters_left_out, "filters were left out"),
    (compact, "is stored in the header"),
    (numbers_of_24_bits, "no plain numbers"),
    (other_axes, "number of axes"),
    (other_dims, "shape of a frame"),
    (other_dtype, "dtype"),
    (other_filters, "with gzip|without a codec"),
]


@pytest.mark.parametrize(("spoil", "why"), REFUSED, ids=[spoil.__name__ for spoil, _ in REFUSED])
def test_anything_else_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], None], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with h5py.File("feats.h5", "w") as file:
        file["good"] = ZEROS
        spoil(file)
    with pytest.raises(AdoptionError, match=why) as refused:
        adopted(tmp_path / "feats.h5", tmp_path, pattern="{id}")
    assert "'bad'" in str(refused.value)
    assert "feats.h5" in str(refused.value) or "'feats'" in str(refused.value)
    assert not (tmp_path / "cache").exists()
