"""Segments of several corpora, and whole utterances among them, one after another."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import featcache
from featcache import CacheWriter, FeatureStorageConfig, FeatureTable, Windows
from featcache.errors import ConfigError
from featcache.samplers import BucketBatchSampler

FRAMES = 400


def corpus(path: Path, name: str, **told: object) -> FeatureTable:
    """Two recordings of 4 s whose frames are numbered."""
    features = [
        FeatureStorageConfig("fbank", frame_s=0.01),
        FeatureStorageConfig("voice", time_axis=None),
    ]
    with CacheWriter(path / name, features) as writer:
        for number in (1, 2):
            frames = np.arange(FRAMES, dtype=np.float32)[:, None] + 1000 * number
            arrays = {"fbank": frames, "voice": np.full(2, number, np.float32)}
            writer.write(f"{name}-{number}", arrays, annotations={"speaker": name, **told})
    return FeatureTable.of(path / name)


@pytest.fixture
def tables(tmp_path: Path) -> list[FeatureTable]:
    first = corpus(tmp_path, "first")
    listed: dict[str, tuple[str, float, float, dict[str, object]]] = {
        "late": ("first-2", 3.0, 4.0, {"text": "b", "take": 2}),
        "early": ("first-1", 0.5, 0.75, {"text": None, "take": 1}),
    }
    windows = corpus(tmp_path, "second", text="second's", take=0.5).segments(Windows(1.5))
    return [first.segments(listed), windows, corpus(tmp_path, "third", text="third's")]


def test_each_has_the_id_the_frames_and_the_annotations_that_it_had(
    tables: list[FeatureTable],
) -> None:
    together = featcache.concat(*tables)
    for table in (together, pickle.loads(pickle.dumps(together))):  # noqa: S301
        assert list(table) == [id for part in tables for id in part]
        for part in tables:
            for id in part:
                for feature in ("fbank", "voice"):
                    np.testing.assert_array_equal(table.read(id, feature), part.read(id, feature))
        lengths = [length for part in tables for length in part.lengths("fbank").tolist()]
        assert (
            table.lengths("fbank").tolist() == lengths == [100, 25, *[150, 150, 100] * 2, 400, 400]
        )
        assert list(table.annotation("text")) == ["b", None, *["second's"] * 6, *["third's"] * 2]
        assert list(table.annotation("take")) == [2.0, 1.0, *[0.5] * 6, None, None]
        assert list(table.annotation("speaker")) == [
            *["first"] * 2,
            *["second"] * 6,
            *["third"] * 2,
        ]
        assert table.digest == together.digest


def test_views_and_statistics_of_them_are_as_of_any_table(tables: list[FeatureTable]) -> None:
    together = featcache.concat(*tables)
    turned = featcache.concat(tables[1], tables[0]).annotation("take")
    assert turned.kind == "float"
    assert list(turned) == [*[0.5] * 6, 2.0, 1.0]
    chosen = together.filter(fbank=(1, 150), speaker={"first", "third"})
    assert list(chosen) == ["late", "early"]
    frames = np.concatenate([together.read(id, "fbank") for id in together])
    stats = together.stats("fbank")
    assert stats.count == len(frames)
    np.testing.assert_allclose(stats.mean, frames.mean(0, np.float64), rtol=1e-12)
    batch = together.read_batch(
        ["third-1", "early"],
        "fbank",
    )
    np.testing.assert_array_equal(batch.data[1, :25, 0], 1050.0 + np.arange(25))
    again = featcache.concat(chosen, together.select(["third-2"]))
    assert again.lengths("fbank").tolist() == [100, 25, 400]


def test_all_are_given_exactly_once_in_workers(tables: list[FeatureTable]) -> None:
    dataset = featcache.FeatureDataset(featcache.concat(*tables))
    sampler = BucketBatchSampler(dataset, batch_size=3, seed=1)
    batches: Any = DataLoader(
        dataset, batch_sampler=sampler, num_workers=2, collate_fn=dataset.collate
    )
    seen = [id for batch in batches for id in batch["id"]]
    assert sorted(seen) == sorted(id for part in tables for id in part)


def test_what_does_not_go_together_is_refused(tables: list[FeatureTable], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'early' is in"):
        featcache.concat(tables[0], tables[0].select(["early"]))
    other = corpus(tmp_path, "fourth").segments({"x": ("fourth-1", 0.0, 1.0, {"take": "two"})})
    with pytest.raises(ConfigError, match="annotation 'take' is int in a table and str in another"):
        featcache.concat(tables[0], other)
