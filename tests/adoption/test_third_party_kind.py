"""A kind of store that another package brings is found, used, and not believed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from npy_folders import save_all, some_arrays
from third_party_install import install

import featcache
from featcache.errors import AdoptionError, ConfigError
from featcache.registry import ADOPTION

KIND = '''
import numpy as np
from featcache.adoptable import Found, one_piece, stored_as

class Flat:
    """A file of float32 rows of three numbers, and one beside it that has id and rows a line."""

    name = "flat"

    def recognises(self, place, what):
        return what.endswith(".flat")

    def index(self, place, what, options):
        with place.open(what + ".ids") as source:
            lines = source.read(0, source.size).decode().split()
        ids, rows = lines[::2], [int(each) for each in lines[1::2]]
        stored = stored_as(options.feature, ids, [(n, 3) for n in rows], ["float32"] * len(rows))
        offsets = 12 * np.cumsum([0, *rows])[:-1]
        feature = one_piece(stored, np.zeros(len(rows)), offsets)
        return Found([what], ids, {options.feature: feature}, {"rows": rows})

KIND = Flat()
'''


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    install(site, "flat_kind", {ADOPTION: {"flat": "flat_kind:KIND"}}, flat_kind=KIND)
    (tmp_path / "data.flat").write_bytes(np.arange(21, dtype=np.float32).tobytes())
    (tmp_path / "data.flat.ids").write_text("a 4\nempty 0\nb 3\n")
    return tmp_path / "data.flat"


def test_a_kind_of_a_stranger_is_recognised(tmp_path: Path, source: Path) -> None:
    cache = featcache.adopt(source, tmp_path / "cache")
    assert np.array_equal(cache.read("a", "feats"), np.arange(12).reshape(4, 3))
    assert np.array_equal(cache.read("b", "feats", 1), np.arange(15, 21).reshape(2, 3))
    assert cache.read("empty", "feats").shape == (0, 3)
    assert list(cache.annotation("rows")) == [4, 3, 0]
    assert cache.fingerprint["adopted"] == "flat"


def test_a_cache_may_lie_beside_a_file_that_it_reads(tmp_path: Path, source: Path) -> None:
    assert len(featcache.adopt(source, tmp_path / "data.cache")) == 3


def test_places_beyond_the_end_are_refused(tmp_path: Path, source: Path) -> None:
    Path(f"{source}.ids").write_text("a 4\nb 4\n")
    with pytest.raises(AdoptionError, match=r"'b', feature 'feats' lies beyond the end"):
        featcache.adopt(source, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_id_that_comes_twice_is_refused(tmp_path: Path, source: Path) -> None:
    Path(f"{source}.ids").write_text("a 4\na 3\n")
    with pytest.raises(AdoptionError, match="'a' twice"):
        featcache.adopt(source, tmp_path / "cache")


def test_a_kind_that_does_not_load_is_told_of_when_no_other_is_found(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "broken"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    install(site, "broken_kind", {ADOPTION: {"broken": "broken_kind:KIND"}}, broken_kind="1 / 0")
    arrays = some_arrays(3)
    assert len(featcache.adopt(save_all(tmp_path / "a", arrays), tmp_path / "cache")) == 3
    (tmp_path / "unknown.bin").write_bytes(b"?")
    with pytest.raises(AdoptionError, match=r"not recognised.*'broken'.*ZeroDivisionError"):
        featcache.adopt(tmp_path / "unknown.bin", tmp_path / "other")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        featcache.adopt(source, tmp_path / "other", kind="broken")


def test_two_kinds_that_recognise_a_source_ask_which(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "second"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    code = KIND.replace('"flat"', '"second"')
    install(site, "second_kind", {ADOPTION: {"second": "second_kind:KIND"}}, second_kind=code)
    with pytest.raises(AdoptionError, match=r"may be of kinds 'flat', 'second'.*kind="):
        featcache.adopt(source, tmp_path / "cache")
    assert len(featcache.adopt(source, tmp_path / "cache", kind="second")) == 3
