"""`estimate`: bytes and hours of features before they are computed or converted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from featcache._checks import whole_number
from featcache.adoption.as_cache import as_cache, foreign_source
from featcache.declaration.feature_config import Features, FeatureStorageConfig, by_name
from featcache.errors import ConfigError, FeatureError, MissingDependencyError
from featcache.extraction.converting.carried import declared_as
from featcache.extraction.environment import EnvironmentProvider
from featcache.extraction.estimating.estimate_table import Estimate, StorageEstimate
from featcache.extraction.estimating.forecast import TRIAL_UTTERANCES, raw_of, sample_of
from featcache.extraction.estimating.trial_cache import PREFIX, trial_of
from featcache.extraction.table_rows import TableRow, TableRows, table_of
from featcache.interface import storage_dtype
from featcache.registry import backend_names, get_backend
from featcache.store.cache import Cache, CachePath
from featcache.tables.table import FeatureTable

Declared = Mapping[str, FeatureStorageConfig]
_Computes = EnvironmentProvider | Mapping[str, Any]
_Stored = FeatureTable | Cache | CachePath


def estimate(
    source: FeatureTable | Cache | CachePath | EnvironmentProvider | Mapping[str, object],
    features: Features | Iterable[str | FeatureStorageConfig] | None = None,
    *,
    utterances: int = TRIAL_UTTERANCES,
    adopting: Mapping[str, object] | None = None,
) -> Estimate:
    """Tell bytes and hours of features by backend, codec and dtype, from a few utterances.

    A sample of all lengths is read, or computed, and written for trial beside the system's
    temporary files: as declared, and in each other way that can hold it. Bytes are those of all
    files of the cache; raw ones are within 3 %, and those of codecs as far as the sample is like
    the rest. Hours are those of one process on this machine and that disk: computing or reading,
    then writing. For a `Brain` there is `FeatureCacheMixin.estimate_features`.

    Args:
        source: a cache, its path or a view; or what would compute: an `EnvironmentProvider`, or an
            environment as `featcache.extract` describes it, `{"dataset": ..., "compute_features":
            ...}`. Where the data set shows lengths ("lengths", durations), frames are told by
            them; else by the mean of the sample. A file or folder of features that others wrote is
            adopted for the while.
        features: the declarations; of a cache also names, None: all as they are.
        utterances: how many are tried; fewer where they are large, more where they are small.
        adopting: settings of `featcache.adopt` for a source that is no cache.

    Raises `ConfigError` where there is nothing to try, `AdoptionError` for what cannot be adopted;
    otherwise what computing or writing raises.

    >>> import numpy as np, tempfile, featcache
    >>> path = tempfile.mkdtemp()
    >>> with featcache.CacheWriter(path, [featcache.FeatureStorageConfig("f")]) as writer:
    ...     for number in range(3):
    ...         writer.write(f"utt-{number}", {"f": np.ones((300, 80), np.float32)})
    >>> told = featcache.estimate(path)
    >>> told.utterances, told.frames, round(told.nbytes, -5)
    (3, {'f': 900}, 300000)
    """
    whole_number("utterances", utterances, 1)
    if _computes(source):
        return _of_environment(cast(_Computes, source), features, utterances)
    foreign = foreign_source(cast(_Stored, source))
    if foreign is None:
        return _of_stored(cast(_Stored, source), features, utterances)
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX) as beside,
        as_cache(foreign, Path(beside), adopting or {}, copies=False) as adopted,
    ):
        return _of_stored(adopted, features, utterances)


def _of_stored(
    source: _Stored,
    features: Features | Iterable[str | FeatureStorageConfig] | None,
    utterances: int,
) -> Estimate:
    table = table_of(source)
    declared = declared_as(table, features)
    rows, everything = TableRows(table, tuple(declared)), np.arange(len(table))
    sample = sample_of(rows, everything, utterances)
    frames = {name: int(table.lengths(name).sum()) for name in declared}
    read_s = sample.byte_s * float(rows.nbytes(everything).sum())
    return _estimated(
        declared,
        sample.rows,
        _Whole(len(table), frames, lambda each: raw_of(rows, everything, each), read_s),
    )


@dataclass(frozen=True)
class _Whole:
    """All of what is estimated."""

    utterances: int
    frames: Mapping[str, int]
    raw: Callable[[Declared], Mapping[str, float]]  # bytes before any codec
    coming_s: float  # seconds until all arrays are there to be written
    uncertainty: float = 0.0  # of the frames, as a share


def _estimated(declared: Declared, sample: list[TableRow], whole: _Whole) -> Estimate:
    together = trial_of(sample, declared)
    raw = whole.raw(declared)
    rows = [
        each
        for feature in declared.values()
        for way in (feature, *_other_ways(feature))
        if (each := _row(way, sample, whole, declared=way is feature)) is not None
    ]
    return Estimate(
        utterances=whole.utterances,
        frames=dict(whole.frames),
        nbytes=together.nbytes(whole.utterances, raw),
        hours=(whole.coming_s + together.seconds(raw)) / 3600,
        rows=tuple(rows),
        uncertainty=whole.uncertainty,
    )


def _row(
    feature: FeatureStorageConfig, sample: list[TableRow], whole: _Whole, *, declared: bool
) -> StorageEstimate | None:
    """Try one way to store a feature; None for one that cannot hold it, or lacks its library."""
    features = {feature.name: feature}
    try:
        trial = trial_of([row._replace(annotations={}) for row in sample], features)
        codec = feature.make_codec()
    except (FeatureError, ConfigError, MissingDependencyError):
        if declared:
            raise
        return None
    raw = whole.raw(features)
    return StorageEstimate(
        feature.name,
        feature.backend,
        feature.codec,
        feature.dtype,
        trial.nbytes(whole.utterances, raw),
        (whole.coming_s + trial.seconds(raw)) / 3600,
        declared=declared,
        lossless=codec is None or codec.lossless,
    )


def _other_ways(feature: FeatureStorageConfig) -> Iterator[FeatureStorageConfig]:
    """Iterate over the other ways to store a feature."""
    halves = ["float16"] if feature.dtype in ("float32", "float64") else []
    content = {**feature.to_json(), "options": {}}
    for backend in backend_names():
        for codec in get_backend(backend).codecs:
            for dtype in (feature.dtype, *halves):
                way = {"backend": backend, "codec": codec, "dtype": dtype}
                if (feature.backend, feature.codec, feature.dtype) == tuple(way.values()):
                    continue
                try:
                    yield FeatureStorageConfig.from_json({**content, **way})
                except (ConfigError, MissingDependencyError):  # it cannot hold this dtype
                    continue


def _computes(source: object) -> bool:
    stored = isinstance(source, FeatureTable | Cache)  # mappings, too
    return isinstance(source, EnvironmentProvider | Mapping) and not stored


def _of_environment(
    source: _Computes,
    features: Features | Iterable[str | FeatureStorageConfig] | None,
    utterances: int,
) -> Estimate:
    from featcache.extraction.estimating.trial_computation import compute_sample

    if features is None:
        raise ConfigError("to estimate what is not computed yet, declare its features")
    declared = by_name(cast(Features, features))
    env = source.build_env_local() if isinstance(source, EnvironmentProvider) else source
    computed = compute_sample(env, declared, utterances)

    def raw(each: Declared) -> dict[str, float]:
        return {
            name: computed.numbers[name] * storage_dtype(one.dtype).itemsize
            for name, one in each.items()
        }

    whole = _Whole(
        computed.utterances,
        {name: round(frames) for name, frames in computed.frames.items()},
        raw,
        computed.seconds,
        computed.uncertainty,
    )
    return _estimated(declared, computed.rows, whole)
