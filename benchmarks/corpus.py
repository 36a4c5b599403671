"""The same utterances in the formats of all who are measured, each written by its own library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import zarr
from lhotse import CutSet, Features, LilcomChunkyWriter, MonoCut, NumpyHdf5Writer
from lhotse.features.io import FeaturesWriter
from numpy.typing import NDArray

import featcache

MELS = 80
FRAMES = (500, 1000)  # 5 to 10 s at 10 ms a frame
Floats = NDArray[np.float32]


def make_arrays(count: int) -> list[Floats]:
    """Return arrays of shape (frames, mels), float32, as log-mel energies are: smooth in time, of
    both signs.
    """
    random = np.random.default_rng(0)
    lengths = random.integers(FRAMES[0], FRAMES[1] + 1, count)
    return [
        random.standard_normal((length, MELS), np.float32) * 2 - 4 for length in lengths.tolist()
    ]


def make_ids(count: int) -> list[str]:
    """Return ids whose order is that of the arrays."""
    return [f"utt-{number:06d}" for number in range(count)]


def write_caches(root: Path, ids: Sequence[str], arrays: Sequence[Floats]) -> None:
    """Write ours: `memmap`, `hdf5` and, stored in 16 bits, `float16`."""
    for name, backend, dtype in (
        ("memmap", "memmap", "float32"),
        ("hdf5", "hdf5", "float32"),
        ("float16", "memmap", "float16"),
    ):
        config = featcache.FeatureStorageConfig("fbank", backend=backend, dtype=dtype)
        with featcache.CacheWriter(root / name, [config]) as writer:
            for id, array in zip(ids, arrays, strict=True):
                writer.write(id, {"fbank": array})


def write_h5(root: Path, ids: Sequence[str], arrays: Sequence[Floats]) -> None:
    """Write `h5/cache.hdf5`, a data set an utterance: the layout of most scripts and of
    SpeechBrain's cached item.
    """
    (root / "h5").mkdir()
    with h5py.File(root / "h5" / "cache.hdf5", "w") as file:
        for id, array in zip(ids, arrays, strict=True):
            file.create_dataset(id, data=array)


def write_lhotse(root: Path, ids: Sequence[str], arrays: Sequence[Floats]) -> None:
    """Write `numpy_hdf5` and `lilcom_chunky` with a manifest of cuts each."""
    for kind in (NumpyHdf5Writer, LilcomChunkyWriter):
        directory = root / kind.name
        directory.mkdir()
        with kind(str(directory / "feats")) as writer:
            cuts = [_cut(id, array, writer) for id, array in zip(ids, arrays, strict=True)]
        CutSet.from_cuts(cuts).to_file(directory / "cuts.jsonl")


def _cut(id: str, array: Floats, writer: FeaturesWriter) -> MonoCut:
    duration = len(array) / 100
    features = Features(
        type="fbank",
        num_frames=len(array),
        num_features=MELS,
        frame_shift=0.01,
        sampling_rate=16000,
        start=0,
        duration=duration,
        storage_type=writer.name,
        storage_path=writer.storage_path,
        storage_key=writer.write(id, array.copy()),  # lilcom overwrites what it is given
        recording_id=id,
        channels=0,
    )
    return MonoCut(id=id, start=0, duration=duration, channel=0, features=features)


def write_zarr(root: Path, arrays: Sequence[Floats]) -> None:
    """Write `zarr`: one array of all frames, uncompressed, in chunks of about an utterance."""
    stored = zarr.create_array(
        root / "zarr",
        shape=(sum(map(len, arrays)), MELS),
        chunks=(1000, MELS),
        dtype="float32",
        compressors=None,
    )
    stored[:] = np.concatenate(arrays)


def write_tars(root: Path, ids: Sequence[str], arrays: Sequence[Floats]) -> None:
    """Write `tars`, WebDataset shards of 100 utterances."""
    import webdataset

    (root / "tars").mkdir()
    with webdataset.ShardWriter(
        str(root / "tars" / "shard-%06d.tar"), maxcount=100, verbose=0
    ) as writer:
        for id, array in zip(ids, arrays, strict=True):
            writer.write({"__key__": id, "fbank.npy": array})


def write_arrow(root: Path, ids: Sequence[str], arrays: Sequence[Floats]) -> None:
    """Write `arrow`, a HuggingFace data set of flat lists of float32: its two-dimensional arrays
    are read slower.
    """
    import datasets

    def rows() -> Any:
        for id, array in zip(ids, arrays, strict=True):
            yield {"id": id, "fbank": array.reshape(-1)}

    features = datasets.Features(
        {"id": datasets.Value("string"), "fbank": datasets.List(datasets.Value("float32"))}
    )
    datasets.disable_progress_bars()
    datasets.Dataset.from_generator(
        rows, features=features, cache_dir=str(root / "building")
    ).save_to_disk(root / "arrow")


def write_files(root: Path, ids: Sequence[str], arrays: Sequence[Floats]) -> None:
    """Write `pt`, a file an utterance."""
    (root / "pt").mkdir()
    for id, array in zip(ids, arrays, strict=True):
        torch.save(torch.from_numpy(array), root / "pt" / f"{id}.pt")
