"""Epochs over a cache in an object store: requests, bytes, rate, memory, and what is possible.

python benchmarks/remote.py                 all tables; each line is measured in a fresh process
python benchmarks/remote.py --only rate     one of them

2,000 utterances of 80 float32 numbers a frame, 100 to 500 frames each, in random order, 16 a batch,
default settings, pages in a fresh directory. `windows` are 50 frames at random places.

Requests and bytes are those that the server counts. The *minimum* is what `planned` makes of the
pieces of the batches that are planned together, if nothing is asked for twice. Rates come with bare
`get_range_async` of the same ranges, as many at a time, in turns. Servers: nginx, where it is
installed, with its module `echo` where answers are delayed (libnginx-mod-http-echo); else one of
this file, in a process of its own, which takes the processor of what it serves.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.request import urlopen

import click
import numpy as np
from machine import describe

import featcache
from featcache import CacheWriter, FeatureLoader, FeatureStorageConfig
from featcache.remote import RemoteFiles, RemoteOptions, Requests, files, ranges, requests_to
from featcache.remote.io import Ask

FORMATS = ("memmap", "hdf5", "webdataset", "zarr", "lilcom")
UTTERANCES, DIMS, BATCH, WINDOW = 2000, 80, 16, 50
DELAY_S = 0.03
LARGE_BYTES = 2 << 30
COUNTS = "-counts"


class Answers(asyncio.Protocol):
    """Answers GET of files below a directory, whole or a range, after a delay; counts them."""

    def __init__(self, root: Path, delay_s: float, counts: dict[str, int]) -> None:
        self._root, self._delay_s, self._counts = root, delay_s, counts
        self._mapped: dict[str, memoryview] = {}
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where answers go."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Answer what was asked, all of it."""
        self._asked += data
        while (end := self._asked.find(b"\r\n\r\n")) >= 0:
            asked, self._asked = self._asked[:end].decode(), self._asked[end + 4 :]
            answer = self._answer(asked)
            if self._delay_s:
                asyncio.get_running_loop().call_later(self._delay_s, self._send, answer)
            else:
                self._send(answer)

    def _send(self, answer: Sequence[bytes | memoryview]) -> None:
        if not self._transport.is_closing():
            self._transport.writelines(answer)

    def _answer(self, asked: str) -> Sequence[bytes | memoryview]:
        name = asked.split(" ", 2)[1].strip("/")
        if name == COUNTS:
            data = memoryview(json.dumps(self._counts).encode())
            self._counts.update(gets=0, nbytes=0)
        else:
            path = self._root / name
            if not path.is_file():
                return [b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"]
            if name not in self._mapped:
                self._mapped[name] = memoryview(np.memmap(path, np.uint8, "r").data)
            data = self._mapped[name]
        size, status, more = len(data), "200 OK", ""
        if wanted := re.search(r"range: bytes=(\d+)-(\d+)", asked, re.IGNORECASE):
            begin, end = int(wanted[1]), min(int(wanted[2]) + 1, size)
            data, status = data[begin:end], "206 Partial Content"
            more = f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n"
        if name != COUNTS:
            self._counts["gets"] += 1
            self._counts["nbytes"] += len(data)
        head = (
            f'HTTP/1.1 {status}\r\n{more}ETag: "1"\r\n'
            f"Last-Modified: Wed, 21 Oct 2026 07:28:00 GMT\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return [head.encode(), data]


async def answer(root: Path, delay_s: float) -> None:
    """Serve a directory, and print the port."""
    counts = {"gets": 0, "nbytes": 0}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answers(root, delay_s, counts), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def serving(root: Path, delay_s: float = 0.0) -> Iterator[str]:
    """Serve a directory in another process: its URL."""
    command = [sys.executable, __file__, "--serve", str(root), "--delay", str(delay_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


NGINX = """{module}worker_processes 1; daemon off; pid {work}/pid; error_log {work}/errors crit;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; keepalive_requests 10000000;
  client_body_temp_path {work}/a; proxy_temp_path {work}/b; fastcgi_temp_path {work}/c;
  uwsgi_temp_path {work}/d; scgi_temp_path {work}/e;
  server {{ listen 127.0.0.1:{port}; {files} }}
}}"""


ECHO = Path("/usr/lib/nginx/modules/ngx_http_echo_module.so")
LATE = """location / {{ echo_sleep {delay_s}; echo_exec /now$uri; }}
    location /now/ {{ internal; alias {root}/; }}"""


@contextmanager
def nginx(root: Path, delay_s: float = 0.0, port: int = 18480) -> Iterator[str]:
    """Serve a directory by nginx, each answer after a delay: its URL."""
    files = LATE.format(delay_s=delay_s, root=root) if delay_s else f"root {root};"
    module = f"load_module {ECHO};\n" if delay_s else ""
    with tempfile.TemporaryDirectory() as work:
        Path(work).chmod(0o755)
        settings = Path(work) / "nginx.conf"
        settings.write_text(NGINX.format(work=work, module=module, files=files, port=port))
        command = ["nginx", "-p", work, "-c", str(settings)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                url = f"http://127.0.0.1:{port}"
                for _ in range(100):
                    try:
                        urlopen(url)
                    except OSError as error:
                        if hasattr(error, "code"):  # an answer
                            break
                        time.sleep(0.02)
                yield url
            finally:
                process.terminate()


def write(path: Path, backend: str, utterances: int = UTTERANCES, frames: int = 0) -> None:
    """Write a cache."""
    rng = np.random.default_rng(0)
    with CacheWriter(path, features=[FeatureStorageConfig("fbank", backend=backend)]) as writer:
        for number in range(utterances):
            length = frames or int(rng.integers(100, 500))
            writer.write(
                f"utt-{number:05d}", {"fbank": rng.normal(size=(length, DIMS)).astype("f4")}
            )


def batches_of(cache: featcache.Cache, windows: bool, seed: int = 1) -> list[list[Any]]:
    """Draw the batches of an epoch."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(cache)).tolist()
    if windows:
        lengths = cache.lengths("fbank")
        begins = [int(rng.integers(0, max(lengths[row] - WINDOW, 1))) for row in order]
        order = [(row, slice(b, b + WINDOW)) for row, b in zip(order, begins, strict=True)]
    return [order[at : at + BATCH] for at in range(0, len(order), BATCH)]


def epoch(cache: featcache.Cache, batches: list[list[Any]], **more: Any) -> tuple[float, float]:
    """Read an epoch: seconds until the first batch, and in all."""
    began, first = time.perf_counter(), 0.0
    for _ in FeatureLoader(cache, "fbank", batch_sampler=batches, **more):
        first = first or time.perf_counter() - began
    return first, time.perf_counter() - began


@contextmanager
def behind(url: str, **more: Any) -> Iterator[featcache.Cache]:
    """Open a cache behind a URL, with pages in a fresh directory."""
    with tempfile.TemporaryDirectory() as pages:
        yield featcache.open(url, remote=RemoteOptions(pages=pages, **more))


class Minimum:
    """Requests that the planner makes of what is planned together, if nothing is asked twice."""

    def __init__(self) -> None:
        self.gets = self.wanted_bytes = 0
        self._there: dict[int, ranges.Spans] = {}
        self._wanted: dict[int, ranges.Spans] = {}

    @contextmanager
    def of(self) -> Iterator[None]:
        """Note what is planned meanwhile."""
        plain = RemoteFiles.prefetch

        def noted(remote: RemoteFiles, pieces: Sequence[ranges.Piece], *most: int) -> None:
            self._note(pieces, remote._requests.gap_bytes())
            plain(remote, pieces, *most)

        RemoteFiles.prefetch = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            RemoteFiles.prefetch = plain  # type: ignore[method-assign]

    def _note(self, pieces: Sequence[ranges.Piece], gap_bytes: int) -> None:
        lacking = []
        for file, begin, nbytes in pieces:
            there = self._there.setdefault(file, ranges.Spans())
            wanted = self._wanted.setdefault(file, ranges.Spans())
            for first, end in wanted.missing(begin, begin + nbytes):
                self.wanted_bytes += end - first
            wanted.add(begin, begin + nbytes)
            lacking += [(file, a, b - a) for a, b in there.missing(begin, begin + nbytes)]
        asked = ranges.planned(lacking, gap_bytes, files.MOST_BYTES, files.EXTRA)
        self.gets += len(asked)
        for request in asked:
            self._there[request.file].add(request.begin, request.end)


def counted(url: str) -> dict[str, int]:
    """Return the requests and bytes since the last time."""
    with urlopen(f"{url}/{COUNTS}") as answered:
        return dict(json.loads(answered.read()))


def table_of_requests(root: Path) -> None:
    """Print requests and bytes of an epoch."""
    print(f"{'':22}{'GETs':>8}{'minimum':>9}{'ratio':>7}{'MB':>9}{'of asked':>10}")
    with serving(root) as url:
        for name in FORMATS:
            for windows in (False, True):
                with behind(f"{url}/{name}") as cache:
                    counted(url)
                    minimum = Minimum()
                    with minimum.of():
                        epoch(cache, batches_of(cache, windows))
                    found = counted(url)
                print(
                    f"{name + (', windows' if windows else ', whole'):22}{found['gets']:8,}"
                    f"{minimum.gets:9,}{found['gets'] / minimum.gets:7.3f}"
                    f"{found['nbytes'] / 1e6:9.1f}{found['nbytes'] / minimum.wanted_bytes:10.3f}",
                    flush=True,
                )


async def bare(url: str, asked: list[tuple[str, int, int]], at_a_time: int) -> float:
    """Ask for ranges by obstore alone: seconds."""
    from obstore.store import HTTPStore

    more = {"allow_http": True, "pool_max_idle_per_host": str(at_a_time)}
    store = HTTPStore.from_url(url, client_options=cast(Any, more))
    room = asyncio.Semaphore(at_a_time)

    async def one(name: str, begin: int, end: int) -> None:
        async with room:
            await store.get_range_async(name, start=begin, end=end)

    began = time.perf_counter()
    await asyncio.gather(*(one(*each) for each in asked))
    return time.perf_counter() - began


@contextmanager
def ranges_noted() -> Iterator[list[tuple[str, int, int]]]:
    """Note the ranges that are asked for meanwhile."""
    found: list[tuple[str, int, int]] = []
    plain = Requests.ask

    def noted(requests: Requests, asks: Sequence[Ask]) -> None:
        found.extend((each.name, each.first, each.end) for each in asks)
        plain(requests, asks)

    Requests.ask = noted  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Requests.ask = plain  # type: ignore[method-assign]


def table_of_rates(root: Path) -> None:
    """Print the rate of an epoch, and that of bare requests for the same ranges, in turns."""
    serve: Callable[[Path], Any] = nginx if shutil.which("nginx") else serving
    print(f"server: {serve.__name__}")
    print(f"{'':22}{'GETs':>8}{'MB/s':>8}{'bare':>8}{'ratio':>7}")
    with serve(root) as url:
        for name in ("memmap", "lilcom"):
            for windows in (False, True):
                ours, theirs, nbytes = [], [], 0
                for turn in range(4):
                    with behind(f"{url}/{name}") as cache, ranges_noted() as asked:
                        _, took = epoch(cache, batches_of(cache, windows, turn))
                        nbytes = sum(end - first for _, first, end in asked)
                        ours.append(nbytes / took)
                        theirs.append(nbytes / asyncio.run(bare(f"{url}/{name}", asked, 64)))
                    requests_to.cache_clear()
                ratio = float(np.median(np.array(ours[1:]) / np.array(theirs[1:])))
                print(
                    f"{name + (', windows' if windows else ', whole'):22}{len(asked):8,}"
                    f"{np.median(ours[1:]) / 1e6:8.0f}{np.median(theirs[1:]) / 1e6:8.0f}"
                    f"{ratio:7.2f}",
                    flush=True,
                )


def table_of_delays(root: Path) -> None:
    """Print what an epoch takes where each answer comes after a delay; medians of three."""
    serve = nginx if shutil.which("nginx") and ECHO.exists() else serving
    print(f"server: {serve.__name__}")
    print(
        f"{'':22}{'GETs':>8}{'GET/s':>8}{'bare':>8}{'possible':>9}{'ratio':>7}{'first batch':>13}"
    )
    most = RemoteOptions().concurrency / DELAY_S
    with serve(root, DELAY_S) as url:
        for windows in (False, True):
            found = []
            for turn in range(3):
                with behind(f"{url}/memmap", gap_bytes=0) as cache, ranges_noted() as asked:
                    first, took = epoch(cache, batches_of(cache, windows, turn))
                requests_to.cache_clear()
                alone = asyncio.run(bare(f"{url}/memmap", asked, 64))
                found.append((len(asked) / took, len(asked) / alone, first))
            rate, bare_rate, first = np.median(np.array(found), axis=0).tolist()
            print(
                f"{'memmap' + (', windows' if windows else ', whole'):22}{len(asked):8,}"
                f"{rate:8.0f}{bare_rate:8.0f}{most:9.0f}{rate / most:7.2f}{first:12.2f}s",
                flush=True,
            )


def table_of_the_second_epoch(root: Path) -> None:
    """Print the rate of an epoch whose pages are here, and that of a local cache, in turns."""
    print(f"{'':22}{'GETs':>8}{'ms':>8}{'local':>8}{'ratio':>7}")
    with serving(root) as url:
        for name in FORMATS:
            for windows in (False, True):
                with behind(f"{url}/{name}") as cache:
                    here = featcache.open(root / name)
                    epoch(cache, batches_of(cache, False, 7))
                    counted(url)
                    times = []
                    for turn in range(9):
                        batches = batches_of(cache, windows, turn)
                        took = {}
                        for each in (cache, here) if turn % 2 else (here, cache):
                            took[each is cache] = epoch(each, batches)[1]
                        times.append((took[True], took[False]))
                    remote, local = np.median(np.array(times[1:]), axis=0)
                    gets = counted(url)["gets"]
                print(
                    f"{name + (', windows' if windows else ', whole'):22}{gets:8,}"
                    f"{remote * 1e3:8.1f}{local * 1e3:8.1f}{local / remote:7.2f}",
                    flush=True,
                )


def private_bytes() -> int:
    """Return the bytes of this process that no file is behind."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(
        int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(("Anonymous:",))
    )


def table_of_memory(root: Path) -> None:
    """Print the most private memory while an epoch of 2 GiB is read, above that of before."""
    frames = 1500
    utterances = LARGE_BYTES // (frames * DIMS * 4)
    write(root / "large", "memmap", utterances, frames)
    with serving(root) as url, behind(f"{url}/large") as cache:
        epoch(cache, batches_of(cache, False)[:1])
        before, most, done = private_bytes(), 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.01):
                most = max(most, private_bytes())

        thread = threading.Thread(target=watch)
        thread.start()
        loader = FeatureLoader(cache, "fbank", batch_sampler=batches_of(cache, False))
        for _ in loader:
            time.sleep(0.02)
        done.set()
        thread.join()
        above = (most - before) / 2**20
        print(f"private memory above that of before: {above:.0f} MiB, bar 320")


TABLES: dict[str, Callable[[Path], None]] = {
    "requests": table_of_requests,
    "rate": table_of_rates,
    "delay": table_of_delays,
    "again": table_of_the_second_epoch,
    "memory": table_of_memory,
}


@click.command()
@click.option("--only", type=click.Choice(list(TABLES)), help="One table, in this process.")
@click.option("--root", type=click.Path(path_type=Path), help="Of caches that are there.")
@click.option("--serve", type=click.Path(path_type=Path), help="Serve a directory.")
@click.option("--delay", default=0.0, help="Seconds before each answer.")
def main(only: str | None, root: Path | None, serve: Path | None, delay: float) -> None:
    """Measure caches in object stores."""
    if serve is not None:
        asyncio.run(answer(serve, delay))
        return
    with ExitStack() as stack:
        if root is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            root.chmod(0o755)
        for name in FORMATS:
            if not (root / name).exists():
                write(root / name, name)
        if only is not None:
            TABLES[only](root)
            return
        print(describe(root, "featcache", "obstore"))
        for name in TABLES:
            print(f"\n{name}", flush=True)
            subprocess.run(
                [sys.executable, __file__, "--only", name, "--root", str(root)], check=True
            )


if __name__ == "__main__":
    main()
