"""Round trips of every dtype, shape, value and id, and Hypothesis strategies for them.

As in `featcache.testing.backend_under_test`, arrays are as they are stored: bfloat16 is the uint16
of its bits.
"""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

import dataclasses
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import featcache
from featcache.declaration import FeatureStorageConfig
from featcache.interface import Array, DecodesFrames, storage_dtype
from featcache.testing.backend_under_test import (
    Storage,
    assert_tensor,
    random_bits,
    random_numbers,
    write,
)

# Strategies for utterance ids, declarations and the arrays that fit them.

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


def windows_drawn(frames: int) -> st.SearchStrategy[Sequence[int]]:
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


# Round trips.

LENGTHS = (5, 0, 1, 1203, 2)  # the fourth longer than one block of any codec of ours
IDS = [
    *("a", "a/b", "a.b", "a%2Fb", "a%2fb", "a\\b", "a b", "a\nb", "a:b", "a?b", "a*", "a~", "ab"),
    *("a,b", "a/" * 500),
    *(".", "..", "./a", "/", "/a", "a/", "//", "../a", "~", "-", "--help", " ", " a", "a ", "\n"),
    *("\t", "\x01", "\x7f"),
    *("A", "B", "b", "ß", "ss", "ﬁ", "fi", "İ", "K", "\u212a", "語"),
    *("😀", "😀.😀/😀", "\U0010ffff", "é" * 1000),
    *("\u00e9", "e\u0301", "\u00c9", "\u0301", "\u2028", "\u202e", "\ufeff", "\ufeffa", "\ufffe"),
    *("\x85", "\xa0"),
    *("%", "%%", "%00", "%2E", "{a,b}", "[0]", "0", "00", "'", '"', "$HOME", "`", "&", ";", "<a>"),
    *("None", "con"),
    *("__a__", "__key__", "fbank", "fbank.npy", "a.fbank.npy", "ids", "offsets", "zarr.json"),
    *("c/0", "c.0", "x.json"),
    *("x" * size for size in (99, 100, 101, 255, 256, 1000)),
]


def quick(examples: int) -> settings:
    """Return the settings of a property: each example is a cache on disk."""
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


class RoundTrips:
    """Arrays are read back as they were written."""

    examples: ClassVar[int] = 10

    def test_every_dtype_is_read_back_bit_for_bit(self, storage: Storage, tmp_path: Path) -> None:
        features = [
            storage.declare(f"of_{dtype}", dtype, keep=storage.lossless) for dtype in storage.dtypes
        ]
        make = random_bits if storage.lossless else random_numbers
        utterances = {
            f"utt-{number}": {
                feature.name: make(feature.dtype, (frames, 5), seed=100 * number + column)
                for column, feature in enumerate(features)
            }
            for number, frames in enumerate(LENGTHS)
        }
        write(tmp_path / "cache", features, utterances)
        cache = featcache.open(tmp_path / "cache", verify="arrays")
        storage.assert_holds(cache, features, utterances)
        for feature in features:
            assert_tensor(
                cache.reader(feature.name)("utt-0"),
                cache.read("utt-0", feature.name),
                feature.dtype,
            )

    def test_every_rank_is_read_back(self, storage: Storage, tmp_path: Path) -> None:
        shapes = {
            "rank_0": (),
            "rank_1": (3,),
            "rank_2": (2, 3),
            "rank_3": (2, 1, 3),
            "rank_4": (2, 3, 1, 2),
        }
        framed = {f"framed_{name}": storage.declare(f"framed_{name}") for name in list(shapes)[:4]}
        single = {
            f"single_{name}": storage.declare(f"single_{name}", time_axis=None) for name in shapes
        }
        features = [*framed.values(), *single.values()]
        utterances = {
            f"utt-{number}": {
                feature.name: random_numbers(
                    feature.dtype,
                    (
                        *([frames] if feature.time_axis == 0 else []),
                        *shapes[feature.name.partition("_")[2]],
                    ),
                    seed=number,
                )
                for feature in features
            }
            for number, frames in enumerate(LENGTHS)
        }
        write(tmp_path / "cache", features, utterances)
        storage.assert_holds(featcache.open(tmp_path / "cache"), features, utterances)

    def test_arrays_without_elements_keep_their_shapes(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        shapes = {"none": (0, 3), "no_bins": (4, 0), "no_plane": (2, 3, 0), "neither": (0, 0, 2)}
        features = [storage.declare(name) for name in shapes] + [
            storage.declare("single", time_axis=None)
        ]
        arrays = {f.name: random_numbers(f.dtype, shapes.get(f.name, (2, 0))) for f in features}
        utterances = {"first": arrays, "second": arrays}
        write(tmp_path / "cache", features, utterances)
        cache = featcache.open(tmp_path / "cache", verify="arrays")
        storage.assert_holds(cache, features, utterances)
        assert cache.lengths("none").tolist() == [0, 0]
        assert cache.read_batch(["second", "first"], "no_plane").data.shape == (2, 2, 3, 0)

    def test_one_utterance_without_frames_is_a_cache(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        feature = storage.declare()
        utterances = {"silent": {"fbank": random_numbers(feature.dtype, (0, 80))}}
        write(tmp_path / "cache", [feature], utterances)
        cache = featcache.open(tmp_path / "cache")
        storage.assert_holds(cache, [feature], utterances)
        assert cache.read_batch(["silent"], "fbank").data.shape == (1, 0, 80)

    def test_features_of_other_codecs_stand_side_by_side(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        codecs = featcache.registry.get_backend(storage.backend).codecs
        others = [Storage(storage.backend, codec) for codec in codecs if codec != storage.codec]
        mixed = [storage, *others]
        features = [each.declare(f"as_{each.codec}") for each in mixed]
        utterances = {
            id: {f.name: random_numbers(f.dtype, (frames, 3), seed=frames) for f in features}
            for id, frames in (("a", 600), ("b", 0), ("c", 7))
        }
        write(tmp_path / "cache", features, utterances)
        cache = featcache.open(tmp_path / "cache")
        for each, feature in zip(mixed, features, strict=True):
            each.assert_holds(cache, [feature], utterances)

    def test_frames_of_a_block_are_those_of_the_whole_one(self, storage: Storage) -> None:
        codec = storage.declare().make_codec()
        if codec is None or not isinstance(codec, DecodesFrames):
            pytest.skip("no codec, or one that decodes whole blocks")
        for rows in (1, 2, 3, 40):
            block = random_numbers(storage.dtypes[0], (rows, 2, 5))
            data = memoryview(codec.encode(block))
            whole = codec.decode(data, block.dtype, (2, 5), rows)
            for start, room in ((0, rows), (0, 1), (rows - 1, 5), (rows // 2, 100), (rows, 1)):
                out = np.full((room, 2, 5), 7, block.dtype)
                found = codec.decode_into(data, start, out)
                assert found == min(rows - start, room)
                assert out[:found].tobytes() == whole[start : start + found].tobytes()
                assert (out[found:] == 7).all()

    def test_ids_are_any_text(self, storage: Storage, tmp_path: Path) -> None:
        features = [storage.declare("fbank"), storage.declare("npy")]
        utterances = {
            id: {
                f.name: random_numbers(f.dtype, (1 + number % 3, 2), seed=number) for f in features
            }
            for number, id in enumerate(IDS)
        }
        assert len(utterances) == len(IDS)
        write(tmp_path / "cache", features, utterances)
        cache = featcache.open(tmp_path / "cache")
        storage.assert_holds(cache, features, utterances)
        for unknown in ("a%2F", "e", "x" * 999, "a/b/", "b ", "%2F"):
            assert unknown not in cache

    def test_alike_ids_stay_apart(self, storage: Storage) -> None:
        feature = storage.declare()

        @quick(self.examples)
        @given(ids=id_lists())
        def check(ids: list[str]) -> None:
            utterances = {
                id: {"fbank": random_numbers(feature.dtype, (number, 2), seed=number)}
                for number, id in enumerate(ids)
            }
            with tempfile.TemporaryDirectory() as directory:
                write(Path(directory), [feature], utterances)
                storage.assert_holds(featcache.open(directory), [feature], utterances)

        check()

    def test_any_arrays_are_read_back(self, storage: Storage) -> None:
        @quick(self.examples)
        @given(data=st.data(), written=caches(storage))
        def check(data: st.DataObject, written: CacheContent) -> None:
            features, utterances = written
            with tempfile.TemporaryDirectory() as directory:
                write(Path(directory), features, utterances)
                cache = featcache.open(
                    directory, verify="arrays", mapped=data.draw(st.booleans(), "mapped")
                )
                storage.assert_holds(cache, features, utterances)
                for feature in features:
                    for id in cache if feature.time_axis == 0 else ():
                        whole = cache.read(id, feature.name)
                        start, stop = data.draw(windows_drawn(len(whole)), "window")
                        window = cache.read(id, feature.name, start, stop)
                        assert window.tobytes() == whole[start:stop].tobytes()

        check()
