"""`CollectStatsRunner`: the files that ESPnet reads, whoever made them, and what is kept when
something goes wrong.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collect_stats_helpers import (
    DIMS,
    Provider,
    Utterances,
    assert_right,
    calls,
    collect,
    files_of,
    id_of,
    speech_of,
)

import featcache
from featcache import FeatureStats, GlobalMVN
from featcache.errors import ComputeError, StaleCacheError
from featcache.espnet import CollectStatsRunner, build_batch_sampler


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def split(folder: Path) -> Path:
    return folder / "stats" / "train"


def test_statistics_and_shapes_are_those_of_all_utterances(folder: Path, split: Path) -> None:
    merged = collect(Provider(folder))
    assert_right(split, range(30))
    assert not (split / "feats_lengths_shape").exists()
    assert not (split / "collect_feats").exists()
    assert (split / "feat_keys_written.txt").read_text() == ""
    assert set(merged) == {"sum", "sq", "count"}
    frames = np.concatenate([speech_of(number) for number in range(30)]).astype(np.float64)
    assert merged["count"] == {"feats": len(frames), "first": 30}
    np.testing.assert_allclose(merged["sum"]["feats"], frames.sum(0), rtol=1e-12)
    np.testing.assert_allclose(merged["sq"]["feats"], (frames**2).sum(0), rtol=1e-12)


def test_any_batch_size_gives_the_same_statistics(folder: Path, split: Path) -> None:
    collect(Provider(folder), batch_size=None)
    assert_right(split, range(30))


def test_collected_features_are_in_a_cache_and_in_files_that_espnet_reads(
    folder: Path, split: Path
) -> None:
    collect(Provider(folder), write_collected_feats=True)
    assert_right(split, range(30))
    cache = featcache.open(split / "collect_feats", verify="arrays")
    assert cache.complete
    assert (split / "feat_keys_written.txt").read_text() == "feats\nfirst\n"
    lines = (split / "collect_feats" / "feats.scp").read_text().splitlines()
    assert [line.split()[0] for line in lines] == list(cache) == sorted(map(id_of, range(30)))
    paths = dict(line.split(maxsplit=1) for line in lines)
    for number in range(30):
        np.testing.assert_array_equal(
            cache.read(id_of(number), "feats"), speech_of(number), strict=True
        )
        np.testing.assert_array_equal(np.load(paths[id_of(number)]), speech_of(number), strict=True)
        np.testing.assert_array_equal(cache.read(id_of(number), "first"), speech_of(number)[:1])


def test_all_keys_of_espnet3_are_counted_when_they_are_asked_for(folder: Path, split: Path) -> None:
    collect(Provider(folder, size=9), 9, all_keys=True, write_collected_feats=True)
    frames = [len(speech_of(number)) for number in range(9)]
    keys = ["feats", "feats_lengths", "first"]
    assert (split / "stats_keys").read_text().split() == keys
    stats = FeatureStats.load(split / "feats_lengths_stats.npz")
    assert stats.count == 9
    assert [stats.sum, stats.sum_square] == pytest.approx([sum(frames), np.square(frames).sum()])
    shapes = {path.name: path.read_text().splitlines() for path in split.glob("*_shape")}
    assert {*shapes} == {f"{key}_shape" for key in (*keys, "speech", "text", "number")}
    assert shapes["feats_lengths_shape"] == sorted(f"{id_of(number)} 1" for number in range(9))
    assert shapes["speech_shape"] == sorted(f"{id_of(n)} {frames[n]},{DIMS}" for n in range(9))
    assert shapes["text_shape"] == sorted(f"{id_of(n)} {n % 4}" for n in range(9))
    cache = featcache.open(split / "collect_feats")
    assert cache.lengths("feats").sum() == sum(frames)
    listed = (split / "collect_feats" / "feats_lengths.scp").read_text().splitlines()
    paths = dict(line.split(maxsplit=1) for line in listed)
    assert [np.load(paths[id_of(n)]).tolist() for n in range(9)] == [[n] for n in frames]
    with pytest.raises(StaleCacheError, match="all_keys"):
        collect(Provider(folder, size=9), 9, write_collected_feats=True)


def test_samplers_and_normalisation_read_the_files(folder: Path, split: Path) -> None:
    collect(Provider(folder), write_collected_feats=True)
    cache = featcache.open(split / "collect_feats")
    given: Any = {"type": "numel", "batch_bins": 300}
    from_files = build_batch_sampler(**given, shape_files=[str(split / "feats_shape")])
    lengths = cache.lengths("feats")
    from_rows = build_batch_sampler(
        **given, lengths=[np.stack([lengths, np.full_like(lengths, DIMS)], axis=1)]
    )
    ids = list(cache)
    assert list(from_files) == [[ids[int(row)] for row in batch] for batch in from_rows]

    mvn = GlobalMVN.from_stats(FeatureStats.load(split / "feats_stats.npz"))
    frames = torch.from_numpy(np.concatenate([speech_of(number) for number in range(30)]))
    normalised = mvn(frames)
    torch.testing.assert_close(normalised.mean(0), torch.zeros(DIMS), atol=1e-5, rtol=0)
    torch.testing.assert_close(normalised.std(0, correction=0), torch.ones(DIMS))


def test_the_same_call_again_computes_nothing(folder: Path, split: Path) -> None:
    collect(Provider(folder))
    before = files_of(split)
    collect(Provider(folder))
    assert files_of(split) == before
    assert calls(folder) == list(range(30))


def test_a_failing_utterance_is_named_and_the_rest_is_not_computed_again(
    folder: Path, split: Path
) -> None:
    with pytest.raises(
        ComputeError,
        match=r"of 'spk2/utt-17' failed with ValueError: cannot compute 17; .* is kept",
    ):
        collect(Provider(folder, fails=[17]))
    assert calls(folder)[:16] == list(range(16))
    (folder / "calls").unlink()
    collect(Provider(folder), batch_size=5)
    assert sorted(calls(folder)) == list(range(16, 30))
    assert_right(split, range(30))


def test_a_run_that_goes_on_writes_the_same_bytes(folder: Path, split: Path) -> None:
    with pytest.raises(ComputeError):
        collect(Provider(folder, size=600, fails=[350]), 600, batch_size=1)
    collect(Provider(folder, size=600), 600, batch_size=1)
    found = files_of(split)
    collect(Provider(folder, size=600), 600, batch_size=1, resume=False)
    assert found == files_of(split)


@pytest.mark.parametrize(("loads", "named"), [(True, "'spk2/utt-5'"), (False, "utterance 5")])
def test_an_utterance_of_a_data_set_without_ids_is_named_by_what_it_loads(
    folder: Path, loads: bool, named: str
) -> None:
    class Nameless(Utterances):
        def __getitem__(self, index: int) -> Any:
            if index == 5 and not loads:
                raise OSError("damaged")
            return super().__getitem__(index)

    class NamelessProvider(Provider):
        def build_env_local(self) -> dict[str, object]:
            utterances = Nameless(30)
            del utterances.ids
            return {**super().build_env_local(), "dataset": utterances}

    with pytest.raises(ComputeError, match=f"statistics of {named} failed"):
        collect(NamelessProvider(folder, fails=[5]), batch_size=None)


def test_more_and_fewer_utterances_are_no_problem(folder: Path, split: Path) -> None:
    for count in (20, 30, 11, 30):
        collect(Provider(folder), count, write_collected_feats=True)
        assert_right(split, range(count))
        assert len((split / "collect_feats" / "feats.scp").read_text().splitlines()) == count
    assert calls(folder).count(25) == 2  # the shard that held it was of no use for 11


def test_features_that_are_wanted_later_are_computed_then(folder: Path, split: Path) -> None:
    collect(Provider(folder))
    collect(Provider(folder), write_collected_feats=True)
    assert len(featcache.open(split / "collect_feats")) == 30
    assert_right(split, range(30))


def test_features_that_were_lost_are_computed_again(folder: Path, split: Path) -> None:
    collect(Provider(folder), write_collected_feats=True)
    (split / "collect_feats").rename(folder / "away")
    collect(Provider(folder), write_collected_feats=True)
    assert len(featcache.open(split / "collect_feats", verify="arrays")) == 30


def test_a_damaged_shard_is_made_again(folder: Path, split: Path) -> None:
    collect(Provider(folder))
    before = files_of(split)
    (damaged, *_) = sorted((split / "shards").glob("*/feats_shape"))
    damaged.write_text(damaged.read_text().replace("1", "2"))
    collect(Provider(folder))
    assert files_of(split) == before
    assert len(calls(folder)) == 34


def test_a_shard_that_is_there_twice_counts_once(folder: Path, split: Path) -> None:
    collect(Provider(folder))
    shard, *_ = (split / "shards").glob("split.*")
    shutil.copytree(shard, shard.with_name("split.copy"))
    collect(Provider(folder))
    assert_right(split, range(30))


def test_statistics_of_another_model_are_not_mixed_in(folder: Path, split: Path) -> None:
    with pytest.raises(ComputeError):
        collect(Provider(folder, fails=[17]))
    with pytest.raises(
        StaleCacheError, match=r"(?s)modules.scale.weights: was .*, now .*resume=False"
    ):
        collect(Provider(folder, scale=2.0))
    collect(Provider(folder, scale=2.0), resume=False)
    assert FeatureStats.load(split / "feats_stats.npz").mean.min() > 18


def test_arguments_of_collect_feats_are_passed_on_and_noted(folder: Path, split: Path) -> None:
    class Louder(Provider):
        def build_env_local(self) -> dict[str, object]:
            return {**super().build_env_local(), "collect_stats_kwargs": {"gain": 2.0}}

    collect(Louder(folder))
    assert FeatureStats.load(split / "feats_stats.npz").mean.min() > 18
    with pytest.raises(
        StaleCacheError, match=r"collect_stats_kwargs.gain: was \"2.0\", now \(absent\)"
    ):
        collect(Provider(folder))


def test_a_model_that_failed_at_once_may_be_mended(folder: Path, split: Path) -> None:
    with pytest.raises(ComputeError):
        collect(Provider(folder, scale=2.0, fails=[3]), write_collected_feats=True)
    collect(Provider(folder), write_collected_feats=True)
    assert_right(split, range(30))


def test_what_is_done_with_its_features_may_be_ended_without(folder: Path, split: Path) -> None:
    with pytest.raises(ComputeError):
        collect(Provider(folder, fails=[17]), write_collected_feats=True)
    collect(Provider(folder))
    assert_right(split, range(30))
    assert (split / "feat_keys_written.txt").read_text() == ""


def test_starting_anew_leaves_nothing_of_before(folder: Path, split: Path) -> None:
    collect(Provider(folder), 20, write_collected_feats=True)
    collect(Provider(folder), 10, write_collected_feats=True, resume=False)
    assert len(featcache.open(split / "collect_feats")) == 10
    assert_right(split, range(10))


def test_hooks_can_be_used_and_replaced_one_by_one(folder: Path, split: Path) -> None:
    class Doubled(CollectStatsRunner):
        @staticmethod
        def write_record(
            writers: dict[str, Any], result: Any, state: dict[str, Any], **env: Any
        ) -> None:
            stats, shapes = result
            assert env["device"] == "cpu"
            twice = {f"{key}_again": value for key, value in stats.items()}
            CollectStatsRunner.write_record(writers, ({**stats, **twice}, shapes), state)

    merged = Doubled(Provider(folder), folder / "stats", "train", batch_size=4)(range(30))
    assert merged["count"]["feats_again"] == merged["count"]["feats"]
    assert FeatureStats.load(split / "feats_again_stats.npz").count == merged["count"]["feats"]


def test_hooks_write_a_shard_as_espnet_does(folder: Path) -> None:
    env: dict[str, Any] = {**Provider(folder).build_env_local(), "write_collected_feats": True}
    state: dict[str, Any] = {}
    writers = CollectStatsRunner.open_writers(folder / "split.0", **env)
    assert {"_shard_dir", "_write_feats", "shape_handles", "feat_writers"} <= set(writers)
    for batch in ([0, 1], 2):
        CollectStatsRunner.write_record(
            writers, CollectStatsRunner.forward(batch, **env), state, **env
        )
    CollectStatsRunner.close_writers(writers)
    assert (folder / "split.0" / "feats_shape").read_text() == "".join(
        f"{id_of(n)} {len(speech_of(n))},{DIMS}\n" for n in range(3)
    )
    _, path = (
        (folder / "split.0" / "collect_feats" / "feats.scp").read_text().splitlines()[2].split()
    )
    np.testing.assert_array_equal(np.load(path), speech_of(2))
    assert state["feats"].count == sum(len(speech_of(n)) for n in range(3))
