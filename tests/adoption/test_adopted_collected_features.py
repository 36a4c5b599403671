"""ESPnet's collected features, in the layout that it documents, are a cache where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_stores import adopted, assert_holds, contents, random_arrays

from featcache.errors import AdoptionError


def collect(root: Path, split: str, features: dict[str, dict[str, Any]]) -> Path:
    """Write `collect_feats` as ESPnet's `collect_stats` does: paths relative to the recipe."""
    stats = Path("exp") / "asr_stats" / split
    for key, arrays in features.items():
        folder = stats / "collect_feats" / f"data_{key}"
        (root / folder).mkdir(parents=True)
        lines = []
        for id, array in arrays.items():
            (root / folder / f"{id}.npy").parent.mkdir(parents=True, exist_ok=True)
            np.save(root / folder / f"{id}.npy", array)
            lines.append(f"{id} {folder / id}.npy\n")
        (root / stats / "collect_feats" / f"{key}.scp").write_text("".join(lines))
    (root / stats / "stats_keys").write_text("".join(f"{key}\n" for key in features))
    return root / stats


@pytest.mark.parametrize("named", ["", "collect_feats", "collect_feats/feats.scp"])
def test_collected_features_are_read_bit_for_bit(tmp_path: Path, named: str) -> None:
    arrays = {f"a/{id}": array for id, array in random_arrays(1, count=99).items()}
    lengths = {id: np.array([len(array)]) for id, array in arrays.items()}
    source = collect(tmp_path, "train", {"feats": arrays, "feats_lengths": lengths})
    before = contents(source)
    with adopted(source / named, tmp_path) as cache:
        assert_holds(cache, "feats", arrays)
    assert contents(source) == before


def test_each_key_is_a_feature_whatever_the_order_of_its_scp(tmp_path: Path) -> None:
    feats = random_arrays(2)
    pitch = {id: np.ones((len(feats[id]), 1)) * n for n, id in enumerate(reversed(feats))}
    with adopted(collect(tmp_path, "train", {"feats": feats, "pitch": pitch}), tmp_path) as cache:
        assert_holds(cache, "feats", feats)
        assert_holds(cache, "pitch", pitch)


def test_an_utterance_without_all_features_is_refused_by_id(tmp_path: Path) -> None:
    feats = random_arrays(3)
    pitch = dict(feats)
    lacks = sorted(pitch)[4]
    del pitch[lacks]
    with pytest.raises(AdoptionError, match=lacks):
        adopted(collect(tmp_path, "train", {"feats": feats, "pitch": pitch}), tmp_path)


def test_a_file_that_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    feats = random_arrays(4)
    source = collect(tmp_path, "train", {"feats": feats})
    gone = source / "collect_feats" / "data_feats" / f"{sorted(feats)[7]}.npy"
    gone.unlink()
    with pytest.raises(AdoptionError, match=gone.name):
        adopted(source, tmp_path)


def test_one_file_of_two_utterances_is_read_for_both(tmp_path: Path) -> None:
    source = collect(tmp_path, "train", {"feats": random_arrays(5, count=1)})
    scp = source / "collect_feats" / "feats.scp"
    (id, path) = scp.read_text().split()
    scp.write_text(f"{id} {path}\nagain {path}\n")
    with adopted(source, tmp_path) as cache:
        assert np.array_equal(cache.read("again", "feats"), cache.read(id, "feats"))


@pytest.mark.parametrize("named", ["", "collect_feats"])
@pytest.mark.parametrize("stats_keys", [True, False])
def test_all_keys_are_adopted_however_the_folder_is_named(
    tmp_path: Path, named: str, stats_keys: bool
) -> None:
    feats = random_arrays(2)
    features: dict[str, dict[str, Any]] = {
        "feats": feats,
        "pitch": {id: np.ones((len(each), 2), np.float32) for id, each in feats.items()},
        "energy": {id: np.ones((len(each), 1)) for id, each in feats.items()},
        "energy_lengths": {id: np.array([len(each)]) for id, each in feats.items()},
    }
    source = collect(tmp_path, "train", features)
    (source / "wav.scp").write_text("utt-1 sox utt-1.flac -t wav - |\n")
    if not stats_keys:
        (source / "stats_keys").unlink()
    with adopted(source / named, tmp_path) as cache:
        assert sorted(cache.features) == ["energy", "feats", "pitch"]
        assert_holds(cache, "pitch", features["pitch"])


def test_a_key_that_would_be_passed_over_is_refused(tmp_path: Path) -> None:
    feats = random_arrays(2)
    source = collect(tmp_path, "train", {"feats": feats, "pitch": feats})
    (source / "collect_feats/pitch.scp").rename(source / "collect_feats/pitch.away")
    with pytest.raises(AdoptionError, match=r"'pitch\.scp' is named by stats_keys.*by its scp"):
        adopted(source, tmp_path)
    (source / "collect_feats/pitch.scp").write_text("utt-1 raw.ark:17\n")
    with pytest.raises(AdoptionError, match=r"'pitch\.scp' names archives.*by its scp"):
        adopted(source, tmp_path)
    with adopted(source / "collect_feats/feats.scp", tmp_path) as cache:  # that way out
        assert_holds(cache, "feats", feats)
