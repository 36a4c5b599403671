"""Caches in a bucket of S3, as moto's server has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CorruptCacheError, RemoteError
from featcache.remote import RemoteOptions, requests_to

obstore = pytest.importorskip("obstore")
server_of = pytest.importorskip("moto.server")
pytest.importorskip("flask_cors")
ARRAYS = {f"utt-{n}": np.full((n + 1, 3), n, np.float32) for n in range(12)}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
    requests_to.cache_clear()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A bucket that holds a cache, `train`."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with CacheWriter(tmp_path / "c", features=[FeatureStorageConfig("x")]) as writer:
        for id, array in ARRAYS.items():
            writer.write(id, {"x": array})
    name = tmp_path.name.replace("_", "-").lower()[-40:]
    store = obstore.store.S3Store(
        name, endpoint=endpoint, client_options={"allow_http": True}, region="us-east-1"
    )
    from botocore.session import get_session

    get_session().create_client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(
        Bucket=name
    )
    for path in (tmp_path / "c").rglob("*"):
        if path.is_file():
            below = path.relative_to(tmp_path / "c").as_posix()
            obstore.put(store, f"train/{below}", path.read_bytes())
    return f"s3://{name}/train"


def test_a_cache_in_a_bucket_is_read(bucket: str, endpoint: str, tmp_path: Path) -> None:
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1")
    cache = featcache.open(bucket, remote=how, check_reads=True)
    assert {id: cache.read(id, "x").tolist() for id in cache.ids} == {
        id: array.tolist() for id, array in ARRAYS.items()
    }


def test_damage_in_a_bucket_is_noticed_where_reads_are_checked(
    bucket: str, endpoint: str, tmp_path: Path
) -> None:
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1")
    cache = featcache.open(bucket, remote=how, check_reads=True)
    name = bucket.split("/")[2]
    store = obstore.store.S3Store(
        name, endpoint=endpoint, client_options={"allow_http": True}, region="us-east-1"
    )
    (there,) = (
        each["path"]
        for page in obstore.list(store, "train/parts")
        for each in page
        if each["path"].endswith(".npy")
    )
    data = bytearray(bytes(obstore.get(store, there).bytes()))
    data[-3] ^= 1
    obstore.put(store, there, bytes(data))
    with pytest.raises(CorruptCacheError, match="damaged"):
        cache.read("utt-11", "x")


def test_a_bucket_that_is_not_there_is_said(bucket: str, endpoint: str, tmp_path: Path) -> None:
    how = RemoteOptions(
        pages=tmp_path / "pages", endpoint=endpoint, region="us-east-1", retry_s=0.5
    )
    with pytest.raises((RemoteError, featcache.errors.NotACacheError)) as raised:
        featcache.open("s3://no-such-bucket/train", remote=how)
    assert "hush" not in str(raised.value)
