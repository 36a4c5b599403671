"""Small functions on waves and frames."""

import functools
import logging
import math
import os

import torch
from speechbrain.dataio.dataio import read_audio

logger = logging.getLogger(__name__)

EPSILON = 1e-3
BANDS = [(0, 10, 1.0), (10, 20, 0.8)]
_calls = 0


class Curve:
    """Constants of the compression."""

    KNEE = 0.5
    SLOPE = 2.0


def traced(function):
    """Count and log the calls of a function."""

    @functools.wraps(function)
    def wrapper(*arguments, **options):
        global _calls
        _calls += 1
        logger.debug("call %d of %s", _calls, function.__name__)
        return function(*arguments, **options)

    return wrapper


def rescaled(factor):
    """Scale what a function returns."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(values, **options):
            return factor * function(values, **options)

        return wrapper

    return decorate


def load(path, start, stop):
    """Read a part of a recording."""
    sig = read_audio({"file": path, "start": start, "stop": stop})
    return sig, 8000


def remove_offset(sig):
    """Take the mean away."""
    return sig - sig.mean()


@traced
def emphasise(wav, coefficient=0.97):
    """Emphasise high frequencies."""
    previous = torch.nn.functional.pad(wav, (1, 0))[:-1]
    return wav - coefficient * previous


@rescaled(0.2)
def compress(values, power, floor=0.0):
    """Compress loud values; weaken the upper bands."""
    bent = torch.sign(values) * (values.abs() + floor) ** power
    for low, high, weight in BANDS:
        bent[:, low:high] *= weight
    return torch.where(bent > Curve.KNEE, bent * Curve.SLOPE, bent)


def _square(values):
    # keeps the sign
    return values * values.abs() + EPSILON


def _root(values):
    return torch.sign(values) * values.abs().sqrt()


TRANSFORMS = {
    "square": _square,
    "root": _root,
    "none": lambda values: values,
}


def with_context(frames, size):
    """Append the neighbours of each frame."""
    shifted = [torch.roll(frames, step, dims=0) for step in range(1, size + 1)]
    return frames + sum(decay(step + 1) * part for step, part in enumerate(shifted))


@functools.lru_cache(maxsize=None)
def decay(step):
    """Weight of a neighbour."""
    return math.exp(-step)


def frame_energy(wav, shift, *, window=2):
    """Log energy of each frame."""
    frames = wav.unfold(0, window * shift, shift)
    floor = float(os.environ.get("ENERGY_FLOOR", "1e-4"))
    return torch.log(frames.pow(2).mean(dim=1) + floor)


def describe(values):
    """Return a line about an array, for logs."""
    return f"{tuple(values.shape)}, mean {values.mean():.3f}"
