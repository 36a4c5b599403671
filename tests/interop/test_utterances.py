"""`utterances`: ids, samples and lengths of what holds them; a cache of them by `extract`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from sound_helpers import RATE_HZ, encoded, huggingface, samples_of

import featcache
from featcache import utterances
from featcache.errors import ConfigError, FeatureError
from featcache.interop.utterances import Utterances

lhotse = pytest.importorskip("lhotse")

NUMBERS = [4, 1, 3]


def recordings(folder: Path) -> list[Path]:
    paths = [folder / f"utt-{number}.flac" for number in NUMBERS]
    for path, number in zip(paths, NUMBERS, strict=True):
        soundfile.write(path, samples_of(number), RATE_HZ)
    return paths


def assert_holds(found: Utterances, ids: list[str]) -> None:
    found = pickle.loads(pickle.dumps(found))  # noqa: S301  # as workers may get it
    assert (len(found), list(found.ids)) == (len(NUMBERS), ids)
    for index, number in enumerate(NUMBERS):
        item = found[index]
        assert (item["id"], item["sample_rate_hz"]) == (ids[index], RATE_HZ)
        np.testing.assert_array_equal(item["samples"], samples_of(number), strict=True)
    assert found.lengths is not None
    assert np.argsort(np.array(found.lengths)).tolist() == [1, 2, 0]


def cut_set(folder: Path) -> Any:
    cuts = lhotse.CutSet.from_cuts(
        lhotse.Recording.from_file(path).to_cut() for path in recordings(folder)
    )
    cuts.to_file(folder / "cuts.jsonl.gz")
    return cuts


def test_a_cut_set_read_at_once_or_as_it_is_iterated(tmp_path: Path) -> None:
    ids = ["utt-4", "utt-1", "utt-3"]
    assert_holds(utterances(cut_set(tmp_path)), ids)
    assert_holds(utterances(lhotse.CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl.gz")), ids)


def test_cuts_whose_ids_change_with_each_reading_are_refused(tmp_path: Path) -> None:
    cut_set(tmp_path)
    lazy = lhotse.CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl.gz")
    with pytest.raises(
        ConfigError, match=r"has another id when it is read again.*preserve_id=True"
    ):
        utterances(lazy.map(beginning))
    assert utterances(lazy.map(named_beginning)).ids == ["utt-4", "utt-1", "utt-3"]


def beginning(cut: Any) -> Any:
    return cut.truncate(duration=0.05)


def named_beginning(cut: Any) -> Any:
    return cut.truncate(duration=0.05, preserve_id=True)


def test_cuts_are_cut(tmp_path: Path) -> None:
    (cut,) = cut_set(tmp_path).subset(first=1)
    part = cut.truncate(offset=0.05, duration=0.05)
    item = utterances(lhotse.CutSet.from_cuts([part]))[0]
    np.testing.assert_array_equal(item["samples"], samples_of(4)[RATE_HZ // 20 : RATE_HZ // 10])


@pytest.mark.parametrize("files", [True, False])
def test_a_huggingface_data_set_by_its_ids_or_row_numbers(tmp_path: Path, files: bool) -> None:
    pytest.importorskip("datasets")
    made = huggingface(NUMBERS, tmp_path if files else None, name=["a", "b", "c"])
    assert_holds(utterances(made), ["0", "1", "2"])
    assert_holds(utterances(made, id="name"), ["a", "b", "c"])
    assert_holds(
        utterances(made.rename_columns({"name": "id", "audio": "wave"}), audio="wave"),
        ["a", "b", "c"],
    )
    shuffled = huggingface([3, 4, 1], tmp_path if files else None).select([1, 2, 0])
    assert_holds(utterances(shuffled), ["0", "1", "2"])


def test_lists_with_paths_bytes_or_samples(tmp_path: Path) -> None:
    paths = recordings(tmp_path)
    for audio in (
        paths,
        list(map(str, paths)),
        [{"path": path, "bytes": None} for path in paths],
        [{"bytes": encoded(samples_of(number))} for number in NUMBERS],
        [
            {"array": samples_of(number).astype(float), "sampling_rate": RATE_HZ}
            for number in NUMBERS
        ],
    ):
        items = [{"id": id, "audio": value} for id, value in zip("abc", audio, strict=True)]
        assert_holds(utterances(items), ["a", "b", "c"])


def test_samples_of_16_bits_are_those_of_a_file() -> None:
    audio = {"array": (samples_of(1) * 32768).astype(np.int16), "sampling_rate": RATE_HZ}
    np.testing.assert_array_equal(
        utterances([{"id": "a", "audio": audio}])[0]["samples"], samples_of(1), strict=True
    )


def test_channels_are_averaged(tmp_path: Path) -> None:
    soundfile.write(
        tmp_path / "stereo.wav", np.stack([samples_of(1), 0 * samples_of(1)], axis=1), RATE_HZ
    )
    path = tmp_path / "stereo.wav"
    cut = lhotse.Recording.from_file(path).to_cut()
    for source in ([{"id": "a", "audio": path}], lhotse.CutSet.from_cuts([cut])):
        np.testing.assert_allclose(utterances(source)[0]["samples"], samples_of(1) / 2)


class Shown:
    """A map-style dataset that shows its ids."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.data_ids = [path.stem for path in paths]
        self.lengths = [path.stat().st_size for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"audio": self.paths[index]}


def test_a_map_style_dataset_that_shows_its_ids(tmp_path: Path) -> None:
    assert_holds(utterances(Shown(recordings(tmp_path))), ["utt-4", "utt-1", "utt-3"])


def longest_first(found: Utterances) -> list[Any]:
    return [found[index] for index in np.argsort(np.array(found.lengths))]


def test_what_holds_no_utterances_is_refused() -> None:
    for source, message in [
        ([{"id": "a"}], "item 0 has no 'audio': it has 'id'"),
        ([{"audio": "a.wav", "name": "a"}], "item 0 has no 'id'"),
        (["a.wav"], "item 0 has no 'id': it is no dict"),
        (range(3), "the ids of 'range' are not known"),
        (iter([]), "the ids of 'list_iterator' are not known"),
    ]:
        with pytest.raises(ConfigError, match=message):
            utterances(source)
    for id in (None, "", 1.5):
        with pytest.raises(ConfigError, match="ids are strings or whole numbers"):
            utterances([{"id": id, "audio": "a.wav"}])
    for audio, message in [
        (3, "audio is a path, or a dict"),
        (([1.0], 8000), "audio is a path, or a dict"),
        ({"array": [[1.0]], "sampling_rate": 8000}, r"shape \(samples,\), not \(1, 1\)"),
    ]:
        with pytest.raises(FeatureError, match=message):
            longest_first(utterances([{"id": "a", "audio": audio}]))
    with pytest.raises(ConfigError, match=r"'nowhere.wav' is no file here"):
        utterances([{"id": "a", "audio": "nowhere.wav"}])[0]


def test_columns_that_are_not_there_are_named() -> None:
    pytest.importorskip("datasets")
    made = huggingface([1])
    with pytest.raises(ConfigError, match="no column 'adio'; did you mean 'audio'"):
        utterances(made, audio="adio")
    with pytest.raises(ConfigError, match="no column 'utt'; "):
        utterances(made, id="utt")


class Energies(featcache.EnvironmentProvider):
    """Computes the energies of a data set."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def build_env_local(self) -> dict[str, object]:
        return {"dataset": utterances(self.source), "compute_features": energies}


def energies(batch: list[Any]) -> list[dict[str, object]]:
    seen.extend(item["id"] for item in batch)
    return [
        {"id": item["id"], "energy": np.square(item["samples"]).sum(keepdims=True)}
        for item in batch
    ]


seen: list[str] = []


def test_extract_takes_them_the_longest_first(tmp_path: Path) -> None:
    declared = [featcache.FeatureStorageConfig("energy", time_axis=None)]
    cache = featcache.extract(
        Energies(cut_set(tmp_path)), tmp_path / "cache", declared, check=None, progressbar=False
    )
    assert seen == ["utt-4", "utt-3", "utt-1"]
    assert cache.read("utt-3", "energy") == np.square(samples_of(3)).sum()
