"""Synthesis of the spoken digits that the recipe brings along.

`python make_corpus.py` writes `corpus.zip` beside it. Only needed to make the corpus anew; needs
espeak-ng (apt-get install espeak-ng). The same espeak-ng gives the same bytes. Six speakers (an
accent and a voice variant each) say every digit 30 times, each time at a speaking rate, pitch,
pitch range, intonation and level drawn for that recording alone. `corpus.zip` holds
`{digit}_{speaker}_{index}.flac`, 8 kHz mono 16 bit, silence at both ends cut off.
"""

import io
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray
from scipy.signal import resample_poly

SEED = 1
RECORDINGS = 30  # of each digit by each speaker
SAMPLE_RATE_HZ = 8000
# quantisation: the low byte of each sample is zero, which halves the size of the FLAC files
STEP = 2.0**-7
SILENCE = 0.01  # of the loudest sample
SPEAKERS = {
    "alan": "en-gb-scotland+m1",
    "carl": "en-us+m3",
    "dora": "en-us+f2",
    "ella": "en-gb-x-rp+f4",
    "john": "en-gb-x-gbclan+m7",
    "rose": "en-029+f3",
}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
INTONATIONS = ("", ".", ",", "?", "!")


def say(text: str, voice: str, rng: np.random.Generator) -> NDArray[np.float64]:
    """Let espeak-ng say `text` in a way drawn from `rng`.

    Returns samples in -1..1 at 8 kHz, shape (samples,).
    """
    prosody = f'<prosody range="{rng.integers(60, 160)}%">{text}{rng.choice(INTONATIONS)}</prosody>'
    rate, pitch = rng.integers(110, 230), rng.integers(20, 80)
    options = f"-m -v {voice} -s {rate} -p {pitch} -a 50 --stdout".split()
    wav = subprocess.run(["espeak-ng", *options, prosody], capture_output=True, check=True).stdout
    # espeak-ng cannot know the length when it writes the header, so that readers of WAV stumble
    # over it
    samples, rate_hz = np.frombuffer(wav[44:], "<i2") / 32768, int.from_bytes(wav[24:28], "little")
    samples = resample_poly(samples, SAMPLE_RATE_HZ, rate_hz)
    peak = np.abs(samples).max()
    loud = np.flatnonzero(np.abs(samples) > SILENCE * peak)
    samples = samples[loud[0] : loud[-1] + 1] * rng.uniform(0.3, 0.9) / peak
    return np.asarray(np.round(samples / STEP) * STEP)


def flac(samples: NDArray[np.float64]) -> bytes:
    """Encode samples in -1..1 as 16-bit FLAC."""
    file = io.BytesIO()
    soundfile.write(
        file, samples, SAMPLE_RATE_HZ, format="FLAC", subtype="PCM_16", compression_level=1.0
    )
    return file.getvalue()


def main() -> None:
    """Write `corpus.zip`."""
    with zipfile.ZipFile(Path(__file__).with_name("corpus.zip"), "w") as corpus:
        for digit, text in enumerate(DIGITS):
            for number, (speaker, voice) in enumerate(SPEAKERS.items()):
                for index in range(RECORDINGS):
                    samples = say(text, voice, np.random.default_rng((SEED, digit, number, index)))
                    # a ZipInfo made by hand carries no time of writing: reproducible to the byte
                    corpus.writestr(
                        zipfile.ZipInfo(f"{digit}_{speaker}_{index}.flac"), flac(samples)
                    )


if __name__ == "__main__":
    main()
