"""A view of each kind, over utterances of known content, for tests of loaders and samplers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from store_helpers import arrays_of, id_of, make_cache

import featcache
from featcache import CacheWriter, FeatureStorageConfig, FeatureTable, Windows
from featcache.samplers import BucketBatchSampler

COUNT = 45
FRAME_S = 0.01
SEGMENTS = ("segments", "windows", "view of segments")
KINDS = (
    "filter",
    "select",
    "sample",
    "split",
    "sort",
    "join",
    "concat",
    "view of views",
    *SEGMENTS,
)


def whole_table(path: Path) -> FeatureTable:
    make_cache(path, range(COUNT))
    featcache.open(path).annotate({id_of(n): {"speaker": f"s{n % 7}"} for n in range(COUNT)})
    return featcache.open(path).table


def views_of(home: Path, whole: FeatureTable) -> dict[str, FeatureTable]:
    """A view of each kind."""
    parts = featcache.concat(
        *(make_cache(home / f"part{n}", range(n, COUNT, 3)) for n in range(3)),
    )
    with CacheWriter(home / "labels", [FeatureStorageConfig("labels", dtype="int16")]) as writer:
        for n in range(COUNT):
            writer.write(id_of(n), {"labels": np.full((n % 5 + 1, 1), n)})
    joined = featcache.join(
        whole.select(list(parts)), FeatureTable.of(home / "labels"), unlike="keep"
    )
    split = whole.split({"a": 0.5, "b": 0.5}, by="speaker", seed=1)
    return {
        "filter": whole.filter(fbank=(2, 9), where=lambda row: row["speaker"] != "s3"),
        "select": whole.select([id_of(n) for n in (9, 3, 30, 31, 2, 44, 17, 5, 6)]),
        "sample": parts.sample(0.5, seed=2),
        "split": split["b"],
        "sort": parts.sort("fbank", descending=True),
        "join": joined.filter(labels={2, 3}),
        "concat": featcache.concat(split["a"].select(range(5)), split["b"].sort("id")),
        "view of views": parts.sort("units").sample(30).filter(fbank=(1, None)),
        **segment_views(home),
    }


def segment_views(home: Path) -> dict[str, FeatureTable]:
    """Views of segments, whose ids end in the frames that they have: `<recording>:<from>-<to>`."""
    features = [FeatureStorageConfig("fbank", frame_s=FRAME_S)]
    for name, numbers in (("odd", range(1, COUNT, 2)), ("even", range(0, COUNT, 2))):
        with CacheWriter(home / name, features) as writer:
            for n in numbers:
                writer.write(id_of(n), {"fbank": arrays_of(n)["fbank"]})
    table = featcache.concat(home / "odd", home / "even")
    segments = {}
    for id, frames in zip(table, table.lengths("fbank").tolist(), strict=True):
        for first, last in ((0, frames // 3), (frames // 3, frames), (1, frames - 2)):
            if first < last:
                own = {"text": f"{last - first} frames"}
                name = f"{id}:{first * FRAME_S:g}-{last * FRAME_S:g}"
                segments[name] = (id, first * FRAME_S, last * FRAME_S, own)
    cut = table.segments(segments)
    windows = table.segments(Windows(7 * FRAME_S, hop_s=5 * FRAME_S))
    return {
        "segments": cut.sample(40),
        "windows": windows.filter(fbank=(3, None)).sample(40, seed=1),
        "view of segments": cut.sort("text").filter(where=lambda row: row["fbank"] != 2).sample(30),
    }


def samplers_of(table: FeatureTable, ranks: int, seed: int, state: Any = None) -> list[Any]:
    """The samplers of all ranks, from a state on."""
    found = []
    for rank in range(ranks):
        sampler = BucketBatchSampler(
            table, max_frames=60, batch_size=2, seed=seed, rank=rank, world_size=ranks
        )
        if state is not None:
            sampler.load_state_dict(state)
        found.append(sampler)
    return found


def assert_holds(batch: dict[str, Any], table: FeatureTable) -> None:
    """Compare a batch with the utterances or segments that it names."""
    for place, id in enumerate(batch["id"]):
        length = int(batch["fbank_lengths"][place])
        recording, _, times = id.partition(":")
        wanted = arrays_of(int(recording.rpartition("-")[2]))["fbank"]
        if times:
            first, last = (round(float(time) / FRAME_S) for time in times.split("-"))
            wanted = wanted[first:last]
        np.testing.assert_array_equal(batch["fbank"][place][:length], wanted)
    assert set(batch["id"]) <= set(table)
