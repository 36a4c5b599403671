"""Peers that stream, or take records by number, where they are installed: LitData, Lance,
ArrayRecord and Grain, each set up as its documentation advises.

    pip install litdata pylance array_record grain
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import MELS, Floats
from method import Batch, Feed, Method, Rows
from peers import padded

PACKAGES = {
    "litdata": "litdata",
    "lance": "pylance",
    "array_record": "array_record",
    "grain": "grain",
}
CHUNK = "64MB"  # LitData's default
THREADS = 2  # of Grain, which has 16 by default: this machine has two cores


def installed() -> list[str]:
    """Return the names of the packages that are."""
    return [package for name, package in PACKAGES.items() if find_spec(name)]


def write_streamers(root: Path, arrays: Sequence[Floats]) -> None:
    """Write the formats of those that are installed."""
    for name, (write, _) in FORMATS.items():
        if find_spec(name):
            write(root, arrays)


def streamers(root: Path) -> list[Method]:
    """Return the methods of those that are installed."""
    methods = []
    for name, (_, make) in FORMATS.items():
        if find_spec(name):
            methods += make(root)
    return methods


def _paddable(row: int, flat: Any) -> tuple[int, torch.Tensor]:
    return row, torch.from_numpy(np.array(flat, np.float32, copy=None)).view(-1, MELS)


# LitData: chunks of 64 MB, streamed in order by workers; a batch of random ones by number.


def _litdata_sample(arrays: Sequence[Floats], row: int) -> dict[str, Any]:
    return {"row": row, "fbank": torch.from_numpy(arrays[row])}


def _write_litdata(root: Path, arrays: Sequence[Floats]) -> None:
    import litdata

    litdata.optimize(
        fn=partial(_litdata_sample, arrays),
        inputs=list(range(len(arrays))),
        output_dir=str(root / "litdata"),
        chunk_bytes=CHUNK,
        num_workers=1,
        start_method="fork",
    )


def _pairs(items: Sequence[dict[str, Any]]) -> Batch:
    return padded([(item["row"], item["fbank"]) for item in items])


def _litdata_in_order(directory: Path) -> Feed:
    import litdata

    dataset = litdata.StreamingDataset(str(directory), shuffle=False)
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=32, num_workers=2, collate_fn=_pairs, persistent_workers=True
    )

    def feed(rows: Rows) -> Iterator[Batch]:
        yield from loader

    return feed


def _litdata_by_number(directory: Path) -> Feed:
    import litdata

    dataset = litdata.StreamingDataset(str(directory), shuffle=False)

    def feed(rows: Rows) -> Iterator[Batch]:
        for batch in rows:
            yield _pairs([dataset[row] for row in batch])

    return feed


def _litdata(root: Path) -> list[Method]:
    logging.getLogger("litdata").setLevel(logging.ERROR)
    at = root / "litdata"
    return [
        Method("LitData in order, 2 workers", "peer", partial(_litdata_in_order, at), at),
        Method("LitData by number + pad", "peer", partial(_litdata_by_number, at), at),
    ]


# Lance: a table with a row an utterance; `take` reads the rows of a batch in threads of its own.


def _write_lance(root: Path, arrays: Sequence[Floats]) -> None:
    import lance
    import pyarrow as pa

    ends = np.cumsum([0, *(array.size for array in arrays)])
    flat = pa.array(np.concatenate([array.reshape(-1) for array in arrays]))
    column = pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), flat)
    lance.write_dataset(pa.table({"fbank": column}), str(root / "lance"))


def _lance_take(directory: Path) -> Feed:
    import lance

    dataset = lance.dataset(str(directory))

    def feed(rows: Rows) -> Iterator[Batch]:
        for batch in rows:
            column = dataset.take(list(batch), columns=["fbank"])["fbank"].combine_chunks()
            flat, ends = column.values.to_numpy(), column.offsets.to_numpy()
            pieces = [flat[begin:end] for begin, end in itertools.pairwise(ends)]
            yield padded([_paddable(row, each) for row, each in zip(batch, pieces, strict=True)])

    return feed


def _lance(root: Path) -> list[Method]:
    at = root / "lance"
    return [Method("Lance take + pad", "peer", partial(_lance_take, at), at)]


# ArrayRecord: a record an utterance, uncompressed; it reads the records of a batch in threads.


def _write_array_record(root: Path, arrays: Sequence[Floats]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    (root / "array_record").mkdir()
    path = root / "array_record" / "fbank.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for array in arrays:
        writer.write(array.tobytes())
    writer.close()


def _records(directory: Path) -> Any:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    return ArrayRecordDataSource([str(directory / "fbank.array_record")])


def _array_record_by_number(directory: Path) -> Feed:
    source = _records(directory)

    def feed(rows: Rows) -> Iterator[Batch]:
        for batch in rows:
            records = source.__getitems__(list(batch))
            pairs = zip(batch, records, strict=True)
            yield padded([_paddable(row, np.frombuffer(each, "<f4")) for row, each in pairs])

    return feed


def _grain_feed(directory: Path) -> Feed:
    import grain

    source = _records(directory)

    def read(row: int) -> tuple[int, torch.Tensor]:
        return _paddable(row, np.frombuffer(source[row], "<f4"))

    def feed(rows: Rows) -> Iterator[Batch]:
        chosen = grain.MapDataset.source([row for batch in rows for row in batch]).map(read)
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=128)
        yield from chosen.to_iter_dataset(options).batch(len(rows[0]), batch_fn=padded)

    return feed


def _array_record(root: Path) -> list[Method]:
    at = root / "array_record"
    methods = [Method("ArrayRecord + pad", "peer", partial(_array_record_by_number, at), at)]
    if find_spec("grain"):
        name = f"Grain over ArrayRecord + pad, {THREADS} threads"
        methods.append(Method(name, "peer", partial(_grain_feed, at), at))
    return methods


Write = Callable[[Path, Sequence[Floats]], None]
FORMATS: dict[str, tuple[Write, Callable[[Path], list[Method]]]] = {
    "litdata": (_write_litdata, _litdata),
    "lance": (_write_lance, _lance),
    "array_record": (_write_array_record, _array_record),
}
