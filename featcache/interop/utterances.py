"""Data sets for `extract`: a HuggingFace data set, a lhotse `CutSet`, a list of utterances."""

from __future__ import annotations

import io
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.errors import ConfigError, FeatureError, MissingDependencyError, nearest
from featcache.extraction.datasets import DataSet, is_map_style, visible_ids, visible_lengths
from featcache.extraction.run import values_of
from featcache.extraction.stamping import Entries
from featcache.format import as_id, digest

if TYPE_CHECKING:
    from datasets import Dataset
    from lhotse import CutSet, Recording
    from lhotse.cut import Cut

# The audio of a data set's rows, decoded only where its samples are asked for.


class Clip(Mapping[str, object]):
    """The audio of a row, decoded when its samples are first asked for, and then kept.

    Has the keys of a row of `datasets`: "array" (float32 samples, channels averaged),
    "sampling_rate", "path", "bytes".

    Args:
        path: its file; only a name if there are `data`.
        data: the bytes of a file.
        sample_rate_hz: to which the samples are resampled; None leaves them.
    """

    def __init__(
        self, path: str | None, data: bytes | None, sample_rate_hz: int | None = None
    ) -> None:
        self.path, self.data = path, data
        self._sample_rate_hz = sample_rate_hz

    def recording(self, id: str) -> Recording:
        """Return the lhotse recording, in memory if it has no file; only the header is read."""
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
            raise ConfigError(
                f"the row has no bytes of audio, and its path {self.path!r} is no file here; "
                "download it"
            )
        same = self._sample_rate_hz in (None, found.sampling_rate)
        return found if same else found.resample(self._sample_rate_hz)

    @cached_property
    def _opened(self) -> Recording:
        return self.recording("")

    @cached_property
    def array(self) -> NDArray[np.float32]:
        """Samples, float32 (samples,)."""
        return cast(NDArray[np.float32], self._opened.load_audio().mean(axis=0))

    @property
    def sampling_rate(self) -> int:
        """Samples per second."""
        return int(self._opened.sampling_rate)

    def written(self, folder: Path | None, number: int) -> Clip:
        """Write the bytes of the clip to a file, and return the clip of the file.

        A file that is there and whole is not written again.
        """
        if self.data is None:
            return self
        if folder is None:
            raise ConfigError(
                "the data set is in memory, and so is its audio; give an audio_folder for it"
            )
        import soundfile

        suffix = Path(self.path or "").suffix
        suffix = suffix or f".{soundfile.info(io.BytesIO(self.data)).format.lower()}"
        # few files a folder
        path = folder / f"{number // 1000:06}" / f"{number}-{digest(self.data)}{suffix}"
        # by its size: a sync for each of many small files would take long, and without one a power
        # cut may empty a file
        if not path.is_file() or path.stat().st_size != len(self.data):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
            try:
                aside.write_bytes(self.data)
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
        return Clip(str(path), None, self._sample_rate_hz)

    def gave(self, samples: object) -> bool:
        """Whether these samples are those of the clip, untouched, or the clip itself."""
        return samples is self or ("array" in vars(self) and samples is self.array)

    def __getitem__(self, key: str) -> object:
        if key not in tuple(self):
            raise KeyError(key)
        return getattr(self, "data" if key == "bytes" else key)

    def __iter__(self) -> Iterator[str]:
        return iter(("path", "bytes", "array", "sampling_rate"))

    def __len__(self) -> int:
        return 4


class AudioRows:
    """The rows of a data set as dicts, with a `Clip` in each column of audio.

    Decodes with lhotse and soundfile: torchcodec, which `datasets` asks for, need not be installed.
    """

    def __init__(self, dataset: Dataset) -> None:
        from datasets import Audio

        audio = {name: kind for name, kind in dataset.features.items() if isinstance(kind, Audio)}
        for name in audio:
            dataset = dataset.cast_column(name, Audio(decode=False))
        self.encoded = dataset.with_format(None)
        rates = {name: kind.sampling_rate for name, kind in audio.items()}
        self.sample_rates_hz: dict[str, int | None] = rates

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> dict[str, object]:
        row = dict(self.encoded[index])
        for name, rate in self.sample_rates_hz.items():
            if row[name] is not None:
                row[name] = Clip(row[name]["path"], row[name]["bytes"], rate)
        return row


def as_float32(samples: object) -> NDArray[np.float32]:
    """Return samples as float32; of integers, the dtype's range becomes -1 to just below 1.

    Unsigned ones have their zero in the middle, as those of an 8-bit WAV file.

    >>> as_float32(np.array([0, 128, 192], np.uint8)).tolist()
    [-1.0, 0.0, 0.5]
    """
    array = np.asarray(samples)
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    if array.dtype.kind not in "iu":
        raise FeatureError(f"samples of audio are floats or integers, not {array.dtype.name!r}")
    half = 2.0 ** (8 * array.dtype.itemsize - 1)
    zero = half if array.dtype.kind == "u" else 0.0
    return ((array.astype(np.float64) - zero) / half).astype(np.float32)


# Data sets for `extract`: a HuggingFace data set, a lhotse `CutSet`, a list of utterances.


class UtteranceItem(TypedDict):
    """An item of `Utterances`."""

    id: str
    samples: NDArray[np.float32]  # (samples,); channels are averaged
    sample_rate_hz: int


Sound = tuple[NDArray[np.float32], int]


class Utterances:
    """A data set for `featcache.extract`: ids, and samples with their rate, loaded when asked for.

    Args:
        ids: one for each utterance.
        load: gives samples and sample rate by number.
        measure: returns how long the utterances are, in any unit, or None; called when `lengths` is
            first asked for.
        listed: the data set that they are of, which may have entries.
        describe: returns what gives an annotation by number, given its name.

    Attributes:
        entries: what is listed of each utterance, nothing loaded: it tells what has changed; None
            where nothing is.
    """

    def __init__(
        self,
        ids: Sequence[str],
        load: Callable[[int], Sound],
        measure: Callable[[], Sequence[float] | None],
        listed: object = None,
        describe: Callable[[str], Callable[[int], object]] | None = None,
    ) -> None:
        self.ids = ids
        self.entries = Entries(listed) or None
        self._load, self._measure = load, measure
        self._describe = partial(values_of, listed) if describe is None else describe

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> UtteranceItem:
        samples, rate = self._load(index)
        return {"id": self.ids[index], "samples": samples, "sample_rate_hz": rate}

    def annotation(self, name: str) -> Sequence[object]:
        """Return what is listed of all utterances under a name, None where nothing is.

        A key or a column; of a cut what it has itself, or else its one supervision. Raises
        `ConfigError` for a name that is not there.
        """
        return list(map(self._describe(name), range(len(self))))

    @cached_property
    def lengths(self) -> Sequence[float] | None:
        """Durations of the utterances or sizes of their audio, as far as known without loading."""
        return self._measure()


def utterances(source: object, *, audio: str = "audio", id: str | None = None) -> Utterances:
    """Make a data set for `featcache.extract` of what holds utterances, decoded one by one.

    Args:
        source: a lhotse `CutSet`, a `datasets.Dataset`, a list of dicts, or any map-style dataset
            of dicts that shows its ids as `ids` or `data_ids`.
        audio: the key or column of the audio: a path, a dict with "path" or "bytes" of a file, or
            one with "array" and "sampling_rate". A cut is its own.
        id: the key or column of the ids. None is "id"; a `datasets.Dataset` without one has its row
            numbers as ids.

    Raises `ConfigError` if ids or audio are not to be found there.

    >>> tone = {"array": np.zeros(800), "sampling_rate": 8000}
    >>> found = utterances([{"id": "utt-1", "audio": tone}])
    >>> found.ids, found.lengths, found[0]["samples"].shape, found[0]["sample_rate_hz"]
    (['utt-1'], [800], (800,), 8000)
    """
    # loaded, if the source is theirs
    datasets, lhotse = sys.modules.get("datasets"), sys.modules.get("lhotse")
    if lhotse is not None and isinstance(source, lhotse.CutSet):
        return _of_cuts(source)
    if datasets is not None and isinstance(source, datasets.Dataset):
        return _of_huggingface(source, audio, id)
    if isinstance(source, list | tuple):
        return _of_items(source, audio, "id" if id is None else id)
    if not is_map_style(source) or (ids := visible_ids(source)) is None:
        raise ConfigError(
            f"the ids of {type(source).__name__!r} are not known before it is loaded: give a list, "
            "a lhotse CutSet, a datasets.Dataset (loaded, not streamed), or a map-style dataset "
            "with an attribute `ids`"
        )
    load, measure = partial(_load_item, source, audio), partial(visible_lengths, source)
    return Utterances(ids, load, measure, source)


def _of_cuts(source: CutSet) -> Utterances:
    cuts = list(source)  # manifests, some of which are read as they are iterated
    ids = [cut.id for cut in cuts]
    if [cut.id for cut in islice(source, 1)] != ids[:1]:
        raise ConfigError(
            f"cut {ids[0]!r} has another id when it is read again: lhotse makes new ones for cuts "
            "that are changed; keep the old ones (preserve_id=True), or save the cuts to a file "
            "first"
        )
    describe = partial(_of_supervisions, cuts)
    return Utterances(ids, partial(_load_cut, cuts), partial(_durations, cuts), cuts, describe)


def _of_supervisions(cuts: Sequence[Cut], name: str) -> Callable[[int], object]:
    def value(number: int) -> object:
        cut = cuts[number]
        if hasattr(cut, name):
            return getattr(cut, name)
        if len(cut.supervisions) > 1:
            raise ConfigError(
                f"cut {cut.id!r} has {len(cut.supervisions)} supervisions, and not one {name!r}; "
                "make a cut of each (trim_to_supervisions)"
            )
        return getattr(cut.supervisions[0], name, None) if cut.supervisions else None

    fields = sys.modules["lhotse"].SupervisionSegment.__dataclass_fields__  # which some may lack
    if name not in fields and not any(hasattr(e, name) for c in cuts for e in (c, *c.supervisions)):
        raise ConfigError(f"neither the cuts nor their supervisions have {name!r}")
    return value


def _durations(cuts: Sequence[Cut]) -> Sequence[float]:
    return [cut.duration for cut in cuts]


def _load_cut(cuts: Sequence[Cut], index: int) -> Sound:
    samples = cuts[index].load_audio()
    if samples is None:
        raise FeatureError(f"cut {cuts[index].id!r} has no recording")
    return samples.mean(axis=0), int(cuts[index].sampling_rate)


def _of_huggingface(source: Dataset, audio: str, id: str | None) -> Utterances:
    for column in (audio, audio if id is None else id):
        if column not in source.column_names:
            known = nearest(column, source.column_names)
            raise ConfigError(f"the data set has no column {column!r}; {known}")
    if id is None and "id" in source.column_names:
        id = "id"
    ids = list(map(_as_id, range(len(source)) if id is None else source.with_format(None)[id]))
    column = source.select_columns(audio)
    rows = AudioRows(column)
    load, measure = partial(_load_item, rows, audio), partial(_sizes_of_column, rows, audio)
    return Utterances(ids, load, measure, column, partial(values_of, source))


def _sizes_of_column(rows: AudioRows, audio: str) -> Sequence[float] | None:
    """Return the sizes of the files in a column of audio; their bytes themselves are not read."""
    import pyarrow.compute as pc  # type: ignore[import-untyped,import-not-found,unused-ignore]

    if audio not in rows.sample_rates_hz:
        return None
    sizes: list[int] = []
    for table in rows.encoded.with_format("arrow").iter(1000):
        column = table[audio].combine_chunks()
        lengths = pc.binary_length(pc.struct_field(column, "bytes")).to_pylist()
        paths = pc.struct_field(column, "path").to_pylist()
        both = zip(lengths, paths, strict=True)
        sizes += (_file_size(path) if size is None else size for size, path in both)
    return sizes


def _file_size(path: object) -> int:
    if isinstance(path, str | os.PathLike) and Path(path).is_file():
        return Path(path).stat().st_size
    return 0


def _of_items(items: Sequence[Any], audio: str, id: str) -> Utterances:
    for number, item in enumerate(items):
        is_dict = isinstance(item, Mapping)
        for key in (id, audio):
            if not is_dict or key not in item:
                found = f"has {', '.join(map(repr, item))}" if is_dict else "is no dict"
                raise ConfigError(f"item {number} has no {key!r}: it {found}")
    ids = [_as_id(item[id]) for item in items]
    return Utterances(ids, partial(_load_item, items, audio), partial(_sizes, items, audio), items)


def _as_id(value: object) -> str:
    id = as_id(value)
    if not isinstance(id, str) or id == "":
        raise ConfigError(f"an utterance has the id {value!r}; ids are strings or whole numbers")
    return id


def _sizes(items: Sequence[Mapping[str, object]], audio: str) -> Sequence[float]:
    return [_size(_as_dict(item[audio])) for item in items]


def _size(audio: Mapping[str, Any]) -> int:
    known = [audio[key] for key in ("array", "bytes") if audio.get(key) is not None]
    return len(known[0]) if known else _file_size(audio.get("path"))


def _as_dict(audio: object) -> Mapping[str, Any]:
    """Return audio as a dict with "path", "bytes" or "array"; an empty one for what is none."""
    if isinstance(audio, str | os.PathLike):
        return {"path": os.fspath(audio)}
    return audio if isinstance(audio, Mapping) else {}


def _load_item(items: DataSet, audio: str, index: int) -> Sound:
    item = items[index]
    if not isinstance(item, Mapping) or audio not in item:
        raise FeatureError(f"item {index} is no dict with the key {audio!r}")
    return _decoded(item[audio])


def _decoded(audio: object) -> Sound:
    found = _as_dict(audio)
    if "array" in found and "sampling_rate" in found:
        samples = np.asarray(found["array"])
        if samples.ndim != 1:
            raise FeatureError(f"an 'array' of audio has the shape (samples,), not {samples.shape}")
        return as_float32(samples), int(found["sampling_rate"])
    path, data = found.get("path"), found.get("bytes")
    if path is None and data is None:
        kind = type(audio).__name__
        raise FeatureError(
            f"audio is a path, or a dict with 'path', 'bytes' or 'array', not {kind!r}"
        )
    clip = Clip(path, data)
    return clip.array, clip.sampling_rate
