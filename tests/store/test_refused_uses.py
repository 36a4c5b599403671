"""Uses of caches that cannot work are answered by name: paths, ids, frames, writers, damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import check_refused, refusals

import featcache
from featcache.errors import (
    CacheError,
    ConfigError,
    CorruptCacheError,
    FeatureError,
)

# mistakes are of a wrong type more often than not
CacheWriter: Any = featcache.CacheWriter
Feature: Any = featcache.FeatureStorageConfig
FeatureDataset: Any = featcache.FeatureDataset
FeatureStorage: Any = featcache.FeatureStorage
GlobalMVN: Any = featcache.GlobalMVN
opened: Any = featcache.open
unpad: Any = featcache.unpad
ANY: Any = type("Dataset", (), {"add_dynamic_item": print})()
PADDED = np.ones((2, 5, 3))
FRAMES = np.ones((3, 2))

OPENS: list[Callable[[Any], object]] = [
    opened,
    lambda path: CacheWriter(path, [Feature("f")]),
    lambda path: featcache.FeatureReader(path, "f"),
    lambda path: GlobalMVN.from_cache(path, "f"),
]


@pytest.mark.parametrize("opens", OPENS, ids=["open", "writer", "reader", "mvn"])
@pytest.mark.parametrize("path", [None, 5, "", b"cache", ["cache"], object()])
def test_what_is_no_path_is_refused(opens: Callable[[Any], object], path: object) -> None:
    with pytest.raises(ConfigError, match="path of a directory, not"):
        opens(path)


def test_a_tilde_is_the_home_directory_wherever_a_cache_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with CacheWriter("~/cache", [Feature("f")]) as writer:
        writer.write("u", {"f": np.ones((3, 2))})
    assert writer.path == tmp_path / "cache"
    assert opened("~/cache").path == featcache.FeatureReader("~/cache", "f").path == writer.path
    with pytest.raises(ConfigError, match=r"no such home directory.*'\./~nobody-here/cache'"):
        CacheWriter("~nobody-here/cache", [Feature("f")])
    monkeypatch.chdir(tmp_path)
    with CacheWriter("./~/cache", [Feature("f")]) as writer:
        pass
    assert writer.path == tmp_path / "~" / "cache"


def two(path: Path) -> Any:
    """Write a cache of `u` and `v`, each of 5 frames of 3 numbers."""
    with CacheWriter(path, [Feature("f")]) as writer:
        for id in ("u", "v"):
            writer.write(id, {"f": np.ones((5, 3))})
    return opened(path)


def closed(path: Path) -> Any:
    writer = CacheWriter(path, [Feature("f")])
    writer.close()
    return writer


def write(path: Path, array: Any, feature: Any = None, id: Any = "u") -> Any:
    with CacheWriter(path, [feature or Feature("f")]) as writer:
        writer.write(id, {"f": array})


def write_as(path: Path, arrays: Any, *features: str) -> None:
    with CacheWriter(path, [Feature(name) for name in features]) as writer:
        writer.write("u", arrays)


def writer_over(path: Path, *made: str) -> Any:
    """Open a writer where other things are."""
    for name in made:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("x")
    return CacheWriter(path / "cache", [Feature("f")])


def below_a_file(path: Path) -> Any:
    (path / "a").write_text("x")
    return CacheWriter(path / "a" / "b", [Feature("f")])


def without_statistics(path: Path) -> Any:
    write(path, np.ones((3, 2)), Feature("f", stats=False))
    return GlobalMVN.from_cache(path, "f")


def dumped(path: Path) -> str:
    path.mkdir()
    np.save(path / "u.npy", np.ones((5, 3), np.float32))
    return str(path)


def splits(path: Path) -> Any:
    two(path / "train")
    two(path / "valid")
    return opened(path)


@refusals(Path(__file__).with_name("refused.txt"))
def test_it_is_refused_by_name_with_what_to_do(tmp_path: Path, mistake: list[str]) -> None:
    check_refused(mistake, tmp_path, globals())


def test_dtypes_of_torch_are_understood_alike(tmp_path: Path) -> None:
    assert Feature("f", torch.float16).dtype == "float16"
    for dtype in (torch.float64, "float64", "double", np.float64):
        dataset = FeatureDataset(two(tmp_path / str(dtype)), dtypes={"f": dtype})
        assert dataset["u"]["f"].dtype == torch.float64


def test_tiny_numbers_become_0_in_a_small_dtype_as_is_documented(tmp_path: Path) -> None:
    write(tmp_path, np.full((3, 2), 1e-9), Feature("f", "float16"))
    assert not opened(tmp_path).read("u", "f").any()
    assert "tiny ones to 0" in Feature.__doc__


def test_utterances_without_frames_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, np.ones((0, 3)))
    assert "1 of the utterances written to" in caplog.text
    assert "no frames of feature 'f', the first is 'u'; see why" in caplog.text


def test_vectors_stored_as_frames_are_warned_of(tmp_path: Path) -> None:
    def vectors(feature: Any, sizes: list[int]) -> None:
        with CacheWriter(tmp_path / str(len(list(tmp_path.iterdir()))), [feature]) as writer:
            for number, size in enumerate(sizes):
                writer.write(f"u{number}", {"f": np.ones(size)})

    with pytest.warns(UserWarning, match=r"'u4', feature 'f': it has 192 .*time_axis: null, or"):
        vectors(Feature("f"), [192] * 5)
    vectors(Feature("f"), [192, 192, 192, 192, 191, *[192] * 5])  # pitch
    vectors(Feature("f", dims=[]), [192] * 9)
    vectors(Feature("f", time_axis=None), [192] * 9)
    vectors(Feature("f"), [1] * 9)


def test_what_fits_is_stored_and_other_dims_are_refused(tmp_path: Path) -> None:
    ones = np.ones((5, 3), np.float32)
    kinds = [
        torch.ones(5, 3, requires_grad=True),
        torch.ones(5, 3).bfloat16(),
        np.asfortranarray(ones),
        ones.astype(">f4"),
    ]
    with CacheWriter(tmp_path, [Feature("f")]) as writer:
        for number, array in enumerate(kinds):
            writer.write(str(number), {"f": array})
        with pytest.raises(FeatureError, match=r"have shape \(4,\), those before have \(3,\)"):
            writer.write("other", {"f": np.ones((7, 4))})
    cache = opened(tmp_path)
    assert all(np.array_equal(cache.read(id, "f"), ones) for id in cache)


@pytest.mark.parametrize("file", ["featcache.json", "index-*", "parts/*/f*", "parts/*/part.json"])
@pytest.mark.parametrize("how", ["cut", "flipped", "lost"])
def test_damage_is_told_with_the_file_and_what_to_do(tmp_path: Path, file: str, how: str) -> None:
    two(tmp_path)
    damaged = next(path for path in tmp_path.glob(file) if path.is_file())
    content = bytearray(damaged.read_bytes())
    if how == "lost":
        damaged.unlink()
    elif how == "cut":
        damaged.write_bytes(content[:-4])
    else:
        content[len(content) // 2] ^= 8
        damaged.write_bytes(content)
    with pytest.raises(CacheError) as caught:
        opened(tmp_path, verify="arrays")
    message = str(caught.value)
    assert str(damaged) in message
    what_to_do = ("put it back", "put a good copy of it back", "put each of these files back")
    assert any(words in message for words in what_to_do), message


def test_a_container_that_was_cut_is_told_by_readers_and_writers(tmp_path: Path) -> None:
    cache = two(tmp_path)
    container = next(tmp_path.glob("parts/*/f*"))
    container.write_bytes(container.read_bytes()[:-4])
    uses: list[Callable[[], Any]] = [
        lambda: cache.read("u", "f"),
        lambda: CacheWriter(tmp_path, [Feature("f")]),
    ]
    for use in uses:
        with pytest.raises(CorruptCacheError, match=r"not the .* that were written; put it back"):
            use()


@pytest.mark.parametrize("overwritten", [True, False])
def test_a_cache_that_is_gone_under_a_reader_is_told(tmp_path: Path, overwritten: bool) -> None:
    cache = two(tmp_path)
    if overwritten:
        with CacheWriter(tmp_path, [Feature("f")], overwrite=True):
            pass
    else:
        shutil.rmtree(tmp_path)
    with pytest.raises(CorruptCacheError, match=r"overwritten or moved .*\? open it again"):
        cache.read("u", "f")
