"""Manifests of lhotse that cannot be adopted are refused, each with what is wrong and where."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lhotse
import numpy as np
import pytest
from foreign_stores import adopted
from lhotse_stores import whole_cuts

from featcache.errors import AdoptionError

Spoil = Callable[[dict[str, Any]], object]


def written(folder: Path, lines: list[Any]) -> Path:
    path = folder / "cuts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def cuts(folder: Path, storage: str = "numpy_hdf5") -> list[dict[str, Any]]:
    return [cut.to_dict() for cut in whole_cuts(storage, folder, count=2)]


def stored(cut: dict[str, Any]) -> Any:
    return cut["features"]


CHANGES: list[tuple[str, str, Spoil, str]] = [
    ("no file", "numpy_hdf5", lambda c: stored(c).update(storage_path="/no/file.h5"), "/no/file"),
    ("no dataset", "numpy_hdf5", lambda c: stored(c).update(storage_key="x"), "no dataset 'x'"),
    ("a group", "numpy_hdf5", lambda c: stored(c).update(storage_key="."), "no dataset|is no"),
    ("an address", "numpy_hdf5", lambda c: stored(c).update(storage_path="s3://a/b"), "no local"),
    ("memory", "numpy_hdf5", lambda c: stored(c).update(storage_type="memory_npy"), "memory_npy"),
    ("a cache", "numpy_hdf5", lambda c: stored(c).update(storage_type="featcache"), r"\.open\('/"),
    ("no lilcom", "numpy_hdf5", lambda c: stored(c).update(storage_type="lilcom_hdf5"), "holds no"),
    ("upwards", "numpy_files", lambda c: stored(c).update(storage_key="../x.npy"), "no path below"),
    ("no npy", "lilcom_files", lambda c: stored(c).update(storage_type="numpy_files"), "no .npy"),
    ("early", "numpy_hdf5", lambda c: stored(c).update(start=0.5), "before its features"),
    ("no key", "lilcom_chunky", lambda c: stored(c).update(storage_key="1,x"), "no key"),
    ("far", "lilcom_chunky", lambda c: stored(c).update(storage_key="9999999,1,1"), "blocks|bytes"),
    ("back", "lilcom_chunky", lambda c: stored(c).update(storage_key="-9,5", num_frames=9), "cut"),
    ("more", "lilcom_chunky", lambda c: stored(c).update(num_frames=10**6), "lilcom blocks"),
    ("axis 1", "numpy_hdf5", lambda c: c["custom"]["alignment"].update(temporal_dim=1), "axis 1"),
    ("lacks one", "numpy_hdf5", lambda c: c.update(features=None), "lacks it"),
    ("name", "numpy_hdf5", lambda c: c["custom"].update(feats=c["custom"]["xvector"]), "feature="),
    ("text", "numpy_hdf5", lambda c: stored(c).update(num_frames="9"), "line 2.*'9'"),
    ("less than 0", "numpy_hdf5", lambda c: stored(c).update(num_features=-1), "line 2"),
    ("no time", "numpy_hdf5", lambda c: stored(c).update(frame_shift=0), "line 2"),
    ("no number", "numpy_hdf5", lambda c: c.update(duration=float("nan")), "line 2"),
    ("no id", "numpy_hdf5", lambda c: c.pop("id"), "line 2"),
    ("a zero", "numpy_hdf5", lambda c: stored(c).update(storage_key="a\0b"), "line 2"),
    ("no type", "numpy_hdf5", lambda c: c.update(type="Cut"), "line 2"),
    ("a list", "numpy_hdf5", lambda c: c.update(supervisions=[1]), "line 2"),
]


@pytest.mark.parametrize(
    ("storage", "spoil", "why"), [change[1:] for change in CHANGES], ids=[c[0] for c in CHANGES]
)
def test_a_cut_that_cannot_be_adopted_is_named(
    tmp_path: Path, storage: str, spoil: Spoil, why: str
) -> None:
    lines = cuts(tmp_path / "data", storage)
    id = lines[1]["id"]
    spoil(lines[1])
    with pytest.raises(AdoptionError, match=why) as refused:
        adopted(written(tmp_path, lines), tmp_path)
    assert repr(id) in str(refused.value) or "line 2" in str(refused.value)


def test_cuts_that_are_computed_when_loaded_are_refused(tmp_path: Path) -> None:
    cut = whole_cuts("numpy_hdf5", tmp_path, count=1)[0]
    lhotse.CutSet.from_cuts([cut.pad(20)]).to_file(tmp_path / "cuts.jsonl")
    with pytest.raises(AdoptionError, match=r"line 1: cut '.*' is a MixedCut"):
        adopted(tmp_path / "cuts.jsonl", tmp_path)


def test_an_id_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    lines = cuts(tmp_path / "data")
    with pytest.raises(AdoptionError, match="'cut-rec/0' is there twice"):
        adopted(written(tmp_path, [*lines, lines[0]]), tmp_path)


def test_cuts_without_arrays_are_refused(tmp_path: Path) -> None:
    lines = cuts(tmp_path / "data")
    for line in lines:
        del line["features"], line["custom"]
    with pytest.raises(AdoptionError, match="names no features"):
        adopted(written(tmp_path, lines), tmp_path)


def test_features_of_no_recording_are_refused(tmp_path: Path) -> None:
    features = cuts(tmp_path / "data")[0]["features"]
    features["recording_id"] = None
    with pytest.raises(AdoptionError, match="manifest of the cuts"):
        adopted(written(tmp_path, [features]), tmp_path)


def test_lines_that_are_no_cuts_are_refused(tmp_path: Path) -> None:
    first = cuts(tmp_path / "data")[0]
    for line in ([1], "cut", 7, None, {"id": "x"}, {"type": "MonoCut"}):
        with pytest.raises(AdoptionError, match="line 2 is no cut"):
            adopted(written(tmp_path, [first, line]), tmp_path)
    path = written(tmp_path, [first])
    for text in ("{", "[" * 100_000, '{"id": "\ud800"}'.encode("utf-8", "replace").decode(), "\0"):
        path.write_text(json.dumps(first) + "\n" + text)
        with pytest.raises(AdoptionError, match=r"line 2 is no (cut|JSON)"):
            adopted(path, tmp_path)


def test_a_manifest_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cuts.jsonl.gz"
    lines = "".join(json.dumps(line) + "\n" for line in cuts(tmp_path / "data") * 50)
    whole = gzip.compress(lines.encode())
    for size in (20, len(whole) // 2, len(whole) - 4):
        path.write_bytes(whole[:size])
        with pytest.raises(AdoptionError, match=r"cuts\.jsonl\.gz"):
            adopted(path, tmp_path, kind="lhotse")


def test_blocks_that_are_not_there_are_an_error_when_read(tmp_path: Path) -> None:
    lines = cuts(tmp_path / "data", "lilcom_files")
    lines[1]["features"]["num_frames"] += 1
    lines[1]["duration"] += 0.01
    with (
        adopted(written(tmp_path, lines), tmp_path) as cache,
        pytest.raises(OSError, match="blocks are shorter"),
    ):
        cache.read(lines[1]["id"], "feats")


def test_a_heap_with_flipped_bytes_is_at_worst_refused(tmp_path: Path) -> None:
    source = written(tmp_path, cuts(tmp_path / "data", "chunked_lilcom_hdf5"))
    file, rng = tmp_path / "data" / "feats.h5", np.random.default_rng(3)
    whole, heap = file.read_bytes(), file.read_bytes().index(b"GCOL")
    refused = 0
    for number in range(80):
        data = bytearray(whole)
        for at in rng.integers(heap if number % 2 else 8, heap + 64 if number % 2 else 4096, 4):
            data[at] ^= int(rng.integers(1, 256))
        file.write_bytes(data)
        try:
            adopted(source, tmp_path / str(number)).close()
        except AdoptionError:
            refused += 1
    assert refused > 20
