"""`to_kaldi`: data directories that kaldiio, Kaldi's own reader and ESPnet read, bit for bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featcache
from featcache.errors import ConfigError, FeatureError

kaldiio: Any = pytest.importorskip("kaldiio")


def written(path: Path, dtype: str, dims: tuple[int, ...], **options: Any) -> featcache.Cache:
    rng = np.random.default_rng(0)
    declared = [featcache.FeatureStorageConfig("f", dtype=dtype, **options)]
    with featcache.CacheWriter(path, declared) as writer:
        for number, id in enumerate(("b-2", "é-1", "a-1", "B-3")):
            shape = (number + 2, *dims)
            array = rng.normal(0, 9, shape) if "f" in dtype else rng.integers(0, 99, shape)
            told = {"text": f"ein Wort {number}", "speaker": id[0], "duration": 0.5 * number}
            writer.write(id, {"f": array}, annotations=told if number else {"speaker": "b"})
    return featcache.open(path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dims", [(5,), ()])
def test_kaldis_readers_get_the_same_bits(
    tmp_path: Path, dtype: str, dims: tuple[int, ...]
) -> None:
    cache = written(tmp_path / "cache", dtype, dims)
    cache.to_kaldi(tmp_path / "data")
    scp = (tmp_path / "data" / "feats.scp").read_text()
    ids = [line.split()[0] for line in scp.splitlines()]
    assert ids == ["B-3", "a-1", "b-2", "é-1"]  # the order of bytes
    found = kaldiio.load_scp(str(tmp_path / "data" / "feats.scp"))
    in_order = dict(kaldiio.load_ark(str(tmp_path / "data" / "feats.ark")))
    assert [*in_order] == ids
    for id in ids:
        expected = cache.read(id, "f")
        for array in (found[id], in_order[id]):
            np.testing.assert_array_equal(array, expected)
            assert array.dtype == (np.float64 if dtype == "float64" else np.float32)


@pytest.mark.parametrize("dims", [(5,), ()])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kaldi_itself_reads_them(tmp_path: Path, dtype: str, dims: tuple[int, ...]) -> None:
    native: Any = pytest.importorskip("kaldi_native_io")
    cache = written(tmp_path / "cache", dtype, dims)
    cache.to_kaldi(tmp_path / "data")
    kind = {"float32": "Float", "float64": "Double"}[dtype] + ("Matrix" if dims else "Vector")
    with getattr(native, f"RandomAccess{kind}Reader")(f"scp:{tmp_path}/data/feats.scp") as reader:
        for id in cache:
            np.testing.assert_array_equal(np.array(reader[id]), cache.read(id, "f"))
    if dims:
        matrix = native.DoubleMatrix.read(f"{tmp_path}/data/cmvn.ark")
        assert np.array(matrix).shape == (2, 6)


def test_integers_are_vectors_of_int32(tmp_path: Path) -> None:
    cache = written(tmp_path / "cache", "uint16", ())
    cache.to_kaldi(tmp_path / "data")
    for id, array in kaldiio.load_scp(str(tmp_path / "data" / "feats.scp")).items():
        np.testing.assert_array_equal(array, cache.read(id, "f"))
    assert not (tmp_path / "data" / "feats_stats.npz").exists()


def test_tables_and_shapes_are_those_of_kaldi_and_espnet(tmp_path: Path) -> None:
    written(tmp_path / "cache", "float16", (5,)).to_kaldi(tmp_path / "data")
    files = {
        path.name: path.read_text().splitlines()
        for path in (tmp_path / "data").iterdir()
        if path.suffix not in (".ark", ".npz", ".scp")
    }
    assert files == {
        "utt2num_frames": ["B-3 5", "a-1 4", "b-2 2", "é-1 3"],
        "feats_shape": ["B-3 5,5", "a-1 4,5", "b-2 2,5", "é-1 3,5"],
        "text": ["B-3 ein Wort 3", "a-1 ein Wort 2", "é-1 ein Wort 1"],
        "utt2spk": ["B-3 B", "a-1 a", "b-2 b", "é-1 é"],
        "spk2utt": ["B B-3", "a a-1", "b b-2", "é é-1"],
        "utt2dur": ["B-3 1.5", "a-1 1.0", "é-1 0.5"],
    }


def test_statistics_are_those_of_kaldi_and_espnet(tmp_path: Path) -> None:
    cache = written(tmp_path / "cache", "float32", (5,))
    cache.filter(lambda row: row["id"] != "a-1").to_kaldi(tmp_path / "data")
    frames = np.concatenate([cache.read(id, "f") for id in ("b-2", "é-1", "B-3")]).astype(float)
    sums, squares = frames.sum(0), np.square(frames).sum(0)
    cmvn = kaldiio.load_mat(str(tmp_path / "data" / "cmvn.ark"))
    np.testing.assert_allclose(cmvn, [[*sums, len(frames)], [*squares, 0]], rtol=1e-12)
    stats = np.load(tmp_path / "data" / "feats_stats.npz")
    assert stats["count"] == len(frames)
    np.testing.assert_allclose(stats["sum"], sums, rtol=1e-12)
    np.testing.assert_allclose(stats["sum_square"], squares, rtol=1e-12)


def test_it_comes_back_by_adopting(tmp_path: Path) -> None:
    cache = written(tmp_path / "cache", "float32", (5,))
    cache.to_kaldi(tmp_path / "data")
    again = featcache.adopt(tmp_path / "data", tmp_path / "again")
    for id in cache:
        np.testing.assert_array_equal(again.read(id, "feats"), cache.read(id, "f"))
    assert dict(zip(again, again.annotation("speaker"), strict=True))["é-1"] == "é"


def test_arrays_without_frames_are_vectors(tmp_path: Path) -> None:
    declared = [featcache.FeatureStorageConfig("xvector", time_axis=None)]
    with featcache.CacheWriter(tmp_path / "cache", declared) as writer:
        writer.write("u", {"xvector": np.arange(7.0)})
    featcache.open(tmp_path / "cache").to_kaldi(tmp_path / "data")
    (found,) = kaldiio.load_scp(str(tmp_path / "data" / "feats.scp")).values()
    assert found.tolist() == list(range(7))
    assert (tmp_path / "data" / "feats_shape").read_text() == "u 7\n"
    assert not (tmp_path / "data" / "utt2num_frames").exists()


def refused(path: Path, array: Any, dtype: str = "float32", id: str = "u", text: str = "") -> None:
    declared = [featcache.FeatureStorageConfig("f", dtype=dtype)]
    with featcache.CacheWriter(path / "cache", declared) as writer:
        writer.write(id, {"f": array}, annotations={"text": text})
    featcache.open(path / "cache").to_kaldi(path / "data")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"array": np.zeros((3, 2, 2))}, "neither a matrix"),
        ({"array": np.zeros((3, 2), int), "dtype": "int32"}, "neither a matrix"),
        ({"array": np.full(3, 2**31), "dtype": "int64"}, "beyond int32"),
        ({"array": np.zeros((0, 2))}, "has no frames"),
        ({"array": np.zeros((3, 2)), "id": "a b"}, "not one word"),
        ({"array": np.zeros((3, 2)), "text": "a\nb"}, "two lines"),
    ],
)
def test_what_kaldi_cannot_hold_is_refused_and_leaves_nothing(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(FeatureError, match=says):
        refused(tmp_path, **given)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_an_utterance_of_several_rows_is_refused(tmp_path: Path) -> None:
    cache = written(tmp_path / "cache", "float32", (5,))
    weights = np.where(np.arange(len(cache)) == 1, 9.0, 1.0)
    mix = featcache.mix({"all": cache}, weights={"all": weights}, epoch_size=9 * len(cache))
    with pytest.raises(FeatureError, match="has several rows, as a mix"):
        mix.to_kaldi(tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    cache = written(tmp_path / "cache", "float32", (5,))
    with pytest.raises(ConfigError, match="not empty"):
        cache.to_kaldi(tmp_path)


def test_espnets_global_mvn_reads_the_statistics(tmp_path: Path) -> None:
    try:
        mvn: Any = importlib.import_module("espnet2.layers.global_mvn")
    except ImportError:
        pytest.skip("espnet is not installed")
    cache = written(tmp_path / "cache", "float32", (5,))
    cache.to_kaldi(tmp_path / "data")
    found = mvn.GlobalMVN(tmp_path / "data" / "feats_stats.npz")
    np.testing.assert_allclose(found.mean, cache.stats("f").mean, rtol=1e-6)
    np.testing.assert_allclose(found.std, cache.stats("f").std, rtol=1e-5)
