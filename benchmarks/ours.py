"""featcache's two ways to padded batches, and the limits that no way can pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import MELS, Floats
from method import Batch, Chosen, Feed, Method, Rows
from torch.utils.data import DataLoader

from featcache import FeatureDataset, FeatureLoader


def limits(root: Path, arrays: Sequence[Floats]) -> list[Method]:
    """Return plain copies into padded batches, from memory and from one mapped file."""
    ends = np.cumsum([len(array) for array in arrays]).tolist()
    spans = [(end - len(array), end) for array, end in zip(arrays, ends, strict=True)]
    file = next((root / "memmap").glob("parts/*/fbank.npy"))

    def mapped(buffers: int) -> Feed:
        bare = np.load(file, mmap_mode="r")
        return partial(_copies, [bare[start:end] for start, end in spans], buffers)

    return [
        Method(
            "RAM to RAM copy, the same buffer again",
            "limit",
            lambda: partial(_copies, arrays, 1),
            None,
        ),
        # what a training loop can have at best: it holds one batch while the next is made
        Method(
            "RAM to RAM copy, three buffers in turn",
            "limit",
            lambda: partial(_copies, arrays, 3),
            None,
        ),
        Method(
            "RAM to RAM copy, a new buffer each", "limit", lambda: partial(_copies, arrays, 0), None
        ),
        Method(
            "np.memmap slices, the same buffer again", "limit", partial(mapped, 1), root / "memmap"
        ),
        # as a loop needs it: the bar of the default FeatureLoader is 0.9 of it
        Method(
            "np.memmap slices, three buffers in turn", "limit", partial(mapped, 3), root / "memmap"
        ),
        Method(
            "the file in order, without batches",
            "limit",
            lambda: partial(_in_order, file),
            root / "memmap",
        ),
    ]


def _copies(arrays: Sequence[Floats], buffers: int, rows: Rows) -> Iterator[Batch]:
    """Copy into so many buffers in turn; 0: into a new one each time."""
    lengths = np.array([len(array) for array in arrays])
    kept = [_buffer(lengths, rows) for _ in range(buffers)]
    for number, batch in enumerate(rows):
        shape = (len(batch), int(lengths[batch].max()), MELS)
        buffer = kept[number % buffers] if buffers else np.empty(shape, np.float32).reshape(-1)
        padded = buffer[: shape[0] * shape[1] * MELS].reshape(shape)
        for out, row in zip(padded, batch, strict=True):
            array = arrays[row]
            out[: len(array)] = array
            out[len(array) :] = 0
        yield list(batch), torch.from_numpy(padded), torch.from_numpy(lengths[batch])


def _in_order(file: Path, rows: Rows) -> Iterator[Batch]:
    buffer = np.zeros(8 << 18, np.float32)
    with file.open("rb", buffering=0) as opened:
        for _ in rows:
            count = opened.readinto(buffer.data.cast("B")) // 4
            yield [], torch.from_numpy(buffer[:count]), torch.empty(0)


def _buffer(lengths: Any, rows: Rows) -> Floats:
    """Return room for the largest batch, its pages touched."""
    most = max(len(batch) * int(lengths[batch].max()) * MELS for batch in map(list, rows))
    buffer = np.empty(most, np.float32)
    buffer.fill(0)  # np.zeros maps pages, and touches none
    return buffer


def ours(root: Path) -> list[Method]:
    """Return `FeatureLoader` and torch's DataLoader over a `FeatureDataset`."""
    loader, workers = "FeatureLoader, {} thread{}", "DataLoader(FeatureDataset), {} workers"
    cache = root / "memmap"
    methods = [
        Method(loader.format(n, "s" * (n != 1)), "ours", partial(_loader, cache, n), cache)
        for n in (0, 1, 2)
    ]
    methods += [
        Method(workers.format(n), "ours", partial(_data_loader, cache, n), cache) for n in (0, 2)
    ]
    hdf5 = root / "hdf5"
    methods.append(
        Method(
            "FeatureLoader over an .h5 cache, 2 threads", "ours", partial(_loader, hdf5, 2), hdf5
        )
    )
    for name, open, count in ((loader, _loader, 2), (workers, _data_loader, 2)):
        half = f"float16 to float32: {name.format(count, 's')}"
        # of numbers below 16 in size half precision is off by 2**-8 at most
        methods.append(
            Method(half, "ours", partial(open, root / "float16", count), root / "float16", 2**-7)
        )
    return methods


def _loader(cache: Path, threads: int) -> Feed:
    chosen = Chosen()
    loader: FeatureLoader[dict[str, Any]] = FeatureLoader(
        cache, "fbank", batch_sampler=chosen, dtypes={"fbank": "float32"}, threads=threads
    )

    def feed(rows: Rows) -> Iterator[Batch]:
        chosen.rows = rows
        for batch, wanted in zip(loader, rows, strict=True):
            yield list(wanted), batch["fbank"], batch["fbank_lengths"]
            del batch  # its memory may be used again

    return feed


def _data_loader(cache: Path, workers: int) -> Feed:
    chosen = Chosen()
    loader = DataLoader(
        FeatureDataset(cache, "fbank", dtypes={"fbank": "float32"}),
        batch_sampler=chosen,
        collate_fn=FeatureDataset.collate,
        num_workers=workers,
        persistent_workers=workers > 0,
    )

    def feed(rows: Rows) -> Iterator[Batch]:
        chosen.rows = rows
        for batch, wanted in zip(loader, rows, strict=True):
            yield list(wanted), batch["fbank"], batch["fbank_lengths"]

    return feed
