"""What computing leaves on objects of libraries is no setting."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from featcache.staleness.provenance import Provenance, noting_changes, provenance

LIBRARY = '''
import torch

class Words:
    """Counts, and fills a table when it is first asked."""

    def __init__(self, gain):
        self.gain, self.table, self.asked = gain, None, 0

    def number(self, word):
        self.asked += 1
        self.table = {"gain": self.gain}
        self.last = word
        return self.gain * len(word)

class Noting(torch.nn.Module):
    def forward(self, values):
        note(self, values)
        return values

def note(module, values):
    module.seen = len(values)
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "words_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("words_library")
    del sys.modules["words_library"]


class Extractor:
    def __init__(self, library: Any, gain: float = 2.0) -> None:
        self.words, self.modules = library.Words(gain), {"noting": library.Noting()}

    def compute_features(self, batch: list[str], stage: object) -> Any:
        return self.modules["noting"](torch.tensor([self.words.number(word) for word in batch]))


def found_in(extractor: Extractor) -> Provenance:
    return provenance(extractor.compute_features)


def compute(extractor: Extractor, *words: str) -> None:
    with noting_changes(found_in(extractor), lambda: found_in(extractor)):
        extractor.compute_features([*words], None)


def test_the_next_split_has_the_fingerprint_of_a_new_process(library: Any) -> None:
    extractor = Extractor(library)
    before = found_in(extractor).fingerprint({})
    for words in (["one"], ["two", "three"], []):  # and again, after each
        compute(extractor, *words)
        assert found_in(extractor).fingerprint({}) == before
    assert before == found_in(Extractor(library)).fingerprint({})


def test_what_the_user_changes_between_runs_counts(library: Any) -> None:
    extractor = Extractor(library)
    before = found_in(extractor).fingerprint({})
    compute(extractor, "one")
    extractor.words.gain = 3.0
    assert found_in(extractor).fingerprint({}) != before
    compute(extractor, "one")
    assert found_in(extractor).fingerprint({}) == found_in(Extractor(library, 3.0)).fingerprint({})
