"""`featcache verify` and `diff`: what is damaged and what differs is named, all else is not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_runs import cache as cache
from command_runs import damage, fbank_of, id_of, make, run
from command_runs import stored as stored

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.reading import DamagedArray, PageDamage


def test_a_whole_cache_is_whole(stored: Path) -> None:
    found = run("verify", stored, "--json")
    assert (found.code, found.err) == (0, "")
    (told,) = found.json["caches"]
    sizes = featcache.open(stored).opened.index.containers.sizes
    assert told.pop("seconds") > 0
    assert told == {
        "path": str(stored),
        "checked": "arrays",
        "bytes": int(sizes.sum()),
        "utterances": 30,
        "utterances_checked": 30,
        "unpublished": 0,
        "damaged_pages": 0,
        "damaged": [],
        "elsewhere": [],
        "errors": [],
    }
    assert run("verify", stored).out.startswith(f"whole  {stored}: 30 utterances, ")


@pytest.mark.parametrize("backend", ["memmap", "hdf5"])
def test_damage_is_named_by_utterance_container_and_page(tmp_path: Path, backend: str) -> None:
    cache = make(tmp_path / "train", 200, backend=backend)
    for number in (0, 150):
        damage(cache, "fbank", id_of(number))
    found = run("verify", tmp_path, "--json")
    assert found.code == 1
    (told,) = found.json["caches"]
    assert {(each["id"], each["feature"]) for each in told["damaged"]} == {
        (id_of(0), "fbank"),
        (id_of(150), "fbank"),
    }
    index = featcache.open(cache).opened.index
    for each in told["damaged"]:
        at = int(index.features["fbank"].first[index.find(each["id"])])
        assert each["pages"] == [int(index.features["fbank"].offset[at]) // 65536]
        assert each["container"].startswith(str(cache))
    assert told["damaged_pages"] == 2
    words = run("verify", cache).out
    assert words.startswith(f"DAMAGED  {cache}: 2 of 200 utterances, 2 pages\n")
    assert re.search(rf"^    {id_of(150)} fbank$", words, re.MULTILINE)


def test_damage_between_arrays_is_told_apart(tmp_path: Path) -> None:
    cache = make(tmp_path / "train", 100, backend="hdf5")
    index = featcache.open(cache).opened.index
    numbers = [index.containers.path(each) for each in range(len(index.containers))]
    (file,) = (cache / each for each in numbers if each.endswith(".h5"))
    data = bytearray(file.read_bytes())
    data[0] ^= 0xFF  # of the superblock
    file.write_bytes(data)
    (told,) = run("verify", cache, "--json").json["caches"]
    assert told["damaged"] == []
    assert told["elsewhere"] == [{"container": str(file), "pages": [0]}]


def test_a_missing_file_is_damage(cache: Path) -> None:
    next(cache.glob("parts/*/fbank*")).unlink()
    found = run("verify", cache, "--json")
    assert found.code == 1
    assert "missing" in " ".join(found.json["caches"][0]["errors"])


def test_columns_and_a_sample_read_less(cache: Path) -> None:
    damage(cache, "fbank", id_of(3))
    assert run("verify", cache, "--columns").code == 0
    found = run("verify", cache, "--sample", "30", "--json")
    assert found.code == 1
    (told,) = found.json["caches"]
    assert told["checked"] == "sample"
    assert [each["id"] for each in told["damaged"]] == [id_of(3)]
    assert run("verify", cache, "--columns", "--sample", "3").code == 2


def test_an_adopted_cache_is_verified_once_it_is_collected(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    np.save(tmp_path / "mine" / "a.npy", np.ones((5, 4), np.float32))
    featcache.adopt(tmp_path / "mine", tmp_path / "cache", feature="fbank")
    found = run("verify", tmp_path / "cache")
    assert found.code == 2
    assert "featcache collect" in found.err
    assert run("collect", tmp_path / "cache").code == 0
    assert run("verify", tmp_path / "cache").code == 0


@pytest.mark.parametrize(
    ("pages", "text"),
    [((3,), "damaged on 1 page:"), ((3, 4), "damaged on 2 pages:"), (None, "damaged:")],
)
def test_damage_is_one_sentence(pages: tuple[int, ...] | None, text: str) -> None:
    assert text in str(PageDamage("a.h5", pages, (DamagedArray("utt-1", "fbank", ()),)))


def test_a_cache_does_not_differ_from_itself(stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored, tmp_path / "copy")
    found = run("diff", stored, tmp_path / "copy", "--values")
    assert found.code == 0
    assert found.out == (
        "same       30 ids, the values of fbank, the values of units, how fbank and units are "
        "stored, what they were made from\n"
    )
    told = run("diff", stored, tmp_path / "copy", "--json").json
    assert told == {
        "featcache": featcache.__version__,
        "verb": "diff",
        "same": True,
        "ids": {"only_a": 0, "only_b": 0, "both": 30},
        "features": {},
        "values": None,
        "made_from": {"fingerprint": [], "recorded": [], "sources": []},
    }


def test_differences_are_those_of_ids_features_and_values(stored: Path, tmp_path: Path) -> None:
    half = FeatureStorageConfig("fbank", "float16", frame_s=0.01)
    with CacheWriter(tmp_path / "b", [half], {"model": "wavlm", "layer": 10}) as writer:
        for number in range(5, 35):
            fbank = fbank_of(number)
            longer = np.vstack([fbank, fbank[:1]]) if number == 7 else fbank
            writer.write(id_of(number), {"fbank": longer})
    found = run("diff", stored, tmp_path / "b", "--values", "--ids", "--json")
    assert found.code == 1
    told = found.json
    only_a = [id_of(number) for number in range(5)]
    only_b = [id_of(number) for number in range(30, 35)]
    assert told["ids"] == {
        "only_a": 5, "only_b": 5, "both": 25, "of_a": sorted(only_a), "of_b": sorted(only_b),
    }  # fmt: skip
    assert told["features"]["fbank"]["dtype"] == ["float32", "float16"]
    assert told["features"]["fbank"]["lengths"] == [0, 1]
    assert told["features"]["units"]["backend"] == ["memmap", None]
    apart = {
        number: np.abs(fbank_of(number) - fbank_of(number).astype(np.float16).astype(np.float32))
        for number in range(5, 30)
        if number != 7
    }
    worst = max(apart, key=lambda number: float(apart[number].max()))
    frame, dim = np.unravel_index(apart[worst].argmax(), apart[worst].shape)
    assert told["values"]["fbank"] == {
        "largest": pytest.approx(float(apart[worst].max())),
        "id": id_of(worst),
        "frame": int(frame),
        "dim": int(dim),
        "utterances": 24,
    }
    assert "layer: was 9, now 10" in told["made_from"]["fingerprint"]
    words = run("diff", stored, tmp_path / "b", "--ids").out
    assert "dtype float32 -> float16" in words
    assert "+ anna-30" in words.splitlines()
    assert "- anna-0" in words.splitlines()
    near = run("diff", stored, tmp_path / "b", "--atol", "0.01", "--json").json
    assert near["values"] == {}


def test_values_are_called_equal_where_the_arrays_are_as_long(tmp_path: Path) -> None:
    lengths = {"a": (2, 3, 4), "b": (2, 3, 5), "c": (3, 4, 5)}
    for name, frames in lengths.items():
        with CacheWriter(tmp_path / name, [FeatureStorageConfig("f")]) as writer:
            for number, count in enumerate(frames):
                writer.write(f"u{number}", {"f": np.ones((count, 2))})
    a, b, c = (tmp_path / name for name in "abc")
    assert "3 ids, the values of f, how" in run("diff", a, a, "--values").out
    assert "the values of f where it is as long (2)" in run("diff", a, b, "--values").out
    assert "values" not in run("diff", a, c, "--values").out


def test_what_is_not_finite_differs_from_what_is(tmp_path: Path) -> None:
    for name, value in (("a", np.nan), ("b", 0.0), ("c", np.nan)):
        odd = FeatureStorageConfig("f", nonfinite="keep", stats=False)
        with CacheWriter(tmp_path / name, [odd]) as writer:
            writer.write("u", {"f": np.array([[1.0, value]], np.float32)})
    a, b, c = (tmp_path / name for name in "abc")
    assert run("diff", a, b, "--values", "--json").json["values"]["f"]["largest"] is None
    assert run("diff", a, c, "--values").code == 0
