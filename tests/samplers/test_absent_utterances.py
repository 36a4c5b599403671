"""Files that name utterances which a cache does not have: passed over, and quickly."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_helpers import id_of, make_cache

import featcache
from featcache.espnet.shapes import PackedStrings, utterances_of
from featcache.format import Index


def test_absent_utterances_cost_no_search_for_near_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utterances = utterances_of(None, featcache.open(make_cache(tmp_path, range(9))))
    monkeypatch.delattr(Index, "nearest")
    absent = [f"spk1/utt-{number + 100}" for number in range(10_000)]
    rows = utterances.find(PackedStrings.of([*absent, id_of(3)]), "dataset2utt")
    assert (rows[:-1] == -1).all()
    assert rows[-1] == list(featcache.open(tmp_path)).index(id_of(3))
