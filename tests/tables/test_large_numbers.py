"""Conditions and orders by numbers that float64 cannot tell apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featcache import CacheWriter, FeatureStorageConfig, FeatureTable

EDGE = 2**53
INTS = [EDGE + step for step in (-1, 0, 1, 2, 3, 5)] + [
    -EDGE - 1,
    0,
    2**63 - 1,
    2**63 - 2,
    -(2**63),
]
FLOATS = [float(number) for number in (EDGE - 1, EDGE, EDGE + 2, EDGE + 4, -EDGE, 0, 1e300, 0.1)]
COLUMNS: dict[str, Sequence[float | None]] = {
    "whole": INTS,
    "some": [None, *INTS[:-2], None],
    "float": [*FLOATS, None, 0.5, -0.5],
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> FeatureTable:
    path = tmp_path_factory.mktemp("cache")
    with CacheWriter(path, [FeatureStorageConfig("x")]) as writer:
        for n in range(len(INTS)):
            annotations = {name: values[n] for name, values in COLUMNS.items()}
            writer.write(f"u{n:02}", {"x": np.zeros((1, 2))}, annotations=annotations)
    return FeatureTable.of(path)


def choose(table: FeatureTable, name: str, condition: Any) -> list[str]:
    return list(table.filter(**{name: condition}))


ends = st.one_of(
    st.none(),
    st.sampled_from([*INTS, *FLOATS]),
    st.sampled_from(INTS).map(float),
    st.sampled_from(INTS).map(lambda n: n + Fraction(1, 3)),
    st.sampled_from([math.inf, -math.inf, math.nan, 2**70, -(2**70), 10**400, -(10**400), 0.3]),
)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from([*COLUMNS]), least=ends, most=ends)
def test_a_range_has_the_numbers_that_python_finds_in_it(
    table: FeatureTable, name: str, least: float | None, most: float | None
) -> None:
    expected = [
        f"u{n:02}"
        for n, value in enumerate(COLUMNS[name])
        if value is not None
        and (least is None or value >= least)
        and (most is None or value <= most)
    ]
    assert choose(table, name, (least, most)) == expected


@pytest.mark.parametrize("name", COLUMNS)
def test_one_value_is_itself_alone_and_orders_are_exact(table: FeatureTable, name: str) -> None:
    values = COLUMNS[name]
    kind = float if name == "float" else int
    for wanted in (*map(kind, INTS), 2**70, 10**400, None):
        expected = [f"u{n:02}" for n, value in enumerate(values) if value == wanted]
        assert choose(table, name, {wanted}) == expected
    there = sorted(value for value in values if value is not None)
    ordered = list(table.sort(name).annotation(name))
    assert ordered == there + [None] * (len(values) - len(there))
