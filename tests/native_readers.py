"""Readers of our containers that know nothing of featcache: each format's own library."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from featcache.interface import Array, Extent, FeatureSpec

Arrays = Mapping[str, Array]
Places = Mapping[str, tuple[Extent, ...]]


def read_npy(directory: Path, feature: FeatureSpec, places: Places) -> Arrays:
    """Cut the one array of a feature by the offsets of the utterances: a `.npy` stores no ids."""
    path = directory / f"{feature.name}.npy"
    frames = np.load(path)
    header_bytes = path.stat().st_size - frames.nbytes
    arrays = {}
    for id, extents in places.items():
        nbytes = sum(extent.nbytes for extent in extents)
        start = (extents[0].offset - header_bytes) // feature.row_bytes if extents else 0
        arrays[id] = shaped(feature, frames[start : start + nbytes // feature.row_bytes])
    return arrays


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
