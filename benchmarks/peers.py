"""The peers' ways to padded batches, each set up as its documentation advises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import zarr
from corpus import MELS
from method import Batch, Chosen, Feed, Method, Rows
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

Read = Callable[[int], torch.Tensor]


def peers(root: Path, ids: Sequence[str], lengths: Sequence[int]) -> list[Method]:
    """Return a method for each format, most with two worker processes."""
    spans = np.cumsum([0, *lengths]).tolist()
    h5, tars = root / "h5" / "cache.hdf5", root / "tars"
    by_key, by_span = partial(_h5_reader, h5, ids), partial(_zarr_reader, root / "zarr", spans)
    by_file = partial(_file_reader, root / "pt", ids)
    return [
        Method("h5py by key + pad, 2 workers", "peer", partial(_by_item, by_key, len(ids), 2), h5),
        Method("h5py by key + pad, 0 workers", "peer", partial(_by_item, by_key, len(ids), 0), h5),
        Method(
            "SpeechBrain CachedHDF5DynamicItem, 2 workers",
            "peer",
            partial(_speechbrain, h5.parent, ids),
            h5,
        ),
        Method(
            "lhotse numpy_hdf5, 2 workers",
            "peer",
            partial(_lhotse, root / "numpy_hdf5", ids),
            root / "numpy_hdf5",
        ),
        Method(
            "lhotse lilcom_chunky, 2 workers",
            "peer",
            partial(_lhotse, root / "lilcom_chunky", ids),
            root / "lilcom_chunky",
            tolerance=2**-5,  # its steps
        ),
        Method(
            "zarr by slice + pad, 2 workers",
            "peer",
            partial(_by_item, by_span, len(ids), 2),
            root / "zarr",
        ),
        Method("WebDataset in order, 2 workers", "peer", partial(_webdataset, tars), tars),
        Method(
            "HuggingFace datasets + pad, 2 workers",
            "peer",
            partial(_arrow, root / "arrow"),
            root / "arrow",
        ),
        Method(
            ".pt files + pad, 2 workers",
            "peer",
            partial(_by_item, by_file, len(ids), 2),
            root / "pt",
        ),
    ]


class Utterances(Dataset[tuple[int, torch.Tensor]]):
    """A data set of single utterances that opens what it reads in each worker: handles do not
    survive a fork.
    """

    def __init__(self, open: Callable[[], Read], count: int) -> None:
        self._open, self._count = open, count
        self._read: Read | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        if self._read is None:
            self._read = self._open()
        return row, self._read(row)


def padded(items: Sequence[tuple[int, torch.Tensor]]) -> Batch:
    """Collate single utterances."""
    tensors = [tensor for _, tensor in items]
    return (
        [row for row, _ in items],
        pad_sequence(tensors, batch_first=True),
        torch.tensor([*map(len, tensors)]),
    )


def _by_item(open: Callable[[], Read], count: int, workers: int) -> Feed:
    return _fed(Utterances(open, count), padded, workers)


def _fed(dataset: Any, collate: Callable[[Any], Batch], workers: int = 2) -> Feed:
    chosen = Chosen()
    loader = DataLoader(
        dataset,
        batch_sampler=chosen,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
    )

    def feed(rows: Rows) -> Iterator[Batch]:
        chosen.rows = rows
        yield from loader

    return feed


def _h5_reader(path: Path, ids: Sequence[str]) -> Read:
    file = h5py.File(path)
    return lambda row: torch.from_numpy(file[ids[row]][:])


def _zarr_reader(path: Path, ends: Sequence[int]) -> Read:
    array = zarr.open_array(path, mode="r")
    return lambda row: torch.from_numpy(np.asarray(array[ends[row] : ends[row + 1]]))


def _file_reader(directory: Path, ids: Sequence[str]) -> Read:
    return lambda row: torch.load(directory / f"{ids[row]}.pt")


def _speechbrain(directory: Path, ids: Sequence[str]) -> Feed:
    from speechbrain.dataio.batch import PaddedBatch
    from speechbrain.dataio.dataloader import SaveableDataLoader
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.integrations.hdf5.cached_item import CachedHDF5DynamicItem

    cached = CachedHDF5DynamicItem(
        directory, file_mode="r", takes=["id"], func=None, provides=["fbank"]
    )
    dataset = DynamicItemDataset(
        {id: {"row": row} for row, id in enumerate(ids)}, [cached], ["row", "fbank"]
    )
    chosen = Chosen()
    loader = SaveableDataLoader(
        dataset,
        batch_sampler=chosen,
        collate_fn=PaddedBatch,
        num_workers=2,
        persistent_workers=True,
    )

    def feed(rows: Rows) -> Iterator[Batch]:
        chosen.rows = rows
        for batch in loader:
            fbank, relative = batch.fbank
            yield list(batch.row), fbank, (relative * fbank.shape[1]).round().long()

    return feed


class Cuts(Dataset[Batch]):
    """lhotse's kind of data set: from the cuts of a batch to the batch."""

    def __getitem__(self, cuts: Any) -> Batch:
        from lhotse.dataset.collation import collate_matrices

        features = [cut.load_features() for cut in cuts]
        rows = [cut.custom["row"] for cut in cuts]
        return rows, collate_matrices(features), torch.tensor([cut.num_frames for cut in cuts])


def _lhotse(directory: Path, ids: Sequence[str]) -> Feed:
    from lhotse import CutSet

    cuts = {cut.id: cut for cut in CutSet.from_file(directory / "cuts.jsonl")}
    for row, id in enumerate(ids):
        cuts[id].custom = {"row": row}
    by_row = [cuts[id] for id in ids]
    chosen = Chosen()
    batches = _Mapped(chosen, lambda rows: CutSet.from_cuts(by_row[row] for row in rows))
    loader: DataLoader[Batch] = DataLoader(
        Cuts(), sampler=batches, batch_size=None, num_workers=2, persistent_workers=True
    )

    def feed(rows: Rows) -> Iterator[Batch]:
        chosen.rows = rows
        yield from loader

    return feed


class _Mapped:
    """A sampler that makes something of what another one gives."""

    def __init__(self, sampler: Chosen, make: Callable[[list[int]], Any]) -> None:
        self._sampler, self._make = sampler, make

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._sampler)


def _webdataset(directory: Path) -> Feed:
    import webdataset

    # a sequential format: batches are of neighbours, each worker reads half the shards
    dataset = webdataset.WebDataset(
        sorted(map(str, directory.glob("*.tar"))), shardshuffle=False
    ).decode()
    dataset = dataset.map(
        lambda sample: (int(sample["__key__"][4:]), torch.from_numpy(sample["fbank.npy"]))
    )
    loader = webdataset.WebLoader(
        dataset.batched(32, collation_fn=padded),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
    )

    def feed(rows: Rows) -> Iterator[Batch]:
        yield from loader

    return feed


def _arrow(directory: Path) -> Feed:
    import datasets

    return _fed(datasets.load_from_disk(directory).with_format("numpy"), _padded_arrow)


def _padded_arrow(items: Sequence[dict[str, Any]]) -> Batch:
    return padded(
        [(int(item["id"][4:]), torch.from_numpy(item["fbank"]).view(-1, MELS)) for item in items]
    )
