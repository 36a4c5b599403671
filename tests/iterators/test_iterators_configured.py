"""Factories one after the other, by shards, and from a configuration."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from iterators_helpers import rank_of

from featcache.errors import ConfigError
from featcache.espnet import (
    ChunkIterFactory,
    CommonCollateFn,
    MultipleIterFactory,
    SequenceIterFactory,
    ShardedIterFactory,
    build_iter_factory,
)

IDS = [f"u{number}" for number in range(12)]

COLLATE = {"_target_": "featcache.espnet.CommonCollateFn", "int_pad_value": -1}


class Utterances:
    """A data set of ESPnet's kind; Hydra would take a dict for a part of the configuration."""

    def __getitem__(self, id: str) -> tuple[str, dict[str, Any]]:
        return id, {"speech": np.ones(int(id[1:]) + 1)}


DATASET = Utterances()


def block(directory: Path, **others: object) -> dict[str, Any]:
    """The `dataloader.train` block of ESPnet3's documentation, with our names as targets."""
    batches = {
        "type": "sorted",
        "shape_files": [f"{directory}/feats_shape.{{shard_idx}}"],
        "batch_size": 2,
    }
    factory = {
        "_target_": "featcache.espnet.SequenceIterFactory",
        "shuffle": True,
        "collate_fn": COLLATE,
        "batches": batches,
    }
    return {"multiple_iterator": True, "num_shards": 3, "iter_factory": factory, **others}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for shard in range(3):
        lines = (f"{id} {int(id[1:]) + 1},80\n" for id in IDS[shard::3])
        (tmp_path / f"feats_shape.{shard}").write_text("".join(lines))
    return tmp_path


def ids_of(factory: Any, epoch: int, shuffle: bool | None = None) -> list[list[str]]:
    return [list(ids) for ids, _ in factory.build_iter(epoch, shuffle)]


def test_an_epoch_takes_the_shard_whose_turn_it_is(shards: Path) -> None:
    config = block(shards)
    before = copy.deepcopy(config)
    factory = build_iter_factory(config, DATASET)
    for epoch, shard in ((1, 0), (2, 1), (3, 2), (4, 0)):
        assert {id for ids in ids_of(factory, epoch) for id in ids} == set(IDS[shard::3])
    assert config == before
    ids, batch = next(iter(factory.build_iter(1)))
    assert batch["speech_lengths"].tolist() == [IDS.index(id) + 1 for id in ids]


def test_ranks_take_different_shards_of_an_epoch(shards: Path) -> None:
    for rank, first in ((0, 0), (1, 1), (2, 2)):
        with rank_of(rank, 3):
            factory = build_iter_factory(block(shards), DATASET)
            for epoch in (1, 2):
                assert {id for ids in ids_of(factory, epoch) for id in ids} == set(IDS[first::3])
    build = partial(SequenceIterFactory, DATASET)
    with rank_of(1, 2):
        sharded = ShardedIterFactory(lambda shard: build([[f"u{shard}"]]), 4)
        assert [ids_of(sharded, epoch) for epoch in (1, 2, 3)] == [[["u1"]], [["u3"]], [["u1"]]]
        with pytest.raises(ConfigError, match="3 shards cannot be shared evenly by 2 ranks"):
            build_iter_factory(block(shards), DATASET).build_iter(1)


def test_without_shards_the_whole_of_the_data_is_taken(tmp_path: Path) -> None:
    (tmp_path / "feats_shape").write_text("".join(f"{id} 1\n" for id in IDS))
    config = block(tmp_path, multiple_iterator=False, num_shards=1)
    config["iter_factory"]["batches"]["shape_files"] = [f"{tmp_path}/feats_shape"]
    assert sorted(
        id for ids in ids_of(build_iter_factory(config, DATASET), 1) for id in ids
    ) == sorted(IDS)
    del config["multiple_iterator"], config["num_shards"]
    assert len(ids_of(build_iter_factory(config, DATASET), 1)) == 6


def test_what_the_configuration_names_may_be_objects(shards: Path) -> None:
    config = block(shards)
    config["iter_factory"]["collate_fn"] = len
    sizes: list[object] = list(build_iter_factory(config, DATASET).build_iter(1))
    assert sizes == [2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iter_factory": None}, "a block with a _target_, not None"),
        ({"batch_size": 4}, "has no 'batch_size'"),
        ({"multiple_iterator": False}, "num_shards is 3, for which multiple_iterator must be true"),
        ({"num_shards": 0}, "num_shards must be an integer of at least 1, not 0"),
        (
            {"iter_factory": {"_target_": "featcache.espnet.SequenceIterFactory"}},
            "must name '{shard_idx}'",
        ),
    ],
)
def test_a_block_that_cannot_be_meant_is_refused(
    shards: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_iter_factory(block(shards, **change), DATASET)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "featcache.espnet.SequenceFactory",
            "'featcache.espnet.SequenceFactory' cannot be imported",
        ),
        ("no_such_module.Factory", "'no_such_module.Factory' cannot be imported"),
        ("Factory", "'Factory' cannot be imported"),
        ("builtins.dict", "must return a factory with build_iter, not dict"),
    ],
)
def test_a_target_that_is_no_factory_is_refused(shards: Path, target: str, message: str) -> None:
    config = block(shards)
    config["iter_factory"]["_target_"] = target
    with pytest.raises(ConfigError, match=message):
        build_iter_factory(config, DATASET).build_iter(1)
    config["iter_factory"]["_partial_"] = True
    with pytest.raises(ConfigError, match="'_partial_' of a configuration is not understood here"):
        build_iter_factory(config, DATASET).build_iter(1)


def test_factories_are_made_in_turn_and_shuffled_by_epoch_and_seed() -> None:
    made: list[int] = []

    def build(number: int) -> ChunkIterFactory:
        made.append(number)
        return ChunkIterFactory(DATASET, 1, [[IDS[number]]], 1, 1.0, shuffle=True)

    factory = MultipleIterFactory(
        [partial(build, number) for number in range(5, 10)], seed=3, shuffle=True
    )
    batches = factory.build_iter(2)
    assert made == []
    next(batches)
    order = list(range(5, 10))
    np.random.RandomState(5).shuffle(order)
    assert made == order[:1]
    list(batches)
    assert made == order
    made.clear()
    assert [ids[0] for ids in ids_of(factory, 2, shuffle=False)] == [
        IDS[n] for n in range(5, 10) for _ in range(n + 1)
    ]
    with pytest.raises(ConfigError, match="must return a factory with build_iter, not int"):
        list(MultipleIterFactory([int]).build_iter(1))  # type: ignore[list-item]


def test_the_batches_of_each_factory_are_shuffled_with_the_factories() -> None:
    batches = [[id] for id in IDS]
    factory = MultipleIterFactory(
        [partial(SequenceIterFactory, DATASET, batches, collate_fn=CommonCollateFn())]
    )
    assert ids_of(factory, 1) == batches
    assert (
        ids_of(factory, 1, shuffle=True)
        == ids_of(SequenceIterFactory(DATASET, batches, shuffle=True), 1)
        != batches
    )


def test_hydra_makes_the_same_of_a_configuration_of_espnet3(shards: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="Hydra is not installed")
    instantiate = pytest.importorskip("hydra.utils", reason="Hydra is not installed").instantiate
    train = block(shards)
    train["iter_factory"]["collate_fn"] = "${dataloader.collate_fn}"
    config = omegaconf.OmegaConf.create({"dataloader": {"collate_fn": COLLATE, "train": train}})
    expected = ids_of(build_iter_factory(block(shards), DATASET), 2)
    assert ids_of(build_iter_factory(config.dataloader.train, DATASET), 2) == expected
    config.dataloader.train.iter_factory.batches.shape_files = [f"{shards}/feats_shape.1"]
    factory = instantiate(config.dataloader.train.iter_factory, dataset=DATASET)
    assert isinstance(factory, SequenceIterFactory)
    assert ids_of(factory, 2) == expected
    chunks = {
        "_target_": "featcache.espnet.ChunkIterFactory",
        "batch_size": 2,
        "chunk_length": 4,
    }
    config = omegaconf.OmegaConf.create({**chunks, "batches": [["u7"], ["u9"]]})
    assert ids_of(instantiate(config, dataset=DATASET), 1) == [
        ["u7", "u7"],
        ["u7", "u9"],
        ["u9", "u9"],
    ]
