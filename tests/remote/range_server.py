"""An HTTP server of a directory: it knows ranges and ETags, counts, and fails when told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

Fault = Callable[["Handler", bytes, int], bool]  # True: it has answered


@dataclass
class RangeServer:
    """What was asked of a server, and what it does with requests."""

    url: str = ""
    requests: list[tuple[str, str, int]] = field(default_factory=list)  # path, range, bytes
    fault: Fault | None = None
    delay_s: float = 0.0
    asked: int = 0  # of all requests
    now: int = 0  # requests that wait for an answer
    most: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all answers."""
        return sum(nbytes for _, _, nbytes in self.requests)

    def of(self, suffix: str) -> list[tuple[str, str, int]]:
        """Return the requests for files of a name."""
        return [each for each in self.requests if each[0].endswith(suffix)]


class Handler(BaseHTTPRequestHandler):
    """Answers GET of files, whole or a range."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: else each waits for an acknowledgement
    disable_nagle_algorithm = True
    state: RangeServer
    root: Path
    content_range = ""
    etag = ""
    size = 0

    def do_GET(self) -> None:
        """Answer."""
        self.state.asked += 1
        self.state.now += 1
        self.state.most = max(self.state.most, self.state.now)
        try:
            time.sleep(self.state.delay_s)
            self.answer_file()
        finally:
            self.state.now -= 1

    def answer_file(self) -> None:
        """Answer with a file."""
        name = unquote(urlsplit(self.path).path).strip("/")
        path = self.root / name
        if not path.is_file():
            self.answer(404, b"")
            return
        status_of = path.stat()
        etag, size = f'"{status_of.st_mtime_ns:x}-{status_of.st_size:x}"', status_of.st_size
        wanted = self.headers.get("Range", "")
        if self.headers.get("If-Match", etag) != etag:
            self.answer(412, b"")
            return
        if self.headers.get("If-None-Match") == etag:
            self.answer(304, b"", {"ETag": etag})
            return
        status, more = 200, {"ETag": etag, "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
        begin, end, self.size, self.etag = 0, size, size, etag
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1, size), 206
            self.content_range = f"bytes {begin}-{end - 1}/{size}"
            more["Content-Range"] = self.content_range
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
        self.state.requests.append((name, wanted, len(data)))
        fault = self.state.fault
        if fault is None or not fault(self, data, status):
            self.answer(status, data, more)

    def answer(self, status: int, data: bytes, more: dict[str, str] | None = None) -> None:
        """Send an answer."""
        self.send_response(status)
        for key, value in (more or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serving(root: Path) -> Iterator[RangeServer]:
    """Serve a directory on this machine."""
    state = RangeServer()
    handler = type("Serving", (Handler,), {"state": state, "root": root})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
