"""A lhotse `CutSet` of a HuggingFace data set, made by many workers."""

from __future__ import annotations

import io
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from featcache.errors import ComputeError, ConfigError, MissingDependencyError, describe, nearest
from featcache.interop.utterances import AudioRows, Clip, as_float32

if TYPE_CHECKING:
    from distributed import Client
    from lhotse import CutSet, MonoCut, Recording

try:
    import datasets
    import lhotse
    import soundfile
except ImportError as error:
    raise MissingDependencyError(
        f"HuggingFace data sets need 'datasets', 'lhotse' and 'soundfile'; {error}; "
        "try: pip install 'featcache[huggingface]'"
    ) from error

_AUDIO = "audio"  # the field of `data_info` that gives samples
# a supervision's own; others become its custom fields
_FIELDS = ("text", "language", "speaker", "gender")
_RESERVED = ("id", "recording_id", "start", "duration", "channel", "custom", "alignment")
_ROWS = 256  # of a task: a second of work, some 100 kB of cuts
_DEATHS = 3  # of workers at one task: then it is the task's fault

DataInfo = Mapping[str, Callable[[Any], Any]]


def cutset_from_huggingface(
    data_info: DataInfo,
    dataset_length: int,
    dataset_id: str | os.PathLike[str],
    split: str | None = None,
    client: Client | None = None,
    *,
    audio_folder: str | os.PathLike[str] | None = None,
) -> CutSet:
    """Make a lhotse `CutSet` of a HuggingFace data set, here or on the workers of a Dask client.

    The cuts are those of the first `dataset_length` rows, in order; the id of a cut, its recording
    and its supervision is the number of the row, as a string. A clip is decoded at most once, and
    only if a function of `data_info` asks for its "array". Can be saved: no audio is in the cuts. A
    recording is the row's file; audio that lies in the data set itself is written to `audio_folder`
    first, as it is, one file a row.

    Args:
        data_info: for each field of the supervision a function of the row; a field that a
            supervision does not know becomes a custom one. "audio" is no field of it: its function
            returns samples (samples,). Those of an audio column, untouched, say which column is
            meant; others are written to `audio_folder` as float32 WAV. It may be left out where
            there is one audio column.
        dataset_length: how many rows.
        dataset_id: for `datasets.load_dataset`, or the directory of a data set that was saved to
            disk.
        split: which split; needed if there are several.
        client: a `dask.distributed.Client`, see `featcache.workers.get_client`; its workers load
            the data set themselves, and write to the same disk. None works in this process.
        audio_folder: None is a folder beside the data set's own Arrow files.

    Raises `ConfigError` for what cannot work, `ComputeError` with the number of the row where a row
    is the reason.
    """
    for name in data_info:
        if name in _RESERVED:
            raise ConfigError(
                f"data_info cannot give {name!r}: it is made of the row; give another field"
            )
    if dataset_length < 0:
        raise ConfigError(f"dataset_length is a number of rows, not {dataset_length}")
    where, rows = Path(dataset_id), range(dataset_length)
    name = str(where.resolve() if where.exists() else dataset_id)
    source = _Source(name, split, dataset_length, uuid.uuid4().hex)
    folder = None if audio_folder is None else Path(audio_folder).resolve()
    convert = partial(_cuts, dict(data_info), folder, source)
    if client is None:
        cuts = convert(rows)
        _open.cache_clear()
        return lhotse.CutSet.from_cuts(cuts)
    if not hasattr(client, "gather"):
        raise ConfigError(
            f"client is a Dask client or None, not {client!r}; of a configuration, "
            "featcache.workers.get_client makes one: with get_client(config) as client: ..."
        )
    workers = max(1, len(client.nthreads()))  # type: ignore[no-untyped-call]
    size = min(_ROWS, max(1, math.ceil(dataset_length / (8 * workers))))
    parts = _map(client, convert, [rows[start : start + size] for start in rows[::size]])
    return lhotse.CutSet.from_cuts(cut for part in parts for cut in part)


def _map(
    client: Any, convert: Callable[[range], list[MonoCut]], ranges: Sequence[range]
) -> list[list[MonoCut]]:
    """Convert ranges of rows, those of workers that die again."""
    from distributed import KilledWorker

    done: dict[range, list[MonoCut]] = {}
    for _ in range(_DEATHS):
        missing = [rows for rows in ranges if rows not in done]
        futures = client.map(convert, missing, pure=False)
        try:
            for rows, future in zip(missing, futures, strict=True):
                with suppress(KilledWorker):
                    done[rows] = future.result()
        finally:
            client.cancel(futures)  # those that still run after an error
    if len(done) < len(ranges):
        rows = next(rows for rows in ranges if rows not in done)
        raise ComputeError(
            f"{_DEATHS} workers died when they were at rows {rows.start} to {rows.stop - 1}: out "
            "of memory, or a crash in a library? Their logs may say more"
        )
    return [done[rows] for rows in ranges]


class _Source(NamedTuple):
    dataset_id: str
    split: str | None
    length: int
    run: str  # another run may find other data there


@lru_cache(maxsize=1)
def _open(source: _Source) -> AudioRows:
    """Open a data set, once in each process of a run."""
    dataset_id, split, length, _ = source
    if any((Path(dataset_id) / file).is_file() for file in ("state.json", "dataset_dict.json")):
        loaded = datasets.load_from_disk(dataset_id)
        if isinstance(loaded, datasets.DatasetDict) and split is not None:
            if split not in loaded:
                raise ConfigError(f"no split {split!r} in {dataset_id!r}; {nearest(split, loaded)}")
            loaded = loaded[split]
    else:
        loaded = datasets.load_dataset(dataset_id, split=split)
    if not isinstance(loaded, datasets.Dataset):
        splits = ", ".join(map(repr, loaded))
        raise ConfigError(f"{dataset_id!r} has several splits, give one: {splits}")
    if len(loaded) < length:
        raise ConfigError(f"{dataset_id!r} has {len(loaded)} rows, not {length}")
    return AudioRows(loaded)


def _cuts(
    data_info: DataInfo, folder: Path | None, source: _Source, numbers: range
) -> list[MonoCut]:
    """Return the cuts of some rows."""
    cuts, rows = [], _open(source)
    folder = folder or _beside(rows.encoded)
    for number in numbers:
        try:
            cuts.append(_cut(data_info, folder, rows[number], number))
        except ConfigError as error:
            raise ConfigError(f"row {number} of {source.dataset_id!r}: {error}") from error
        except Exception as error:  # of a user's function, or a decoder
            text = f"row {number} of {source.dataset_id!r} failed with {describe(error)}"
            raise ComputeError(text) from error
    return cuts


def _beside(dataset: datasets.Dataset) -> Path | None:
    files = [file["filename"] for file in dataset.cache_files]
    return Path(files[0]).parent / "audio" if files else None


def _cut(
    data_info: DataInfo, folder: Path | None, row: Mapping[str, object], number: int
) -> MonoCut:
    recording = _recording(data_info.get(_AUDIO), folder, row, number)
    fields = {name: _plain(name, give(row)) for name, give in data_info.items() if name != _AUDIO}
    custom = {name: fields.pop(name) for name in list(fields) if name not in _FIELDS}
    cut, id = recording.to_cut(), recording.id
    supervision = lhotse.SupervisionSegment(
        id, id, 0.0, recording.duration, cut.channel, custom=custom or None, **fields
    )
    cut.supervisions = [supervision]
    return cast("MonoCut", cut)


def _plain(name: str, value: object) -> object:
    """Return a value that JSON can hold."""
    value = value.item() if isinstance(value, np.generic) else value
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"data_info gives {type(value).__name__!r} for {name!r}; a supervision holds text, "
            f"numbers, lists: {error}"
        ) from error
    return value


def _recording(
    audio: Callable[[object], object] | None,
    folder: Path | None,
    row: Mapping[str, object],
    number: int,
) -> Recording:
    clips = {name: value for name, value in row.items() if isinstance(value, Clip)}
    if audio is None:
        if len(clips) != 1:
            raise ConfigError(
                f"its columns of audio are {list(clips)}; say by data_info['audio'] what is meant"
            )
        (clip,) = clips.values()
    else:
        samples = audio(row)
        found = [clip for clip in clips.values() if clip.gave(samples)]
        clip = found[0] if found else Clip(None, _wav(samples, _sample_rate_hz(row)))
    return clip.written(folder, number).recording(str(number))


def _wav(samples: object, sample_rate_hz: int) -> bytes:
    array = as_float32(samples)
    if array.ndim != 1:
        shape = array.shape
        raise ConfigError(f"data_info['audio'] gives an array of shape {shape}, not (samples,)")
    file = io.BytesIO()
    soundfile.write(file, array, sample_rate_hz, format="WAV", subtype="FLOAT")
    return file.getvalue()


def _sample_rate_hz(row: Mapping[str, object]) -> int:
    places = [row, *(value for value in row.values() if isinstance(value, Mapping))]
    rates = {place["sampling_rate"] for place in places if "sampling_rate" in place}
    if len(rates) != 1:
        there = f"it has the sampling rates {sorted(rates)}"
        raise ConfigError(f"{there}; samples of data_info['audio'] need one")
    return int(rates.pop())
