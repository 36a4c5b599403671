"""An opened cache as an object: closed by `with`, its ids as a sequence, dims and bytes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import arrays_of, id_of, make_cache, oracle

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ClosedError, KeyNotFoundError, RowError
from featcache.format import Index


@pytest.mark.parametrize("mapped", [True, False])
def test_a_cache_closes_its_files_at_the_end_of_a_with(tmp_path: Path, mapped: bool) -> None:
    with featcache.open(make_cache(tmp_path, range(9)), mapped=mapped) as cache:
        array = cache.read(id_of(3), "fbank")
        table = featcache.concat(cache)
    for read in (
        lambda: cache.read(id_of(3), "fbank"),
        lambda: cache[id_of(3)],
        lambda: cache.read_batch([id_of(3)], "units"),
        lambda: featcache.FeatureDataset(table)[id_of(3)],
    ):
        with pytest.raises(ClosedError, match=r"cache '.*' is closed; open it again"):
            read()
    assert array.tolist() == arrays_of(3)["fbank"].tolist()
    assert len(cache.ids) == len(cache.lengths("fbank")) == 9
    cache.close()


def test_an_error_within_a_with_goes_on(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyNotFoundError, match="nobody"),
        featcache.open(make_cache(tmp_path, range(3))) as cache,
    ):
        cache["nobody"]


def test_copies_and_readers_of_a_closed_cache_have_their_own_files(tmp_path: Path) -> None:
    with featcache.open(make_cache(tmp_path, range(9)), mapped=False) as cache:
        reader = cache.reader("fbank")
    expected = arrays_of(3)["fbank"].tolist()
    assert reader(id_of(3)).tolist() == expected
    again = pickle.loads(pickle.dumps(cache))  # noqa: S301
    assert again.read(id_of(3), "fbank").tolist() == expected


def test_ids_are_a_sequence_in_the_order_of_rows(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(20)))
    ids = sorted(oracle(range(20)), key=str.encode)
    assert isinstance(cache.ids, Sequence)
    assert cache.ids == ids == list(cache.ids) == list(cache)
    assert cache.ids != ids[1:]
    assert (cache.ids[0], cache.ids[-1], cache.ids[3:6]) == (ids[0], ids[-1], ids[3:6])
    assert ids[7] in cache.ids
    assert "nobody" not in cache.ids
    assert cache.ids.index(ids[7]) == 7
    assert pickle.loads(pickle.dumps(cache.ids)) == ids  # noqa: S301
    assert repr(cache.ids).startswith(f"<20 ids: {ids[0]!r}, ")
    for row in (20, -21):
        with pytest.raises(RowError, match=f"no row {row}: there are 20 utterances"):
            cache.ids[row]


def test_dims_are_the_shape_of_a_frame(tmp_path: Path) -> None:
    features = [
        FeatureStorageConfig("fbank"),
        FeatureStorageConfig("speaker", time_axis=None),
    ]
    with CacheWriter(tmp_path, features) as writer:
        writer.write("u", {"fbank": np.zeros((3, 4, 2)), "speaker": np.zeros(5)})
    cache = featcache.open(tmp_path)
    assert (cache.dims("fbank"), cache.dims("speaker")) == ((4, 2), (5,))
    with pytest.raises(KeyNotFoundError, match="did you mean 'fbank'"):
        cache.dims("fbnk")


def test_nbytes_are_those_of_the_arrays_as_they_are_stored(tmp_path: Path) -> None:
    expected = sum(array.nbytes for number in range(9) for array in arrays_of(number).values())
    assert featcache.open(make_cache(tmp_path / "raw", range(9))).nbytes == expected
    features = [FeatureStorageConfig("zeros", backend="hdf5", codec="gzip")]
    with CacheWriter(tmp_path / "gzip", features) as writer:
        writer.write("u", {"zeros": np.zeros((1000, 80), np.float32)})
    assert 0 < featcache.open(tmp_path / "gzip").nbytes < 320_000 / 100


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids for which near ones were looked for."""
    asked: list[str] = []
    nearest = Index.nearest

    def noted(self: Index, id: str) -> str:
        asked.append(id)
        return nearest(self, id)

    monkeypatch.setattr(Index, "nearest", noted)
    return asked


def test_no_near_ids_are_looked_for_unless_somebody_reads_them(
    tmp_path: Path, hints: list[str]
) -> None:
    cache = featcache.open(make_cache(tmp_path, range(9)))
    reader, table = cache.reader("fbank"), featcache.concat(cache)
    reads: list[Any] = [
        lambda id: cache[id],
        lambda id: cache.read(id, "fbank"),
        lambda id: cache.read_batch([id], "fbank"),
        lambda id: cache.lengths("fbank", ids=[id]),
        reader,
        lambda id: table.rows([id]),
    ]
    absent = 0
    for number in range(10_000):
        try:
            reads[number % len(reads)](f"spk1/utt-{number + 100}")
        except KeyError:
            absent += 1
    assert (absent, hints) == (10_000, [])


def test_the_text_with_near_ids_is_made_once_and_travels(tmp_path: Path, hints: list[str]) -> None:
    cache = featcache.open(make_cache(tmp_path, range(30)))
    with pytest.raises(KeyNotFoundError) as caught:
        cache.read("spk1/utt-88", "fbank")
    caught.value.add_note("in the middle of an epoch")
    travelled = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert type(travelled) is KeyNotFoundError
    assert str(travelled) == str(caught.value)
    assert travelled.__notes__ == caught.value.__notes__ == ["in the middle of an epoch"]
    assert f"nearest ids: '{id_of(8)}'" in str(travelled)
    assert hints == ["spk1/utt-88"]


def test_an_index_that_cannot_name_near_ids_does_not_hide_what_is_missing(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(9)))
    index = cache.opened.index
    index.ids.__dict__["views"] = index.ids.ends.data, memoryview(b"\xff" * len(index.ids.data))
    with pytest.raises(KeyNotFoundError, match=r"no utterance 'nobody' .*index is damaged"):
        cache.read("nobody", "fbank")
