"""Caches, tables, batches and estimates as a line, and as HTML for notebooks."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import KeyNotFoundError, bytes_text
from featcache.tables import shown

HOSTILE = "<script>alert('&')</script>"
MOST_BYTES = 8000


class Tags(HTMLParser):
    """The tags of a page, its text, and the attributes of all tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(page: str) -> Tags:
    """Return a page that a notebook may show: small, without script, in the colours around it."""
    found = Tags(page)
    assert len(page.encode()) < MOST_BYTES
    assert {*found.tags} <= {"div", "span", "b", "i", "table", "tr", "td", "svg", "path"}
    assert not [name for name, _ in found.attributes if name.startswith("on") or name == "src"]
    assert not re.search(r"(?<![a-z-])(color|fill|background)(:|=\")(?!currentColor|inherit)", page)
    return found


def make(path: Path, count: int = 30) -> featcache.Cache:
    features = [
        FeatureStorageConfig("fbank", frame_s=0.01),
        FeatureStorageConfig("units", dtype="uint8"),
        FeatureStorageConfig("xvector", time_axis=None, stats=False),
    ]
    with CacheWriter(path, features) as writer:
        for number in range(count):
            frames = 100 + number
            arrays: dict[str, NDArray[Any]] = {
                "fbank": np.full((frames, 4, 2), number, np.float32),
                "units": np.full(frames, number, np.uint8),
                "xvector": np.full(5, number, np.float32),
            }
            writer.write(f"{HOSTILE}{number}", arrays, annotations={HOSTILE.replace("/", ""): "x"})
    return featcache.open(path)


def test_a_cache_is_a_line_and_a_page(tmp_path: Path) -> None:
    cache = make(tmp_path / "cache")
    frames = sum(range(100, 130))
    assert repr(cache) == (
        f"<Cache {str(tmp_path / 'cache')!r}: 30 utterances, {frames / 360000:.2f} h; "
        "fbank (frames, 4, 2) float32 memmap, units (frames,) uint8 memmap, "
        f"xvector (5,) float32 memmap; {bytes_text(cache.nbytes)}; complete>"
    )
    page = checked(cache._repr_html_())
    for said in ("30 utterances", f"{frames:,}", "float32", "memmap", "complete", HOSTILE[:8]):
        assert said in page.text
    assert "100 to 129 frames of fbank" in page.text


def test_a_view_says_what_it_is_of_and_how_it_was_made(tmp_path: Path) -> None:
    cache = make(tmp_path / "cache")
    view = cache.filter(fbank=(110, None)).sort("fbank", descending=True)
    frames, whole = sum(range(110, 130)), sum(range(100, 130))
    path = shown.shortened(str(tmp_path / "cache"), 100)
    assert repr(view) == (
        f"<FeatureTable: 20 of 30 utterances of {path!r}, {frames:,} frames, "
        f"{frames / whole:.0%} of all; filter(fbank=(110, None)).sort('fbank', descending=True)>"
    )
    assert repr(cache.table).startswith("<FeatureTable: 30 utterances of ")
    text = checked(view._repr_html_()).text
    assert "20 of 30 utterances" in text
    assert "filter(fbank=(110, None))" in text
    segments = cache.segments({"a": (f"{HOSTILE}3", 0.0, 0.5)})
    assert "1 segments of 30 utterances" in repr(segments)
    assert f"{HOSTILE}3" not in segments._repr_html_()
    checked(segments._repr_html_())
    checked(featcache.concat(cache.select([0]), cache.select([1]))._repr_html_())


def test_a_cache_of_nothing_and_one_that_is_written_are_shown(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("fbank")]) as writer:
        cache = featcache.open(tmp_path / "cache")
        assert "0 utterances; fbank (...) float32 memmap; " in repr(cache)
        assert "incomplete, being written by" in repr(cache)
        checked(cache._repr_html_())
        writer.abort()


def test_hundreds_of_features_and_long_names_stay_small(tmp_path: Path) -> None:
    features = [FeatureStorageConfig(f"layer{number}") for number in range(300)]
    path = tmp_path.joinpath(*(["d" * 200] * 10))
    with CacheWriter(path, features) as writer:
        arrays = {each.name: np.ones((3, 2), np.float32) for each in features}
        writer.write("a" * 3000, arrays, annotations={f"{n}{'n' * 300}": n for n in range(40)})
    cache = featcache.open(path)
    assert "and 297 more" in repr(cache)
    assert "and 280 more" in checked(cache._repr_html_()).text


def test_of_very_many_rows_the_first_are_drawn_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(tmp_path / "cache")
    monkeypatch.setattr(shown, "MOST_COUNTED", 10)
    page = checked(cache._repr_html_())
    assert "of the first 10 of 30 utterances" in page.text
    assert f"{sum(range(100, 130)):,}" in page.text  # of the statistics
    assert repr(cache.filter(fbank=(110, None))).count("frames") == 0


def test_nothing_is_read_for_a_line_nor_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(tmp_path / "cache")

    def read(*_: object) -> None:
        raise AssertionError("containers were opened")

    monkeypatch.setattr("featcache.reading.containers.Containers._start", read)
    for table in (cache, cache.filter(fbank=(110, None)), cache.split({"a": 0.5, "b": 0.5})["a"]):
        assert repr(table)
        assert table._repr_html_()
    with pytest.raises(AssertionError, match="containers were opened"):
        cache.read(cache.ids[0], "fbank")


def test_keys_are_completed_up_to_a_thousand(tmp_path: Path) -> None:
    cache = make(tmp_path / "cache")
    assert cache._ipython_key_completions_() == list(cache.ids)
    with CacheWriter(tmp_path / "large", [FeatureStorageConfig("n", dtype="int8")]) as writer:
        for number in range(1100):
            writer.write(f"utt-{number:04}", {"n": np.ones(1, np.int8)})
    keys = featcache.open(tmp_path / "large")._ipython_key_completions_()
    assert keys == [f"utt-{number:04}" for number in range(1000)]


def test_a_batch_is_a_line_and_a_table(tmp_path: Path) -> None:
    cache = make(tmp_path / "cache")
    batch = cast(Any, next(iter(featcache.FeatureLoader(cache, batch_size=4))))
    shape = tuple(batch["fbank"].shape)
    assert repr(batch).startswith(f"<batch: id list of 4; fbank {shape} float32; ")
    assert dict in type(batch).__mro__
    page = checked(batch._repr_html_())
    padding = 1 - sum(batch["fbank_lengths"].tolist()) / (4 * batch["fbank"].shape[1])
    assert f"{padding:.0%}" in page.text
    assert str(shape) in page.text


def test_an_estimate_is_a_line_and_printed_a_table(tmp_path: Path) -> None:
    estimate = featcache.inspect.estimate(make(tmp_path / "cache"), ["fbank"])
    assert repr(estimate).startswith("<Estimate: 30 utterances, as declared ")
    assert "\n" not in repr(estimate)
    page = checked(estimate._repr_html_())
    for row in estimate.rows:
        assert row.backend in page.text
        assert row.backend in str(estimate)
    assert estimate._repr_html_().count("<b>as declared</b>") == 1
    assert estimate.advice in page.text


def test_an_unknown_feature_is_an_error_and_not_a_completion(tmp_path: Path) -> None:
    cache = make(tmp_path / "cache")
    assert "fbank" not in cache._ipython_key_completions_()
    with pytest.raises(KeyNotFoundError):
        cache["fbank"]
