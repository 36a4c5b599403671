"""The making of a cache as plain data, and the differences of two."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from store_helpers import make_cache

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ConfigError, CorruptCacheError, NotACacheError, StaleCacheError
from featcache.reading import stale

RECORDED = {
    "when": "2026-03-01T12:00:00+00:00",
    "command": ["/home/me/exp/train.py", "hparams.yaml"],
    "libraries": {"torch": "2.12"},
    "sources": {
        "own_helpers.py:emphasise": "def emphasise(x):\n    return x\n",
        "same": "x = 1",
    },
}


def recorded(path: Path, witnesses: object = RECORDED, gain: int = 1) -> Path:
    features = [FeatureStorageConfig("fbank")]
    with CacheWriter(path, features, {"gain": gain}, overwrite=True) as writer:
        writer.keep_file("made-from", json.dumps(witnesses).encode())
        writer.write("u", {"fbank": np.ones((3, 2))})
    return path


def test_all_that_is_known_of_a_cache_is_plain_data(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    found = featcache.inspect.made_from(path)
    cache = featcache.open(path)
    assert found == {
        "path": str(path),
        "generation": cache.generation,
        "utterances": 1,
        "complete": True,
        "made": "2026-03-01T12:00:00+00:00",
        "by": "train.py",
        "fingerprint": cache.fingerprint,
        "recorded": RECORDED,
    }
    assert json.loads(json.dumps(found)) == found == featcache.inspect.made_from(cache)
    assert featcache.open(path, expect=cache.fingerprint).complete


def test_a_cache_without_a_record_was_made_when_it_was_published(tmp_path: Path) -> None:
    path = make_cache(tmp_path, range(3))
    when = datetime(2025, 5, 5, tzinfo=UTC)
    os.utime(path / "featcache.json", (when.timestamp(), when.timestamp()))
    found = featcache.inspect.made_from(path)
    assert (found["made"], found["recorded"]) == ("2025-05-05T00:00:00+00:00", {})
    assert found["utterances"] == 3


def test_a_damaged_record_is_told_and_hinders_no_reading(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    (file,) = path.glob("made-from-*.json")
    file.write_bytes(file.read_bytes().replace(b"train", b"brain"))
    with pytest.raises(CorruptCacheError, match="made-from-"):
        featcache.inspect.made_from(path)
    assert featcache.open(path)["u"]["fbank"].shape == (3, 2)
    with pytest.raises(StaleCacheError, match=r"made .* ago by .+, was made from something else"):
        featcache.open(path, expect={"gain": 2})


@pytest.mark.parametrize("witnesses", [[], "text", 3, [[["a"]]]])
def test_a_record_that_is_no_object_is_told(tmp_path: Path, witnesses: object) -> None:
    path = recorded(tmp_path, witnesses)
    with pytest.raises(CorruptCacheError, match=r"are no JSON object; .*overwrite=True"):
        featcache.inspect.made_from(path)
    assert len(featcache.open(path)) == 1


@pytest.mark.parametrize("when", [None, 5, "yesterday", "0001-01-01T00:00:00+14:00"])
def test_a_record_of_no_time_is_read_all_the_same(tmp_path: Path, when: object) -> None:
    path = recorded(tmp_path, {"when": when, "command": {"a": 1}})
    assert str(featcache.inspect.made_from(path)["made"]).startswith(str(datetime.now(UTC).year))


def test_by_what_a_cache_was_made_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    when = datetime.fromtimestamp(datetime.now(UTC).timestamp() - 3 * 86400 - 60, UTC)
    path = recorded(tmp_path, {**RECORDED, "when": when.isoformat()})
    with pytest.raises(StaleCacheError, match=r"made 3 days ago by train\.py, was made from some"):
        featcache.open(path, expect={"gain": 2})
    monkeypatch.setattr(stale, "_compared", {})
    caplog.set_level("INFO", "featcache")
    featcache.open(path)
    assert "made 3 days ago by train.py, not checked: give expect=" in caplog.text


def test_two_caches_differ_in_what_they_were_made_from(tmp_path: Path) -> None:
    code = {
        "own_helpers.py:emphasise": "def emphasise(x):\n    return 2 * x\n",
        "same": "x = 1",
    }
    other = {**RECORDED, "libraries": {"torch": "2.13"}, "sources": code}
    a, b = recorded(tmp_path / "a"), recorded(tmp_path / "b", other, gain=3)
    found = featcache.inspect.diff(a, featcache.open(b))
    made = {key: found[key] for key in ("fingerprint", "recorded", "sources")}
    assert made == {
        "fingerprint": ["gain: was 1, now 3"],
        "recorded": ['libraries.torch: was "2.12", now "2.13"'],
        "sources": [
            "--- a/own_helpers.py:emphasise",
            "+++ b/own_helpers.py:emphasise",
            "@@ -1,2 +1,2 @@",
            " def emphasise(x):",
            "-    return x",
            "+    return 2 * x",
        ],
    }
    assert found["ids"] == {"only_a": 0, "only_b": 0, "both": 1}
    assert (found["features"], found["values"]) == ({}, None)
    same = featcache.inspect.diff(a, a)
    assert [same["fingerprint"], same["recorded"], same["sources"]] == [[], [], []]


def test_what_only_one_cache_has_recorded_is_no_difference(tmp_path: Path) -> None:
    a, b = recorded(tmp_path / "a"), make_cache(tmp_path / "b", range(1, 3), fingerprint={"k": 1})
    for one, other in ((a, b), (b, a)):
        found = featcache.inspect.diff(one, other)
        assert (found["recorded"], found["sources"]) == ([], [])
        assert len(found["fingerprint"]) > 2


def test_what_is_no_cache_has_nothing_to_tell(tmp_path: Path) -> None:
    with pytest.raises(NotACacheError, match="does not exist"):
        featcache.inspect.made_from(tmp_path / "none")
    with pytest.raises(NotACacheError, match=r"holds no featcache\.json"):
        featcache.inspect.diff(recorded(tmp_path / "a"), tmp_path)
    with pytest.raises(ConfigError, match="path of a directory"):
        featcache.inspect.diff(recorded(tmp_path / "a"), 5)  # type: ignore[arg-type]


def test_looking_at_a_cache_is_no_reading_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path)
    monkeypatch.setattr(stale, "_compared", {})
    featcache.inspect.diff(path, path)
    featcache.inspect.made_from(path)
    assert "not checked" not in caplog.text


def test_code_that_was_written_since_is_a_reason_to_doubt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as this process can see: what it has loaded, and what lies beside its script."""
    made = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
    record = {**RECORDED, "sources": {"helpers_of_it.py:emphasise": "def emphasise(x): ..."}}
    path = recorded(tmp_path / "cache", record)
    helpers = tmp_path / "helpers_of_it.py"
    helpers.write_text("def emphasise(x): ...")
    monkeypatch.syspath_prepend(tmp_path)
    for since, said in ((-60, ""), (60, "helpers_of_it.py has changed since, not checked: give ")):
        os.utime(helpers, (made + since, made + since))
        monkeypatch.setattr(stale, "_compared", {})
        monkeypatch.setattr(stale, "_told", {})
        featcache.open(path)
        assert said in caplog.text
        assert bool(said) == bool(caplog.records)


def test_a_library_is_not_taken_for_code_of_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages" / "own_helpers.py"
    library.parent.mkdir()
    library.touch()  # just installed
    loaded = ModuleType("own_helpers")
    loaded.__file__ = str(library)
    monkeypatch.setitem(sys.modules, "own_helpers", loaded)
    path = recorded(tmp_path / "cache")
    monkeypatch.setattr(stale, "_compared", {})
    monkeypatch.setattr(stale, "_told", {})
    featcache.open(path)
    assert caplog.records == []


def test_opening_loads_no_module_that_waits_to_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise ImportError(f"loaded by a look at {name}")

    late = Late("late")
    monkeypatch.setitem(sys.modules, "late", late)
    path = recorded(tmp_path, {**RECORDED, "sources": {"late.py:f": "def f(): ..."}})
    monkeypatch.setattr(stale, "_compared", {})
    monkeypatch.setattr(stale, "_told", {})
    assert len(featcache.open(path)) > 0
