"""The block of `docs/guides/editing.md` on append, delete and tag runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import UnknownNameError
from featcache.testing.contract import traces_in

PAGE = ROOT / "docs" / "guides" / "editing.md"
FINGERPRINT = {"model": "wavlm"}


def utterance(
    number: int,
) -> tuple[str, dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]:
    frames = np.random.default_rng(number).standard_normal((9, 4)).astype(np.float32)
    return f"utt-{number}", {"fbank": frames}


def test_the_block_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n([^>].*?)```", PAGE.read_text(), re.DOTALL)
    features = [FeatureStorageConfig("fbank")]
    with CacheWriter(tmp_path, features, FINGERPRINT) as writer:
        for number in range(5):
            writer.write(*utterance(number))
    names = {
        "CacheWriter": CacheWriter,
        "featcache": featcache,
        "path": tmp_path,
        "features": features,
        "fingerprint": FINGERPRINT,
        "new_utterances": map(utterance, range(3, 9)),
    }
    exec(block, names)
    cache = featcache.open(tmp_path, verify="arrays")
    assert cache.complete
    assert list(cache) == ["utt-0", "utt-1", "utt-2", "utt-4", "utt-5", "utt-6", "utt-8"]
    gone = [utterance(number)[1]["fbank"].tobytes() for number in (3, 7)]
    assert not traces_in(tmp_path, gone)
    with pytest.raises(UnknownNameError, match="no version 'v1'"):
        featcache.open(tmp_path, version="v1")
