"""Filling a cache by reading from many processes: workers, ranks, runs at once, and killed ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from places import ROOT
from torchrun import run_ranks

import featcache
from featcache import FeatureStorageConfig
from featcache.container_files.lock import NAME as LOCK
from featcache.container_files.lock import WriterLock
from featcache.declaration import by_name
from featcache.format import JOURNAL, read_manifest
from featcache.lazy import share
from featcache.reading import Unpublished

HERE = Path(__file__).parent
EPOCH = """
import sys
import torch
from speechbrain.dataio.dataloader import SaveableDataLoader
from torch.utils.data import DataLoader
import computing
import featcache

def main(context, workers, count, epochs):
    dataset = computing.utterances(count)
    dataset = dataset.filtered_sorted(sort_key="number")  # a deep copy of the pipeline
    for _ in range(epochs):
        loader = SaveableDataLoader(
            dataset, batch_size=None, num_workers=workers,
            multiprocessing_context=context if workers else None,
        )
        seen = 0
        for item in loader:
            assert torch.equal(item["feats"], computing.frames_of(item["number"])), item["id"]
            seen += 1
        assert seen == count
"""
MAIN = (
    EPOCH
    + """
if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
"""
)
RANKS = (
    EPOCH
    + """
import os
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dataset = computing.utterances(200)
    for epoch in range(2):
        for item in DataLoader(dataset, batch_size=None, num_workers=1):
            assert torch.equal(item["feats"], computing.frames_of(item["number"]))
            dist.all_reduce(item["feats"].sum())  # ranks go in step, as in training
"""
)


def environment(place: Path, pace_s: float = 0.0) -> dict[str, str]:
    paths = [ROOT, ROOT / "backends", HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PLACE": str(place),
        "PACE_S": str(pace_s),
        "OMP_NUM_THREADS": "1",
    }


def start(
    place: Path, script: str, *arguments: object, pace_s: float = 0.0
) -> subprocess.Popen[str]:
    place.mkdir(exist_ok=True)
    file = place / "script.py"
    file.write_text(script)
    command = [sys.executable, "-W", "ignore", str(file), *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environment(place, pace_s),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert "was not closed" not in output


def computed(place: Path) -> Counter[str]:
    return Counter((place / "computed").read_text().split())


def assert_holds(place: Path, count: int) -> None:
    cache = featcache.open(place / "cache", verify="arrays", check_reads=True)
    reader = cache.reader("feats")
    assert sorted(cache.ids) == sorted(f"utt-{number}" for number in range(count))
    for number in range(count):
        expected = torch.arange(8 * (number % 13 + 1), dtype=torch.float32).reshape(-1, 8) + number
        assert torch.equal(reader(f"utt-{number}"), expected)
    assert cache.stats("feats").count == sum(number % 13 + 1 for number in range(count))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_that_leave_at_once_have_stored_all(tmp_path: Path, context: str) -> None:
    end(start(tmp_path, MAIN, context, 2, 200, 2))
    assert {*computed(tmp_path)} == {f"utt-{number}" for number in range(200)}
    # the first one of each worker twice; in the second epoch four by the first worker
    assert sum(computed(tmp_path).values()) <= 206
    assert_holds(tmp_path, 200)


def test_runs_at_once_compute_little_twice_and_none_is_locked_out(tmp_path: Path) -> None:
    runs = [start(tmp_path, MAIN, "fork", workers, 200, 1, pace_s=0.01) for workers in (0, 1, 2)]
    end(*runs)
    counts = computed(tmp_path)
    assert len(counts) == 200
    assert sum(counts.values()) <= 216
    assert_holds(tmp_path, 200)


def test_two_ranks_in_step_compute_little_twice(tmp_path: Path) -> None:
    run_ranks(RANKS, tmp_path, environment=environment(tmp_path, 0.002))
    counts = computed(tmp_path)
    assert len(counts) == 200
    assert sum(counts.values()) <= 216
    assert_holds(tmp_path, 200)


def test_a_killed_run_loses_two_seconds_at_most_and_the_next_one_goes_on(tmp_path: Path) -> None:
    run = start(tmp_path, MAIN, "fork", 2, 400, 1, pace_s=0.02)
    until = time.monotonic() + 60
    while not (tmp_path / "computed").exists() or len(computed(tmp_path)) < 250:
        assert run.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    end(start(tmp_path, MAIN, "fork", 2, 400, 1, pace_s=0.02))
    counts = computed(tmp_path)
    again = sum(counts.values()) - 400
    # 100 a second at most: two seconds between commits, and what one takes
    assert again <= 260
    assert_holds(tmp_path, 400)


def test_a_run_goes_on_beside_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "PATIENCE_S", 0.2)
    run = start(tmp_path, HANGS)
    assert run.stdout is not None
    assert run.stdout.readline() == "computing\n"
    with featcache.through(tmp_path / "cache", length_of) as read:
        assert read("utt-1") == [5]
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()


def test_what_a_killed_one_had_claimed_is_computed_by_another(tmp_path: Path) -> None:
    run = start(tmp_path, HANGS)
    assert run.stdout is not None
    assert run.stdout.readline() == "computing\n"
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    begun = time.monotonic()
    with featcache.through(tmp_path / "cache", length_of) as read:
        assert read("utt-1") == [5]
    assert time.monotonic() - begun < share.PATIENCE_S / 2
    assert not (tmp_path / "cache" / "work-through").exists()


def test_what_a_killed_one_had_not_committed_is_not_served_while_others_hold_its_lock(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, WRITES)
    assert run.stdout is not None
    assert run.stdout.readline() == "written\n"
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    (journal,) = open_journals(tmp_path / "cache")
    manifest = read_manifest(tmp_path / "cache")
    features = [FeatureStorageConfig.from_json(each) for each in manifest.features.values()]
    for name in (LOCK, None):  # who looks whether it lives holds the file alone; recovery all of it
        held = WriterLock(journal.parent) if name is None else FileLock(journal.parent / name)
        if isinstance(held, FileLock):
            held.acquire()
        unpublished = Unpublished(tmp_path / "cache", by_name(features))
        unpublished.look(manifest)
        assert "utt-1" in unpublished
        assert unpublished.read("utt-1") is None
        held.release()


WRITES = """
import os, sys, time
sys.path.insert(0, os.environ["PYTHONPATH"].split(os.pathsep)[2])
import featcache
from pathlib import Path
from featcache.writing import queue

def length_of(id):
    return [len(id)]

queue.COMMIT_INTERVAL_S = 600
read = featcache.through(Path(os.environ["PLACE"]) / "cache", length_of)
read("utt-1")
time.sleep(0.5)
print("written", flush=True)
time.sleep(600)
"""
HANGS = """
import os, sys, time
sys.path.insert(0, os.environ["PYTHONPATH"].split(os.pathsep)[2])
import featcache
from pathlib import Path

def length_of(id):
    print("computing", flush=True)
    time.sleep(600)

featcache.through(Path(os.environ["PLACE"]) / "cache", length_of)("utt-1")
"""


def length_of(id: str) -> list[int]:
    return [len(id)]


@pytest.mark.parametrize("backend", featcache.registry.backend_names())
def test_others_read_what_is_not_published_in_any_format(tmp_path: Path, backend: str) -> None:
    codec = "lilcom" if backend == "lilcom" else None
    feature = FeatureStorageConfig("ones", backend=backend, codec=codec)
    frames = torch.full((700, 5), 3.25)
    parent = os.getpid()

    def ones(id: str) -> torch.Tensor:
        assert os.getpid() == parent, "the child computes what the parent has"
        return frames

    with featcache.through(tmp_path / "cache", ones, features=[feature]) as read:
        own = [read(f"utt-{number}") for number in range(5)]
        child = os.fork()
        if child == 0:
            try:
                found = [read(f"utt-{number}") for number in range(5)]
                same = all(torch.equal(one, two) for one, two in zip(found, own, strict=True))  # type: ignore[arg-type]
                os._exit(0 if same else 1)
            except BaseException:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert [*open_journals(tmp_path / "cache")]
    assert len(featcache.open(tmp_path / "cache", verify="arrays")) == 5


def open_journals(cache: Path) -> Iterator[Path]:
    yield from cache.glob(f"parts/*/{JOURNAL}")
