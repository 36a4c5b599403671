"""The batches that ESPnet makes of the same files, id for id."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import REFERENCE as SHARED

from featcache.errors import ConfigError
from featcache.espnet import build_batch_sampler, build_category_batch_sampler
from featcache.espnet.categories import (
    CategoryLimits,
    Members,
    dataset_pools,
    drawn_batches,
    read_members,
)
from featcache.espnet.shapes import PackedStrings, utterances_of
from featcache.samplers import Batches

REFERENCE = SHARED / "espnet_batches"
FILES = ("utt2category_file", "category2utt_file", "dataset2utt_parent_dir")
Entry = dict[str, Any]


def entries(*kinds: str) -> list[Any]:
    found = [
        pytest.param(entry, id=entry["name"])
        for path in sorted(REFERENCE.glob("*.json"))
        for entry in json.loads(path.read_text())
        if entry["kind"] in kinds
    ]
    return found or [
        pytest.param({}, marks=pytest.mark.skip(reason=f"no reference batches in {REFERENCE}"))
    ]


def arguments(entry: Entry) -> Entry:
    args = dict(entry["args"])
    if "shape_files" in args:
        args["shape_files"] = [str(REFERENCE / name) for name in args["shape_files"]]
    return args | {
        name: str(REFERENCE / args[name]) for name in FILES if args.get(name) is not None
    }


def test_the_reference_is_whole() -> None:
    if not REFERENCE.exists():
        pytest.skip(f"no reference batches in {REFERENCE}")
    counts = {kind: len(entries(kind)) for kind in ("batch", "category", "direct")}
    assert counts == {"batch": 40, "category": 18, "direct": 1}


@pytest.mark.parametrize("entry", entries("batch"))
def test_batches_are_those_of_espnet(entry: Entry) -> None:
    if "error" in entry:
        with pytest.raises(ConfigError):
            build_batch_sampler(**arguments(entry))
        return
    assert list(build_batch_sampler(**arguments(entry))) == entry["batches"]


@pytest.mark.parametrize("entry", entries("batch"))
def test_arrays_give_the_batches_of_their_files(entry: Entry) -> None:
    args = arguments(entry)
    if "error" in entry:
        pytest.skip("an error of the files")
    found = utterances_of(args.pop("shape_files"), None)
    keys = found.ids
    assert isinstance(keys, PackedStrings)
    lengths = [
        np.column_stack([shape.lengths, np.resize(shape.dims, (len(keys), shape.dims.shape[1]))])
        for shape in found.shapes
    ]
    if (path := args.pop("utt2category_file", None)) is not None:
        labels = dict(line.split() for line in Path(path).read_text().splitlines())
        args["categories"] = [labels[key] for key in keys]
    batches = build_batch_sampler(**args, lengths=lengths)
    assert batches.keys is None
    assert list(Batches(batches.items, batches.ends, keys=keys)) == entry["batches"]


@pytest.mark.parametrize("entry", entries("direct"))
def test_unsorted_batches_of_one_category_are_those_of_espnet(entry: Entry) -> None:
    keys, labels = zip(
        *(
            line.split()
            for line in (REFERENCE / entry["args"]["utt2category_file"]).read_text().splitlines()
        ),
        strict=True,
    )
    batches = build_batch_sampler(
        "unsorted",
        batch_size=8,
        drop_last=True,
        lengths=np.ones(len(keys), np.int64),
        categories=labels,
    )
    assert list(Batches(batches.items, batches.ends, keys=keys)) == entry["batches"]


@pytest.mark.parametrize("entry", entries("category"))
def test_category_batches_are_those_of_espnet(entry: Entry) -> None:
    args = arguments(entry)
    if "error" in entry:
        with pytest.raises(ConfigError):
            build_category_batch_sampler(**args)
        return
    batches, again = build_category_batch_sampler(**args)
    # ESPnet's order comes from a set: only from there on it is the same
    if "utts_after_shuffle" in entry:
        batches = drawn_from(args, entry["utts_after_shuffle"])
    else:
        assert list(build_category_batch_sampler(args["type"], **again)[0]) == list(batches)  # type: ignore[arg-type]
    assert list(batches) == entry["batches"]


def drawn_from(args: Entry, shuffled: dict[str, dict[str, list[str]]]) -> Batches:
    """Return the batches of lists of utterances that someone else shuffled."""
    found = utterances_of(args["shape_files"], None, separator=" ")
    keys, lengths = found.ids, found.shapes[0].lengths
    assert isinstance(keys, PackedStrings)
    by_category = read_named(keys, args["category2utt_file"])
    by_dataset = read_named(keys, args["dataset2utt_parent_dir"] + "/dataset2utt")
    pools = dataset_pools(
        lengths,
        by_category,
        by_dataset,
        args["category_upsampling_factor"],
        args["dataset_upsampling_factor"],
        args["dataset_scaling_factor"],
    )
    row = {key: number for number, key in enumerate(keys)}
    lists = [
        [row[id] for id in ids] for categories in shuffled.values() for ids in categories.values()
    ]
    assert [
        set(rows.tolist()) for rows in np.split(pools.members.rows, pools.members.ends[1:-1])
    ] == list(map(set, lists))
    limits = CategoryLimits(
        args["batch_bins"],
        args["min_batch_size"],
        args["max_batch_size"],
        args.get("drop_last", False),
    )
    theirs = Members(np.concatenate([np.array(rows) for rows in lists]), pools.members.ends)
    batches = drawn_batches(lengths, replace(pools, members=theirs), limits, args["epoch"])
    return Batches(batches.items, batches.ends, keys=keys)


def read_named(keys: PackedStrings, path: str) -> Members:
    ids, members = read_members(path)
    return members.renumbered(keys.match(ids))
