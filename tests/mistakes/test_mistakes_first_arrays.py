"""Mistakes of first users in the shapes of arrays, as a `CacheWriter` answers them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
            id="40-batch-axis-of-other-lengths",
        ),
        pytest.param(
            Feature("fbank"),
            [(1, 7, 80), (1, 7, 80)],
            ["was a batch axis left in?", "declare dims: [7, 80]"],
            id="41-batch-axis-of-equal-lengths",
        ),
        pytest.param(
            Feature("fbank", dims=[80]),
            [(1, 7, 80)],
            ["(7, 80), declared is (80,)", "was a batch axis left in?"],
            id="41-batch-axis-at-once",
        ),
        pytest.param(
            Feature("fbank"),
            [(80, 5), (80, 9)],
            ["(9,), those before have (5,)", "is the array transposed?"],
            id="42-transposed",
        ),
        pytest.param(
            Feature("fbank", dims=[80]),
            [(80, 9)],
            ["(9,), declared is (80,)", "is the array transposed?"],
            id="42-transposed-at-once",
        ),
        pytest.param(
            Feature("fbank", dims=[192]),
            [(192,)],
            ["declared is (192,)", "time_axis: null"],
            id="43-embedding-at-once",
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


def test_41_the_first_batch_of_one_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="utterance 'last', feature 'fbank': .*batch axis"):
        write(tmp_path, Feature("fbank"), [(1, 7, 80)])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["fbank", "fbank_lengths"], "'fbank_lengths'.*rename"),
        (["fbank", "fbank"], "two features are called 'fbank'"),
    ],
)
def test_17_18_a_writer_refuses_names_that_clash(
    tmp_path: Path, names: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheWriter(tmp_path / "cache", [Feature(name) for name in names])
    assert not (tmp_path / "cache").exists()
