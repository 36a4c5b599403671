"""`FrameTimes`: from seconds to the frames of a feature, by one rule for all that cuts in seconds.

Frame k stands for the time from `offset_s + k * frame_s` to `offset_s + (k + 1) * frame_s`. A cut
at a time goes between two frames, at the boundary nearest to it; half-way it goes to the later one:

    boundary(t) = max(0, floor((t - offset_s) / frame_s + 1 / 2)), and boundary(0) = 0

A segment from s to e holds frames boundary(s) to before boundary(e). So

- neighbours neither share a frame nor leave one out: both have the same boundary between them, and
  boundaries never descend, as t grows;
- each cut but those at 0 is at most half a frame off its time, however far into a recording, so
  that features of any two rates stay aligned to half a frame of each; where a time is a multiple
  of the frames of both, to the same instant;
- a segment from 0 leaves no frame out, also where the first one begins before 0;
- lhotse has the same numbers (`compute_num_frames`: to the nearest, a half goes up).

In float64 a half may look like a little less (1.005 / 0.01 is 100.49999999999999). What lacks at
most a millionth of a frame counts as half. The quotient is off by 4 roundings, each 2**-53 of it at
most: less than a millionth as long as there are fewer than 2e9 frames (35 hours at 16 kHz).
Subtraction, division, addition and floor keep the order of their operands in float64, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.interface import Ints

Seconds64 = NDArray[np.float64]
_HALF = 0.5 + 1e-6  # see above
FEW_FRAMES = 2  # by so many of the longest frames ends of features may differ, if none is said


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """The times of a feature's frames: seconds from one to the next, and at which the first begins.

    >>> times = FrameTimes(frame_s=0.01)
    >>> times.boundaries(np.array([0.0, 1.004, 1.005])).tolist()
    [0, 100, 101]
    """

    frame_s: float
    offset_s: float = 0.0

    @classmethod
    def declared(cls, feature: Mapping[str, Any]) -> FrameTimes | None:
        """Return those of a declaration, as a manifest has it; None where it does not say.

        Raises `ValueError` for what `FeatureStorageConfig` would have refused.
        """
        frame_s, offset_s = feature.get("frame_s"), feature.get("offset_s", 0.0)
        if feature["time_axis"] is None or frame_s is None:
            return None
        numbers = all(type(number) in (int, float) for number in (frame_s, offset_s))
        if not (numbers and 0 < frame_s < math.inf and -math.inf < offset_s < math.inf):
            raise ValueError(f"frame_s {frame_s!r} and offset_s {offset_s!r} are not seconds")
        return cls(float(frame_s), float(offset_s))

    def boundaries(self, seconds: Seconds64) -> Ints:
        """Return the frame that begins at the boundary nearest to each time; never below 0."""
        frames = np.floor((seconds - self.offset_s) / self.frame_s + _HALF)
        return np.where(seconds <= 0, 0, np.maximum(frames, 0)).astype(np.int64)

    def ends_s(self, lengths: Ints) -> Seconds64:
        """Return the time at which the last of so many frames ends."""
        return np.asarray(self.offset_s + lengths * self.frame_s, np.float64)
