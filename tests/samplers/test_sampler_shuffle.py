from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from featcache.espnet.categories import permutation, permutation_by, swap_partners

SIZES = st.one_of(st.integers(0, 40), st.integers(500, 530), st.integers(1000, 5000))


@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(SIZES, max_size=4))
def test_lists_are_shuffled_as_python_shuffles_them_one_after_the_other(
    seed: int, sizes: list[int]
) -> None:
    theirs, ours = random.Random(seed), random.Random(seed)
    for size in sizes:
        shuffled = list(range(size))
        theirs.shuffle(shuffled)
        assert permutation(ours, size).tolist() == shuffled
    assert ours.getstate() == theirs.getstate()


@settings(max_examples=5)
@given(seed=st.integers(0, 1000))
def test_a_long_list_is_shuffled_as_python_shuffles_it(seed: int) -> None:
    shuffled = list(range(150_000))
    random.Random(seed).shuffle(shuffled)
    assert permutation(random.Random(seed), len(shuffled)).tolist() == shuffled


@given(seed=st.integers(0, 1000), size=st.integers(1, 300), data=st.data())
def test_the_end_of_a_list_is_known_without_the_rest(
    seed: int, size: int, data: st.DataObject
) -> None:
    partners = swap_partners(random.Random(seed), size)
    begin = data.draw(st.integers(0, size - 1))
    whole = permutation_by(partners, np.arange(size))
    np.testing.assert_array_equal(permutation_by(partners, np.arange(begin, size)), whole[begin:])


def test_the_users_random_numbers_are_left_alone() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    permutation(random.Random(1), 1000)
    assert (random.random(), np.random.random()) == expected
