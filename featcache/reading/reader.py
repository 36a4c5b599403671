"""`FeatureReader`: from an id to a torch tensor, wherever a pipeline takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, cast

from featcache._checks import directory
from featcache._tensors import as_tensor
from featcache.declaration import dtype_name
from featcache.format.feature_sets import set_of, stored_sets
from featcache.format.files import as_id, reading
from featcache.reading.generation import Generation, OpenSettings
from featcache.reading.opening import Expectation
from featcache.reading.roots import NO_PLACES, absolute_roots, check_roots

if TYPE_CHECKING:
    from featcache._tensors import Tensor


class FeatureReader:
    """Read one feature of a cache by id, as a SpeechBrain dynamic item or any other callable.

    Threads, forks and pickles may share it, and it costs next to nothing to make or copy: the cache
    is opened at the first call in each process, and copies share nothing. One that was made anew
    from something else since the reader was made or first opened is refused then with a
    `StaleCacheError`. What is read is a tensor of its own, shape (frames, *dims), or `dims` without
    a time axis.

    Args:
        path: the cache directory; or what `Cache.opened` is, whose settings hold then.
        feature: the name of the feature.
        dtype: dtype of the tensors, "float32" or `torch.float32`; None: as declared.
        check_reads, expect, mapped, roots: as of `featcache.open`.

    >>> # to be given to `dataset.add_dynamic_item(reader, "id", "fbank")`
    >>> reader = FeatureReader("features/train", "fbank")
    """

    def __init__(
        self,
        path: str | PathLike[str] | Generation,
        feature: str,
        *,
        dtype: object = None,
        check_reads: bool = False,
        expect: Mapping[str, object] | None = None,
        mapped: bool = True,
        roots: Mapping[str, str | PathLike[str]] = NO_PLACES,
    ) -> None:
        self.feature = feature
        self._dtype = None if dtype is None else dtype_name(dtype)
        self._name: str | None = None  # of the generation; None: the current one
        self._opened: Generation | None = None
        if isinstance(path, Generation):
            opened = path.of_feature(feature)
            self.path, self._settings = opened.path, opened.settings
            self._expectation = Expectation.of_opened(opened)
            if opened.settings.version is not None:
                self._name = opened.manifest.name
            return
        self.path = directory(path, "a cache").absolute()
        self._settings = OpenSettings(mapped, check_reads, roots=absolute_roots(roots))
        self._expectation = Expectation.of(expect).with_what_is_there(self._place)

    def __call__(self, id: str) -> Tensor:
        """Return the tensor of an utterance; raises `KeyNotFoundError` for an unknown id."""
        return self.read(id)

    def read(self, id: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """Return the frames from `start` to before `stop` of an utterance, as `Cache.read` does.

        An id that is a whole number, or a tensor of one, is taken as text.
        """
        id = cast(str, as_id(id))
        opened = self.opened
        arrays = opened.arrays(self.feature)
        stored = arrays.read(opened.row(id), start, stop, id=id)
        return as_tensor(
            stored, arrays.declared_dtype, self._dtype, needed_by="featcache.FeatureReader"
        )

    def lengths(self, ids: Iterable[str] | None = None) -> list[int]:
        """Return the frames of all utterances in row order, or of some.

        `DynamicBatchSampler` takes those of `dataset.data_ids`: `lengths_list`.
        """
        if not (ids is None or isinstance(ids, str)):
            ids = [cast(str, as_id(id)) for id in ids]
        lengths: list[int] = self.opened.lengths(self.feature, ids=ids).tolist()
        return lengths

    @property
    def opened(self) -> Generation:
        """The generation of the cache that is read, opened when first needed."""
        if self._opened is None:
            with reading(self.path):
                if self._settings.remote is not None:
                    self._settings.remote.refresh()
                opened = Generation.at(
                    self._place, self._settings, name=self._name, cache_path=self.path
                )
                if self._expectation.same is None:  # nobody has opened the cache before
                    self._check_roots()
                self._expectation.check(opened)
            opened.arrays(self.feature)  # an unknown feature is an error here, with its name
            self._opened, self._expectation = opened, Expectation.of_opened(opened)
        return self._opened

    def _check_roots(self) -> None:
        if self._settings.roots.places:
            parts = [part for _, each in stored_sets(self.path) for part in each.parts]
            check_roots(self.path, parts, self._settings.roots)

    @property
    def _place(self) -> Path:
        """The directory that holds the feature, of its set where there are several."""
        return set_of(self.path, self.feature)

    def __repr__(self) -> str:
        return f"FeatureReader({str(self.path)!r}, {self.feature!r})"

    def __getstate__(self) -> dict[str, object]:
        expectation = self._expectation.as_of_now(self._place)
        return {**self.__dict__, "_expectation": expectation, "_opened": None}
