from __future__ import annotations

import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
from hdf5_helpers import FBANK, IDS, encoded, make, read, specs, write
from hypothesis import example, given, settings

from featcache.errors import FeatureError, MissingDependencyError
from featcache.interface import Backend, Extent, FeatureSpec, SupportsBlocks
from featcache_backends.hdf5 import GzipCodec, Hdf5Backend, link_name


@settings(max_examples=60, deadline=None)
@given(specs(), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_extents_and_h5py_give_the_arrays_that_were_written(
    feature: FeatureSpec, lengths: list[int]
) -> None:
    with write([feature], [(f"utt-{i}", rows) for i, rows in enumerate(lengths)]) as written:
        for (id, name), array in written.arrays.items():
            extents = written.extents[id, name]
            assert b"".join(written.blocks(id, name)) == array.tobytes()
            assert len(extents) == (array.size > 0)
            assert all(extent.offset % 64 == 0 for extent in extents)
            native = written.native(id, name)
            assert native.dtype == array.dtype
            assert native.shape == array.shape
            assert native.tobytes() == array.tobytes()


def test_bfloat16_is_stored_as_its_bits_and_says_so() -> None:
    features = [FeatureSpec("ssl", "bfloat16", (4,)), FBANK]
    with write(features, [("a", 3)]) as written, h5py.File(written.path) as file:
        assert file["ssl"].attrs["dtype"] == "bfloat16"
        assert file["ssl/a"].dtype == np.uint16
        assert "dtype" not in file["fbank"].attrs


@settings(max_examples=60, deadline=None)
@given(st.lists(IDS, min_size=1, max_size=6, unique=True))
@example(["a", "a/b", "/a", "a/", "//", "/", "./a", "../a", "a%2Fb"])
@example([".", "..", "...", "%2E", "%", "%%", "%25"])
@example(["é", "e\u0301", "😀" * 1000, "/" * 1000, "x" * 1000, " ", "\n", "\\", "\uffff", "a\x01"])
def test_any_id_finds_its_own_array(ids: list[str]) -> None:
    feature = FeatureSpec("f", "int16", (2,))
    with write([feature], [(id, 3) for id in ids]) as written, h5py.File(written.path) as file:
        assert sorted(unquote(name) for name in file["f"]) == sorted(ids)
        for id in ids:
            assert np.array_equal(file["f"][link_name(id)], written.arrays[id, "f"])
            assert written.blocks(id, "f") == [written.arrays[id, "f"].tobytes()]


def test_the_file_is_named_after_its_only_feature() -> None:
    with write([FBANK], [("a", 1)]) as written:
        assert written.path.name == "fbank.h5"
    with write([FBANK, FeatureSpec("tokens", "int64", ())], [("a", 1)]) as written:
        assert written.path.name == "features.h5"
        assert {extent.container for extents in written.extents.values() for extent in extents} == {
            "features.h5"
        }


def test_the_same_arrays_give_the_same_file() -> None:
    features = [FBANK, FeatureSpec("f", "float32", (4,), codec=GzipCodec())]
    with write(features, [("a", 3), ("é", 0)]) as one:
        time.sleep(1 - time.time() % 1)  # HDF5's time stamps count seconds
        with write(features, [("a", 3), ("é", 0)]) as other:
            assert one.path.read_bytes() == other.path.read_bytes()


def test_an_array_is_whole_where_the_system_writes_it_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pieces(io.FileIO):  # a system writes at most 2 GiB at once
        def write(self, data: Any, /) -> int:
            return super().write(memoryview(data)[:1000])

    monkeypatch.setattr(Path, "open", lambda path, mode="r", buffering=-1: Pieces(path, mode))
    monkeypatch.delattr(os, "pwrite")  # Windows has none
    with write([FBANK], [("a", 50), ("b", 9)]) as written:
        for id in "ab":
            assert written.blocks(id, "fbank") == [written.arrays[id, "fbank"].tobytes()]


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "fbank.h5").write_bytes(b"precious")
    with pytest.raises(FileExistsError) as caught:
        Hdf5Backend().open_writer(tmp_path, [FBANK])
    assert caught.value.filename == str(tmp_path / "fbank.h5")
    assert (tmp_path / "fbank.h5").read_bytes() == b"precious"


def test_an_id_given_twice_is_refused_by_name(tmp_path: Path) -> None:
    writer = Hdf5Backend().open_writer(tmp_path, [FBANK])
    array = {"fbank": encoded(FBANK, make(FBANK, 3))}
    writer.append("utt-1", array)
    with pytest.raises(
        FeatureError, match=r"'fbank.h5' cannot hold feature 'fbank' of 'utt-1', shape \(3, 80\): "
    ):
        writer.append("utt-1", array)
    writer.abort()


WRITE_FLUSH_AND_DIE = """
import json, os, signal, sys
from pathlib import Path
from typing import Any
import hdf5_helpers as t

features = [t.FBANK, t.FeatureSpec("gzip", "int16", (30,), codec=t.GzipCodec(level=1))]
writer = t.Hdf5Backend().open_writer(Path(sys.argv[1]), features)
places = []
for seed in range(150):
    arrays = {f.name: t.encoded(f, t.make(f, seed * 20, seed)) for f in features}
    placed = writer.append(f"utt-{seed}", arrays)
    places.append(
        {name: [(e.offset, e.nbytes) for e in extents] for name, extents in placed.items()}
    )
    if seed == 99:
        writer.flush()
        flushed = json.dumps(places)
print(flushed, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_flushed_survives_kill_9(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_FLUSH_AND_DIE, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, cwd=Path(__file__).parent, timeout=60)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    features = {
        "fbank": FBANK,
        "gzip": FeatureSpec("gzip", "int16", (30,), codec=GzipCodec(level=1)),
    }
    places = json.loads(run.stdout)
    assert len(places) == 100
    for seed, place in enumerate(places):
        for name, feature in features.items():
            expected = encoded(feature, make(feature, seed * 20, seed))
            blocks = [read(tmp_path, Extent("features.h5", *extent)) for extent in place[name]]
            assert blocks == [bytes(block) for block in expected.blocks]
    with h5py.File(tmp_path / "features.h5") as file:  # HDF5's own view of a flushed file
        for seed in range(100):
            assert np.array_equal(file[f"fbank/utt-{seed}"], make(FBANK, seed * 20, seed))


def test_aborting_lets_go_of_the_file(tmp_path: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        writer = Hdf5Backend().open_writer(tmp_path, [FBANK])
        extents = writer.append("a", {"fbank": encoded(FBANK, make(FBANK, 3))})["fbank"]
        writer.abort()
        writer.abort()
        del writer
    assert not caught
    assert len(list(Path("/dev/fd").iterdir())) == before
    assert read(tmp_path, *extents) == make(FBANK, 3).tobytes()


@pytest.mark.parametrize("codec", [None, GzipCodec(level=0)])
def test_a_full_disk_is_an_os_error_and_aborting_stays_quiet(
    tmp_path: Path, codec: GzipCodec | None
) -> None:
    feature = FeatureSpec("f", "float32", (80,), codec=codec)
    array = {"f": encoded(feature, make(feature, 2000))}
    writer = Hdf5Backend().open_writer(tmp_path, [feature])
    with files_of_at_most(1 << 20):
        for action in (
            lambda: [writer.append(f"utt-{number}", array) for number in range(10)],
            writer.flush,
        ):
            with pytest.raises(OSError, match="File too large") as caught:
                action()
            assert (caught.value.errno, caught.value.filename) == (
                errno.EFBIG,
                str(tmp_path / "f.h5"),
            )
        writer.abort()


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_missing_h5py_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    backend = Hdf5Backend()
    with pytest.raises(
        MissingDependencyError,
        match=r"backend 'hdf5' needs 'h5py'.*pip install 'featcache\[hdf5\]'",
    ):
        backend.open_writer(tmp_path, [FBANK])


def test_the_backend_keeps_the_protocols() -> None:
    assert isinstance(Hdf5Backend(), Backend)
    assert isinstance(Hdf5Backend(), SupportsBlocks)
