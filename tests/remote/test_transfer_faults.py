"""Each fault at each request of a push and of a pull: right bytes or a typed error, and no hang."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fault_proxy import BROKEN, STATUS, FaultProxy
from fault_proxy import proxy as proxy
from s3_server import bucket as bucket
from s3_server import endpoint as endpoint
from transfer_helpers import Generations, values

import featcache
from featcache.errors import FeatcacheError
from featcache.transfer import pull, push

FAULTS = [*((fault, "plain") for fault in (*STATUS, *BROKEN)), ("lost", "sets"), ("503", "sets")]
ONCE = ("503", "429", "reset", "lost", "cut", "stall", "drip")  # the next try gets on


@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_a_push_has_a_fault_at_any_request(
    fault: str, kind: str, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    cache = Generations.of(tmp_path, proxy, bucket, kind=kind)
    for at in range(100):
        url = cache.url(f"{at}")
        proxy.begin(at, fault)
        try:
            push(cache.new, url, remote=cache.impatient)
            assert len(featcache.open(url, remote=cache.direct)) == 4
        except FeatcacheError:
            assert fault not in ONCE
        came = proxy.number > at
        proxy.begin()
        cache.require_whole(url, tmp_path / "pulled")
        push(cache.new, url, remote=cache.direct)
        assert len(featcache.open(url, remote=cache.direct)) == 4
        if not came:
            break
    assert 8 < at < 70


@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_a_pull_has_a_fault_at_any_request(
    fault: str, kind: str, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    cache = Generations.of(tmp_path, proxy, bucket, kind=kind)
    url = cache.url("train")
    push(cache.new, url, remote=cache.direct)
    new, copy = values(featcache.open(cache.new)), tmp_path / "copy"
    for at in range(100):
        cache.copy(copy)
        proxy.begin(at, fault)
        try:
            pull(url, copy, remote=cache.impatient)
            assert values(featcache.open(copy, verify="arrays")) == new
        except FeatcacheError:
            assert fault not in ONCE
            assert len(featcache.open(copy, verify="arrays")) == 2
        came = proxy.number > at
        proxy.begin()
        pull(url, copy, remote=cache.direct)
        assert values(featcache.open(copy, verify="arrays")) == new
        shutil.rmtree(copy)
        if not came:
            break
    assert 6 < at < 70
