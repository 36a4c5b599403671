"""lhotse's manifests, written by lhotse, are caches of what lhotse would load."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lhotse
import numpy as np
import pytest
from foreign_stores import adopted, annotation, assert_holds, contents
from lhotse.features import io
from lhotse_stores import HZ, WRITERS, cut_of, loaded, whole_cuts, with_pieces
from numpy.typing import NDArray

from featcache import Cache


def assert_holds_all(cache: Cache, arrays: Mapping[str, dict[str, NDArray[Any]]]) -> None:
    assert sorted(cache.features) == sorted(arrays)
    for feature in ("feats", "alignment"):
        assert_holds(cache, feature, arrays[feature])
    for id, vector in arrays["xvector"].items():
        assert np.array_equal(cache.read(id, "xvector"), vector)
    assert cache.dims("xvector") == (16,)


@pytest.mark.parametrize("storage", WRITERS)
def test_cuts_have_the_arrays_that_lhotse_loads(tmp_path: Path, storage: str) -> None:
    cuts = with_pieces(whole_cuts(storage, tmp_path / "data"))
    cuts.to_file(tmp_path / "data" / "cuts.jsonl.gz")
    before = contents(tmp_path / "data")
    with adopted(tmp_path / "data" / "cuts.jsonl.gz", tmp_path) as cache:
        assert_holds_all(cache, loaded(cuts))
    assert contents(tmp_path / "data") == before


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # lhotse leaves files open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("data", ["numpy", "lilcom"])
def test_a_folder_of_shar_is_one_cache(tmp_path: Path, data: str) -> None:
    cuts = with_pieces(whole_cuts("numpy_hdf5", tmp_path / "data"))
    fields = {"features": data, "alignment": "numpy", "xvector": "numpy"}
    (tmp_path / "shar").mkdir()
    cuts.to_shar(tmp_path / "shar", fields, shard_size=7)
    with adopted(tmp_path / "shar", tmp_path) as cache:
        assert_holds_all(cache, loaded(lhotse.CutSet.from_shar(in_dir=tmp_path / "shar")))


def test_what_lhotse_extracts_and_stores_is_a_cache(tmp_path: Path) -> None:
    tone = np.sin(np.arange(HZ) / 30).astype(np.float32)
    recordings = []
    for number in range(3):
        path = tmp_path / f"tone-{number}.wav"
        lhotse.audio.backend.save_audio(path, tone[None, : HZ // 2 + 100 * number], HZ)
        recordings.append(lhotse.Recording.from_file(path, recording_id=f"tone-{number}"))
    cuts = lhotse.CutSet.from_manifests(lhotse.RecordingSet.from_recordings(recordings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cuts = cuts.compute_and_store_features(
            lhotse.Fbank(), tmp_path / "fbank", storage_type=io.LilcomChunkyWriter
        )
    cuts.to_file(tmp_path / "cuts.jsonl")
    with adopted(tmp_path / "cuts.jsonl", tmp_path, feature="fbank") as cache:
        assert_holds(cache, "fbank", {cut.id: cut.load_features() for cut in cuts})


def test_a_manifest_of_features_has_the_ids_of_recordings(tmp_path: Path) -> None:
    features = [cut.features for cut in whole_cuts("numpy_hdf5", tmp_path)]
    lhotse.FeatureSet.from_features(features).to_file(tmp_path / "feats.jsonl.gz")
    with adopted(tmp_path / "feats.jsonl.gz", tmp_path) as cache:
        assert_holds(cache, "feats", {each.recording_id: each.load() for each in features})
        assert annotation(cache, "duration")["rec/0"] == features[0].duration


def test_texts_and_speakers_come_along(tmp_path: Path) -> None:
    first, second = whole_cuts("numpy_hdf5", tmp_path, count=2)
    second.supervisions[0].speaker = "berta"
    second.supervisions[1].text = None
    first.custom["mixed"], second.custom["mixed"] = 1, "one"
    lhotse.CutSet.from_cuts([first, second]).to_file(tmp_path / "cuts.jsonl")
    with adopted(tmp_path / "cuts.jsonl", tmp_path) as cache:
        found = {name: [*annotation(cache, name).values()] for name in cache.annotations}
    assert found == {
        "duration": [first.duration, second.duration],
        "text": ["hello world", "world"],
        "speaker": ["anna", None],
        "language": ["en", "en"],
        "gender": ["F", "F"],
        "recording": ["rec/0", "rec/1"],
        "snr": [3.5, 4.5],
        "codes": [[1, 2, 0], [1, 2, 1]],
    }


def test_frames_know_their_times(tmp_path: Path) -> None:
    cuts = whole_cuts("lilcom_chunky", tmp_path, count=1)
    lhotse.CutSet.from_cuts(cuts).to_file(tmp_path / "cuts.jsonl")
    with adopted(tmp_path / "cuts.jsonl", tmp_path) as cache:
        piece = cache.table.segments({"piece": (cuts[0].id, 0.12, 0.32)})
        assert [int(piece.lengths(name)[0]) for name in ("feats", "alignment")] == [20, 5]


def test_relative_paths_begin_at_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cuts = whole_cuts("numpy_files", Path("data/fbank"), count=2)
    assert not Path(cuts[0].features.storage_path).is_absolute()
    Path("manifests").mkdir()
    lhotse.CutSet.from_cuts(cuts).to_file("manifests/cuts.jsonl.gz")
    with adopted(Path("manifests/cuts.jsonl.gz"), tmp_path) as cache:
        monkeypatch.chdir("/")
        assert set(cache.ids) == {cut.id for cut in cuts}
        array = cache.read(cuts[0].id, "feats")
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(array, cuts[0].load_features())


def test_a_frame_that_lhotse_would_repeat_is_not_invented(tmp_path: Path) -> None:
    array = np.random.default_rng(2).standard_normal((50, 4), np.float32)
    with io.NumpyHdf5Writer(tmp_path / "feats") as writer:
        cut = cut_of("rec", writer, array)
    cut.duration = 0.51
    lhotse.CutSet.from_cuts([cut]).to_file(tmp_path / "cuts.jsonl")
    assert len(cut.load_features()) == 51
    with adopted(tmp_path / "cuts.jsonl", tmp_path) as cache:
        assert_holds(cache, "feats", {cut.id: array})
