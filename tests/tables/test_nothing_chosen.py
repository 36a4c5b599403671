"""Views, segments and loaders of nothing are told or refused, and splits far from their shares."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig, FeatureTable
from featcache.errors import ConfigError, WindowError


@pytest.fixture
def table(tmp_path: Path) -> FeatureTable:
    """A table of 20 utterances of 10 to 29 frames, by 4 speakers."""
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("f", frame_s=0.01)]) as writer:
        for number in range(20):
            array = np.ones((10 + number, 4), np.float32)
            told = {"spk": f"s{number % 4}", "snr": number / 2}
            writer.write(f"u{number:02}", {"f": array}, annotations=told)
    return featcache.open(tmp_path / "cache").table


def without_return(row: Any) -> None:
    row["f"] > 3  # noqa: B015 (as it was forgotten)


NOTHING: list[tuple[Callable[[FeatureTable], FeatureTable], list[str]]] = [
    (lambda table: table.filter(f=(20, 10)), ["filter(f=(20, 10))", "did you mean f=(10, 20)?"]),
    (lambda table: table.filter(spk="nobody"), ["filter(spk='nobody')", "values are those of"]),
    (lambda table: table.filter(snr=(90, None)), ["filter(snr=(90, None))"]),
    (lambda table: table.filter(without_return), ["without_return", "returns something"]),
    (lambda table: table.sample(0.01), ["sample(0.01)"]),
    (lambda table: table.segments({}), ["segments({})"]),
]


@pytest.mark.parametrize(("choose", "words"), NOTHING)
def test_a_view_of_nothing_is_told_once(
    table: FeatureTable,
    caplog: pytest.LogCaptureFixture,
    choose: Callable[[FeatureTable], FeatureTable],
    words: list[str],
) -> None:
    assert len(choose(table)) == 0
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("featcache", logging.WARNING)
    assert [
        word for word in [*words, "nothing of <FeatureTable: 20"] if word not in record.message
    ] == []


def test_a_view_of_something_is_not_told(
    table: FeatureTable, caplog: pytest.LogCaptureFixture
) -> None:
    table.filter(f=(10, 20)).sample(0.5).sort("f").select([0])
    table.segments({"x": ("u00", 0.0, 0.1)})
    table.select([]).filter(f=(10, 20))  # of nothing, nothing is left
    assert not caplog.records


def test_a_loader_of_nothing_is_told(table: FeatureTable, caplog: pytest.LogCaptureFixture) -> None:
    empty = table.select([])
    for load in (
        lambda: featcache.FeatureLoader(empty, batch_size=4, shuffle=True),
        lambda: featcache.FeatureDataset(empty),
        lambda: featcache.FeatureDataset(table).view(empty),
    ):
        caplog.clear()
        assert len(load()) == 0
        (message,) = caplog.messages
        assert "0 of 20 utterances of " in message
        assert "> has no utterances" in message


def test_a_segment_without_frames_is_refused_by_name(table: FeatureTable, tmp_path: Path) -> None:
    lines = [
        "id,recording,start_s,stop_s",
        "a,u05,0.051,0.052",
        "b,u05,0.05,0.06",
        "c,u05,0.01,0.012",
    ]
    (tmp_path / "s.csv").write_text("\n".join(lines))
    words = (
        r"segment 'a' of recording 'u05' has no frame of feature 'f' \(1 more like it\).* 0.01 s"
    )
    with pytest.raises(WindowError, match=words):
        table.segments(tmp_path / "s.csv")


def test_a_file_of_no_segments_is_refused(table: FeatureTable, tmp_path: Path) -> None:
    for name, text in (("s.csv", "id,recording,start_s,stop_s\n"), ("s.jsonl", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=f"{name}': the file lists none"):
            table.segments(tmp_path / name)


@pytest.mark.parametrize(
    ("shares", "far"),
    [
        ({"a": 0.98, "b": 0.01, "c": 0.01}, True),
        ({"a": 0.8, "b": 0.1, "c": 0.1}, True),
        ({"a": 0.75, "b": 0.25}, False),
        ({"a": 0.72, "b": 0.28}, False),
    ],
)
def test_a_split_far_from_its_shares_is_told(
    table: FeatureTable, caplog: pytest.LogCaptureFixture, shares: dict[str, float], far: bool
) -> None:
    table.split(shares, by="spk")
    told = [message for message in caplog.messages if "far from the shares" in message]
    assert len(told) == len(caplog.messages) == far
    if far:
        assert "'a' 0.5 instead of 0." in told[0]
    table.split(shares)
    assert len(caplog.messages) == far
