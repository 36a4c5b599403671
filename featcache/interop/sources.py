"""What `extract` can be given as its data set: a HuggingFace data set, a lhotse `CutSet`, a list of utterances."""

from __future__ import annotations

import io
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from featcache.batches import is_map_style, visible_ids, visible_lengths
from featcache.errors import ConfigError, FeatureError, MissingDependencyError, nearest
from featcache.store.files import digest

if TYPE_CHECKING:
    from lhotse import Recording


class Clip(Mapping[str, Any]):
    """The audio of a row, decoded when its samples are first asked for, and then kept.

    Has the keys of a row of `datasets`: "array" (float32 samples, channels averaged), "sampling_rate", "path", "bytes".

    Args:
        path: its file; only a name if there are `data`.
        data: the bytes of a file.
        sample_rate_hz: to which the samples are resampled; None leaves them.
    """

    def __init__(self, path: str | None, data: bytes | None, sample_rate_hz: int | None = None) -> None:
        self.path, self.data = path, data
        self._sample_rate_hz = sample_rate_hz

    def recording(self, id: str) -> Recording:
        """Return the lhotse recording, of which only the header is read; in memory if it has no file."""
        try:
            from lhotse import Recording
        except ImportError as error:
            raise MissingDependencyError(
                f"audio is decoded by 'lhotse'; {error}; try: pip install 'featcache[lhotse]'"
            ) from error
        if self.data is not None:
            found = Recording.from_bytes(self.data, id)
        elif self.path is not None and Path(self.path).is_file():
            found = Recording.from_file(Path(self.path).resolve(), id)
        else:
            raise ConfigError(f"the row has no bytes of audio, and its path {self.path!r} is no file here; download it")
        same = self._sample_rate_hz in (None, found.sampling_rate)
        return found if same else found.resample(self._sample_rate_hz)

    @cached_property
    def array(self) -> NDArray[np.float32]:
        """Samples, float32 (samples,)."""
        return cast(NDArray[np.float32], self.recording("").load_audio().mean(axis=0))

    @property
    def sampling_rate(self) -> int:
        """Samples per second."""
        return int(self.recording("").sampling_rate)

    def written(self, folder: Path | None, number: int) -> Clip:
        """Write the bytes of the clip to a file, unless that is there, and return the clip of the file."""
        if self.data is None:
            return self
        if folder is None:
            raise ConfigError("the data set is in memory, and so is its audio; give an audio_folder for it")
        import soundfile

        suffix = Path(self.path or "").suffix or f".{soundfile.info(io.BytesIO(self.data)).format.lower()}"
        path = folder / f"{number // 1000:06}" / f"{number}-{digest(self.data)}{suffix}"  # few files a folder
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
            aside.write_bytes(self.data)
            aside.replace(path)
        return Clip(str(path), None, self._sample_rate_hz)

    def gave(self, samples: object) -> bool:
        """Say whether these samples are those of the clip, untouched."""
        return "array" in vars(self) and samples is self.array

    def __getitem__(self, key: str) -> Any:
        if key not in tuple(self):
            raise KeyError(key)
        return getattr(self, "data" if key == "bytes" else key)

    def __iter__(self) -> Iterator[str]:
        return iter(("path", "bytes", "array", "sampling_rate"))

    def __len__(self) -> int:
        return 4


class Rows:
    """The rows of a data set as dicts, with a `Clip` in each column of audio.

    Decodes with lhotse and soundfile: torchcodec, which `datasets` asks for, need not be installed.
    """

    def __init__(self, dataset: Any) -> None:
        from datasets import Audio

        audio = {name: kind for name, kind in dataset.features.items() if isinstance(kind, Audio)}
        for name in audio:
            dataset = dataset.cast_column(name, Audio(decode=False))
        self.encoded = dataset.with_format(None)
        self.sample_rates_hz: dict[str, int | None] = {name: kind.sampling_rate for name, kind in audio.items()}

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.encoded[index])
        for name, rate in self.sample_rates_hz.items():
            if row[name] is not None:
                row[name] = Clip(row[name]["path"], row[name]["bytes"], rate)
        return row


class Utterance(TypedDict):
    """An item of `Utterances`."""

    id: str
    samples: NDArray[np.float32]  # (samples,); channels are averaged
    sample_rate_hz: int


Sound = tuple[NDArray[np.float32], int]


class Utterances:
    """A data set for `featcache.extract`: its items are an id, samples and their rate, loaded when asked for.

    Args:
        ids: one for each utterance.
        load: gives samples and sample rate by number.
        measure: returns how long the utterances are, in any unit, or None; called when `lengths` is first asked for.
    """

    def __init__(
        self, ids: Sequence[str], load: Callable[[int], Sound], measure: Callable[[], Sequence[float] | None]
    ) -> None:
        self.ids = ids
        self._load, self._measure = load, measure

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Utterance:
        samples, rate = self._load(index)
        return {"id": self.ids[index], "samples": samples, "sample_rate_hz": rate}

    @cached_property
    def lengths(self) -> Sequence[float] | None:
        """How long the utterances are: their duration, or the size of their audio, whatever is known unloaded."""
        return self._measure()


def utterances(source: Any, audio: str = "audio", id: str | None = None) -> Utterances:
    """Make a data set for `featcache.extract` of what holds utterances; nothing is decoded before it is needed.

    Args:
        source: a lhotse `CutSet`, a `datasets.Dataset`, a list of dicts, or any map-style dataset of dicts that shows
            its ids as `ids` or `data_ids`.
        audio: the key or column of the audio: a path, a dict with "path" or "bytes" of a file, or one with "array"
            and "sampling_rate". A cut is its own.
        id: the key or column of the ids. None is "id"; a `datasets.Dataset` without one has its row numbers as ids.

    Raises `ConfigError` if ids or audio are not to be found there.

    >>> tone = {"array": np.zeros(800), "sampling_rate": 8000}
    >>> found = utterances([{"id": "utt-1", "audio": tone}])
    >>> found.ids, found.lengths, found[0]["samples"].shape, found[0]["sample_rate_hz"]
    (['utt-1'], [800], (800,), 8000)
    """
    datasets, lhotse = sys.modules.get("datasets"), sys.modules.get("lhotse")  # loaded, if the source is theirs
    if lhotse is not None and isinstance(source, lhotse.CutSet):
        return _of_cuts(source)
    if datasets is not None and isinstance(source, datasets.Dataset):
        return _of_huggingface(source, audio, id)
    if isinstance(source, list | tuple):
        return _of_items(source, audio, "id" if id is None else id)
    ids = visible_ids(source) if is_map_style(source) else None
    if ids is None:
        raise ConfigError(
            f"the ids of {type(source).__name__!r} are not known before it is loaded: give a list, a lhotse CutSet, a "
            "datasets.Dataset (loaded, not streamed), or a map-style dataset with an attribute `ids`"
        )
    return Utterances(ids, partial(_load_item, source, audio), partial(visible_lengths, source))


def _of_cuts(source: Any) -> Utterances:
    cuts = list(source)  # manifests, some of which are read as they are iterated
    return Utterances([cut.id for cut in cuts], partial(_load_cut, cuts), partial(_durations, cuts))


def _durations(cuts: Sequence[Any]) -> Sequence[float]:
    return [cut.duration for cut in cuts]


def _load_cut(cuts: Sequence[Any], index: int) -> Sound:
    samples = cuts[index].load_audio()
    if samples is None:
        raise FeatureError(f"cut {cuts[index].id!r} has no recording")
    return samples.mean(axis=0), int(cuts[index].sampling_rate)


def _of_huggingface(source: Any, audio: str, id: str | None) -> Utterances:
    for column in (audio, *([] if id is None else [id])):
        if column not in source.column_names:
            raise ConfigError(f"the data set has no column {column!r}; {nearest(column, source.column_names)}")
    if id is None and "id" in source.column_names:
        id = "id"
    ids = list(map(str, range(len(source)) if id is None else source.with_format(None)[id]))
    rows = Rows(source.select_columns(audio))
    return Utterances(ids, partial(_load_item, rows, audio), partial(_sizes_of_column, rows, audio))


def _sizes_of_column(rows: Any, audio: str) -> Sequence[float] | None:
    """Return the sizes of the files in a column of audio; their bytes themselves are not read."""
    import pyarrow.compute as pc  # type: ignore[import-untyped,import-not-found,unused-ignore]

    if audio not in rows.sample_rates_hz:
        return None
    sizes: list[int] = []
    for table in rows.encoded.with_format("arrow").iter(1000):
        column = table[audio].combine_chunks()
        lengths = pc.binary_length(pc.struct_field(column, "bytes")).to_pylist()
        paths = pc.struct_field(column, "path").to_pylist()
        sizes += (_file_size(path) if size is None else size for size, path in zip(lengths, paths, strict=True))
    return sizes


def _file_size(path: str | os.PathLike[str] | None) -> int:
    return Path(path).stat().st_size if path is not None and Path(path).is_file() else 0


def _of_items(items: Sequence[Any], audio: str, id: str) -> Utterances:
    for number, item in enumerate(items):
        for key in (id, audio):
            if not isinstance(item, Mapping) or key not in item:
                found = f"has {', '.join(map(repr, item))}" if isinstance(item, Mapping) else "is no dict"
                raise ConfigError(f"item {number} has no {key!r}: it {found}")
    ids = [str(item[id]) for item in items]
    return Utterances(ids, partial(_load_item, items, audio), partial(_sizes, items, audio))


def _sizes(items: Sequence[Any], audio: str) -> Sequence[float]:
    return [_size(item[audio]) for item in items]


def _size(audio: Any) -> int:
    if isinstance(audio, Mapping):
        known = audio.get("array") if audio.get("array") is not None else audio.get("bytes")
        return len(known) if known is not None else _file_size(audio.get("path"))
    return _file_size(audio)


def _load_item(items: Any, audio: str, index: int) -> Sound:
    item = items[index]
    if not isinstance(item, Mapping) or audio not in item:
        raise FeatureError(f"item {index} is no dict with the key {audio!r}")
    return _decoded(item[audio])


def _decoded(audio: Any) -> Sound:
    if isinstance(audio, Mapping) and "array" in audio and "sampling_rate" in audio:
        samples = np.asarray(audio["array"], np.float32)
        if samples.ndim != 1:
            raise FeatureError(f"an 'array' of audio has the shape (samples,), not {samples.shape}")
        return samples, int(audio["sampling_rate"])
    if isinstance(audio, Mapping) and (audio.get("bytes") is not None or audio.get("path") is not None):
        path, data = audio.get("path"), audio.get("bytes")
    elif isinstance(audio, str | os.PathLike):
        path, data = os.fspath(audio), None
    else:
        raise FeatureError(f"audio is a path, or a dict with 'path', 'bytes' or 'array', not {type(audio).__name__!r}")
    clip = Clip(path, data)
    return clip.array, clip.sampling_rate
