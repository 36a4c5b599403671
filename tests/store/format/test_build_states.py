"""Transitions of the build that writers add parts to: each leads where the table says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from featcache.format import BuildState, Manifest, fingerprint_digest

PROBE, NEW = {"probe-00000000.bin": "0" * 16}, {"probe-11111111.bin": "1" * 16}
MADE_FROM: dict[str, dict[str, Any]] = {
    name: {"features": {}, "model": name} for name in ("old", "new", "third")
}
MADE_OF = {name: fingerprint_digest(each) for name, each in MADE_FROM.items()}
CURRENT = Manifest(
    MADE_FROM["old"],
    build=3,
    building=3,
    building_fingerprint=MADE_OF["old"],
    files=PROBE,
    building_files=NEW,
    accepted=("0" * 16,),
)
ASIDE = replace(CURRENT, building=5, building_fingerprint=MADE_OF["new"])
MANIFESTS = pytest.mark.parametrize("manifest", [CURRENT, ASIDE], ids=["current", "aside"])


def test_an_overwrite_begins_above_all_and_goes_on_where_it_is_made_from_the_same() -> None:
    assert (CURRENT.state, ASIDE.state) == (BuildState.CURRENT, BuildState.ASIDE)
    begun = CURRENT.overwritten(MADE_FROM["new"])
    assert (begun.state, begun.build, begun.building) == (BuildState.ASIDE, 3, 4)
    assert (begun.fingerprint, begun.building_fingerprint) == (MADE_FROM["old"], MADE_OF["new"])
    assert (begun.building_files, begun.files) == ({}, PROBE)
    assert ASIDE.overwritten(MADE_FROM["new"]) is ASIDE
    another = ASIDE.overwritten(MADE_FROM["third"])
    assert (another.building, another.building_fingerprint) == (6, MADE_OF["third"])
    assert another.building_files == {}


@MANIFESTS
def test_what_is_begun_anew_gives_up_what_was_kept_for_a_build(manifest: Manifest) -> None:
    anew = manifest.begun_anew(MADE_FROM["third"])
    assert (anew.state, anew.build, anew.building) == (BuildState.CURRENT, 3, 3)
    assert (anew.fingerprint, anew.building_fingerprint) == (MADE_FROM["third"], MADE_OF["third"])
    assert (anew.building_files, anew.files) == ({}, PROBE)


@MANIFESTS
def test_an_accepted_fingerprint_gives_up_an_overwrite_alone(manifest: Manifest) -> None:
    after = manifest.accepting(MADE_FROM["third"])
    assert (after.state, after.building_fingerprint) == (BuildState.CURRENT, MADE_OF["third"])
    assert after.accepted == ("0" * 16, MADE_OF["old"])
    assert after.is_building(3, MADE_OF["old"])
    assert after.is_building(3, MADE_OF["third"])
    assert after.building_files == (NEW if manifest is CURRENT else {})


@MANIFESTS
def test_a_published_build_has_its_files_and_is_accepted_no_more_than_it_was(
    manifest: Manifest,
) -> None:
    after = replace(manifest, files=PROBE | {"later.bin": "2" * 16}).published()
    assert (after.state, after.build) == (BuildState.CURRENT, manifest.building)
    assert after.building_fingerprint == manifest.building_fingerprint
    assert (after.files, after.building_files) == (NEW | {"later.bin": "2" * 16}, {})
    assert after.accepted == (("0" * 16,) if manifest is CURRENT else ())


def test_a_file_of_a_build_is_the_one_that_waits_or_else_the_published_one() -> None:
    assert CURRENT.building_file("probe") == ASIDE.building_file("probe") == NEW
    assert replace(CURRENT, building_files={}).building_file("probe") == PROBE
    assert replace(ASIDE, building_files={}).building_file("probe") == {}
