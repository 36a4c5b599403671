"""ESPnet's collected features, in the layout that it documents, are a cache where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_stores import adopted, assert_holds, contents, random_arrays

from featcache import AdoptionError


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
