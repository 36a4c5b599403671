"""Features and steps on them."""

import os
from math import gcd

import joblib
import numpy as np
import torch
import torchaudio
from scipy import signal

REGISTRY = {}
LIFTER = 22
N_MFCC = 13


def register(name):
    """Enter a function in the registry."""

    def enter(function):
        REGISTRY[name] = function
        return function

    return enter


def load_pickled(path):
    """Load a model of scikit-learn."""
    return joblib.load(path)


def clip(frames, limit):
    """Clip high values."""
    return np.clip(frames, -limit, limit)


@register("lifter")
def lifter(frames):
    """Lift high cepstral coefficients."""
    numbers = np.arange(frames.shape[1])
    return frames * (1 + LIFTER / 2 * np.sin(np.pi * numbers / LIFTER))


@register("flat")
def flat(frames):
    """Leave the coefficients as they are."""
    return frames


class Scale:
    """Scales values."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, values):
        return values * self.factor


def center(values):
    """Take a part of the mean over time away."""
    return values - 0.5 * values.mean(dim=0)


def compose(*functions):
    """Chain functions."""

    def composed(values):
        for function in functions:
            values = function(values)
        return values

    return composed


def make_resampler(source, target):
    """Return a function that changes the sample rate."""
    if source == target:
        return _dc_filter
    common = gcd(source, target)
    return lambda wav: signal.resample_poly(wav, target // common, source // common).astype("f4")


def _dc_filter(wav):
    numerator, denominator = [1.0, -1.0], [1.0, -float(os.environ.get("DC_POLE", "0.99"))]
    return signal.lfilter(numerator, denominator, wav).astype(np.float32)


def mfcc_of(wav, window):
    """Mel cepstra, (frames, 13)."""
    windows = {"hann": torch.hann_window, "hamming": torch.hamming_window}
    transform = torchaudio.transforms.MFCC(
        sample_rate=8000,
        n_mfcc=N_MFCC,
        melkwargs={
            "n_fft": 256,
            "hop_length": 80,
            "n_mels": 24,
            "window_fn": windows[window],
        },
    )
    return transform(torch.from_numpy(wav)).T.float().numpy()
