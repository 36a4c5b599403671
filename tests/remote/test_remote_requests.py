"""Requests of an epoch over a cache behind a URL: few, of few bytes more, ahead, and bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import RangeServer, serving

import featcache
from featcache import CacheWriter, FeatureLoader, FeatureStorageConfig
from featcache.remote import RemoteFiles, RemoteOptions, files, requests_to
from featcache.remote.ranges import Spans, planned

pytest.importorskip("obstore")
BACKENDS = ("memmap", "hdf5", "webdataset", "zarr", "lilcom")
UTTERANCES, BATCH, WINDOW = 300, 8, 5


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("bucket")
    for backend in BACKENDS:
        rng = np.random.default_rng(0)
        features = [FeatureStorageConfig("fbank", backend=backend)]
        with CacheWriter(root / backend, features=features) as writer:
            for number in range(UTTERANCES):
                length = int(rng.integers(10, 60))
                array = rng.normal(size=(length, 8)).astype(np.float32)
                writer.write(f"utt-{number:03d}", {"fbank": array})
    return root


@pytest.fixture
def server(bucket: Path) -> Iterator[RangeServer]:
    with serving(bucket) as state:
        yield state
        requests_to.cache_clear()


def opened(server: RangeServer, backend: str, tmp_path: Path, **more: Any) -> featcache.Cache:
    how = RemoteOptions(pages=tmp_path / "pages", retry_s=20.0, timeout_s=10.0, **more)
    return featcache.open(f"{server.url}/{backend}", remote=how)


def batches_of(cache: featcache.Cache, windows: bool) -> list[list[Any]]:
    order: list[Any] = np.random.default_rng(1).permutation(UTTERANCES).tolist()
    if windows:
        order = [(row, slice(3, 3 + WINDOW)) for row in order]
    return [order[at : at + BATCH] for at in range(0, UTTERANCES, BATCH)]


class Planned:
    """Pieces that were planned together, and what the planner makes of them, none asked twice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gets, self.most_pieces = 0, 0
        self._there: dict[int, Spans] = {}
        self._wanted: dict[int, Spans] = {}
        plain = RemoteFiles.prefetch

        def noted(remote: RemoteFiles, pieces: Sequence[files.Piece], *most: int) -> None:
            self._note(pieces, remote._requests.gap_bytes())
            plain(remote, pieces, *most)

        monkeypatch.setattr(RemoteFiles, "prefetch", noted)

    def _note(self, pieces: Sequence[files.Piece], gap_bytes: int) -> None:
        lacking = []
        for file, begin, nbytes in pieces:
            self._wanted.setdefault(file, Spans()).add(begin, begin + nbytes)
            for first, end in self._there.setdefault(file, Spans()).missing(begin, begin + nbytes):
                lacking.append((file, first, end - first))
        requests = planned(lacking, gap_bytes, files.MOST_BYTES, files.EXTRA)
        self.gets += len(requests)
        self.most_pieces = max(self.most_pieces, len(pieces))
        for file, begin, end in requests:
            self._there[file].add(begin, end)

    @property
    def nbytes(self) -> int:
        """Bytes that were wanted."""
        return sum(end - begin for spans in self._wanted.values() for begin, end in spans)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_epoch_asks_for_what_is_planned_over_all_batches_ahead_and_for_few_bytes_more(
    backend: str,
    windows: bool,
    server: RangeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = opened(server, backend, tmp_path, gap_bytes=200)
    of_opening, least = len(server.requests), Planned(monkeypatch)
    for _ in FeatureLoader(cache, "fbank", batch_sampler=batches_of(cache, windows)):
        pass
    asked = [nbytes for _, _, nbytes in server.requests[of_opening:]]
    assert len(asked) <= 1.05 * least.gets
    assert sum(asked) <= 1.05 * least.nbytes
    assert least.most_pieces > 2 * BATCH  # of several batches
