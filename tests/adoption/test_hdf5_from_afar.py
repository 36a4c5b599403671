"""HDF5 behind a URL: its bytes come by a Python file, which HDF5 reads with h5py's lock held."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from featcache.errors import AdoptionError, RemoteError
from featcache_backends._hdf5_datasets import COLLECTOR, Hdf5Datasets


class Source:
    """Bytes of a file; what is asked for first is told to `asked`."""

    def __init__(self, path: Path, asked: Callable[[int], object]) -> None:
        self.path, self.data, self.reads = path.name, path.read_bytes(), 0
        self.size, self._asked = len(self.data), asked

    def read(self, offset: int, nbytes: int) -> bytes:
        self.reads += 1
        self._asked(self.reads)
        return self.data[offset : offset + nbytes]

    def expect(self, offsets: Iterable[int], nbytes: int) -> None:
        list(offsets)


class Afar:
    """A place with one file, behind a URL."""

    is_local, name = False, "http://somewhere"

    def __init__(self, source: Source) -> None:
        self._source = source

    @contextmanager
    def open(self, path: str) -> Iterator[Source]:
        yield self._source


def opened(source: Source) -> Hdf5Datasets:
    place: Any = Afar(source)
    return Hdf5Datasets(place, source.path)


@pytest.fixture(params=["earliest", "latest"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "a.h5", "w", libver=request.param) as file:
        for number in range(12):
            file.create_dataset(f"u{number:03d}", data=np.ones((20, 8), "f4"))
        for number in range(3):
            how = {"chunks": (2, 8), "compression": "gzip"}
            file.create_dataset(f"g/c{number}", data=np.ones((60, 8), "f4"), **how)
        ids = [f"a{number}" for number in range(60)]
        file.create_dataset("ids", data=ids, dtype=h5py.string_dtype())
        elements = file.create_dataset("elements", (2,), h5py.vlen_dtype(np.uint8))
        for number in range(2):
            elements[number] = np.arange(50, dtype="u1")
    return tmp_path / "a.h5"


WAYS: dict[str, Callable[[Hdf5Datasets], object]] = {
    "place": lambda file: file.place("g/c1"),
    "read": lambda file: file.read("u003"),
    "read of chunks": lambda file: file.read("g/c1"),
    "read of some": lambda file: file.read("g/c1", slice(10, 30)),
    "texts": lambda file: file.texts("ids"),
    "readable": lambda file: file.readable("g/c1"),
    "blocks": lambda file: file.blocks("elements"),
    "in_root": lambda file: file.in_root(),
    "all": lambda file: list(file.all()),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_store_refuses_is_its_error_at_whichever_read(path: Path, way: str) -> None:
    counted = Source(path, lambda read: None)
    with closing(opened(counted)) as file:
        WAYS[way](file)
    for last in range(1, counted.reads + 1):

        def asked(read: int, last: int = last) -> None:
            if read == last:
                raise RemoteError("the store refuses")

        with (
            pytest.raises(RemoteError, match="the store refuses"),
            closing(opened(Source(path, asked))) as file,
        ):
            WAYS[way](file)


@pytest.mark.parametrize("way", WAYS)
def test_the_collector_is_off_at_every_read(path: Path, way: str) -> None:
    on: list[bool] = []
    source = Source(path, lambda read: on.append(gc.isenabled()))
    with closing(opened(source)) as file:
        WAYS[way](file)
    assert gc.isenabled()
    assert on
    assert not any(on)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_the_store_leaves_no_garbage_and_is_no_other_call_s(
    path: Path, way: str
) -> None:
    counted = Source(path, lambda read: None)
    with closing(opened(counted)) as file:
        opening = counted.reads
        WAYS[way](file)
    for last in range(opening + 1, counted.reads + 1):

        def asked(read: int, last: int = last) -> None:
            if read == last:
                raise RemoteError("the store refuses")

        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            with closing(opened(Source(path, asked))) as file:
                with suppress(RemoteError):
                    WAYS[way](file)
                with pytest.raises(AdoptionError, match="has no dataset 'unknown'"):
                    file.place("unknown")
            del file
            gc.collect()
            found = {type(each) for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert not {Hdf5Datasets, Source, RemoteError} & found


def test_the_collector_is_as_before_after_errors_and_in_a_fork() -> None:
    def interrupted() -> None:
        with COLLECTOR.off(), COLLECTOR.off():
            assert not gc.isenabled()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.isenabled()
    gc.disable()
    try:
        with COLLECTOR.off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    inside, done = threading.Event(), threading.Event()

    def read() -> None:
        with COLLECTOR.off():
            inside.set()
            done.wait(60)

    reading = threading.Thread(target=read)
    reading.start()
    assert inside.wait(20)
    child = os.fork()
    if not child:
        os._exit(0 if gc.isenabled() else 1)
    done.set()
    reading.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()
