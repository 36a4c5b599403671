"""An object store that answers late: S3's GET, HEAD and list over the files of a directory.

Each answer begins `--delay-ms` after its request, whatever else is under way; requests and bytes
are counted. GET `/-/counts` tells and forgets them. Signatures are not looked at, nothing is
written. moto's server needs 4 ms of a processor for a GET, many times what the fastest client does;
this one 0.1 ms, and 0.3 ms for one of 240 KB.

    python benchmarks/late_store.py DIRECTORY [--delay-ms 30]    prints its URL
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from email.utils import formatdate
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import click

STATUSES = {
    200: "OK",
    206: "Partial Content",
    304: "Not Modified",
    404: "Not Found",
    405: "Method Not Allowed",
    412: "Precondition Failed",
    416: "Range Not Satisfiable",
}


@dataclass
class Counts:
    """Requests of a store since they were last asked for, and the bytes of its answers."""

    gets: int = 0
    others: int = 0  # HEAD and list
    nbytes: int = 0

    def take(self) -> Counts:
        """Return them, and begin again."""
        taken = replace(self)
        self.gets = self.others = self.nbytes = 0
        return taken


@dataclass(frozen=True)
class LateStore:
    """A store in a process of its own."""

    url: str

    def counts(self) -> Counts:
        """Return what was asked for since the last call."""
        with urllib.request.urlopen(f"{self.url}/-/counts") as answer:
            return Counts(**json.load(answer))


@contextmanager
def late_store(root: Path, delay_ms: float) -> Iterator[LateStore]:
    """Serve the directories below `root` as buckets."""
    command = [sys.executable, __file__, str(root), f"--delay-ms={delay_ms}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield LateStore(process.stdout.readline().strip())
        finally:
            process.terminate()


class Connection(asyncio.Protocol):
    """One client's requests, one after the other."""

    def __init__(self, root: Path, delay_s: float, counts: Counts) -> None:
        self._root, self._delay_s, self._counts = root, delay_s, counts
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a client."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        there = transport.get_extra_info("socket")
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Take a request, and answer it later."""
        self._read += data
        head, ended, rest = self._read.partition(b"\r\n\r\n")
        if not ended:
            return
        self._read = rest  # none has a body
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (each.partition(":") for each in lines)
        }
        late = 0.0 if target.startswith("/-/") else self._delay_s
        asyncio.get_running_loop().call_later(late, self._answer, method, target, headers)

    def _answer(self, method: str, target: str, headers: dict[str, str]) -> None:
        if self._transport.is_closing():
            return
        parts = urlsplit(target)
        if parts.path == "/-/counts":
            self._send(method, 200, json.dumps(asdict(self._counts.take())).encode(), {})
            return
        query = parse_qs(parts.query, keep_blank_values=True)
        if method == "GET" and "list-type" in query:
            self._counts.others += 1
            bucket = unquote(parts.path).strip("/")
            self._send(method, 200, listed(self._root / bucket, bucket, query), {})
        elif method in ("GET", "HEAD"):
            self._counts.gets += method == "GET"
            self._counts.others += method == "HEAD"
            self._send_object(method, self._root / unquote(parts.path).lstrip("/"), headers)
        else:
            self._send(method, 405, b"", {})

    def _send_object(self, method: str, path: Path, headers: dict[str, str]) -> None:
        try:
            file, size, etag, modified = opened(path)
        except OSError:
            self._send(method, 404, b"<Error><Code>NoSuchKey</Code></Error>", {})
            return
        about = {"ETag": etag, "Last-Modified": modified, "Accept-Ranges": "bytes"}
        if headers.get("if-match", etag) != etag:
            self._send(method, 412, b"<Error><Code>PreconditionFailed</Code></Error>", {})
            return
        if headers.get("if-none-match") == etag:
            self._send(method, 304, b"", about)
            return
        begin, end, status = 0, size, 200
        if wanted := headers.get("range", ""):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin = int(first) if first else max(size - int(last), 0)
            end = min(int(last) + 1, size) if first and last else size
            if begin >= end:
                self._send(method, 416, b"<Error><Code>InvalidRange</Code></Error>", {})
                return
            status, about["Content-Range"] = 206, f"bytes {begin}-{end - 1}/{size}"
        if method == "HEAD":
            self._send(method, 200, b"", about, size)
        else:
            self._send(method, status, os.pread(file, end - begin, begin), about)

    def _send(
        self, method: str, status: int, data: bytes, about: dict[str, str], size: int | None = None
    ) -> None:
        lines = [f"HTTP/1.1 {status} {STATUSES[status]}", "Server: late", f"Date: {formatdate()}"]
        lines += [f"{name}: {value}" for name, value in about.items()]
        lines += [f"Content-Length: {len(data) if size is None else size}", "\r\n"]
        body = b"" if method == "HEAD" else data
        self._counts.nbytes += len(body)
        self._transport.write("\r\n".join(lines).encode("latin-1") + body)


@cache
def opened(path: Path) -> tuple[int, int, str, str]:
    """Return a file's descriptor, size, ETag and time; files do not change meanwhile."""
    file = os.open(path, os.O_RDONLY)
    there = os.fstat(file)
    if not stat.S_ISREG(there.st_mode):
        os.close(file)
        raise FileNotFoundError(path)
    modified = formatdate(there.st_mtime, usegmt=True)
    return file, there.st_size, f'"{there.st_mtime_ns:x}-{there.st_size:x}"', modified


def listed(directory: Path, bucket: str, query: dict[str, list[str]]) -> bytes:
    """Return the keys of a bucket as ListObjectsV2 has them, all on one page."""
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    keys, prefixes = [], set()
    files = sorted(each for each in directory.rglob("*") if each.is_file())
    for name in (each.relative_to(directory).as_posix() for each in files):
        rest = name.removeprefix(prefix)
        if not name.startswith(prefix) or name <= query.get("start-after", [""])[0]:
            continue
        if delimiter and delimiter in rest:
            prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
        else:
            keys.append(_key(directory / name, name))
    common = (
        f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in prefixes
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(keys) + len(prefixes)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{''.join(keys)}{''.join(common)}</ListBucketResult>"
    ).encode()


def _key(path: Path, name: str) -> str:
    _, size, etag, _ = opened(path)
    modified = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return (
        f"<Contents><Key>{escape(name)}</Key><LastModified>{modified}</LastModified>"
        f"<ETag>{escape(etag)}</ETag><Size>{size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


@click.command()
@click.argument("root", type=click.Path(path_type=Path, exists=True))
@click.option("--delay-ms", default=30.0, show_default=True)
def main(root: Path, delay_ms: float) -> None:
    """Serve the directories below ROOT as buckets, until killed."""
    asyncio.run(_serve(root, delay_ms / 1e3))


async def _serve(root: Path, delay_s: float) -> None:
    counts = Counts()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(root, delay_s, counts), "127.0.0.1", 0, backlog=1000
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    main()
