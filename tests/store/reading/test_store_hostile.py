"""A cache made to do harm is refused: it is not led out of its directory, runs nothing, and takes
no memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import FINGERPRINT, change_index, make_cache, read_everything, two_features

import featcache
from featcache import CacheWriter
from featcache.errors import CorruptCacheError, FeatcacheError
from featcache.format import Strings, digest, pack_json, string_columns, unpack_json


def change(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], object]:
    def changed(content: dict[str, Any]) -> None:
        inner: Any = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return changed


HOSTILE: list[Callable[[dict[str, Any]], object]] = [
    change(("parts", 0, "name"), "../outside"),
    change(("parts", 0, "name"), ".."),
    change(("parts", 0, "block_rows"), {}),
    change(("parts", 0, "block_rows", "fbank"), None),
    change(("parts", 0), {}),
    change(("parts",), None),
    change(("index",), "../index.columns"),
    change(("index",), "/dev/zero"),
    change(("index",), 7),
    change(("index_digest",), "0" * 16),
    change(("index_digest",), None),
    change(("parts", 0, "tombstones"), {"file": "../x", "rows": 1, "digest": ""}),
    change(("parts", 0, "tombstones"), 3),
    change(("files",), {"../../outside": "0" * 16}),
    change(("files",), {"/dev/zero": "0" * 16}),
    change(("files",), []),
    change(("sizes",), []),
    change(("sizes",), {"../../outside": [1, 0]}),
    change(("sizes",), {"/dev/zero": [1, 0]}),
    *(
        change(("sizes", "index-000001-00000000.columns"), size)
        for size in (7, [], [1], [1, 0, 0], "10", {"1": 0, "0": 1}, [-1, 0], [1.5, 0], [True, 0])
    ),
    change(("sizes", "index-000001-00000000.columns"), [10, 11]),
    change(("sizes", "index-000001-00000000.columns"), [2**63, 0]),
    lambda content: content["sizes"].update({content["index"]: [2**62, 100]}),
    change(("tags",), {"best": "../../x"}),
    change(("tags",), []),
    change(("requires",), ["something new"]),
    change(("requires",), [7]),
    change(("requires_to_write",), None),
    change(("kind",), "sets"),
    change(("expected",), {"count": -1, "digest": ""}),
    change(("expected",), 100),
    change(("previous",), "../x"),
    change(("complete",), "yes"),
    change(("generation",), "../../x"),
    change(("generation",), -1),
    change(("generation",), 1.5),
    change(("rows",), 10**9),
    change(("dims", "fbank"), [-1]),
    change(("dims", "fbank"), 4),
    change(("dims", "fbank"), [2**62, 2**62]),
    change(("dims",), {}),
    change(("fingerprint",), {}),
    change(("fingerprint",), None),
    change(("fingerprint", "features", "fbank", "dtype"), "object"),
    change(("fingerprint", "features", "fbank", "dtype"), "U8"),
    change(("fingerprint", "features", "fbank", "time_axis"), 5),
    change(("fingerprint", "features", "fbank", "codec"), "no such codec"),
    change(("fingerprint", "features", "fbank", "codec"), None),
    change(("fingerprint", "features", "fbank", "options"), 7),
    change(("fingerprint", "features", "fbank"), {}),
    change(("fingerprint", "features", "../../outside"), {"dtype": "float32", "time_axis": 0}),
    lambda content: content.clear(),
    lambda content: content.pop("parts"),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_manifest_is_refused(tmp_path: Path, number: int) -> None:
    make_cache(tmp_path / "train", range(6))
    (tmp_path / "outside").write_bytes(b"x" * 100_000)
    content = unpack_json((tmp_path / "train" / "featcache.json").read_bytes(), "manifest")
    assert isinstance(content, dict)
    HOSTILE[number](content)
    (tmp_path / "train" / "featcache.json").write_bytes(pack_json(content))
    with pytest.raises(FeatcacheError):
        read_everything(tmp_path / "train", "columns")
    with pytest.raises(FeatcacheError):
        read_everything(tmp_path / "train")


@pytest.mark.parametrize(
    "body", [b"[" * 100_000 + b"]" * 100_000, b"{", b"NaN]", b'{"a":}', b"\xff", b'"\\ud800"']
)
def test_a_body_that_is_no_json_is_damage_though_its_checksum_fits(
    tmp_path: Path, body: bytes
) -> None:
    (tmp_path / "featcache.json").write_bytes(b'["' + digest(body).encode() + b'",' + body + b"]")
    with pytest.raises(FeatcacheError):
        featcache.open(tmp_path)


def test_a_hostile_seal_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path, range(6))
    (seal,) = tmp_path.glob("parts/*/part.json")
    before = seal.read_bytes()
    for key, value in (
        ("columns", ["../../../x", 1]),
        ("rows", -1),
        ("block_rows", {"/": 1}),
        ("header", {}),
    ):
        content = unpack_json(before, "seal")
        assert isinstance(content, dict)
        seal.write_bytes(pack_json(content | {key: value}))
        with pytest.raises(CorruptCacheError, match=r"part.json' is damaged"):
            featcache.open(tmp_path, verify="columns")
        with pytest.raises(CorruptCacheError, match=r"part.json' is damaged"):
            CacheWriter(tmp_path, two_features(), FINGERPRINT)


CONTAINERS: list[tuple[str, Any]] = [
    ("container_path", Strings.of(["/etc/passwd", "x"])),
    ("container_path", Strings.of(["../outside", "x"])),
    ("container_path", Strings.of(["parts/../../outside", "x"])),
    ("container_path", Strings.of(["parts//outside", "x"])),
    ("container_path", Strings.of(["a\0b", "x"])),
    ("container_path", Strings.of(["only"])),
    ("container_size", np.array([-1, 7])),
    ("container_size", np.array([1 << 62, 1 << 62])),
    ("container_part", np.array([7, 7], np.int32)),
    ("container_part", np.array([-7, 7], np.int32)),
]


@pytest.mark.parametrize("number", range(len(CONTAINERS)))
def test_hostile_containers_are_refused(tmp_path: Path, number: int) -> None:
    make_cache(tmp_path / "train", range(6), two_features("memmap", "webdataset"))
    (tmp_path / "outside").write_bytes(b"x" * 100_000)
    name, value = CONTAINERS[number]
    changed = dict(string_columns(name, value)) if isinstance(value, Strings) else {name: value}
    change_index(tmp_path / "train", changed)
    for verify in ("columns", "arrays", None):
        with pytest.raises(FeatcacheError):
            read_everything(tmp_path / "train", verify)


def test_nothing_is_read_through_a_link_or_waited_for(tmp_path: Path) -> None:
    make_cache(tmp_path / "train", range(6))
    files = [
        file
        for file in (tmp_path / "train").rglob("*")
        if file.is_file() and not file.name.startswith(("writer", "README"))
    ]
    for file in files:
        aside = tmp_path / "aside"
        file.rename(aside)
        for kind in ("link", "pipe", "device"):
            if kind == "pipe":
                os.mkfifo(file)
            else:
                file.symlink_to(aside if kind == "link" else "/dev/zero")
            with pytest.raises(FeatcacheError, match=re.escape(file.name)):
                read_everything(tmp_path / "train", "columns")
            file.unlink()
        aside.rename(file)
    parts = tmp_path / "train" / "parts"
    parts.rename(tmp_path / "parts")
    parts.symlink_to(tmp_path / "parts")
    with pytest.raises(FeatcacheError, match="is a link"):
        read_everything(tmp_path / "train")


def test_a_writer_leaves_what_a_link_leads_to_alone(tmp_path: Path) -> None:
    make_cache(tmp_path / "train", range(6))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("journal.jsonl", "part.json", "writer.json"):
        (elsewhere / name).write_text("mine")
    (tmp_path / "train" / "parts" / "20200101T000000-deadbeef").symlink_to(elsewhere)
    (tmp_path / "train" / "writer.json").symlink_to(elsewhere / "writer.json")
    make_cache(tmp_path / "train", range(6, 9))
    make_cache(tmp_path / "train", range(3), overwrite=True)
    assert sorted(file.name for file in elsewhere.iterdir()) == [
        "journal.jsonl",
        "part.json",
        "writer.json",
    ]
    assert {file.read_text() for file in elsewhere.iterdir()} == {"mine"}
