"""Writes utterances, commits, writes more and kills itself.

Run as `python -P killed_writer.py CACHE JOB ARRAYS.npz`.

JOB is JSON: the declared features, the ids to commit, the ids that are written after that. In
ARRAYS, `<number>.<feature>` is an array of the utterance of that number, those to commit counted
first.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import numpy as np

from featcache import CacheWriter, FeatureStorageConfig


def main(path: str, job: str, arrays: str) -> None:
    """Write, commit, write more, die."""
    content = json.loads(job)
    features = [FeatureStorageConfig.from_json(feature) for feature in content["features"]]
    writer = CacheWriter(path, features)
    with np.load(arrays) as file:
        for number, id in enumerate(content["committed"] + content["lost"]):
            if number == len(content["committed"]):
                assert writer.commit() == number
            writer.write(
                id, {feature.name: file[f"{number}.{feature.name}"] for feature in features}
            )
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
