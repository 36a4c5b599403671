"""Labels from the pipeline of a `DynamicItemDataset`, beside features of a cache."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import speechbrain as sb
import torch
from speechbrain.dataio.batch import PaddedBatch, PaddedData
from speechbrain.dataio.dataset import DynamicItemDataset
from torch.utils.data import DataLoader
from training_helpers import make_training_cache

import featcache
from featcache import FeatureLoader, KeyNotFoundError
from featcache.errors import ConfigError
from featcache.interop.speechbrain import padded_batch, with_items

RNG = np.random.default_rng(0)
INDICES = [[0, 5, 7], [3], [22, 1]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    return make_training_cache(tmp_path_factory.mktemp("features") / "train")


def no_audio(id: str) -> torch.Tensor:
    raise AssertionError(f"the audio of {id!r} was asked for")


def words_of(text: str) -> list[str]:
    return text.split()


@sb.utils.data_pipeline.takes("words")  # type: ignore[untyped-decorator]
@sb.utils.data_pipeline.provides("tokens_list", "tokens_bos", "tokens")  # type: ignore[untyped-decorator]
def tokens_of(words: list[str]) -> Iterator[Any]:
    tokens = [len(word) for word in words]
    yield tokens
    yield torch.LongTensor([0, *tokens])
    yield torch.LongTensor(tokens)


def mask_of(words: list[str]) -> Any:
    return np.ones((len(words), 2), np.float32)


def make_dataset(cache: featcache.Cache, keys: Any = ()) -> Any:
    """A recipe's data set: text, words, tokens of a generator, a speaker, and audio."""
    data = {
        id: {"text": " ".join("word"[: 1 + (row + i) % 4] for i in range(1 + row % 5)), "spk": row}
        for row, id in enumerate(cache)
    }
    dataset = DynamicItemDataset(data)
    dataset.add_dynamic_item(no_audio, takes="id", provides="sig")
    dataset.add_dynamic_item(tokens_of)
    dataset.add_dynamic_item(words_of, takes="text", provides="words")
    dataset.add_dynamic_item(mask_of, takes="words", provides="mask")
    dataset.set_output_keys(["id", *keys])
    return dataset


def theirs(dataset: Any, ids: list[str], keys: list[str]) -> Any:
    """The batch that SpeechBrain makes of the data set itself."""
    with dataset.output_keys_as(keys):
        return PaddedBatch([dataset[dataset.data_ids.index(id)] for id in ids])


KEYS = ["text", "words", "tokens", "tokens_bos", "tokens_list", "mask", "spk"]


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_labels_are_those_that_speechbrain_makes_of_the_data_set(
    cache: featcache.Cache, threads: int
) -> None:
    dataset = make_dataset(cache)
    transform = with_items(dataset, KEYS)
    loader = FeatureLoader(
        cache, batch_sampler=INDICES, transform=transform, collate=padded_batch, threads=threads
    )
    for batch, indices in zip(loader, INDICES, strict=True):
        ids = [cache.ids[index] for index in indices]
        assert batch.id == ids
        whole = theirs(dataset, ids, KEYS)
        for key in KEYS:
            ours, sought = batch[key], whole[key]
            assert type(ours) is type(sought), key
            if isinstance(sought, PaddedData):
                torch.testing.assert_close(ours.data, sought.data, rtol=0, atol=0)
                torch.testing.assert_close(ours.lengths, sought.lengths)
            elif isinstance(sought, torch.Tensor):
                assert torch.equal(ours, sought)
            else:
                assert ours == sought, key
        assert batch.fbank.data.shape[0] == len(ids)


def test_threads_that_ask_at_a_time_do_not_share_a_generator(cache: featcache.Cache) -> None:
    held = threading.Barrier(4, timeout=30)

    def slowly(text: str) -> Iterator[Any]:
        yield text
        held.wait()  # all four have begun, and none has ended
        yield text.upper()

    dataset = DynamicItemDataset({id: {"text": id} for id in cache})
    dataset.add_dynamic_item(slowly, takes="text", provides=["same", "upper"])
    add = with_items(dataset, ["upper"])
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda id: add({"id": id}, RNG)["upper"], cache.ids[:4]))
    assert found == [id.upper() for id in cache.ids[:4]]


def test_the_data_set_stays_as_it_is(cache: featcache.Cache) -> None:
    dataset = make_dataset(cache, ["words"])
    running = iter(DataLoader(dataset, batch_size=None))
    first = next(running)
    add = with_items(dataset, ["tokens"])
    assert add({"id": cache.ids[3]}, RNG).keys() == {"id", "tokens", "tokens_lengths"}
    assert dataset.pipeline.output_mapping == {"id": "id", "words": "words"}
    assert next(running).keys() == first.keys() == {"id", "words"}


def test_without_keys_the_output_keys_are_computed_less_what_the_loader_gives(
    cache: featcache.Cache,
) -> None:
    dataset = make_dataset(cache, ["fbank", "tokens"])
    dataset.add_dynamic_item(no_audio, takes="id", provides="fbank")
    (batch,) = FeatureLoader(cache, batch_sampler=[[2, 4]], transform=with_items(dataset))
    assert {"fbank", "tokens", "tokens_lengths"} <= batch.keys()


def test_output_keys_may_have_other_names(cache: featcache.Cache) -> None:
    dataset = make_dataset(cache)
    id = cache.ids[6]
    assert with_items(dataset, {"labels": "words"})({"id": id}, RNG) == {
        "id": id,
        "labels": dataset.data[id]["text"].split(),
    }


def test_only_what_the_keys_need_is_pickled(cache: featcache.Cache) -> None:
    dataset = make_dataset(cache)
    dataset.add_dynamic_item(lambda id: id, takes="id", provides="not-picklable")
    add = with_items(dataset, ["mask"])
    item = {"id": cache.ids[3]}
    first = add(item, RNG)["mask"]
    again = pickle.loads(pickle.dumps(add))  # noqa: S301
    assert np.array_equal(again(item, RNG)["mask"], first)


def test_a_key_that_the_data_set_lacks_is_refused_at_once(cache: featcache.Cache) -> None:
    with pytest.raises(ConfigError, match="no key 'token'; did you mean 'tokens'"):
        with_items(make_dataset(cache), ["token"])


def test_an_item_that_takes_what_nothing_provides_is_refused_at_once(
    cache: featcache.Cache,
) -> None:
    dataset = make_dataset(cache)
    dataset.add_dynamic_item(len, takes="txt", provides="letters")
    with pytest.raises(ConfigError, match=r"takes 'txt', which the data set lacks; .*'text'"):
        with_items(dataset, ["letters"])
    assert with_items(dataset, ["words"])({"id": cache.ids[0]}, RNG)["words"]


def test_another_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="DynamicItemDataset of SpeechBrain is needed, not 'list"):
        with_items([{"id": "a"}], ["text"])


def test_an_utterance_that_the_data_set_lacks_is_named(cache: featcache.Cache) -> None:
    dataset = make_dataset(cache).filtered_sorted()
    dataset.data = {id: entry for id, entry in dataset.data.items() if id != cache.ids[4]}
    loader = FeatureLoader(
        cache, batch_sampler=[[4]], transform=with_items(dataset, ["words"]), threads=0
    )
    with pytest.raises(KeyNotFoundError, match=f"no utterance '{cache.ids[4]}'"):
        list(loader)
