"""Hypothesis strategies for utterance ids, declarations and the arrays that fit them.

As in `featcache.testing.backend_under_test`, arrays are as they are stored: bfloat16 is the uint16
of its bits.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Callable, Sequence
from urllib.parse import quote

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from featcache.declaration import FeatureStorageConfig
from featcache.interface import Array, storage_dtype
from featcache.testing.backend_under_test import Storage

# what file formats stumble over
_AWKWARD = "aAbé./%_\\ \n\t\x01\x7f\x85\u0301\u2028\ufeff😀~*?{}[]:'\"-0"

_RELATIVES: tuple[Callable[[str], str], ...] = (
    lambda id: id + "/b",  # a name that is a directory of another
    lambda id: id + ".b",
    lambda id: id + "\n",
    lambda id: id + " ",
    lambda id: "./" + id,
    lambda id: quote(id, safe=""),
    lambda id: id.swapcase(),
    lambda id: unicodedata.normalize("NFC", id),
    lambda id: unicodedata.normalize("NFD", id),
)

# declarations; id -> feature -> array
CacheContent = tuple[list[FeatureStorageConfig], dict[str, dict[str, Array]]]


def ids(max_size: int = 1000) -> st.SearchStrategy[str]:
    """Utterance ids: any non-empty Unicode text without NUL."""
    any_text = st.text(
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40
    )
    awkward = st.text(st.sampled_from(_AWKWARD), min_size=1, max_size=12)
    long = st.builds(
        lambda text, size: (text * size)[:size], awkward, st.sampled_from([100, 255, 256, max_size])
    )
    return (any_text | awkward | long).map(lambda id: id[:max_size])


@st.composite
def id_lists(draw: st.DrawFn, max_size: int = 10) -> list[str]:
    """Different ids, some of them so alike that a format could take one for the other."""
    roots = draw(st.lists(ids(), min_size=1, max_size=max(max_size // 2, 1)))
    alike = [
        relative(draw(st.sampled_from(roots)))
        for relative in draw(st.lists(st.sampled_from(_RELATIVES)))
    ]
    return list(dict.fromkeys(roots + alike))[:max_size]


def frame_shapes(max_rank: int = 3, max_side: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of one frame, a single number and shapes without elements included."""
    return hnp.array_shapes(min_dims=0, max_dims=max_rank, min_side=0, max_side=max_side)


def arrays(dtype: str, shape: tuple[int, ...], lossless: bool = True) -> st.SearchStrategy[Array]:
    """Arrays of a declared dtype: any bits, or, for a lossy codec, numbers within -100 to 100."""
    kind = storage_dtype(dtype)
    if not lossless:
        if kind.kind == "f":
            return hnp.arrays(
                kind, shape, elements=st.integers(-(10**6), 10**6).map(lambda value: value / 10**4)
            )
        return hnp.arrays(kind, shape, elements=st.integers(0, 1 if dtype == "bool" else 100))
    bits = np.dtype(f"<u{kind.itemsize}")
    highest = 1 if dtype == "bool" else int(np.iinfo(bits).max)
    special = [int(value) for value in _special(dtype)]
    elements = st.integers(0, highest) | st.sampled_from(special)
    return hnp.arrays(bits, shape, elements=elements).map(lambda array: array.view(kind))


@st.composite
def features(draw: st.DrawFn, storage: Storage, max_size: int = 3) -> list[FeatureStorageConfig]:
    """Declarations of one to `max_size` features of a storage, which allow NaN and infinity."""
    names = ["fbank", "Tokens_2", "_f0-hz"][: draw(st.integers(1, max_size))]
    return [
        storage.declare(
            name,
            draw(st.sampled_from(storage.dtypes)),
            draw(st.sampled_from([0, None])),
            keep=storage.lossless,
        )
        for name in names
    ]


@st.composite
def caches(
    draw: st.DrawFn, storage: Storage, max_utterances: int = 4, max_frames: int = 9
) -> CacheContent:
    """Declarations, and utterances that fit them."""
    declared = draw(features(storage))
    dims = {feature.name: draw(frame_shapes()) for feature in declared}
    declared = [  # a single frame of two axes looks like a batch of one unless it is declared
        dataclasses.replace(
            feature, dims=dims[feature.name] if len(dims[feature.name]) > 1 else None
        )
        for feature in declared
    ]
    utterances = {}
    for id in draw(id_lists(max_utterances)):
        utterances[id] = {
            feature.name: draw(
                arrays(feature.dtype, _shape(draw, feature, dims, max_frames), storage.lossless)
            )
            for feature in declared
        }
    return declared, utterances


def windows(frames: int) -> st.SearchStrategy[Sequence[int]]:
    """First and last frame of a window, sorted."""
    return st.lists(st.integers(0, frames), min_size=2, max_size=2).map(sorted)


def _shape(
    draw: st.DrawFn,
    feature: FeatureStorageConfig,
    dims: dict[str, tuple[int, ...]],
    max_frames: int,
) -> tuple[int, ...]:
    frames = (draw(st.integers(0, max_frames)),) if feature.time_axis == 0 else ()
    return (*frames, *dims[feature.name])


def _special(dtype: str) -> Array:
    """Bits of numbers that codecs stumble over."""
    kind = storage_dtype(dtype)
    if dtype == "bfloat16":  # -0, infinities, quiet and signalling NaN
        return np.array([0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x7F81], "<u2")
    values: list[float] = [0, 1]
    if kind.kind == "f":
        limits = np.finfo(kind.name)
        values = [-0.0, np.inf, -np.inf, np.nan, float(limits.max), float(limits.tiny)]
    elif kind.kind != "b":
        values = [np.iinfo(kind.name).min, np.iinfo(kind.name).max]
    return np.array(values, kind).view(f"<u{kind.itemsize}")
