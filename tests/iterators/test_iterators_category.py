from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from iterators_helpers import cached, pairs, rank_of

from featcache.errors import ConfigError
from featcache.espnet import (
    CategoryChunkIterFactory,
    CategoryIterFactory,
    build_category_batch_sampler,
)

CATEGORIES = {
    f"c{number}": [f"u{number}{letter}" for letter in "abcdef"[: 3 + number]] for number in range(4)
}
IDS = list(chain.from_iterable(CATEGORIES.values()))


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    """The arguments of a category sampler, as a configuration of ESPnet3 gives them."""
    half = len(IDS) // 2
    write(tmp_path / "category2utt", CATEGORIES)
    write(tmp_path / "dataset2utt", {"d0": IDS[:half], "d1": IDS[half:]})
    return {
        "category2utt_file": str(tmp_path / "category2utt"),
        "batch_size": 4,
        "min_batch_size": 1,
    }


def write(path: Path, groups: dict[str, list[str]]) -> None:
    path.write_text("".join(f"{group} {' '.join(ids)}\n" for group, ids in groups.items()))


def taken(factory: CategoryIterFactory, epoch: int) -> list[Any]:
    sampler = factory.build_iter(epoch).batch_sampler
    assert sampler is not None
    return list(sampler)


def test_each_epoch_is_drawn_anew_and_the_arguments_stay_as_they_are(
    arguments: dict[str, Any],
) -> None:
    given = dict(arguments)
    factory = CategoryIterFactory({}, sampler_args=arguments)
    epochs = [taken(factory, epoch) for epoch in (1, 2, 3, 2)]
    assert epochs[1] == epochs[3]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert epochs[2] == list(build_category_batch_sampler("catbel", **arguments, epoch=3)[0])
    assert arguments == given


def test_the_first_epoch_takes_the_batches_that_are_given(arguments: dict[str, Any]) -> None:
    factory = CategoryIterFactory({}, [["x"], ["y"]], sampler_args=arguments)
    assert taken(factory, 1) == [["x"], ["y"]]
    assert taken(factory, 2) == list(
        build_category_batch_sampler("catbel", **arguments, epoch=2)[0]
    )
    with pytest.raises(ConfigError, match="epoch 2 are drawn anew, for which sampler_args"):
        CategoryIterFactory({}, [["x"]]).build_iter(2)


def test_num_batches_limits_every_epoch(arguments: dict[str, Any]) -> None:
    factory = CategoryIterFactory(
        {}, sampler_args={**arguments, "num_batches": 1, "distributed": False}
    )
    assert [len(taken(factory, epoch)) for epoch in (1, 2)] == [1, 1]


def test_the_arguments_that_the_builder_returns_are_taken(arguments: dict[str, Any]) -> None:
    batches, returned = build_category_batch_sampler("catbel", **arguments)
    factory = CategoryIterFactory({}, batches, sampler_args=returned)
    assert taken(factory, 1) == list(batches)
    assert taken(factory, 2) == list(
        build_category_batch_sampler("catbel", **arguments, epoch=2)[0]
    )


def test_a_cache_needs_no_shape_files(tmp_path: Path, arguments: dict[str, Any]) -> None:
    dataset = cached(
        tmp_path / "cache", pairs({id: 10 + number for number, id in enumerate(IDS)}), "fbank"
    )
    files = {"dataset2utt_file": str(tmp_path / "dataset2utt"), "utt2dataset_file": "unused"}
    for batch_type, others in (("catpow", {}), ("catpow_balance_dataset", files)):
        given = {"category2utt_file": arguments["category2utt_file"], "batch_bins": 60, **others}
        factory = CategoryIterFactory(dataset, sampler_args=given, batch_type=batch_type)
        for ids, batch in factory.build_iter(1):
            assert batch["fbank_lengths"].tolist() == [10 + IDS.index(id) for id in ids]


def test_ranks_share_every_batch(arguments: dict[str, Any]) -> None:
    whole, shares = CategoryIterFactory({}, sampler_args=arguments), []
    factory = CategoryIterFactory({}, sampler_args={**arguments, "distributed": True})
    for rank in range(3):
        with rank_of(rank, 3):
            shares.append(taken(factory, 2))
    for batch, *parts in zip(taken(whole, 2), *shares, strict=True):
        assert parts == [batch[rank::3] for rank in range(3)]
    with (
        rank_of(0, 5),
        pytest.raises(
            ConfigError, match="epoch 2 has a batch of 4 utterances, too few for 5 ranks"
        ),
    ):
        factory.build_iter(2)


@pytest.mark.parametrize("factory", [CategoryIterFactory, CategoryChunkIterFactory])
def test_what_cannot_be_drawn_from_is_refused(factory: Any, tmp_path: Path) -> None:
    required = {"batch_size": 2} if factory is CategoryChunkIterFactory else {}
    with pytest.raises(ConfigError, match="no batch_type 'catbal'; did you mean 'catbel'"):
        factory({}, **required, sampler_args={}, batch_type="catbal")
    with pytest.raises(ConfigError, match="batches are needed, or sampler_args"):
        factory({}, **required)
    with pytest.raises(ConfigError, match=r"sampler_args: .* no argument 'category2utt'"):
        factory({}, **required, sampler_args={"category2utt": "x"})
    with pytest.raises(ConfigError, match="must be named 'dataset2utt', not 'a/sets'"):
        factory({}, **required, sampler_args={"dataset2utt_file": "a/sets"})


def test_chunks_are_cut_from_batches_drawn_anew(arguments: dict[str, Any]) -> None:
    utterances = {
        id: (id, {"speech": arrays["units"]})
        for id, arrays in pairs(dict.fromkeys(IDS, 12)).values()
    }
    factory = CategoryChunkIterFactory(utterances, 4, chunk_length=10, sampler_args=arguments)
    expected = CategoryIterFactory({}, sampler_args=arguments)
    for epoch in (1, 2):
        found = chain.from_iterable(ids for ids, _ in factory.build_iter(epoch))
        assert list(found) == list(chain.from_iterable(taken(expected, epoch)))
