"""Changes of data, libraries and surroundings that do not matter to features."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import joblib  # type: ignore[import-untyped]
import numpy as np
import soundfile
import torch
from changes_code import TRAIN
from changes_data import rename, rewrite_list, rewrite_wav
from changes_libraries import upgrade
from harmless_settings import arguable, clear
from rightness_changes import Append, Do, Environ, Patch, Replace, Run
from rightness_corpus import RATE_HZ


def as_flac(stage: Path) -> None:
    """Store all recordings as FLAC, and name them so."""
    for path in (stage / "data" / "wavs").iterdir():
        samples, _ = soundfile.read(path, dtype="int16")
        soundfile.write(path.with_suffix(".flac"), samples, RATE_HZ)
        path.unlink()
    for name in ("manifest.json", "recordings.csv"):
        listed = stage / "data" / name
        listed.write_text(listed.read_text().replace(".wav", ".flac"))


def as_float(stage: Path) -> None:
    """Store all recordings as float32."""
    for path in (stage / "data" / "wavs").iterdir():
        wav, _ = soundfile.read(path, dtype="float32")
        soundfile.write(path, wav, RATE_HZ, subtype="FLOAT")


def touch(stage: Path) -> None:
    """Give all files of the data another time."""
    for path in (stage / "data").rglob("*.*"):
        os.utime(path)


def copy_again(stage: Path) -> None:
    """Copy the data, without its times."""
    shutil.copytree(stage / "data", stage / "copied", copy_function=shutil.copyfile)
    shutil.rmtree(stage / "data")
    (stage / "copied").rename(stage / "data")


def link(stage: Path) -> None:
    """Leave links where the data were."""
    (stage / "data").rename(stage / "real")
    (stage / "data").symlink_to(stage / "real")


def retag(stage: Path) -> None:
    """Give a recording a title."""
    path = stage / "data" / "wavs" / "u03.wav"
    samples, _ = soundfile.read(path, dtype="int16")
    with soundfile.SoundFile(path, "w", RATE_HZ, 1, "PCM_16") as file:
        file.title = "third"
        file.write(samples)


def save_again(stage: Path) -> None:
    """Save models and arrays in other bytes."""
    data = stage / "data"
    joblib.dump(joblib.load(data / "kmeans.joblib"), data / "kmeans.joblib", compress=3)
    state = torch.load(data / "encoder.ckpt")
    torch.save(dict(state), data / "encoder.ckpt", _use_new_zipfile_serialization=False)
    np.save(data / "codebook.npy", np.asfortranarray(np.load(data / "codebook.npy")))


def reorder(stage: Path) -> None:
    """List the utterances in another order, laid out in another way."""
    path = stage / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({id: manifest[id] for id in reversed(manifest)}))
    path = stage / "data" / "recordings.csv"
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([head, *reversed(rows)]))


def leave_out(stage: Path) -> None:
    """Leave an utterance out."""
    path = stage / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["u05"]
    path.write_text(json.dumps(manifest))


DATA = [
    clear(
        "moved data", Do(rename, ("data", "moved/corpus")), Run(data="moved/corpus"), kind="data"
    ),
    clear(
        "moved data",
        Do(rename, ("data", "moved/corpus")),
        Run(data="moved/corpus"),
        recipe="plain",
        kind="data",
    ),
    clear("FLAC for WAV", Do(as_flac), kind="data"),
    clear("FLAC for WAV", Do(as_flac), recipe="plain", kind="data"),
    clear("float samples for 16 bits", Do(as_float), kind="data"),
    clear("touched", Do(touch), kind="data"),
    clear("touched", Do(touch), recipe="plain", kind="data"),
    clear("copied without times", Do(copy_again), kind="data"),
    clear("links to the data", Do(link), kind="data"),
    clear("a title in a recording", Do(retag), kind="data"),
    clear("saved again in other bytes", Do(save_again), kind="data"),
    clear("another order of utterances", Do(reorder), kind="data"),
    clear("another order of utterances", Do(reorder), recipe="plain", kind="data"),
    clear(
        "samples beyond the parts that are cut",
        Do(rewrite_wav, ("long.wav", "it[8200:] = 0")),
        kind="data",
    ),
    clear(
        "noise far below what is told",
        Do(rewrite_wav, ("u03.wav", "it[::900] += 1e-6")),
        kind="data",
    ),
    clear("another text", Do(rewrite_list, ("u03", "text", "owl")), kind="data"),
    clear("another note", Do(rewrite_list, ("u03", "note", "good")), kind="data"),
    arguable(
        "another note, which the data set gives",
        Do(rewrite_list, ("u03", "note", "good")),
        recipe="plain",
        kind="data",
    ),
    arguable("an utterance left out", Do(leave_out), kind="data"),
    arguable(
        "another output of the data set",
        Replace(TRAIN, '"num_samples", "speaker"]', '"num_samples", "speaker", "text"]'),
        kind="data",
    ),
]

SURROUNDINGS = [
    clear(
        "another hash seed",
        Environ("PYTHONHASHSEED", "77"),
        Run(new_interpreter=True),
        kind="places",
    ),
    clear(
        "another hash seed",
        Environ("PYTHONHASHSEED", "78"),
        Run(new_interpreter=True),
        recipe="plain",
        kind="places",
    ),
    clear("another working directory", Run(folder="data"), kind="places"),
    clear("another working directory", Run(folder="."), recipe="plain", kind="places"),
    clear(
        "the recipe moved",
        Do(rename, ("recipe", "experiments/second")),
        Run(folder="data", code="experiments/second"),
        kind="places",
    ),
    clear(
        "the recipe moved",
        Do(rename, ("recipe", "code")),
        Run(folder="data", code="code"),
        recipe="plain",
        kind="places",
    ),
    clear("another home", Environ("HOME", "/nowhere"), kind="places"),
    clear("another language", Environ("LC_ALL", "C"), kind="places"),
    clear("another time zone", Environ("TZ", "Asia/Tokyo"), kind="places"),
    clear("a variable that nothing reads", Environ("JOB_ID", "815"), kind="places"),
    clear("a variable with its default", Environ("ENERGY_FLOOR", "1e-4"), kind="places"),
    clear("threads by a variable", Environ("OMP_NUM_THREADS", "2"), kind="places"),
    clear("a file beside the recipe", Append("notes.txt", "to do"), kind="places"),
    clear("a script beside the recipe", Append("evaluate.py", "import helpers\n"), kind="places"),
    clear("another version of numpy, no other function", upgrade("numpy"), kind="libraries"),
    clear("another version of torch, no other function", upgrade("torch"), kind="libraries"),
    clear(
        "another version of speechbrain, no other function",
        upgrade("speechbrain"),
        kind="libraries",
    ),
    clear(
        "another version of transformers, no other function",
        upgrade("transformers"),
        recipe="plain",
        kind="libraries",
    ),
    clear(
        "a new function in a library",
        upgrade("soundfile", "library.read_all = lambda path: None\n"),
        kind="libraries",
    ),
    clear(
        "a library's function, slower",
        Patch(
            "import torch\nold = torch.roll\ndef roll(*given, **options):\n"
            "    return old(*given, **options)\ntorch.roll = roll\n"
        ),
        kind="libraries",
    ),
    clear(
        "a library's function, slower",
        Patch(
            "import soundfile\nold = soundfile.read\ndef read(*given, **options):\n"
            "    return old(*given, **options)\nsoundfile.read = read\n"
        ),
        recipe="plain",
        kind="libraries",
    ),
]

CHANGES = DATA + SURROUNDINGS
