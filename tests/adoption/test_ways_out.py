"""Each way out that a refusal of a source names is gone, for that very source."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import featcache
from featcache import Cache, CacheWriter, FeatureStorageConfig
from featcache.errors import AdoptionError

Arrays = dict[str, NDArray[Any]]
FRAMES = np.arange(20, dtype=np.float32).reshape(5, 4)


def npy(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> Path:
    for name, array in arrays.items():
        (folder / f"{name}.npy").parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{name}.npy", array)
    return folder


def hdf5(path: Path, name: str = "u1", **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset(name, **{"data": FRAMES, **options})
    return path


def orders(at: Path) -> Path:
    return npy(at / "all", {"u1": np.asfortranarray(FRAMES), "u2": FRAMES})


def byte_orders(at: Path) -> Path:
    return npy(at / "all", {"u1": FRAMES.astype(">f4"), "u2": FRAMES})


def pickled(at: Path) -> Path:
    (at / "all").mkdir()
    np.save(at / "all" / "u1.npy", np.array([*FRAMES, None], object)[:-1], allow_pickle=True)
    return at / "all"


def two_dtypes(at: Path) -> Path:
    return npy(at / "all", {"u1": FRAMES, "u2": FRAMES.astype(np.float64)})


def batches(at: Path) -> Path:
    return npy(at / "all", {"u1": FRAMES[np.newaxis], "u2": FRAMES[np.newaxis]})


def batches_of_several_lengths(at: Path) -> Path:
    return npy(at / "all", {"u1": FRAMES[np.newaxis], "u2": FRAMES[np.newaxis, :3]})


def transposed(at: Path) -> Path:
    return npy(at / "all", {"u1": FRAMES.T.copy(), "u2": FRAMES[:3].T.copy()})


def features_in_folders(at: Path) -> Path:
    return npy(at / "all", {f"{x}/u{n}": FRAMES for x in ("mel", "pitch") for n in range(3)})


def features_in_tensors(at: Path) -> Path:
    (at / "all").mkdir()
    for n in range(3):
        for feature in ("mel", "pitch"):
            torch.save(torch.from_numpy(FRAMES), at / "all" / f"u{n}_{feature}.pt")
    return at / "all"


def tensors_of_ids(at: Path) -> Path:
    (at / "all").mkdir()
    torch.save({f"u{n}": torch.from_numpy(FRAMES) for n in range(3)}, at / "all" / "emb.pt")
    return at / "all"


def tensor(at: Path, content: object, **options: Any) -> Path:
    (at / "all").mkdir()
    torch.save(content, at / "all" / "u1.pt", **options)
    return at / "all"


def part_of_a_tensor(at: Path) -> Path:
    return tensor(at, torch.from_numpy(np.c_[FRAMES, FRAMES])[:, :4])


def legacy_tensor(at: Path) -> Path:
    return tensor(at, torch.from_numpy(FRAMES), _use_new_zipfile_serialization=False)


def array_in_a_pickle(at: Path) -> Path:
    return tensor(at, FRAMES)


def tensors_in_a_list(at: Path) -> Path:
    return tensor(at, [torch.from_numpy(FRAMES)])


def sparse_tensor(at: Path) -> Path:
    return tensor(at, torch.from_numpy(FRAMES).to_sparse())


def files_of_utterances(at: Path) -> Path:
    (at / "all").mkdir()
    for n in range(3):
        with h5py.File(at / "all" / f"u{n}.h5", "w") as file:
            file["feats"], file["wave"] = FRAMES, FRAMES[:, 0]
    return at / "all"


def files_of_a_dataset(at: Path) -> Path:
    (at / "all").mkdir()
    return hdf5(hdf5(at / "all" / "u1.h5", "x").with_name("u2.h5"), "x").parent


def flat_of_other_lengths(at: Path) -> Path:
    return npy(at / "all", {"feats": FRAMES, "lengths": np.array([2, 2])})


def zarr_group(at: Path, **options: Any) -> Path:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(at / "all.zarr", mode="w", zarr_format=2)
    group.create_array("u1", shape=FRAMES.shape, dtype="f4", **options)[...] = FRAMES
    return at / "all.zarr"


def compressed_zarr(at: Path) -> Path:
    return zarr_group(at)


def cut_zarr(at: Path) -> Path:
    return zarr_group(at, chunks=(5, 2), compressors=None)


def zipped(at: Path) -> Path:
    np.savez(at / "all.npz", u1=FRAMES)
    return at / "all.npz"


def beside_others(at: Path) -> Path:
    folder = npy(at / "all", {"u1": FRAMES})
    (folder / "a.flac").touch()
    return folder


def grouped(at: Path) -> Path:
    return hdf5(at / "all.h5", "feats/u1")


def virtual(at: Path) -> Path:
    hdf5(at / "other.h5")
    layout = h5py.VirtualLayout(FRAMES.shape, FRAMES.dtype)
    layout[:] = h5py.VirtualSource(str(at / "other.h5"), "u1", FRAMES.shape)
    with h5py.File(at / "all.h5", "w") as file:
        file.create_virtual_dataset("u1", layout)
    return at / "all.h5"


def external(at: Path) -> Path:
    (at / "raw").write_bytes(FRAMES.tobytes())
    with h5py.File(at / "all.h5", "w") as file:
        file.create_dataset("u1", FRAMES.shape, "<f4", external=[(str(at / "raw"), 0, 80)])
    return at / "all.h5"


def never_written(at: Path) -> Path:
    with h5py.File(at / "all.h5", "w") as file:
        file.create_dataset("u1", FRAMES.shape, "<f4", chunks=(5, 4))
    return at / "all.h5"


def never_written_at_once(at: Path) -> Path:
    with h5py.File(at / "all.h5", "w") as file:
        file.create_dataset("u1", FRAMES.shape, "<f4")
    return at / "all.h5"


def written_in_part(at: Path) -> Path:
    with h5py.File(at / "all.h5", "w") as file:
        dataset = file.create_dataset("u1", FRAMES.shape, "<f4", chunks=(2, 4))
        dataset[:2] = 1
    return at / "all.h5"


def compact(at: Path) -> Path:
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_layout(h5py.h5d.COMPACT)
    with h5py.File(at / "all.h5", "w") as file:
        space = h5py.h5s.create_simple(FRAMES.shape)
        dataset = h5py.h5d.create(file.id, b"u1", h5py.h5t.IEEE_F32LE, space, made)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, FRAMES)
    return at / "all.h5"


def lzf(at: Path) -> Path:
    return hdf5(at / "all.h5", chunks=(1, 4), compression="lzf")


def lzf_in_groups(at: Path) -> Path:
    return hdf5(at / "all.h5", "feats/u1", chunks=(1, 4), compression="lzf")


def big_endian_hdf5(at: Path) -> Path:
    return hdf5(at / "all.h5", dtype=">f4")


def own_shards(at: Path) -> Path:
    with CacheWriter(at / "own", [FeatureStorageConfig("f", backend="webdataset")]) as writer:
        writer.write("u1", {"f": FRAMES})
    return at / "own"


def splits(at: Path) -> Path:
    return npy(at / "all", {"dev": np.stack([FRAMES, FRAMES]), "train": np.stack([FRAMES] * 3)})


def splits_cut(at: Path, **beside: list[int]) -> Path:
    arrays = {"dev": np.r_[FRAMES, FRAMES[:3]], "train": np.r_[FRAMES, FRAMES, FRAMES[:1]]}
    columns = {f"{split}_{k}": np.array(v) for k, v in beside.items() for split in arrays}
    return npy(at / "all", {**arrays, **columns})


def splits_with_offsets(at: Path) -> Path:
    return splits_cut(at, offsets=[0, 5, 8])


def splits_with_starts(at: Path) -> Path:
    return splits_cut(at, starts=[0, 5])


def splits_with_lengths(at: Path) -> Path:
    return splits_cut(at, lengths=[5, 3])


def missing_key(at: Path) -> Path:
    path = npy(at / "all" / "collect_feats" / "data_feats", {"u1": FRAMES}) / "u1.npy"
    (at / "all" / "collect_feats" / "feats.scp").write_text(f"u1 {path}\n")
    (at / "all" / "stats_keys").write_text("feats\npitch\n")
    return at / "all"


SOURCES: list[Callable[[Path], Path]] = [
    orders, byte_orders, two_dtypes, pickled, batches, batches_of_several_lengths, transposed,
    features_in_folders, features_in_tensors, tensors_of_ids, part_of_a_tensor, legacy_tensor,
    array_in_a_pickle, tensors_in_a_list, sparse_tensor, files_of_utterances, files_of_a_dataset,
    flat_of_other_lengths, compressed_zarr, cut_zarr, zipped, beside_others, grouped, virtual,
    external, never_written, never_written_at_once, written_in_part, compact, lzf, lzf_in_groups,
    big_endian_hdf5, own_shards, missing_key, splits, splits_with_offsets, splits_with_starts,
    splits_with_lengths,
]  # fmt: skip


class Doors:
    """`adopt` and `convert`, each with the settings of adoption where it takes them."""

    def __init__(self, name: str, into: Path) -> None:
        self.name = name
        self._into, self._count = into, 0

    def __call__(self, source: Path, **settings: Any) -> Cache:
        self._count += 1
        into = self._into / f"cache-{self._count}"
        if self.name == "adopt":
            return featcache.adopt(source, into, **settings)
        return featcache.convert(source, into, adopting=settings, progressbar=False)


def by_its_library(source: Path, door: Doors) -> object:
    """Read with NumPy, torch or h5py, and write with `CacheWriter`."""
    arrays: Arrays = {}
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*.*"))
    for path in files:
        if path.suffix == ".npy":
            loaded = np.load(path, allow_pickle=True)  # of our own
            loaded = np.stack(list(loaded)) if loaded.dtype == object else loaded
            arrays[path.stem] = np.asarray(loaded, "<f4", order="C")
        elif path.suffix == ".npz":
            arrays |= dict(np.load(path))
        elif path.suffix == ".pt":
            loaded = torch.load(path, weights_only=False)  # of our own
            loaded = loaded[0] if isinstance(loaded, list) else loaded
            is_sparse = isinstance(loaded, torch.Tensor) and loaded.is_sparse
            arrays[path.stem] = np.asarray(loaded.to_dense() if is_sparse else loaded)
        elif path.suffix == ".h5":
            with h5py.File(path) as file:
                arrays |= {f"{path.stem}-{name}": file[name][()] for name in file}
    with CacheWriter(source.parent / f"by-{door.name}", [FeatureStorageConfig("f")]) as writer:
        for id, array in arrays.items():
            if array.ndim == 1:
                continue
            frames = array[0] if len(array) == 1 else array
            writer.write(id, {"f": frames if frames.shape[-1] == FRAMES.shape[-1] else frames.T})
    return featcache.open(source.parent / f"by-{door.name}")


def loaded(source: Path, door: Doors) -> object:
    """Load whatever it is, and convert the arrays."""
    (path,) = [source] if source.is_file() else source.glob("*.*")
    held = torch.load(path, weights_only=False)
    array = held[0] if isinstance(held, list) else held.to_dense()
    into = source.parent / f"loaded-{door.name}"
    return featcache.convert({path.stem: array}, into, progressbar=False)


def typed(line: str, into: Path) -> object:
    """Type the line that a refusal has."""
    known = {"featcache": featcache, "h5py": h5py, "numpy": np, "pathlib": pathlib, "torch": torch}
    made: Cache = eval(line.replace("'features'", repr(str(into))), known)  # noqa: S307
    array = made.read(made.ids[0], made.features[0])
    assert np.array_equal(array.astype("f4"), FRAMES)
    return made


def changed(source: Path, door: Doors, change: Callable[[NDArray[Any]], NDArray[Any]]) -> object:
    """Store the arrays otherwise, and go through the same door."""
    arrays = {path.stem: change(np.load(path)) for path in source.rglob("*.npy")}
    return door(npy(source.parent / f"changed-{door.name}", arrays))


def with_pattern(source: Path, door: Doors, pattern: str) -> Cache:
    try:
        return door(source, pattern=pattern)
    except AdoptionError as error:  # a way that leads to the next one
        if door.name == "convert" or "featcache.convert makes a cache of it" not in str(error):
            raise
        return Doors("convert", source.parent / f"by-{len(pattern)}")(source, pattern=pattern)


def one_by_one(source: Path, door: Doors, pattern: str, feature: str) -> Cache:
    for each in ("mel", "pitch"):
        settings: dict[str, Any] = {"pattern": pattern.replace(feature, each), "feature": each}
        featcache.adopt(source, source.parent / f"one-{door.name}", **settings)
    return featcache.open(source.parent / f"one-{door.name}")


# what a refusal may say, and how it is done; patterns that are looked for in this order, and taken
# out of the message
WAYS: dict[str, Callable[[Path, Doors, re.Match[str]], object]] = {
    r"as by (featcache\.convert\(.*, 'features')\)": lambda source, door, told: typed(
        f"{told[1]}, progressbar=False)", source.parent / f"typed-{door.name}"
    ),
    r"one by one: (featcache\.adopt\([^)]*\))": lambda source, door, told: typed(
        told[1], source.parent / f"typed-{door.name}"
    ),
    r"adopt them one by one into one cache, as with pattern='([^']+)' and feature='([^']+)'":
        lambda source, door, told: one_by_one(source, door, told[1], told[2]),
    r"or pattern='(\{id\})' where ids have slashes|pattern='([^']+)'":
        lambda source, door, told: with_pattern(source, door, told[1] or told[2]),
    r"give time_axis=(\d)": lambda source, door, told: door(source, time_axis=int(told[1])),
    r"store array\[0\] of each":
        lambda source, door, told: changed(source, door, lambda array: array[0]),
    r"np\.load\(\.\.\., allow_pickle=True\)|load it yourself if you trust it":
        lambda source, door, told: None,
    r"store real and imaginary parts as two features": lambda source, door, told: None,
    r"featcache\.convert makes a cache of it, by a copy \(adopting= takes the settings of adopt\)":
        lambda source, door, told: Doors("convert", source.parent / "by-copy")(source),
    r"featcache\.convert\(\{id: array, \.\.\.\}, 'features'\)":
        lambda source, door, told: loaded(source, door),
    r"featcache\.open reads": lambda source, door, told: featcache.open(source),
    r"name the file itself": lambda source, door, told: door(next(source.glob("*.pt"))),
    r"each by its scp": lambda source, door, told: door(source / "collect_feats/feats.scp"),
    r"write a cache of it \(featcache\.CacheWriter\)":
        lambda source, door, told: by_its_library(source, door),
}  # fmt: skip
KIND = r"if it is of one of them all the same, give kind=, one of ([^;]+)"
SETTINGS = (
    r"\(settings of featcache\.adopt, such as kind=, are given as adopting=\{'kind': \.\.\.\}\)"
)


@pytest.mark.parametrize("name", ["adopt", "convert"])
@pytest.mark.parametrize("make", SOURCES)
def test_each_way_out_that_a_refusal_names_works(
    tmp_path: Path, make: Callable[[Path], Path], name: str
) -> None:
    source, door = make(tmp_path), Doors(name, tmp_path / "caches")
    try:
        door(source)
    except AdoptionError as error:
        message = str(error)
    else:
        assert name == "convert"  # as `adopt` says of some
        return
    ways = 0
    if name == "convert":
        assert re.search(SETTINGS, message)
        assert "featcache.convert makes" not in message  # it does not
    for pattern, go in WAYS.items():
        for told in re.finditer(pattern, message):
            ways += 1
            go(source, door, told)
        message = re.sub(pattern, "", message)
    for told in re.finditer(KIND, message):
        kinds = re.findall(r"'(\w+)'", told[1])
        assert sorted(kinds) == sorted(featcache.registry.kind_names())
        if make is beside_others:
            assert list(door(source, kind="npy")) == ["u1"]
        ways += 1
    message = re.sub(SETTINGS, "", re.sub(KIND, "", message))
    assert ways, f"no way out of this: {message}"
    assert not re.search(r"\w+=|featcache\.\w", message), f"a way out that is not tried: {message}"


def test_a_setting_that_is_none_of_the_kind_is_told(tmp_path: Path) -> None:
    """`convert` of datasets in groups that are not adopted takes the pattern, as is said."""
    source = lzf_in_groups(tmp_path)
    with pytest.raises(AdoptionError, match=r"convert makes.*\(adopting= takes the settings"):
        featcache.adopt(source, tmp_path / "a", pattern="{feature}/{id}")
    settings = {"pattern": "{feature}/{id}"}
    cache = featcache.convert(source, tmp_path / "b", adopting=settings, progressbar=False)
    assert cache.read("u1", "feats").tobytes() == FRAMES.tobytes()
