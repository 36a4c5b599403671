"""A proxy in front of a server that speaks S3: it counts, and fails at one request, or kills."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

STATUS = ("503", "429", "403", "404")  # answered, and the server is not asked
BROKEN = ("reset", "lost", "cut", "stall", "short", "drip")
KILLED = ("killed before", "killed behind")  # the server is asked
DROPPED = ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")


@dataclass(frozen=True)
class Asked:
    """A request, and the bytes that came with it and with its answer."""

    method: str
    path: str
    sent: int
    received: int


@dataclass
class FaultProxy:
    """What went through, and what is done at one request."""

    server: str
    url: str = ""
    stall_s: float = 1.0
    asked: list[Asked] = field(default_factory=list)
    at: int = -1  # number of the request that fails
    fault: str = ""
    pid: int = 0  # of the client, which may be killed
    meanwhile: Callable[[], object] | None = None  # is called at that request, before the server is
    number: int = 0
    busy: int = 0  # requests that are not answered
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(
        self,
        at: int = -1,
        fault: str = "",
        pid: int = 0,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Count anew, and fail at a request, the first being number 0."""
        self.asked.clear()
        self.number, self.at, self.fault, self.pid = 0, at, fault, pid
        self.meanwhile = meanwhile

    def wait(self) -> None:
        """Wait until all that was asked is answered."""
        while self.busy:
            time.sleep(0.005)

    def next(self) -> bool:
        """Count a request; whether it is the one that fails."""
        with self.lock:
            self.number += 1
            return self.number - 1 == self.at

    @property
    def sent(self) -> int:
        """Bytes of all requests."""
        return sum(each.sent for each in self.asked)


class Handler(BaseHTTPRequestHandler):
    """Passes a request on."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    proxy: FaultProxy

    def do_GET(self) -> None:
        """Answer."""
        with self.proxy.lock:
            self.proxy.busy += 1
        try:
            self.answer_or_fail()
        finally:
            with self.proxy.lock:
                self.proxy.busy -= 1

    def answer_or_fail(self) -> None:
        """Answer, unless this is the request that fails."""
        proxy, nbytes = self.proxy, int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(nbytes)
        if len(body) < nbytes:  # the client is gone
            self.close_connection = True
            return
        fault = proxy.fault if proxy.next() else ""
        if fault and proxy.meanwhile is not None:
            proxy.meanwhile()
        if fault == "killed before":
            self.kill()
        elif fault in STATUS:
            self.note(body, b"")
            self.answer(int(fault), {}, b"")
        elif fault == "reset":
            self.note(body, b"")
            self.reset()
        else:
            self.pass_on(body, fault)

    do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815 (names of the library)

    def pass_on(self, body: bytes, fault: str) -> None:
        """Ask the server, and give its answer, or some of it."""
        server = HTTPConnection(urlsplit(self.proxy.server).netloc)
        server.request(self.command, self.path, body, dict(self.headers.items()))
        got = server.getresponse()
        data = got.read()
        server.close()
        self.note(body, data)
        more = {key: each for key, each in got.getheaders() if key.lower() not in DROPPED}
        if self.command == "HEAD":
            more["Content-Length"] = got.getheader("Content-Length", "0")
        if fault == "killed behind":
            self.kill()
        elif fault == "lost":
            self.reset()
        elif fault == "short":
            self.answer(got.status, more, data[: len(data) // 2])
        else:
            self.answer(got.status, more, data, fault)

    def note(self, body: bytes, data: bytes) -> None:
        """Note a request."""
        self.proxy.asked.append(Asked(self.command, self.path, len(body), len(data)))

    def answer(self, status: int, more: dict[str, str], data: bytes, fault: str = "") -> None:
        """Send an answer; some of it where it is cut, stalls or drips."""
        self.send_response_only(status)
        for key, value in more.items():
            self.send_header(key, value)
        if "Content-Length" not in more:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        half = len(data) // 2
        with suppress(OSError):
            if fault == "drip":
                for at in range(0, len(data), len(data) // 8 + 1):
                    self.wfile.write(data[at : at + len(data) // 8 + 1])
                    self.wfile.flush()
                    time.sleep(0.01)
            elif fault in ("cut", "stall"):
                self.wfile.write(data[:half])
                self.wfile.flush()
                time.sleep(self.proxy.stall_s if fault == "stall" else 0)
                self.reset()
            elif self.command != "HEAD":
                self.wfile.write(data)
            self.wfile.flush()

    def reset(self) -> None:
        """End the connection without a word."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.close()

    def kill(self) -> None:
        """Kill the client."""
        os.kill(self.proxy.pid, signal.SIGKILL)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Says nothing of clients that are gone."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing."""


@contextmanager
def in_front_of(server: str) -> Iterator[FaultProxy]:
    """Pass requests on to a server."""
    proxy = FaultProxy(server)
    handler = type("Passing", (Handler,), {"proxy": proxy})
    listening = Server(("127.0.0.1", 0), handler)
    proxy.url = f"http://127.0.0.1:{listening.server_address[1]}"
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield proxy
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


@pytest.fixture
def proxy(endpoint: str) -> Iterator[FaultProxy]:
    """A proxy in front of the server of `s3_server`."""
    with in_front_of(endpoint) as proxy:
        yield proxy


def with_credentials(way: Callable[..., object], where: tuple[object, ...], how: object) -> None:
    """Push or pull, in a process of its own."""
    os.environ.update(AWS_ACCESS_KEY_ID="name", AWS_SECRET_ACCESS_KEY="hush")
    way(*where, remote=how)
