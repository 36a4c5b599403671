"""Caches in a bucket of S3, as moto's server has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from s3_server import bucket as bucket
from s3_server import endpoint as endpoint
from s3_server import obstore, store_of

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CorruptCacheError, RemoteError
from featcache.remote import RemoteOptions

ARRAYS = {f"utt-{n}": np.full((n + 1, 3), n, np.float32) for n in range(12)}


@pytest.fixture
def train(bucket: str, endpoint: str, tmp_path: Path) -> str:
    """The URL of a cache that was copied to a bucket by other means."""
    with CacheWriter(tmp_path / "c", features=[FeatureStorageConfig("x")]) as writer:
        for id, array in ARRAYS.items():
            writer.write(id, {"x": array})
    for path in (tmp_path / "c").rglob("*"):
        if path.is_file():
            below = path.relative_to(tmp_path / "c").as_posix()
            obstore.put(store_of(bucket, endpoint), f"train/{below}", path.read_bytes())
    return f"{bucket}/train"


def test_a_cache_in_a_bucket_is_read(train: str, endpoint: str, tmp_path: Path) -> None:
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1")
    cache = featcache.open(train, remote=how, check_reads=True)
    assert {id: cache.read(id, "x").tolist() for id in cache.ids} == {
        id: array.tolist() for id, array in ARRAYS.items()
    }


def test_damage_in_a_bucket_is_noticed_where_reads_are_checked(
    train: str, bucket: str, endpoint: str, tmp_path: Path
) -> None:
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1")
    cache = featcache.open(train, remote=how, check_reads=True)
    store = store_of(bucket, endpoint)
    (there,) = (
        each["path"]
        for page in obstore.list(store, "train/parts")
        for each in page
        if each["path"].endswith(".npy")
    )
    right = bytes(obstore.get(store, there).bytes())
    data = bytearray(right)
    data[-3] ^= 1
    obstore.put(store, there, bytes(data))
    with pytest.raises(CorruptCacheError, match="damaged"):
        cache.read("utt-11", "x")
    obstore.put(store, there, right)  # pages are the same, and hold no byte of the damaged one
    again = featcache.open(train, remote=how, check_reads=True)
    assert np.array_equal(again.read("utt-11", "x"), ARRAYS["utt-11"])
    obstore.put(store, there, bytes(data))
    with pytest.raises(CorruptCacheError, match="damaged"):
        featcache.open(train, remote=replace(how, pages=tmp_path / "others"), verify="arrays")
    obstore.put(store, there, right)
    featcache.open(train, remote=replace(how, pages=tmp_path / "others"), verify="arrays")


def test_a_bucket_that_is_not_there_is_said(bucket: str, endpoint: str, tmp_path: Path) -> None:
    how = RemoteOptions(
        pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1", retry_s=0.5
    )
    with pytest.raises((RemoteError, featcache.errors.NotACacheError)) as raised:
        featcache.open("s3://no-such-bucket/train", remote=how)
    assert "hush" not in str(raised.value)
