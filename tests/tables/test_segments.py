"""Segments and windows of recordings, in seconds: the frames that are read, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featcache
from featcache import CacheWriter, FeatureStorageConfig, FeatureTable, Windows
from featcache.errors import ConfigError, KeyNotFoundError, UnknownNameError, WindowError

RATES = {"wave": (1 / 16000, "int32"), "fbank": (0.01, "float32"), "units": (0.02, "int32")}


def recordings(path: Path, frames: Mapping[str, Mapping[str, int]], **offsets: float) -> Path:
    """Write a cache whose frames hold their own numbers, and a vector without a time axis."""
    names = next(iter(frames.values()))
    features = [
        FeatureStorageConfig(
            name, dtype=RATES[name][1], frame_s=RATES[name][0], offset_s=offsets.get(name, 0.0)
        )
        for name in names
    ]
    with CacheWriter(path, [*features, FeatureStorageConfig("voice", time_axis=None)]) as writer:
        for id, counts in frames.items():
            arrays = {name: np.arange(count) for name, count in counts.items()}
            writer.write(id, arrays | {"voice": np.full(2, len(id), np.float32)})
    return path


def table_of(path: Path, frames: Mapping[str, Mapping[str, int]], **offsets: float) -> FeatureTable:
    return FeatureTable.of(recordings(path, frames, **offsets))


def even(seconds: float) -> dict[str, int]:
    """Frames of all three features of so many seconds, none more or less."""
    return {name: round(seconds / frame_s) for name, (frame_s, _) in RATES.items()}


def test_a_segment_has_an_id_of_its_own_and_its_frames_of_every_feature(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"rec": even(4), "other": even(3)})
    source = {"b": ("rec", 1.0, 2.5), "a": ("other", 0.5, 0.52), "c": ("rec", 0.0, 4.0)}
    view = table.segments(source)
    assert list(view.ids) == ["b", "a", "c"]
    assert view.features == ("fbank", "units", "voice", "wave")
    assert view.lengths("fbank").tolist() == [150, 2, 400]
    assert view.lengths("units").tolist() == [75, 1, 200]
    for name, first in (("wave", 16000), ("fbank", 100), ("units", 50)):
        count = first * 3 // 2
        assert view.read("b", name).tolist() == list(range(first, first + count))
    assert view["a"]["units"].tolist() == [25]
    assert view.read("a", "voice").tolist() == [5.0, 5.0]
    assert view.find(["a", "rec", "c"]).tolist() == [1, -1, 2]
    with pytest.raises(WindowError, match="frames 0 to 76 are not within 0 to 75"):
        view.read("b", "units", 0, 76)


def test_a_file_of_segments_gives_the_view_of_the_same_dict(tmp_path: Path) -> None:
    table = table_of(tmp_path / "c", {"rec": even(4)})
    file = tmp_path / "segments.csv"
    file.write_text("id,recording,start_s,stop_s\nx,rec,0.5,1.25\ny,rec,2,4\n")
    view = table.segments(file)
    again = table.segments({"x": ("rec", 0.5, 1.25), "y": ("rec", 2.0, 4.0)})
    assert view.digest == again.digest
    assert view["y"]["fbank"].tolist() == again["y"]["fbank"].tolist() == list(range(200, 400))


def test_views_of_other_times_or_ids_are_told_apart(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"rec": even(4)})
    sources = [("x", 0.5, 1.25), ("y", 0.5, 1.25), ("x", 0.5, 1.26), ("x", 0.49, 1.25)]
    views = [table.segments({id: ("rec", start, stop)}) for id, start, stop in sources]
    assert len({view.digest for view in (*views, table)}) == 5


@given(st.data())
def test_neighbours_share_no_frame_and_leave_out_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    offsets = {
        name: data.draw(st.sampled_from([0.0, 0.0025, -0.005]), name) for name in ("fbank", "units")
    }
    frames = {name: count + data.draw(st.integers(0, 1)) for name, count in even(2).items()}
    table = table_of(tmp_path_factory.mktemp("cache"), {"rec": frames}, **offsets)
    places = data.draw(st.lists(st.integers(1, 64), max_size=8, unique=True))
    # none so near to another that no frame lies between them, which is refused
    inner = [0.03 * place + data.draw(st.floats(0.0, 0.004)) for place in sorted(places)]
    cuts = [0.0, *inner, 2.0]
    view = table.segments({str(n): ("rec", *pair) for n, pair in enumerate(pairwise(cuts))})
    whole = table.segments({"all": ("rec", 0.0, 2.0)})
    for name in RATES:
        joined = np.concatenate([view.read(id, name) for id in view.ids])
        assert joined.tolist() == whole.read("all", name).tolist()


def test_features_that_end_together_but_for_two_frames_are_trimmed(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"rec": even(2) | {"fbank": 198}})
    view = table.segments({"last": ("rec", 1.0, 2.0), "inner": ("rec", 0.5, 1.0)})
    lengths = {name: view.lengths(name).tolist() for name in RATES}
    assert lengths == {"wave": [15680, 8000], "fbank": [98, 50], "units": [49, 25]}
    with pytest.raises(
        WindowError,
        match=r"segment 'last' of recording 'rec' stops at 2 s, but feature 'fbank' ends at 1.98 "
        r"s; align='error' lets no frame lack",
    ):
        table.segments({"inner": ("rec", 0.5, 1.0), "last": ("rec", 1.0, 2.0)}, align="error")
    strict = table.segments({"inner": ("rec", 0.5, 1.984)}, align="error", tolerance_frames=0)
    assert strict.lengths("fbank").tolist() == [148]
    assert strict.lengths("wave").tolist() == [23744]  # nothing lacks, so nothing is trimmed


def test_a_stop_beyond_the_end_is_refused_by_name(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"rec": even(2) | {"fbank": 190}})
    source = {"fine": ("rec", 0.0, 1.9), "one": ("rec", 1.0, 1.95), "two": ("rec", 1.0, 2.0)}
    with pytest.raises(
        WindowError,
        match=r"segment 'one' of recording 'rec' stops at 1.95 s, but feature 'fbank' ends at 1.9 "
        r"s \(1 more like it\); at most 2 frames, 0.04 s, may lack \(tolerance_frames\)",
    ):
        table.segments(source)
    assert table.segments(source, tolerance_frames=5).lengths("units").tolist() == [95, 45, 45]
    with pytest.raises(WindowError, match=r"segment 'one'.*at most 0 frames"):
        table.segments(source, tolerance_frames=0)


def test_recordings_that_are_not_there_and_wrong_choices_are_refused(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"rec": even(2)})
    with pytest.raises(KeyNotFoundError, match="'reck'"):
        table.segments({"a": ("reck", 0.0, 1.0)})
    with pytest.raises(UnknownNameError, match="align is 'trim' or 'error', not 'cut'"):
        table.segments({}, align="cut")  # type: ignore[arg-type]
    for wrong in (-1, 1.5, None):
        with pytest.raises(ConfigError, match="tolerance_frames"):
            table.segments({}, tolerance_frames=wrong)  # type: ignore[arg-type]
    assert len(table.segments({})) == 0
    with pytest.raises(ConfigError, match="segments already; cut the table of their recordings"):
        table.segments({"a": ("rec", 0.0, 1.0)}).segments(Windows(0.5))


def untimed(path: Path, frame_s: float | None = 0.01) -> FeatureTable:
    features = [FeatureStorageConfig("fbank", frame_s=frame_s), FeatureStorageConfig("words")]
    with CacheWriter(path, features) as writer:
        writer.write("rec", {"fbank": np.arange(100.0), "words": np.arange(7.0)})
    return FeatureTable.of(path)


def test_a_feature_that_does_not_say_how_long_its_frames_are_is_refused_by_name(
    tmp_path: Path,
) -> None:
    view = untimed(tmp_path / "c").segments({"a": ("rec", 0.25, 0.5)})
    assert view.read("a", "fbank").tolist() == list(range(25, 50))
    for ask in (
        view.lengths,
        lambda name: view.read("a", name),
        lambda name: view.read_batch(["a"], name),
    ):
        with pytest.raises(ConfigError, match=r"'words' cannot be cut in seconds.*declare frame_s"):
            ask("words")
    with pytest.raises(ConfigError, match=r"no feature of .* declare frame_s: fbank, words"):
        untimed(tmp_path / "none", None).segments(Windows(1.0))


def test_concatenated_caches_need_the_same_times(tmp_path: Path) -> None:
    one, two = untimed(tmp_path / "a", 0.01), untimed(tmp_path / "b", 0.02)
    with CacheWriter(
        tmp_path / "d", [FeatureStorageConfig("fbank", frame_s=0.01), FeatureStorageConfig("words")]
    ) as writer:
        writer.write("other", {"fbank": np.arange(50.0), "words": np.arange(3.0)})
    both = featcache.concat(one, tmp_path / "d")
    view = both.segments({"x": ("other", 0.1, 0.2), "y": ("rec", 0.9, 1.0)})
    assert view.read("y", "fbank").tolist() == list(range(90, 100))
    assert view.read("x", "fbank").tolist() == list(range(10, 20))
    with pytest.raises(ConfigError, match=r"'fbank' .*frame_s 0.02.*'.*b'.*0.01.*'.*d'"):
        featcache.concat(two, tmp_path / "d").segments(Windows(0.5))


def test_windows_go_from_the_beginning_to_the_end_of_each_recording(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"a": even(2.5), "b": even(0.5), "c": even(1)})
    view = table.segments(Windows(1.0))
    assert list(view.ids) == ["a:0-1", "a:1-2", "a:2-2.5", "b:0-0.5", "c:0-1"]
    assert view.lengths("units").tolist() == [50, 50, 25, 25, 50]
    assert view.read("a:2-2.5", "fbank").tolist() == list(range(200, 250))
    view = table.segments(Windows(1.0, hop_s=0.25))
    assert [id for id in view.ids if id[0] != "a"] == ["b:0-0.5", "c:0-1"]
    assert [id for id in view.ids if id[0] == "a"] == [
        "a:0-1", "a:0.25-1.25", "a:0.5-1.5", "a:0.75-1.75", "a:1-2", "a:1.25-2.25", "a:1.5-2.5",
    ]  # fmt: skip
    assert list(table.segments(Windows(0.5, hop_s=1.2)).ids)[:3] == [
        "a:0-0.5",
        "a:1.2-1.7",
        "a:2.4-2.5",
    ]


@given(
    st.integers(1, 900), st.sampled_from([0.02, 0.1, 0.333, 1.0]), st.floats(0.01, 3), st.booleans()
)
def test_windows_cover_a_recording_to_half_of_its_longest_frame(
    tmp_path_factory: pytest.TempPathFactory, frames: int, length_s: float, hop_s: float, own: bool
) -> None:
    hop_s = length_s if own else hop_s
    path = tmp_path_factory.mktemp("cache")
    table = table_of(path, {"rec": {"fbank": frames, "units": (frames + 1) // 2}})
    view = table.segments(Windows(length_s, hop_s))
    spans = [tuple(map(float, id.removeprefix("rec:").split("-"))) for id in view.ids]
    assert all(
        other - one == pytest.approx(hop_s, abs=2e-9) for (one, _), (other, _) in pairwise(spans)
    )
    assert all(stop - start == pytest.approx(length_s, abs=2e-9) for start, stop in spans[:-1])
    assert all(stop < frames / 100 - 0.01 + 1e-8 for _, stop in spans[:-1])
    if spans:
        assert spans[0][0] == 0.0
        assert view.lengths("units").min() > 0
        assert view.lengths("fbank").min() > 0
    if hop_s <= length_s and spans:
        assert spans[-1][1] >= frames / 100 - 0.01 - 1e-8
    if own:
        held = [number for id in view.ids for number in view.read(id, "fbank").tolist()]
        assert held == list(range(len(held)))
        assert len(held) >= frames - 1


def test_windows_that_cannot_be_are_refused(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"fine": even(2), "odd": even(2) | {"units": 80}})
    for wrong in (0.0, -1.0, float("nan"), float("inf"), True, "1"):
        with pytest.raises(ConfigError, match="length_s is a number of seconds, more than 0"):
            table.segments(Windows(wrong))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="hop_s is a number of seconds, more than 0"):
            table.segments(Windows(1.0, wrong))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"length_s=0.015 are too short: a frame takes up to 0.02"
    ):
        table.segments(Windows(0.015))
    with pytest.raises(
        WindowError,
        match=r"recording 'odd' stops at 2 s, but feature 'units' ends at 1.6 s; at most 2",
    ):
        table.segments(Windows(1.0))
    assert len(table.select(["fine"]).segments(Windows(1.0))) == 2


def test_an_empty_recording_has_no_windows(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"none": even(0), "some": even(1)})
    assert list(table.segments(Windows(0.5)).ids) == ["some:0-0.5", "some:0.5-1"]


def test_windows_of_long_and_of_many_recordings_have_their_own_ids(tmp_path: Path) -> None:
    counts = {f"r{n:03}": n % 3 for n in range(300)} | {"long": 140_000, "zz": 70_000}
    table = table_of(tmp_path, {id: {"units": count} for id, count in counts.items()})
    view = table.segments(Windows(0.02))
    expected = [f"{id}:" for id in table.ids for _ in range(counts[id])]
    assert [id[: id.index(":") + 1] for id in view.ids] == expected
    ids = [f"long:{n / 50:g}-{(n + 1) / 50:g}" for n in (0, 1, 65536, 131_000)]
    rows = view.rows([*ids, "zz:1399.98-1400"])
    assert rows.tolist() == [0, 1, 65536, 131_000, len(view) - 1]
    assert [view.read(id, "units").tolist() for id in ids] == [[0], [1], [65536], [131_000]]


def test_views_of_segments_are_views_like_others(tmp_path: Path) -> None:
    table = table_of(tmp_path, {"a": even(2.5), "b": even(0.5), "c": even(1)})
    view = table.select(["c", "a"]).segments(Windows(1.0))
    assert list(view.ids) == ["c:0-1", "a:0-1", "a:1-2", "a:2-2.5"]
    some = view.select(["a:2-2.5", "c:0-1"])
    assert some.lengths("fbank").tolist() == [50, 100]
    assert some.read("a:2-2.5", "units").tolist() == list(range(100, 125))
    again = pickle.loads(pickle.dumps(some))  # noqa: S301
    assert (list(again.ids), again.digest) == (list(some.ids), some.digest)
    padded = again.read_batch(["c:0-1", "a:2-2.5"], "units")
    assert padded.data[1].tolist() == [*range(100, 125), *[0] * 25]


def test_statistics_of_segments_count_each_frame_as_often_as_it_is_given(tmp_path: Path) -> None:
    features = [
        FeatureStorageConfig("fbank", frame_s=0.01),
        FeatureStorageConfig("voice", time_axis=None),
        FeatureStorageConfig("words"),
    ]
    with CacheWriter(tmp_path / "c", features) as writer:
        for id, value in (("a", 1.0), ("b", 5.0)):
            arrays = {"fbank": np.arange(100.0) * value, "voice": np.full(2, value)}
            writer.write(id, arrays | {"words": np.ones(3)})
    table = FeatureTable.of(tmp_path / "c")
    view = table.segments({"x": ("b", 0.1, 0.3), "y": ("b", 0.2, 0.3)})
    frames = np.concatenate([view.read(id, "fbank") for id in view.ids])
    stats = view.stats("fbank")
    assert (stats.count, float(stats.mean)) == (30, frames.mean())
    assert view.stats("voice").count == 2
    assert view.stats("voice").mean.tolist() == [5.0, 5.0]
    with pytest.raises(ConfigError, match="'words' cannot be cut in seconds"):
        view.stats("words")
