"""ESPnet's own code, where it is installed, reads the statistics and shapes that collect-stats
writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collect_stats_helpers import Provider, collect, id_of, speech_of

import featcache

pytest.importorskip(
    "espnet2", reason="ESPnet is not installed: pip install --no-deps espnet typeguard"
)
global_mvn = pytest.importorskip("espnet2.layers.global_mvn")
batch_samplers = pytest.importorskip("espnet2.samplers.build_batch_sampler")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that collect-stats writes of 30 utterances."""
    folder = tmp_path_factory.mktemp("stats") / "run"
    collect(Provider(folder))
    return folder / "stats" / "train"


def test_its_global_mvn_has_the_mean_and_standard_deviation_of_all_frames(split: Path) -> None:
    frames = np.concatenate([speech_of(number) for number in range(30)]).astype(np.float64)
    normalise = global_mvn.GlobalMVN(split / "feats_stats.npz")
    np.testing.assert_allclose(normalise.mean, frames.mean(0), rtol=1e-12)
    # it takes the variance for a difference
    np.testing.assert_allclose(normalise.std, frames.std(0), rtol=1e-9)
    # in place: of a copy
    (normalised,), _ = normalise(torch.tensor(frames)[None], torch.tensor([len(frames)]))
    ours = featcache.GlobalMVN.from_stats(featcache.FeatureStats.load(split / "feats_stats.npz"))
    # ours holds float32
    torch.testing.assert_close(ours(torch.tensor(frames)), normalised, rtol=0, atol=1e-6)


def test_it_reads_the_statistics_and_shapes_of_a_kaldi_export(tmp_path: Path) -> None:
    frames = {f"u{number}": speech_of(number) for number in range(9)}
    with featcache.CacheWriter(
        tmp_path / "cache", [featcache.FeatureStorageConfig("fbank")]
    ) as writer:
        for id, array in frames.items():
            writer.write(id, {"fbank": array})
    cache = featcache.open(tmp_path / "cache")
    cache.to_kaldi(tmp_path / "data")
    normalise = global_mvn.GlobalMVN(tmp_path / "data" / "feats_stats.npz")
    # Kaldi's statistics, for which it takes a `.npy`
    cmvn = pytest.importorskip("kaldiio").load_mat(str(tmp_path / "data" / "cmvn.ark"))
    np.save(tmp_path / "cmvn.npy", cmvn)
    of_kaldi = global_mvn.GlobalMVN(tmp_path / "cmvn.npy")
    ours = featcache.GlobalMVN.from_cache(cache, "fbank")
    for array in frames.values():
        length = torch.tensor([len(array)])
        expected = ours(torch.from_numpy(array)[None], length)
        for theirs in (normalise, of_kaldi):
            # in place: of a copy
            found, _ = theirs(torch.tensor(array)[None], length)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    files = [str(tmp_path / "data" / "feats_shape")]
    needed: dict[str, Any] = {"batch_size": 1, "batch_bins": 60, "type": "numel"}
    theirs = batch_samplers.build_batch_sampler(shape_files=files, **needed)
    rows = featcache.espnet.build_batch_sampler("numel", batch_bins=60, lengths=cache)
    assert [[cache.id(int(row)) for row in batch] for batch in rows] == [
        [*batch] for batch in theirs
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "unsorted", "batch_size": 4},
        {"type": "sorted", "batch_size": 4},
        {"type": "folded", "batch_size": 4, "fold_lengths": [20, 2]},
        {"type": "length", "batch_bins": 60},
        {"type": "numel", "batch_bins": 300},
    ],
    ids=lambda settings: settings["type"],
)
def test_its_batch_samplers_read_the_shapes_and_make_the_batches_that_ours_make(
    split: Path, settings: dict[str, Any]
) -> None:
    files = [str(split / "feats_shape"), str(split / "text_shape")]
    needed = {"batch_size": 1, "batch_bins": 1}  # both, whatever the type
    theirs = batch_samplers.build_batch_sampler(shape_files=files, **needed | settings)
    batches = [tuple(batch) for batch in theirs]
    assert sorted(id for batch in batches for id in batch) == sorted(map(id_of, range(30)))
    assert batches == [
        tuple(batch)
        for batch in featcache.espnet.build_batch_sampler(shape_files=files, **settings)
    ]
