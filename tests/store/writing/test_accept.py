"""An accepted fingerprint: the cache keeps what it holds, and is made from that from now on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CacheLockedError, StaleCacheError
from featcache.format import Difference
from featcache.writing.session import accept

FBANK = FeatureStorageConfig("fbank")
FEATURES = {"fbank": FBANK}
OLD, NEW = {"code": "a"}, {"code": "b"}
KILLED = """
import os, signal, sys
import numpy as np
from featcache import CacheWriter, FeatureStorageConfig
writer = CacheWriter(sys.argv[1], [FeatureStorageConfig("fbank")], {"code": "a"})
writer.write("b", {"fbank": np.ones((2, 4), np.float32)})
writer.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""


def write(path: Path, fingerprint: dict[str, str], *ids: str, overwrite: bool = False) -> None:
    with CacheWriter(path, FEATURES, fingerprint, overwrite=overwrite) as writer:
        for id in ids:
            writer.write(id, {"fbank": np.full((3, 4), ord(id[0]), np.float32)})


def test_what_was_stored_before_stays_and_more_is_added(tmp_path: Path) -> None:
    write(tmp_path / "cache", OLD, "a", "b")
    with pytest.raises(StaleCacheError):
        write(tmp_path / "cache", NEW, "c")
    assert accept(tmp_path / "cache", FEATURES, NEW) == [Difference(("code",), "a", "b")]
    write(tmp_path / "cache", NEW, "c")
    cache = featcache.open(tmp_path / "cache", verify="arrays")
    assert list(cache) == ["a", "b", "c"]
    assert cache.fingerprint["code"] == "b"
    with pytest.raises(StaleCacheError, match='code: was "b", now "a"'):
        write(tmp_path / "cache", OLD, "d")


def test_a_fingerprint_is_accepted_again_and_again(tmp_path: Path) -> None:
    write(tmp_path / "cache", OLD, "a")
    for fingerprint in (NEW, OLD, {"code": "c"}, NEW):
        accept(tmp_path / "cache", FEATURES, fingerprint)
        assert accept(tmp_path / "cache", FEATURES, fingerprint) == []
    write(tmp_path / "cache", NEW, "b")
    assert list(featcache.open(tmp_path / "cache", verify="arrays")) == ["a", "b"]


def test_what_a_killed_writer_committed_before_is_recovered(tmp_path: Path) -> None:
    write(tmp_path / "cache", OLD, "a")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "cache")], check=False)
    assert killed.returncode == -signal.SIGKILL
    accept(tmp_path / "cache", FEATURES, NEW)
    write(tmp_path / "cache", NEW, "c")
    assert list(featcache.open(tmp_path / "cache", verify="arrays")) == ["a", "b", "c"]


def test_an_overwrite_makes_an_end_of_what_was_accepted(tmp_path: Path) -> None:
    write(tmp_path / "cache", OLD, "a")
    accept(tmp_path / "cache", FEATURES, NEW)
    write(tmp_path / "cache", NEW, "b", overwrite=True)
    assert list(featcache.open(tmp_path / "cache", verify="arrays")) == ["b"]
    with pytest.raises(StaleCacheError):
        write(tmp_path / "cache", OLD, "c")
    assert len(list((tmp_path / "cache" / "parts").iterdir())) == 1


def test_other_declarations_cannot_be_accepted(tmp_path: Path) -> None:
    write(tmp_path / "cache", OLD, "a")
    halves = {"fbank": FeatureStorageConfig("fbank", dtype="float16")}
    with pytest.raises(StaleCacheError, match=r"features\.fbank\.dtype"):
        accept(tmp_path / "cache", halves, NEW)
    assert featcache.open(tmp_path / "cache").fingerprint["code"] == "a"


def test_times_of_frames_can_be_declared_later(tmp_path: Path) -> None:
    write(tmp_path / "cache", OLD, "a", "b")
    timed = {"fbank": FeatureStorageConfig("fbank", frame_s=0.01, offset_s=0.0025)}
    with pytest.raises(StaleCacheError, match=r"features.fbank.frame_s: was \(absent\), now 0.01"):
        CacheWriter(tmp_path / "cache", timed, OLD)
    assert len(accept(tmp_path / "cache", timed, OLD)) == 2
    with CacheWriter(tmp_path / "cache", timed, OLD) as writer:
        writer.write("c", {"fbank": np.zeros((3, 4), np.float32)})
    cache = featcache.open(tmp_path / "cache", verify="arrays")
    assert list(cache) == ["a", "b", "c"]
    view = cache.table.segments({"x": ("a", 0.0125, 0.0325)})
    assert view.lengths("fbank").tolist() == [2]


def test_nothing_is_accepted_while_somebody_writes(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "cache", FEATURES, OLD), pytest.raises(CacheLockedError):
        accept(tmp_path / "cache", FEATURES, NEW)
