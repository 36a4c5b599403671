"""A cache made to do harm is refused: it is not led out of its directory, runs nothing, and takes no memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import FINGERPRINT, make_cache, read_everything, two_features

import featcache
from featcache import CacheWriter
from featcache.errors import CorruptCacheError, FeatcacheError
from featcache.store.files import digest, pack_json, unpack_json


def change(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], object]:
    def changed(content: dict[str, Any]) -> None:
        inner: Any = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return changed


HOSTILE: list[Callable[[dict[str, Any]], object]] = [
    change(("parts", 0, "containers", 0, 0), "/etc/passwd"),
    change(("parts", 0, "containers", 0, 0), "../outside"),
    change(("parts", 0, "containers", 0, 0), "parts/../../outside"),
    change(("parts", 0, "containers", 0, 0), "parts//outside"),
    change(("parts", 0, "containers", 0, 0), "a\0b"),
    change(("parts", 0, "containers", 0, 0), 7),
    change(("parts", 0, "containers", 0, 1), -1),
    change(("parts", 0, "containers", 0, 1), "7"),
    change(("parts", 0, "containers", 0), ["only"]),
    change(("parts", 0, "name"), "../outside"),
    change(("parts", 0, "name"), ".."),
    change(("parts", 0, "block_rows"), {}),
    change(("parts", 0, "block_rows", "fbank"), None),
    change(("parts", 0), {}),
    change(("parts",), None),
    change(("digests",), {"../../outside": "0" * 16}),
    change(("digests",), {"/dev/zero": "0" * 16}),
    change(("digests",), []),
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


@pytest.mark.parametrize("body", [b"[" * 100_000 + b"]" * 100_000, b"{", b"NaN]", b'{"a":}', b"\xff", b'"\\ud800"'])
def test_a_body_that_is_no_json_is_damage_though_its_checksum_fits(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "featcache.json").write_bytes(b'["' + digest(body).encode() + b'",' + body + b"]")
    with pytest.raises(FeatcacheError):
        featcache.open(tmp_path)


def test_a_hostile_seal_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path, range(6))
    (seal,) = tmp_path.glob("parts/*/part.json")
    before = seal.read_bytes()
    for key, value in (("containers", [["../../../x", 1]]), ("digests", {"/dev/zero": "0"}), ("header", {})):
        content = unpack_json(before, "seal")
        assert isinstance(content, dict)
        seal.write_bytes(pack_json(content | {key: value}))
        with pytest.raises(CorruptCacheError, match=r"part.json' is damaged"):
            featcache.open(tmp_path, verify="columns")
        with pytest.raises(CorruptCacheError, match=r"part.json' is damaged"):
            CacheWriter(tmp_path, two_features(), FINGERPRINT)


def test_a_column_of_objects_is_never_unpickled(tmp_path: Path) -> None:
    make_cache(tmp_path, range(6))
    index = tmp_path / featcache.open(tmp_path)._manifest.index_directory
    for wrong in (
        np.array([{"a": 1}] * 6, object),
        np.zeros(6, np.int32),
        np.zeros(6, ">i8"),
        np.zeros(6, np.float64),
        np.zeros((3, 2), np.int64),
    ):
        np.save(index / "fbank.rows.npy", wrong, allow_pickle=True)
        with pytest.raises(CorruptCacheError, match=r"fbank.rows.npy' is damaged"):
            featcache.open(tmp_path)
