"""Recordings of a folder."""

import csv
from pathlib import Path

import numpy as np
import soundfile

PEAK = 0.9


class Recordings:
    """Waves by number, as NumPy arrays."""

    def __init__(self, folder, trim=0.0, transform=None):
        self.folder = Path(folder)
        self.trim = trim
        self.transform = transform or normalise
        with (self.folder / "recordings.csv").open(newline="") as file:
            self.rows = sorted(csv.DictReader(file), key=lambda row: row["id"])
        self.ids = [row["id"] for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        start, stop = int(row["start"]), int(row["stop"])
        wav, rate = soundfile.read(
            self.folder / row["wav"], start=start, stop=stop, dtype="float32"
        )
        skipped = int(self.trim * rate)
        wav = self.transform(wav[skipped : len(wav) - skipped])
        return {"id": row["id"], "wav": wav, "text": row["text"], "note": row["note"]}


def normalise(wav):
    """Scale to a fixed peak."""
    return PEAK * wav / np.abs(wav).max()
