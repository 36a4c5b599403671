"""Caches behind a URL: the same as on a disk, in few requests, and never wrong bytes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import shutil
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from range_server import Fault, Handler, RangeServer, serving

import featcache
from featcache import CacheWriter, FeatureLoader, FeatureStorageConfig, errors
from featcache.errors import CacheError, ClosedError, ConfigError, CorruptCacheError, RemoteError
from featcache.reading import RemoteCache
from featcache.remote import RemoteOptions, RemotePlace, files, pages, requests_to
from featcache.samplers import BucketBatchSampler

pytest.importorskip("obstore")
BACKENDS = ("memmap", "hdf5", "webdataset", "zarr", "lilcom")
RNG = np.random.default_rng(0)
ARRAYS: dict[str, NDArray[np.float32]] = {
    f"utt-{number:03d}": RNG.normal(size=(int(RNG.integers(1, 400)), 20)).astype(np.float32)
    for number in range(60)
}


def write(path: Path, backend: str = "memmap") -> None:
    with CacheWriter(path, features=[FeatureStorageConfig("fbank", backend=backend)]) as writer:
        for id, array in ARRAYS.items():
            writer.write(id, {"fbank": array}, annotations={"speaker": id[-1]})


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("bucket")
    for backend in BACKENDS:
        write(root / backend, backend)
    return root


@pytest.fixture
def server(bucket: Path) -> Iterator[RangeServer]:
    with serving(bucket) as state:
        yield state
        requests_to.cache_clear()


def options(tmp_path: Path, **more: object) -> RemoteOptions:
    more = {"hedge": False, **more}  # requests are counted
    return RemoteOptions(pages=tmp_path / "pages", retry_s=20.0, timeout_s=10.0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_behind_a_url_reads_as_one_on_a_disk(
    backend: str, bucket: Path, server: RangeServer, tmp_path: Path
) -> None:
    here = featcache.open(bucket / backend)
    there = featcache.open(f"{server.url}/{backend}", remote=options(tmp_path))
    assert list(there.ids) == list(here.ids)
    assert (there.lengths("fbank") == here.lengths("fbank")).all()
    assert (there.stats("fbank").mean == here.stats("fbank").mean).all()
    assert there.annotation("speaker").take(np.arange(2)) == here.annotation("speaker").take(
        np.arange(2)
    )
    for id in ARRAYS:
        end = len(ARRAYS[id])
        assert np.array_equal(there.read(id, "fbank"), here.read(id, "fbank"))
        some = there.read(id, "fbank", start=end // 3, stop=end // 2)
        assert np.array_equal(some, here.read(id, "fbank", start=end // 3, stop=end // 2))
    ids = list(ARRAYS)[5:20]
    mine, theirs = here.read_batch(ids, "fbank"), there.read_batch(ids, "fbank")
    assert np.array_equal(mine.data, theirs.data)
    view = there.filter(speaker="7")
    assert np.array_equal(view.read(view.id(0), "fbank"), here.read(view.id(0), "fbank"))


def epoch_of(cache: featcache.Cache, threads: int = 1) -> None:
    """Read an epoch, and compare it with what was written."""
    sampler = BucketBatchSampler(cache, max_frames=2000, seed=1)
    seen = 0
    for batch in FeatureLoader(cache, "fbank", batch_sampler=sampler, threads=threads):
        for row, length, id in zip(
            batch["fbank"], batch["fbank_lengths"], batch["id"], strict=True
        ):
            seen += 1
            assert np.array_equal(row[: int(length)].numpy(), ARRAYS[id])
    assert seen == len(ARRAYS)


def test_an_epoch_asks_for_each_byte_once_and_the_next_for_none(
    server: RangeServer, tmp_path: Path
) -> None:
    cache = featcache.open(f"{server.url}/memmap", remote=options(tmp_path, gap_bytes=0))
    asked = len(server.requests)
    epoch_of(cache)
    wanted = sum(array.nbytes for array in ARRAYS.values())
    read = server.requests[asked:]
    assert sum(nbytes for _, _, nbytes in read) == wanted
    assert len(read) <= len(ARRAYS)
    done = len(server.requests)
    epoch_of(cache)
    epoch_of(featcache.open(f"{server.url}/memmap", remote=options(tmp_path)))  # kept on the disk
    assert len(server.requests) == done


def test_pages_that_go_after_many_epochs_without_a_request_are_asked_for_ahead_again(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "QUIET", len(ARRAYS))
    monkeypatch.setattr(pages, "USED_S", 0.0)
    cache = featcache.open(f"{server.url}/memmap", remote=options(tmp_path, gap_bytes=0))
    for _ in range(3):
        epoch_of(cache)
    for path in (tmp_path / "pages").glob(f"*/*{pages.SUFFIX}"):  # as another process does
        path.unlink()
    id, asked = next(iter(ARRAYS)), len(server.requests)
    assert np.array_equal(cache.read(id, "fbank"), ARRAYS[id])  # the first that is lacking
    server.delay_s, server.most = 0.02, 0
    batches = FeatureLoader(cache, "fbank", batch_size=2, shuffle=True, seed=1)
    assert sum(len(batch["id"]) for batch in batches) == len(ARRAYS)
    assert len(server.requests) - asked > 1
    assert server.most > 4  # of two batches
    epoch_of(cache)


@pytest.mark.parametrize("backend", ["memmap", "webdataset"])
def test_an_array_that_was_read_before_is_given_without_a_copy(
    backend: str, server: RangeServer, tmp_path: Path
) -> None:
    cache = featcache.open(f"{server.url}/{backend}", remote=options(tmp_path))
    ids = list(ARRAYS)[:30]  # so no container is here as a whole
    cache.read_batch(ids, "fbank")
    asked = len(server.requests)
    for id in ids:
        one, same = (cache.read(id, "fbank", copy=False) for _ in range(2))
        assert np.shares_memory(one, same)
        assert not one.flags.writeable
        assert np.array_equal(one, ARRAYS[id])
        assert np.array_equal(cache.read(id, "fbank", stop=1, copy=False), ARRAYS[id][:1])
    assert len(server.requests) == asked


def test_what_is_read_ahead_is_asked_for_over_several_batches(
    server: RangeServer, tmp_path: Path
) -> None:
    cache = featcache.open(f"{server.url}/memmap", remote=options(tmp_path, gap_bytes=0))
    server.delay_s, server.most = 0.02, 0
    batches = FeatureLoader(cache, "fbank", batch_size=2, shuffle=True, seed=1)
    assert sum(len(batch["id"]) for batch in batches) == len(ARRAYS)
    assert server.most > 4  # of two batches


def test_a_cache_that_has_not_changed_is_opened_and_refreshed_by_one_request_each(
    bucket: Path, server: RangeServer, tmp_path: Path
) -> None:
    url = f"{server.url}/memmap"
    cache = featcache.open(url, remote=options(tmp_path))
    asked = server.asked
    featcache.open(url, remote=options(tmp_path))
    cache.refresh()
    assert server.asked == asked + 2


def test_a_refresh_reads_the_generation_that_was_published_meanwhile(
    tmp_path: Path,
) -> None:
    write(tmp_path / "bucket" / "c")
    with serving(tmp_path / "bucket") as server:
        cache = featcache.open(f"{server.url}/c", remote=options(tmp_path))
        featcache.open(tmp_path / "bucket" / "c").delete(["utt-007"])
        assert "utt-007" in cache
        cache.refresh()
        assert "utt-007" not in cache
        epoch = [cache.read(id, "fbank") for id in cache.ids]
        assert all(
            np.array_equal(array, ARRAYS[id]) for id, array in zip(cache.ids, epoch, strict=True)
        )
        assert copy.deepcopy(cache).generation == cache.generation
        requests_to.cache_clear()


def test_feature_sets_that_were_written_on_are_refreshed(tmp_path: Path) -> None:
    write(tmp_path / "bucket" / "c")

    def add(feature: str, ids: Iterable[str]) -> None:
        with CacheWriter(tmp_path / "bucket" / "c", [FeatureStorageConfig(feature)]) as writer:
            for id in ids:
                writer.write(id, {feature: ARRAYS[id]})

    add("y", list(ARRAYS)[:30])
    with serving(tmp_path / "bucket") as server:
        cache = featcache.open(f"{server.url}/c", remote=options(tmp_path))
        assert len(cache) == 30
        add("y", list(ARRAYS)[30:])
        cache.refresh()
        assert len(cache) == len(ARRAYS)
        add("z", ARRAYS)
        there = featcache.open(f"{server.url}/c", remote=options(tmp_path))
        assert np.array_equal(there.read("utt-040", "z"), ARRAYS["utt-040"])
        requests_to.cache_clear()


def test_a_tagged_generation_is_opened(tmp_path: Path) -> None:
    write(tmp_path / "bucket" / "c")
    with featcache.open(tmp_path / "bucket" / "c") as here:
        here.tag("all")
        here.delete(["utt-001"])
    with serving(tmp_path / "bucket") as server:
        there = featcache.open(f"{server.url}/c", remote=options(tmp_path), version="all")
        assert np.array_equal(there.read("utt-001", "fbank"), ARRAYS["utt-001"])
        requests_to.cache_clear()


def test_a_shell_that_lost_files_or_is_of_two_moments_is_made_whole(tmp_path: Path) -> None:
    write(tmp_path / "bucket" / "c")
    with serving(tmp_path / "bucket") as server:
        url = f"{server.url}/c"
        featcache.open(url, remote=options(tmp_path))
        (index,) = (tmp_path / "pages").rglob("index-*.columns")
        (manifest,) = (tmp_path / "pages").glob("http:/*/c/featcache.json")
        index.unlink()
        old = manifest.read_bytes()
        assert len(featcache.open(url, remote=options(tmp_path))) == len(ARRAYS)
        featcache.open(tmp_path / "bucket" / "c").delete(["utt-001"])
        featcache.open(url, remote=options(tmp_path))
        manifest.write_bytes(old)  # as another process that began before
        assert len(featcache.open(url, remote=options(tmp_path))) == len(ARRAYS) - 1
        requests_to.cache_clear()


@pytest.mark.parametrize("damaged", [b"", b"{", bytes(4000)])
def test_manifests_and_indexes_in_a_shell_that_are_damaged_are_fetched_again(
    damaged: bytes, tmp_path: Path
) -> None:
    write(tmp_path / "bucket" / "c")
    with featcache.open(tmp_path / "bucket" / "c") as here:
        here.tag("all")
        here.delete(["utt-001"])
    with serving(tmp_path / "bucket") as server:

        def opened(version: str | None) -> int:
            how = options(tmp_path)
            return len(featcache.open(f"{server.url}/c", remote=how, version=version))

        def counts() -> list[int]:
            return [opened(None), opened("all")]

        assert counts() == [len(ARRAYS) - 1, len(ARRAYS)]
        (shell,) = (tmp_path / "pages").glob("http:/*/c")
        of_shell = [*shell.glob("manifests/*"), *shell.glob("index-*"), shell / "featcache.json"]
        assert len(of_shell) == 5
        for file in of_shell:
            file.write_bytes(damaged)
            assert counts() == [len(ARRAYS) - 1, len(ARRAYS)]
        requests_to.cache_clear()


def test_pages_of_one_store_are_not_read_for_another(tmp_path: Path) -> None:
    write(tmp_path / "one" / "c")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    file = next((tmp_path / "two").glob("c/parts/*/fbank.npy"))
    file.write_bytes(bytes(file.stat().st_size))
    for name, is_right in (("two", False), ("one", True)):
        with serving(tmp_path / name) as server:
            cache = featcache.open(f"{server.url}/c", remote=options(tmp_path))
            assert np.array_equal(cache.read("utt-003", "fbank"), ARRAYS["utt-003"]) is is_right
            requests_to.cache_clear()
    places = [RemotePlace.of("s3://b/c", RemoteOptions(pages="/p", endpoint=e)) for e in "xy"]
    assert len({RemoteCache(place).directory for place in places}) == 2


def test_a_reader_makes_the_shell_where_there_is_none(server: RangeServer, tmp_path: Path) -> None:
    reader = featcache.open(f"{server.url}/memmap", remote=options(tmp_path)).reader("fbank")
    sent = copy.copy(reader)
    shutil.rmtree(tmp_path / "pages")
    featcache.remote.files.pages_at.cache_clear()
    assert np.array_equal(sent("utt-003").numpy(), ARRAYS["utt-003"])


def test_a_cache_of_adopted_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for id, array in ARRAYS.items():
        np.save(tmp_path / "source" / f"{id}.npy", array)
    featcache.adopt(tmp_path / "source", tmp_path / "bucket" / "c", feature="fbank")
    with serving(tmp_path / "bucket") as server:
        with pytest.raises(CacheError, match="convert it"):
            featcache.open(f"{server.url}/c", remote=options(tmp_path))
        requests_to.cache_clear()


def _status(status: int) -> Fault:
    def fault(handler: Handler, _data: bytes, _status: int) -> bool:
        handler.answer(status, b"secret-in-the-body")
        return True

    return fault


def _reset(handler: Handler, _data: bytes, _status: int) -> bool:
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.close_connection = True
    handler.connection.close()
    return True


def _cut(handler: Handler, data: bytes, status: int) -> bool:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.send_header("Content-Range", handler.content_range)
    handler.send_header("ETag", handler.etag)
    handler.end_headers()
    handler.wfile.write(data[: len(data) // 2])
    handler.wfile.flush()
    handler.close_connection = True
    return True


def _short(handler: Handler, data: bytes, status: int) -> bool:
    handler.answer(
        status, data[:-1], {"Content-Range": handler.content_range, "ETag": handler.etag}
    )
    return True


def _no_ranges(handler: Handler, _data: bytes, _status: int) -> bool:
    handler.answer(200, b"x" * handler.size)
    return True


def _stall(_handler: Handler, _data: bytes, _status: int) -> bool:
    time.sleep(1.5)
    return True


FAULTS: dict[str, tuple[Fault, type[CacheError]]] = {
    "503": (_status(503), RemoteError),
    "429": (_status(429), RemoteError),
    "403": (_status(403), RemoteError),
    "404": (_status(404), CorruptCacheError),
    "412": (_status(412), CorruptCacheError),
    "reset": (_reset, RemoteError),
    "cut": (_cut, RemoteError),
    "short": (_short, RemoteError),
    "no ranges": (_no_ranges, RemoteError),
    "stall": (_stall, RemoteError),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_of_one_kind_and_never_wrong_bytes(
    name: str, server: RangeServer, tmp_path: Path
) -> None:
    fault, error = FAULTS[name]
    how = RemoteOptions(pages=tmp_path / "pages", retry_s=0.5, timeout_s=0.5)
    cache = featcache.open(f"{server.url}/memmap", remote=how)
    server.fault = fault
    with pytest.raises(error) as raised:
        cache.read("utt-003", "fbank")
    assert server.url in str(raised.value)
    assert "secret" not in str(raised.value)
    server.fault = None
    epoch_of(cache)


@pytest.mark.parametrize("name", ["503", "429", "reset", "cut"])
def test_what_passes_is_tried_again(name: str, server: RangeServer, tmp_path: Path) -> None:
    cache = featcache.open(f"{server.url}/memmap", remote=options(tmp_path))
    left = [3]

    def fault(handler: Handler, data: bytes, status: int) -> bool:
        left[0] -= 1
        return left[0] >= 0 and FAULTS[name][0](handler, data, status)

    server.fault = fault
    epoch_of(cache)
    assert left[0] < 0


def test_another_object_of_the_same_name_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "bucket" / "c")
    with serving(tmp_path / "bucket") as server:
        cache = featcache.open(f"{server.url}/c", remote=options(tmp_path))
        cache.read("utt-003", "fbank")
        file = next((tmp_path / "bucket").glob("c/parts/*/fbank.npy"))
        os.utime(file, ns=(0, 1))
        with pytest.raises(CorruptCacheError, match="another object"):
            cache.read("utt-004", "fbank")
        requests_to.cache_clear()


def test_pages_beyond_the_budget_go_and_are_fetched_again(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SEGMENT_BYTES", 1 << 16)
    how = options(tmp_path, budget_bytes=1 << 18)
    cache = featcache.open(f"{server.url}/memmap", remote=how)
    for _ in range(3):
        epoch_of(cache)
    segments = (tmp_path / "pages").glob(f"*/*{pages.SUFFIX}")
    assert sum(path.stat().st_blocks * 512 for path in segments) < 3 << 18


def test_pages_that_a_power_cut_has_emptied_are_fetched_again(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch_of(featcache.open(f"{server.url}/memmap", remote=options(tmp_path)))
    for path in (tmp_path / "pages").glob(f"*/*{pages.SUFFIX}"):
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(bytes(5000))
    monkeypatch.setattr(pages, "BOOT", pages.BOOT ^ 1)
    featcache.remote.files.pages_at.cache_clear()
    asked = len(server.requests)
    epoch_of(featcache.open(f"{server.url}/memmap", remote=options(tmp_path)))
    assert 0 < len(server.requests) - asked < 5


def _read(cache: featcache.Cache, queue: multiprocessing.Queue[object]) -> None:
    try:
        queue.put(float(cache.read("utt-005", "fbank").sum()))
    except ClosedError as error:
        queue.put(str(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_forked_child_is_told_and_a_spawned_one_reads(
    method: Literal["fork", "spawn"], server: RangeServer, tmp_path: Path
) -> None:
    cache = featcache.open(f"{server.url}/memmap", remote=options(tmp_path))
    cache.read("utt-001", "fbank")
    context: Any = multiprocessing.get_context(method)
    queue: multiprocessing.Queue[object] = context.Queue()
    process = context.Process(target=_read, args=(cache, queue))
    process.start()
    said = queue.get(timeout=60)
    process.join()
    if method == "fork":
        assert "forkserver" in str(said)
    else:
        assert said == pytest.approx(float(ARRAYS["utt-005"].sum()))
    assert np.array_equal(cache.read("utt-005", "fbank"), ARRAYS["utt-005"])


def test_edits_are_refused_where_a_cache_is_only_read(server: RangeServer, tmp_path: Path) -> None:
    cache = featcache.open(f"{server.url}/memmap", remote=options(tmp_path))
    for edit in (
        lambda: cache.delete(["utt-001"]),
        lambda: cache.tag("paper"),
        lambda: cache.annotate({"utt-001": {"speaker": "x"}}),
        cache.compact,
        cache.repair,
    ):
        with pytest.raises(CacheError, match="only read"):
            edit()


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hush@bucket/train",
        "https://host/train?X-Amz-Signature=hush",
        "ftp://host/train",
        "s3:///train",
        "https://host/../train",
    ],
)
def test_urls_that_hold_secrets_or_lead_elsewhere_are_refused(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        featcache.open(url)
    assert "hush" not in str(raised.value)


def test_what_is_pickled_holds_no_secret(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    cache = featcache.open(f"{server.url}/memmap", remote=options(tmp_path))
    place = RemotePlace.of("s3://bucket/train", RemoteOptions(region="eu-west-1"))
    sent = pickle.dumps((cache, cache.reader("fbank"), requests_to(place)))
    assert b"hush" not in sent
    assert b"hush" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.json"))


def test_a_url_without_a_cache_is_said(server: RangeServer, tmp_path: Path) -> None:
    with pytest.raises(errors.NotACacheError, match="holds no cache"):
        featcache.open(f"{server.url}/nothing", remote=options(tmp_path))
