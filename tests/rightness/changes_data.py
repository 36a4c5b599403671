"""Changes of the data that matter, and the functions that change data."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]
import numpy as np
import soundfile
import torch
from rightness_changes import Change, Do, Run
from rightness_corpus import RATE_HZ

Entries = dict[str, dict[str, Any]]  # by id


def rewrite_wav(stage: Path, name: str, code: str) -> None:
    """Change the samples `it` of a recording."""
    path = stage / "data" / "wavs" / name
    wav, _ = soundfile.read(path, dtype="float32")
    soundfile.write(path, _changed(wav, code), RATE_HZ, subtype="PCM_16")


def rewrite_wavs(stage: Path, code: str) -> None:
    """Change the samples `it` of all recordings."""
    for path in (stage / "data" / "wavs").iterdir():
        rewrite_wav(stage, path.name, code)


def rewrite_json(stage: Path, name: str, code: str) -> None:
    """Change the value `it` of a JSON file."""
    path = stage / "data" / name
    path.write_text(json.dumps(_changed(json.loads(path.read_text()), code)))


def rewrite_pickled(stage: Path, name: str, code: str) -> None:
    """Change the object `it` of a joblib file."""
    path = stage / "data" / name
    joblib.dump(_changed(joblib.load(path), code), path)


def rewrite_array(stage: Path, name: str, code: str) -> None:
    """Change the array `it` of a .npy file."""
    path = stage / "data" / name
    np.save(path, _changed(np.load(path), code))


def rewrite_weights(stage: Path, name: str, code: str) -> None:
    """Change the state dict `it` of a checkpoint."""
    path = stage / "data" / name
    torch.save(_changed(torch.load(path), code), path)


def rewrite_list(stage: Path, id: str, field: str, value: object) -> None:
    """Change a field of an utterance, in the lists of both recipes."""
    _rewrite_lists(stage, lambda entries: entries[id].update({field: value}))


def swap(stage: Path, first: str, second: str, fields: tuple[str, ...]) -> None:
    """Swap fields of two utterances, in the lists of both recipes."""

    def swap_fields(entries: Entries) -> None:
        one, other = entries[first], entries[second]
        for field in fields:
            one[field], other[field] = other[field], one[field]

    _rewrite_lists(stage, swap_fields)


def swap_files(stage: Path, first: str, second: str) -> None:
    """Swap the names of two recordings."""
    wavs = stage / "data" / "wavs"
    (wavs / first).rename(wavs / "aside")
    (wavs / second).rename(wavs / first)
    (wavs / "aside").rename(wavs / second)


def copy_file(stage: Path, source: str, target: str) -> None:
    """Copy a file of the data."""
    (stage / "data" / target).write_bytes((stage / "data" / source).read_bytes())


def rename(stage: Path, source: str, target: str) -> None:
    """Move a file or folder of the stage."""
    (stage / target).parent.mkdir(parents=True, exist_ok=True)
    (stage / source).rename(stage / target)


def change_unseen(stage: Path, name: str, code: str) -> None:
    """Change samples, and set size and time of the file as they were."""
    path = stage / "data" / "wavs" / name
    was = path.stat()
    rewrite_wav(stage, name, code)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def _rewrite_lists(stage: Path, change: Callable[[Entries], None]) -> None:
    path = stage / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest, indent=1))
    path = stage / "data" / "recordings.csv"
    with path.open(newline="") as file:
        rows: Entries = {row["id"]: dict(row) for row in csv.DictReader(file)}
    change(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows["u00"]))
        writer.writeheader()
        writer.writerows(rows.values())


def _changed(it: Any, code: str) -> Any:
    names = {"it": it, "np": np, "torch": torch}
    exec(code, names)
    return names["it"]


def data(name: str, words: str, *does: Do | Run, recipe: str = "brain") -> Change:
    """Change the data."""
    return Change(name, "data", does, tuple(words.split()), recipe=recipe)


CHANGES = [
    data("one recording is louder", "u03", Do(rewrite_wav, ("u03.wav", "it *= 2"))),
    data("noise in a recording", "u05", Do(rewrite_wav, ("u05.wav", "it[500:900] += 0.1"))),
    data("a recording is reversed", "u11", Do(rewrite_wav, ("u11.wav", "it = it[::-1]"))),
    data("a few samples", "u16", Do(rewrite_wav, ("u16.wav", "it[1000:1030] = 0"))),
    data("a shorter recording", "u09", Do(rewrite_wav, ("u09.wav", "it = it[:-400]"))),
    data(
        "all recordings are filtered",
        "u00 u01 u02 sig wav u07",
        Do(rewrite_wavs, ("it[1:] += it[:-1] / 2",)),
    ),
    data(
        "a recording of which two are cut",
        "u18 u19",
        Do(rewrite_wav, ("long.wav", "it = it[::-1]")),
    ),
    data("another start", "u18", Do(rewrite_list, ("u18", "start", 480))),
    data("another stop", "u19", Do(rewrite_list, ("u19", "stop", 7000))),
    data("start and stop of one recording", "u12", Do(rewrite_list, ("u12", "start", 160))),
    data("two entries swap their recordings", "u02 u06", Do(swap, ("u02", "u06", ("wav", "stop")))),
    data("two files swap their names", "u02 u06", Do(swap_files, ("u02.wav", "u06.wav"))),
    data(
        "neighbours swap, parts of one recording",
        "u18 u19",
        Do(swap, ("u18", "u19", ("start", "stop"))),
    ),
    data("another speaker", "u04 speaker", Do(rewrite_list, ("u04", "speaker", "dan"))),
    data(
        "the levels of speakers",
        "speakers ada",
        Do(rewrite_json, ("speakers.json", "it['ada'] = 0.3")),
    ),
    data(
        "moved, and one recording changed",
        "u10",
        Do(rewrite_wav, ("u10.wav", "it *= 0.5")),
        Do(rename, ("data", "elsewhere")),
        Run(data="elsewhere"),
    ),
    data(
        "changed, with size and time as before",
        "u14",
        Do(change_unseen, ("u14.wav", "it[800:1600] = 0")),
    ),
    data("one is louder", "u03", Do(rewrite_wav, ("u03.wav", "it = it + it**2")), recipe="plain"),
    data("another text", "u01 text", Do(rewrite_list, ("u01", "text", "zebra")), recipe="plain"),
    data(
        "all texts in capitals",
        "u00 u01 u02 text",
        *(Do(rewrite_list, (f"u{n:02}", "text", "ABC")) for n in range(20)),
        recipe="plain",
    ),
    data("another stop", "u07", Do(rewrite_list, ("u07", "stop", 1900)), recipe="plain"),
    data("two swap", "u08 u13", Do(swap, ("u08", "u13", ("wav", "stop"))), recipe="plain"),
    data("two swap their texts", "u00 u04", Do(swap, ("u00", "u04", ("text",))), recipe="plain"),
    data(
        "two files swap their names",
        "u02 u06",
        Do(swap_files, ("u02.wav", "u06.wav")),
        recipe="plain",
    ),
]
