"""Padded arrays with lengths, and rows with ids: read in place, or copied, and never guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from foreign_stores import assert_holds, random_arrays
from npy_folders import save_all
from numpy.typing import NDArray

import featcache
from featcache.errors import AdoptionError

Arrays = Mapping[str, NDArray[Any]]
FRAMES = {f"utt{n}": array for n, array in enumerate(random_arrays(1, count=5).values())}
PITCH = {id: array[:, 0].copy() for id, array in FRAMES.items()}
LENGTHS = np.array([len(array) for array in FRAMES.values()])
IDS = np.array([*FRAMES])


def padded(arrays: Arrays, longest: int = 0, value: float = 7) -> NDArray[Any]:
    """Arrays in one, with what is no zero behind them."""
    some = next(iter(arrays.values()))
    frames = longest or max(map(len, arrays.values()))
    found = np.full((len(arrays), frames, *some.shape[1:]), value, some.dtype)
    for row, array in zip(found, arrays.values(), strict=True):
        row[: len(array)] = array
    return found


def npy(at: Path, arrays: Arrays) -> Path:
    return save_all(at / "npy", dict(arrays))


def hdf5(at: Path, arrays: Arrays, **options: Any) -> Path:
    with h5py.File(at / "all.h5", "w") as file:
        for name, array in arrays.items():
            is_text = array.dtype.kind == "U"
            data = array.astype(object) if is_text else array
            file.create_dataset(name, data=data, **({} if array.ndim < 2 else options))
    return at / "all.h5"


def hdf5_compressed(at: Path, arrays: Arrays) -> Path:
    return hdf5(at, arrays, compression="gzip", chunks=True)


def zarr_group(at: Path, arrays: Arrays, **options: Any) -> Path:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(at / "all.zarr", mode="w", zarr_format=2)
    for name, array in arrays.items():
        dtype = str if array.dtype.kind == "U" else array.dtype
        chosen = options if array.ndim > 1 else {}
        group.create_array(name, shape=array.shape, dtype=dtype, **chosen)[...] = array
    return at / "all.zarr"


def zarr_plain(at: Path, arrays: Arrays) -> Path:
    return zarr_group(at, arrays, compressors=None)


def npz(at: Path, arrays: Arrays) -> Path:
    held: dict[str, Any] = dict(arrays)
    np.savez_compressed(at / "all.npz", **held)
    return at / "all.npz"


def pt(at: Path, arrays: Arrays) -> Path:
    held = {
        name: array.tolist() if array.dtype.kind == "U" else torch.from_numpy(array)
        for name, array in arrays.items()
    }
    torch.save(held, at / "all.pt")
    return at / "all.pt"


def safetensors(at: Path, arrays: Arrays) -> Path:
    numpy = pytest.importorskip("safetensors.numpy")
    held = {name: array for name, array in arrays.items() if array.dtype.kind != "U"}
    numpy.save_file(held, at / "all.safetensors")
    return at / "all.safetensors"


IN_PLACE = [npy, hdf5, zarr_plain, safetensors]
STORES = [*IN_PLACE, hdf5_compressed, zarr_group, npz, pt]


def converted(source: Path, into: Path, **settings: Any) -> featcache.Cache:
    return featcache.convert(source, into / "cache", adopting=settings, progressbar=False)


def taken(store: Callable[..., Path], source: Path, at: Path, **settings: Any) -> featcache.Cache:
    if store in IN_PLACE:
        cache = featcache.adopt(source, at / "adopted", **settings)
        cache.collect()
        assert featcache.open(cache.path, verify="arrays").fingerprint == cache.fingerprint
        return cache
    with pytest.raises(AdoptionError, match=r"featcache\.convert makes"):
        featcache.adopt(source, at / "adopted", **settings)
    return converted(source, at, **settings)


def named(arrays: Arrays, store: Callable[..., Path]) -> Arrays:
    if store is not safetensors:  # which holds no texts
        return arrays
    return {f"{number:08d}": array for number, array in enumerate(arrays.values())}


@pytest.mark.parametrize("store", STORES)
def test_padded_arrays_are_cut_by_their_lengths(tmp_path: Path, store: Callable[..., Path]) -> None:
    both = {"mel": padded(FRAMES), "pitch": padded(PITCH), "lengths": LENGTHS, "ids": IDS}
    cache = taken(store, store(tmp_path, both), tmp_path)
    assert_holds(cache, "mel", named(FRAMES, store))
    assert_holds(cache, "pitch", named(PITCH, store))


@pytest.mark.parametrize("store", [each for each in STORES if each is not safetensors])
def test_ids_that_a_list_names_may_be_called_like_statistics(
    tmp_path: Path, store: Callable[..., Path]
) -> None:
    ids = np.array([*list(FRAMES)[:-1], "mean"])
    source = store(tmp_path, {"mel": padded(FRAMES), "lengths": LENGTHS, "ids": ids})
    cache = taken(store, source, tmp_path)
    assert_holds(cache, "feats", dict(zip(ids.tolist(), FRAMES.values(), strict=True)))


@pytest.mark.parametrize("store", STORES)
def test_frames_of_padded_arrays_may_be_another_axis(
    tmp_path: Path, store: Callable[..., Path]
) -> None:
    arrays = {"mel": np.ascontiguousarray(padded(FRAMES).transpose(0, 2, 1)), "lengths": LENGTHS}
    source = store(tmp_path, {**arrays, "ids": IDS})
    for door in (featcache.adopt, featcache.convert):
        with pytest.raises(AdoptionError):
            door(source, tmp_path / "refused")
    cache = taken(store, source, tmp_path, time_axis=1)
    assert_holds(cache, "feats", named(FRAMES, store))


@pytest.mark.parametrize("store", STORES)
def test_rows_beside_ids_are_an_utterance_each(tmp_path: Path, store: Callable[..., Path]) -> None:
    if store is safetensors:
        return
    rows = {id: array.mean(0) for id, array in FRAMES.items()}
    arrays = {"xvector": np.stack([*rows.values()]), "ids": IDS}
    cache = taken(store, store(tmp_path, arrays), tmp_path)
    assert not cache.has_frames("feats")
    assert set(cache) == set(rows)
    assert all(np.array_equal(cache.read(id, "feats"), row) for id, row in rows.items())


@pytest.mark.parametrize("store", [npy, hdf5, zarr_plain, npz, pt])
def test_lengths_that_do_not_fill_the_padding_need_a_word(
    tmp_path: Path, store: Callable[..., Path]
) -> None:
    """They might as well be of another axis, or of other arrays."""
    source = store(tmp_path, {"mel": padded(FRAMES, longest=99), "lengths": LENGTHS, "ids": IDS})
    with pytest.raises(AdoptionError, match=r"padded to more than the longest, give time_axis=0"):
        converted(source, tmp_path)
    assert_holds(converted(source, tmp_path, time_axis=0), "feats", FRAMES)


@pytest.mark.parametrize(
    "columns",
    [
        {"lengths": [1, 1, 1]},  # of frames one after the other, or of rows
        {"lengths": [2, 4]},
        {"lengths": [2, 4, -1]},
        {"lengths": [4, 2, 1], "ids": ["a", "b"]},
        {"ids": ["a", "b"]},
    ],
)
def test_what_may_be_cut_in_two_ways_or_in_none_is_refused(
    tmp_path: Path, columns: dict[str, list[Any]]
) -> None:
    data = np.zeros((3, 1 if columns.get("lengths") == [1, 1, 1] else 4, 2), np.float32)
    arrays = {"data": data, **{name: np.array(each) for name, each in columns.items()}}
    for store in (npy, hdf5, npz, pt):
        with pytest.raises(AdoptionError, match=r"do not cut the 3 frames of 'data'"):
            converted(store(tmp_path, arrays), tmp_path)


def test_arrays_without_frames_are_not_cut_by_lengths(tmp_path: Path) -> None:
    arrays = {"emb": np.ones((3, 4)), "lengths": np.array([4, 2, 1]), "ids": IDS[:3]}
    for store in (npy, hdf5, npz):
        with pytest.raises(AdoptionError, match="do not cut the 3 frames of 'emb'"):
            converted(store(tmp_path, arrays), tmp_path, time_axis=None)


@pytest.mark.parametrize("end", [".npz", ".pt"])
def test_files_of_batches_are_taken_by_their_ids_and_refused_without(
    tmp_path: Path, end: str
) -> None:
    store = npz if end == ".npz" else pt
    for number, some in enumerate((slice(0, 2), slice(2, 5))):
        ids = IDS[some]
        batch = {"mel": padded({id: FRAMES[id] for id in ids}), "lengths": LENGTHS[some]}
        for folder, arrays in (("with", {**batch, "ids": ids}), ("without", batch)):
            (tmp_path / folder).mkdir(exist_ok=True)
            store(tmp_path, arrays).rename(tmp_path / folder / f"{number}{end}")
    assert_holds(converted(tmp_path / "with", tmp_path), "feats", FRAMES)
    for door in (featcache.adopt, featcache.convert):
        with pytest.raises(AdoptionError):
            door(tmp_path / "without", tmp_path / "refused")
    with pytest.raises(AdoptionError, match=r"may be a batch of 2 .*give pattern='{id}'"):
        featcache.convert(tmp_path / "without", tmp_path / "refused")


@pytest.mark.parametrize(("tokens", "is_told"), [(2, True), (3, False)])
def test_tokens_called_ids_in_files_of_an_utterance_are_not_its_ids(
    tmp_path: Path, tokens: int, is_told: bool
) -> None:
    (tmp_path / "all").mkdir()
    for number in range(3):
        arrays = {"mel": np.ones((3, 4)), "ids": np.arange(tokens) + 10 * number}
        npz(tmp_path, arrays).rename(tmp_path / "all" / f"u{number}.npz")
    if not is_told:
        with pytest.raises(AdoptionError, match=r"may be a batch of 3 .* by 'ids'; .*'{id}'"):
            converted(tmp_path / "all", tmp_path)
    cache = converted(tmp_path / "all", tmp_path, **({} if is_told else {"pattern": "{id}"}))
    assert list(cache) == ["u0", "u1", "u2"]
    assert cache.read("u1", "ids").tolist() == [*range(10, 10 + tokens)]


def test_a_list_of_the_files_beside_them_is_no_list_of_rows(tmp_path: Path) -> None:
    source = npy(tmp_path, FRAMES)
    (source / "ids.txt").write_text("".join(f"{id}\n" for id in FRAMES))
    assert_holds(featcache.adopt(source, tmp_path / "cache"), "feats", FRAMES)


def test_members_of_several_kinds_in_shards_are_all_taken(tmp_path: Path) -> None:
    import io
    import tarfile

    with tarfile.open(tmp_path / "all.tar", "w") as file:
        for id, array in FRAMES.items():
            for name, save, each in (
                ("mel.npy", np.save, array),
                ("pitch.pth", lambda into, held: torch.save(held, into), torch.tensor(PITCH[id])),
            ):
                buffer = io.BytesIO()
                save(buffer, each)
                about = tarfile.TarInfo(f"{id}.{name}")
                about.size = buffer.tell()
                buffer.seek(0)
                file.addfile(about, buffer)
    with pytest.raises(AdoptionError, match=r"fields 'pitch\.pth', which libraries read"):
        featcache.adopt(tmp_path / "all.tar", tmp_path / "adopted")
    cache = converted(tmp_path / "all.tar", tmp_path)
    assert_holds(cache, "mel", FRAMES)
    assert_holds(cache, "pitch", PITCH)


def test_an_scp_of_datasets_names_the_file_to_give(tmp_path: Path) -> None:
    """As ESPnet writes features of type hdf5."""
    source = hdf5(tmp_path, FRAMES)
    (tmp_path / "feats.scp").write_text("".join(f"{id} {source}:{id}\n" for id in FRAMES))
    with pytest.raises(AdoptionError, match=rf"dataset of '{source}'.* give that file as the sou"):
        featcache.adopt(tmp_path / "feats.scp", tmp_path / "cache")
    assert_holds(featcache.adopt(source, tmp_path / "cache"), "feats", FRAMES)
