"""Items of several versions, of layers and random crops: drawn by seed, epoch and row."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig
from featcache.errors import ConfigError
from featcache.reading.containers import Containers
from featcache.samplers import BucketBatchSampler

COUNT = 40
VERSIONS = ["fbank", "fbank_v1", "fbank_v2"]
LAYERS = ["ssl-6", "ssl-9"]


def arrays_of(number: int) -> dict[str, Any]:
    """Frames that say which they are: (frames, 2) of time and of what they are."""
    frames = 20 + number

    def array(length: int, what: float) -> Any:
        return np.stack([np.arange(length), np.full(length, what)], 1).astype(np.float32)

    return {
        "fbank": array(frames, number),
        "fbank_v1": array(frames + 3, number + 0.25),
        "fbank_v2": array(frames - 3, number + 0.5),
        "ssl-6": array(frames // 2, 6),
        "ssl-9": array(frames // 2, 9),
        "speaker": np.array([number], np.float32),
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache")
    features = [
        *(FeatureStorageConfig(name, frame_s=0.01) for name in VERSIONS),
        *(FeatureStorageConfig(name, frame_s=0.02) for name in LAYERS),
        FeatureStorageConfig("speaker", time_axis=None),
    ]
    with featcache.CacheWriter(path, features) as writer:
        for number in range(COUNT):
            writer.write(f"u{number:02}", arrays_of(number))
    return path


def items_of(batches: Any) -> dict[str, dict[str, Any]]:
    """The items of batches without their padding."""
    return {
        id: {
            name: batch[name][place][: int(batch[f"{name}_lengths"][place])].numpy()
            for name in batch
            if f"{name}_lengths" in batch
        }
        for batch in batches
        for place, id in enumerate(batch["id"])
    }


def same(first: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> bool:
    return first.keys() == other.keys() and all(
        np.array_equal(item[name], other[id][name]) for id, item in first.items() for name in item
    )


def loaders(dataset: FeatureDataset) -> list[Callable[[int], Any]]:
    """Ways to read an epoch of seed 3: threads, workers, several ranks, after a resume."""

    def sampler(**options: Any) -> BucketBatchSampler:
        return BucketBatchSampler(dataset, max_frames=300, seed=3, **options)

    def by_threads(epoch: int) -> Any:
        loader = FeatureLoader(dataset, batch_sampler=sampler())
        loader.set_epoch(epoch)
        return loader

    def by_workers(epoch: int) -> Any:
        batches = sampler()
        batches.set_epoch(epoch)
        return DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=dataset.collate,
            num_workers=2,
            multiprocessing_context="fork",
        )

    def resumed(epoch: int) -> Any:
        first, *others = (
            FeatureLoader(dataset, batch_sampler=sampler(rank=rank, world_size=size))
            for rank, size in ((0, 1), (0, 2), (1, 2))
        )
        first.set_epoch(epoch)
        iterator = iter(first)
        yield from (next(iterator) for _ in range(2))
        for other in others:
            other.load_state_dict(first.state_dict())
            yield from other

    return [by_threads, by_workers, resumed]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"variants": {"fbank": VERSIONS}},
        {"features": ["fbank"], "random_crop_s": 0.2},
        {"variants": {"fbank": VERSIONS}, "layers": {"ssl": LAYERS}, "random_crop_s": 0.2},
    ],
)
def test_a_row_has_one_draw_an_epoch_on_any_worker_rank_and_after_a_resume(
    cache: Path, options: dict[str, Any]
) -> None:
    dataset = FeatureDataset(cache, **options)
    by_threads, *others = loaders(dataset)
    first = items_of(by_threads(1))
    assert len(first) == COUNT
    for other in others:
        assert same(items_of(other(1)), first)
    assert not same(items_of(by_threads(2)), first)


def test_each_item_is_one_of_the_versions_whole(cache: Path) -> None:
    loader = FeatureLoader(
        FeatureDataset(cache, variants={"fbank": VERSIONS}, seed=5), batch_size=7
    )
    counts: Counter[int] = Counter()
    for _ in range(3):
        for id, item in items_of(loader).items():
            stored = arrays_of(int(id[1:]))
            fits = [np.array_equal(item["fbank"], stored[name]) for name in VERSIONS]
            assert sum(fits) == 1
            counts[fits.index(True)] += 1
    assert all(20 < counts[number] < 60 for number in range(3))


def test_layers_are_one_tensor_behind_the_frames(cache: Path) -> None:
    dataset = FeatureDataset(cache, layers={"ssl": LAYERS}, dtypes={"ssl": "float64"})
    assert dataset.features == (*VERSIONS, "speaker", "ssl")
    batch = dataset.__getitems__([3, 9])
    assert batch["ssl"].shape == (2, 14, 2, 2)
    assert batch["ssl"].dtype == torch.float64
    assert batch["ssl_lengths"].tolist() == [11, 14]
    for place, number in enumerate((3, 9)):
        stored = arrays_of(number)
        for layer, name in enumerate(LAYERS):
            array, length = stored[name], len(stored[name])
            np.testing.assert_array_equal(batch["ssl"][place, :length, layer], array)
            assert not batch["ssl"][place, length:].any()
    assert dataset["u03", 2:5]["ssl"].shape == (3, 2, 2)
    assert dataset["u03", featcache.Seconds(0.04, 0.1)]["ssl"][0, 0, 0] == 2


def test_crops_of_all_features_are_of_one_time_and_come_from_anywhere(cache: Path) -> None:
    dataset = FeatureDataset(cache, ["fbank", "ssl-6", "speaker"], random_crop_s=0.2)
    loader = FeatureLoader(dataset, batch_size=10, shuffle=True, seed=1)
    starts = set()
    for _ in range(5):
        for id, item in items_of(loader).items():
            fbank, ssl = item["fbank"], item["ssl-6"]
            assert (len(fbank), len(ssl)) == (20, 10)
            begin = int(fbank[0, 0])
            np.testing.assert_array_equal(fbank, arrays_of(int(id[1:]))["fbank"][begin:][:20])
            assert abs(int(ssl[0, 0]) * 2 - begin) <= 1
            starts.add(begin)
    assert {0, 20, 30} <= starts
    assert dataset["u05", 0:12]["fbank"].shape == (12, 2)


@pytest.mark.parametrize(
    "times",
    [
        ((0.01, 0.0), (0.01, 0.5)),
        ((0.01, 0.5), (0.02, 0.0)),
        ((0.01, 0.0), (0.02, 0.0125)),
        ((0.01, 0.0), (0.08, 0.04), (0.02, 0.0)),
        ((0.01, 0.0), (0.0125, 0.0)),
    ],
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_crops_are_of_one_time_where_features_do_not_begin_together(
    tmp_path: Path, times: tuple[tuple[float, float], ...], is_cut: bool
) -> None:
    names = [f"f{number}" for number in range(len(times))]
    features = [
        FeatureStorageConfig(name, "float64", frame_s=frame_s, offset_s=offset_s)
        for name, (frame_s, offset_s) in zip(names, times, strict=True)
    ]
    with CacheWriter(tmp_path, features) as writer:
        for number in range(20):
            arrays = {
                name: (offset_s + frame_s * np.arange(round(10 / frame_s)))[:, None]
                for name, (frame_s, offset_s) in zip(names, times, strict=True)
            }
            writer.write(f"u{number:02}", arrays)
    table: featcache.FeatureTable = featcache.open(tmp_path)
    if is_cut:
        table = table.segments({f"part of {id}": (id, 1.003, 8.0) for id in table})
    longest_s = max(frame_s for frame_s, _ in times)
    dataset = FeatureDataset(table, random_crop_s=2)
    starts = []
    for epoch in range(10):
        dataset.set_epoch(epoch)
        for item in dataset[:]:
            begins = [float(item[name][0, 0]) for name in names]
            assert max(begins) - min(begins) <= longest_s / 2 + 1e-9
            starts.append(begins[0])
    assert np.ptp(starts) > (4 if is_cut else 6)  # of 5 and 8, and what they begin apart less


@pytest.mark.parametrize("offset_s", [0.0, 5.0])
def test_a_crop_of_an_utterance_without_frames_of_a_feature_comes_from_anywhere(
    tmp_path: Path, offset_s: float
) -> None:
    features = [
        FeatureStorageConfig("x", frame_s=0.01),
        FeatureStorageConfig("y", frame_s=0.02, offset_s=offset_s),
    ]
    with CacheWriter(tmp_path, features) as writer:
        for number in range(40):
            x, y = np.arange(1000, dtype="f4")[:, None], np.ones((0, 2), "f4")
            writer.write(f"u{number:02}", {"x": x, "y": y})
    items = FeatureDataset(tmp_path, random_crop_s=2)[:]
    assert {item["y_lengths"] for item in items} == {0}
    assert np.ptp([float(item["x"][0, 0]) for item in items]) > 500


@pytest.mark.parametrize("lacking", [-1, 0, 1])
def test_a_frame_more_or_less_at_the_end_changes_no_crop(tmp_path: Path, lacking: int) -> None:
    features = [
        FeatureStorageConfig("x", frame_s=0.01),
        FeatureStorageConfig("y", frame_s=0.02),
    ]
    with CacheWriter(tmp_path, features) as writer:
        for number in range(200, 300):
            y = np.arange(number, dtype="f4")[:, None]
            x = np.arange(2 * number - lacking, dtype="f4")[:, None]
            writer.write(f"u{number:02}", {"x": x, "y": y})
    alone = FeatureDataset(tmp_path, "y", random_crop_s=2)
    both = FeatureDataset(tmp_path, random_crop_s=2)
    for row in range(100):
        np.testing.assert_array_equal(both[row]["y"], alone[row]["y"])
        assert abs(float(both[row]["x"][0, 0]) - 2 * float(both[row]["y"][0, 0])) <= 1


@pytest.mark.parametrize(
    ("x", "y", "crop_s"),
    [
        ((0.01, 0, 100), (0.016, 0, 63), 1.0),
        ((0.01, 0, 810), (0.08, -0.04, 100), 0.8),
        ((0.01, 0, 96), (0.08, 0, 12), 0.92),
    ],
)
def test_a_crop_that_goes_to_the_end_of_one_feature_is_in_step_with_the_others(
    tmp_path: Path,
    x: tuple[float, float, int],
    y: tuple[float, float, int],
    crop_s: float,
) -> None:
    times = {"x": x, "y": y}
    features = [
        FeatureStorageConfig(name, "float64", frame_s=frame_s, offset_s=offset_s)
        for name, (frame_s, offset_s, _) in times.items()
    ]
    arrays = {
        name: (offset_s + frame_s * np.arange(frames))[:, None]
        for name, (frame_s, offset_s, frames) in times.items()
    }
    with CacheWriter(tmp_path, features) as writer:
        for number in range(300):
            writer.write(f"u{number:03}", arrays)
    dataset = FeatureDataset(tmp_path, random_crop_s=crop_s)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        batch = dataset.__getitems__([*range(300)])
        apart = (batch["x"][:, 0, 0] - batch["y"][:, 0, 0]).abs()
        assert float(apart.max()) <= y[0] / 2 + 1e-9


@pytest.mark.parametrize("crop_s", [1e20, 1e308])
def test_a_crop_of_any_length_is_no_error(cache: Path, crop_s: float) -> None:
    item = FeatureDataset(cache, "fbank", random_crop_s=crop_s)["u05"]
    np.testing.assert_array_equal(item["fbank"], arrays_of(5)["fbank"])


def test_shorter_utterances_are_whole(cache: Path) -> None:
    item = FeatureDataset(cache, "fbank", random_crop_s=9)["u05"]
    np.testing.assert_array_equal(item["fbank"], arrays_of(5)["fbank"])


def test_samplers_know_the_lengths_of_crops_and_of_the_longest_version(cache: Path) -> None:
    dataset = FeatureDataset(cache, "fbank", random_crop_s=0.2)
    batches = BucketBatchSampler(dataset, max_frames=200, shuffle=False)
    assert [len(batch) for batch in batches] == [10] * 4
    dataset = FeatureDataset(cache, [], variants={"fbank": VERSIONS})
    np.testing.assert_array_equal(dataset.choices.lengths("fbank"), 23 + np.arange(COUNT))
    half = Subset(dataset, [4, 5, 6, 7])
    (batch,) = BucketBatchSampler(half, max_frames=4 * 30, seed=3)
    found = items_of(FeatureLoader(half, batch_sampler=[batch]))
    assert found.keys() == {"u04", "u05", "u06", "u07"}


def test_a_sampler_that_counts_other_frames_than_the_data_set_has_is_refused(cache: Path) -> None:
    cropped = FeatureDataset(cache, "fbank", random_crop_s=0.2)
    whole = FeatureDataset(cache, "fbank")
    for counted, read in ((whole, cropped), (cache, cropped), (cropped, whole)):
        sampler = BucketBatchSampler(counted, max_frames=200)
        with pytest.raises(ConfigError, match=r"BucketBatchSampler\(dataset, ...\)"):
            FeatureLoader(read, batch_sampler=sampler)
        with pytest.raises(ConfigError, match=r"BucketBatchSampler\(dataset, ...\)"):
            list(DataLoader(read, batch_sampler=sampler, collate_fn=read.collate))
    FeatureLoader(cropped, batch_sampler=BucketBatchSampler(cropped, max_frames=200))
    lengths = whole.table.lengths("fbank")  # whose frames the user has counted
    FeatureLoader(cropped, batch_sampler=BucketBatchSampler(lengths, max_frames=200))


def test_only_the_bytes_of_a_crop_are_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = FeatureDataset(cache, "fbank", random_crop_s=0.1)
    read: list[int] = []
    read_many = Containers.read_many

    def counted(self: Any, pieces: Any, outs: Any) -> None:
        read.extend(nbytes for _, _, nbytes in pieces)
        read_many(self, pieces, outs)

    monkeypatch.setattr(Containers, "read_many", counted)
    batches = list(FeatureLoader(dataset, batch_size=8, threads=0))
    assert sum(read) == sum(batch["fbank"].nbytes for batch in batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variants": {"fbank": ["fbank", "speaker"]}}, "one dtype and shape"),
        (
            {"variants": {"fbank": ["fbank", "ssl-6"]}, "random_crop_s": 0.1},
            "at other times, so it cannot be cut in seconds: 'fbank' has",
        ),
        ({"layers": {"ssl": []}}, "name stored features"),
        ({"layers": {"ssl": ["ssl-6", "ssl-6"]}}, "each once"),
        ({"layers": {"speaker": LAYERS}}, "is a feature itself"),
        ({"layers": {"x": LAYERS}, "variants": {"x": VERSIONS}}, "in common"),
        ({"random_crop_s": 0}, "above 0"),
        ({"variants": VERSIONS}, "variants names lists of stored features"),
        ({"layers": {"ssl": "ssl-6"}}, "layers names lists of stored features"),
    ],
)
def test_features_that_do_not_go_together_are_refused(
    cache: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FeatureDataset(cache, **options)


def test_versions_of_other_times_are_read_but_not_cut_in_seconds(cache: Path) -> None:
    dataset = FeatureDataset(cache, [], variants={"x": ["fbank", "ssl-6"]})
    assert {len(item["x"]) for item in dataset[:20]} > {30, 10}
    with pytest.raises(ConfigError, match="'x' is made of features whose frames are at other"):
        dataset["u03", featcache.Seconds(0.04, 0.1)]


def test_layers_of_other_lengths_are_refused_by_id(cache: Path) -> None:
    dataset = FeatureDataset(cache, [], layers={"both": ["fbank", "fbank_v1"]})
    with pytest.raises(ConfigError, match="utterance 'u07' differ in length"):
        dataset[7]


def test_packed_batches_have_the_same_frames(cache: Path) -> None:
    padded, packed = (
        FeatureDataset(
            cache,
            variants={"fbank": VERSIONS},
            layers={"ssl": LAYERS},
            random_crop_s=0.2,
            layout=layout,
        ).__getitems__([3, 1, 7])
        for layout in ("padded", "packed")
    )
    for name in ("fbank", "ssl"):
        lengths = padded[f"{name}_lengths"].tolist()
        frames = [padded[name][place][:length] for place, length in enumerate(lengths)]
        np.testing.assert_array_equal(np.concatenate(frames), packed[name])


def test_layers_are_read_through_memory_that_is_used_again(tmp_path: Path) -> None:
    names = ["ssl-6", "ssl-9"]
    with CacheWriter(tmp_path, [FeatureStorageConfig(name) for name in names]) as writer:
        for number in range(8):
            writer.write(f"u{number}", dict.fromkeys(names, np.ones((700, 80), "f4")))
    dataset = FeatureDataset(tmp_path, [], layers={"ssl": names})
    rows = [*range(8)]
    for _ in range(3):
        dataset.__getitems__(rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        dataset.__getitems__(rows)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    pages = 10 * 8 * 2 * 700 * 80 * 4 // 4096  # of the arrays that are read
    assert faults < pages // 10
