"""Several features in one folder: told by a pattern, or refused by name, never taken for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from foreign_stores import adopted, assert_holds, random_arrays
from npy_folders import save_all
from numpy.typing import NDArray

import featcache
from featcache.errors import AdoptionError, CacheError, ConfigError

Arrays = dict[str, NDArray[Any]]
MEL: Arrays = {f"utt_{n}": np.full((4 + 3 * n, 5), n, np.float32) for n in range(6)}
PITCH: Arrays = {id: array + 0.5 for id, array in MEL.items()}
LAYOUTS = {
    "{id}_{feature}": ("mel", "pitch"),
    "{feature}/{id}": ("mel", "pitch"),
    "{feature}-{id}": ("mel", "pitch"),
    "{id}.{feature}": ("hubert_l9", "wavlm_l9"),
}


def named(layout: str, features: dict[str, Arrays]) -> Arrays:
    return {
        layout.format(id=id, feature=feature): array
        for feature, arrays in features.items()
        for id, array in arrays.items()
    }


def write_pt(folder: Path, arrays: Arrays) -> Path:
    for name, array in arrays.items():
        (folder / f"{name}.pt").parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.from_numpy(array), folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_that_look_like_features_are_refused_and_taken_by_the_pattern(
    tmp_path: Path, layout: str, factor: int
) -> None:
    one, two = LAYOUTS[layout]
    slower = {id: np.repeat(array, factor, axis=0) for id, array in PITCH.items()}
    source = save_all(tmp_path / "all", named(layout, {one: MEL, two: slower}))
    with pytest.raises(AdoptionError, match=rf"'{one}', '{two}' of the same.*pattern='{layout}'"):
        adopted(source, tmp_path)
    with adopted(source, tmp_path, pattern=layout) as cache:
        assert_holds(cache, one, MEL)
        assert_holds(cache, two, slower)
    with adopted(source, tmp_path / "each", pattern="{id}") as cache:
        assert len(cache) == 12


def test_a_converted_folder_is_refused_and_taken_alike(tmp_path: Path) -> None:
    source = save_all(tmp_path / "all", named("{feature}/{id}", {"mel": MEL, "pitch": PITCH}))
    with pytest.raises(AdoptionError, match=r"pattern='{feature}/{id}'"):
        featcache.convert(source, tmp_path / "cache", progressbar=False)
    settings = {"pattern": "{feature}/{id}"}
    cache = featcache.convert(source, tmp_path / "cache", adopting=settings, progressbar=False)
    assert_holds(cache, "pitch", PITCH)


def test_features_of_several_shapes_say_the_pattern_too(tmp_path: Path) -> None:
    features: dict[str, Arrays] = {
        "mel": MEL,
        "pitch": {id: array[:, 0].copy() for id, array in MEL.items()},
        "duration": {id: np.arange(len(array) // 2) for id, array in MEL.items()},
    }
    source = save_all(tmp_path / "all", named("{feature}/{id}", features))
    with pytest.raises(AdoptionError, match=r"pattern='{feature}/{id}'"):
        adopted(source, tmp_path)
    with adopted(source, tmp_path, pattern="{feature}/{id}") as cache:
        for name, arrays in features.items():
            assert_holds(cache, name, arrays)


def test_an_utterance_that_lacks_a_feature_is_refused_by_id(tmp_path: Path) -> None:
    short = {id: array for id, array in PITCH.items() if id != "utt_3"}
    source = save_all(tmp_path / "all", named("{feature}/{id}", {"mel": MEL, "pitch": short}))
    with pytest.raises(AdoptionError, match=r"'utt_3'.*pattern='pitch/{id}'.*feature='pitch'"):
        adopted(source, tmp_path, pattern="{feature}/{id}")
    for feature in ("mel", "pitch"):  # as the refusal says
        adopted(source, tmp_path, pattern=f"{feature}/{{id}}", feature=feature)
    assert_holds(featcache.open(tmp_path / "cache"), "pitch", short)


def test_speakers_with_files_of_the_same_names_are_utterances(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays: Arrays = {
        f"{speaker}/{n:03d}": np.ones((int(random.integers(3, 99)), 5), np.float32)
        for speaker in ("anna", "ben", "cleo")
        for n in range(9)
    }
    with adopted(save_all(tmp_path / "all", arrays), tmp_path) as cache:
        assert_holds(cache, "feats", arrays)


@pytest.mark.parametrize("copied", [False, True])
def test_names_of_datasets_are_looked_at_too(tmp_path: Path, copied: bool) -> None:
    with h5py.File(tmp_path / "all.h5", "w") as file:
        for name, array in named("{id}_{feature}", {"mel": MEL, "pitch": PITCH}).items():
            file.create_dataset(name, data=array, dtype=">f4" if copied else "<f4")
    for settings in ({}, {"pattern": "{id}_{feature}"}):
        if not settings:
            with pytest.raises(AdoptionError, match=r"pattern='{id}_{feature}'"):
                featcache.convert(tmp_path / "all.h5", tmp_path / "new", progressbar=False)
            continue
        cache = featcache.convert(
            tmp_path / "all.h5", tmp_path / "new", adopting=settings, progressbar=False
        )
        assert_holds(cache, "pitch", PITCH)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_several_features_are_taken_by_the_pattern(tmp_path: Path, layout: str) -> None:
    one, two = LAYOUTS[layout]
    source = write_pt(tmp_path / "all", named(layout, {one: MEL, two: PITCH}))
    with pytest.raises(AdoptionError, match=rf"'{one}', '{two}' of the same.*pattern='{layout}'"):
        adopted(source, tmp_path)
    both = adopted(source, tmp_path, pattern=layout)
    assert_holds(both, one, MEL)
    assert_holds(both, two, PITCH)
    name = layout.format(id="utt_0", feature=one)
    torch.save({"mel": torch.ones(2, 3)}, source / f"{name}.pt")
    with pytest.raises(ConfigError, match="dicts in files of this source name features"):
        adopted(source, tmp_path / "new", pattern=layout)


def test_one_file_of_tensors_by_id_is_adopted_by_its_name(tmp_path: Path) -> None:
    arrays = random_arrays(4)
    tensors = {id: torch.from_numpy(array) for id, array in arrays.items()}
    (tmp_path / "all").mkdir()
    torch.save(tensors, tmp_path / "all" / "emb.pt")
    with pytest.raises(AdoptionError, match=r"'emb\.pt' alone holds 30 .* name the file itself"):
        adopted(tmp_path / "all", tmp_path)
    with adopted(tmp_path / "all" / "emb.pt", tmp_path, feature="emb") as cache:
        assert_holds(cache, "emb", arrays)
    with adopted(tmp_path / "all", tmp_path / "one", pattern="{id}") as cache:
        assert list(cache) == ["emb"]
        assert len(cache.features) == 30
    torch.save({**tensors, "text": "words"}, tmp_path / "all" / "emb.pt")
    with pytest.raises(AdoptionError, match=r"more than tensors by id, such as 'text'.*'{id}'"):
        adopted(tmp_path / "all" / "emb.pt", tmp_path / "two")
    torch.save(tensors["spk0-utt00"], tmp_path / "all" / "anna.pt")
    with adopted(tmp_path / "all" / "anna.pt", tmp_path / "three") as cache:
        assert_holds(cache, "feats", {"anna": arrays["spk0-utt00"]})


def test_what_is_adopted_into_a_cache_of_other_utterances_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mel").mkdir()
    (tmp_path / "other").mkdir()
    save_all(tmp_path / "mel", MEL)
    save_all(tmp_path / "other", {f"x{id}": array for id, array in PITCH.items()})
    cache = featcache.adopt(tmp_path / "mel", tmp_path / "cache", feature="mel")
    with pytest.raises(CacheError, match="holds other utterances, none of these"):
        featcache.adopt(tmp_path / "other", tmp_path / "cache", feature="pitch")
    assert list(featcache.open(tmp_path / "cache")) == list(cache)
    (tmp_path / "pitch").mkdir()
    save_all(tmp_path / "pitch", PITCH)
    both = featcache.adopt(tmp_path / "pitch", tmp_path / "cache", feature="pitch")
    assert both.features == ("mel", "pitch")
    assert list(both) == list(cache)
