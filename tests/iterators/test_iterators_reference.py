"""The iterator factories against what ESPnet's gave, for every entry of the reference."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from places import REFERENCE as SHARED

from featcache.errors import ConfigError
from featcache.espnet import (
    CategoryChunkIterFactory,
    CategoryIterFactory,
    ChunkIterFactory,
    CommonCollateFn,
    MultipleIterFactory,
    SequenceIterFactory,
    build_batch_sampler,
    build_category_batch_sampler,
)
from featcache.espnet.dataset_input import PaddedBatch

REFERENCE = SHARED / "espnet_batches"
pytestmark = pytest.mark.skipif(
    not REFERENCE.exists(), reason="the reference outputs are not there"
)
Entry = dict[str, Any]
KINDS = {
    "sequence_iter": SequenceIterFactory,
    "category_iter": CategoryIterFactory,
    "chunk_iter": ChunkIterFactory,
    "category_chunk_iter": CategoryChunkIterFactory,
    "multiple_iter": MultipleIterFactory,
}
# ESPnet crashes where the number of batches is limited
WORKS_HERE = ("catiter_err_num_batches",)


def entries(*kinds: str) -> list[Any]:
    files = sorted(REFERENCE.glob("*.json"))
    found = [
        entry for file in files for entry in json.loads(file.read_text()) if entry["kind"] in kinds
    ]
    return [pytest.param(entry, id=entry["name"]) for entry in found]


def column(name: str) -> dict[str, int]:
    lines = (line.split() for line in (REFERENCE / name).read_text().splitlines())
    return {key: int(value.split(",")[0].lstrip("c")) for key, value in lines}


def in_reference(arguments: Entry) -> Entry:
    """Return a builder's arguments with the paths of its files."""
    named = {
        key: str(REFERENCE / value)
        for key, value in arguments.items()
        if key.endswith("_file") and value
    }
    shapes = {"shape_files": [str(REFERENCE / name) for name in arguments.get("shape_files", [])]}
    return {**arguments, **named, **(shapes if "shape_files" in arguments else {})}


def utterances(entry: Entry) -> dict[str, tuple[str, dict[str, Any]]]:
    """The data set that the reference was made with: an utterance's values are the numbers of its
    frames.
    """
    lengths = {
        f"x{number}": length for number, length in enumerate(entry.get("lengths", []))
    } or column("feats_shape")
    dataset: dict[str, tuple[str, dict[str, Any]]] = {}
    categories = column("utt2category") if entry.get("category") else {}
    for number, (id, length) in enumerate(lengths.items()):
        arrays = {"speech": np.arange(length)}
        if entry.get("category"):
            arrays["utt2category"] = np.array([categories[id]])
        if entry.get("fs"):
            arrays["utt2fs"] = np.array([(16000, 8000)[number % 2]])
        dataset[id] = (id, arrays)
    return dataset


def chunks(batches: Iterable[PaddedBatch]) -> list[list[list[object]]]:
    """Return each chunk as `[id, start, length]`, start being its first value; in the reference
    padding starts at 0.
    """
    return [
        [
            [id, max(int(chunk[0]), 0), len(chunk)]
            for id, chunk in zip(ids, batch["speech"], strict=True)
        ]
        for ids, batch in batches
    ]


@pytest.mark.parametrize("entry", entries("sequence_iter", "category_iter"))
def test_sequence_iterators_take_the_batches_that_espnets_take(entry: Entry) -> None:
    arguments = {**entry["args"]}
    if entry["kind"] == "category_iter":
        batches, _ = build_category_batch_sampler(**in_reference(entry["batches"]))
        arguments["sampler_args"] = in_reference(arguments["sampler_args"])
    else:
        batches = build_batch_sampler(**in_reference(entry["batches"]))
    factory = KINDS[entry["kind"]](utterances(entry), batches=batches, **arguments)
    if entry["name"] in WORKS_HERE:
        assert len(list(factory.build_iter(2).batch_sampler)) == 2
        return
    for epoch, expected in entry["epochs"].items():
        assert list(factory.build_iter(int(epoch)).batch_sampler) == expected
    assert len(batches) == entry["num_source_batches"]


@pytest.mark.parametrize("entry", entries("chunk_iter", "category_chunk_iter"))
def test_chunk_iterators_cut_the_chunks_that_espnets_cut(entry: Entry) -> None:
    build = partial(
        KINDS[entry["kind"]],
        utterances(entry),
        batches=entry.get("source_batches", [["u0000"]]),
        collate_fn=CommonCollateFn(int_pad_value=-1),
        **entry["args"],
    )
    if "error" in entry:
        with pytest.raises(ConfigError, match="chunk_length"):
            build()
        return
    for epoch, expected in entry["epochs"].items():
        assert chunks(build().build_iter(int(epoch))) == expected


@pytest.mark.parametrize("entry", entries("multiple_iter"))
def test_the_multiple_iterator_gives_one_split_after_the_other(entry: Entry) -> None:
    def build(split: str) -> SequenceIterFactory:
        batches = build_batch_sampler(**in_reference({**entry["batches"], "shape_files": [split]}))
        return SequenceIterFactory(
            utterances(entry), batches, collate_fn=CommonCollateFn(), **entry["inner"]
        )

    factory = MultipleIterFactory(
        [partial(build, split) for split in entry["splits"]], **entry["args"]
    )
    for epoch, expected in entry["epochs"].items():
        assert [ids for ids, _ in factory.build_iter(int(epoch))] == expected


def test_no_entry_of_the_reference_is_left_out() -> None:
    names = {json.dumps(entry.values[0]["name"]) for entry in entries(*KINDS)}
    assert len(names) == 33
    others = {"batch", "category", "direct"}
    kinds = {
        entry["kind"] for file in REFERENCE.glob("*.json") for entry in json.loads(file.read_text())
    }
    assert kinds == {*KINDS, *others}
