from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import lilcom
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from featcache.errors import ConfigError, CorruptCacheError, FeatureError, MissingDependencyError
from featcache.interface import Backend, EncodedArray, Extent, FeatureSpec, SupportsBlocks
from featcache_backends.lilcom import LilcomBackend, LilcomCodec

CODEC = LilcomCodec()
FBANK = FeatureSpec("fbank", "float32", (80,), codec=CODEC)
FLOAT32 = np.dtype("<f4")

SHAPES = array_shapes(max_dims=4, max_side=6).filter(lambda shape: len(shape) < 4 or shape[-1] > 1)

Floats = NDArray[np.float32]


def fbank(rows: int, feature: FeatureSpec = FBANK, scale: float = 4.0) -> Floats:
    values = np.random.default_rng(rows).standard_normal(feature.shape(rows)) * scale
    return np.asarray(values).astype(np.float32)


def encoded(feature: FeatureSpec, array: Floats) -> EncodedArray:
    assert feature.codec is not None
    rows = array if feature.has_frames else array[np.newaxis]
    if rows.size == 0:
        return EncodedArray(len(rows), ())
    size = LilcomBackend().blocks(feature).rows or len(rows)
    return EncodedArray(
        len(rows),
        tuple(feature.codec.encode(rows[i : i + size]) for i in range(0, len(rows), size)),
    )


@contextmanager
def write(
    feature: FeatureSpec, values: Sequence[Floats]
) -> Iterator[tuple[Path, list[tuple[Extent, ...]]]]:
    with tempfile.TemporaryDirectory() as name:
        writer = LilcomBackend().open_writer(Path(name), [feature])
        places = [
            writer.append(f"utt-{number}", {feature.name: encoded(feature, array)})[feature.name]
            for number, array in enumerate(values)
        ]
        writer.close()
        yield Path(name) / f"{feature.name}.lca", places


def lhotse_key(extents: Sequence[Extent]) -> str:
    return ",".join(map(str, [extents[0].offset, *(extent.nbytes for extent in extents)]))


def assert_close(codec: LilcomCodec, read: Floats, block: Floats) -> None:
    """Only half a tick and what float32 rounds have moved any number."""
    assert np.isfinite(block).all()
    moved = np.abs(read.astype(np.float64) - block).max()
    assert moved <= 2.0**codec.tick_power / 2 + np.abs(block).max() * 2.0**-21


def decoded(codec: LilcomCodec, data: bytes, dims: tuple[int, ...]) -> Floats:
    return codec.decode(memoryview(data), FLOAT32, dims, 1 << 20).view(np.float32)


@pytest.mark.parametrize("dims", [(), (80,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("has_frames", [True, False])
def test_lhotse_reads_the_archive(dims: tuple[int, ...], has_frames: bool) -> None:
    from lhotse.features.io import LilcomChunkyReader

    feature = FeatureSpec("f", "float32", dims, has_frames, CODEC)
    values = [fbank(rows, feature) for rows in (1, 499, 500, 501, 1234)]
    with write(feature, values) as (path, places):
        reader = LilcomChunkyReader(path)
        for array, extents in zip(values, places, strict=True):
            read = reader.read(lhotse_key(extents))
            assert read.dtype == np.float32
            assert read.shape == (array.shape if has_frames else (1, *dims))
            assert np.abs(read - array).max() <= 2**-6


def test_lhotse_reads_windows_of_frames() -> None:
    from lhotse.features.io import LilcomChunkyReader

    with write(FBANK, [fbank(7), fbank(1234)]) as (path, places):
        reader, array = LilcomChunkyReader(path), fbank(1234)
        for start, stop in [(0, 1), (499, 501), (600, 1200), (1000, 1234)]:
            window = reader.read(lhotse_key(places[1]), start, stop)
            assert window.shape == (stop - start, 80)
            assert np.abs(window - array[start:stop]).max() <= 2**-6


def test_the_archive_is_what_lhotse_would_have_written(tmp_path: Path) -> None:
    from lhotse.features.io import LilcomChunkyWriter

    values = [fbank(1234), fbank(3), fbank(500)]
    with LilcomChunkyWriter(tmp_path / "lhotse.lca") as writer:
        keys = [writer.write("utt", array.copy()) for array in values]
    with write(FBANK, values) as (path, places):
        assert path.read_bytes() == (tmp_path / "lhotse.lca").read_bytes()
        assert [lhotse_key(extents) for extents in places] == keys


def test_extents_give_the_blocks_back_to_back() -> None:
    values = [fbank(1234), fbank(0), fbank(3)]
    with write(FBANK, values) as (path, places):
        data, end = path.read_bytes(), 0
        assert [len(extents) for extents in places] == [3, 0, 1]
        for array, extents in zip(values, places, strict=True):
            blocks = encoded(FBANK, array).blocks
            for extent, block in zip(extents, blocks, strict=True):
                assert (extent.container, extent.offset) == ("fbank.lca", end)
                assert data[extent.offset : extent.offset + extent.nbytes] == block
                end += extent.nbytes
        assert end == len(data)


def test_each_feature_has_its_own_archive(tmp_path: Path) -> None:
    pitch = FeatureSpec("pitch", "float32", (), codec=CODEC)
    writer = LilcomBackend().open_writer(tmp_path, [FBANK, pitch])
    given = {"fbank": encoded(FBANK, fbank(9)), "pitch": encoded(pitch, fbank(9, pitch))}
    places = writer.append("a", given)
    writer.flush()
    for name, array in given.items():
        assert places[name] == (Extent(f"{name}.lca", 0, array.nbytes),)
        assert (tmp_path / f"{name}.lca").read_bytes() == array.blocks[0]
    writer.abort()
    writer.abort()


def test_an_existing_archive_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "fbank.lca").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        LilcomBackend().open_writer(tmp_path, [FBANK])
    assert (tmp_path / "fbank.lca").read_bytes() == b"precious"


@settings(max_examples=150, deadline=None)
@given(
    arrays(np.float32, SHAPES, elements=st.floats(-1e3, 1e3, width=32)),
    st.integers(-8, 20),
)
@example(np.full((700, 80), 3.3, np.float32), -5)
@example(np.zeros((3, 4), np.float32), 20)
@example(np.full((5, 5), 1e-45, np.float32), -20)
@example(
    np.array([[573, 309, 0, 110, 0], [0, 0, 0, 0, 0], [184, 0, 0, 0, 0]], np.float32)
    + np.float32(1.2e-7),
    1,
)
@example(np.array([[2.0**k * sign for k in range(-30, 10)] for sign in (1, -1)], np.float32), -8)
def test_no_number_moves_by_more_than_half_a_tick_and_rounding(
    block: Floats, tick_power: int
) -> None:
    codec = LilcomCodec(tick_power)
    before = block.copy()
    block.flags.writeable = False
    read = decoded(codec, codec.encode(block), block.shape[1:])
    assert np.array_equal(block, before)
    assert (read.dtype, read.shape) == (FLOAT32, block.shape)
    assert_close(codec, read, block)


@settings(max_examples=150, deadline=None)
@given(arrays(np.float32, SHAPES), st.integers(-20, 20))
@example(np.array([[1e8, -1e8, 3.0], [2e8, 0.0, 1.0]], np.float32), -5)
@example(np.full((3, 3), 3.4e38, np.float32), 20)
@example(np.array([np.inf], np.float32), 0)
@example(fbank(300, scale=1e5), -5)
@example(fbank(300, scale=1e7), -5)
def test_what_lilcom_cannot_hold_is_refused_and_never_garbled(
    block: Floats, tick_power: int
) -> None:
    codec = LilcomCodec(tick_power)
    try:
        data = codec.encode(block)
    except FeatureError:
        assert not np.abs(block).max() < 2.0 ** (tick_power + 28)
    else:
        assert_close(codec, decoded(codec, data, block.shape[1:]), block)


def test_a_refusal_says_which_numbers_and_what_to_do() -> None:
    block = fbank(50, scale=1e9)
    with pytest.raises(
        FeatureError, match=r"shape \(50, 80\) with numbers from -.* try a larger tick_power, or"
    ) as e:
        CODEC.encode(block)
    assert "half a tick of 2 ** -5" in str(e.value)
    larger = LilcomCodec(10)
    assert_close(larger, decoded(larger, larger.encode(block), (80,)), block)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    block = fbank(50)
    block[3, 4] = value
    with pytest.raises(
        FeatureError, match=r"cannot hold a block of shape \(50, 80\) .*: not all are finite"
    ):
        CODEC.encode(block)


def test_a_block_that_lilcom_itself_would_decode_wrongly_is_refused() -> None:
    # four axes, the last of length 1: the decoder adds in another order than the encoder, and
    # drifts away from it
    values = np.random.default_rng(0).standard_normal((100, 8, 8, 1)).cumsum(0).cumsum(1).cumsum(2)
    block = (values / np.abs(values).max()).astype(np.float32) * 8
    garbled = lilcom.decompress(lilcom.compress(block.copy(), tick_power=-5))
    assert np.abs(garbled - block).max() > 1e6
    with pytest.raises(FeatureError, match="a number would move by"):
        CODEC.encode(block)


@pytest.mark.parametrize("tick_power", [-21, 21, 1.0, "-5", True])
def test_a_tick_power_that_lilcom_has_not_is_refused_at_once(tick_power: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"tick_power must be an integer from -20 to 20, not {tick_power!r}"
    ):
        LilcomCodec(tick_power)


def test_a_corrupt_block_is_named_as_such() -> None:
    data = CODEC.encode(fbank(50))
    with pytest.raises(CorruptCacheError, match="cannot be decompressed"):
        decoded(CODEC, data[: len(data) // 2], (80,))


def test_a_missing_lilcom_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lilcom", None)
    named = pytest.raises(
        MissingDependencyError, match=r"needs 'lilcom'.*pip install 'featcache\[lilcom\]'"
    )
    with named:
        LilcomBackend().open_writer(tmp_path, [FBANK])
    with pytest.raises(MissingDependencyError):
        CODEC.encode(fbank(3))
    assert not list(tmp_path.iterdir())


def test_making_backend_and_codec_loads_no_lilcom() -> None:
    code = (
        "import sys; from featcache_backends.lilcom import LilcomBackend, LilcomCodec; "
        "LilcomBackend(), LilcomCodec(-8); assert 'lilcom' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_backend_keeps_the_protocols() -> None:
    assert isinstance(LilcomBackend(), Backend)
    assert isinstance(LilcomBackend(), SupportsBlocks)
    assert LilcomBackend().blocks(replace(FBANK, has_frames=False)).rows == 500
