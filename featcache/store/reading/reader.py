"""`FeatureReader`: from an id to a torch tensor, wherever a pipeline takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from featcache._checks import directory
from featcache.store.format.ids import as_id
from featcache.store.reading.cache import Cache, CachePath

if TYPE_CHECKING:
    import torch


class FeatureReader:
    """Read one feature of a cache by id, as a SpeechBrain dynamic item or any other callable.

    Costs nothing to make, copy, pickle, fork or spawn: the cache is opened at the first call in
    each process, and copies share nothing. What is read is a tensor of its own, shape (frames,
    *dims), or `dims` without a time axis.

    >>> # to be given to `dataset.add_dynamic_item(reader, "id", "fbank")`
    >>> reader = FeatureReader("features/train", "fbank")
    """

    def __init__(self, path: CachePath, feature: str) -> None:
        self.path = directory(path, "a cache").absolute()
        self.feature = feature
        self._settings: dict[str, bool] = {}  # those of the cache that made the reader
        self._cache: Cache | None = None

    def __call__(self, id: str) -> torch.Tensor:
        """Return the tensor of an utterance; raises `KeyNotFoundError` for an unknown id."""
        return self.read(id)

    def read(self, id: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Return the frames from `start` to before `stop` of an utterance, as `Cache.read` does.

        An id that is a whole number, or a tensor of one, is taken as text.
        """
        import torch

        id = cast(str, as_id(id))
        cache = self.cache
        arrays = cache._feature(self.feature)
        tensor = torch.from_numpy(cache._read_stored(id, arrays, start, stop))
        return tensor.view(torch.bfloat16) if arrays.declared_dtype == "bfloat16" else tensor

    def lengths_for(self, ids: Sequence[str]) -> list[int]:
        """Return the frames of utterances.

        `DynamicBatchSampler` takes those of `dataset.data_ids`: `lengths_list`.
        """
        texts = [cast(str, as_id(id)) for id in ids]
        lengths: list[int] = self.cache.lengths(self.feature, texts).tolist()
        return lengths

    @property
    def cache(self) -> Cache:
        """The cache, opened when first needed."""
        if self._cache is None:
            cache = Cache(self.path, verify=None, **self._settings)
            cache.dtype(self.feature)  # an unknown feature is an error here, with its name
            self._cache = cache
        return self._cache

    def __repr__(self) -> str:
        return f"FeatureReader({str(self.path)!r}, {self.feature!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return reader_of, (self.path, self.feature, self._settings)


def reader_of(path: CachePath, feature: str, settings: dict[str, bool]) -> FeatureReader:
    """Return a reader that opens its cache with these settings of `featcache.open`."""
    reader = FeatureReader(path, feature)
    reader._settings = settings
    return reader
