"""A server that speaks S3, moto's, and buckets in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from featcache.remote import requests_to

obstore = pytest.importorskip("obstore")
server_of = pytest.importorskip("moto.server")
pytest.importorskip("flask_cors")


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
    """An empty bucket, and credentials for it in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    name = tmp_path.name.replace("_", "-").lower()[-50:].strip("-")
    urlopen(Request(f"{endpoint}/{name}", method="PUT")).close()  # botocore takes half a second
    return f"s3://{name}"


def store_of(bucket: str, endpoint: str) -> Any:
    """Return a bucket for what a test does behind the library's back."""
    return obstore.store.S3Store(
        bucket.removeprefix("s3://"),
        endpoint=endpoint,
        client_options={"allow_http": True},
        region="us-east-1",
    )
