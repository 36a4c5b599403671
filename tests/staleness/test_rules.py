"""Fingerprints that other versions of featcache made, by other rules, for the same code.

`version-0.json` was made by commit a324023, where fingerprints had no version yet.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import rules_examples
import torch
from rules_examples import EXAMPLES, SCALE, kept

import featcache
from featcache.errors import StaleCacheError
from featcache.format import RULES, canonical
from featcache.inspect import provenance
from featcache.staleness.provenance import VERSION, Provenance

IDS = ["utt-1", "utt-2"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@contextlib.contextmanager
def rules_of(version: int, example: str) -> Iterator[None]:
    """Describe an example as another version did."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Provenance, "sections", lambda *_: kept(version)[example])
        yield


def make(path: Path, example: str, version: int = 0) -> None:
    with rules_of(version, example), featcache.through(path, EXAMPLES[example]) as read:
        for id in IDS:
            read(id)
    assert dict(featcache.open(path).fingerprint).get(RULES, 0) == version


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_same_code_has_the_same_fingerprint_in_all_releases_of_one_version(
    example: str,
) -> None:
    found = canonical(provenance(EXAMPLES[example]).fingerprint({}))
    assert found == kept(VERSION)[example], "raise VERSION, and run python -m rules_examples"


def test_rules_have_changed_between_versions() -> None:
    assert kept(0)["of_module"] != {**kept(1)["of_module"], RULES: 0}


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_cache_made_by_older_rules_is_kept_if_an_utterance_is_the_same(
    path: Path, example: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(path, example)
    with caplog.at_level(logging.WARNING), featcache.through(path, EXAMPLES[example]) as read:
        torch.testing.assert_close(read(IDS[0]), EXAMPLES[example](IDS[0]), rtol=0, atol=0)
    assert "accepted fingerprint_rules" in caplog.text
    now = provenance(EXAMPLES[example]).fingerprint({})
    assert len(featcache.open(path, expect=now)) == len(IDS)
    with featcache.through(path, EXAMPLES[example]) as read:
        read("utt-3")
    assert len(featcache.open(path)) == len(IDS) + 1


def test_a_cache_made_by_older_rules_of_another_state_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(path, "of_module")
    monkeypatch.setattr(SCALE, "ctc_temperature", 3.0)  # which version 0 did not look at
    with (
        pytest.raises(StaleCacheError, match="computed now it is another one"),
        featcache.through(path, EXAMPLES["of_module"]) as read,
    ):
        read(IDS[0])


def test_weights_that_changed_are_refused_whatever_rules_described_them(path: Path) -> None:
    make(path, "of_module")
    with torch.no_grad():
        SCALE.weight[3] += 1  # of no frame of the utterance that is compared, as it were
    try:
        with (
            pytest.raises(StaleCacheError, match="weights"),
            featcache.through(path, EXAMPLES["of_module"]) as read,
        ):
            read(IDS[0])
    finally:
        with torch.no_grad():
            SCALE.weight[3] -= 1


def test_an_utterance_to_compare_is_named(path: Path) -> None:
    make(path, "of_module")
    with (
        pytest.raises(StaleCacheError, match="read 'utt-1' first"),
        featcache.through(path, EXAMPLES["of_module"]) as read,
    ):
        read("utt-9")


class Provider(featcache.EnvironmentProvider):
    """Computes an example for twenty ids, and counts."""

    def __init__(self) -> None:
        self.computed: list[str] = []

    def build_env_local(self) -> dict[str, Any]:
        ids = [f"utt-{number}" for number in range(20)]
        return {"dataset": ids, "ids": ids, "compute_features": self.compute, "batch_size": 1}

    def compute(self, ids: list[str]) -> list[dict[str, Any]]:
        self.computed += ids
        return [{"id": id, "x": rules_examples.of_module(id)} for id in ids]


def extracted(path: Path) -> tuple[featcache.Cache, list[str]]:
    provider = Provider()
    features = [featcache.FeatureStorageConfig("x")]
    path = featcache.extract(provider, path, features, progressbar=False).path
    return featcache.open(path), provider.computed


@pytest.fixture
def extracted_by_older_rules(path: Path) -> Path:
    """Extract by rules that do not look at a setting of a module."""
    sections = Provenance.sections

    def older(self: Provenance, given: Mapping[str, object]) -> dict[str, object]:
        found: dict[str, Any] = sections(self, given)
        del found[RULES]
        settings = dict(found["modules"]["SCALE"]["settings"])
        del settings["ctc_temperature"]
        return {**found, "modules": {"SCALE": {**found["modules"]["SCALE"], "settings": settings}}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Provenance, "sections", older)
        extracted(path)
    return path


def test_an_extraction_goes_on_from_what_older_rules_described(
    extracted_by_older_rules: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, computed = extracted(extracted_by_older_rules)
    assert len(cache) == 20
    assert len(computed) <= 8  # the probe alone, twice where features may be random
    assert f"accepted fingerprint_rules: was (absent), now {VERSION}; modules.SCALE" in caplog.text
    assert dict(cache.fingerprint)[RULES] == VERSION


def test_an_extraction_is_refused_where_older_rules_hid_a_change(
    extracted_by_older_rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SCALE, "ctc_temperature", 3.0)
    with pytest.raises(StaleCacheError, match=r"computed again"):
        extracted(extracted_by_older_rules)


def test_a_cache_made_by_older_rules_that_nobody_may_write_to_is_read_on(
    extracted_by_older_rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr("featcache.extraction.checking.accept", refused)
    cache, _ = extracted(extracted_by_older_rules)
    assert len(cache) == 20
    assert RULES not in dict(cache.fingerprint)


@pytest.mark.parametrize("example", ["plain", "of_module"])
def test_a_reader_that_expects_the_fingerprint_of_now_is_told_of_older_rules(
    path: Path, example: str
) -> None:
    make(path, example)
    now = provenance(EXAMPLES[example]).fingerprint({})
    if example == "plain":  # its description is the same but for the version
        assert len(featcache.open(path, expect=now)) == len(IDS)
        return
    with pytest.raises(StaleCacheError, match=r"by other rules.*compute utterances again"):
        featcache.open(path, expect=now)
