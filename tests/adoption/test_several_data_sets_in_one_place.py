"""Places that hold more than one data set, or one array of all: refused, with what to name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from npy_folders import save_all
from numpy.typing import NDArray

import featcache
from featcache.errors import AdoptionError

FRAMES: dict[str, NDArray[Any]] = {
    f"u{n}": np.random.default_rng(n).normal(size=(n + 4, 3)).astype("f4") for n in range(4)
}
SOME = dict(list(FRAMES.items())[:2])
OTHERS = dict(list(FRAMES.items())[2:])


def convert(source: Path, into: Path, **settings: Any) -> featcache.Cache:
    return featcache.convert(source, into, adopting=settings, progressbar=False)


DOORS = [featcache.adopt, convert]


def holds(cache: featcache.Cache, arrays: dict[str, NDArray[Any]]) -> None:
    assert set(cache) == set(arrays)
    for id, array in arrays.items():
        assert np.array_equal(cache.read(id, "feats"), array)


def told(door: Any, source: Path, match: str) -> re.Match[str]:
    with pytest.raises(AdoptionError, match=match) as error:
        door(source, source.parent / "none")
    found = re.search(match, str(error.value))
    assert found is not None
    return found


@pytest.mark.parametrize("door", DOORS)
def test_archives_of_several_names_are_one_data_set_where_the_user_says_so(
    tmp_path: Path, door: Any
) -> None:
    """As of vectors of utterances beside those of speakers."""
    kaldiio = pytest.importorskip("kaldiio")
    (tmp_path / "all").mkdir()
    for name, arrays in (("xvector.1", SOME), ("xvector.2", OTHERS), ("spk", {"s": SOME["u0"]})):
        kaldiio.save_ark(str(tmp_path / f"all/{name}.ark"), arrays)
    pattern = told(door, tmp_path / "all", r"by a pattern, as '([^']*)'")[1]
    assert set(door(Path(pattern), tmp_path / "a")) == {*FRAMES, "s"}
    holds(door(tmp_path / "all/xvector.*.ark", tmp_path / "b"), FRAMES)
    (tmp_path / "all/spk.ark").unlink()
    holds(door(tmp_path / "all", tmp_path / "c"), FRAMES)


@pytest.mark.parametrize("door", DOORS)
def test_manifests_of_lhotse_in_a_folder_are_one_where_it_is_alone(
    tmp_path: Path, door: Any
) -> None:
    lhotse = pytest.importorskip("lhotse")
    (tmp_path / "all").mkdir()
    for name, arrays in (("dev", SOME), ("train", OTHERS)):
        cuts = []
        with lhotse.NumpyHdf5Writer(str(tmp_path / f"all/{name}")) as writer:
            for id, array in arrays.items():
                features = lhotse.Features(
                    type="fbank", num_frames=len(array), num_features=3, frame_shift=0.01,
                    sampling_rate=16000, start=0, duration=round(len(array) * 0.01, 4), channels=0,
                    storage_type=writer.name, storage_path=str(writer.storage_path),
                    storage_key=writer.write(id, array), recording_id=id,
                )  # fmt: skip
                cuts.append(lhotse.MonoCut(id, 0, features.duration, channel=0, features=features))
        lhotse.CutSet.from_cuts(cuts).to_file(tmp_path / f"all/cuts_{name}.jsonl.gz")
    manifest = told(door, tmp_path / "all", r"several manifests.*; name it, as '([^']*)'")[1]
    holds(door(Path(manifest), tmp_path / "a"), SOME)
    Path(manifest).unlink()
    holds(door(tmp_path / "all", tmp_path / "b"), OTHERS)


def test_shards_of_splits_in_parquet_are_named_by_a_pattern(tmp_path: Path) -> None:
    """As data sets of HuggingFace's hub are."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "data").mkdir()
    for name, arrays in (("train", SOME), ("test", OTHERS)):
        table = pa.table({"id": [*arrays], "feats": [a.tolist() for a in arrays.values()]})
        pq.write_table(table, tmp_path / f"data/{name}-00000-of-00001.parquet")
    pattern = told(convert, tmp_path, r"one split; name those of one, as '([^']*)'")[1]
    cache = convert(Path(pattern), tmp_path / "a")
    assert set(cache) == set(OTHERS)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["embeddings", "feats", "train.lengths", "x"])
def test_one_array_called_like_all_is_no_utterance_unless_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Any, name: str
) -> None:
    rows = np.stack([array[0] for array in FRAMES.values()])
    source = save_all(tmp_path / "all", {name: rows})
    line = told(door, source, rf"'{name}' alone is .*as by (featcache.convert.*'features'\))")[1]
    assert list(door(source, tmp_path / "a", pattern="{id}")) == [name]
    monkeypatch.chdir(tmp_path)
    cache = eval(line, {"featcache": featcache, "numpy": np})  # noqa: S307
    assert np.array_equal(np.stack([cache.read(id, "feats") for id in cache]), rows)
    if "lengths" not in name:
        (source / "utt_ids.txt").write_text("".join(f"{id}\n" for id in FRAMES))
        holds(door(source, tmp_path / "b"), dict(zip(FRAMES, rows, strict=True)))


def test_one_dataset_called_like_all_is_no_utterance(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file["features"] = np.ones((5, 3), "f4")
    for door in DOORS:
        told(door, tmp_path / "all.h5", "'features' alone is called like an array of all utter")


@pytest.mark.parametrize("door", DOORS)
def test_statistics_that_do_not_go_with_the_arrays_are_told(tmp_path: Path, door: Any) -> None:
    """Pickled, of another rank or another dtype: all as in caches of Coqui."""
    source = save_all(tmp_path / "all", FRAMES)
    for array in (np.array({"mean": 1.0}, object), np.ones(3, "f4"), np.ones((2, 3), "i8")):
        np.save(source / "mel_stats.npy", array, allow_pickle=True)
        told(door, source, "'mel_stats' among 5 arrays may be statistics.*name the others by")
        holds(door(source / "u*.npy", tmp_path / "cache", **OVER.get(door, {})), FRAMES)


OVER = {featcache.adopt: {"overwrite": True}}


@pytest.mark.parametrize("door", DOORS)
def test_the_axis_by_which_arrays_differ_is_asked_about(tmp_path: Path, door: Any) -> None:
    """As of layers of an encoder in front."""
    layers = {id: np.stack([array] * 3) for id, array in FRAMES.items()}
    source = save_all(tmp_path / "all", layers)
    axis = told(door, source, r"is axis 1 the frames\? give time_axis=(\d)")[1]
    cache = door(source, tmp_path / "cache", time_axis=int(axis))
    assert np.array_equal(cache.read("u1", "feats"), layers["u1"].transpose(1, 0, 2))


def test_arrays_that_lack_the_axis_have_a_last_one(tmp_path: Path) -> None:
    """As prompts of Bark, of one axis and of two."""
    (tmp_path / "all").mkdir()
    for id, array in FRAMES.items():
        np.savez(tmp_path / f"all/{id}.npz", coarse=array.T, semantic=array[:, 0])
    told(convert, tmp_path / "all", r"are they transposed\? give time_axis=1")
    with pytest.raises(AdoptionError, match="no axis 1 of frames; -1 is the last axis of each"):
        convert(tmp_path / "all", tmp_path / "none", time_axis=1)
    cache = convert(tmp_path / "all", tmp_path / "cache", time_axis=-1)
    for id, array in FRAMES.items():
        assert np.array_equal(cache.read(id, "coarse"), array)
        assert np.array_equal(cache.read(id, "semantic"), array[:, 0])


def save_h5(path: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        for name, array in arrays.items():
            file[name] = array.astype("S") if array.dtype.kind == "U" else array
    return path.with_suffix(".h5")


def save_npz(path: Path, arrays: dict[str, Any]) -> Path:
    np.savez(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


@pytest.mark.parametrize("save", [save_all, save_h5, save_npz])
def test_arrays_of_all_utterances_go_together_with_their_ids(tmp_path: Path, save: Any) -> None:
    """As features and labels of a classifier."""
    arrays: dict[str, NDArray[Any]] = {"X": np.ones((3, 5, 4), "f4"), "y": np.arange(3)}
    source = save(tmp_path / "all", arrays)
    told(convert, source, r"are these arrays of all utterances, a row each\? then put .*'ids'")
    source = save(tmp_path / "ids", {**arrays, "ids": np.array(["a", "b", "c"])})
    cache = convert(source, tmp_path / "cache")
    assert set(cache) == {"a", "b", "c"}
    assert (cache.read("b", "X").shape, int(cache.read("b", "y"))) == ((5, 4), 1)


@pytest.mark.parametrize("door", DOORS)
def test_scps_that_a_pattern_names_are_read_as_one(tmp_path: Path, door: Any) -> None:
    """As jobs of Kaldi write them, also of one archive."""
    kaldiio = pytest.importorskip("kaldiio")
    for job, arrays in ((1, SOME), (2, OTHERS)):
        paths = (str(tmp_path / f"raw_mfcc.{job}.{end}") for end in ("ark", "scp"))
        kaldiio.save_ark(next(paths), arrays, scp=next(paths))
    (tmp_path / "text").write_text("".join(f"{id} say {id}\n" for id in FRAMES))
    cache = door(tmp_path / "raw_mfcc.*.scp", tmp_path / "cache")
    holds(cache, FRAMES)
    assert list(cache.annotation("text")) == [f"say {id}" for id in cache.ids]
    lines = (tmp_path / "raw_mfcc.2.scp").read_text().splitlines()
    (tmp_path / "cut.1.scp").write_text(f"{lines[0]}[1:3]\n")
    (tmp_path / "cut.2.scp").write_text(f"{lines[1]}\n{lines[0].replace('u2', 'u9')}[0:1]\n")
    cut = {"u2": OTHERS["u2"][1:4], "u3": OTHERS["u3"], "u9": OTHERS["u2"][:2]}
    holds(door(tmp_path / "cut.*.scp", tmp_path / "other"), cut)


@pytest.mark.parametrize("door", DOORS)
def test_folders_whose_names_end_otherwise_are_taken_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Any
) -> None:
    """As retrieval-based voice conversion leaves them."""
    saved = {f"3_feature768/{id}": array for id, array in FRAMES.items()}
    saved |= {f"2a_f0/{id}.wav": np.arange(len(array)) for id, array in FRAMES.items()}
    source = save_all(tmp_path / "all", saved)
    calls = told(door, source, r"one by one: (.*\))")[1]
    monkeypatch.chdir(tmp_path)
    for call in re.findall(r"featcache\.adopt\([^)]*\)", calls):
        exec(call, {"featcache": featcache})
    cache = featcache.open(tmp_path / "features")
    assert sorted(cache.features) == ["a_f0", "feature768"]
    for id, array in FRAMES.items():
        assert np.array_equal(cache.read(id, "feature768"), array)
        assert np.array_equal(cache.read(id, "a_f0"), np.arange(len(array)))
