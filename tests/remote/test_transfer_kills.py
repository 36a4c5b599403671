"""A push, a pull or a sync is killed at each of its requests: the old generation or the new one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fault_proxy import KILLED, FaultProxy
from fault_proxy import proxy as proxy
from s3_server import bucket as bucket
from s3_server import endpoint as endpoint
from transfer_helpers import Generations, killed, values, write

import featcache
from featcache.errors import CacheError
from featcache.transfer import Transfer, pull, push, sync

FRAMES = 400_000  # more than one piece
LIST_BYTES = 300  # of the lists of generations before, which are sent each time


@pytest.mark.parametrize(
    ("verb", "fault", "frames", "kind"),
    [
        (push, KILLED[0], FRAMES, "plain"),
        (push, KILLED[1], 2, "plain"),
        (sync, KILLED[0], 2, "plain"),
        (push, KILLED[0], 2, "sets"),
        (push, KILLED[1], 2, "added"),
    ],
)
def test_a_push_that_is_killed_at_any_request(
    verb: Callable[..., Transfer],
    fault: str,
    frames: int,
    kind: str,
    bucket: str,
    proxy: FaultProxy,
    tmp_path: Path,
) -> None:
    cache = Generations.of(tmp_path, proxy, bucket, frames, kind)
    for at in range(100):
        name = f"{at}"
        url = cache.url(name)
        was_killed = killed(verb, (cache.new, url), cache, at, fault)
        cache.require_whole(url, tmp_path / "pulled")
        before = cache.objects(name)
        push(cache.new, url, remote=cache.proxied)
        after = cache.objects(name)
        lacking = sum(each[1] for path, each in after.items() if before.get(path) != each)
        assert cache.proxy.sent <= 1.01 * lacking + LIST_BYTES
        assert len(featcache.open(url, remote=cache.direct)) == 4
        if not was_killed:
            break
    assert 12 < at < 70


@pytest.mark.parametrize(
    ("is_new", "verb", "fault", "kind"),
    [
        (True, pull, KILLED[0], "plain"),
        (True, pull, KILLED[1], "plain"),
        (False, pull, KILLED[1], "plain"),
        (False, sync, KILLED[0], "plain"),
        (True, pull, KILLED[0], "sets"),
        (False, pull, KILLED[1], "sets"),
        (False, sync, KILLED[0], "added"),
    ],
)
def test_a_pull_that_is_killed_at_any_request(
    is_new: bool,
    verb: Callable[..., Transfer],
    fault: str,
    kind: str,
    bucket: str,
    proxy: FaultProxy,
    tmp_path: Path,
) -> None:
    cache = Generations.of(tmp_path, proxy, bucket, kind=kind)
    url = cache.url("train")
    push(cache.new, url, remote=cache.direct)
    new = values(featcache.open(cache.new))
    for at in range(100):
        copy = tmp_path / f"{at}" if is_new else cache.copy(tmp_path / f"{at}")
        where = (url, copy) if verb is pull else (copy, url)
        was_killed = killed(verb, where, cache, at, fault)
        if (copy / "featcache.json").exists():
            assert len(values(featcache.open(copy, verify="arrays"))) in (2, 4)
        else:
            assert is_new
        pull(url, copy, remote=cache.direct)
        assert values(featcache.open(copy, verify="arrays")) == new
        assert not (copy / "work-pull").exists()
        shutil.rmtree(copy)
        if not was_killed:
            break
    assert 6 < at < 70


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("none", "plain"), (KILLED[0], "plain"), ("none", "sets"), ("none", "added")],
)
def test_two_pushers_of_whom_one_may_be_killed(
    fault: str, kind: str, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    cache = Generations.of(tmp_path, proxy, bucket, kind=kind)
    other = cache.copy(tmp_path / "other")
    write(other, range(7, 9))
    if kind == "sets":
        write(other, range(7, 9), feature="y")
    for at in range(100):
        url = cache.url(f"{at}")
        cache.proxy.meanwhile = lambda url=url: push_or_not(cache, other, url)
        if fault == "none":
            proxy.begin(at, fault, meanwhile=cache.proxy.meanwhile)
            push_or_not(cache, cache.new, url, proxied=True)
            came = proxy.number > at
            proxy.begin()
        else:
            came = killed(push, (cache.new, url), cache, at, fault)
        cache.require_whole(url, tmp_path / "pulled", other)
        if not came:
            break
    assert 8 < at < 70


def push_or_not(cache: Generations, path: Path, url: str, *, proxied: bool = False) -> None:
    with suppress(CacheError):  # the other one was first
        push(path, url, remote=cache.proxied if proxied else cache.direct)


def test_a_process_that_has_pulled_ends_well(
    bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    cache = Generations.of(tmp_path, proxy, bucket)
    url, verb = cache.url("train"), [sys.executable, "-m", "featcache", "sync"]
    store = ["--endpoint", cache.endpoint, "--region", "us-east-1"]
    for _ in range(4):  # one in three was aborted by a thread of obstore
        subprocess.run([*verb, str(cache.old), url, *store], check=True)
