"""`FeatureLoader`: every batch once, in order, resumed to the batch, and nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_helpers import BATCHES, NUMBERS, ids_of
from store_helpers import arrays_of, id_of, make_cache
from test_feature_dataset import check_batch
from test_prefetch import no_reading_threads

from featcache import CacheWriter, FeatureLoader, FeatureStorageConfig, concat
from featcache._recycled import RecycledMemory
from featcache._tensors import empty_tensor
from featcache.errors import ClosedError, CorruptCacheError, KeyNotFoundError
from featcache.loading.memory import on_device


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"), NUMBERS)


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("prefetch_bytes", [0, 2000, 1 << 20])
def test_batches_come_in_the_order_of_the_sampler(
    cache: Path, threads: int, prefetch_bytes: int
) -> None:
    loader = FeatureLoader(
        cache, batch_sampler=BATCHES, threads=threads, prefetch_bytes=prefetch_bytes
    )
    assert len(loader) == len(BATCHES)
    for _ in range(2):
        count = 0
        for batch in loader:
            check_batch(batch, range(3 * count, min(3 * count + 3, 40)))
            count += 1
        assert count == len(BATCHES)
    assert no_reading_threads()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_threads_read_large_arrays_of_several_caches_as_they_are(
    tmp_path: Path, layout: str
) -> None:
    arrays, paths = {}, []
    for backend in ("memmap", "hdf5"):
        config = FeatureStorageConfig("fbank", backend=backend)
        with CacheWriter(tmp_path / backend, [config]) as writer:
            for frames in (0, 1, 300, 301, 450):
                array = np.random.default_rng(frames).normal(size=(frames, 33)).astype("f4")
                arrays[f"{backend}-{frames}"] = array
                writer.write(f"{backend}-{frames}", {"fbank": array})
        paths.append(tmp_path / backend)
    # a watched iteration leaves all to its threads
    loader = FeatureLoader(
        concat(*paths), batch_size=4, shuffle=True, layout=layout, watchdog_s=600
    )
    for batch in loader:
        values = batch["fbank"].numpy()
        if layout == "packed":
            values = np.split(values, batch["fbank_cu_seqlens"].tolist()[1:-1])
        for id, found, length in zip(batch["id"], values, batch["fbank_lengths"], strict=True):
            np.testing.assert_array_equal(found[:length], arrays[id])
            assert not found[length:].any()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_threads_of_a_forked_process_read_large_arrays(tmp_path: Path) -> None:
    """Torch's own threads are the parent's, and torch refuses to use them in a child."""
    arrays = [np.random.default_rng(n).normal(size=(9000 + n, 33)).astype("f4") for n in range(4)]
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        for number, array in enumerate(arrays):
            writer.write(str(number), {"fbank": array})
    loader = FeatureLoader(tmp_path, batch_size=4, watchdog_s=600)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 17).mul_(2)  # starts them
    try:
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                (batch,) = loader
                found = batch["fbank"].numpy()  # torch would compare in parallel
                same = [
                    np.array_equal(found[n, : len(array)], array) for n, array in enumerate(arrays)
                ]
                os._exit(0 if all(same) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


def test_batches_that_are_kept_are_not_written_over(cache: Path) -> None:
    kept = list(FeatureLoader(cache, batch_sampler=BATCHES, prefetch_bytes=4000))
    for count, batch in enumerate(kept):
        check_batch(batch, range(3 * count, min(3 * count + 3, 40)))


def test_a_part_of_a_batch_that_is_kept_is_not_written_over(cache: Path) -> None:
    parts = [
        batch["fbank"][0][1:] for batch in FeatureLoader(cache, batch_sampler=[[id_of(3)]] * 50)
    ]
    for part in parts:
        np.testing.assert_array_equal(part.numpy(), arrays_of(3)["fbank"][1:])


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    take = partial(empty_tensor, RecycledMemory(1 << 30))
    tensor = take((200, 300), torch.float32)
    where, view = tensor.data_ptr(), tensor[1:].numpy()
    del tensor
    assert take((200, 300), torch.float32).data_ptr() != where
    del view
    kept = [take((300, 400), torch.bfloat16) for _ in range(2)]
    assert where in [tensor.data_ptr() for tensor in kept]
    assert take((0, 3), torch.float32).shape == (0, 3)


def test_a_loader_that_is_dropped_in_the_middle_leaves_nothing(cache: Path) -> None:
    loader = FeatureLoader(cache, batch_sampler=BATCHES * 20, prefetch_bytes=4000)
    batches = iter(loader)
    next(batches)
    loader_gone, dataset_gone = weakref.ref(loader), weakref.ref(loader.dataset)
    del loader, batches
    gc.collect()
    assert no_reading_threads()
    assert loader_gone() is None
    assert dataset_gone() is None


def test_a_closed_iterator_begins_nothing_more(cache: Path) -> None:
    begun: list[str] = []

    def slow(item: dict[str, Any], rng: object) -> dict[str, Any]:
        begun.append(item["id"])
        time.sleep(0.05)
        return item

    batches = iter(FeatureLoader(cache, batch_sampler=BATCHES, transform=slow))
    next(batches)
    assert isinstance(batches, Generator)
    batches.close()
    assert no_reading_threads()
    assert len(begun) < 20


class NotReentrant:
    """A function that returns what it gets, and counts how many threads call it at once."""

    def __init__(self) -> None:
        self.inside = self.most = 0

    def __call__(self, value: Any, rng: object = None) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.0005)
        self.inside -= 1
        return value


def test_one_thread_works_for_an_iteration_and_for_one_that_was_left_before(cache: Path) -> None:
    function = NotReentrant()
    loader = FeatureLoader(cache, batch_sampler=BATCHES, threads=1, transform=function)
    for _ in range(20):
        for _ in loader:
            break
    assert function.most == 1


@pytest.mark.parametrize("what", ["transform", "collate"])
def test_one_thread_at_a_time_calls_functions_of_the_user(cache: Path, what: str) -> None:
    function = NotReentrant()
    functions: dict[str, Any] = {what: function}
    loader = FeatureLoader(cache, batch_sampler=BATCHES * 10, **functions)
    for _ in range(3):  # as quickly as it goes: the loop's thread has nothing else to do
        for _ in loader:
            pass
    assert function.most == 1


def test_a_closed_loader_ends_its_iterations(cache: Path) -> None:
    assert no_reading_threads()  # of other tests
    loader = FeatureLoader(cache, batch_sampler=BATCHES, prefetch_bytes=4000)
    batches = iter(loader)
    next(batches)
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "featcache-loader"]
    assert list(batches) == []
    assert len(ids_of(loader)) == 40  # it can be iterated over again


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("how", [{"batch_size": 3}, {"batch_sampler": BATCHES}])
def test_a_loader_that_is_closed_within_an_epoch_goes_on_behind_the_last_batch(
    cache: Path, how: dict[str, Any], threads: int
) -> None:
    loader = FeatureLoader(cache, threads=threads, **how)
    seen = []
    for batch in loader:
        seen += batch["id"]
        if len(seen) == 6:
            loader.close()
    resumed = FeatureLoader(cache, threads=threads, **how)
    resumed.load_state_dict(loader.state_dict())
    assert sorted(seen + ids_of(resumed)) == sorted(id_of(number) for number in range(40))
    assert len(ids_of(loader)) == 40
    assert loader.epoch == 0


@pytest.mark.parametrize("how", [{"batch_size": 3}, {"batch_sampler": BATCHES}])
def test_a_loader_that_is_closed_at_the_end_of_each_epoch_goes_on_to_the_next(
    cache: Path, how: dict[str, Any]
) -> None:
    loader = FeatureLoader(cache, **how)
    epochs = []
    for _ in range(3):
        for step, _ in enumerate(loader, 1):
            epochs.append(loader.epoch)
            if step == len(loader):
                loader.close()
    assert epochs == [epoch for epoch in range(3) for _ in range(len(loader))]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_closed_iteration_gives_no_more_and_counts_no_more(
    cache: Path, device: str | None
) -> None:
    loader = FeatureLoader(cache, batch_sampler=BATCHES, device=device)
    left = iter(loader)
    next(left)
    next(left)
    loader.close()
    batches = iter(loader)
    next(batches)
    assert list(left) == []
    assert loader.metrics()["step"] == 1
    assert len(list(batches)) == len(BATCHES) - 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_loader_may_be_closed_by_a_handler_of_a_signal(cache: Path, threads: int) -> None:
    chance, loader = np.random.default_rng(threads), FeatureLoader(cache, batch_size=1)
    before = signal.signal(signal.SIGALRM, lambda *_: loader.close())
    closed, every_id = 0, ids_of(loader)
    try:
        for _ in range(150):
            loader = FeatureLoader(cache, batch_size=1, threads=threads)
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 8e-3))
            seen = ids_of(loader)
            signal.setitimer(signal.ITIMER_REAL, 0)
            resumed = FeatureLoader(cache, batch_size=1, threads=threads)
            resumed.load_state_dict(loader.state_dict())
            rest = ids_of(resumed) if len(seen) < 40 else []
            assert seen + rest == every_id
            closed += len(rest) > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert closed > 10


def test_an_iteration_that_another_thread_begins_meanwhile_stops_nobody(cache: Path) -> None:
    class Changed(weakref.WeakSet[Any]):
        looks = 0

        def __iter__(self) -> Iterator[Any]:
            Changed.looks += 1
            if Changed.looks == 1:
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    loader = FeatureLoader(cache, batch_sampler=BATCHES)
    loader._running = Changed()
    assert len(ids_of(loader)) == 40
    assert Changed.looks > 1


def test_an_error_in_the_training_loop_leaves_no_thread(cache: Path) -> None:
    def train() -> None:
        for _ in FeatureLoader(cache, batch_sampler=BATCHES * 20, prefetch_bytes=4000):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:  # its traceback holds the iterator
        train()
    assert no_reading_threads()
    assert kept.tb is not None


@pytest.mark.parametrize("threads", [0, 2])
def test_what_goes_wrong_while_reading_is_raised_in_the_training_loop(
    tmp_path: Path, threads: int
) -> None:
    cache = make_cache(tmp_path, NUMBERS)
    loader = FeatureLoader(cache, batch_sampler=BATCHES, threads=threads)
    for container in cache.glob("parts/*/fbank.npy"):
        container.write_bytes(container.read_bytes()[:-100])
    with pytest.raises(CorruptCacheError, match=r"fbank\.npy' has \d+ bytes"):
        list(loader)
    with pytest.raises(KeyNotFoundError, match="no utterance 'nobody'"):
        list(FeatureLoader(cache, "units", batch_sampler=[["nobody"]], threads=threads))
    assert no_reading_threads()


def test_collate_makes_what_is_given_out(cache: Path) -> None:
    def summed(batch: dict[str, Any]) -> tuple[list[str], torch.Tensor]:
        return batch["id"], batch["fbank"].sum()

    loader = FeatureLoader(cache, "fbank", batch_sampler=BATCHES, collate=summed)
    ids, total = next(iter(loader))
    assert ids == BATCHES[0]
    assert total == pytest.approx(sum(arrays_of(n)["fbank"].sum() for n in range(3)), rel=1e-5)


def test_the_next_batch_is_on_the_device_before_it_is_asked_for() -> None:
    taken = []

    def batches() -> Iterator[int]:
        for number in range(3):
            taken.append(number)
            yield number

    moved = on_device(batches(), torch.device("cpu"))
    assert (next(moved), taken) == (0, [0, 1])
    assert (next(moved), taken) == (1, [0, 1, 2])
    assert list(moved) == [2]


@pytest.mark.parametrize("threads", [0, 2])
def test_collate_may_give_none_but_not_end_the_epoch(cache: Path, threads: int) -> None:
    def second_is_none(batch: dict[str, Any]) -> dict[str, Any] | None:
        return None if batch["id"] == BATCHES[1] else batch

    found = list(
        FeatureLoader(cache, batch_sampler=BATCHES, collate=second_is_none, threads=threads)
    )
    assert [batch is None for batch in found] == [number == 1 for number in range(len(BATCHES))]

    def stop(batch: dict[str, Any]) -> dict[str, Any]:
        raise StopIteration

    with pytest.raises(RuntimeError, match="a job raised StopIteration"):
        list(FeatureLoader(cache, batch_sampler=BATCHES, collate=stop, threads=threads))


def test_batches_of_any_kind_are_moved_to_a_device(cache: Path) -> None:
    loader = FeatureLoader(
        cache,
        batch_sampler=BATCHES,
        device="meta",
        collate=lambda batch: (batch["id"], [{"x": batch["fbank"]}]),
    )
    for ids, (nested,) in loader:
        assert isinstance(ids[0], str)
        assert nested["x"].device.type == "meta"


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_what_comes_before_an_error_of_the_sampler_is_delivered(
    cache: Path, prefetch_bytes: int
) -> None:
    loader = FeatureLoader(
        cache, batch_sampler=[[0], [1], ["nobody"], [2]], prefetch_bytes=prefetch_bytes
    )
    seen: list[list[str]] = []
    with pytest.raises(KeyNotFoundError, match="nobody"):
        seen.extend(batch["id"] for batch in loader)
    assert len(seen) == loader.state_dict()["batches"] == 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_iteration_does_not_go_on_in_a_forked_process(cache: Path) -> None:
    loader = FeatureLoader(cache, "units", batch_sampler=BATCHES)
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except ClosedError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_loader_can_be_pickled(cache: Path) -> None:
    loader = pickle.loads(pickle.dumps(FeatureLoader(cache, batch_sampler=BATCHES)))  # noqa: S301
    assert len(ids_of(loader)) == 40


def test_batches_are_moved_to_a_device_in_order(cache: Path) -> None:
    loader = FeatureLoader(cache, batch_sampler=BATCHES, device="meta")
    batches = list(loader)
    assert [batch["id"] for batch in batches] == BATCHES
    assert {
        batch[name].device.type for batch in batches for name in ("fbank", "units_lengths")
    } == {"meta"}
    on_cpu = FeatureLoader(cache, batch_sampler=BATCHES, device="cpu")
    for count, batch in enumerate(on_cpu):
        check_batch(batch, range(3 * count, min(3 * count + 3, 40)))
        assert on_cpu.state_dict()["batches"] == count + 1  # one more is on the device by then


def test_waiting_for_data_is_counted_and_work_is_not(cache: Path) -> None:
    loader = FeatureLoader(cache, batch_sampler=BATCHES)
    assert loader.waited_s == 0
    list(loader)
    assert 0 < loader.waited_s < 60


def test_an_empty_cache_gives_nothing(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]):
        pass
    assert list(FeatureLoader(tmp_path, batch_sampler=[])) == []
