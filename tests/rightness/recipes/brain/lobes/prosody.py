"""Energy, zero crossings and a rough pitch."""

import os
from enum import Enum
from typing import NamedTuple

import helpers
import torch

SMOOTHING = float(os.getenv("PROSODY_SMOOTHING", "0.5"))


class Range(Enum):
    """Bounds of the pitch in samples."""

    LOW = 20
    HIGH = 90


class Weights(NamedTuple):
    """Weights of the columns."""

    energy: float = 1.0
    crossings: float = 10.0
    pitch: float = 0.05


def pitch_track(frames, low=Range.LOW.value, high=Range.HIGH.value):
    """Lag of the highest autocorrelation."""
    spectrum = torch.fft.rfft(frames, n=512).abs() ** 2
    correlation = torch.fft.irfft(spectrum)[:, low:high]
    return correlation.argmax(dim=1).float() + low


class Prosody:
    """Three columns for each frame."""

    weights = Weights()

    def __init__(self, speakers, tracker, shift):
        self.speakers = speakers
        self.tracker = tracker
        self.shift = shift
        self.columns = [self._energy, self._crossings, self._pitch]

    def __call__(self, wav, speaker):
        columns = [column(wav) for column in self.columns]
        columns[0] = columns[0] - self.speakers[speaker]
        return torch.stack(columns, dim=1)

    def _energy(self, wav):
        return self.weights.energy * helpers.frame_energy(wav, self.shift)

    def _crossings(self, wav):
        signs = torch.sign(wav.unfold(0, 2 * self.shift, self.shift))
        rate = (signs[:, 1:] != signs[:, :-1]).float().mean(dim=1)
        return self.weights.crossings * rate

    def _pitch(self, wav):
        frames = wav.unfold(0, 2 * self.shift, self.shift)
        track = self.tracker(frames)
        return self.weights.pitch * (track + SMOOTHING * torch.roll(track, 1))
