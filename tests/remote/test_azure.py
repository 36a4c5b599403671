"""Azure's protocol, as Azurite speaks it: a cache is pushed to it and read from it.

`npm install -g azurite`, or AZURITE with the path of `azurite-blob`, runs this; else it is skipped.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import RemoteError
from featcache.remote import RemoteOptions, requests_to
from featcache.transfer import pull, push

pytest.importorskip("obstore")
AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")
if AZURITE is None:
    pytest.skip("azurite-blob is not installed: npm install -g azurite", allow_module_level=True)
# the account and the key that every Azurite has, which its documentation prints
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def _make_container(endpoint: str, name: str) -> None:
    date = email.utils.formatdate(usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    told = "PUT" + "\n" * 12 + headers + f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = hmac.new(base64.b64decode(KEY), told.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT")
    for line in headers.splitlines():
        request.add_header(*line.split(":", 1))
    mine = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
    request.add_header("Authorization", mine)
    request.add_header("Content-Length", "0")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 201


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--blobPort", str(port), "--location", str(tmp_path / "azurite"), "--silent"]
    words += ["--skipApiVersionCheck", "--disableTelemetry"]
    server = subprocess.Popen([str(AZURITE), *words], stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        server.terminate()
        server.wait()
        requests_to.cache_clear()


def test_a_cache_is_pushed_to_azure_read_verified_and_pulled(endpoint: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"utt-{number}": rng.normal(size=(50, 20)).astype(np.float32) for number in range(6)}
    with CacheWriter(tmp_path / "c", [FeatureStorageConfig("fbank")]) as writer:
        for id, array in arrays.items():
            writer.write(id, {"fbank": array})
    _make_container(endpoint, "box")
    how = RemoteOptions(pages=tmp_path / "pages", endpoint=endpoint, retry_s=2.0)
    push(tmp_path / "c", "az://box/deep/c", remote=how)
    cache = featcache.open("az://box/deep/c", remote=how, verify="arrays")
    for id, array in arrays.items():
        assert np.array_equal(cache.read(id, "fbank"), array)
    with featcache.open(tmp_path / "c") as here:
        here.delete(["utt-3"])
    push(tmp_path / "c", "az://box/deep/c", remote=how)
    cache.refresh()
    assert "utt-3" not in cache
    pull("az://box/deep/c", tmp_path / "pulled", remote=how)
    assert len(featcache.open(tmp_path / "pulled", verify="arrays")) == 5
    with pytest.raises(RemoteError, match="az://box/deep/c"):
        featcache.open("az://box/deep/c", remote=RemoteOptions(endpoint=endpoint, anonymous=True))
