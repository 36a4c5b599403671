from __future__ import annotations

import subprocess
import sys
from typing import cast

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray

from featcache import unpad
from featcache.errors import FeatureError
from featcache.extraction.unpad import Lengths


@given(
    lengths=st.lists(st.integers(0, 6), max_size=5),
    dims=st.sampled_from([(), (3,), (2, 3)]),
    tensors=st.booleans(),
)
def test_padding_what_was_cut_gives_the_batch_back(
    lengths: list[int], dims: tuple[int, ...], tensors: bool
) -> None:
    padded = np.zeros((len(lengths), 6, *dims), np.float32)
    for row, length in enumerate(lengths):
        padded[row, :length] = row + 1
    ids = [f"utt-{row}" for row in range(len(lengths))]
    cut = unpad(ids, lengths, {"fbank": torch.from_numpy(padded) if tensors else padded})
    assert [utterance["id"] for utterance in cut] == ids
    for row, (utterance, length) in enumerate(zip(cut, lengths, strict=True)):
        array = utterance["fbank"]
        assert isinstance(array, torch.Tensor if tensors else np.ndarray)
        np.testing.assert_array_equal(np.asarray(array), np.full((length, *dims), row + 1))


def test_arrays_are_views_of_the_batch_and_detached_from_the_graph() -> None:
    padded = torch.zeros(2, 3, 4, requires_grad=True) + 1
    first, second = (
        cast(torch.Tensor, utterance["ssl"])
        for utterance in unpad(["a", "b"], [3, 1], {"ssl": padded})
    )
    assert first.data_ptr() == padded.data_ptr()
    assert second.shape == (1, 4)
    assert not first.requires_grad


def test_tensors_of_any_dtype_keep_it() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        (utterance,) = unpad(["a"], [2], {"x": torch.ones(1, 3, dtype=dtype)})
        assert cast(torch.Tensor, utterance["x"]).dtype == dtype


@pytest.mark.parametrize(
    "lengths",
    [
        (2, 1),
        np.array([2, 1], dtype=np.int16),
        torch.tensor([2, 1]),
        torch.tensor([2, 1], dtype=torch.uint8),
        [np.int64(2), torch.tensor(1)],
    ],
)
def test_lengths_may_be_any_integers(lengths: Lengths) -> None:
    cut = unpad(["a", "b"], lengths, {"x": np.zeros((2, 5))})
    assert [len(cast(NDArray[np.float64], utterance["x"])) for utterance in cut] == [2, 1]


def test_features_of_different_frame_rates_have_lengths_of_their_own() -> None:
    cut = unpad(
        ["a", "b"],
        {"fbank": [8, 3], "tokens": torch.tensor([2, 1]), "speaker": None},
        {
            "fbank": np.zeros((2, 8, 80)),
            "tokens": torch.zeros(2, 2, dtype=torch.int64),
            "speaker": np.zeros((2, 16)),
        },
    )
    shapes = [
        {name: np.shape(cast(NDArray[np.generic], u[name])) for name in u if name != "id"}
        for u in cut
    ]
    assert shapes == [
        {"fbank": (8, 80), "tokens": (2,), "speaker": (16,)},
        {"fbank": (3, 80), "tokens": (1,), "speaker": (16,)},
    ]


def test_without_lengths_no_feature_has_a_time_axis() -> None:
    cut = unpad(["a", "b"], None, {"pitch": torch.tensor([1.0, 2.0]), "speaker": np.eye(2)})
    assert [float(cast(torch.Tensor, utterance["pitch"])) for utterance in cut] == [1, 2]
    np.testing.assert_array_equal(cast(NDArray[np.float64], cut[1]["speaker"]), [0, 1])


@pytest.mark.parametrize("lengths", [[1.0, 0.5], torch.tensor([1.0, 0.5]), np.array([1.0, 0.5])])
def test_relative_lengths_are_refused_with_the_reason(lengths: Lengths) -> None:
    with pytest.raises(FeatureError, match=r"'x'.*relative lengths do not carry over"):
        unpad(["a", "b"], lengths, {"x": np.zeros((2, 5))})


@pytest.mark.parametrize(
    ("ids", "lengths", "shape", "message"),
    [
        (["a", "b"], [5, 6], (2, 5), r"utterance 'b', feature 'x': length 6 is not within 0 to 5"),
        (["a", "b"], [-1, 6], (2, 5), r"utterance 'a', feature 'x': length -1 "),
        (["a", "b"], [5], (2, 5), r"'x': 1 lengths do not fit 2 ids"),
        (
            ["a", "b"],
            [5, 5],
            (3, 5),
            r"'x' of shape \(3, 5\) does not have a row for each of 2 ids",
        ),
        (["a"], [5], (), r"'x' of shape \(\)"),
        (["a", "b"], [5, 5], (2,), r"'x' of shape \(2,\) has no time axis"),
        (
            ["a", "b"],
            [[5], [5]],
            (2, 5),
            r"'x': lengths must be frames, integers, not \[\[5\], \[5\]\]",
        ),
        (["a", "b", "b"], [5, 5, 5], (3, 5), r"utterance 'b' is in the batch twice"),
        ("ab", [5, 5], (2, 5), r"not the one string 'ab'"),
        (["a"], {"x": [5], "fbnk": [5]}, (1, 5), r"'fbnk', which is not in the batch"),
        (["a"], {}, (1, 5), r"'x' has no lengths"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    ids: list[str], lengths: list[int], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(FeatureError, match=message):
        unpad(ids, lengths, {"x": torch.zeros(shape)})


def test_a_list_is_not_a_padded_batch() -> None:
    with pytest.raises(
        FeatureError, match="'x': a padded torch tensor or numpy array is needed, not list"
    ):
        unpad(["a"], [1], {"x": cast(NDArray[np.float64], [[1]])})


def test_a_feature_called_id_is_refused() -> None:
    with pytest.raises(FeatureError, match="called 'id'"):
        unpad(["a"], [1], {"id": np.zeros((1, 1))})


@pytest.mark.parametrize("name", ["class", "my-feature", "ids", "lengths", "features", "id2"])
def test_a_feature_may_have_any_other_name(name: str) -> None:
    (utterance,) = unpad(["a"], [2], {name: np.arange(3)[None]})
    assert list(utterance) == ["id", name]
    assert cast(NDArray[np.int64], utterance[name]).tolist() == [0, 1]


def test_features_without_names_are_refused() -> None:
    with pytest.raises(FeatureError, match=r"by name, such as \{'fbank': fbank\}, not 'ndarray'"):
        unpad(["a"], [2], cast(dict[str, NDArray[np.float64]], np.zeros((1, 3))))


def test_cutting_arrays_loads_no_torch() -> None:
    code = """if True:
        import sys, numpy, featcache.extraction.unpad
        featcache.extraction.unpad.unpad(["a"], [1], {"x": numpy.zeros((1, 2))})
        sys.exit("torch" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
