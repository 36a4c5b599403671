"""The command `featcache`, run in this process: what it prints, and its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.cli import main

COMMAND = [sys.executable, "-m", "featcache"]
SPEAKERS = ("anna", "ben", "ella")
FINGERPRINT: dict[str, object] = {"model": "wavlm", "layer": 9}


class Run(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one document that stdout holds."""
        found: dict[str, Any] = json.loads(self.out)
        return found


class _Stream(io.TextIOWrapper):
    def __init__(self, *, terminal: bool, encoding: str, text: bytes = b"") -> None:
        super().__init__(io.BytesIO(text), encoding, write_through=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(self.encoding)


def run(
    *words: str | Path,
    answer: str = "",
    width: int | None = None,
    encoding: str = "utf-8",
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Run the command; with a width, in a terminal of so many columns, where `answer` is typed."""
    terminal = width is not None
    out, err = (_Stream(terminal=terminal, encoding=encoding) for _ in range(2))
    typed = _Stream(terminal=terminal, encoding="utf-8", text=answer.encode())
    code: object = 0
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            patched.delenv(name, raising=False)
        patched.setattr("sys.stdin", typed)
        for name, value in (environment or {}).items():
            patched.setenv(name, value)
        if width is not None:
            patched.setenv("COLUMNS", str(width))
        try:
            main(list(map(str, words)), prog_name="featcache")
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    return Run(code, out.text, err.text)


def id_of(number: int) -> str:
    return f"{SPEAKERS[number % 3]}-{number}"


def fbank_of(number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    frames = 10 + number * 7 % 40
    return np.random.default_rng(number).standard_normal((frames, 8)).astype(np.float32)


def make(path: Path, count: int = 30, *, backend: str = "memmap", first: int = 0) -> Path:
    """A cache of utterances of known content, with annotations; every seventh has no `snr`."""
    features = [
        FeatureStorageConfig("fbank", backend=backend, frame_s=0.01),
        FeatureStorageConfig("units", dtype="uint8"),
    ]
    with CacheWriter(path, features, FINGERPRINT) as writer:
        for number in range(first, first + count):
            fbank = fbank_of(number)
            notes = {
                "speaker": SPEAKERS[number % 3],
                "snr": None if number % 7 == 0 else number / 2,
                "text": f"hello {number} world",
            }
            units = np.arange(len(fbank), dtype=np.uint8)
            writer.write(id_of(number), {"fbank": fbank, "units": units}, annotations=notes)
    return path


def damage(cache: Path, feature: str, id: str) -> None:
    """Change a byte of an array."""
    opened = featcache.open(cache).opened
    columns, row = opened.index.features[feature], opened.index.find(id)
    extent = int(columns.first[row])
    file = cache / opened.index.containers.path(int(columns.container[extent]))
    with file.open("r+b") as stream:
        stream.seek(int(columns.offset[extent]))
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 0xFF]))


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that no test changes."""
    return make(tmp_path_factory.mktemp("stored") / "train")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache that a test may change."""
    return make(tmp_path / "train")
