"""Reports of caches of every sort: hostile, empty, damaged, added to, adopted in shape, two."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from annotation_helpers import annotations_of, open_writer
from feature_set_helpers import add, energy_of
from report_caches import FEATURES, HOSTILE, Page, report, utterances, with_faults, write
from store_helpers import arrays_of, id_of, make_cache

import featcache
from featcache import CacheWriter, FeatureStorageConfig

NETWORK = re.compile(r"""(?:src|href|url)\s*[=(]\s*["']?\s*(?:https?:|//|data:text|javascript:)""")


def searched(page: Page) -> dict[str, Any]:
    """The ids that the search of a page knows."""
    (packed,) = re.findall(r'<script type="text/plain" id="ids-0">([^<]*)<', page.text)
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return found


def test_ids_and_texts_of_strangers_are_text(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    features = [FeatureStorageConfig("fbank", nonfinite="keep")]
    with CacheWriter(tmp_path / "cache", features, {"</script><b>": HOSTILE}) as writer:
        for number, id in enumerate(HOSTILE):
            fbank = random.normal(0, 1, (20 + number, 4))
            fbank[:3] = np.nan
            writer.write(id, {"fbank": fbank}, annotations={"speaker": id, "text": id * 2})
    found, page = report(tmp_path / "<i>&amp;.html", tmp_path / "cache")
    assert {*found.findings[0].ids} == {*HOSTILE}
    names = {name for name, _ in page.tags}
    assert not names & {"b", "img src=x", "iframe", "object", "link", "base"}
    assert not [key for _, given in page.tags for key in given if key.startswith("on")]
    assert sum(name == "script" for name, _ in page.tags) == 3  # ids, lengths, ours
    for id in HOSTILE:
        shown = id.replace("\x1b", "␛").replace("\x07", "␇").replace("\u202e", "\\u202e")
        assert re.sub(r"\s+", " ", shown) in page.words
        assert "<" not in id or id not in page.text
        assert escape(shown) in page.text
    assert searched(page)["ids"] == sorted(HOSTILE, key=str.encode)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_utterances_or_none(tmp_path: Path, count: int) -> None:
    some = dict(list(utterances().items())[:count])
    found, page = report(tmp_path / "report.html", write(tmp_path / "cache", some))
    assert (found.sampled, found.of) == (count, count)
    assert page.numbers["utterances"] == count
    assert "nan" not in page.words.replace("finance", "").split()
    if not count:
        assert found.findings[0].kind == "no utterances"
    if count == 1:
        assert f"Each has {len(some['utt-00'].fbank)} frames of fbank." in page.words


@pytest.mark.parametrize("most", [1, 2, 3, 5, 60])
def test_texts_and_recordings_however_short(tmp_path: Path, most: int) -> None:
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("fbank")]) as writer:
        for frames in range(1, most + 1):
            fbank = np.random.default_rng(frames).normal(size=(frames, 2))
            writer.write(f"utt-{frames}", {"fbank": fbank}, annotations={"text": "a b" * frames})
    _, page = report(tmp_path / "report.html", tmp_path / "cache")
    assert page.numbers["utterances"] == most
    bins = [value for name, value in page.numbers.items() if name.startswith("text bin ")]
    assert sum(bins) == most


def test_no_annotations(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("fbank")]) as writer:
        writer.write("a", {"fbank": np.ones((4, 2)) * [[1], [2], [3], [4]]})
    _, page = report(tmp_path / "report.html", tmp_path / "cache")
    assert "It has no annotations" in page.words
    assert "a feature with frame_s would tell" in page.words


def test_hours_of_a_duration_where_no_feature_has_frame_s(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("fbank")]) as writer:
        for number in range(3):
            fbank = np.random.default_rng(number).normal(size=(9, 2))
            writer.write(f"u{number}", {"fbank": fbank}, annotations={"duration": 600.0})
    assert report(tmp_path / "report.html", tmp_path / "cache")[1].numbers["hours"] == 0.5


@pytest.mark.parametrize(
    "dtype", ["float16", "float64", "bfloat16", "int16", "bool", "uint64", "int64"]
)
@pytest.mark.parametrize("dims", [(), (3,), (2, 300)])
def test_features_of_every_dtype_and_shape(
    tmp_path: Path, dtype: str, dims: tuple[int, ...]
) -> None:
    random = np.random.default_rng(0)
    kept = "float32" if dtype == "bfloat16" else dtype
    config = FeatureStorageConfig("x", dtype=dtype, dims=list(dims))
    with CacheWriter(tmp_path / "cache", [config]) as writer:
        for number in range(12):
            numbers = random.normal(0 if dtype.startswith(("f", "b")) else 40, 5, (30, *dims))
            array = (numbers > 0) if dtype == "bool" else numbers.astype(kept)
            writer.write(f"u{number}", {"x": array})
    with featcache.open(tmp_path / "cache") as cache:
        frames = [cache.read(id, "x") for id in cache]
    _, page = report(tmp_path / "report.html", tmp_path / "cache")
    every = np.concatenate(frames)
    if "x tokens" in page.numbers:
        assert page.numbers["x tokens"] == every.size
        assert page.numbers["x used"] == len(np.unique(every))
    else:
        assert page.numbers["x least"] == pytest.approx(float(every.min()), rel=1e-6)
        assert page.numbers["x largest"] == pytest.approx(float(every.max()), rel=1e-6)
        assert page.numbers["x mean 0"] == pytest.approx(
            every.reshape(len(every), -1)[:, 0].mean(dtype=float), rel=1e-6
        )


def test_an_array_an_utterance_without_frames(tmp_path: Path) -> None:
    config = FeatureStorageConfig("embedding", time_axis=None)
    arrays = np.random.default_rng(0).normal(0, 1, (30, 16)).astype(np.float32)
    arrays[7] = arrays[3]
    with CacheWriter(tmp_path / "cache", [config]) as writer:
        for number, array in enumerate(arrays):
            writer.write(f"u{number:02}", {"embedding": array})
    found, page = report(tmp_path / "report.html", tmp_path / "cache")
    assert {each.kind: each.ids for each in found.findings}["doubled"] == ("u03", "u07")
    assert page.numbers["embedding mean 5"] == pytest.approx(arrays[:, 5].mean(), rel=1e-5)
    assert "No feature has frames" in page.words


def test_of_many_features_a_few_are_shown_in_full_and_all_have_their_numbers(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(0)
    names = [f"layer-{number:02}" for number in range(40)]
    arrays = [
        {name: random.normal(size=(20 + row + at, 4)) for at, name in enumerate(names)}
        for row in range(5)
    ]
    for each in arrays:
        each["layer-33"][:, 2] = 1  # is dead, so it is shown
    features = [FeatureStorageConfig(name, dims=[4]) for name in names]
    with CacheWriter(tmp_path / "cache", features) as writer:
        for row, each in enumerate(arrays):
            writer.write(f"u{row}", each)
    _, page = report(tmp_path / "report.html", tmp_path / "cache")
    for what in ("Lengths", "Values"):
        full = re.findall(rf"{what} of (layer-\d\d)(?!\d)", page.words)
        assert 12 <= len(set(full)) < 20
        assert f"{what} of 28 other features" in page.words
        assert what == "Lengths" or "layer-33" in full
    for at, name in enumerate(names):
        every = np.concatenate([each[name] for each in arrays])
        assert page.numbers[f"{name} longest"] == 24 + at
        assert page.numbers[f"{name} largest"] == pytest.approx(every.max())
        assert page.numbers[f"bytes of {name}"] == every.size * 4


def test_few_utterances_of_many_features_are_not_odd_by_chance(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    names = [f"f{number:02d}" for number in range(40)]
    features = [FeatureStorageConfig(name, stats=False) for name in names]
    with CacheWriter(tmp_path / "cache", features) as writer:
        for number in range(12):
            loud = {name: 1000.0 if (number, name) == (7, "f03") else 1.0 for name in names}
            writer.write(
                f"utt-{number:02d}",
                {name: random.normal(0, loud[name], (12, 4)) for name in names},
            )
    found, _ = report(tmp_path / "report.html", tmp_path / "cache", pictures=0)
    odd = {each.kind: each.ids for each in found.findings if each.ids}
    assert odd == {"level": ("utt-07",), "spread": ("utt-07",)}


def test_a_cache_that_no_array_told_its_dims(tmp_path: Path) -> None:
    for name, dims, said in (("told", [80], "80 dims"), ("not", None, "unknown")):
        CacheWriter(tmp_path / name, [FeatureStorageConfig("fbank", dims=dims)]).close()
        _, page = report(tmp_path / "report.html", tmp_path / name)
        assert said in page.words
        assert "1 number" not in page.words


def test_damaged_arrays_are_told_and_the_others_are_read(tmp_path: Path) -> None:
    made = utterances()
    cache = write(tmp_path / "cache", made)
    victim = next(cache.rglob("parts/*/*fbank*"))
    data = bytearray(victim.read_bytes())
    place = data.find(made["utt-05"].fbank.tobytes())
    data[place + 100] ^= 0x40
    victim.write_bytes(data)
    found, page = report(tmp_path / "report.html", cache)
    worst = found.findings[0]
    assert (worst.kind, worst.level, worst.ids) == ("damaged", "fault", ("utt-05",))
    whole = [each.fbank for id, each in made.items() if id != "utt-05"]
    assert page.numbers["fbank largest"] == pytest.approx(max(map(np.max, whole)))
    assert "its checksum does not match" in page.words


def test_a_cache_that_lost_a_file_is_told_by_every_utterance(tmp_path: Path) -> None:
    cache = write(tmp_path / "cache", utterances(9))
    next(cache.rglob("parts/*/*fbank*")).unlink()
    found, page = report(tmp_path / "report.html", cache)
    assert (found.findings[0].kind, found.findings[0].count) == ("damaged", 9)
    assert page.numbers["units tokens"] == sum(len(e.units) for e in utterances(9).values())


def test_two_caches_side_by_side(tmp_path: Path) -> None:
    made = utterances()
    more = {id: each for id, each in with_faults().items() if id != "utt-00"}
    more["new"] = made["utt-00"]
    first = write(tmp_path / "first", made, {"gain": 1})
    second = write(tmp_path / "second", more, {"gain": 2})
    found, page = report(tmp_path / "report.html", first, second)
    assert found.of == 2 * len(made)
    assert {each.cache for each in found.findings if each.ids} == {str(second)}
    numbers = page.numbers
    both = {"in both": 59, "only in first": 1, "only in second": 1, "0 utterances": 60,
            "1 utterances": 60}  # fmt: skip
    assert {name: numbers[name] for name in both} == both
    assert "gain: was 1, now 2" in page.words
    for place, each in enumerate((made, more)):
        lengths = [len(one.fbank) for one in each.values()]
        assert numbers[f"{place} fbank longest"] == max(lengths)
        tallest = [name for name in numbers if name.startswith(f"{place} fbank bin")]
        edges = sorted(int(name.rpartition(" ")[2].replace(",", "")) for name in tallest)
        assert edges[0] == 0 or edges == sorted(edges)
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in page.attributes("href")} <= set(ids)


def test_features_that_were_added_later(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", range(9))
    add(cache, range(1, 9))
    _, page = report(tmp_path / "report.html", cache)
    energy = np.concatenate([energy_of(number)["energy"] for number in range(1, 9)])
    fbank = np.concatenate([arrays_of(number)["fbank"] for number in range(1, 9)])
    assert page.numbers["utterances"] == 8
    assert page.numbers["energy mean 0"] == pytest.approx(energy.mean(dtype=float), rel=1e-6)
    assert page.numbers["fbank mean 2"] == pytest.approx(fbank[:, 2].mean(dtype=float), rel=1e-6)


def test_nothing_is_written_to_the_cache(tmp_path: Path) -> None:
    cache = write(tmp_path / "cache", utterances(5))
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("*")}
    report(tmp_path / "report.html", cache)
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*")} == before


def test_the_page_needs_no_network_and_is_one_file(tmp_path: Path) -> None:
    cache = write(tmp_path / "cache", with_faults())
    found, page = report(tmp_path / "report.html", cache)
    assert not NETWORK.search(page.text)
    (policy,) = [given["content"] for name, given in page.tags
                 if name == "meta" and given.get("http-equiv")]  # fmt: skip
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert found.bytes == (tmp_path / "report.html").stat().st_size
    assert {*tmp_path.iterdir()} == {cache, tmp_path / "report.html"}


def test_pictures_are_as_many_as_asked_for_and_valid(tmp_path: Path) -> None:
    from featcache.report_page.charts import RAMP, heat_map

    cache = write(tmp_path / "cache", with_faults())
    for pictures in (0, 6):
        _, page = report(tmp_path / "report.html", cache, pictures=pictures)
        assert sum(name == "figure" for name, _ in page.tags) == pictures
        assert all(given.get("alt") for name, given in page.tags if name == "img")
    url, width, height = heat_map(np.array([[0.0, 1.0, np.nan], [2.0, -1.0, 0.5]]), 0.0, 1.0)
    data = base64.b64decode(url.partition(",")[2])
    packed = zlib.decompress(data[data.index(b"IDAT") + 4 : -16])
    assert (width, height, packed) == (3, 2, bytes([0, 0x0E, 0xF0, 0, 0xE0, 0x70]))
    light = [sum(w * int(c[i : i + 2], 16) for w, i in ((0.21, 1), (0.72, 3), (0.07, 5)))
             for c in RAMP]  # fmt: skip
    assert light == sorted(light)


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    cache = write(tmp_path / "cache", utterances(3))
    page = tmp_path / "report.html"
    for caches in ([], [cache] * 3):
        with pytest.raises(featcache.errors.ConfigError, match="one cache or two"):
            featcache.inspect.report(caches, page)
    for settings in ({"pictures": -1}, {"seed": 0.5}, {"sample": 0}, {"sample": "some"}):
        with pytest.raises(featcache.errors.ConfigError):
            featcache.inspect.report(cache, page, **settings)
    with pytest.raises(featcache.errors.NotACacheError):
        featcache.inspect.report(tmp_path / "nothing", page)
    for place in (tmp_path / "no such directory" / "report.html", tmp_path):
        with pytest.raises(featcache.errors.ConfigError, match="in a directory that is there"):
            featcache.inspect.report(cache, place)
    assert not page.exists()


def test_an_adopted_cache_says_that_nothing_was_compared(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    arrays = [np.random.default_rng(n).normal(size=(20 + n, 4)).astype("f4") for n in range(5)]
    for number, array in enumerate(arrays):
        np.save(source / f"u{number}.npy", array)
    cache = featcache.adopt(source, tmp_path / "cache")
    _, page = report(tmp_path / "report.html", tmp_path / "cache")
    assert "nothing tells whether they changed" in page.words
    assert "doubled" not in {each.kind for each in report(tmp_path / "b.html", cache)[0].findings}
    every = np.concatenate(arrays)
    assert page.numbers["feats mean 1"] == pytest.approx(every[:, 1].mean(dtype=float), rel=1e-6)
    cache.collect()
    _, page = report(tmp_path / "report.html", cache)
    assert "were compared with their checksums" in page.words


def test_a_cache_that_is_not_finished_is_told_first(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "cache", FEATURES) as writer:
        writer.expect(["a", "b", "c"])
        made = utterances()["utt-00"]
        writer.write("a", {"fbank": made.fbank, "units": made.units})
    found, page = report(tmp_path / "report.html", tmp_path / "cache")
    assert found.findings[0].kind == "incomplete"
    assert "incomplete: 1 of 3 utterances are there" in page.words
    assert (page.numbers["expected"], page.numbers["missing"]) == (3, 2)


def test_a_version_is_reported_as_it_was(tmp_path: Path) -> None:
    cache = featcache.open(write(tmp_path / "cache", utterances(9)))
    cache.tag("nine")
    cache.delete(["utt-03"])
    old = featcache.open(cache.path, version="nine")
    assert report(tmp_path / "report.html", old)[1].numbers["utterances"] == 9
    assert report(tmp_path / "report.html", cache)[1].numbers["utterances"] == 8


def test_annotations_of_every_kind_and_size(tmp_path: Path) -> None:
    with open_writer(tmp_path / "cache") as writer:
        for number in range(40):
            arrays = arrays_of(number, frames=number + 1)
            values = annotations_of(number) | {"huge": 1.7e308 * (-1) ** number, "same": 3}
            writer.write(id_of(number), arrays, annotations=values)
    _, page = report(tmp_path / "report.html", tmp_path / "cache")
    rows = [annotations_of(number) for number in range(40)]
    texts = [row["text"] for row in rows]
    assert page.numbers["text characters"] == sum(map(len, texts))
    assert page.numbers["clean True utterances"] == sum(row["clean"] is True for row in rows)
    assert page.numbers["speaker spk3 utterances"] == 8
    assert page.numbers["values of same"] == 1
    assert page.numbers["duration median"] == np.median([row["duration"] for row in rows])
    assert "units_of (ints)" in page.words


@pytest.mark.parametrize("backend", ["hdf5", "zarr", "webdataset", "lilcom"])
def test_every_format_is_read(tmp_path: Path, backend: str) -> None:
    if backend not in featcache.registry.backend_names():
        pytest.skip(f"no backend {backend!r}")
    config = FeatureStorageConfig("fbank", backend=backend, dims=[8])
    made = utterances(9)
    with CacheWriter(tmp_path / "cache", [config]) as writer:
        for id, each in made.items():
            writer.write(id, {"fbank": each.fbank})
    _, page = report(tmp_path / "report.html", tmp_path / "cache")
    with featcache.open(tmp_path / "cache") as cache:
        every = np.concatenate([cache.read(id, "fbank") for id in cache])
    assert page.numbers["fbank largest"] == pytest.approx(every.max())


def test_zeros_are_not_clipped_and_floors_are(tmp_path: Path) -> None:
    """Frames without a pitch are 0, and nothing is wrong with them."""
    random = np.random.default_rng(0)
    features = [FeatureStorageConfig("f0", dims=[]), FeatureStorageConfig("floored", dims=[4])]
    with CacheWriter(tmp_path / "cache", features) as writer:
        for number in range(20):
            pitch = np.where(random.random(50) < 0.4, 0, random.normal(120, 9, 50))
            floored = random.normal(0, 1, (50, 4))
            if number == 7:
                floored[:20] = -9
            writer.write(f"u{number:02}", {"f0": pitch, "floored": floored})
    found = report(tmp_path / "report.html", tmp_path / "cache")[0].findings
    clipped = {each.kind: each.ids for each in found if "clipped" in each.kind}
    assert clipped == {"clipped": ("u07",)}


def test_groups_are_counted_in_frames_or_utterances_where_hours_are_not_known(
    tmp_path: Path,
) -> None:
    for name, config, array in (
        ("frames", FeatureStorageConfig("x", dims=[2]), np.ones((5, 2))),
        ("utterances", FeatureStorageConfig("x", time_axis=None), np.ones(3)),
    ):
        with CacheWriter(tmp_path / name, [config]) as writer:
            for number in range(6):
                speaker = {"speaker": "anna" if number < 4 else "ben"}
                writer.write(f"u{number}", {"x": array * number}, annotations=speaker)
        _, page = report(tmp_path / "report.html", tmp_path / name)
        assert page.numbers[f"speaker anna {name}"] == 4 * (5 if name == "frames" else 1)
        assert page.numbers["speaker largest share"] == pytest.approx(4 / 6)
