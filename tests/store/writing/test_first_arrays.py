"""Shapes of arrays that look wrong, as a `CacheWriter` answers them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featcache
from featcache import CacheWriter
from featcache import FeatureStorageConfig as Feature
from featcache.errors import ConfigError, FeatureError


def write(path: Path, feature: Feature, shapes: Sequence[tuple[int, ...]]) -> None:
    """Write an utterance of each shape; the last one is to be refused."""
    with CacheWriter(path, [feature]) as writer:
        for number, shape in enumerate(shapes[:-1]):
            writer.write(f"u{number}", {"fbank": np.ones(shape)})
        writer.write("last", {"fbank": np.ones(shapes[-1])})


@pytest.mark.parametrize(
    ("feature", "shapes", "words"),
    [
        pytest.param(
            Feature("fbank"),
            [(1, 5, 80), (1, 9, 80)],
            ["was a batch axis left in?", "array[0]"],
            id="batch-axis-of-other-lengths",
        ),
        pytest.param(
            Feature("fbank"),
            [(1, 7, 80), (1, 7, 80)],
            ["was a batch axis left in?", "declare dims: [7, 80]"],
            id="batch-axis-of-equal-lengths",
        ),
        pytest.param(
            Feature("fbank", dims=[80]),
            [(1, 7, 80)],
            ["(7, 80), declared is (80,)", "was a batch axis left in?"],
            id="batch-axis-at-once",
        ),
        pytest.param(
            Feature("fbank"),
            [(80, 5), (80, 9)],
            ["(9,), those before have (5,)", "is the array transposed?"],
            id="transposed",
        ),
        pytest.param(
            Feature("fbank", dims=[80]),
            [(80, 9)],
            ["(9,), declared is (80,)", "is the array transposed?"],
            id="transposed-at-once",
        ),
        pytest.param(
            Feature("fbank", dims=[192]),
            [(192,)],
            ["declared is (192,)", "time_axis: null"],
            id="embedding-at-once",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:utterance 'u0'")
def test_an_array_of_a_wrong_shape_is_refused_by_name(
    tmp_path: Path, feature: Feature, shapes: Sequence[tuple[int, ...]], words: list[str]
) -> None:
    with pytest.raises(FeatureError, match="utterance 'last', feature 'fbank'") as caught:
        write(tmp_path, feature, shapes)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert "last" not in featcache.open(tmp_path)


def test_the_first_batch_of_one_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="utterance 'last', feature 'fbank': .*batch axis"):
        write(tmp_path, Feature("fbank"), [(1, 7, 80)])


def written(path: Path, feature: Feature, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    with CacheWriter(path, [feature]) as writer:
        for number, array in enumerate(arrays):
            writer.write(f"u{number}", {"fbank": array})


def read_through(path: Path, feature: Feature, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    by_id = {f"u{number}": array for number, array in enumerate(arrays)}
    with featcache.through(path, lambda id: by_id[id], features=[feature]) as read:
        for id in by_id:
            read(id)


VECTORS = "is it one vector an utterance\\? declare time_axis: null, or dims: \\[\\]"


@pytest.mark.parametrize("store", [written, read_through])
@pytest.mark.parametrize("count", [2, 4])
def test_a_few_vectors_that_were_taken_for_frames_are_told_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    store: Callable[..., None],
    count: int,
) -> None:
    store(tmp_path, Feature("fbank"), [np.ones(192, np.float32)] * count)
    said = [each for each in caplog.messages if re.search(VECTORS, each)]
    assert len(said) == 1, caplog.messages
    assert f"the {count} utterances" in said[0]


def test_many_vectors_that_were_taken_for_frames_are_told_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.warns(UserWarning, match=f"192 frames of a single number.*{VECTORS}"):
        written(tmp_path, Feature("fbank"), [np.ones(192, np.float32)] * 9)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("feature", "shapes"),
    [
        (Feature("fbank", time_axis=None), [(192,), (192,)]),
        (Feature("fbank", dims=[]), [(192,), (192,)]),
        (Feature("fbank", dtype="int16"), [(192,), (192,)]),
        (Feature("fbank"), [(192,), (191,)]),
        (Feature("fbank"), [(192, 2), (192, 2)]),
        (Feature("fbank"), [(192,)]),
    ],
    ids=repr,
)
def test_nothing_is_said_of_what_looks_right(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    feature: Feature,
    shapes: Sequence[tuple[int, ...]],
) -> None:
    dtype = "int16" if feature.dtype == "int16" else "float32"
    written(tmp_path, feature, [np.ones(shape, dtype) for shape in shapes])
    assert not caplog.messages


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["fbank", "fbank_lengths"], "'fbank_lengths'.*rename"),
        (["fbank", "fbank"], "two features are called 'fbank'"),
    ],
)
def test_a_writer_refuses_names_that_clash(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheWriter(tmp_path / "cache", [Feature(name) for name in names])
    assert not (tmp_path / "cache").exists()
