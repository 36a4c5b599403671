from __future__ import annotations

import warnings
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray

from featcache.errors import ConfigError, FeatureError
from featcache.espnet import CommonCollateFn
from featcache.espnet.dataset_input import ArrayOrTensor, EspnetItem

DTYPES = [
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "bool",
]


def arrays(lengths: list[int], dims: tuple[int, ...], dtype: str) -> list[NDArray[Any]]:
    return [
        (np.arange(length * int(np.prod(dims))).reshape(length, *dims) + 1).astype(dtype)
        for length in lengths
    ]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    dims=st.sampled_from([(), (3,), (2, 2)]),
    dtype=st.sampled_from(DTYPES),
    tensors=st.booleans(),
)
def test_what_is_cut_out_of_a_batch_is_what_was_put_in(
    lengths: list[int], dims: tuple[int, ...], dtype: str, tensors: bool
) -> None:
    given_arrays = arrays(lengths, dims, dtype)
    items: list[EspnetItem] = [
        (f"u{number}", {"x": torch.from_numpy(array) if tensors else array})
        for number, array in enumerate(given_arrays)
    ]
    ids, batch = CommonCollateFn(float_pad_value=0, int_pad_value=-1)(items)
    assert ids == [id for id, _ in items]
    assert list(batch) == ["x", "x_lengths"]
    assert batch["x_lengths"].dtype == torch.int64
    assert batch["x_lengths"].tolist() == lengths
    assert batch["x"].shape == (len(lengths), max(lengths), *dims)
    pad = -1 if dtype.startswith("int") else 0
    for row, array in zip(batch["x"].numpy(), given_arrays, strict=True):
        np.testing.assert_array_equal(row[: len(array)], array, strict=True)
        assert (row[len(array) :] == pad).all()


def test_names_keep_the_order_of_the_first_utterance_and_its_dtypes() -> None:
    first: EspnetItem = (
        "a",
        {"text": np.array([1, 2]), "speech": np.ones((3, 2), np.float16), "spk": np.array([7])},
    )
    second: EspnetItem = (
        "b",
        {"spk": np.array([8]), "speech": np.full((1, 2), 0.1), "text": np.array([3], np.int32)},
    )
    ids, batch = CommonCollateFn(not_sequence=["spk"])([first, second])
    assert ids == ["a", "b"]
    assert list(batch) == ["text", "text_lengths", "speech", "speech_lengths", "spk"]
    assert (batch["speech"].dtype, batch["text"].dtype) == (torch.float16, torch.int64)
    assert batch["text"].tolist() == [[1, 2], [3, -32768]]
    assert batch["spk"].tolist() == [[7], [8]]
    np.testing.assert_array_equal(
        batch["speech"][1].numpy(), np.array([[0.1] * 2, [0] * 2, [0] * 2], np.float16)
    )


def test_tensors_and_arrays_of_any_layout_may_be_mixed() -> None:
    items: list[EspnetItem] = [
        ("a", {"x": torch.tensor([1.5, 2.5], dtype=torch.bfloat16)}),
        ("b", {"x": np.array([3.0, 4.0], ">f4")[::-1]}),
        ("c", {"x": torch.ones(1, requires_grad=True)}),
    ]
    _, batch = CommonCollateFn(float_pad_value=-1)(items)
    assert batch["x"].dtype == torch.bfloat16
    assert not batch["x"].requires_grad
    assert batch["x"].tolist() == [[1.5, 2.5], [4, 3], [1, -1]]
    _, batch = CommonCollateFn()(items[1:])
    assert (batch["x"].dtype, batch["x"].tolist()) == (torch.float32, [[4, 3], [1, 0]])


def test_numbers_too_large_for_the_first_dtype_are_infinite_without_a_warning() -> None:
    items: list[EspnetItem] = [
        ("a", {"x": np.ones(1, np.float32)}),
        ("b", {"x": np.array([1e300])}),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, batch = CommonCollateFn()(items)
    assert batch["x"].tolist() == [[1], [float("inf")]]


def test_read_only_arrays_are_copied_without_a_warning() -> None:
    array = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, batch = CommonCollateFn()([("a", {"x": array}), ("b", {"x": array})])
    batch["x"][0] = 9
    assert array.tolist() == [0, 1, 2, 3]
    assert batch["x"][1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("tensors", [True, False])
def test_a_batch_of_one_has_memory_of_its_own(tensors: bool) -> None:
    array = np.ones((2, 3), np.float32)
    _, batch = CommonCollateFn()([("a", {"x": torch.from_numpy(array) if tensors else array})])
    batch["x"].zero_()
    assert array.sum() == 6


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "no utterances"),
        (["ab"], "not of str"),
        ([("a", np.ones(2))], "list of "),
        ([("a", {"x": np.ones(1)}), ("b", {"y": np.ones(1)})], r"'a' and 'b' .*\['x', 'y'\]"),
        ([("a", {"x_lengths": np.ones(1)})], "'a': 'x_lengths' is reserved"),
        (
            [("a", {"x": np.ones(1)}), ("b", {"x": np.float32(1)})],
            "'b', 'x': an array or .* needed, not float32",
        ),
        (
            [("a", {"x": np.ones(1)}), ("b", {"x": [1.0]})],
            "'b', 'x': an array or .* needed, not list",
        ),
        ([("a", {"x": np.ones(())})], r"'a', 'x': .*shape \(1,\)"),
        (
            [("a", {"x": np.ones((2, 3))}), ("b", {"x": np.ones((2, 1))})],
            r"'b', 'x': shape \(2, 1\) .*\(2, 3\) of 'a'",
        ),
        ([("a", {"x": np.ones((2, 3))}), ("b", {"x": np.ones(3)})], r"'b', 'x': shape \(3,\)"),
        ([("a", {"x": np.array(["text"])})], "'a', 'x': torch has no dtype '<U4'"),
        ([("a", {"x": np.array([None])})], "'a', 'x': torch has no dtype 'object'"),
    ],
)
def test_what_cannot_be_padded_is_refused_by_utterance_and_name(
    items: list[EspnetItem], message: str
) -> None:
    with pytest.raises(FeatureError, match=message):
        CommonCollateFn()(items)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("int8", r"int_pad_value -32768 .* 'units', which is int8"),
        ("float16", r"float_pad_value 1000000.0 .* float16"),
    ],
)
def test_a_padding_that_the_dtype_cannot_hold_is_refused(dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CommonCollateFn(float_pad_value=1e6)([("a", {"units": np.ones(2, dtype)})])


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_the_padding_of_a_batch_that_is_padded_with_zeros_is_painted_over(arrays: str) -> None:
    padded: dict[str, Any] = {
        "id": ["a", "b"],
        "units": torch.tensor([[1, 2, 3], [4, 0, 0]]),
        "units_lengths": torch.tensor([3, 1]),
        "fbank": torch.zeros(2, 1, 2),
        "fbank_lengths": torch.tensor([1, 1]),
        "spk": torch.ones(2, 4),
        "text": ["x", "y"],
    }
    if arrays == "numpy":
        padded = {
            name: value.numpy() if isinstance(value, torch.Tensor) else value
            for name, value in padded.items()
        }
    ids, batch = CommonCollateFn(int_pad_value=-1, not_sequence={"fbank"})(padded)
    assert {type(batch[name]) for name in ("units", "units_lengths", "fbank")} == {torch.Tensor}
    assert ids == ["a", "b"]
    assert list(batch) == ["units", "units_lengths", "fbank", "spk", "text"]
    assert batch["units"].tolist() == [[1, 2, 3], [4, -1, -1]]
    assert batch["text"] == cast(object, ["x", "y"])


def test_it_says_how_it_pads() -> None:
    collate = CommonCollateFn(0.5, -1, "spk")
    assert (
        repr(collate)
        == "CommonCollateFn(float_pad_value=0.5, int_pad_value=-1, not_sequence=('spk',))"
    )


def test_empty_utterances_are_padded_too() -> None:
    empty: ArrayOrTensor = np.zeros((0, 2), np.int16)
    _, batch = CommonCollateFn()([("a", {"x": empty}), ("b", {"x": empty})])
    assert batch["x"].shape == (2, 0, 2)
    assert batch["x_lengths"].tolist() == [0, 0]
