"""A folder of `.npy` files, each of one array, becomes a cache where it lies."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from npy_folders import check_arrays, save_all, snapshot, some_arrays
from numpy.typing import NDArray

import featcache
from featcache.adoption.npy_files import read_npy_header
from featcache.errors import AdoptionError, ConfigError

DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


def test_a_folder_is_recognised_and_read_bit_for_bit(tmp_path: Path) -> None:
    arrays = some_arrays()
    folder = save_all(tmp_path / "fbank", arrays)
    before = snapshot(folder)
    cache = featcache.adopt(folder, tmp_path / "cache")
    check_arrays(cache, arrays)
    assert cache.complete
    assert cache.fingerprint["adopted"] == "npy"
    check_arrays(featcache.open(tmp_path / "cache", mapped=False), arrays)
    assert snapshot(folder) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_is_kept(tmp_path: Path, dtype: str) -> None:
    arrays = some_arrays(dtype=dtype)
    cache = featcache.adopt(save_all(tmp_path / "a", arrays), tmp_path / "cache", feature="x")
    check_arrays(cache, arrays, "x")
    assert cache.dtype("x") == str(np.dtype(dtype))


@pytest.mark.parametrize("dims", [(), (1,), (3, 2)])
def test_frames_may_have_any_shape(tmp_path: Path, dims: tuple[int, ...]) -> None:
    arrays = some_arrays(dims=dims)
    cache = featcache.adopt(save_all(tmp_path / "a", arrays), tmp_path / "cache")
    check_arrays(cache, arrays)
    assert cache.dims("feats") == dims


def test_floats_of_one_length_are_embeddings_unless_told_otherwise(tmp_path: Path) -> None:
    arrays = {f"utt-{number}": np.full(192, number, np.float32) for number in range(3)}
    folder = save_all(tmp_path / "xvectors", arrays)
    cache = featcache.adopt(folder, tmp_path / "cache")
    check_arrays(cache, arrays)
    assert (cache.dims("feats"), cache.lengths("feats").tolist()) == ((192,), [1, 1, 1])
    frames = featcache.adopt(folder, tmp_path / "frames", time_axis=0)
    check_arrays(frames, arrays)
    assert (frames.dims("feats"), frames.lengths("feats").tolist()) == ((), [192] * 3)


def test_integers_of_one_length_are_frames_unless_told_otherwise(tmp_path: Path) -> None:
    arrays = {f"utt-{number}": np.full(8, number, np.int16) for number in range(3)}
    folder = save_all(tmp_path / "units", arrays)
    assert featcache.adopt(folder, tmp_path / "cache").lengths("feats").tolist() == [8] * 3
    whole = featcache.adopt(folder, tmp_path / "whole", time_axis=None)
    assert whole.dims("feats") == (8,)


def test_one_number_an_utterance_has_no_time_axis(tmp_path: Path) -> None:
    arrays = {f"utt-{number}": np.array(number / 3) for number in range(3)}
    folder = save_all(tmp_path / "a", arrays)
    check_arrays(featcache.adopt(folder, tmp_path / "cache"), arrays)
    with pytest.raises(AdoptionError, match=r"utterance 'utt-0'.* has no frames"):
        featcache.adopt(folder, tmp_path / "frames", time_axis=0)


def test_a_pattern_chooses_files(tmp_path: Path) -> None:
    arrays = some_arrays()
    folder = save_all(tmp_path / "a", arrays)
    (folder / "readme.txt").write_text("not an array")
    cache = featcache.adopt(folder / "utt-*.npy", tmp_path / "cache")
    check_arrays(cache, {id: each for id, each in arrays.items() if id.startswith("utt-")})


def test_long_headers_and_other_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    for version in [(1, 0), (2, 0), (3, 0)]:
        with (tmp_path / f"a/v{version[0]}.npy").open("wb") as file:
            np.lib.format.write_array(file, array, version)
    text = b"{'shape': (4, 3), 'fortran_order': False, 'descr': '<f4'}" + b" " * 5000 + b"\n"
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    (tmp_path / "a/long.npy").write_bytes(header + array.tobytes())
    cache = featcache.adopt(tmp_path / "a", tmp_path / "cache")
    check_arrays(cache, dict.fromkeys(["long", "v1", "v2", "v3"], array))


WHOLE = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (np.asfortranarray(WHOLE), "other order than.*Fortran.*featcache.convert"),
        (WHOLE.astype(">f4"), "'bad' has big-endian numbers.*featcache.convert"),
        (WHOLE.astype("f8"), "'bad' has dtype float64.*'good' has float32.*featcache.convert"),
        (WHOLE.astype("i4"), "'bad' has dtype int32.*'good' has float32.*CacheWriter"),
        (WHOLE.astype("c8"), "'<c8' are not adopted; store real and imaginary parts"),
        (np.array([{}], object), r"'\|O' are not adopted; its pickles are never run"),
        (WHOLE[:, :2].copy(), "shape of a frame"),
        (WHOLE.reshape(-1), "number of axes"),
        (np.array(["text"]), "'<U4' are not adopted"),
    ],
    ids=["fortran", "big-endian", "dtype", "kind", "complex", "object", "dims", "rank", "text"],
)
def test_an_array_that_differs_is_refused_by_name(
    tmp_path: Path, other: NDArray[np.generic], why: str
) -> None:
    folder = save_all(tmp_path / "a", {"bad": other, "good": WHOLE})
    with pytest.raises(AdoptionError, match=why) as caught:
        featcache.adopt(folder, tmp_path / "cache")
    assert "bad" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_arrays_in_fortran_order_of_one_column_are_the_same_bytes(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(4.0).reshape(4, 1))
    folder = save_all(tmp_path / "a", {"utt-1": array, "utt-2": array[:2]})
    check_arrays(featcache.adopt(folder, tmp_path / "cache"), {"utt-1": array, "utt-2": array[:2]})


def damaged_header(descr: str) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (4, 3), }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


GOOD = damaged_header("'<f4'") + WHOLE.tobytes()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"PK\x03\x04" + b"\0" * 60,
        GOOD[:-1],
        GOOD + b"\0",
        GOOD[:40],
        b"\x93NUMPY\x01\x00\xff\xff" + GOOD[10:],
        damaged_header("'<f4'").replace(b"(4, 3)", b"(4, " + b"9" * 17 + b")"),
        damaged_header("'<f4'").replace(b"(4, 3)", b"(-4, 3)"),
        damaged_header("'<f4'").replace(b"(4, 3)", b"('4',)"),
        damaged_header("__import__('os').getcwd()"),
        damaged_header("[('a', '<f4')]"),
        damaged_header("'|O'"),
        damaged_header("'<f4'").replace(b"}", b"]"),
        damaged_header("'\\xff'"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + GOOD[10:],
    ],
)
def test_what_is_no_whole_array_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    folder = save_all(tmp_path / "a", {"good": WHOLE})
    (folder / "bad.npy").write_bytes(content)
    with pytest.raises(AdoptionError, match=r"bad\.npy"):
        featcache.adopt(folder, tmp_path / "cache")


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    folder = save_all(tmp_path / "a", some_arrays(3))
    np.save(tmp_path / "outside.npy", WHOLE)
    (folder / "link.npy").symlink_to(tmp_path / "outside.npy")
    with pytest.raises(AdoptionError, match=r"link\.npy' is a link"):
        featcache.adopt(folder, tmp_path / "cache", kind="npy")
    (folder / "link.npy").unlink()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(AdoptionError, match="link' is a link"):
        featcache.adopt(folder, tmp_path / "cache", kind="npy")
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe.npy")
    assert len(featcache.adopt(folder, tmp_path / "cache")) == 3  # no file, and waited for by none


def test_a_folder_behind_a_link_is_adopted(tmp_path: Path) -> None:
    arrays = some_arrays(3)
    save_all(tmp_path / "a", arrays)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    check_arrays(featcache.adopt(tmp_path / "link", tmp_path / "cache"), arrays)


def test_a_folder_without_arrays_is_not_recognised(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(AdoptionError, match=r"not recognised: no file is there$"):
        featcache.adopt(tmp_path / "a", tmp_path / "cache")
    with pytest.raises(AdoptionError, match=r"no \.npy file"):
        featcache.adopt(tmp_path / "a", tmp_path / "cache", kind="npy")
    with pytest.raises(AdoptionError, match="does not exist"):
        featcache.adopt(tmp_path / "b", tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"no kind of store 'nyp' .*'npy'"):
        featcache.adopt(tmp_path / "a", tmp_path / "cache", kind="nyp")


def test_nothing_is_written_into_the_source(tmp_path: Path) -> None:
    folder = save_all(tmp_path / "a", some_arrays(3))
    with pytest.raises(ConfigError, match="would lie in its source"):
        featcache.adopt(folder, folder / "cache")


def test_ids_that_cannot_be_are_refused(tmp_path: Path) -> None:
    folder = save_all(tmp_path / "a", {"good": WHOLE})
    (folder / "good.npy").rename(folder / os.fsdecode(b"\xff.npy"))
    with pytest.raises(AdoptionError, match="not valid Unicode"):
        featcache.adopt(tmp_path / "a", tmp_path / "cache")


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 1 << 70))
def test_any_header_is_read_or_refused(noise: bytes, at: int, size: int) -> None:
    for front in (noise, GOOD[:at] + noise, GOOD[:at] + noise + GOOD[at + len(noise) :]):
        for total in (len(front), size):
            with contextlib.suppress(AdoptionError):
                found = read_npy_header(
                    lambda begin, nbytes, held=front: held[begin : begin + nbytes],  # type: ignore[misc]
                    0,
                    total,
                    "the file",
                )
                assert found.offset + found.nbytes == total


def test_a_pattern_with_a_suffix_is_told_without_it(tmp_path: Path) -> None:
    arrays = some_arrays()
    for name in ("mel", "pitch"):
        save_all(tmp_path / "a" / name, arrays)
    with pytest.raises(AdoptionError, match=r"without their suffix: pattern='\{feature\}/\{id\}'"):
        featcache.adopt(tmp_path / "a", tmp_path / "cache", pattern="{feature}/{id}.npy")
    with pytest.raises(AdoptionError, match=r"no array called like '\{feature\}-\{id\}.npy'$"):
        featcache.adopt(tmp_path / "a", tmp_path / "cache", pattern="{feature}-{id}.npy")
    cache = featcache.adopt(tmp_path / "a", tmp_path / "cache", pattern="{feature}/{id}")
    assert {*cache.features} == {"mel", "pitch"}
