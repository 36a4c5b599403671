"""Utterances whose features do not end together, by their lengths and `frame_s`.

Nothing of them is damaged: a frame of padding more or less is usual, and a wrong `frame_s` is a
matter of the declaration. So they are told of in the log.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from featcache.declaration.frame_times import FEW_FRAMES, FrameTimes
from featcache.store.format.index import Index
from featcache.store.format.manifest import Manifest

_log = logging.getLogger("featcache")
_MOST_TOLD = 20


def tell_unequal_ends(cache: Path, manifest: Manifest, index: Index) -> None:
    """Warn of utterances whose features end more than two of the longest frames apart."""
    declared = {name: FrameTimes.declared(feature) for name, feature in manifest.features.items()}
    timed = {name: times for name, times in declared.items() if times is not None}
    if len(timed) < 2 or not len(index):
        return
    ends = {name: times.ends_s(index.features[name].rows) for name, times in timed.items()}
    apart = np.max([*ends.values()], axis=0) - np.min([*ends.values()], axis=0)
    allowed = FEW_FRAMES * max(times.frame_s for times in timed.values())
    rows = np.flatnonzero(apart > allowed * (1 + 1e-6)).tolist()
    if rows:
        told = [
            f"{index.id(row)!r} ({', '.join(f'{name} {ends[name][row]:.6g} s' for name in timed)})"
            for row in rows[:_MOST_TOLD]
        ]
        _log.warning(
            "cache %r: features of %d of %d utterances end more than %d frames (%.6g s) apart: "
            "%s%s; see whether frame_s and offset_s are right, and whether all were computed from "
            "the same audio",
            str(cache), len(rows), len(index), FEW_FRAMES, allowed, ", ".join(told),
            ", ..." * (len(rows) > _MOST_TOLD),
        )  # fmt: skip
