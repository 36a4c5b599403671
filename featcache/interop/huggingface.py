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
from featcache.interop.audio import Clip, Rows, as_float32

if TYPE_CHECKING:
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
    client: Any = None,
    *,
    audio_folder: str | os.PathLike[str] | None = None,
) -> CutSet:
    """Make a lhotse `CutSet` of a HuggingFace data set.

    This is done on the workers of a Dask client or in this process.

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
        client: a `dask.distributed.Client`, see `featcache.get_client`; its workers load the data
            set themselves, and write to the same disk. None works in this process.
        audio_folder: None is a folder beside the data set's own Arrow files.

    Raises `ConfigError` for what cannot work, `ComputeError` with the number of the row where a row
    is the reason.
    """
    for name in data_info:
        if name in _RESERVED:
            raise ConfigError(
                f"data_info cannot give {name!r}: it is made of the row; call the field something "
                "else"
            )
    if dataset_length < 0:
        raise ConfigError(f"dataset_length is a number of rows, not {dataset_length}")
    where = Path(dataset_id)
    source = _Source(str(where.resolve() if where.exists() else dataset_id), split, dataset_length)
    convert = partial(
        _cuts, dict(data_info), None if audio_folder is None else Path(audio_folder).resolve()
    )
    if client is None:
        return lhotse.CutSet.from_cuts(convert(source, _open(source), range(dataset_length)))
    if not hasattr(client, "gather"):
        raise ConfigError(
            f"client is a Dask client or None, not {client!r}; of a configuration, "
            "featcache.get_client makes one: with get_client(config) as client: ..."
        )
    size = min(_ROWS, max(1, math.ceil(dataset_length / (8 * max(1, len(client.nthreads()))))))
    ranges = [
        range(start, min(start + size, dataset_length)) for start in range(0, dataset_length, size)
    ]
    parts = _map(client, partial(_cuts_in_worker, convert, source, uuid.uuid4().hex), ranges)
    return lhotse.CutSet.from_cuts(cut for part in parts for cut in part)


def _map(
    client: Any, convert: Callable[[range], list[MonoCut]], ranges: Sequence[range]
) -> list[list[MonoCut]]:
    """Have ranges of rows converted, those of workers that die again."""
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


def _cuts_in_worker(
    convert: Callable[[_Source, Rows, range], list[MonoCut]],
    source: _Source,
    run: str,
    numbers: range,
) -> list[MonoCut]:
    return convert(source, _open_once(source, run), numbers)


@lru_cache(maxsize=1)
def _open_once(source: _Source, run: str) -> Rows:
    """Open a data set once in each process of a run; another run may find other data there."""
    return _open(source)


def _open(source: _Source) -> Rows:
    where = Path(source.dataset_id)
    if any((where / name).is_file() for name in ("state.json", "dataset_dict.json")):
        loaded = datasets.load_from_disk(source.dataset_id)
        if isinstance(loaded, datasets.DatasetDict) and source.split is not None:
            if source.split not in loaded:
                known = nearest(source.split, loaded)
                raise ConfigError(f"no split {source.split!r} in {source.dataset_id!r}; {known}")
            loaded = loaded[source.split]
    else:
        loaded = datasets.load_dataset(source.dataset_id, split=source.split)
    if not isinstance(loaded, datasets.Dataset):
        raise ConfigError(
            f"{source.dataset_id!r} has several splits, give one: {', '.join(map(repr, loaded))}"
        )
    if len(loaded) < source.length:
        raise ConfigError(f"{source.dataset_id!r} has {len(loaded)} rows, not {source.length}")
    return Rows(loaded)


def _cuts(
    data_info: DataInfo, folder: Path | None, source: _Source, rows: Rows, numbers: range
) -> list[MonoCut]:
    """Return the cuts of some rows."""
    cuts = []
    folder = folder or _beside(rows.encoded)
    for number in numbers:
        try:
            cuts.append(_cut(data_info, folder, rows[number], number))
        except ConfigError as error:
            raise ConfigError(f"row {number} of {source.dataset_id!r}: {error}") from error
        except Exception as error:  # of a user's function, or a decoder
            raise ComputeError(
                f"row {number} of {source.dataset_id!r} failed with {describe(error)}"
            ) from error
    return cuts


def _beside(dataset: datasets.Dataset) -> Path | None:
    files = [file["filename"] for file in dataset.cache_files]
    return Path(files[0]).parent / "audio" if files else None


def _cut(data_info: DataInfo, folder: Path | None, row: Mapping[str, Any], number: int) -> MonoCut:
    recording = _recording(data_info.get(_AUDIO), folder, row, number)
    fields = {
        name: _plain(name, function(row)) for name, function in data_info.items() if name != _AUDIO
    }
    custom = {name: fields.pop(name) for name in list(fields) if name not in _FIELDS}
    cut = recording.to_cut()
    cut.supervisions = [
        lhotse.SupervisionSegment(
            id=recording.id,
            recording_id=recording.id,
            start=0.0,
            duration=recording.duration,
            channel=cut.channel,
            custom=custom or None,
            **fields,
        )
    ]
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
    audio: Callable[[Any], Any] | None, folder: Path | None, row: Mapping[str, Any], number: int
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


def _wav(samples: Any, sample_rate_hz: int) -> bytes:
    array = as_float32(samples)
    if array.ndim != 1:
        raise ConfigError(
            f"data_info['audio'] gives an array of shape {array.shape}, not (samples,)"
        )
    file = io.BytesIO()
    soundfile.write(file, array, sample_rate_hz, format="WAV", subtype="FLOAT")
    return file.getvalue()


def _sample_rate_hz(row: Mapping[str, Any]) -> int:
    places = [row, *(value for value in row.values() if isinstance(value, Mapping))]
    rates = {place["sampling_rate"] for place in places if "sampling_rate" in place}
    if len(rates) != 1:
        raise ConfigError(
            f"it has the sampling rates {sorted(rates)}; samples of data_info['audio'] need one"
        )
    return int(rates.pop())
