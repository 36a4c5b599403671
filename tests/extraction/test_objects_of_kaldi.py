"""Archives of Kaldi that hold no matrices and no vectors of floats: the line of the refusal."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import featcache
from featcache.errors import AdoptionError

kaldi_native_io = pytest.importorskip("kaldi_native_io")

Held = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]
HALVES = np.array([0.5, 0.25], "f4")
# by the names of the writers: what is written, and the arrays that a line gives
HELD: dict[str, tuple[Held, Arrays]] = {
    "Bool": (both := {"u1": True, "u2": False}, {k: np.array(v) for k, v in both.items()}),
    "Int32": ({"u1": 5, "u2": -7}, {"u1": np.array(5), "u2": np.array(-7)}),
    "Float": ({"u1": 5.5, "u2": 7.25}, {"u1": np.array(5.5), "u2": np.array(7.25)}),
    "Double": ({"u1": 5.5, "u2": 7.25}, {"u1": np.array(5.5), "u2": np.array(7.25)}),
    "Int8Vector": ({"u1": [1, 2], "u2": [3]}, {"u1": np.array([1, 2]), "u2": np.array([3])}),
    "Int32VectorVector": (
        {"u1": [[7, 8], [9]], "u2": [[4], []]},
        {"u1": np.array([[0, 7], [0, 8], [1, 9]]), "u2": np.array([[0, 4]])},
    ),
    # the first one alone could be a list of lists
    "Int32PairVector": (
        {"u1": [(1, 2)], "u2": [(3, 4), (5, 6)]},
        {"u1": np.array([[1, 2]]), "u2": np.array([[3, 4], [5, 6]])},
    ),
    "FloatPairVector": (
        {"u1": [(1.5, 2)], "u2": [(3, 4), (5, 6)]},
        {"u1": np.array([[1.5, 2]]), "u2": np.array([[3, 4], [5, 6]])},
    ),
    "Posterior": (
        {"u1": [[(1, 0.5), (2, 0.5)], [(3, 1.0)]], "u2": [[(4, 1.0)]]},
        {"u1": np.array([[0, 1, 0.5], [0, 2, 0.5], [1, 3, 1]]), "u2": np.array([[0, 4, 1]])},
    ),
    "GaussPost": (
        {"u1": [[(1, HALVES)], [(3, HALVES[:1])]], "u2": [[(4, HALVES[:1])]]},
        {"u1": np.array([[0, 1, 0.5], [0, 1, 0.25], [1, 3, 0.5]]), "u2": np.array([[0, 4, 0.5]])},
    ),
}
TEXTS: dict[str, Held] = {
    "Token": {"u1": "hello", "u2": "x"},
    "TokenVector": {"u1": ["say", "b"], "u2": ["c"]},
}


def written(at: Path, what: str, mode: str, held: Held) -> Path:
    source, ark = at / "all.ark", at / "all.ark"
    if mode == "ark,scp":
        source, ark = at / "all.scp", at / f"all.ark,{at / 'all.scp'}"
    with getattr(kaldi_native_io, f"{what}Writer")(f"{mode}:{ark}") as writer:
        for id, value in held.items():
            writer.write(id, value)
    return source


def refused(source: Path, door: str) -> str:
    with pytest.raises(AdoptionError) as told:
        getattr(featcache, door)(source, source.parent / "cache")
    return str(told.value)


KNOWN = {
    "featcache": featcache, "kaldi_native_io": kaldi_native_io, "numpy": np, "pathlib": pathlib
}  # fmt: skip


@pytest.mark.parametrize("door", ["adopt", "convert"])
@pytest.mark.parametrize("mode", ["ark", "ark,t", "ark,scp"])
@pytest.mark.parametrize("what", HELD)
def test_the_line_gives_the_numbers_of_each_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, mode: str, door: str
) -> None:
    held, arrays = HELD[what]
    message = refused(written(tmp_path, what, mode, held), door)
    found = re.search(r"as by (featcache\.convert\(.*, 'features')\)", message)
    assert found is not None, message
    monkeypatch.chdir(tmp_path)
    exec(f"{found[1]}, progressbar=False)", dict(KNOWN))
    with featcache.open(tmp_path / "features") as cache:
        assert set(cache) == set(arrays)
        for id, array in arrays.items():
            assert cache.read(id, "feats").reshape(array.shape).tolist() == array.tolist()


@pytest.mark.parametrize("door", ["adopt", "convert"])
@pytest.mark.parametrize("mode", ["ark", "ark,t", "ark,scp"])
@pytest.mark.parametrize("what", TEXTS)
def test_texts_are_annotations(tmp_path: Path, what: str, mode: str, door: str) -> None:
    message = refused(written(tmp_path, what, mode, TEXTS[what]), door)
    found = re.search(r"as by (cache\.annotate\(.*\)\}?\))", message)
    assert found is not None, message
    mels = {id: np.ones((3, 4)) for id in TEXTS[what]}
    cache = featcache.convert(mels, tmp_path / "mels", progressbar=False)
    exec(found[1], {**KNOWN, "cache": cache})
    texts = {id: text if what == "Token" else " ".join(text) for id, text in TEXTS[what].items()}
    again = featcache.open(tmp_path / "mels")
    assert dict(zip(again.ids, again.annotation("text"), strict=True)) == texts


@pytest.mark.parametrize("what", HELD)
def test_archives_that_are_cut_are_refused_or_hold_what_kaldi_reads(
    tmp_path: Path, what: str
) -> None:
    source = written(tmp_path, what, "ark", HELD[what][0])
    whole = source.read_bytes()
    for end in range(4, len(whole)):
        source.write_bytes(whole[:end])
        try:
            featcache.adopt(source, tmp_path / "cache", overwrite=True)
        except AdoptionError:
            continue
        # a vector of integers begins as lists do, and may lie there whole
        with featcache.open(tmp_path / "cache") as cache:
            found = {id: cache.read(id, "feats").tolist() for id in cache}
        with kaldi_native_io.SequentialInt32VectorReader(f"ark:{source}") as reader:
            assert found == dict(reader)


def test_lists_that_are_all_empty_have_no_line(tmp_path: Path) -> None:
    source = written(tmp_path, "Int32VectorVector", "ark", {"u1": [], "u2": []})
    assert "featcache.CacheWriter" in refused(source, "adopt")
