"""Arrays that lhotse stores in a cache come back as those that its own writers store."""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featcache

lhotse: Any = pytest.importorskip("lhotse")
from lhotse.features.io import get_reader  # noqa: E402
from lhotse.testing.dummies import dummy_cut  # noqa: E402

from featcache.interop.lhotse import FeatcacheWriter  # noqa: E402

RANDOM = np.random.default_rng(0)
FRAMES = RANDOM.normal(size=(11, 4)).astype(np.float32)
ITS_OWN = [lhotse.NumpyFilesWriter, lhotse.NumpyHdf5Writer]
NUMBERS = [0, 1, 7, 10, 11, 12, 40, -1, -4, -11, -40]
SHAPES: list[tuple[int, ...]] = [(), (1,), (13,), (2, 5), (3, 4, 2), (0, 4), (5, 0)]
NAMES = [
    "utt.1", "utt.2", "a-0.3_vad.wav", "temp.npy", "temp.h5", "temp.lca", "größer", "two words",
    "100%", "a",
]  # fmt: skip


def reader_of(manifest: Any) -> Any:
    return get_reader(manifest.storage_type)(manifest.storage_path)


@pytest.mark.parametrize("writer", [FeatcacheWriter, *ITS_OWN])
@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_of_all_shapes_and_dtypes(
    tmp_path: Path, writer: Any, shape: tuple[int, ...]
) -> None:
    if shape == () and writer is not FeatcacheWriter:
        pytest.skip("lhotse's own read no scalars")
    for dtype in ("f2", "f4", "i8", "u1", "?"):
        array = np.asarray(RANDOM.integers(0, 2, shape), dtype)
        with writer(tmp_path / f"{array.dtype}") as storing:
            manifest = storing.store_array(key=f"utt-{dtype}", value=array)
        found = manifest.load()
        assert tuple(manifest.shape) == found.shape == shape
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("writer", [FeatcacheWriter, *ITS_OWN])
@pytest.mark.parametrize("closed", [False, True])
def test_windows_are_slices(tmp_path: Path, writer: Any, closed: bool) -> None:
    with ExitStack() as stack:
        storing = stack.enter_context(writer(tmp_path / "stored"))
        manifest = storing.store_array("utt", FRAMES, frame_shift=0.5, temporal_dim=0, start=0)
        if closed:
            stack.close()
        reader = reader_of(manifest.array)
        for left, right in product(NUMBERS, [*NUMBERS, None]):
            found = reader.read(manifest.array.storage_key, left, right)
            np.testing.assert_array_equal(found, FRAMES[left:right], f"{left}:{right}")
            assert found.shape == FRAMES[left:right].shape
        np.testing.assert_array_equal(manifest.load(start=1, duration=2), FRAMES[2:6])
        np.testing.assert_array_equal(manifest.load(start=3.5), FRAMES[7:])


@pytest.mark.parametrize("writer", [FeatcacheWriter, *ITS_OWN])
def test_names_of_all_kinds_are_kept_apart(tmp_path: Path, writer: Any) -> None:
    with writer(tmp_path / "stored") as storing:
        stored = {name: storing.store_array(name, FRAMES + n) for n, name in enumerate(NAMES)}
    for number, name in enumerate(NAMES):
        manifest = pickle.loads(pickle.dumps(stored[name]))  # noqa: S301  # as workers get it
        np.testing.assert_array_equal(manifest.load(), FRAMES + number)
    if writer is FeatcacheWriter:
        assert sorted(featcache.open(tmp_path / "stored")) == sorted(NAMES)


@pytest.mark.parametrize("writer", [FeatcacheWriter, lhotse.NumpyFilesWriter])
def test_a_writer_of_mode_a_keeps_what_is_there(tmp_path: Path, writer: Any) -> None:
    stored = []
    for number in range(3):
        with writer(tmp_path / "stored", mode="a") as storing:
            stored.append(storing.store_array(f"utt-{number}", FRAMES + number))
        for older, manifest in enumerate(stored):
            np.testing.assert_array_equal(manifest.load(), FRAMES + older)


@pytest.mark.parametrize("writer", [FeatcacheWriter, *ITS_OWN])
def test_features_and_arrays_of_cuts_are_copied(tmp_path: Path, writer: Any) -> None:
    """Features, and an array in `custom` that is cut with its cut."""
    with lhotse.NumpyHdf5Writer(tmp_path / "before") as storing:
        cuts = []
        for number in range(3):
            cut = dummy_cut(number, duration=1.1)
            cut.features = lhotse.Features(
                "fbank", 11, 4, 0.1, 16000, 0, 1.1, "numpy_hdf5", storing.storage_path,
                storing.write(f"utt-{number}", FRAMES + number), channels=0,
            )  # fmt: skip
            cut.units = storing.store_array(
                f"units-{number}", np.arange(11) + number, frame_shift=0.1, temporal_dim=0, start=0
            )
            cuts.append(cut)
    with writer(tmp_path / "after") as storing:
        copied = lhotse.CutSet.from_cuts(cuts).copy_feats(storing).to_eager()
    with writer(tmp_path / "units") as storing:
        units = {
            cut.id: storing.store_array(
                cut.id, cut.load_units(), frame_shift=0.1, temporal_dim=0, start=0
            )
            for cut in cuts
        }
    for number, cut in enumerate(copied):
        assert cut.features.storage_path.startswith(str(tmp_path / "after"))
        np.testing.assert_array_equal(cut.load_features(), FRAMES + number)
        cut.units = units[cut.id]
        part = cut.truncate(offset=0.3, duration=0.4)
        np.testing.assert_array_equal(part.load_features(), (FRAMES + number)[3:7])
        np.testing.assert_array_equal(part.load_units(), np.arange(3, 7) + number)
        padded = part.pad(duration=0.6).load_features()
        np.testing.assert_array_equal(padded[:4], (FRAMES + number)[3:7])
