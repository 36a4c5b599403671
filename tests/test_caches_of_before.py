"""A cache of featcache 0.1: all that opens, writes or takes one says the same, and changes nothing.

Written by hand, as 0.1 wrote them: a manifest without `write_id`, a part without `page_bytes`, and
the part of a killed writer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import FormatVersionError
from featcache.format import pack_json
from featcache.writing.part_writer import PartWriter

FBANK, PITCH = FeatureStorageConfig("fbank"), FeatureStorageConfig("pitch")
MADE_FROM = {"sr": 16000}
ARRAY = np.ones((3, 8), np.float32)
SEALED, KILLED = "20261123T141922-458d8b64", "20261123T142018-5bc3169f"
SAYS = r"'{}' was written by featcache 0\.1, before its format was fixed; write it again"


def old_cache(path: Path, part: str) -> Path:
    declared = {
        "backend": "memmap", "codec": "raw", "dtype": "float32", "name": "fbank",
        "nonfinite": "error", "options": {}, "stats": True, "time_axis": 0,
    }  # fmt: skip
    header = {"build": 1, "fingerprint": "9901e50494d8e4df", "dims": {"fbank": [8]},
              "block_rows": {"fbank": 0}}  # fmt: skip
    said = {"name": SEALED, "rows": 1, "block_rows": {"fbank": 0}}
    (path / "parts" / part).mkdir(parents=True)
    np.save(path / "parts" / part / "fbank.npy", ARRAY)
    if part == SEALED:
        sealed = {**said, "containers": [["fbank.npy", 544]], "header": header, "digests": {}}
        (path / "parts" / part / "part.json").write_bytes(pack_json(sealed))
    else:
        line = {"id": "u0", "arrays": {"fbank": [3, "0" * 16, [["fbank.npy", 128, 96]]]}}
        lines = pack_json({"header": header}) + b"\n" + pack_json(line) + b"\n"
        (path / "parts" / part / "journal.jsonl").write_bytes(lines)
    manifest = {
        "format": "featcache", "version": 1, "generation": 2, "build": 1, "building": 1,
        "fingerprint": {"features": {"fbank": declared}, **MADE_FROM},
        "building_fingerprint": "9901e50494d8e4df", "complete": True, "rows": 1,
        "dims": {"fbank": [8]}, "digests": {},
        "parts": [{**said, "containers": [[f"parts/{SEALED}/fbank.npy", 544]], "digest": "0" * 16}],
    }  # fmt: skip
    if part == KILLED:
        manifest |= {"parts": [], "rows": 0, "complete": False}
    (path / "featcache.json").write_bytes(pack_json(manifest))
    return path


def write(cache: Path, feature: FeatureStorageConfig = FBANK, overwrite: bool = False) -> None:
    with CacheWriter(cache, [feature], MADE_FROM, overwrite=overwrite) as writer:
        writer.write("u9", {feature.name: ARRAY})


def write_part(cache: Path) -> None:
    with PartWriter(cache, [FBANK], MADE_FROM) as writer:
        writer.write("u9", {"fbank": ARRAY})


def decorate(cache: Path) -> None:
    @featcache.cache(cache)
    def fbank(id: str) -> list[float]:
        return [1.0, 2.0]

    fbank("u9")


class Provider(featcache.EnvironmentProvider):
    def build_env_local(self) -> dict[str, object]:
        return {"dataset": [1.0, 2.0], "ids": ["u1", "u2"], "compute_features": float}


def extract(cache: Path) -> None:
    featcache.extract(Provider(), cache, [FBANK], progressbar=False)


def source(cache: Path) -> Path:
    folder = cache.parent / "source"
    folder.mkdir(exist_ok=True)
    np.save(folder / "u9.npy", ARRAY)
    return folder


def convert_into(cache: Path, overwrite: bool = False) -> None:
    featcache.convert(source(cache), cache, overwrite=overwrite, progressbar=False)


DOORS: dict[str, Callable[[Path], object]] = {
    "open": featcache.open,
    "a version": lambda cache: featcache.open(cache, version="v1"),
    "a reader": lambda cache: featcache.FeatureReader(cache, "fbank").read("u0"),
    "a writer": write,
    "a writer of another feature": lambda cache: write(cache, PITCH),
    "overwrite": lambda cache: write(cache, overwrite=True),
    "a part writer": write_part,
    "a function": lambda cache: featcache.through(cache, lambda id: [1.0, 2.0])("u9"),
    "a decorator": decorate,
    "extract": extract,
    "convert": lambda cache: featcache.convert(cache, cache.parent / "new", progressbar=False),
    "convert into it": convert_into,
    "convert over it": lambda cache: convert_into(cache, overwrite=True),
    "adopt": lambda cache: featcache.adopt(cache, cache.parent / "new"),
    "adopt a part of it": lambda cache: featcache.adopt(cache / "parts", cache.parent / "new"),
    "adopt into it": lambda cache: featcache.adopt(source(cache), cache),
    "adopt over it": lambda cache: featcache.adopt(source(cache), cache, overwrite=True),
    "join": lambda cache: featcache.join(cache, cache),
    "made from": lambda cache: featcache.inspect.made_from(cache),
}


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("part", [SEALED, KILLED])
@pytest.mark.parametrize("door", DOORS)
def test_a_cache_of_before_is_refused_alike_and_stays_as_it_is(
    tmp_path: Path, door: str, part: str
) -> None:
    cache = old_cache(tmp_path / "old", part)
    before = files(cache)
    with pytest.raises(FormatVersionError, match=SAYS.format(cache)):
        DOORS[door](cache)
    assert files(cache) == before


@pytest.mark.parametrize("again", ["elsewhere", "removed"])
def test_it_is_written_again_as_the_refusal_says(tmp_path: Path, again: str) -> None:
    cache = old_cache(tmp_path / "old", SEALED)
    with pytest.raises(FormatVersionError, match=r"another directory, or .*when you have removed"):
        write(cache, overwrite=True)
    new = tmp_path / "new" if again == "elsewhere" else cache.rename(tmp_path / "away") and cache
    write(new)
    assert list(featcache.open(new)) == ["u9"]
