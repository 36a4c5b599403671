"""HDF5 behind a URL: its bytes come by a Python file, which HDF5 reads with h5py's lock held."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from featcache.adoption.place import LocalPlace
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
        if not 0 <= offset <= offset + nbytes <= self.size:
            raise AdoptionError(f"{self.path!r} lacks the bytes from {offset}")
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


def outcome(read: Callable[[], object]) -> object:
    """Return what is read, or why it is refused, without paths and words of HDF5."""
    try:
        return read()
    except AdoptionError as error:
        return re.sub(r"[(;].*|^'[^']*'", "", str(error))


def content(open_file: Callable[[], Hdf5Datasets]) -> object:
    """Return where each dataset lies, or why it is refused."""
    with closing(open_file()) as file:
        return [(name, outcome(partial(file.place, name))) for name, _ in list(file.all())]


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_told_as_it_is_of_a_file_on_a_disk(path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    data = bytearray(path.read_bytes())
    unused = range(48, 56)  # the address of a block that is not there: one driver looks for it
    at_all = (at for at in range(len(data)) if data[at] not in (0, 63, 128))  # arrays are 1.0
    nodes = [at for at in at_all if at not in unused]
    for _ in range(25):
        damaged = data.copy()
        for at in chance.choice(nodes, chance.integers(1, 4)):
            damaged[at] = chance.integers(256)
        path.write_bytes(damaged)
        here, afar = LocalPlace(path.parent), Source(path, lambda read: None)
        local = outcome(partial(content, partial(Hdf5Datasets, here, path.name)))
        assert outcome(partial(content, partial(opened, afar))) == local


def test_ids_that_are_nothing_are_refused_by_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["ids"] = h5py.Empty(h5py.string_dtype())
    with (
        closing(Hdf5Datasets(LocalPlace(tmp_path), "a.h5")) as file,
        pytest.raises(AdoptionError, match="dataset 'ids' has no shape"),
    ):
        file.texts("ids")


def test_the_way_out_of_a_file_behind_a_url_begins_with_its_download(path: Path) -> None:
    with (
        closing(opened(Source(path, lambda read: None))) as file,
        pytest.raises(AdoptionError, match=r"; download and load it yourself, as by .*'a\.h5'"),
    ):
        file.place("elements")
