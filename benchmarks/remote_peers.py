"""How fast utterances and windows come out of an object store that answers late: ours, the peers.

All read the same random utterances, whole or 50 frames of each, out of a bucket of `late_store.py`
on this machine, whose answers begin 30 ms after their requests; 64 requests at a time where a
method can. Each round opens everything anew, with nothing kept from the round before, and reads
utterances of its own; methods come in another order each round. What a method gives is compared
with the arrays first. Rates are of reading, opening is a column of its own; requests and bytes are
counted by the store. Methods that read one after the other read fewer.

    pip install s3fs litdata pylance
    python benchmarks/remote_peers.py [--utterances 4000] [--reads 2048] [--rounds 3]
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click
import corpus
import h5py
import numpy as np
import torch
from corpus import MELS, Floats
from late_store import LateStore, late_store
from machine import describe
from torch.nn.utils.rnn import pad_sequence

import featcache
from featcache.remote import RemoteOptions

BATCH, WINDOW, AT_A_TIME = 32, 50, 64
FEW = 64  # reads of who reads one after the other
DELAY_MS = 30.0
SECRETS = {"AWS_ACCESS_KEY_ID": "name", "AWS_SECRET_ACCESS_KEY": "word"}
FOR_ALL = {**SECRETS, "AWS_DEFAULT_REGION": "us-east-1"}
LIMIT, ADOPTED = "obstore, bytes that nobody looks at", "FeatureLoader, .h5 adopted"
BARS = ((ADOPTED, "h5py"), ("FeatureLoader", "Lance"), ("FeatureLoader", "LitData"))
PACKAGES = ("numpy", "torch", "h5py", "obstore", "s3fs", "litdata", "pylance")

T = TypeVar("T")
Cut = tuple[int, int, int]  # utterance, first frame, frames
Cuts = Sequence[Cut]
Feed = Callable[[Cuts], Iterable[torch.Tensor]]  # padded batches, in order


@dataclass(frozen=True)
class Store:
    """A bucket with the same utterances in all formats, and a directory for what one opening keeps.

    Args:
        url: of the server; the bucket is `bench`.
        here: the bucket's files.
        lengths: frames of each utterance.
        kept: an empty directory.
    """

    url: str
    here: Path
    lengths: Sequence[int]
    kept: Path


@dataclass(frozen=True)
class Method:
    """A way from the bucket to padded batches, of whole utterances, of windows, or both."""

    name: str
    open: Callable[[Store], Feed]
    whole: bool = True
    windows: bool = True
    most: int | None = None


@dataclass
class Figures:
    """Measurements of a method, a value a round."""

    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # of this process, a read
    open_s: list[float] = field(default_factory=list)
    open_requests: list[int] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)  # a read
    nbytes: list[float] = field(default_factory=list)  # times what was asked for


# What the methods are: a limit, ours, the peers.


def methods() -> list[Method]:
    """Return all whose packages are installed."""
    blocks = {"cache_type": "blockcache", "block_size": 8 << 20}
    found = [
        Method(LIMIT, _bare),
        Method("FeatureLoader", _feature_loader),
        Method("read_batch", _read_batch, windows=False),
        Method(ADOPTED, _adopted),
    ]
    if find_spec("s3fs"):
        found += [
            Method("h5py + s3fs, default cache", _h5py(), most=16),
            Method("h5py + s3fs, blockcache 8 MiB", _h5py(**blocks), most=FEW),
            Method("h5py + s3fs, no cache", _h5py(cache_type="none"), most=FEW),
        ]
    if find_spec("lance"):
        found += [
            Method("Lance take", _lance(1), windows=False),
            Method("Lance take, 8 batches at once", _lance(8), windows=False),
        ]
    if find_spec("litdata"):
        found += [
            Method("LitData read_window", _litdata(_one_after_the_other), most=FEW),
            Method("LitData aread_window, 64 at once", _litdata(_many_at_a_time)),
        ]
    return found


def _remote(store: Store) -> RemoteOptions:
    return RemoteOptions(pages=store.kept, endpoint=store.url, region="us-east-1")


def _bare(store: Store) -> Feed:
    obstore = importlib.import_module("obstore")
    client = {"allow_http": True, "pool_max_idle_per_host": str(AT_A_TIME)}
    bucket = obstore.store.S3Store("bench", endpoint=store.url, client_options=client)
    (file,) = store.here.glob("memmap/parts/*/fbank.npy")
    name, nbytes = file.relative_to(store.here).as_posix(), MELS * 4
    begins = file.stat().st_size - np.cumsum(store.lengths[::-1])[::-1] * nbytes

    async def read(number: int, cut: Cut) -> Any:
        begin = int(begins[cut[0]]) + cut[1] * nbytes
        data = await obstore.get_range_async(bucket, name, start=begin, length=cut[2] * nbytes)
        return np.frombuffer(data, np.float32).reshape(-1, MELS) if number < BATCH else None

    def feed(cuts: Cuts) -> Iterator[torch.Tensor]:
        found = asyncio.run(_at_a_time(itertools.starmap(read, enumerate(cuts))))
        return _batches(torch.from_numpy(np.copy(each)) for each in found[:BATCH])  # to compare

    return feed


async def _at_a_time(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    at_once = asyncio.Semaphore(AT_A_TIME)

    async def wait(coroutine: Coroutine[Any, Any, T]) -> T:
        async with at_once:
            return await coroutine

    return list(await asyncio.gather(*map(wait, coroutines)))


def _loader(table: featcache.FeatureTable) -> Feed:
    def feed(cuts: Cuts) -> Iterator[torch.Tensor]:
        batches = [
            [(row, slice(first, first + frames)) for row, first, frames in batch]
            for batch in _in_batches(cuts)
        ]
        loader = featcache.FeatureLoader(table, "fbank", batch_sampler=batches)
        for batch in loader:
            yield batch["fbank"]

    return feed


def _feature_loader(store: Store) -> Feed:
    return _loader(featcache.open("s3://bench/memmap", remote=_remote(store)))


def _read_batch(store: Store) -> Feed:
    table = featcache.open("s3://bench/memmap", remote=_remote(store))
    ids = corpus.make_ids(len(store.lengths))

    def feed(cuts: Cuts) -> Iterator[torch.Tensor]:
        for batch in _in_batches(cuts):
            yield torch.from_numpy(table.read_batch([ids[row] for row, _, _ in batch], "fbank")[0])

    return feed


def _adopted(store: Store) -> Feed:
    return _loader(featcache.open(store.here.parent / "adopted", remote=_remote(store)))


def _h5py(**how: Any) -> Callable[[Store], Feed]:
    def open_file(store: Store) -> Feed:
        s3fs = importlib.import_module("s3fs")
        system = s3fs.S3FileSystem(endpoint_url=store.url, skip_instance_cache=True)
        file = h5py.File(system.open("bench/h5/cache.hdf5", **how))
        ids = corpus.make_ids(len(store.lengths))

        def feed(cuts: Cuts) -> Iterator[torch.Tensor]:
            return _batches(
                torch.from_numpy(file[ids[row]][first : first + frames])
                for row, first, frames in cuts
            )

        return feed

    return open_file


def _lance(at_a_time: int) -> Callable[[Store], Feed]:
    def open_dataset(store: Store) -> Feed:
        lance = importlib.import_module("lance")
        options = {"endpoint": store.url, "region": "us-east-1", "allow_http": "true"}
        dataset = lance.dataset("s3://bench/lance", storage_options=options)

        def take(batch: Cuts) -> torch.Tensor:
            rows = [row for row, _, _ in batch]
            column = dataset.take(rows, columns=["fbank"])["fbank"].combine_chunks()
            flat, ends = column.values.to_numpy(), column.offsets.to_numpy()
            pieces = [flat[begin:end].reshape(-1, MELS) for begin, end in itertools.pairwise(ends)]
            return pad_sequence([torch.from_numpy(np.copy(each)) for each in pieces], True)

        def feed(cuts: Cuts) -> Iterator[torch.Tensor]:
            with ThreadPoolExecutor(at_a_time) as threads:
                yield from threads.map(take, _in_batches(cuts))

        return feed

    return open_dataset


def _litdata(read: Callable[[Any, Cuts], Iterable[Any]]) -> Callable[[Store], Feed]:
    def open_dataset(store: Store) -> Feed:
        litdata = importlib.import_module("litdata")
        temporal = importlib.import_module("litdata.streaming.temporal")
        downloader = importlib.import_module("litdata.streaming.downloader")
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # there is no setting for it
        logging.getLogger("litdata").setLevel(logging.ERROR)
        dataset = litdata.StreamingDataset(
            "s3://bench/litdata",
            cache_dir=str(store.kept),
            item_loader=temporal.TemporalArrayLoader(),
            storage_options={"endpoint_url": store.url},
        )
        assert len(dataset.frame_counts) == len(store.lengths)

        def feed(cuts: Cuts) -> Iterator[torch.Tensor]:
            return _batches(item["fbank"] for item in read(dataset, cuts))

        return feed

    return open_dataset


def _one_after_the_other(dataset: Any, cuts: Cuts) -> Iterator[Any]:
    for cut in cuts:
        yield dataset.read_window(*cut)


def _many_at_a_time(dataset: Any, cuts: Cuts) -> list[Any]:
    return asyncio.run(_at_a_time(dataset.aread_window(*cut) for cut in cuts))


def _in_batches(cuts: Cuts) -> list[Cuts]:
    return [cuts[at : at + BATCH] for at in range(0, len(cuts), BATCH)]


def _batches(arrays: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    each = iter(arrays)
    while batch := list(itertools.islice(each, BATCH)):
        yield pad_sequence(batch, batch_first=True)


# What is in the bucket.


def write(bucket: Path, count: int) -> list[Floats]:
    """Write all formats; returns the arrays."""
    ids, arrays = corpus.make_ids(count), corpus.make_arrays(count)
    config = featcache.FeatureStorageConfig("fbank")
    with featcache.CacheWriter(bucket / "memmap", [config]) as writer:
        for id, array in zip(ids, arrays, strict=True):
            writer.write(id, {"fbank": array})
    corpus.write_h5(bucket, ids, arrays)
    if find_spec("lance"):
        importlib.import_module("streamers")._write_lance(bucket, arrays)
    if find_spec("litdata"):
        _write_litdata(bucket, arrays)
    return arrays


def _write_litdata(bucket: Path, arrays: Sequence[Floats]) -> None:
    litdata = importlib.import_module("litdata")
    temporal = importlib.import_module("litdata.streaming.temporal")
    with redirect_stdout(sys.stderr):  # where its workers' words belong
        litdata.optimize(
            fn=partial(_record, arrays),
            inputs=list(range(len(arrays))),
            output_dir=str(bucket / "litdata"),
            chunk_bytes="64MB",
            num_workers=1,
            start_method="fork",
            item_loader=temporal.TemporalArrayLoader(),
        )


def _record(arrays: Sequence[Floats], row: int) -> dict[str, torch.Tensor]:
    return {"fbank": torch.from_numpy(arrays[row])}


# What is measured.


@click.command()
@click.option("--utterances", default=4000, show_default=True)
@click.option("--reads", default=2048, show_default=True, help="Of each round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--delay-ms", default=DELAY_MS, show_default=True)
@click.option("--only", default="", help="Methods whose names have this in them.")
def main(utterances: int, reads: int, rounds: int, delay_ms: float, only: str) -> None:
    """Print a table of whole utterances and one of windows."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # the peers' own
    os.environ.update(FOR_ALL)
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as name:
        root = Path(name)
        about = describe(root, *(each for each in PACKAGES if _is_there(each)))
        (root / "bench").mkdir()
        arrays = write(root / "bench", utterances)
        lengths = [len(array) for array in arrays]
        print(f"{about}, torch with one thread\n{_data(lengths)}, answers after {delay_ms:g} ms")
        chosen = [each for each in methods() if only in each.name]
        with late_store(root, delay_ms) as server:
            bench = _Bench(root, server, lengths)
            checked = list(zip(range(BATCH), arrays, strict=False))
            del arrays
            if any(method.name == ADOPTED for method in chosen):
                bench.adopt()
            for frames in (None, WINDOW):
                here = [each for each in chosen if (each.windows if frames else each.whole)]
                for method in here:
                    bench.check(method, checked, frames)
                table = {method.name: Figures() for method in here}
                for _ in range(rounds):
                    cuts = _cuts(random, lengths, reads, frames)
                    for number in random.permutation(len(here)).tolist():
                        bench.measure(here[number], cuts, table[here[number].name])
                report(table, frames, reads, rounds)


def _is_there(package: str) -> bool:
    return find_spec({"pylance": "lance"}.get(package, package)) is not None


def _data(lengths: Sequence[int]) -> str:
    size = sum(lengths) * MELS * 4 / 1e9
    shape = f"{corpus.FRAMES[0]} to {corpus.FRAMES[1]} frames x {MELS} float32"
    return f"{len(lengths)} utterances of {shape} ({size:.2f} GB), batches of {BATCH} random ones"


def _cuts(
    random: np.random.Generator, lengths: Sequence[int], count: int, frames: int | None
) -> list[Cut]:
    rows = random.permutation(len(lengths))[:count].tolist()
    if frames is None:
        return [(row, 0, lengths[row]) for row in rows]
    return [(row, int(random.integers(lengths[row] - frames + 1)), frames) for row in rows]


@dataclass
class _Bench:
    """A store with all formats, and how a method is tried on it."""

    root: Path
    server: LateStore
    lengths: Sequence[int]
    opened: int = 0

    def adopt(self) -> None:
        """Adopt the .h5 once, and print what that took: a cache that stays."""
        self.server.counts()
        began, store = time.perf_counter(), self._store()
        featcache.adopt(
            "s3://bench/h5/cache.hdf5",
            self.root / "adopted",
            feature="fbank",
            remote=_remote(store),
        )
        took, counts = time.perf_counter() - began, self.server.counts()
        print(
            f"the .h5 was adopted in {took:.1f} s, {counts.gets + counts.others} requests, "
            f"{counts.nbytes / 1e6:.1f} MB"
        )

    def check(
        self, method: Method, arrays: Sequence[tuple[int, Floats]], frames: int | None
    ) -> None:
        """See that a method gives what is in the arrays."""
        first = 0 if frames is None else 7
        cuts = [(row, first, frames or len(array)) for row, array in arrays]
        for batch in method.open(self._store())(cuts):
            for (row, array), found in zip(arrays, batch.numpy(), strict=True):
                wanted = array[first:][: frames or len(array)]
                np.testing.assert_array_equal(found[: len(wanted)], wanted, f"{method.name} {row}")
                assert not found[len(wanted) :].any(), method.name

    def measure(self, method: Method, cuts: Cuts, figures: Figures) -> None:
        """Add a round's figures."""
        gc.collect()
        self.server.counts()
        began = time.perf_counter()
        feed = method.open(self._store())
        opened = time.perf_counter()
        counts = self.server.counts()
        figures.open_s.append(opened - began)
        figures.open_requests.append(counts.gets + counts.others)
        cuts = cuts[: method.most]
        began, busy = time.perf_counter(), time.process_time()
        for batch in feed(cuts):
            del batch
        took, busy = time.perf_counter() - began, time.process_time() - busy
        counts = self.server.counts()
        figures.rates.append(len(cuts) / took)
        figures.cpu_ms.append(busy / len(cuts) * 1e3)
        figures.requests.append((counts.gets + counts.others) / len(cuts))
        asked = sum(frames for _, _, frames in cuts) * MELS * 4
        figures.nbytes.append(counts.nbytes / asked)

    def _store(self) -> Store:
        self.opened += 1
        kept = self.root / f"kept-{self.opened}"
        kept.mkdir()
        return Store(self.server.url, self.root / "bench", self.lengths, kept)


def report(table: dict[str, Figures], frames: int | None, reads: int, rounds: int) -> None:
    """Print a table."""
    what = "whole utterances" if frames is None else f"windows of {frames} frames"
    print(f"\n{reads} random {what} a round, median of {rounds} rounds")
    print(
        f"{'':36}{'open s':>8}{'requests':>10}{'a read':>8}{'x bytes':>9}{'CPU ms':>8}"
        f"{'reads/s':>9}{'least to most':>16}{'x limit':>9}"
    )
    rates = {name: float(np.median(each.rates)) for name, each in table.items()}
    for name, each in table.items():
        spread = f"{min(each.rates):.0f} to {max(each.rates):.0f}"
        print(
            f"{name:36}{np.median(each.open_s):8.2f}{np.median(each.open_requests):10.0f}"
            f"{np.median(each.requests):8.2f}{np.median(each.nbytes):9.2f}"
            f"{np.median(each.cpu_ms):8.2f}{rates[name]:9.0f}{spread:>16}"
            f"{rates[name] / max(rates.get(LIMIT, np.nan), 1e-9):9.3f}"
        )
    for ours, peer in BARS:
        found = {name: rate for name, rate in rates.items() if name.startswith(peer)}
        if ours in rates and found:
            best = max(found, key=found.__getitem__)
            print(f"{ours}: {rates[ours] / rates[best]:.1f} times {best}")


if __name__ == "__main__":
    main()
