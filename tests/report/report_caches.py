"""Caches that reports are made of, with known faults, and a reader of pages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import featcache
from featcache import CacheWriter, FeatureStorageConfig

Array = NDArray[Any]
FRAME_S = 0.01
DIMS = 8
WORDS = "seven eight"
HOSTILE = [
    "<script>window.hacked = 1</script>",
    "\"' onmouseover='window.hacked=1'",
    "مرحبا بالعالم",
    "x" * 300,
    "</script><img src=x onerror=window.hacked=1>",
    "a&amp;b]]>-->",
    "</title></style>",
]


@dataclass
class Utterance:
    """What a cache holds of an utterance."""

    fbank: Array
    units: Array
    speaker: str
    text: str | None
    snr: float


def utterances(count: int = 60) -> dict[str, Utterance]:
    """Utterances of like length and level, without a fault."""
    random = np.random.default_rng(7)
    made = {}
    for number in range(count):
        frames = int(random.integers(40, 61))
        fbank = random.normal(-3, 2, (frames, DIMS)).clip(-9, 9).astype(np.float32)
        units = (20 * random.random(frames) ** 2).astype(np.uint8)
        text = None if number % 10 == 9 else "ab" * (frames // 4)
        speaker, snr = f"speaker {number % 4}", float(random.normal(20, 3))
        made[f"utt-{number:02}"] = Utterance(fbank, units, speaker, text, snr)
    return made


def with_faults() -> dict[str, Utterance]:
    """The same, with a fault of each kind but damage."""
    made = utterances()
    random = np.random.default_rng(8)
    made["utt-03"].fbank[:] = -1
    made["utt-05"].fbank[4:10] = made["utt-05"].fbank[4]
    made["utt-07"].fbank[2, :3] = np.nan, np.inf, -np.inf
    made["utt-11"].fbank = made["utt-09"].fbank.copy()
    made["utt-11"].units = made["utt-09"].units.copy()
    made["utt-13"].fbank[10:16, :] = 20
    made["utt-15"].fbank += 9.5
    made["utt-17"].fbank = (made["utt-17"].fbank + 3) * np.float32(0.001) - 3
    made["utt-19"].fbank = random.normal(-3, 2, (900, DIMS)).astype(np.float32)
    made["utt-19"].units = np.zeros(900, np.uint8)
    made["utt-21"].fbank, made["utt-21"].units = (
        np.zeros((0, DIMS), np.float32),
        np.zeros(0, np.uint8),
    )
    made["utt-23"].units = np.append(made["utt-23"].units, np.arange(10, dtype=np.uint8))
    made["utt-25"].text = "a"
    for each in made.values():  # one dim is dead
        each.fbank[:, 6] = -1
    return made


FEATURES = [
    FeatureStorageConfig("fbank", frame_s=FRAME_S, dims=[DIMS], nonfinite="keep"),
    FeatureStorageConfig("units", dtype="uint8", frame_s=FRAME_S, dims=[]),
]


def write(
    path: Path,
    made: dict[str, Utterance],
    fingerprint: dict[str, object] | None = None,
    failed: tuple[str, ...] = (),
) -> Path:
    """Write a cache of utterances."""
    with CacheWriter(path, FEATURES, fingerprint or {"gain": 3}) as writer:
        writer.expect([*made, *failed])
        for id in failed:
            writer.fail(id)
        for id, each in made.items():
            annotations = {"speaker": each.speaker, "text": each.text, "snr": each.snr}
            writer.write(id, {"fbank": each.fbank, "units": each.units}, annotations=annotations)
    return path


# Pages.


@dataclass
class Page(HTMLParser):
    """A page: its numbers by name, its text, its elements, and where they point."""

    text: str
    numbers: dict[str, float] = field(default_factory=dict)
    unnamed: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    _within: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.text)

    @classmethod
    def of(cls, path: Path) -> Page:
        """Read a page."""
        return cls(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag in ("script", "style"):
            self._within.append(tag)
        if tag == "data":
            value, name = float(given["value"] or "nan"), given.get("data-of")
            if name is None:
                self.unnamed.append(value)
            else:
                assert self.numbers.setdefault(name, value) == value, name

    def handle_endtag(self, tag: str) -> None:
        if self._within and self._within[-1] == tag:
            self._within.pop()

    def handle_data(self, data: str) -> None:
        if not self._within:
            self.said.append(data)

    @property
    def words(self) -> str:
        """All text that a person sees."""
        return re.sub(r"\s+", " ", "".join(self.said))

    def attributes(self, name: str) -> list[str]:
        """The values of an attribute, of all elements."""
        return [given[name] or "" for _, given in self.tags if name in given]


def report(
    path: Path, *caches: Path | featcache.Cache, **settings: Any
) -> tuple[featcache.inspect.Report, Page]:
    """Write a report, and read its page."""
    made = featcache.inspect.report(caches if len(caches) > 1 else caches[0], path, **settings)
    return made, Page.of(path)
