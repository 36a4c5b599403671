"""Mistakes of first users with caches: paths, ids, frames, writers, damage.

The numbers are those of a list of 135 mistakes that were tried on an early version.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featcache
from featcache.errors import (
    CacheError,
    ClosedError,
    ConfigError,
    CorruptCacheError,
    DuplicateIdError,
    FeatcacheError,
    FeatureError,
    KeyNotFoundError,
    NotACacheError,
    RowError,
    StaleCacheError,
    UnknownNameError,
    WindowError,
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

OPENS: list[Callable[[Any], object]] = [
    opened,
    lambda path: CacheWriter(path, [Feature("f")]),
    lambda path: featcache.FeatureReader(path, "f"),
    lambda path: GlobalMVN.from_cache(path, "f"),
]


@pytest.mark.parametrize("opens", OPENS, ids=["open", "writer", "reader", "mvn"])
@pytest.mark.parametrize("path", [None, 5, ""])
def test_61_what_is_no_path_is_refused(opens: Callable[[Any], object], path: object) -> None:
    with pytest.raises(ConfigError, match="path of a directory, not"):
        opens(path)


def test_28_a_tilde_is_the_home_directory_wherever_a_cache_is_named(
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


def failed_second(path: Path) -> None:
    with CacheWriter(path, [Feature("f")]) as writer:
        writer.write("u", {"f": np.ones((3, 2))})
        writer.write("v", {})


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


def splits(path: Path) -> Any:
    two(path / "train")
    two(path / "valid")
    return opened(path)


WHERE = "utterance 'u', feature 'f'"

MISTAKES: list[tuple[str, Callable[[Path], object], type[FeatcacheError], list[str]]] = [
    (
        "01-backend",
        lambda path: Feature("f", backend="hdf"),
        UnknownNameError,
        ["did you mean 'hdf5'?"],
    ),
    (
        "06-codec",
        lambda path: Feature("f", codec="gzip"),
        UnknownNameError,
        ["backend 'memmap' has no codec 'gzip'", "known: 'raw'"],
    ),
    (
        "07-option",
        lambda path: Feature("f", backend="hdf5", codec="gzip", options={"levl": 1}),
        UnknownNameError,
        ["no option 'levl'", "did you mean 'level'?"],
    ),
    (
        "08-level-99",
        lambda path: Feature("f", backend="hdf5", codec="gzip", options={"level": 99}),
        ConfigError,
        ["feature 'f'", "integer from 0 to 9, not 99"],
    ),
    (
        "08-level-high",
        lambda path: Feature("f", backend="hdf5", codec="gzip", options={"level": "high"}),
        ConfigError,
        ["integer from 0 to 9, not 'high'"],
    ),
    (
        "11-dtype-fp16",
        lambda path: Feature("f", "fp16"),
        UnknownNameError,
        ["did you mean 'float16' or 'bfloat16'?"],
    ),
    ("11-dtype-16", lambda path: Feature("f", 16), UnknownNameError, ["dtype 16", "'int16'"]),
    (
        "15-lilcom-of-integers",
        lambda path: Feature("f", "int16", backend="lilcom"),
        ConfigError,
        ["cannot hold 'int16'", "it holds float32"],
    ),
    (
        "16-name-with-a-space",
        lambda path: Feature("my feature"),
        ConfigError,
        ["'my feature' is not usable", "letters, digits"],
    ),
    ("16-no-text-as-name", lambda path: Feature(None), ConfigError, ["None is not usable"]),
    (
        "21-features-as-text",
        lambda path: FeatureStorage(path, "f"),
        ConfigError,
        ["a list of FeatureStorageConfig, not 'f'"],
    ),
    (
        "21-feature-as-dict",
        lambda path: FeatureStorage(path, [{"name": "f"}]),
        ConfigError,
        ["declared by a FeatureStorageConfig, not by {'name'"],
    ),
    (
        "22-other-key",
        lambda path: FeatureStorage(path, {"g": Feature("f")}),
        ConfigError,
        ["'f' is listed as 'g'", "one name"],
    ),
    (
        "23-time-axis",
        lambda path: Feature("f", time_axis=1),
        ConfigError,
        ["time_axis 1", "use 0", "(frames, ...)", "None"],
    ),
    (
        "24-nonfinite",
        lambda path: Feature("f", nonfinite="keeep"),
        ConfigError,
        ["'raise' or 'keep', not 'keeep'"],
    ),
    (
        "25-name-for-new",
        lambda path: FeatureStorage(path, [partial(Feature, "f")]),
        ConfigError,
        ["FeatureStorageConfig, not by functools.partial"],
    ),
    (
        "31-key-features",
        lambda path: CacheWriter(path, [Feature("f")], {"features": 1}),
        ConfigError,
        ["key 'features'", "rename it"],
    ),
    (
        "32-nan",
        lambda path: write(path, np.array([[np.nan]])),
        FeatureError,
        [WHERE, "nan at (0, 0)", "mend it", "nonfinite: keep"],
    ),
    (
        "33-overflow",
        lambda path: write(path, np.array([[1e6]]), Feature("f", "float16")),
        FeatureError,
        [WHERE, "1000000.0 at (0, 0) does not fit float16", "declare"],
    ),
    (
        "33-negative",
        lambda path: write(path, np.array([[-1]]), Feature("f", "uint8")),
        FeatureError,
        [WHERE, "-1 at (0, 0) does not fit uint8", "declare"],
    ),
    (
        "34-floats-into-integers",
        lambda path: write(path, np.ones((3, 2)), Feature("f", "int16")),
        FeatureError,
        [WHERE, "float64 does not fit int16", "round and convert"],
    ),
    (
        "35-list",
        lambda path: write(path, [[1.0]]),
        FeatureError,
        [WHERE, "numpy array or a torch tensor is needed, not list"],
    ),
    (
        "35-masked",
        lambda path: write(path, np.ma.ones((3, 2))),
        FeatureError,
        [WHERE, "is needed, not MaskedArray"],
    ),
    (
        "35-complex",
        lambda path: write(path, np.ones((3, 2)) * 1j),
        FeatureError,
        [WHERE, "complex128 cannot be stored", "give floats"],
    ),
    (
        "36-sparse",
        lambda path: write(path, torch.ones(3, 2).to_sparse()),
        FeatureError,
        [WHERE, "to_dense()"],
    ),
    (
        "36-meta",
        lambda path: write(path, torch.ones(3, 2, device="meta")),
        FeatureError,
        [WHERE, "on meta cannot be stored"],
    ),
    (
        "39-a-number",
        lambda path: write(path, np.float32(1)),
        FeatureError,
        [WHERE, "rank 0", "must have 1 to 4"],
    ),
    (
        "39-five-axes",
        lambda path: write(path, np.ones((2, 1, 1, 1, 1))),
        FeatureError,
        [WHERE, "rank 5", "must have 1 to 4"],
    ),
    (
        "47-no-id",
        lambda path: write(path, np.ones((3, 2)), id=""),
        FeatureError,
        ["id '' is not usable", "non-empty string"],
    ),
    ("47-nul", lambda path: write(path, np.ones((3, 2)), id="a\0"), FeatureError, ["without NUL"]),
    (
        "47-surrogate",
        lambda path: write(path, np.ones((3, 2)), id="\ud800"),
        FeatureError,
        ["not valid Unicode"],
    ),
    (
        "48-integer-id",
        lambda path: write(path, np.ones((3, 2)), id=5),
        FeatureError,
        ["id 5 is not usable", "str(id)"],
    ),
    (
        "48-path-as-id",
        lambda path: write(path, np.ones((3, 2)), id=Path("a.wav")),
        FeatureError,
        ["is not usable", "str(id)"],
    ),
    (
        "51-id-in-the-cache",
        lambda path: two(path) and write(path, np.ones((5, 3))),
        DuplicateIdError,
        ["'u'", "is stored in", "skip it", "`id in writer`"],
    ),
    (
        "52-missing",
        lambda path: write_as(path, {"f": np.ones((3, 2))}, "f", "g"),
        FeatureError,
        ["utterance 'u'", "feature 'g' is missing; given: f"],
    ),
    (
        "52-extra",
        lambda path: write_as(path, {"f": np.ones(3), "h": 1}, "f", "g"),
        FeatureError,
        ["utterance 'u'", "feature 'h' is not declared; known: 'f', 'g'"],
    ),
    (
        "53-no-dict",
        lambda path: write_as(path, np.ones((3, 2)), "f"),
        FeatureError,
        ["utterance 'u'", "a dict of arrays by feature is needed, not ndarray"],
    ),
    (
        "55-below-a-file",
        lambda path: below_a_file(path),
        NotACacheError,
        ["/a/b' cannot be made a directory"],
    ),
    (
        "56-other-files",
        lambda path: writer_over(path, "cache/a.py"),
        NotACacheError,
        ["holds other files ('a.py')", "new or empty directory"],
    ),
    (
        "58-nothing",
        lambda path: opened(path / "no"),
        NotACacheError,
        ["/no' does not exist"],
    ),
    (
        "58-empty",
        lambda path: opened(path),
        NotACacheError,
        ["is not a cache: it holds no featcache.json"],
    ),
    ("59-root-of-splits", splits, NotACacheError, ["caches in it: 'train', 'valid'"]),
    (
        "62-verify",
        lambda path: two(path) and opened(path, verify="all"),
        UnknownNameError,
        ["no level 'all'; known: 'arrays', 'columns'"],
    ),
    (
        "63-feature",
        lambda path: two(path).read("u", "g"),
        KeyNotFoundError,
        ["no feature 'g'", "known: 'f'"],
    ),
    (
        "63-id",
        lambda path: two(path).read("w", "f"),
        KeyNotFoundError,
        ["no utterance 'w'", "nearest ids: "],
    ),
    (
        "63-swapped",
        lambda path: two(path).read("f", "u"),
        KeyNotFoundError,
        ["no feature 'u'", "known: 'f'"],
    ),
    (
        "63-swapped-lists",
        lambda path: two(path).read_batch("f", ["u", "v"]),
        KeyNotFoundError,
        ["no feature ['u', 'v']", "known: 'f'"],
    ),
    ("64-row", lambda path: two(path)[0], KeyNotFoundError, ["strings, not 0", "FeatureDataset"]),
    (
        "64-slice",
        lambda path: two(path)[0:3],
        KeyNotFoundError,
        ["strings, not slice(0, 3", "FeatureDataset"],
    ),
    (
        "65-beyond",
        lambda path: two(path).read("u", "f", 3, 9),
        WindowError,
        [WHERE, "frames 3 to 9 are not within 0 to 5"],
    ),
    (
        "65-reversed",
        lambda path: two(path).read("u", "f", 3, 1),
        WindowError,
        ["frames 3 to 1 are not within 0 to 5"],
    ),
    (
        "66-floats",
        lambda path: two(path).read("u", "f", 0.5, 2.0),
        WindowError,
        [WHERE, "whole numbers", "not 0.5 and 2.0"],
    ),
    (
        "66-slice",
        lambda path: two(path).read("u", "f", slice(0, 2)),
        WindowError,
        ["from start to before stop", "slice(0, 2, None)"],
    ),
    (
        "66-floats-of-a-data-set",
        lambda path: FeatureDataset(two(path))["u", 0.5:2.5],
        WindowError,
        [WHERE, "0.5 to 2.5", "whole numbers"],
    ),
    (
        "67-a-float",
        lambda path: FeatureDataset(two(path))[1.0],
        RowError,
        ["by id or by row number, not by 1.0"],
    ),
    (
        "68-beyond",
        lambda path: FeatureDataset(two(path))[-3],
        RowError,
        ["no row -3: there are 2 utterances"],
    ),
    (
        "69-one-id",
        lambda path: two(path).read_batch("u", "f"),
        KeyNotFoundError,
        ["a list of strings, not the one string 'u'"],
    ),
    (
        "69-lengths-of-one-id",
        lambda path: two(path).lengths("f", ids="u"),
        KeyNotFoundError,
        ["not the one string 'u'"],
    ),
    (
        "70-wrong-name",
        lambda path: FeatureStorage(path, [Feature("energy")]).attach(ANY, "train", "enrgy"),
        UnknownNameError,
        ["'enrgy' is not declared", "did you mean 'energy'"],
    ),
    (
        "70-no-names",
        lambda path: FeatureStorage(path, [Feature("f")]).attach(ANY, "train", 5),
        ConfigError,
        ["names, not 5", "known: 'f'"],
    ),
    (
        "72-attach-to-a-list",
        lambda path: FeatureStorage(path, [Feature("f")]).attach([1], "train"),
        ConfigError,
        ["DynamicItemDataset", "'list'"],
    ),
    (
        "74-write",
        lambda path: closed(path).write("u", {"f": np.ones(3)}),
        ClosedError,
        ["is closed; open another one"],
    ),
    (
        "74-expect",
        lambda path: closed(path).expect(["u"]),
        ClosedError,
        ["is closed; open another one"],
    ),
    ("74-fail", lambda path: closed(path).fail("u"), ClosedError, ["is closed; open another one"]),
    (
        "74-publish",
        lambda path: closed(path).publish(),
        ClosedError,
        ["is closed; open another one"],
    ),
    (
        "116-other-dtype",
        lambda path: two(path) and CacheWriter(path, [Feature("f", "float16")], {"a": 1}),
        StaleCacheError,
        [
            'features.f.dtype: was "float32", now "float16"',
            "a: was (absent), now 1",
            "overwrite=True",
        ],
    ),
    (
        "134-no-statistics",
        without_statistics,
        KeyNotFoundError,
        ["has no statistics of feature 'f'", "stats: true"],
    ),
    (
        "134-other-dims",
        lambda path: GlobalMVN.from_cache(two(path), "f")(torch.ones(2, 5, 4)),
        FeatureError,
        ["frames of shape (3,) do not fit", "(2, 5, 4)"],
    ),
    (
        "96-relative-lengths",
        lambda path: unpad(["a", "b"], torch.tensor([1.0, 0.5]), {"f": PADDED}),
        FeatureError,
        ["feature 'f'", "integers, not [1.0, 0.5]", "relative"],
    ),
    (
        "98-beyond",
        lambda path: unpad(["a", "b"], [5, 9], {"f": PADDED}),
        FeatureError,
        ["utterance 'b', feature 'f'", "length 9 is not within 0 to 5"],
    ),
    (
        "98-too-few",
        lambda path: unpad(["a", "b"], [5], {"f": PADDED}),
        FeatureError,
        ["1 lengths do not fit 2 ids"],
    ),
    (
        "98-one-string",
        lambda path: unpad("ab", [5, 3], {"f": PADDED}),
        FeatureError,
        ["not the one string 'ab'"],
    ),
    (
        "98-a-number-for-ids",
        lambda path: unpad(5, [5], {"f": PADDED}),
        FeatureError,
        ["ids are a list of strings, not 5"],
    ),
]


@pytest.mark.parametrize(
    ("mistake", "kind", "words"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES]
)
def test_a_mistake_is_answered_by_name(
    tmp_path: Path, mistake: Callable[[Path], object], kind: type[FeatcacheError], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        mistake(tmp_path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message


def test_13_14_dtypes_of_torch_are_understood_alike(tmp_path: Path) -> None:
    assert Feature("f", torch.float16).dtype == "float16"
    for dtype in (torch.float64, "float64", "double", np.float64):
        dataset = FeatureDataset(two(tmp_path / str(dtype)), dtypes={"f": dtype})
        assert dataset["u"]["f"].dtype == torch.float64


def test_37_tiny_numbers_become_0_in_a_small_dtype_as_is_documented(tmp_path: Path) -> None:
    write(tmp_path, np.full((3, 2), 1e-9), Feature("f", "float16"))
    assert not opened(tmp_path).read("u", "f").any()
    assert "tiny ones to 0" in Feature.__doc__


def test_38_utterances_without_frames_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, np.ones((0, 3)))
    assert "1 of the utterances written to" in caplog.text
    assert "no frames of feature 'f', the first is 'u'; see why" in caplog.text


def test_43_vectors_stored_as_frames_are_warned_of(tmp_path: Path) -> None:
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


def test_44_46_what_fits_is_stored_and_other_dims_are_refused(tmp_path: Path) -> None:
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


def test_49_any_text_is_an_id(tmp_path: Path) -> None:
    ids = ["\xfc", "u\u0308", "x" * 70_000, "../..", ".", "a\nb", "A", "a"]
    with CacheWriter(tmp_path, [Feature("f")]) as writer:
        for id in ids:
            writer.write(id, {"f": np.ones((3, 2))})
    assert sorted(opened(tmp_path)) == sorted(ids)


def test_50_51_an_id_that_comes_twice_is_told_with_its_numbers(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [Feature("f")]) as writer:
        writer.write("u", {"f": np.ones((3, 2))})
        with pytest.raises(DuplicateIdError, match="as number 0 and as number 1"):
            writer.write("u", {"f": np.ones((3, 2))})
        assert "u" in writer


def test_66_67_68_a_data_set_is_indexed_like_a_list(tmp_path: Path) -> None:
    dataset = FeatureDataset(two(tmp_path))
    indices: list[Any] = [slice(0, 2), [0, 1], np.array([0, 1]), torch.tensor([0, 1])]
    for index in indices:
        assert [item["id"] for item in dataset[index]] == ["u", "v"]
    assert dataset[-1]["id"] == dataset[torch.tensor(1)]["id"] == "v"


def test_75_76_closing_twice_is_harmless_and_an_error_keeps_what_was_written(
    tmp_path: Path,
) -> None:
    closed(tmp_path / "closed").close()
    with pytest.raises(FeatureError, match="feature 'f' is missing"):
        failed_second(tmp_path / "cache")
    cache = opened(tmp_path / "cache")
    assert (list(cache), cache.complete) == (["u"], False)


def test_82_a_writer_that_is_sent_to_another_process_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        pickle.dumps(closed(tmp_path))
    for word in ("belongs to its process", str(tmp_path), "extract(parallel=...)"):
        assert word in str(caught.value)


def test_83_threads_may_share_a_writer(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [Feature("f")]) as writer, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: writer.write(str(n), {"f": np.ones((3, 2))}), range(40)))
    assert len(opened(tmp_path)) == 40


def test_84_caches_and_what_reads_them_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    cache = two(tmp_path)
    loader = featcache.FeatureLoader(cache, batch_size=1)
    sent = [pickle.loads(pickle.dumps(what)) for what in (cache, FeatureDataset(cache), loader)]  # noqa: S301
    assert sent[0].read("u", "f").shape == sent[1]["u"]["f"].shape == (5, 3)
    assert len(list(sent[2])) == 2
    with get_context("fork").Pool(1) as pool:
        assert pool.apply(cache.read, ("u", "f")).shape == (5, 3)


@pytest.mark.parametrize("file", ["featcache.json", "index-*", "parts/*/f*", "parts/*/part.json"])
@pytest.mark.parametrize("how", ["cut", "flipped", "lost"])
def test_86_damage_is_told_with_the_file_and_what_to_do(
    tmp_path: Path, file: str, how: str
) -> None:
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
    assert any(word in message for word in ("put it back", "put a good copy of it back")), message


def test_86_87_a_container_that_was_cut_is_told_by_readers_and_writers(tmp_path: Path) -> None:
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
def test_85_a_cache_that_is_gone_under_a_reader_is_told(tmp_path: Path, overwritten: bool) -> None:
    cache = two(tmp_path)
    if overwritten:
        with CacheWriter(tmp_path, [Feature("f")], overwrite=True):
            pass
    else:
        shutil.rmtree(tmp_path)
    with pytest.raises(CorruptCacheError, match=r"overwritten or moved .*\? open it again"):
        cache.read("u", "f")
