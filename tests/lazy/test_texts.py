"""Texts among the results of a cached function: kept as annotations, given back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.data_pipeline import DynamicItem

import featcache
from featcache import FeatureStorageConfig
from featcache.errors import CacheError, FeatureError, StaleCacheError

SENTENCES = {"utt-1": "größer  und\nhöher", "utt-2": "", "utt-3": "e\0nd"}


def tokens(id: str) -> list[str]:
    return SENTENCES[id].split(" ") if SENTENCES[id] else []


def described(id: str) -> dict[str, object]:
    return {"frames": torch.arange(len(id) + 1.0), "text": SENTENCES[id], "tokens": tokens(id)}


@pytest.mark.parametrize("compute", [SENTENCES.__getitem__, tokens, described])
def test_texts_come_back_as_they_were_computed(tmp_path: Path, compute: Any) -> None:
    expected = [str(compute(id)) for id in SENTENCES]
    with featcache.through(tmp_path / "cache", compute) as read:
        for _ in range(2):
            assert [str(read(id)) for id in SENTENCES] == expected
    with featcache.through(tmp_path / "cache", compute) as read:
        assert [str(read(id)) for id in SENTENCES] == expected


def test_texts_that_nobody_has_published_are_read_by_others(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", described) as mine:
        expected = [str(mine(id)) for id in SENTENCES]
        with featcache.through(tmp_path / "cache", described) as other:
            assert [str(other(id)) for id in SENTENCES] == expected
            assert len(featcache.open(tmp_path / "cache")) == 0


def test_texts_are_annotations_of_the_cache(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", described) as read:
        for id in SENTENCES:
            read(id)
    cache = featcache.open(tmp_path / "cache", verify="arrays")
    assert list(cache.features) == ["frames"]
    assert list(cache.annotation("text")) == [*SENTENCES.values()]
    assert cache.annotation("tokens")[0] == '["gr\\u00f6\\u00dfer", "", "und\\nh\\u00f6her"]'
    assert len(cache.filter(lambda row: row["text"] == "")) == 1

    cache.annotate({"utt-1": {"text": None}})
    with (
        featcache.through(tmp_path / "cache", described, check=None) as read,
        pytest.raises(CacheError, match=r"'utt-1' .*has no text 'text' any more"),
    ):
        read("utt-1")


def test_a_cache_of_texts_alone_has_their_size_as_its_feature(tmp_path: Path) -> None:
    def words_of(id: str, words: str) -> list[str]:
        return words.split()

    item = DynamicItem(["id", "words"], words_of, ["tokenized"])
    tokenize = featcache.cache(tmp_path / "cache")(item)
    dataset = DynamicItemDataset({"utt-1": {"words": "a b"}, "utt-2": {"words": "c"}}, [tokenize])
    dataset.set_output_keys(["tokenized"])
    for _ in range(2):
        assert [each["tokenized"] for each in dataset] == [["a", "b"], ["c"]]
    tokenize.func.publish(complete=True)
    cache = featcache.open(tmp_path / "cache")
    assert list(cache.annotation("tokenized")) == ['["a", "b"]', '["c"]']
    assert cache.read("utt-1", "tokenized_size") == len('["a", "b"]')


def test_items_of_a_data_set_keep_their_texts(tmp_path: Path) -> None:
    items = [{"tone": torch.ones(2), "label": "low"}, {"tone": torch.zeros(3), "label": "high"}]
    dataset = featcache.through(tmp_path / "cache", items, ids=["a", "b"])
    assert [str(dataset[number]) for number in range(2)] == list(map(str, items))
    assert str(dataset[1]) == str(items[1])


def test_another_text_is_noticed(tmp_path: Path) -> None:
    said = ["yes"]

    def text(id: str) -> str:
        return Path(tmp_path / id).read_text()

    (tmp_path / "utt-1").write_text("yes")
    with featcache.through(tmp_path / "cache", text) as read:
        assert read("utt-1") == "yes"
    (tmp_path / "utt-1").write_text("yet")
    with (
        pytest.raises(StaleCacheError, match="'text' of 'utt-1' is 'yet', and 'yes' is stored"),
        featcache.through(tmp_path / "cache", text) as read,
    ):
        read("utt-1")

    def counted(id: str) -> str:
        said.append(id)
        return f"{id} {len(said)}"

    with (
        pytest.raises(FeatureError, match="comes out another way each time"),
        featcache.through(tmp_path / "other", counted) as read,
    ):
        read("utt-1")


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        ("text", 3, "'utt-2'.*the first result was a text"),
        ("text", ["a"], "the first result was a text"),
        (["a"], [1], "a list of texts"),
        (3, "text", "'text' is no feature"),
        ({"n": 1, "text": "a"}, {"n": 1, "text": None}, "'utt-2', 'text'"),
        ({"n": 1, "text": "a"}, {"n": 1}, "'utt-2': 'text' is missing"),
    ],
)
def test_a_result_of_another_kind_is_refused(
    tmp_path: Path, first: object, then: object, says: str
) -> None:
    results = {"utt-1": first, "utt-2": then}
    with featcache.through(tmp_path / "cache", results.__getitem__) as read:
        assert read("utt-1") == first
        with pytest.raises(FeatureError, match=says):
            read("utt-2")


def test_a_text_that_is_declared_as_a_feature_is_refused(tmp_path: Path) -> None:
    features = [FeatureStorageConfig("words")]
    with (
        pytest.raises(FeatureError, match="'words': a text is no feature; leave its declaration"),
        featcache.through(tmp_path / "cache", SENTENCES.get, features=features) as read,
    ):
        read("utt-1")
