"""int8: within the bounds that it promises, small, the same with and without torch."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

import featcache
from featcache import FeatureStorageConfig
from featcache.errors import CorruptCacheError, FeatureError
from featcache_backends.memmap import Int8Codec

F4 = np.dtype("<f4")
INT8 = FeatureStorageConfig("fbank", codec="int8")


def back(block: NDArray[np.float32]) -> NDArray[np.float32]:
    data = memoryview(Int8Codec().encode(block))
    found: NDArray[np.float32] = Int8Codec().decode(data, F4, block.shape[1:], len(block))  # type: ignore[assignment]
    return found


def speech_like(frames: int, bands: int, seed: int = 0) -> NDArray[np.float32]:
    """Numbers as log-mel has them: levels of their own, smooth in time."""
    random = np.random.default_rng(seed)
    walk = np.cumsum(random.standard_normal((frames + 20, bands)), axis=0)
    smooth = (walk[20:] - walk[:-20]) / 20
    return (8 * smooth + random.uniform(-12, 0, bands)).astype(np.float32)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 30),
    width=st.integers(1, 4),
    magnitude=st.floats(-36, 36),
    offset=st.floats(-1e6, 1e6),
    seed=st.integers(0, 2**32),
)
def test_no_number_moves_further_than_promised(
    rows: int, width: int, magnitude: float, offset: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    numbers = (random.standard_normal((rows, width)) + offset) * 10.0**magnitude
    block = numbers.clip(-1e38, 1e38).astype(np.float32)
    moved = np.abs(back(block).astype(np.float64) - block)
    span = np.ptp(block.astype(np.float64), axis=0)
    assert (moved <= span / 506 + 2.0**-23 * np.abs(block).max() + 2.0**-126).all()


def test_what_does_not_change_and_what_is_short_comes_back_exactly() -> None:
    block = speech_like(300, 3)
    block[:, 1] = np.float32(np.pi)
    np.testing.assert_array_equal(back(block)[:, 1], block[:, 1])
    for short in (block[:1], block[:2], np.zeros((9, 4), np.float32)):
        np.testing.assert_array_equal(back(short), short)


def test_a_quarter_of_the_bytes_and_nearly_the_same_direction(tmp_path: Path) -> None:
    arrays = {f"utt-{n}": speech_like(300 + 200 * n, 40, n) for n in range(6)}
    paths = {codec: tmp_path / codec for codec in ("raw", "int8")}
    for codec, path in paths.items():
        with featcache.CacheWriter(path, [FeatureStorageConfig("fbank", codec=codec)]) as writer:
            for id, array in arrays.items():
                writer.write(id, {"fbank": array})
    nbytes = {
        codec: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for codec, path in paths.items()
    }
    assert nbytes["int8"] <= 0.27 * nbytes["raw"]
    cache = featcache.open(paths["int8"], verify="arrays")
    for id, array in arrays.items():
        read = cache.read(id, "fbank")
        lengths = np.linalg.norm(read.astype(np.float64)) * np.linalg.norm(array.astype(np.float64))
        assert (read.astype(np.float64) * array).sum() / lengths >= 0.9999


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("check_reads", [True, False])
def test_windows_are_frames_of_the_whole(tmp_path: Path, mapped: bool, check_reads: bool) -> None:
    with featcache.CacheWriter(tmp_path, [INT8]) as writer:  # three blocks, the last of one frame
        writer.write("long", {"fbank": speech_like(2001, 5)})
        writer.write("short", {"fbank": speech_like(3, 5)})
        writer.write("empty", {"fbank": speech_like(0, 5)})
    cache = featcache.open(tmp_path, mapped=mapped, check_reads=check_reads)
    whole = cache.read("long", "fbank")
    for start, stop in ((0, 2001), (0, 1), (999, 1001), (1500, 1500), (10, 2001), (2000, 2001)):
        window = cache.read("long", "fbank", start, stop)
        assert window.tobytes() == whole[start:stop].tobytes()
    padded, lengths = cache.read_batch(["short", "long", "empty"], "fbank")
    assert lengths.tolist() == [3, 2001, 0]
    assert padded[1].tobytes() == whole.tobytes()
    assert not padded[0, 3:].any()
    loader = featcache.FeatureLoader(cache, batch_size=3, layout="packed")
    (batch,) = loader
    assert batch["fbank"][:2001].numpy().tobytes() == whole.tobytes()


def test_numbers_are_the_same_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    block = speech_like(1000, 70)  # more than torch takes at once
    with_torch = back(block)
    monkeypatch.delitem(sys.modules, "torch")
    assert back(block).tobytes() == with_torch.tobytes()


def test_numpy_sees_the_bytes_of_the_blocks(tmp_path: Path) -> None:
    array = speech_like(30, 4)
    with featcache.CacheWriter(tmp_path, [INT8]) as writer:
        writer.write("a", {"fbank": array})
    (path,) = tmp_path.glob("parts/*/fbank.npy")
    octets = np.load(path, mmap_mode="r")
    assert (octets.dtype, octets.shape) == (np.uint8, (8 + 6 * 4 + 30 * 4,))
    assert octets[:8].tobytes() == b"int8\x1e\0\0\0"
    assert octets[8:24].view("<f4").tolist() == array.min(axis=0).tolist()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 3e38])
def test_what_it_cannot_hold_costs_that_utterance_alone(tmp_path: Path, wrong: float) -> None:
    bad = speech_like(30, 4)
    bad[7, 2], bad[8, 2] = wrong, -3e38
    feature = FeatureStorageConfig("fbank", codec="int8", nonfinite="keep")
    with featcache.CacheWriter(tmp_path, [feature]) as writer:
        with pytest.raises(FeatureError, match=r"'bad', feature 'fbank': int8 cannot hold"):
            writer.write("bad", {"fbank": bad})
        writer.write("good", {"fbank": speech_like(30, 4)})
    assert list(featcache.open(tmp_path)) == ["good"]


@pytest.mark.parametrize("rows", [2, 30])
def test_blocks_of_another_shape_are_refused(rows: int) -> None:
    data = Int8Codec().encode(speech_like(rows, 4))
    for damaged in (data[:-4], data + bytes(4), data[:4] + bytes(4) + data[8:], b"Int8" + data[4:]):
        with pytest.raises(CorruptCacheError, match=f"int8: a block of {len(damaged)} bytes"):
            Int8Codec().decode(memoryview(damaged), F4, (4,), rows)
    with pytest.raises(CorruptCacheError, match="float32, not float16"):
        Int8Codec().decode_into(memoryview(data), 0, np.empty((rows, 4), np.float16))
