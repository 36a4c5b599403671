"""Checksums and statistics of adopted blocks: windows into them, and blocks of several sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lhotse
import numpy as np
import pytest
from foreign_stores import adopted, assert_holds, contents
from lhotse_stores import whole_cuts, with_pieces

import featcache

h5py = pytest.importorskip("h5py")


@pytest.mark.parametrize("storage", ["numpy_hdf5", "lilcom_hdf5", "lilcom_chunky"])
def test_windows_of_stored_arrays_are_collected_and_checked(tmp_path: Path, storage: str) -> None:
    cuts = with_pieces(whole_cuts(storage, tmp_path / "data"))
    cuts.to_file(tmp_path / "data" / "cuts.jsonl")
    arrays = {cut.id: cut.load_features() for cut in cuts}
    before = contents(tmp_path / "data")
    with adopted(tmp_path / "data" / "cuts.jsonl", tmp_path) as cache:
        cache.collect()
        frames = np.concatenate([*arrays.values()]).astype(np.float64)
        np.testing.assert_allclose(cache.stats("feats").mean, frames.mean(0), rtol=1e-9)
        assert cache.stats("feats").count == len(frames)
    with featcache.open(tmp_path / "cache", verify="arrays", check_reads=True) as cache:
        assert_holds(cache, "feats", arrays)
    assert contents(tmp_path / "data") == before


def test_deleted_cuts_leave_the_others_readable(tmp_path: Path) -> None:
    cuts = with_pieces(whole_cuts("lilcom_chunky", tmp_path / "data"))
    cuts.to_file(tmp_path / "data" / "cuts.jsonl")
    arrays = {cut.id: cut.load_features() for cut in cuts}
    with adopted(tmp_path / "data" / "cuts.jsonl", tmp_path) as cache:
        gone = sorted(arrays)[::3]
        cache.delete(gone)
        cache.refresh()
        assert_holds(cache, "feats", {id: arrays[id] for id in arrays if id not in gone})


def test_chunks_of_each_dataset_are_collected_and_checked(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays: dict[str, Any] = {
        f"utt{rows}": rng.standard_normal((rows, 5), np.float32) for rows in (1, 7, 8, 9, 40, 123)
    }
    for name, filters in (("raw", {}), ("gzip", {"compression": "gzip", "shuffle": True})):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for number, (id, array) in enumerate(arrays.items()):
                options = {"chunks": (7 + number, 5), "maxshape": (None, 5), **filters}
                file.create_dataset(id, data=array, **options)
        with adopted(tmp_path / f"{name}.h5", tmp_path / name) as cache:
            cache.collect()
            assert cache.stats("feats").count == sum(map(len, arrays.values()))
        with featcache.open(tmp_path / name / "cache", verify="arrays", check_reads=True) as cache:
            assert_holds(cache, "feats", arrays)


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    cuts = whole_cuts("lilcom_chunky", tmp_path / "data")
    lhotse.CutSet.from_cuts(cuts).to_file(tmp_path / "cuts.jsonl")
    adopted(tmp_path / "cuts.jsonl", tmp_path).close()
    with (tmp_path / "data" / "feats.lca").open("ab") as file:
        file.write(b"more")
    with (
        featcache.open(tmp_path / "cache") as cache,
        pytest.raises(featcache.errors.CacheError, match=r"feats\.lca.*changed"),
    ):
        cache.read(cuts[0].id, "feats")


def test_a_store_that_was_moved_is_found_by_its_root(tmp_path: Path) -> None:
    cuts = whole_cuts("numpy_hdf5", tmp_path / "data")
    lhotse.CutSet.from_cuts(cuts).to_file(tmp_path / "cuts.jsonl")
    arrays = {cut.id: cut.load_features() for cut in cuts}
    adopted(tmp_path / "cuts.jsonl", tmp_path).close()
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    with featcache.open(tmp_path / "cache", roots={"data": tmp_path / "elsewhere"}) as cache:
        assert_holds(cache, "feats", arrays)
