"""Lines of lhotse manifests: where the arrays of each cut are stored, and what is said of it.

Understood are cuts (`MonoCut`, `MultiCut`) and features, one JSON object a line, as in a `.jsonl`
or `.jsonl.gz` file. lhotse's own rules turn seconds to frames, so that a cut has the frames that
`cut.load_features()` gives; but where that repeats the last frame, since one is stored less than
the cut should have, the frames are those that are stored.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

from featcache.adoptable import ByteSource
from featcache.errors import AdoptionError, describe

LONGEST_LINE = 1 << 26
CUTS = ("MonoCut", "MultiCut")
OTHER_CUTS = ("MixedCut", "PaddingCut")
BEFORE_START = 1e-3  # seconds that a cut may begin before its features
FRAME_DIGITS = 8
SPEAKERS = ("speaker", "language", "gender")
Fields = Mapping[str, object]


class StoredArray(NamedTuple):
    """An array as a manifest describes it."""

    storage: str  # lhotse's name of a reader
    path: str
    key: str
    shape: tuple[int, ...]
    has_time: bool
    frame_s: float | None = None
    first: int = 0  # of the frames that count
    most: int | None = None  # of the frames from there on; None: all


class Item(NamedTuple):
    """A line of a manifest."""

    id: str
    features: StoredArray | None
    others: Mapping[str, StoredArray]  # by name, from `custom`
    annotations: Mapping[str, object]


def manifest_items(source: ByteSource) -> Iterator[Item]:
    """Yield what each line of a manifest says; raises `AdoptionError` for a line that is none."""
    for number, line in enumerate(_lines(source), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise TypeError(f"it is no object but {fields!r:.60}")
            yield _features(fields) if "storage_type" in fields else _cut(fields)
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            where = f"{source.path!r}, line {number}"
            if isinstance(error, AdoptionError):
                raise AdoptionError(f"{where}: {error}") from None
            raise AdoptionError(
                f"{where} is no cut nor features of lhotse: {describe(error)}"
            ) from error


def is_manifest(source: ByteSource) -> bool:
    """Tell whether the first line of a file is a cut, or features."""
    try:
        fields = json.loads(next(_lines(source), b""))
    except (AdoptionError, ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and (
        {"storage_type", "num_frames"} <= fields.keys()
        or fields.get("type") in (*CUTS, *OTHER_CUTS)
    )


def _lines(source: ByteSource) -> Iterator[bytes]:
    file: io.BufferedIOBase = io.BufferedReader(_Raw(source), 1 << 20)
    if source.path.endswith(".gz"):
        file = gzip.GzipFile(fileobj=file)
    try:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise AdoptionError(f"{source.path!r} has a line of more than {LONGEST_LINE} bytes")
            yield line
    except (OSError, EOFError, zlib.error) as error:
        raise AdoptionError(f"{source.path!r} cannot be read: {describe(error)}") from error


class _Raw(io.RawIOBase):
    def __init__(self, source: ByteSource) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._source.read(self._at, min(len(buffer), self._source.size - self._at))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _features(fields: Fields) -> Item:
    id = fields.get("recording_id")
    if not isinstance(id, str):
        raise AdoptionError("these features name no recording; adopt the manifest of the cuts")
    return Item(id, _whole_features(fields), {}, {"duration": float(_seconds(fields, "duration"))})


def _cut(fields: Fields) -> Item:
    kind, id = fields.get("type"), fields.get("id")
    if kind in OTHER_CUTS:
        raise AdoptionError(
            f"cut {id!r} is a {kind}, whose features are computed when they are loaded; save the "
            "cuts without it, or compute its features into storage of their own"
        )
    if kind not in CUTS:
        raise TypeError(f"its type is {kind!r}")
    start, duration = _seconds(fields, "start"), _seconds(fields, "duration")
    features, others = None, {}
    if fields.get("features"):
        features = _features_of_cut(_object(fields, "features"), start, duration)
    annotations: dict[str, object] = {"duration": float(duration), **_supervised(fields)}
    recording = _recording(fields)
    if recording not in (None, id):
        annotations["recording"] = recording
    custom = _object(fields, "custom") if fields.get("custom") else {}
    for name, value in custom.items():
        if isinstance(value, dict) and ("array" in value or "shape" in value):
            others[name] = _custom(name, value, start, duration)
        else:
            annotations.setdefault(name, value)
    return Item(_text(fields, "id"), features, others, annotations)


def _whole_features(fields: Fields) -> StoredArray:
    return StoredArray(
        *_stored(fields),
        shape=(_count(fields["num_frames"]), _count(fields["num_features"])),
        has_time=True,
        frame_s=_seconds(fields, "frame_shift"),
    )


def _features_of_cut(fields: Fields, start: float, duration: float) -> StoredArray:
    begins, frame_s = _seconds(fields, "start"), _seconds(fields, "frame_shift")
    if start < begins - BEFORE_START:
        raise AdoptionError(f"it begins at {start} s, before its features, at {begins} s")
    hz = _count(fields["sampling_rate"])
    first = 0 if math.isclose(start, begins) else _feature_frames(start - begins, frame_s, hz)
    return _whole_features(fields)._replace(
        first=max(first, 0), most=_feature_frames(duration, frame_s, hz)
    )


def _custom(name: str, fields: Fields, start: float, duration: float) -> StoredArray:
    if "array" not in fields:
        return _array(fields)
    stored, begins = _array(_object(fields, "array")), _seconds(fields, "start")
    if fields["temporal_dim"] != 0:
        raise AdoptionError(
            f"array {name!r} has its frames along axis {fields['temporal_dim']}, not 0"
        )
    frame_s = _seconds(fields, "frame_shift")
    first = 0 if math.isclose(start, begins) else _array_frames(start - begins, frame_s)
    return stored._replace(
        has_time=True, frame_s=frame_s, first=max(first, 0), most=_array_frames(duration, frame_s)
    )


def _array(fields: Fields) -> StoredArray:
    shape = fields["shape"]
    if not isinstance(shape, list):
        raise TypeError(f"the shape of an array is {shape!r:.60}")
    return StoredArray(
        *_stored(fields),
        shape=tuple(_count(length) for length in shape),
        has_time=False,
    )


def _stored(fields: Fields) -> tuple[str, str, str]:
    return (
        _text(fields, "storage_type"),
        _text(fields, "storage_path"),
        _text(fields, "storage_key"),
    )


def _feature_frames(seconds: float, frame_s: float, hz: int) -> int:
    """Return frames as lhotse's `compute_num_frames` counts them."""
    hop = round(frame_s * hz)
    return (round(seconds * hz) + hop // 2) // hop


def _array_frames(seconds: float, frame_s: float) -> int:
    """Return frames as lhotse's `seconds_to_frames` counts them."""
    frames = Decimal(round(seconds / frame_s, ndigits=FRAME_DIGITS))
    return int(frames.quantize(Decimal(0), rounding=ROUND_HALF_UP))


def _supervised(fields: Fields) -> dict[str, str]:
    """Return the texts of a cut's supervisions in their order, and what all of them agree on."""
    segments = fields.get("supervisions") or []
    if not isinstance(segments, list) or not all(isinstance(segment, dict) for segment in segments):
        raise TypeError("its supervisions are no list of objects")
    found: dict[str, str] = {}
    texts = [
        segment["text"]
        for segment in sorted(segments, key=lambda segment: _seconds(segment, "start"))
        if isinstance(segment.get("text"), str)
    ]
    if texts:
        found["text"] = " ".join(texts)
    for name in SPEAKERS:
        said = {segment.get(name) for segment in segments}
        if len(said) == 1 and isinstance(value := said.pop(), str):
            found[name] = value
    return found


def _recording(fields: Fields) -> str | None:
    for name, key in (("recording", "id"), ("features", "recording_id")):
        about = fields.get(name)
        if isinstance(about, dict) and isinstance(about.get(key), str):
            return str(about[key])
    return None


def _object(fields: Fields, name: str) -> Fields:
    value = fields[name]
    if not isinstance(value, dict):
        raise TypeError(f"{name!r} is no object but {value!r:.60}")
    return value


def _text(fields: Fields, name: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{name!r} is no text but {value!r:.60}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise TypeError(f"a number of frames, features or hertz is {value!r:.60}")
    return value


def _seconds(fields: Fields, name: str) -> float:
    value = fields[name]
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise TypeError(f"{name!r} is no number but {value!r:.60}")
    return value  # type: ignore[return-value]
