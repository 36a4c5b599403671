"""lhotse: caches as cuts and feature manifests, and the storage that lhotse finds by its name.

lhotse's registry of storages is of each process: whoever loads such cuts imports this module, also
workers that are spawned. Cuts whose features lhotse stored are adopted: `featcache.adoption`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from featcache.declaration import FEW_FRAMES
from featcache.errors import ConfigError, FeatureError, MissingDependencyError
from featcache.format.manifest import ADOPTED
from featcache.interop.in_caches import caches_of_rows
from featcache.store import Cache
from featcache.tables.table import FeatureTable
from featcache.tables.times import PartByRule

try:
    import lhotse
    from lhotse.array import seconds_to_frames
    from lhotse.utils import compute_num_frames

    from featcache.interop.lhotse_storage import STORAGE
    from featcache.interop.lhotse_storage import FeatcacheReader as FeatcacheReader
    from featcache.interop.lhotse_storage import FeatcacheWriter as FeatcacheWriter
except ImportError as error:
    raise MissingDependencyError(
        f"lhotse's cuts need 'lhotse'; {error}; try: pip install 'featcache[lhotse]'"
    ) from error

# by backend and codec, lhotse's name of what they write
_NATIVE = {
    ("hdf5", "raw"): "numpy_hdf5",
    ("hdf5", "gzip"): "numpy_hdf5",
    ("hdf5", "lilcom"): "lilcom_hdf5",
    ("lilcom", "lilcom"): "lilcom_chunky",
}
_SPOKEN = ("text", "speaker", "language", "gender")  # fields of a supervision


class _Stored(NamedTuple):
    """A feature of a table as lhotse describes arrays."""

    name: str
    dims: tuple[int, ...]
    frame_s: float | None  # None: no time axis, or its times are unknown
    lengths: Sequence[int]
    places: Sequence[Callable[[str], _Place]]  # of each row, by the id


class _Place(NamedTuple):
    """Where lhotse finds an array."""

    storage_type: str
    storage_path: str
    storage_key: str


def to_features(
    table: FeatureTable, *, sample_rate_hz: int, feature: str | None = None, native: bool = False
) -> lhotse.FeatureSet:
    """Return lhotse's manifest of a feature, as `FeatureTable.to_features` describes it."""
    stored = _main(table, feature, native)
    return lhotse.FeatureSet.from_features(_manifests(table, stored, sample_rate_hz))


def to_cuts(
    table: FeatureTable, *, sample_rate_hz: int, feature: str | None = None, native: bool = False
) -> lhotse.CutSet:
    """Return a cut for each utterance, as `FeatureTable.to_cuts` describes it."""
    main = _main(table, feature, native)
    others = [_stored(table, name, native) for name in table.features if name != main.name]
    columns = {name: list(table.annotation(name)) for name in table.annotations}
    return lhotse.CutSet.from_cuts(
        _cut(row, features, columns, others)
        for row, features in enumerate(_manifests(table, main, sample_rate_hz))
    )


def _main(table: FeatureTable, feature: str | None, native: bool) -> _Stored:
    if feature is None:
        if len(table.features) != 1:
            raise ConfigError(f"feature= names one of {', '.join(map(repr, table.features))}")
        (feature,) = table.features
    stored = _stored(table, feature, native)
    if stored.frame_s is None or len(stored.dims) != 1:
        raise ConfigError(
            f"lhotse's features are matrices of frames of a known duration; {feature!r} has frames "
            f"of shape {stored.dims} and frame_s {stored.frame_s}; convert stores it with frame_s"
        )
    return stored


def _stored(table: FeatureTable, feature: str, native: bool) -> _Stored:
    has_frames = table.has_frames(feature)
    times = table.selection.blocks.frame_times(feature) if has_frames else None
    caches, numbers = caches_of_rows(table, feature)
    places = {
        number: _native(caches[number], feature)
        if native
        else partial(_in_cache, str(table.paths[number]), feature)
        for number in {*numbers}
    }
    return _Stored(
        feature,
        table.dims(feature),
        None if times is None else times.frame_s,
        table.lengths(feature).tolist() if has_frames else [1] * len(table),
        [places[number] for number in numbers],
    )


def _in_cache(path: str, feature: str, id: str) -> _Place:
    return _Place(STORAGE, path, f"{feature}/{id}")


def _native(cache: Cache, feature: str) -> Callable[[str], _Place]:
    """Return where lhotse's own readers find the arrays of a feature."""
    generation = cache.opened.of_feature(feature)
    declared = generation.manifest.declared[feature]
    index = generation.index
    columns, containers = index.features[feature], index.containers
    stored = _NATIVE.get((declared.backend, declared.codec))
    if stored is None or declared.dtype == "bfloat16" or ADOPTED in generation.manifest.fingerprint:
        raise ConfigError(
            f"lhotse has no reader of its own for {feature!r} of {str(cache.path)!r} "
            f"({'adopted, ' * (ADOPTED in generation.manifest.fingerprint)}{declared.dtype}, "
            f"{declared.backend}, {declared.codec}); native=False, or featcache.convert to the "
            "backend 'hdf5' or 'lilcom'"
        )

    def place(id: str) -> _Place:
        row = index.find(id)
        begin, end = columns.first[row], columns.first[row + 1]
        if begin == end:
            raise FeatureError(f"{feature!r} of {id!r} has no bytes, and lhotse no such arrays")
        path = str(generation.path / containers.path(int(columns.container[begin])))
        if declared.backend == "hdf5":
            return _Place(stored, path, f"{feature}/{_link_name(id)}")
        sizes = columns.nbytes[begin:end].tolist()
        return _Place(stored, path, ",".join(map(str, [columns.offset[begin], *sizes])))

    return place


def _link_name(id: str) -> str:
    """Return the name of a dataset, as docs/format.md says it of `hdf5`."""
    return "%2E" * len(id) if id in (".", "..") else id.replace("%", "%25").replace("/", "%2F")


def _manifests(
    table: FeatureTable, stored: _Stored, sample_rate_hz: int
) -> Iterator[lhotse.Features]:
    assert stored.frame_s is not None
    durations = list(table.annotation("duration")) if "duration" in table.annotations else None
    for row, id in enumerate(table):
        frames = stored.lengths[row]
        told = [] if durations is None else [durations[row]]
        found = [
            seconds
            for seconds in (*told, round(frames * stored.frame_s, 8))
            if isinstance(seconds, float)
            and seconds > 0
            and compute_num_frames(seconds, stored.frame_s, sample_rate_hz) == frames
        ]
        if not found:
            raise FeatureError(
                f"{id!r}: lhotse does not count {frames} frames of {stored.frame_s} s at "
                f"{sample_rate_hz} Hz, whatever the duration"
            )
        yield lhotse.Features(
            type=stored.name,
            num_frames=frames,
            num_features=stored.dims[0],
            frame_shift=stored.frame_s,
            sampling_rate=sample_rate_hz,
            start=0.0,
            duration=found[0],
            recording_id=id,
            channels=0,
            **stored.places[row](id)._asdict(),
        )


def _cut(
    row: int,
    features: lhotse.Features,
    columns: Mapping[str, Sequence[object]],
    others: Sequence[_Stored],
) -> lhotse.MonoCut:
    id, whole = features.recording_id, {"start": 0.0, "duration": features.duration, "channel": 0}
    told = {name: values[row] for name, values in columns.items() if values[row] is not None}
    spoken = {name: told.pop(name) for name in _SPOKEN if isinstance(told.get(name), str)}
    told.pop("duration", None)
    supervisions = [lhotse.SupervisionSegment(id=id, recording_id=id, **whole, **spoken)]
    custom: dict[str, object] = {**told, **{each.name: _array(each, row, id) for each in others}}
    return lhotse.MonoCut(
        id=id,
        **whole,
        features=features,
        supervisions=supervisions if spoken else [],
        custom=custom or None,
    )


def _array(stored: _Stored, row: int, id: str) -> object:
    """Return the manifest of an array in `custom`."""
    has_frames = stored.frame_s is not None
    shape = [stored.lengths[row], *stored.dims] if has_frames else list(stored.dims)
    array = lhotse.array.Array(shape=shape, **stored.places[row](id)._asdict())
    if not has_frames:
        return array
    return lhotse.array.TemporalArray(
        array=array, temporal_dim=0, frame_shift=stored.frame_s, start=0.0
    )


class CutBatches:
    """Batches of a sampler of lhotse's, as a `batch_sampler` over the cache of the cuts' features.

    For a `FeatureLoader`, or a DataLoader over a `FeatureDataset`, of a table with these
    utterances: those whose features lie in a cache, else those of the cuts' ids. Of cuts that are
    parts of their features the frames of these parts are read, of each feature those that lhotse
    reads at its `frame_s`. The sampler shares the cuts among
    ranks by itself; a loader that resumes within an epoch goes over the batches before.

    Args:
        sampler: one of single cuts, e.g. `lhotse.dataset.DynamicBucketingSampler`.

    >>> import tempfile, featcache, numpy as np
    >>> from lhotse.dataset import SimpleCutSampler
    >>> path = tempfile.mkdtemp()
    >>> with featcache.CacheWriter(path, [featcache.FeatureStorageConfig("f", frame_s=0.01)]) as w:
    ...     for id in "abc": w.write(id, {"f": np.zeros((100, 80))})
    >>> cuts = featcache.open(path).to_cuts(sample_rate_hz=16000)
    >>> batches = CutBatches(SimpleCutSampler(cuts, max_duration=2.0))
    >>> loader = featcache.FeatureLoader(path, batch_sampler=batches)
    >>> [batch["id"] for batch in loader]
    [['a', 'b'], ['c']]
    """

    def __init__(self, sampler: lhotse.dataset.sampling.base.CutSampler) -> None:
        self._cuts = sampler

    @property
    def epoch(self) -> int:
        """The epoch of the sampler."""
        return int(self._cuts.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self._cuts.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[str | tuple[str, PartByRule]]]:
        """Iterate over the batches of an epoch: ids, and the part where a cut is one."""
        for cuts in self._cuts:
            yield [_index(cut) for cut in cuts]


@dataclass(frozen=True, slots=True)
class _CutFrames(PartByRule):
    """The frames of a cut that is a part of its features, as lhotse counts them.

    Frames that a feature lacks at the end are left out, as in lhotse's custom arrays.
    """

    start_s: float  # within the features
    duration_s: float
    own: str | None  # the name of the cut's features in their cache
    own_frames: int
    own_frame_s: float
    sample_rate_hz: int

    def frames(self, feature: str, frame_s: float | None, length: int) -> slice:
        own = feature == self.own or frame_s == self.own_frame_s
        if not own and frame_s is not None:
            begin = seconds_to_frames(self.start_s, frame_s)
            end = begin + seconds_to_frames(self.duration_s, frame_s)
        elif own or length == self.own_frames:  # which speak for one rate, if nothing is said
            count = partial(
                compute_num_frames,
                frame_shift=self.own_frame_s,
                sampling_rate=self.sample_rate_hz,
            )
            begin = count(self.start_s)
            end = begin + count(self.duration_s)
        else:
            raise ConfigError(
                f"feature {feature!r} does not say how many seconds a frame takes, so a cut that "
                "is a part of an utterance has no frames of it; declare frame_s (featcache.convert "
                "stores the cache with it), or read other features: features=[...]"
            )
        if end - length > FEW_FRAMES:
            return slice(begin, end)  # which is refused
        return slice(min(begin, length), min(end, length))


def _index(cut: lhotse.MonoCut) -> str | tuple[str, _CutFrames]:
    stored = getattr(cut, "features", None)
    if not isinstance(getattr(cut, "id", None), str):
        raise ConfigError(f"a batch is of cuts, not of {type(cut).__name__}: one set of cuts alone")
    id: str = cut.id
    if stored is None:
        return id
    own = None
    if stored.storage_type == STORAGE:
        own, _, id = stored.storage_key.partition("/")
    start_s = 0.0 if math.isclose(cut.start, stored.start) else max(cut.start - stored.start, 0.0)
    least_s = 0.5 / stored.sampling_rate
    if start_s < least_s and abs(cut.duration - stored.duration) < least_s:
        return id
    return id, _CutFrames(
        start_s,
        cut.duration,
        own,
        stored.num_frames,
        stored.frame_shift,
        stored.sampling_rate,
    )
