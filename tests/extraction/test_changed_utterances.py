"""Utterances whose recordings change after their features were computed."""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recordings import Recorder, Recordings, assert_holds, recorder
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataloader import make_dataloader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as LoaderIterator

import featcache
from featcache import CacheWriter
from featcache.errors import ComputeError, ConfigError, StaleCacheError
from featcache.extraction.checking import read_probe
from featcache.format import read_manifest
from featcache.writing import queue
from featcache.writing.part_writer import PartWriter

STORED = ("utt-0", "utt-1", "utt-2")
TWO_PROCESSES = {"batch_size": 2, "num_workers": 2}


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    return Recordings(tmp_path / "recordings")


@pytest.fixture
def brain(tmp_path: Path) -> Recorder:
    found: Recorder = recorder(tmp_path / "features")
    return found


def cached(brain: Any, recordings: Recordings, **settings: Any) -> featcache.Cache:
    # without a probe, which loads and computes, too
    settings = {"loader_kwargs": {"batch_size": 2}, "check": None, **settings}
    return featcache.open(brain.cache_features(recordings.dataset(), **settings).path)


@pytest.mark.parametrize("loader_kwargs", [{}, TWO_PROCESSES, {"batch_size": 1, "num_workers": 1}])
def test_a_changed_recording_is_named_and_recomputed_alone(
    brain: Any, recordings: Recordings, loader_kwargs: Any
) -> None:
    cached(brain, recordings, loader_kwargs=loader_kwargs)
    brain.computed_now(), recordings.loaded()
    recordings.record("utt-3", seed=33)
    with pytest.raises(StaleCacheError, match=r"1 utterance .*: 'utt-3'; on_changed='recompute'"):
        cached(brain, recordings, loader_kwargs=loader_kwargs)
    # twice to see that it is not random
    assert set(recordings.loaded()) == {"utt-3"}
    assert brain.computed_now() == []
    cache = cached(brain, recordings, loader_kwargs=loader_kwargs, on_changed="recompute")
    assert brain.computed_now() == ["utt-3"]
    assert set(recordings.loaded()) == {"utt-3"}
    assert cache.complete
    assert_holds(cache, recordings.truth())
    cached(brain, recordings)
    assert not recordings.loaded()


@pytest.mark.parametrize("loader_kwargs", [{}, TWO_PROCESSES])
def test_changed_recordings_of_the_probe_are_recomputed_too(
    brain: Any, recordings: Recordings, loader_kwargs: Any
) -> None:
    settings = {"loader_kwargs": loader_kwargs, "check": "probe"}
    cached(brain, recordings, **settings)
    for number, id in enumerate(list(recordings.listed)[:-1]):
        recordings.record(id, seed=40 + number)
    with pytest.raises(StaleCacheError, match="on_changed='recompute'"):
        cached(brain, recordings, **settings)
    cache = cached(brain, recordings, **settings, on_changed="recompute")
    assert_holds(cache, recordings.truth())
    brain.computed_now()
    again = cached(brain, recordings, **settings)
    assert again.complete
    assert len(set(brain.computed_now())) == 4  # the new probe


def test_two_recordings_that_change_places_are_named(brain: Any, recordings: Recordings) -> None:
    cached(brain, recordings)
    one, other = recordings.listed["utt-1"], recordings.listed["utt-2"]
    one["wav"], other["wav"] = other["wav"], one["wav"]
    with pytest.raises(StaleCacheError, match=r"2 utterances .*'utt-1', 'utt-2'"):
        cached(brain, recordings)


def touched(recordings: Recordings) -> None:
    os.utime(recordings.listed["utt-1"]["wav"], ns=(1, 1))


def moved(recordings: Recordings) -> None:
    folder = recordings.folder.rename(recordings.folder.with_name("elsewhere"))
    recordings.folder, recordings.loads = folder, folder / "loads"
    for listed in recordings.listed.values():
        listed["wav"] = str(folder / Path(listed["wav"]).name)


def converted(recordings: Recordings) -> None:
    recordings.convert("utt-1")


def corrected(recordings: Recordings) -> None:
    recordings.listed["utt-1"]["words"] = "number one"


HARMLESS = [touched, moved, converted, corrected]


@pytest.mark.parametrize("change", HARMLESS)
def test_a_recording_of_the_same_samples_is_looked_at_once(
    brain: Any, recordings: Recordings, change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cached(brain, recordings)
    recordings.loaded()
    change(recordings)
    before = brain.computed_now()
    cached(brain, recordings)
    assert "utt-1" in recordings.loaded()
    assert brain.computed_now() == [] != before
    # its new entry is stored
    cache = cached(brain, recordings)
    assert not recordings.loaded()
    assert cache.complete
    assert not caplog.records
    # and the input is still compared
    recordings.record("utt-1", seed=11)
    with pytest.raises(StaleCacheError, match="'utt-1'"):
        cached(brain, recordings)


def test_in_a_cache_that_nobody_can_write_to_what_looks_changed_is_loaded_by_each_call(
    small_disk: Path, recordings: Recordings
) -> None:
    brain = recorder(small_disk / "features")
    cached(brain, recordings)
    recordings.loaded()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    touched(recordings)
    cached(brain, recordings)
    assert recordings.loaded() == ["utt-1"]
    cached(brain, recordings)
    assert recordings.loaded() == ["utt-1"]
    recordings.record("utt-1", seed=11)
    with pytest.raises(StaleCacheError, match="'utt-1'"):
        cached(brain, recordings)


def test_features_outlive_their_recordings(
    brain: Any, recordings: Recordings, caplog: pytest.LogCaptureFixture
) -> None:
    cached(brain, recordings)
    shutil.rmtree(recordings.folder)
    recordings.folder.mkdir()
    cache = cached(brain, recordings)
    assert len(cache) == 6
    assert "6 utterances" in caplog.text
    assert "cannot be loaded" in caplog.text


def test_random_items_are_not_compared(
    brain: Any, recordings: Recordings, caplog: pytest.LogCaptureFixture
) -> None:
    def noisy(wav: str) -> torch.Tensor:
        sound = recordings.load(wav)
        return sound + torch.rand(len(sound))

    dataset = recordings.dataset()
    noisy_set = type(dataset)(
        recordings.listed, [{"func": noisy, "takes": ["wav"], "provides": "sig"}], ["id", "sig"]
    )
    brain.cache_features(noisy_set)
    touched(recordings)
    brain.cache_features(noisy_set)
    assert "are random" in caplog.text


def test_what_a_stopped_run_has_stored_is_compared_too(brain: Any, recordings: Recordings) -> None:
    brain.stops_at = "utt-4"
    with pytest.raises(KeyboardInterrupt):
        cached(brain, recordings)
    brain.stops_at = None
    assert brain.computed_now() == ["utt-0", "utt-1", "utt-2", "utt-3"]
    recordings.record("utt-2", seed=22)
    with pytest.raises(StaleCacheError, match="'utt-2'"):
        cached(brain, recordings)
    cache = cached(brain, recordings, on_changed="recompute")
    assert brain.computed_now() == ["utt-2", "utt-4", "utt-5"]
    assert_holds(cache, recordings.truth())


def killed_in(call: Callable[[], object], owner: Any, method: str, times: int) -> None:
    """Make a call in another process, which is killed when a method has returned for the nth time.

    What is written until then is committed.
    """
    if not (child := os.fork()):
        queue.COMMIT_INTERVAL_S = 0.0
        found, returned = getattr(owner, method), itertools.count(1)

        def killing(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            if next(returned) == times:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, method, killing)
        try:
            call()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_what_a_killed_run_has_stored_is_compared_before_the_probe_speaks(
    brain: Any, recordings: Recordings
) -> None:
    settings = {"check": "probe", "loader_kwargs": {"batch_size": 1}}
    killed_in(lambda: cached(brain, recordings, **settings), PartWriter, "write", 3)
    for id in STORED:  # one of them is in the probe: it has four of six
        recordings.record(id, seed=22)
    with pytest.raises(StaleCacheError, match=r"'utt-2'; on_changed='recompute'"):
        cached(brain, recordings, **settings)
    cache = cached(brain, recordings, **settings, on_changed="recompute")
    assert_holds(cache, recordings.truth())


@pytest.mark.parametrize(("method", "times"), [("delete", 1), ("keep_file", 1)])
def test_a_killed_recomputation_goes_on(
    brain: Any, recordings: Recordings, method: str, times: int
) -> None:
    cached(brain, recordings, check="probe")
    for id in STORED:
        recordings.record(id, seed=22)
    settings = {"check": "probe", "on_changed": "recompute"}
    killed_in(lambda: cached(brain, recordings, **settings), CacheWriter, method, times)
    cache = cached(brain, recordings, **settings)
    assert_holds(cache, recordings.truth())
    brain.computed_now()
    cached(brain, recordings, check="probe")
    assert len(brain.computed_now()) == 4


def test_a_recording_mended_before_it_was_stored_refuses_nothing(
    brain: Any, recordings: Recordings
) -> None:
    settings = {"check": "probe", "loader_kwargs": {"batch_size": 1}}
    killed_in(lambda: cached(brain, recordings, **settings), PartWriter, "write", 3)
    for id in set(recordings.listed) - set(STORED):
        recordings.record(id, seed=50)
    assert_holds(cached(brain, recordings, **settings), recordings.truth())


def test_a_change_beside_the_probe_is_not_offered_to_be_accepted(
    brain: Any, recordings: Recordings
) -> None:
    cached(brain, recordings, check="probe")
    (beside, *_) = set(recordings.listed) - set(read_probed(brain))
    recordings.record(beside, seed=33)
    with pytest.raises(StaleCacheError, match=beside) as refused:
        cached(brain, recordings, check="probe")
    assert "accept" not in str(refused.value)


def read_probed(brain: Any) -> list[str]:
    path = brain.hparams.storage.path("train")
    probe = read_probe(path, read_manifest(path), building=False)
    assert probe is not None
    return list(probe.utterances)


def test_a_recording_that_changes_while_it_waits_is_noticed(
    brain: Any, recordings: Recordings
) -> None:
    class Late(type(brain)):  # type: ignore[misc]
        def compute_features(self, batch: Any, stage: Any) -> Any:
            if "utt-0" in batch.id:
                # it has been loaded ahead, in another process
                while "utt-1" not in recordings.loads.read_text():
                    time.sleep(0.01)
                recordings.record("utt-1", seed=11)
            return super().compute_features(batch, stage)

    brain.__class__ = Late
    settings = {
        "loader_kwargs": {"batch_size": 1, "num_workers": 1},
        "fingerprint": {"source": None, "constants": None},
    }
    cached(brain, recordings, **settings)
    brain.__class__ = Recorder
    with pytest.raises(StaleCacheError, match="'utt-1'"):
        cached(brain, recordings, **settings)


def test_overwriting_compares_nothing(brain: Any, recordings: Recordings) -> None:
    cached(brain, recordings)
    recordings.record("utt-1", seed=11)
    cache = cached(brain, recordings, overwrite=True)
    assert_holds(cache, recordings.truth())


def test_an_unknown_choice_is_refused(brain: Any, recordings: Recordings) -> None:
    with pytest.raises(ConfigError, match="'raise' or 'recompute', not 'skip'"):
        cached(brain, recordings, on_changed="skip")


# Loaders, given as they are


def backwards(items: list[Any]) -> Any:
    return PaddedBatch(items[::-1])


@pytest.mark.parametrize("processes", [0, 1])
def test_a_loader_as_it_is_stamps_its_items_and_stays_as_it_was(
    brain: Any, recordings: Recordings, processes: int
) -> None:
    from speechbrain.dataio.dataloader import SaveableDataLoader

    dataset = recordings.dataset()
    for kind in (torch.utils.data.DataLoader, SaveableDataLoader):
        loader = kind(dataset, batch_size=2, collate_fn=backwards, num_workers=processes)
        brain.cache_features(loader, split=kind.__name__)
        assert loader.collate_fn is backwards
        assert isinstance(next(iter(loader)), PaddedBatch)
        brain.cache_features(loader, split=kind.__name__)
    recordings.record("utt-5", seed=55)
    for kind in (torch.utils.data.DataLoader, SaveableDataLoader):
        with pytest.raises(StaleCacheError, match="'utt-5'"):
            brain.cache_features(
                kind(dataset, batch_size=2, collate_fn=backwards), split=kind.__name__
            )


class Doubling(torch.utils.data.DataLoader):  # type: ignore[type-arg]
    """Makes something else of its batches."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            assert isinstance(batch, PaddedBatch)
            yield batch


def test_loaders_that_keep_processes_or_change_batches_are_left_alone(
    brain: Any, recordings: Recordings
) -> None:
    dataset = recordings.dataset()
    brain.cache_features(Doubling(dataset, batch_size=2, collate_fn=PaddedBatch), split="one")
    kept = torch.utils.data.DataLoader(
        dataset, batch_size=2, collate_fn=PaddedBatch, num_workers=1, persistent_workers=True
    )
    cache = brain.cache_features(kept, split="two")
    assert isinstance(next(iter(kept)), PaddedBatch)
    assert_holds(cache, recordings.truth())


# Logged once, at the level of what needs attention


def test_recomputing_says_what_it_does(
    brain: Any, recordings: Recordings, caplog: pytest.LogCaptureFixture
) -> None:
    cached(brain, recordings)
    recordings.record("utt-1", seed=11)
    with caplog.at_level(logging.WARNING, "featcache"):
        cached(brain, recordings, on_changed="recompute")
    (record,) = caplog.records
    assert "1 utterance" in record.getMessage()
    assert "'utt-1'" in record.getMessage()


def test_a_stopped_overwrite_is_compared_when_it_goes_on(
    brain: Any, recordings: Recordings
) -> None:
    cached(brain, recordings)
    brain.stops_at = "utt-4"
    with pytest.raises(KeyboardInterrupt):
        cached(brain, recordings, overwrite=True)
    brain.stops_at = None
    recordings.record("utt-2", seed=22)
    brain.computed_now()
    cache = cached(brain, recordings, overwrite=True)
    assert brain.computed_now() == ["utt-2", "utt-4", "utt-5"]
    assert_holds(cache, recordings.truth())


@pytest.mark.parametrize("end", ["all is computed", "an error that is kept"])
@pytest.mark.parametrize("of_stream", [False, True])
def test_no_process_of_a_loader_is_left_to_the_garbage_collector(
    brain: Any, recordings: Recordings, end: str, of_stream: bool
) -> None:
    """It would close descriptors a second time, which are those of other files by then."""
    loader_kwargs = {"batch_size": 1, "num_workers": 2}
    source: Any = recordings.dataset()
    kept: list[BaseException] = []
    if of_stream:
        source = make_dataloader(source, **loader_kwargs)
    if end != "all is computed":
        brain.compute_features = fail_late(brain.compute_features)
    gc.collect()
    gc.disable()
    try:
        brain.cache_features(source, check=None, loader_kwargs=loader_kwargs, progressbar=False)
    except ComputeError as error:
        kept.append(error)
    finally:
        left = [each for each in gc.get_objects() if type(each) is LoaderIterator]
        gc.enable()
    assert bool(kept) == (end != "all is computed")
    assert not any(process.is_alive() for each in left for process in each._workers)
    assert not multiprocessing.active_children()


def fail_late(compute: Any) -> Any:
    batches = itertools.count()

    def computing(batch: Any, stage: Any) -> Any:
        if next(batches) >= 1:
            raise RuntimeError("no more")
        return compute(batch, stage)

    return computing
