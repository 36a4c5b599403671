"""What a lossy codec refuses costs that one utterance, nothing else."""

from pathlib import Path

import numpy as np
import pytest

import featcache
from featcache.errors import FeatureError


def test_an_utterance_that_a_lossy_codec_refuses_is_named_and_the_others_are_stored(
    tmp_path: Path,
) -> None:
    huge = np.random.default_rng(0).uniform(0, 1e12, (5, 4)).astype(np.float32)
    with featcache.CacheWriter(
        tmp_path, [featcache.FeatureStorageConfig("fbank", backend="lilcom")]
    ) as writer:
        writer.write("before", {"fbank": np.ones((5, 4))})
        with pytest.raises(
            FeatureError, match=r"utterance 'huge', feature 'fbank': lilcom cannot hold"
        ):
            writer.write("huge", {"fbank": huge})
        writer.write("after", {"fbank": np.ones((5, 4))})
    cache = featcache.open(tmp_path, verify="arrays")
    assert list(cache) == ["after", "before"]
    assert cache.stats("fbank").count == 10
