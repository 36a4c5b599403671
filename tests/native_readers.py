"""Readers of our containers that know nothing of featcache: each format's own library."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from featcache.interface import Array, Extent, FeatureSpec

Arrays = Mapping[str, Array]
Places = Mapping[str, tuple[Extent, ...]]


def read_npy(directory: Path, feature: FeatureSpec, places: Places) -> Arrays:
    """Cut the one array of a feature by the offsets of the utterances: a `.npy` stores no ids."""
    path = directory / f"{feature.name}.npy"
    frames = np.load(path)
    header_bytes = path.stat().st_size - frames.nbytes
    arrays = {}
    if feature.codec is not None:
        for id, extents in places.items():
            starts = [each.offset - header_bytes for each in extents]
            blocks = [
                numbers_of(frames[start : start + each.nbytes], feature.dims)
                for start, each in zip(starts, extents, strict=True)
            ]
            arrays[id] = shaped(
                feature, np.concatenate(blocks or [np.empty((0, *feature.dims), "f4")])
            )
        return arrays
    for id, extents in places.items():
        nbytes = sum(extent.nbytes for extent in extents)
        start = (extents[0].offset - header_bytes) // feature.row_bytes if extents else 0
        arrays[id] = shaped(feature, frames[start : start + nbytes // feature.row_bytes])
    return arrays


def numbers_of(block: NDArray[np.uint8], dims: tuple[int, ...]) -> Array:
    """Make numbers of a block of int8."""
    rows, width, octets = int(block[4:8].view("<u4")[0]), math.prod(dims), block[8:]
    if rows <= 2:
        return np.asarray(octets.view("<f4")).reshape(rows, *dims)
    low = octets[: 4 * width].view("<f4")
    step = (octets[4 * width : 6 * width].view("<u2").astype("<u4") << 16).view("<f4")
    codes = octets[6 * width :].reshape(rows, width)
    return np.asarray(low + codes.astype("f4") * step).reshape(rows, *dims)


def read_hdf5(directory: Path, feature: FeatureSpec, places: Places) -> Arrays:
    import h5py
    import lilcom

    (path,) = directory.glob("*.h5")
    arrays = {}
    with h5py.File(path) as file:
        for name, dataset in file[feature.name].items():
            content: Any = dataset[()]
            if isinstance(content, np.void):
                content = lilcom.decompress(content.tobytes())
            rows = len(content) if feature.has_frames else 1
            arrays[unquote(name)] = content.reshape(feature.shape(rows))
    return arrays


def read_shards(directory: Path, feature: FeatureSpec, places: Places) -> Arrays:
    import webdataset

    shards = [str(path) for path in sorted(directory.glob("shard-*.tar"))]
    with warnings.catch_warnings():
        # webdataset leaves closing its files to the collector
        warnings.simplefilter("ignore", ResourceWarning)
        samples = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode()
        return {sample["json"]["id"]: sample[f"{feature.name}.npy"] for sample in samples}


def read_zarr(directory: Path, feature: FeatureSpec, places: Places) -> Arrays:
    import zarr

    group: Any = zarr.open_group(directory / f"{feature.name}.zarr", mode="r")
    ids, frames = [str(id) for id in group["ids"][:]], group[feature.name][...]
    if not feature.has_frames:
        return dict(zip(ids, frames, strict=True))
    ends = group["offsets"][:] + group["lengths"][:]
    return {
        id: frames[start:end] for id, start, end in zip(ids, group["offsets"][:], ends, strict=True)
    }


def read_lilcom(directory: Path, feature: FeatureSpec, places: Places) -> Arrays:
    """Read by lhotse's keys, which are made of offsets: an archive stores no ids."""
    from lhotse.features.io import LilcomChunkyReader

    reader = LilcomChunkyReader(directory / f"{feature.name}.lca")
    arrays = {}
    for id, extents in places.items():
        key = (
            ",".join(map(str, [extents[0].offset, *(e.nbytes for e in extents)])) if extents else ""
        )
        rows = reader.read(key) if key else np.zeros((0, *feature.dims), np.float32)
        arrays[id] = shaped(feature, rows)
    return arrays


def shaped(feature: FeatureSpec, rows: Array) -> Array:
    return rows.reshape(feature.shape(len(rows)))
