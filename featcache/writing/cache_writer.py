"""`CacheWriter`: the one writer of a cache that recovers, resumes, overwrites and publishes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from featcache._checks import are_listed, directory
from featcache._closing import close_after
from featcache._tensors import ArrayLike
from featcache.declaration import Features, by_name
from featcache.errors import ConfigError, KeyNotFoundError
from featcache.format.files import check_id
from featcache.format.index import UNKNOWN, Stamps, check_stamps
from featcache.format.manifest import MOST_BYTES, check_role
from featcache.writing.arrays import BatchLayout, LengthsByFeature
from featcache.writing.session import WriteSession
from featcache.writing.sets import directory_to_write


class CacheWriter:
    """Write a cache: start it, or go on with what is there.

    What an earlier writer committed before it died is recovered first, which the log tells at INFO.
    As a context manager it publishes the cache as complete at the end; after an error all that was
    written is kept and published as incomplete, or, when it would take the place of a cache to be
    overwritten, kept beside that. A writer that nobody closed does the same when it is dropped or
    its process ends, with a warning.

    Threads may share a writer; a process that is forked from its own is refused, and pickling it
    is, too.

    Args:
        path: the cache directory; made if it does not exist.
        features: the declarations of all features that are written together. Where the cache has
            others only, they are added to it as a feature set, which readers see once it is
            complete; what is there stays as it is.
        fingerprint: what the features are made from (JSON values): model, layer, sample rate, ...
        overwrite: build the cache anew beside the old one, which stays good until the new one is
            published. A second try goes on with what an interrupted one had committed.

    Attributes:
        path: the cache directory, or that of the feature set in it.
        features: the declarations, by name.

    Raises `StaleCacheError`, with the differences, if the cache was made from something else than
    declared here; `CacheLockedError` if it is being written; `NotACacheError` if the path holds
    something else.

    >>> import tempfile, featcache, numpy as np
    >>> from featcache import CacheWriter, FeatureStorageConfig
    >>> path = tempfile.mkdtemp()
    >>> features = [FeatureStorageConfig("fbank")]
    >>> with CacheWriter(path, features, {"sample_rate_hz": 16000}) as writer:
    ...     writer.write("utt-1", {"fbank": np.zeros((300, 80), np.float32)})
    >>> featcache.open(path).read("utt-1", "fbank").shape
    (300, 80)
    """

    def __init__(
        self,
        path: str | Path,
        features: Features,
        fingerprint: Mapping[str, object] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        self.features = by_name(features)
        where = directory(path, "a cache").absolute()
        self.path = directory_to_write(where, self.features)
        self._work = WriteSession(self, self.path, self.features, fingerprint, overwrite)
        try:
            self._parts = self._work.parts
        except BaseException:
            self._work.keep()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._parts.closed else f"{len(self)} utterances written"
        return f"<CacheWriter {str(self.path)!r}: {', '.join(self.features)}, {state}>"

    def __contains__(self, id: str) -> bool:
        """Whether an utterance is in the cache, or was written now."""
        return id in self._parts

    def __len__(self) -> int:
        """Return how many utterances were written now."""
        return len(self._parts)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(  # as pickle's own
            "a writer cannot be pickled: it belongs to its process; let one process write to "
            f"{str(self.path)!r}, give each a cache of its own, or use "
            "featcache.extract(parallel=...)"
        )

    @property
    def bytes_written(self) -> int:
        """Bytes of all arrays that were written now, before any codec."""
        return self._parts.bytes_written

    def write(
        self,
        id: str,
        arrays: Mapping[str, ArrayLike],
        *,
        annotations: Mapping[str, object] | None = None,
        stamps: Stamps = UNKNOWN,
    ) -> None:
        """Store the features of one utterance.

        The arrays may be used again as soon as this returns.

        Args:
            id: any non-empty Unicode string without NUL.
            arrays: exactly the declared features, each a numpy array or torch tensor of shape
                (frames, *dims), or `dims` for a feature without a time axis.
            annotations: values that are no features, by name: text, numbers, bools, or lists of
                numbers; those that are None are missing. One name has values of one kind in all
                utterances, where integers and floats together are floats.
            stamps: digests of what the utterance was computed from.

        Raises `FeatureError` for arrays that cannot be stored as declared, for features whose
        `frame_s` and lengths cannot both be right, and for annotations that are of another kind
        than those of the same name before, or of none; `DuplicateIdError`
        for a known id; then nothing of the utterance is stored and writing may go on. Raises
        `StorageFullError` before the disk is full, and `ClosedError` in a process that was forked
        from the writer's.
        """
        self._parts.write(id, arrays, annotations=annotations, stamps=stamps)

    def write_batch(
        self,
        ids: Sequence[str],
        arrays: Mapping[str, ArrayLike],
        lengths: LengthsByFeature = None,
        *,
        layout: BatchLayout = "padded",
        annotations: Mapping[str, Mapping[str, object]] | None = None,
        stamps: Mapping[str, Stamps] | None = None,
    ) -> None:
        """Store the features of a batch of utterances: all of them, or after an error none.

        Each array is copied from its device once, and checked and cast as a whole, which for short
        utterances takes a small part of the time of `write`. It may be used again as soon as this
        returns; the copy from a GPU does not overlap with what is computed there next.

        Args:
            ids: those of the utterances, in the order of the batch.
            arrays: exactly the declared features: padded arrays or tensors (batch, frames, *dims),
                or packed ones (frames of all utterances, *dims), the frames of each utterance
                behind those of the one before; without a time axis (batch, *dims).
            lengths: the number of frames of each utterance, integers; or one such list for each
                feature by name, None for those without a time axis.
            layout: "padded" or "packed".
            annotations: as for `write`, by id.
            stamps: as for `write`, by id.

        Raises what `write` raises, and `FeatureError` for lengths that do not fit.

        >>> import tempfile, featcache, numpy as np
        >>> with featcache.CacheWriter(
        ...     tempfile.mkdtemp(), [featcache.FeatureStorageConfig("fbank")]
        ... ) as writer:
        ...     fbank = np.zeros((2, 300, 80), np.float32)
        ...     writer.write_batch(["utt-1", "utt-2"], {"fbank": fbank}, [300, 240])
        """
        self._parts.write_batch(
            ids, arrays, lengths, layout=layout, annotations=annotations, stamps=stamps
        )

    def restamp(self, stamps: Mapping[str, Stamps]) -> None:
        """Give stored utterances other stamps, which the next `publish` makes durable.

        Raises `KeyNotFoundError` for an id that is not stored.
        """
        new = {id: check_stamps(id, each) for id, each in stamps.items()}
        with self._parts.lock:
            self._parts.check_open()
            self._check_stored(new)
            self._work.restamp(new)

    def delete(self, ids: Iterable[str]) -> None:
        """Delete stored utterances, so that they can be written again.

        All that was written so far is published with it, as incomplete where the ids are expected;
        not so while a cache is overwritten, which is published in the end. No `PartWriter` may be
        open. Raises `KeyNotFoundError` for an id that is not stored.
        """
        if not are_listed(ids):
            raise ConfigError(f"the ids are a list of strings, not {ids!r}")
        listed = list(ids)
        with self._parts.lock:
            self._parts.check_open()
            self._check_stored(listed)
            if listed:
                self._parts.seal()
                self._work.delete(listed)

    def keep_file(self, role: str, data: bytes) -> None:
        """Keep a file with the build that is being written, durably: a "probe", or "made-from".

        It takes the place of the one of that role, and is published with the build.
        """
        check_role(role)
        if len(data) > MOST_BYTES:
            raise ConfigError(
                f"the file {role!r} of a cache has {MOST_BYTES:,} bytes at most, not {len(data):,}"
            )
        with self._parts.lock:
            self._parts.check_open()
            self._work.keep_file(role, data)

    def _check_stored(self, ids: Iterable[str]) -> None:
        for id in ids:
            if id not in self._parts:
                raise KeyNotFoundError(f"no utterance {id!r} in cache {str(self.path)!r}")

    def expect(self, ids: Iterable[str]) -> None:
        """Set which utterances the cache is to hold in the end, with those that it holds already.

        The cache is complete, then, when each of them is stored or has failed, and otherwise not,
        however the writer is closed.
        """
        if not are_listed(ids):
            raise ConfigError(f"the expected ids are a list of strings, not {ids!r}")
        expected = ids if isinstance(ids, Sequence) else tuple(ids)  # may be millions
        with self._parts.lock:
            self._parts.check_open()
            self._work.expect(expected)

    def expect_more(self, utterances: int) -> None:
        """Set how many utterances are still to come, so that a disk too small is noticed early."""
        self._parts.expect_more(utterances)

    def fail(self, id: str) -> None:
        """Note that an expected utterance cannot be computed; forgotten once it is stored."""
        check_id(id)
        with self._parts.lock:
            self._parts.check_open()
            self._work.fail(id)

    def commit(self) -> int:
        """Make all that was written durable; returns how many utterances this writer has made so.

        Happens by itself every two seconds.
        """
        return self._parts.commit()

    def publish(self, complete: bool = False) -> None:
        """Show readers all that was written here or by `PartWriter`s that are closed."""
        with self._parts.lock:
            self._parts.seal()
            self._work.publish(complete)

    def recover(self) -> None:
        """Seal what `PartWriter`s that died meanwhile had committed.

        Raises `CacheLockedError` if one of them lives; this writer's own arrays must have been
        published.
        """
        with self._parts.lock:
            self._parts.check_open()
            self._work.recover()

    def close(self, complete: bool = True) -> None:
        """Publish, and let go of the cache; `complete` holds where no ids are expected."""
        self._work.close(complete, publish=True)

    def abort(self) -> None:
        """Remove what was written since the last `publish`, and let go of the cache."""
        self._work.abort()

    def __enter__(self) -> Self:
        try:
            return self
        except BaseException:  # an interrupt (Ctrl-C), whose traceback may keep the writer alive
            self._work.keep()
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_after(error, self.close if error is None else self._work.keep)
