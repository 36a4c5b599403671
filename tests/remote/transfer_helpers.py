"""Caches of two generations that are pushed and pulled, and processes that are killed meanwhile."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from fault_proxy import FaultProxy, with_credentials
from s3_server import obstore, store_of

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.format import every_directory, read_manifest
from featcache.remote import RemoteOptions
from featcache.transfer import Transfer, pull, push
from featcache.transfer.to_store import note_history

Values = dict[str, float]


def write(path: Path, ids: range, frames: int = 2, feature: str = "x") -> None:
    with CacheWriter(path, features=[FeatureStorageConfig(feature)]) as writer:
        for number in ids:
            writer.write(f"utt-{number}", {feature: np.full((frames, 3), number, np.float32)})


def values(cache: featcache.Cache) -> Values:
    """All that a cache holds; its sets must be those of one moment."""
    assert not any(cache.missing(feature) for feature in cache.features)
    read = {id: [cache.read(id, feature) for feature in cache.features] for id in cache.ids}
    return {id: float(sum(each.sum() for each in arrays)) for id, arrays in read.items()}


@dataclass
class Generations:
    """A cache as it was, and as it is, both also as their values."""

    old: Path
    new: Path
    proxy: FaultProxy
    endpoint: str
    bucket: str

    @classmethod
    def of(
        cls,
        tmp_path: Path,
        proxy: FaultProxy,
        bucket: str,
        frames: int = 2,
        kind: str = "plain",
    ) -> Generations:
        """Make a plain cache that is written on, or gets a feature set, or has one already."""
        new, features = tmp_path / "new", ["x", "y"] if kind == "sets" else ["x"]
        for feature in features:
            write(new, range(2), feature=feature)
        for each in every_directory(new):  # as if it had been pushed
            note_history(each, [read_manifest(each).write_id])
        shutil.copytree(new, tmp_path / "old")
        for feature in features:
            write(new, range(2, 5), frames, feature)
        if kind != "plain":
            write(new, range(5), feature="z")
        featcache.open(new).delete(["utt-1"])  # of all sets at once
        return cls(tmp_path / "old", new, proxy, proxy.server, bucket)

    @property
    def direct(self) -> RemoteOptions:
        """Of the server itself."""
        return RemoteOptions(endpoint=self.endpoint, region="us-east-1")

    @property
    def proxied(self) -> RemoteOptions:
        """Of the proxy before it."""
        return replace(self.direct, endpoint=self.proxy.url)

    @property
    def impatient(self) -> RemoteOptions:
        """The same, which waits shortly for what stalls."""
        return replace(self.proxied, timeout_s=0.6, retry_s=15.0)

    def url(self, name: str) -> str:
        """Return a URL where the old generation is."""
        url = f"{self.bucket}/{name}"
        push(self.old, url, remote=self.direct)
        return url

    def copy(self, path: Path) -> Path:
        """Return a copy of the old generation."""
        shutil.copytree(self.old, path)
        return path

    def require_whole(self, url: str, path: Path, *others: Path) -> None:
        """Require that a URL has one of the generations, whole; it is pulled to a path."""
        pull(url, path, remote=self.direct)
        found = values(featcache.open(path, verify="arrays"))
        assert found in [values(featcache.open(each)) for each in (self.old, self.new, *others)]
        read = featcache.open(url, remote=self.direct)
        assert values(read) == found
        shutil.rmtree(path)

    def objects(self, name: str) -> dict[str, tuple[str, int]]:
        """Return the objects below a name: ETag and size."""
        store = store_of(self.bucket, self.endpoint)
        return {
            each["path"]: (each["e_tag"], each["size"])
            for page in obstore.list(store, name)
            for each in page
        }


def killed(
    way: Callable[..., Transfer], where: tuple[object, ...], cache: Generations, at: int, fault: str
) -> bool:
    """Push or pull in a process that is killed at a request; whether that came."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["featcache.transfer", "obstore.store"])
    process = context.Process(target=with_credentials, args=(way, where, cache.proxied))
    cache.proxy.begin(at, fault, meanwhile=cache.proxy.meanwhile)
    process.start()
    cache.proxy.pid = process.pid or 0
    process.join()
    cache.proxy.wait()
    cache.proxy.begin()
    assert process.exitcode in (0, -9)
    return process.exitcode == -9
