"""Stores of others behind a URL: adopted where they lie, and read as those on a disk."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner
from numpy.typing import NDArray
from range_server import Handler, RangeServer, serving
from s3_server import bucket as bucket
from s3_server import endpoint as endpoint
from s3_server import obstore, store_of

import featcache
from featcache import FeatureLoader
from featcache.adoption.place import UrlPlace
from featcache.cli import main
from featcache.errors import (
    AdoptionError,
    CacheError,
    ClosedError,
    ConfigError,
    CorruptCacheError,
    RemoteError,
)
from featcache.remote import RemoteOptions, RemotePlace, options_with_pages, requests_to

RNG, DIMS = np.random.default_rng(3), 64
ARRAYS: dict[str, NDArray[np.float32]] = {
    f"utt-{number:02d}": RNG.normal(size=(int(RNG.integers(1, 90)), DIMS)).astype(np.float32)
    for number in range(12)
}


def as_hdf5(folder: Path) -> str:
    with h5py.File(folder / "feats.h5", "w") as file:
        for id, array in ARRAYS.items():
            file.create_dataset(id, data=array)
    return "feats.h5"


def as_chunked_hdf5(folder: Path) -> str:
    with h5py.File(folder / "chunked.h5", "w") as file:
        for id, array in ARRAYS.items():
            how = {"chunks": (min(16, len(array)), DIMS), "compression": "gzip", "shuffle": True}
            file.create_dataset(id, data=array, **how)
    return "chunked.h5"


def as_tar(folder: Path) -> str:
    import io
    import tarfile

    with tarfile.open(folder / "shard.tar", "w") as tar:
        for id, array in ARRAYS.items():
            for name, data in ((f"{id}.feats.npy", npy(array)), (f"{id}.txt", id.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return "shard.tar"


def npy(array: NDArray[Any]) -> bytes:
    import io

    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def as_npy(folder: Path) -> str:
    (folder / "dump" / "b").mkdir(parents=True)
    for number, (id, array) in enumerate(ARRAYS.items()):
        (folder / "dump" / ("b" if number % 2 else "") / f"{id}.npy").write_bytes(npy(array))
    return "dump"


def as_flat_npy(folder: Path) -> str:
    (folder / "flat").mkdir()
    parts = {
        "feats": np.concatenate(list(ARRAYS.values())),
        "lengths": np.array([len(array) for array in ARRAYS.values()]),
        "ids": np.array(list(ARRAYS)),
    }
    for name, array in parts.items():
        (folder / "flat" / f"{name}.npy").write_bytes(npy(array))
    return "flat"


def as_zarr(folder: Path, version: int) -> str:
    name = f"group-{version}.zarr"
    group = zarr.open_group(str(folder / name), mode="w", zarr_format=version)
    for id, array in ARRAYS.items():
        chunks = (min(16, len(array)), DIMS)
        made = group.create_array(
            id, shape=array.shape, chunks=chunks, dtype="f4", compressors=None
        )
        made[...] = array
    return name


def as_ark(folder: Path) -> str:
    data = folder / "egs" / "data" / "train"
    data.mkdir(parents=True)
    (folder / "egs" / "exp").mkdir()
    lines = []
    with (folder / "egs" / "exp" / "raw.ark").open("wb") as ark:
        for id, array in ARRAYS.items():
            ark.write(f"{id} ".encode())
            lines.append(f"{id} exp/raw.ark:{ark.tell()}\n")
            rows, columns = array.shape
            ark.write(b"\0BFM \4" + rows.to_bytes(4, "little") + b"\4")
            ark.write(columns.to_bytes(4, "little") + array.tobytes())
    (data / "feats.scp").write_text("".join(lines))
    (data / "utt2spk").write_text("".join(f"{id} anna\n" for id in ARRAYS))
    return "egs/data/train"


def as_pt(folder: Path) -> str:
    torch.save({id: torch.from_numpy(array) for id, array in ARRAYS.items()}, folder / "all.pt")
    return "all.pt"


MAKERS: dict[str, Callable[[Path], str]] = {
    "hdf5": as_hdf5,
    "chunked hdf5": as_chunked_hdf5,
    "tar": as_tar,
    "npy": as_npy,
    "flat npy": as_flat_npy,
    "zarr 2": lambda folder: as_zarr(folder, 2),
    "zarr 3": lambda folder: as_zarr(folder, 3),
    "ark": as_ark,
    "pt": as_pt,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with a source of each kind, and the names there."""
    root: Path = tmp_path_factory.mktemp("sources")
    return root, {kind: make(root) for kind, make in MAKERS.items()}


def upload(folder: Path, store: Any, only: str = "") -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix().startswith(only):
            obstore.put(store, path.relative_to(folder).as_posix(), path.read_bytes())


def assert_same(there: featcache.Cache, here: featcache.Cache) -> None:
    """Ids, arrays, windows, batches and annotations are those of a local adoption."""
    assert list(there.ids) == list(here.ids)
    assert there.annotations == here.annotations
    for name in here.annotations:
        rows = np.arange(len(here))
        assert there.annotation(name).take(rows) == here.annotation(name).take(rows)
    (feature,) = here.features
    for id in here.ids:
        array = here.read(id, feature)
        found = there.read(id, feature)
        assert found.tobytes() == array.tobytes()
        assert found.dtype == array.dtype
        middle = len(array) // 2
        assert np.array_equal(there.read(id, feature, middle, len(array)), array[middle:])
    some = list(here.ids)[3:7]
    assert np.array_equal(there.read_batch(some, feature).data, here.read_batch(some, feature).data)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_store_in_a_bucket_is_the_cache_that_it_is_on_a_disk(
    kind: str, sources: tuple[Path, dict[str, str]], bucket: str, endpoint: str, tmp_path: Path
) -> None:
    root, names = sources
    name = names[kind]
    upload(root, store_of(bucket, endpoint), name.partition("/")[0])
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1")
    there = featcache.adopt(f"{bucket}/{name}", tmp_path / "there", remote=how)
    here = featcache.adopt(root / name, tmp_path / "here")
    assert_same(there, here)
    again = featcache.open(tmp_path / "there", remote=how, verify="columns")
    assert_same(again, here)
    assert "hush" not in (tmp_path / "there" / "adopted.json").read_text()
    again.collect()
    assert_same(featcache.open(tmp_path / "there", remote=how, check_reads=True), here)
    here.collect()
    featcache.open(tmp_path / "there", remote=how, verify="arrays")
    (feature,) = here.features
    assert (again.stats(feature).mean == here.stats(feature).mean).all()


@pytest.fixture
def server(sources: tuple[Path, dict[str, str]], tmp_path: Path) -> Iterator[RangeServer]:
    """A web server of copies of the sources, which tests may change."""
    import shutil

    shutil.copytree(sources[0], tmp_path / "served")
    with serving(tmp_path / "served") as state:
        yield state
        requests_to.cache_clear()


def options(tmp_path: Path, **more: Any) -> RemoteOptions:
    more = {"hedge": False, **more}  # requests are counted
    return RemoteOptions(pages=tmp_path / "pages", retry_s=5.0, timeout_s=5.0, **more)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("hdf5", "feats.h5"),
        ("chunked hdf5", "chunked.h5"),
        ("tar", "shard.tar"),
        ("ark", "egs/data/train/feats.scp"),
        ("ark", "egs/exp/raw.ark"),
    ],
)
def test_a_file_of_a_web_server_is_adopted(
    kind: str, name: str, server: RangeServer, tmp_path: Path
) -> None:
    there = featcache.adopt(f"{server.url}/{name}", tmp_path / "there", remote=options(tmp_path))
    assert_same(there, featcache.adopt(tmp_path / "served" / name, tmp_path / "here"))


def test_a_folder_of_a_web_server_is_refused(server: RangeServer, tmp_path: Path) -> None:
    how = RemoteOptions(pages=tmp_path / "pages", retry_s=0.1)
    with pytest.raises(AdoptionError, match=r"cannot be listed.*scp"):
        featcache.adopt(f"{server.url}/dump", tmp_path / "c", remote=how)


def test_a_cache_is_no_source(bucket: str, endpoint: str, tmp_path: Path) -> None:
    with featcache.CacheWriter(
        tmp_path / "own", [featcache.FeatureStorageConfig("f", backend="hdf5")]
    ) as writer:
        writer.write("utt-1", {"f": np.ones((3, 2), np.float32)})
    upload(tmp_path, store_of(bucket, endpoint))
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1")
    (file,) = (path.relative_to(tmp_path) for path in (tmp_path / "own").rglob("*.h5"))
    for name in ("own", file):
        with pytest.raises(AdoptionError, match=r"is a cache of featcache.*featcache\.open"):
            featcache.adopt(f"{bucket}/{name}", tmp_path / "c", remote=how)


def test_what_is_not_there_is_said(bucket: str, endpoint: str, tmp_path: Path) -> None:
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1")
    with pytest.raises(AdoptionError, match="does not exist"):
        featcache.adopt(f"{bucket}/none.h5", tmp_path / "c", remote=how)
    with pytest.raises(ConfigError, match="a user, a query"):
        featcache.adopt("s3://name:hush@bucket/feats.h5", tmp_path / "c")


def test_indexing_reads_headers_in_few_requests(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    with h5py.File(tmp_path / "served" / "large.h5", "w") as file:
        for number in range(300):
            file.create_dataset(f"utt-{number:03d}", data=np.full((250, 40), number, np.float32))
    size = (tmp_path / "served" / "large.h5").stat().st_size
    with serving(tmp_path / "served") as server:
        cache = featcache.adopt(f"{server.url}/large.h5", tmp_path / "c", remote=options(tmp_path))
        asked, nbytes = len(server.requests), server.nbytes
        assert (cache.read("utt-123", "feats") == 123).all()
        read = server.requests[asked:]
        requests_to.cache_clear()
    assert len(read) == 1
    assert asked <= 85
    assert nbytes <= size // 20


@pytest.mark.parametrize("more", [{}, {"compression": "gzip", "chunks": (250, 40)}])
def test_headers_of_many_datasets_are_asked_for_together(
    more: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "served").mkdir()
    noise = np.random.default_rng(0).normal(size=(250, 40)).astype(np.float32)
    with h5py.File(tmp_path / "served" / "large.h5", "w") as file:
        for number in range(300):
            file.create_dataset(f"utt-{number:03d}", data=noise + number, **more)
    with serving(tmp_path / "served") as server:
        server.delay_s = 0.1
        first: list[int] = []  # requests that came while no other one was answered

        def note(_handler: Handler, _data: bytes, _status: int) -> bool:
            first.extend([1] if server.now == 1 else [])
            return False

        server.fault = note
        cache = featcache.adopt(f"{server.url}/large.h5", tmp_path / "c", remote=options(tmp_path))
        assert server.most >= 16
        assert len(first) <= len(server.requests) // 3
        assert np.array_equal(cache.read("utt-123", "feats"), noise + 123)
        requests_to.cache_clear()


def change(path: Path) -> None:
    """Put another content of the same size in the place of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


CHANGED = "changed since it was adopted: adopt its source again"


def test_an_object_that_is_replaced_is_an_error_that_names_it(
    server: RangeServer, tmp_path: Path
) -> None:
    source, how = tmp_path / "served" / "feats.h5", options(tmp_path, gap_bytes=0)
    featcache.adopt(f"{server.url}/feats.h5", tmp_path / "c", remote=how)
    opened = featcache.open(tmp_path / "c", remote=how)
    first, *_, last = opened.ids
    opened.read(last, "feats")
    change(source)
    with pytest.raises(CorruptCacheError, match=rf"feats.h5.*{CHANGED}"):  # while it is open
        opened.read_batch(list(opened.ids), "feats")
    fresh = featcache.open(tmp_path / "c", remote=options(tmp_path / "other"))
    with pytest.raises(CorruptCacheError, match=rf"feats.h5.*{CHANGED}"):  # at the first read
        fresh.read(first, "feats")
    with pytest.raises(CorruptCacheError, match=rf"feats.h5.*{CHANGED}"):
        featcache.open(tmp_path / "c", remote=how, verify="columns")
    source.unlink()
    with pytest.raises(CorruptCacheError, match=r"feats.h5 is missing"):
        featcache.open(tmp_path / "c", remote=how, verify="columns")
    as_hdf5(source.parent)
    again = featcache.adopt(f"{server.url}/feats.h5", tmp_path / "c", remote=how, overwrite=True)
    assert np.array_equal(again.read(last, "feats"), ARRAYS[last])


def test_an_epoch_ends_where_an_object_is_replaced(server: RangeServer, tmp_path: Path) -> None:
    cache = featcache.adopt(
        f"{server.url}/feats.h5", tmp_path / "c", remote=options(tmp_path, gap_bytes=0)
    )
    batches = iter(FeatureLoader(cache, "feats", batch_size=2, threads=1, prefetch_bytes=1))
    next(batches)
    change(tmp_path / "served" / "feats.h5")
    with pytest.raises(CorruptCacheError, match=CHANGED):
        for _ in batches:
            pass


def test_a_loader_reads_through_the_same_pages(server: RangeServer, tmp_path: Path) -> None:
    cache = featcache.adopt(f"{server.url}/shard.tar", tmp_path / "c", remote=options(tmp_path))
    for _ in range(2):
        seen = 0
        for batch in FeatureLoader(cache, "feats", batch_size=5, shuffle=True, seed=1):
            for row, length, id in zip(
                batch["feats"], batch["feats_lengths"], batch["id"], strict=True
            ):
                assert np.array_equal(row[: int(length)].numpy(), ARRAYS[id])
                seen += 1
        assert seen == len(ARRAYS)
        asked = len(server.requests)
    assert len(server.requests) == asked


def _read(cache: featcache.Cache, queue: multiprocessing.Queue[object]) -> None:
    try:
        queue.put(float(cache.read("utt-05", "feats").sum()))
    except ClosedError as error:
        queue.put(str(error))


def test_a_forked_child_is_told(server: RangeServer, tmp_path: Path) -> None:
    cache = featcache.adopt(f"{server.url}/feats.h5", tmp_path / "c", remote=options(tmp_path))
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[object] = context.Queue()
    process = context.Process(target=_read, args=(cache, queue))
    process.start()
    assert "forkserver" in str(queue.get(timeout=60))
    process.join()
    assert np.array_equal(cache.read("utt-05", "feats"), ARRAYS["utt-05"])


def test_a_pickle_reads_with_the_same_pages_and_holds_no_secret(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    cache = featcache.adopt(f"{server.url}/feats.h5", tmp_path / "c", remote=options(tmp_path))
    reader = cache.reader("feats")
    assert np.array_equal(reader("utt-03").numpy(), ARRAYS["utt-03"])
    asked = len(server.requests)
    data = pickle.dumps((cache, reader))
    assert b"hush" not in data
    again, other = pickle.loads(data)  # noqa: S301 (our own)
    assert np.array_equal(again.read("utt-03", "feats"), ARRAYS["utt-03"])
    assert np.array_equal(other("utt-03").numpy(), ARRAYS["utt-03"])
    assert len(server.requests) == asked


def test_what_is_appended_lies_here_and_what_was_adopted_there(
    server: RangeServer, tmp_path: Path
) -> None:
    how = options(tmp_path)
    featcache.adopt(f"{server.url}/feats.h5", tmp_path / "c", remote=how)
    more = {f"more-{number}": np.full((5, DIMS), number, np.float32) for number in range(3)}
    declared = [featcache.FeatureStorageConfig("feats")]
    with featcache.CacheWriter(tmp_path / "c", declared, {"adopted": "hdf5"}) as writer:
        for id, array in more.items():
            writer.write(id, {"feats": array})
    cache = featcache.open(tmp_path / "c", remote=how)
    cache.delete(["utt-00"])
    expected = {**ARRAYS, **more}
    del expected["utt-00"]
    assert list(cache.ids) == sorted(expected)
    batch = cache.read_batch(list(cache.ids), "feats")
    for row, id in zip(batch.data, cache.ids, strict=True):
        assert np.array_equal(row[: len(expected[id])], expected[id])


def test_features_of_two_objects_are_one_cache(server: RangeServer, tmp_path: Path) -> None:
    how = options(tmp_path)
    for feature, name in (("a", "feats.h5"), ("b", "shard.tar")):
        named = {"feature": "a"} if feature == "a" else {}
        featcache.adopt(f"{server.url}/{name}", tmp_path / "c", remote=how, **named)  # type: ignore[arg-type]
    cache = featcache.open(tmp_path / "c", remote=how)
    assert {*cache.features} == {"a", "feats"}
    for id, array in ARRAYS.items():
        assert np.array_equal(cache[id]["a"], array)
        assert np.array_equal(cache[id]["feats"], array)


def test_a_source_that_moved_is_opened_where_it_is(
    bucket: str, endpoint: str, tmp_path: Path
) -> None:
    as_hdf5(tmp_path)
    store = store_of(bucket, endpoint)
    upload(tmp_path, store, "feats.h5")
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1")
    featcache.adopt(f"{bucket}/feats.h5", tmp_path / "c", remote=how)
    (key,) = json.loads((tmp_path / "c" / "adopted.json").read_text())
    obstore.copy(store, "feats.h5", "new place/feats.h5")
    obstore.delete(store, "feats.h5")
    moved = featcache.open(tmp_path / "c", remote=how, roots={key: f"{bucket}/new%20place"})
    assert np.array_equal(moved.read("utt-05", "feats"), ARRAYS["utt-05"])
    here = featcache.open(tmp_path / "c", remote=how, roots={key: tmp_path})
    with pytest.raises(CorruptCacheError, match="adopt its source again"):
        here.read("utt-05", "feats")
    featcache.adopt(tmp_path / "feats.h5", tmp_path / "d")
    (key,) = json.loads((tmp_path / "d" / "adopted.json").read_text())
    there = featcache.open(tmp_path / "d", remote=how, roots={key: f"{bucket}/new%20place"})
    with pytest.raises(CorruptCacheError, match=r"adopted on a disk.*adopt it by its URL"):
        there.read("utt-05", "feats")


def test_conversion_takes_urls(server: RangeServer, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "served" / "filtered.h5", "w") as file:
        for id, array in ARRAYS.items():
            file.create_dataset(id, data=array.astype(">f4"), fletcher32=True, chunks=array.shape)
    how: dict[str, Any] = {"adopting": {"remote": options(tmp_path)}, "progressbar": False}
    served, expected = tmp_path / "served", {id: array.tobytes() for id, array in ARRAYS.items()}
    featcache.convert(served / "feats.h5", served / "cache", progressbar=False)
    for number, name in enumerate(("feats.h5", "filtered.h5", "cache")):
        made = featcache.convert(f"{server.url}/{name}", tmp_path / str(number), **how)
        assert {id: made.read(id, "feats").tobytes() for id in made.ids} == expected
        assert not (tmp_path / str(number) / "adopted.json").exists()


def test_compressed_groups_of_a_bucket_are_converted(
    bucket: str, endpoint: str, tmp_path: Path
) -> None:
    group = zarr.open_group(str(tmp_path / "packed.zarr"), mode="w")
    some = dict(list(ARRAYS.items())[:3])
    for id, array in some.items():
        group.create_array(id, data=array, chunks=(max(len(array) // 2, 1), DIMS))
    for number, (id, array) in enumerate(some.items()):
        (tmp_path / "mixed").mkdir(exist_ok=True)
        np.save(tmp_path / "mixed" / f"{id}.npy", array.astype(("f4", "f8")[number % 2]))
    upload(tmp_path, store_of(bucket, endpoint))
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1")
    for name in ("packed.zarr", "mixed"):
        made = featcache.convert(
            f"{bucket}/{name}", tmp_path / f"{name}-c", adopting={"remote": how}, progressbar=False
        )
        for id, array in some.items():
            assert np.array_equal(made.read(id, "feats"), array)


def test_a_shell_adopts_and_converts(server: RangeServer, tmp_path: Path) -> None:
    for verb in ("adopt", "convert"):
        made = CliRunner().invoke(main, [verb, f"{server.url}/feats.h5", str(tmp_path / verb)])
        assert made.exit_code == 0, made.output
        assert np.array_equal(featcache.open(tmp_path / verb)["utt-05"]["feats"], ARRAYS["utt-05"])
    told = CliRunner().invoke(main, ["info", str(tmp_path / "adopt")]).output
    assert server.url in told
    assert "not there" not in told


def test_a_server_without_etags_is_told_of(
    server: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def plain(handler: Any, data: bytes, status: int) -> bool:
        headers = {"Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
        handler.answer(status, data, headers | {"Content-Range": handler.content_range})
        return True

    server.fault = plain
    cache = featcache.adopt(f"{server.url}/feats.h5", tmp_path / "c", remote=options(tmp_path))
    assert "gives no ETags" in caplog.text
    assert np.array_equal(cache.read("utt-05", "feats"), ARRAYS["utt-05"])


def refuse_from(server: RangeServer, request: int) -> None:
    """Let a server refuse its next requests from one of them on, counted from 1."""
    last = len(server.requests) + request

    def refuse(handler: Any, data: bytes, status: int) -> bool:
        if len(server.requests) >= last:
            handler.answer(403, b"")
        return len(server.requests) >= last

    server.fault = refuse


def test_a_store_that_refuses_is_no_damaged_file(server: RangeServer, tmp_path: Path) -> None:
    for name in ("feats.h5", "shard.tar", "egs/exp/raw.ark"):
        for request in (1, 2, 3):
            refuse_from(server, request)
            how = options(tmp_path / f"{request}-{len(server.requests)}")
            with pytest.raises(RemoteError, match=f"{name}: the store does not let it be read"):
                featcache.adopt(f"{server.url}/{name}", tmp_path / "c", remote=how)
            assert not (tmp_path / "c" / "featcache.json").exists()


def test_a_store_that_refuses_leaves_no_hdf5_file_open(server: RangeServer, tmp_path: Path) -> None:
    # when the process ends, HDF5 would close it by calling Python, which is gone by then
    kinds = h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_GROUP | h5py.h5f.OBJ_DATASET
    for request in (1, 2, 3):
        refuse_from(server, request)
        how = options(tmp_path / f"pages-{request}")
        with pytest.raises(RemoteError) as refused:
            featcache.adopt(f"{server.url}/feats.h5", tmp_path / "c", remote=how)
        names = [h5py.h5f.get_name(each) for each in h5py.h5f.get_obj_ids(types=kinds)]
        assert [name for name in names if b"SourceFile" in name] == [], refused.value


class Garbage:
    """What only the garbage collector lets go of, as it leads to itself."""

    def __init__(self, holds: object) -> None:
        self.holds, self.itself = holds, self


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", [featcache.adopt, featcache.convert])
def test_garbage_of_h5py_that_another_thread_finds_stops_no_adoption(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[..., object]
) -> None:
    # h5py's lock is held while HDF5 waits for bytes, and needed by who collects its objects
    files = [h5py.File(tmp_path / "served" / "feats.h5") for _ in range(100)]
    get = obstore.get

    def get_amid_garbage(*args: Any, **how: Any) -> Any:
        if files:
            Garbage(files.pop())
        assert [[] for _ in range(10)]  # which starts the collector
        return get(*args, **how)

    monkeypatch.setattr(obstore, "get", get_amid_garbage)
    often = gc.get_threshold()
    gc.set_threshold(1)
    try:
        adopting = {"remote": options(tmp_path)}
        how = adopting if way is featcache.adopt else {"adopting": adopting}
        way(f"{server.url}/chunked.h5", tmp_path / "c", **how)
    finally:
        gc.set_threshold(*often)
    assert gc.isenabled()
    assert len(files) < 96
    assert sorted(featcache.open(tmp_path / "c").ids) == sorted(ARRAYS)


def test_what_a_store_refuses_leaves_no_garbage_of_h5py(
    server: RangeServer, tmp_path: Path
) -> None:
    for request in (1, 2, 3):
        refuse_from(server, request)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            with suppress(RemoteError):
                featcache.adopt(
                    f"{server.url}/feats.h5",
                    tmp_path / "c",
                    remote=options(tmp_path / f"pages-{request}"),
                )
            gc.collect()
            found = {type(each).__name__ for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert found & {"Hdf5Datasets", "SourceFile", "RemoteError"} == set()


def test_an_object_that_changes_while_it_is_indexed_is_an_error(
    server: RangeServer, tmp_path: Path
) -> None:
    def replaced(handler: Any, data: bytes, status: int) -> bool:
        if len(server.requests) == 1:
            change(tmp_path / "served" / "feats.h5")
        return False

    server.fault = replaced
    with pytest.raises(AdoptionError, match="changed while it was read"):
        featcache.adopt(f"{server.url}/feats.h5", tmp_path / "c", remote=options(tmp_path))


def test_an_object_that_another_thread_saw_otherwise_is_not_mixed_with_it(
    server: RangeServer, tmp_path: Path
) -> None:
    path = tmp_path / "served" / "feats.h5"
    before = path.read_bytes()
    place = UrlPlace(server.url, options_with_pages(options(tmp_path)))

    def raced(handler: Any, data: bytes, status: int) -> bool:
        server.fault = None
        assert place.has("/feats.h5")  # as another thread, which is first
        path.write_bytes(bytes(len(before)))
        os.utime(path, ns=(0, 1))
        handler.answer_file()
        return True

    server.fault = raced
    with place.open("feats.h5") as source:
        assert source.read(0, 100) == before[:100]


def test_what_needs_a_disk_says_so(server: RangeServer, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(dict(ARRAYS), tmp_path / "served" / "feats.safetensors")
    with pytest.raises(AdoptionError, match="needs it on a disk"):
        featcache.adopt(f"{server.url}/feats.safetensors", tmp_path / "c", remote=options(tmp_path))


def test_repair_drops_nothing_for_a_bucket_that_is_not_reached(
    server: RangeServer, tmp_path: Path
) -> None:
    cache = featcache.adopt(f"{server.url}/feats.h5", tmp_path / "c", remote=options(tmp_path))
    with pytest.raises(CacheError, match=r"behind a URL.*adopt it again"):
        cache.repair()
    assert len(featcache.open(tmp_path / "c")) == len(ARRAYS)


def test_an_empty_table_beside_an_scp_is_no_error(
    sources: tuple[Path, dict[str, str]], bucket: str, endpoint: str, tmp_path: Path
) -> None:
    store = store_of(bucket, endpoint)
    upload(sources[0], store, "egs")
    obstore.put(store, "egs/data/train/text", b"")
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1")
    cache = featcache.adopt(f"{bucket}/egs/data/train/feats.scp", tmp_path / "c", remote=how)
    assert set(cache.annotations) == {"speaker"}
    assert np.array_equal(cache.read("utt-05", "feats"), ARRAYS["utt-05"])


def test_a_header_of_a_folder_costs_a_request(
    sources: tuple[Path, dict[str, str]], bucket: str, endpoint: str, tmp_path: Path
) -> None:
    upload(sources[0], store_of(bucket, endpoint), "dump")
    how = RemoteOptions(pages=str(tmp_path / "pages"), endpoint=endpoint, region="us-east-1")
    featcache.adopt(f"{bucket}/dump", tmp_path / "c", remote=how)
    looked_for = 3  # no file is called as the folder, and no cache is there or around it
    counts = requests_to(RemotePlace.of(bucket, how)).counts
    # what comes while it is looked for may be asked for again
    assert counts.gets - counts.hedges <= looked_for + 2 * len(ARRAYS)


def test_the_commands_take_the_endpoint_of_a_store(
    bucket: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of(bucket, endpoint).put("feats.h5", (tmp_path / as_hdf5(tmp_path)).read_bytes())
    there = [f"{bucket}/feats.h5", "--endpoint", endpoint, "--region", "us-east-1"]
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    for words in (["adopt", str(tmp_path / "a")], ["convert", str(tmp_path / "c")], ["estimate"]):
        made = CliRunner().invoke(main, [words[0], there[0], *words[1:], *there[1:]])
        assert made.exit_code == 0, made.output
    assert featcache.open(tmp_path / "c").ids == sorted(ARRAYS)
    refused = CliRunner().invoke(main, ["adopt", *there, str(tmp_path / "b"), "--anonymous"])
    assert "does not let it be read (permission denied)" in refused.output
    assert "or give --anonymous for a public one" in refused.output
