"""The store without torch: caches are written, adopted, read, edited and looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())

import numpy as np
import featcache
from featcache.errors import MissingDependencyError

folder = sys.argv[1]
with featcache.CacheWriter(f"{folder}/cache", [featcache.FeatureStorageConfig("fbank")]) as writer:
    for number in range(20):
        frames = np.full((50 + number, 8), number, np.float32)
        writer.write(f"u{number}", {"fbank": frames}, annotations={"speaker": f"s{number % 3}"})
cache = featcache.open(f"{folder}/cache")
assert cache.read("u3", "fbank").shape == (53, 8)
assert cache.read_batch(["u1", "u2"], "fbank").data.shape == (2, 52, 8)
assert len(cache.filter(speaker="s1")) == 7 and cache.stats("fbank").count > 1000
cache.delete(["u3"])
cache.annotate({"u4": {"n": 3}})
cache.compact()
assert len(cache) == 19
batches = featcache.samplers.BucketBatchSampler(cache, batch_size=4)
assert sum(map(len, batches)) == 19
assert featcache.inspect.made_from(cache)["utterances"] == 19
import os; os.mkdir(f"{folder}/npy"); np.save(f"{folder}/npy/a.npy", np.ones((5, 3), np.float32))
assert len(featcache.adopt(f"{folder}/npy", f"{folder}/adopted", feature="x")) == 1

calls = {
    "featcache.extract": lambda: featcache.extract(None),
    "featcache.through": lambda: featcache.through(folder, len),
    "featcache.FeatureLoader": lambda: featcache.FeatureLoader(cache),
    "featcache.inspect.provenance": lambda: featcache.inspect.provenance(len),
    "featcache.FeatureReader": lambda: cache.reader("fbank")("u1"),
}
for name, call in calls.items():
    try:
        call()
    except MissingDependencyError as error:
        assert name in str(error) and "pip install 'featcache[torch]'" in str(error), error
    else:
        raise AssertionError(name)
assert "torch" not in sys.modules
print("all is well")
"""


def test_without_torch_all_is_there_but_computing_and_training(tmp_path: Path) -> None:
    program = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.stdout == "all is well\n", done.stderr
