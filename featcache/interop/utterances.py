"""Data sets for `extract`: a HuggingFace data set, a lhotse `CutSet`, a list of utterances."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.errors import ConfigError, FeatureError, nearest
from featcache.extraction.datasets import DataSet, is_map_style, visible_ids, visible_lengths
from featcache.extraction.run import values_of
from featcache.extraction.stamping import Entries
from featcache.format.files import as_id
from featcache.interop.audio import AudioRows, Clip, as_float32

if TYPE_CHECKING:
    from datasets import Dataset
    from lhotse import CutSet
    from lhotse.cut import Cut


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
