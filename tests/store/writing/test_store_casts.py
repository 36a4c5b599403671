"""What is stored is what was given, rounded to the declared float at most; anything else is an
error.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.declaration import DTYPES
from featcache.errors import FeatureError
from featcache.format import from_storage
from featcache.writing.arrays import to_storage

NUMPY_DTYPES = [name for name in DTYPES if name != "bfloat16"]
# bits of precision, smallest exponent of a normal number, largest exponent
FLOATS = {
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
    "float32": (24, -126, 127),
    "float64": (53, -1022, 1023),
}


def rounded(value: Fraction, precision: int, least: int, largest: int) -> Fraction | None:
    """Round to nearest, ties to even, in exact arithmetic; None if the float has no such number."""
    if value == 0:
        return value
    exponent = math.floor(math.log2(abs(value.numerator)) - math.log2(value.denominator))
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, least) - precision + 1)
    result = round(value / step) * step  # Fraction rounds half to even
    return result if abs(result) < Fraction(2) ** (largest + 1) else None


def expected(value: Any, source: str, target: str) -> Any:
    """What must be read back for a numpy or Python number; None if it must be refused."""
    if target not in FLOATS:
        if source in FLOATS:
            return None
        limits = np.iinfo(target) if target != "bool" else np.iinfo(np.uint8)
        least, largest = (0, 1) if target == "bool" else (limits.min, limits.max)
        return int(value) if least <= int(value) <= largest else None
    if source in FLOATS and not math.isfinite(value):
        return float(value)
    exact: Fraction | None = Fraction(float(value) if source in FLOATS else int(value))
    assert exact is not None
    if target == "bfloat16":  # as torch does: rounded to float32 first
        exact = rounded(exact, *FLOATS["float32"])
    result = None if exact is None else rounded(exact, *FLOATS[target])
    return (
        None
        if result is None
        else math.copysign(float(result), value)
        if source in FLOATS
        else float(result)
    )


@cache
def declared(target: str, time_axis: int | None, nonfinite: str) -> FeatureStorageConfig:
    return FeatureStorageConfig(
        "fbank", dtype=target, stats=False, time_axis=time_axis, nonfinite=nonfinite
    )


def store(
    array: Any, target: str, time_axis: int | None = 0, nonfinite: str = "keep"
) -> NDArray[Any]:
    feature = declared(target, time_axis, nonfinite)
    return from_storage(to_storage("utt-1", array, feature), target)


def edges(source: str) -> list[Any]:
    """Numbers of a dtype at the limits of the others."""
    if source == "bool":
        return [False, True]
    if source in FLOATS:
        near = [
            0.0,
            65504.0,
            65519.0,
            65519.999,
            65520.0,
            3.3895314e38,
            3.3961775e38,
            3.4028235e38,
            3.4028236e38,
        ]
        near += [1.5, 1e-8, 2.9e-8, 6e-8, 7e-46, 1e-45, 1e-39, 1e-320, math.inf, math.nan]
        with np.errstate(over="ignore"):
            return list(np.array([*near, *(-edge for edge in near)]).astype(source))
    limits = np.iinfo(source)
    steps = {
        sign * (2**power) + step for power in range(65) for step in (-1, 0, 1) for sign in (-1, 1)
    }
    return sorted(step for step in steps if limits.min <= step <= limits.max)


@given(data=st.data())
@settings(max_examples=1000)
def test_every_number_is_kept_or_refused(data: st.DataObject) -> None:
    source, target = data.draw(st.sampled_from(NUMPY_DTYPES)), data.draw(st.sampled_from(DTYPES))
    value = data.draw(hnp.from_dtype(np.dtype(source)))
    orders: list[Literal["<", ">"]] = ["<", ">"]
    check(value, source, target, data.draw(st.sampled_from(orders)))


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", NUMPY_DTYPES)
def test_numbers_at_the_limits_of_a_dtype_are_kept_or_refused(source: str, target: str) -> None:
    for value in edges(source):
        check(value, source, target, "<")


def check(value: Any, source: str, target: str, order: Literal["<", ">"]) -> None:
    array = np.array([[0, 1], [0, 0]], np.dtype(source).newbyteorder(order))
    array[1, 0] = value
    must_be = expected(array[1, 0], source, target)
    if must_be is None:
        with pytest.raises(FeatureError) as error:
            store(array, target)
        assert str(error.value).startswith("utterance 'utt-1', feature 'fbank': ")
        if target in FLOATS or source not in FLOATS:
            assert f"{array[1, 0]} at (1, 0) does not fit {target}" in str(error.value)
    else:
        found = store(array, target)
        np.testing.assert_array_equal(found[1, 0], must_be)
        assert np.signbit(found[1, 0]) == np.signbit(np.float64(must_be)) or math.isnan(must_be)
        assert found.dtype == ("float32" if target == "bfloat16" else target)
        assert found.tolist()[0] == [0, 1]


@pytest.mark.parametrize("target", [name for name in DTYPES if name not in FLOATS])
@pytest.mark.parametrize("source", ["float16", "float32", "float64"])
def test_floats_are_never_stored_as_integers_whole_or_not(source: str, target: str) -> None:
    for array in (np.ones((2, 3), source), np.ones((0, 3), source)):
        with pytest.raises(
            FeatureError, match=rf"{source} does not fit {target}; round and convert it"
        ):
            store(array, target)


@pytest.mark.parametrize("target", ["float16", "float32", "float64", "bfloat16"])
def test_bfloat16_tensors_keep_their_values(target: str) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    fitting = every[
        every.isfinite()
        & ((every.float().abs() <= 65504) if target == "float16" else torch.tensor(True))
    ]
    found = store(fitting, target)
    through_float = fitting.to(getattr(torch, target)).float()
    np.testing.assert_array_equal(found.astype(np.float32), through_float.numpy())
    with pytest.raises(
        FeatureError, match=r"'utt-1', feature 'fbank': nan at \(1,\) is not finite"
    ):
        store(torch.tensor([1.0, math.nan], dtype=torch.bfloat16), target, nonfinite="raise")


def test_bfloat16_rounds_as_torch_does() -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal(20_000) * np.exp2(np.arange(20_000) % 200 - 100)
    integers = random.integers(-(2**63), 2**63, 20_000) >> np.arange(20_000) % 64
    for array in (values, values.astype(np.float32), np.arange(20_000) / np.float16(3), integers):
        np.testing.assert_array_equal(
            store(array, "bfloat16"),
            torch.from_numpy(array).to(torch.bfloat16).float().numpy(),
            strict=True,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_and_layout_are_stored_as_they_are(dtype: str) -> None:
    base = (
        torch.arange(24)
        .reshape(4, 6)
        .remainder(2 if dtype == "bool" else 128)
        .to(getattr(torch, dtype))
    )
    for tensor in (
        base,
        base.T,
        base[::2, 1::3],
        base[1:1],
        base[:1].expand(5, 6),
        base.reshape(2, 2, 3, 2).permute(3, 1, 0, 2),
        torch.nn.Parameter(base, requires_grad=True) if base.is_floating_point() else base,
        base * 2 if base.is_floating_point() else base,
    ):
        found = store(tensor, dtype)
        np.testing.assert_array_equal(found, tensor.detach().float().numpy())
        assert found.shape == tensor.shape


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    tensor = torch.complex(torch.arange(3.0), torch.arange(3.0)).conj().imag
    assert tensor.is_neg()
    assert store(tensor, "float32").tolist() == [0, -1, -2]
    half = tensor.bfloat16()
    assert store(half, "bfloat16").tolist() == [0, -1, -2]


@pytest.mark.parametrize(
    "array", [np.float32(3), np.array(3, ">f4"), torch.tensor(3.0), torch.tensor(3).bfloat16()]
)
def test_numbers_are_stored_where_there_is_no_time_axis(array: Any) -> None:
    found = store(array, "float32", time_axis=None)
    assert (found.shape, found.tolist()) == ((1,), [3])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12.0).reshape(3, 4)[::-1, ::-2],
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.broadcast_to(np.arange(4.0), (3, 4)),
        np.arange(12.0).astype(">f8").reshape(3, 4),
    ],
)
def test_arrays_of_every_layout_are_stored_in_c_order(array: NDArray[Any]) -> None:
    feature = FeatureStorageConfig("fbank", dtype="float64")
    stored = to_storage("u", array, feature)
    np.testing.assert_array_equal(stored, array)
    assert stored.flags.c_contiguous
    assert stored.dtype == np.dtype("<f8")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([[1.0]], "list"),
        (None, "NoneType"),
        (3.5, "float"),
        ("abc", "str"),
        (np.array(["a"]), "<U1"),
        (np.array([None]), "object"),
        (np.zeros(2, complex), "complex128"),
        (np.zeros(2, "M8[s]"), "datetime64"),
        (np.zeros(2, [("a", "f4")]), "'a'"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "MaskedArray"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.zeros(2, 2).to_sparse(), "sparse_coo"),
        (torch.zeros(2, device="meta"), "meta"),
    ],
)
def test_what_is_no_plain_array_of_numbers_is_refused(value: Any, what: str) -> None:
    with pytest.raises(
        FeatureError, match=rf"utterance 'utt-1', feature 'fbank': .*{re.escape(what)}"
    ):
        store(value, "float32")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("target", FLOATS)
def test_nan_and_infinity_are_refused_with_their_place_or_kept(
    tmp_path: Path, target: str, value: float
) -> None:
    array = np.zeros((3, 2), np.float32)
    array[2, 1] = value
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank", dtype=target)]) as writer:
        with pytest.raises(
            FeatureError,
            match=rf"'utt-1', feature 'fbank': {value} at \(2, 1\) is not finite; .*keep",
        ):
            writer.write("utt-1", {"fbank": array})
        writer.write("utt-1", {"fbank": np.zeros((3, 2))})
    with CacheWriter(
        tmp_path / "kept", [FeatureStorageConfig("fbank", dtype=target, nonfinite="keep")]
    ) as writer:
        writer.write("utt-1", {"fbank": array})
    np.testing.assert_array_equal(featcache.open(tmp_path / "kept").read("utt-1", "fbank"), array)


def test_the_place_of_a_bad_number_is_the_callers_without_a_time_axis_too() -> None:
    with pytest.raises(FeatureError, match=r"nan at \(1,\) is not finite"):
        store(np.array([0, math.nan]), "float32", time_axis=None, nonfinite="raise")
    with pytest.raises(FeatureError, match=r"70000 at \(1,\) does not fit int16"):
        store(np.array([0, 70_000]), "int16", time_axis=None)
    with pytest.raises(FeatureError, match=r"nan at \(\) is not finite"):
        store(np.float32(math.nan), "float32", time_axis=None, nonfinite="raise")
