"""Trust in a store: hostile manifests reach nothing else, and secrets stand nowhere."""

from __future__ import annotations

import contextlib
import json
import pickle
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from click.testing import CliRunner
from range_server import Handler, RangeServer, serving

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig, inspect
from featcache.cli import main
from featcache.errors import ConfigError, CorruptCacheError, FeatcacheError
from featcache.format import Strings, pack_json, unpack_json
from featcache.remote import RemoteOptions, RemotePlace, requests_to
from featcache.transfer import push

pytest.importorskip("obstore")
ELSEWHERE = "outside/secret.npy"


def write(path: Path) -> None:
    rng = np.random.default_rng(0)
    with CacheWriter(path, [FeatureStorageConfig("fbank")]) as writer:
        for number in range(5):
            writer.write(f"utt-{number}", {"fbank": rng.normal(size=(30, 8)).astype(np.float32)})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    """A server of a cache `mine/c` and of what does not belong to it."""
    root = tmp_path / "root"
    write(root / "mine" / "c")
    with featcache.open(root / "mine" / "c") as cache:
        cache.tag("paper")
    (root / "outside").mkdir()
    np.save(root / ELSEWHERE, np.ones(9))
    with serving(root) as state:
        yield state
        requests_to.cache_clear()


def options(tmp_path: Path, **more: object) -> RemoteOptions:
    return RemoteOptions(pages=tmp_path / "pages", retry_s=0.3, timeout_s=0.5, **more)  # type: ignore[arg-type]


LEADING_OUT = [
    "..",
    "../outside/secret.npy",
    "../../outside/secret.npy",
    "parts/../../../outside/secret.npy",
    "/etc/passwd",
    "//127.0.0.1:9/x",
    "http://127.0.0.1:9/x",
    "s3://other/x",
    "file:///etc/passwd",
    "%2e%2e/%2e%2e/outside/secret.npy",
    "..%2foutside",
    "..\\..\\outside\\secret.npy",
    "a\0b",
    "x" * 5000,
    "\u2024\u2024/outside/secret.npy",
    "\uff0e\uff0e\uff0foutside",
    ".",
    "",
    "adopted.json",
    "etags.json",
    "featcache.json",
    "x?versionId=1",
    "x#y",
    7,
    None,
    ["a"],
]
Change = Callable[[dict[str, Any], Any], None]
NAMES: dict[str, Change] = {
    "index": lambda content, name: content.update(index=name),
    "files": lambda content, name: content["files"].update({str(name): "0" * 16}),
    "part": lambda content, name: content["parts"][0].update(name=name),
    "tag": lambda content, name: content["tags"].update(paper=name),
    "previous": lambda content, name: content.update(previous=name),
    "requires": lambda content, name: content["requires"].append(name),
    "adopted": lambda content, name: content["parts"][0].update(adopted={"root": name}),
}
FREE = ("files", "requires")  # which may name anything: later versions know what it is


@contextlib.contextmanager
def watched(server: RangeServer) -> Iterator[list[str]]:
    """Note every path that a server is asked for."""
    seen: list[str] = []
    before = Handler.answer_file

    def noting(self: Handler) -> None:
        seen.append(self.path)
        with contextlib.suppress(OSError, ValueError):  # a name that no file has
            before(self)
            return
        self.answer(404, b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "answer_file", noting)
        yield seen


@pytest.mark.parametrize("where", NAMES)
def test_a_hostile_manifest_reaches_nothing_outside_of_its_cache(
    where: str, server: RangeServer, tmp_path: Path
) -> None:
    file = tmp_path / "root" / "mine" / "c" / "featcache.json"
    good = unpack_json(file.read_bytes(), "it")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    with watched(server) as seen:
        for number, name in enumerate(LEADING_OUT[:: 6 if where in FREE else 1]):
            content = json.loads(json.dumps(good))
            NAMES[where](content, name)
            file.write_bytes(pack_json(content))
            how = options(tmp_path / f"{number}")
            for version in ("paper",) if where == "tag" else (None,):
                with contextlib.suppress(FeatcacheError):
                    cache = featcache.open(
                        f"{server.url}/mine/c", remote=how, version=version, verify="arrays"
                    )
                    cache.read("utt-1", "fbank")
    assert all(path.startswith("/mine/c/") for path in seen)
    assert not [path for path in seen if ".." in unquote(path).split("/")]
    made = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    below = [tmp_path / f"{number}" for number in range(len(LEADING_OUT))]
    assert all(any(path.is_relative_to(each) for each in below) for path in made)
    assert not [path for path in made if path.name == "adopted.json"]


@pytest.mark.parametrize("path", ["../../outside/secret.npy", "/etc/passwd", "a\0b", "a//b", ""])
def test_containers_outside_of_the_cache_are_asked_of_nobody(
    path: str, server: RangeServer, tmp_path: Path
) -> None:
    cache = featcache.open(f"{server.url}/mine/c", remote=options(tmp_path))
    opened = cache.opened
    remote = opened.settings.remote
    assert remote is not None
    columns = replace(opened.index.containers, paths=Strings.of([path]))
    with watched(server) as seen:
        with pytest.raises(CorruptCacheError, match="does not lead"):
            remote.files(opened.path, columns).read_into(0, 0, np.empty(8, np.uint8))
        assert not seen


@pytest.mark.parametrize("content", ["[]", "7", '{"featcache.json": 5}', '{"featcache.json": []}'])
def test_etags_that_another_wrote_are_not_believed(
    content: str, server: RangeServer, tmp_path: Path
) -> None:
    featcache.open(f"{server.url}/mine/c", remote=options(tmp_path))
    (file,) = tmp_path.glob("pages/*/*/mine/c/etags.json")
    file.write_text(content)
    assert len(featcache.open(f"{server.url}/mine/c", remote=options(tmp_path))) == 5


def test_pages_or_a_shell_that_cannot_be_written_are_said(
    server: RangeServer, tmp_path: Path
) -> None:
    url = f"{server.url}/mine/c"
    (tmp_path / "file").touch()
    with pytest.raises(FeatcacheError, match="pages: "):
        featcache.open(url, remote=RemoteOptions(pages=tmp_path / "file"))
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "http:").touch()
    with pytest.raises(FeatcacheError, match="cannot be read"):
        featcache.open(url, remote=options(tmp_path))


class Redirecting(BaseHTTPRequestHandler):
    """Sends whoever asks to another host, and notes the headers of those that come."""

    protocol_version = "HTTP/1.1"
    to: str | None = None
    status = 302
    came: list[dict[str, str]]

    def do_GET(self) -> None:
        self.came.append({name.lower(): value for name, value in self.headers.items()})
        if self.to is None:
            self.send_response(404)
        else:
            self.send_response(self.status)
            self.send_header("Location", self.to + self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def redirecting(to: str | None, status: int = 302) -> Iterator[tuple[int, list[dict[str, str]]]]:
    came: list[dict[str, str]] = []
    handler = type("Sending", (Redirecting,), {"to": to, "status": status, "came": came})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1], came
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_key_and_no_signature_follows_a_redirect_to_another_host(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "canary-name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    with (
        redirecting(None) as (other, came),
        redirecting(f"http://localhost:{other}", status) as (
            first,
            asked,
        ),
    ):
        how = options(tmp_path, endpoint=f"http://127.0.0.1:{first}", region="us-east-1")
        with pytest.raises(FeatcacheError):
            featcache.open("s3://bucket/train", remote=how)
        requests_to.cache_clear()
    assert "canary-name" in asked[0]["authorization"]
    assert came
    assert not [each for each in came if "authorization" in each or "canary" in str(each)]


SECRETS = {
    "AWS_ACCESS_KEY_ID": "name",
    "AWS_SECRET_ACCESS_KEY": "CANARY-aws-secret",
    "AWS_SESSION_TOKEN": "CANARY-aws-token",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_ACCOUNT_KEY": "Q0FOQVJZLWF6dXJl",
    "AZURE_STORAGE_SAS_KEY": "?sig=CANARY-sas",
    "AZURE_CLIENT_SECRET": "CANARY-client",
    "GOOGLE_SERVICE_ACCOUNT_KEY": '{"private_key": "CANARY-google"}',
}


def _pickled(things: list[object], root: Path) -> None:
    for each in things:
        print(repr(each), each)
        (root / f"{type(each).__name__}.pickle").write_bytes(pickle.dumps(each))


def _failed(call: Callable[[], object], root: Path) -> None:
    """Print all that an error holds and leads to."""
    with pytest.raises(FeatcacheError) as raised:
        call()
    error = raised.value
    print("".join(traceback.format_exception(error)), repr(error), vars(error))
    print(repr(error.__cause__), repr(error.__context__))
    with contextlib.suppress(TypeError):
        (root / "error.pickle").write_bytes(pickle.dumps(error))


def _repeated(handler: Handler, _data: bytes, _status: int) -> bool:
    """Refuse a bucket, and repeat what was sent, as a store may."""
    if handler.path.startswith("/403"):
        handler.answer(403, b"<Error>" + str(handler.headers).encode() + b"</Error>")
    return handler.path.startswith("/403")


def test_no_secret_is_printed_pickled_logged_or_written(
    server: RangeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, local = tmp_path / "made", tmp_path / "local"
    for path in (tmp_path / "root" / "403" / "c", local):
        write(path)
    made.mkdir()
    caplog.set_level(1)
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    for name, value in {**SECRETS, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    how = options(made, endpoint=server.url, region="us-east-1")
    cache = featcache.open("s3://mine/c", remote=how, verify="arrays")
    loader = FeatureLoader(cache, "fbank", batch_size=2)
    assert len(list(loader)) == 3
    requests = requests_to(RemotePlace.of("s3://mine/c", how))
    readers = [cache.reader("fbank"), FeatureDataset(cache, "fbank")]
    _pickled([cache, cache.select([0]), *readers, requests], made)
    print(inspect.info(cache), inspect.made_from(cache), cache._repr_html_(), loader.metrics())
    inspect.report(cache, made / "report.html", pictures=2)
    server.fault = _repeated
    for url in ("s3://403/c", "s3://missing/c"):
        _failed(partial(featcache.open, url, remote=how), made)
        _failed(partial(push, local, url, remote=how), made)
    _failed(partial(featcache.open, "gs://box/c"), made)
    for words in (
        ["info", "gs://box/c"],
        ["ls", "s3://u:CANARY-url@b/c"],
        ["verify", "https://h/c?sig=CANARY-query"],
    ):
        result = CliRunner().invoke(main, words)
        print(result.output, result.exit_code, result.exception)
    written = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"report.html", "Cache.pickle", "error.pickle", "etags.json"} <= written.keys()
    said = capfd.readouterr()
    everything = [*written.values(), said.out.encode(), said.err.encode(), caplog.text.encode()]
    for secret in (b"CANARY", SECRETS["AZURE_STORAGE_ACCOUNT_KEY"].encode()):
        assert not [data[:200] for data in everything if secret in data]


@pytest.mark.parametrize(
    "given", ["https://me:SECRET@a.example", "https://a.example?sig=SECRET", "https://a#SECRET"]
)
def test_an_endpoint_with_a_secret_is_refused_without_it(given: str) -> None:
    with pytest.raises(ConfigError, match="logged and pickled") as refused:
        RemoteOptions(endpoint=given)
    assert "SECRET" not in str(refused.value)


def test_a_url_without_a_host_is_refused_without_its_query() -> None:
    with pytest.raises(ConfigError, match="no bucket or host") as refused:
        RemotePlace.of("https:///train?sig=SECRET")
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_wait_that_ends_is_demanded(seconds: float) -> None:
    for name in ("timeout_s", "retry_s"):
        with pytest.raises(ConfigError, match="not infinite"):
            RemoteOptions(**{name: seconds})  # type: ignore[arg-type]
