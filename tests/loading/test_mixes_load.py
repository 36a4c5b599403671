"""Each row of a mix comes as planned: on any ranks and workers, stopped anywhere and resumed."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from loader_helpers import each_pair, through_workers
from store_helpers import arrays_of, make_cache
from torch.utils.data import DataLoader

import featcache
from featcache import FeatureDataset, FeatureLoader, FeatureTable
from featcache.errors import ConfigError, StateError
from featcache.samplers import BucketBatchSampler, PackedBatchSampler
from featcache.samplers.shuffled import PlainBatchSampler

KINDS = ("once", "part", "often", "weighted")


@pytest.fixture(scope="module")
def mixes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FeatureTable]:
    home = tmp_path_factory.mktemp("caches")
    numbers = {"a": range(30), "b": range(30, 50), "c": range(50, 57)}
    sources = {
        name: featcache.open(make_cache(home / name, some)) for name, some in numbers.items()
    }
    rows = {name: np.arange(len(table)) % 4 for name, table in sources.items()}
    return {
        "once": featcache.mix(sources),
        "part": featcache.mix(sources, weights={"a": 2, "b": 2, "c": 1}),
        "often": featcache.mix(sources, repeat={"a": 0.7, "c": 3.5}),
        "weighted": featcache.mix(sources, weights=rows, epoch_size=80),
        "many": featcache.mix(sources, weights=rows, epoch_size=2500),
    }


def samplers_of(table: FeatureTable, ranks: int, seed: int, state: Any = None) -> list[Any]:
    """The bucketing samplers of all ranks, in an epoch or from a state on."""
    found = []
    for rank in range(ranks):
        sampler = BucketBatchSampler(
            table, max_frames=60, batch_size=3, seed=seed, rank=rank, world_size=ranks
        )
        sampler.set_epoch(1)
        if state is not None:
            sampler.load_state_dict(state)
        found.append(sampler)
    return found


def assert_planned(
    batches: Iterable[Mapping[str, Any]], table: FeatureTable, seed: int, epoch: int = 1
) -> None:
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(batch["id"])
        for place, id in enumerate(batch["id"]):
            wanted = arrays_of(int(id.rpartition("-")[2]))["fbank"]
            length = int(batch["fbank_lengths"][place])
            np.testing.assert_array_equal(batch["fbank"][place][:length], wanted)
    assert counts == Counter(map(table.id, table.epoch_rows(epoch, seed=seed)[:].tolist()))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    ranks=st.integers(1, 3),
    others=st.integers(1, 3),
    stop=st.floats(0, 1),
    seed=st.integers(0, 5),
    threads=st.sampled_from([0, 1, 2, 4]),
)
def test_wherever_the_epoch_was_stopped(
    mixes: dict[str, FeatureTable],
    kind: str,
    ranks: int,
    others: int,
    stop: float,
    seed: int,
    threads: int,
) -> None:
    table, batches, states = mixes[kind], [], []
    for sampler in samplers_of(table, ranks, seed):
        loader = FeatureLoader(table, batch_sampler=sampler, threads=threads)
        iterator = iter(loader)
        batches += [next(iterator) for _ in range(int(stop * len(loader)))]
        states.append(json.loads(json.dumps(loader.state_dict()))["sampler"])
        iterator.close()  # type: ignore[attr-defined]
    assert all(state == states[0] for state in states)
    assert table.plan is not None
    assume(table.plan.size - states[0]["position"] >= others)  # too few to share are refused
    for sampler in samplers_of(table, others, seed, states[0]):
        batches += FeatureLoader(table, batch_sampler=sampler, threads=threads)
    assert_planned(batches, table, seed)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
# more workers than cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(("kind", "ranks", "workers"), each_pair(KINDS))
def test_through_the_workers_of_a_data_loader(
    mixes: dict[str, FeatureTable], kind: str, ranks: int, workers: int
) -> None:
    table = mixes[kind]
    random = np.random.default_rng((ranks, workers, KINDS.index(kind)))
    batches, seed = through_workers(table, samplers_of, random, ranks=ranks, workers=workers)
    assert_planned(batches, table, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_batches_keep_the_order_of_the_mix(mixes: dict[str, FeatureTable], kind: str) -> None:
    table = mixes[kind]
    for shuffle in (True, False):
        sampler = PlainBatchSampler(table, 4, shuffle=shuffle, seed=3)
        rows = [row for batch in sampler for row in batch]
        assert rows == table.epoch_rows(0, seed=3)[:].tolist()
    loader = FeatureLoader(table, batch_size=4, shuffle=True, seed=3)
    assert_planned(loader, table, 3, 0)
    assert_planned(loader, table, 3, 1)


def test_drop_last_that_leaves_nothing_of_an_epoch_is_refused(tmp_path: Path) -> None:
    table = featcache.mix({"all": featcache.open(make_cache(tmp_path, range(6)))}, epoch_size=3)
    with pytest.raises(
        ConfigError, match=r"nothing of the 3 utterances of an epoch in batches of 4"
    ):
        FeatureLoader(table, "fbank", batch_size=4, drop_last=True)
    assert len(FeatureLoader(table, "fbank", batch_size=3, drop_last=True)) == 1


def test_epochs_have_one_number_of_batches_where_all_sources_come_whole(
    mixes: dict[str, FeatureTable],
) -> None:
    sampler = BucketBatchSampler(mixes["once"], max_frames=60)
    assert len({len(sampler.epoch_batches(epoch)) for epoch in range(20)}) == 1


def test_a_row_that_comes_several_times_has_a_draw_each_time(
    mixes: dict[str, FeatureTable],
) -> None:
    def draw(item: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"id": item["id"], "drawn": float(rng.random())}

    loader = FeatureLoader(mixes["often"], "fbank", batch_size=5, shuffle=True, transform=draw)
    drawn = [number for batch in loader for number in batch["drawn"].tolist()]
    assert len(set(drawn)) == len(drawn)


def test_the_source_of_each_utterance_comes_with_the_batch(mixes: dict[str, FeatureTable]) -> None:
    loader = FeatureLoader(mixes["often"], "fbank", batch_size=5, annotations="source")
    found = Counter(name for batch in loader for name in batch["source"])
    assert found == {"a": 21, "b": 20, "c": 24}


def test_shares_after_batching_are_reported(mixes: dict[str, FeatureTable]) -> None:
    sampler = BucketBatchSampler(mixes["part"], max_frames=60)
    shares = sampler.source_shares(window=10)
    assert {name: each.share for name, each in shares.items()} == pytest.approx(
        {"a": 0.4, "b": 0.4, "c": 0.2}, abs=0.02
    )
    assert all(each.least <= each.share <= each.most for each in shares.values())
    whole = sampler.source_shares()
    assert all(each.least == each.share == each.most for each in whole.values())
    with pytest.raises(ConfigError, match="has no mix"):
        BucketBatchSampler([3, 4], max_frames=9).source_shares()


def test_a_state_of_another_mix_is_refused(mixes: dict[str, FeatureTable]) -> None:
    for make in (
        lambda table: BucketBatchSampler(table, max_frames=60),
        lambda table: PlainBatchSampler(table, 4),
    ):
        state = make(mixes["once"]).state_dict()
        assert len(json.dumps(state)) < 1000
        with pytest.raises(StateError, match="data"):
            make(mixes["part"]).load_state_dict(state)
        loader = FeatureLoader(mixes["once"], batch_sampler=make(mixes["once"]))
        other = FeatureLoader(mixes["part"], batch_sampler=make(mixes["part"]))
        with pytest.raises(StateError, match="other utterances, or another mix of them"):
            other.load_state_dict(loader.state_dict())


def caches_of(home: Path, lengths: Mapping[str, int], dims: int = 2) -> FeatureTable:
    with featcache.CacheWriter(home, [featcache.FeatureStorageConfig("fbank")]) as writer:
        for id, length in lengths.items():
            writer.write(id, {"fbank": np.ones((length, dims), np.float32)})
    return featcache.open(home).table


def test_a_state_of_utterances_of_other_lengths_is_refused(tmp_path: Path) -> None:
    one = caches_of(tmp_path / "one", {"x": 3, "y": 5, "z": 4})
    other = caches_of(tmp_path / "other", {"x": 3, "y": 6, "z": 4})
    for repeat in (1, 2):
        made = [featcache.mix({"a": each}, repeat={"a": repeat}) for each in (one, other)]
        same = featcache.mix({"a": featcache.open(tmp_path / "one")}, repeat={"a": repeat})
        state = BucketBatchSampler(made[0], max_frames=20).state_dict()
        BucketBatchSampler(same, max_frames=20).load_state_dict(state)
        with pytest.raises(StateError, match="data"):
            BucketBatchSampler(made[1], max_frames=20).load_state_dict(state)


def test_a_state_of_frames_of_another_size_is_refused_where_numbers_are_limited(
    tmp_path: Path,
) -> None:
    lengths = {"x": 3, "y": 5, "z": 4}
    tables = [caches_of(tmp_path / str(dims), lengths, dims) for dims in (2, 4)]
    state = BucketBatchSampler(tables[0], max_elements=40).state_dict()
    with pytest.raises(StateError, match=r"frame_elements=\[2\] \(here \[4\]\)"):
        BucketBatchSampler(tables[1], max_elements=40).load_state_dict(state)
    state = json.loads(json.dumps(state))
    BucketBatchSampler(tables[0], max_elements=40).load_state_dict(state)


def test_what_a_source_leaves_out_may_be_longer_than_a_batch(tmp_path: Path) -> None:
    lengths = {"x": 3, "long": 99, "y": 5, "z": 4}
    table = caches_of(tmp_path / "one", lengths).select(["z", "x", "y"])
    for repeat in (1, 2):
        mixed = featcache.mix({"a": table}, repeat={"a": repeat})
        for made in (mixed, FeatureDataset(mixed)):
            sampler = BucketBatchSampler(made, max_frames=10)
            for batch in sampler:
                assert max(lengths[mixed.id(int(row))] for row in batch) * len(batch) <= 10
            with pytest.raises(ConfigError, match=f"{repeat} of .* is 'y' .* with 5 frames"):
                BucketBatchSampler(made, max_frames=4)


def test_a_sampler_of_a_mix_copies_no_lengths_of_its_rows(tmp_path: Path) -> None:
    one = caches_of(tmp_path / "one", {"x": 3, "y": 5})
    table = featcache.mix({"a": one}, repeat={"a": 1e6})  # two million rows
    dataset = FeatureDataset(table)
    tracemalloc.start()
    try:
        PackedBatchSampler(table, max_frames=500)
        sampler = BucketBatchSampler(dataset, max_frames=500)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert len(next(iter(sampler))) <= 500 // 3


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ranks=st.integers(1, 3), others=st.integers(1, 3), stop=st.floats(0, 1))
def test_a_mix_of_many_rows_is_batched_window_by_window(
    mixes: dict[str, FeatureTable],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    others: int,
    stop: float,
) -> None:
    monkeypatch.setattr("featcache.samplers.batches.MOST_AT_ONCE", 1500)
    monkeypatch.setattr("featcache.samplers.batches.WINDOW", 700)
    table, rows, states = mixes["many"], [], []
    for sampler in samplers_of(table, ranks, 2):
        rows += [row for batch in islice(sampler, int(stop * len(sampler))) for row in batch]
        states.append(sampler.state_dict())
    assert states == [states[0]] * ranks
    assume(2500 - states[0]["position"] >= others)
    for sampler in samplers_of(table, others, 2, states[0]):
        rows += [row for batch in sampler for row in batch]
    assert sorted(rows) == sorted(table.epoch_rows(1, seed=2)[:].tolist())
    assert table.plan is not None
    for some in sampler.epoch_batches(1).windows:
        counts = np.bincount(table.plan.source_of(some.items))
        shares = np.array([*table.plan.taken.values()]) / table.plan.size
        assert np.abs(counts / len(some.items) - shares).max() < 0.01


def test_what_a_mix_cannot_leave_out_is_refused(mixes: dict[str, FeatureTable]) -> None:
    table = mixes["once"]
    for too_long in ("skip", "raise"):
        with pytest.raises(ConfigError, match=r"raise max_frames, or .* sources of the mix"):
            BucketBatchSampler(table, max_frames=15, too_long=too_long)
    with pytest.raises(ConfigError, match="select them of its sources"):
        BucketBatchSampler(table, max_frames=60, ids=[table.id(0)])


def test_batches_of_other_samplers_are_told_that_they_mix_nothing(
    mixes: dict[str, FeatureTable], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = FeatureDataset(mixes["part"], "fbank")
    next(iter(FeatureLoader(dataset, batch_size=4)))
    assert not caplog.records
    for _ in range(2):
        next(iter(DataLoader(dataset, batch_size=4, collate_fn=dataset.collate)))
    assert [record.getMessage() for record in caplog.records] == [MESSAGE]


MESSAGE = (
    "batches of a mix are drawn by a sampler that knows nothing of its plan: give "
    "featcache.samplers to the loader, or it reads each row once an epoch"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_packed_batches_hold_the_rows_of_the_plan(
    mixes: dict[str, FeatureTable], kind: str, epoch: int, ranks: int
) -> None:
    table, ids = mixes[kind], []
    for rank in range(ranks):
        sampler = PackedBatchSampler(table, max_frames=60, seed=2, rank=rank, world_size=ranks)
        loader = FeatureLoader(table, batch_sampler=sampler)
        loader.set_epoch(epoch)
        for batch in loader:
            begins = batch["fbank_cu_seqlens"].tolist()
            for id, begin, end in zip(batch["id"], begins[:-1], begins[1:], strict=True):
                wanted = arrays_of(int(id.rpartition("-")[2]))["fbank"]
                np.testing.assert_array_equal(batch["fbank"][begin:end], wanted)
            ids += batch["id"]
    planned = table.epoch_rows(epoch, seed=2)[:].tolist()
    assert Counter(ids) == Counter(map(table.id, planned))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_few_shapes_hold_the_rows_of_the_plan(
    mixes: dict[str, FeatureTable], kind: str
) -> None:
    table = mixes[kind]
    sampler = BucketBatchSampler(table, max_frames=90, pad_to=[10, 30], seed=2)
    for epoch in range(3):
        loader = FeatureLoader(table, batch_sampler=sampler)
        loader.set_epoch(epoch)
        batches = list(loader)
        assert {batch["fbank"].shape[1] for batch in batches} <= {10, 30}
        assert_planned(batches, table, 2, epoch)
