"""A part: what one writer wrote, open and then sealed, in a directory of its own."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from featcache.errors import CorruptCacheError, FeatureError
from featcache.feature import FeatureStorageConfig
from featcache.interface import Array, Blocks, ContainerWriter, EncodedArray, FeatureSpec
from featcache.stats import FeatureStats
from featcache.store import journal, lock
from featcache.store.arrays import from_storage
from featcache.store.columns import index_of, save_index
from featcache.store.files import (
    digest,
    digest_file,
    make_directory,
    pack_json,
    sync_directory,
    unpack_json,
    within,
    write_durably,
)
from featcache.store.index import Index, load_index
from featcache.store.journal import Header, JournalWriter, Placed, Utterance
from featcache.store.lock import WriterLock
from featcache.store.manifest import PARTS, PartEntry, part_from_json

SEAL = "part.json"
COLUMNS = "columns"
STATS = "stats"
PART_NAME = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}(-recovered)*")


@dataclass(frozen=True, slots=True)
class SealedPart:
    """A part that is whole on disk."""

    entry: PartEntry
    header: Header
    digests: Mapping[str, str]  # xxh3-64 of its column and statistics files

    def index(self, cache: Path, names: list[str]) -> Index:
        """Read the part's columns, those of ids and of some features; not mapped, for there may be many parts."""
        return load_index(cache / PARTS / self.entry.name / COLUMNS, names, mapped=False)

    def stats(self, cache: Path, feature: str) -> FeatureStats:
        """Load the part's statistics of a feature."""
        return FeatureStats.load(cache / PARTS / self.entry.name / STATS / f"{feature}.npz")


class OpenPart:
    """Writes one part; used by one thread."""

    def __init__(
        self, cache: Path, name: str, features: Mapping[str, FeatureStorageConfig], header: Header
    ) -> None:
        self.name = name
        self.directory = cache / PARTS / name
        self.dims = header.dims
        self._cache = cache
        self._header = header
        self._features = features
        self._specs = {key: feature.spec(header.dims[key]) for key, feature in features.items()}
        self._blocks = {key: feature.blocks(header.dims[key]) for key, feature in features.items()}
        self._stats = {
            key: FeatureStats.empty(header.dims[key]) for key, feature in features.items() if feature.stats
        }
        self._utterances: list[Utterance] = []
        self._committed = 0
        self.nbytes = 0
        self._containers: list[tuple[str, list[str], ContainerWriter]] = []
        self._held = ExitStack()
        make_directory(self.directory)
        try:
            self._held.callback(WriterLock(self.directory).release)
            self._journal = JournalWriter(self.directory, header)
            self._held.callback(self._journal.close)
            self._open_containers()
        except BaseException:
            self.discard()
            raise

    def encode_lossy(self, id: str, arrays: Mapping[str, Array]) -> dict[str, EncodedArray]:
        """Encode the arrays of lossy codecs; these, and no others, may refuse numbers, with `FeatureError`."""
        return {name: self._encode(id, name, array) for name, array in arrays.items() if self._is_lossy(name)}

    def append(self, id: str, arrays: Mapping[str, Array], encoded: Mapping[str, EncodedArray]) -> None:
        """Store one utterance: arrays of shape (rows, *dims), C order, storage dtype; `encoded` is from before."""
        rest = {name: self._encode(id, name, array) for name, array in arrays.items() if name not in encoded}
        for name in self._stats:
            frames = from_storage(arrays[name], self._specs[name].dtype)
            self._stats[name] = self._stats[name].merge(FeatureStats.of(frames))
        self.append_encoded(id, {**encoded, **rest})

    def append_encoded(self, id: str, arrays: Mapping[str, EncodedArray]) -> None:
        """Store one utterance as it is, without touching the statistics."""
        placed: dict[str, Placed] = {}
        for prefix, names, container in self._containers:
            extents = container.append(id, {name: arrays[name] for name in names})
            for name in names:
                array = arrays[name]
                moved = tuple(dataclasses.replace(e, container=prefix + e.container) for e in extents[name])
                placed[name] = Placed(array.rows, checksum(array.blocks), moved)
                self.nbytes += array.nbytes
        utterance = Utterance(id, placed)
        self._journal.add(utterance)
        self._utterances.append(utterance)

    def commit(self, stats: Mapping[str, FeatureStats] | None = None) -> int:
        """Make all that was appended durable; returns how many utterances are. `stats` replaces the gathered ones."""
        if stats is not None:
            self._stats = dict(stats)
        if self._committed < len(self._utterances):
            for _, _, container in self._containers:
                container.flush()
            self._journal.commit(self._stats)
            self._committed = len(self._utterances)
        return self._committed

    def seal(self) -> SealedPart | None:
        """Finish the files, write the columns, and name them in `part.json`; None if nothing was written."""
        if not self._utterances:
            self.discard()
            return None
        self.commit()
        while self._containers:
            self._containers[-1][2].close()
            self._containers.pop()
        extents = (e for u in self._utterances for placed in u.arrays.values() for e in placed.extents)
        paths = sorted({extent.container for extent in extents})
        numbers = {path: number for number, path in enumerate(paths)}
        names = list(self._features)
        index = index_of(self._utterances, numbers, names)
        written = save_index([index], [len(paths)], names, self.directory / COLUMNS)
        digests = {f"{COLUMNS}/{name}": digest for name, digest in written.items()}
        digests |= {f"{STATS}/{k}": v for k, v in save_stats(self._stats, self.directory / STATS).items()}
        content = {
            "name": self.name,
            "rows": len(self._utterances),
            "containers": [[path, (self.directory / path).stat().st_size] for path in paths],
            "block_rows": dict(self._header.block_rows),
            "header": self._header.to_json(),
            "digests": digests,
        }
        write_durably(self.directory / SEAL, pack_json(content))
        self.release()
        for name in (journal.NAME, lock.NAME):
            (self.directory / name).unlink(missing_ok=True)
        return read_part(self._cache, self.name)

    def release(self) -> None:
        """Let go of everything, leaving what is committed to a later recovery; never raises."""
        for _, _, container in self._containers:
            container.abort()
        self._containers = []
        self._held.close()

    def discard(self) -> None:
        """Let go of everything and remove the part."""
        self.release()
        remove_part(self.directory)

    def _is_lossy(self, name: str) -> bool:
        codec = self._specs[name].codec
        return codec is not None and not codec.lossless

    def _encode(self, id: str, name: str, array: Array) -> EncodedArray:
        try:
            return _encode(array, self._specs[name], self._blocks[name])
        except FeatureError as error:
            raise FeatureError(f"utterance {id!r}, feature {name!r}: {error}") from error

    def _open_containers(self) -> None:
        for prefix, names in container_groups(self._features):
            directory = self.directory / prefix
            directory.mkdir(exist_ok=True)
            backend = self._features[names[0]].make_backend()
            writer = backend.open_writer(directory, [self._specs[name] for name in names])
            self._containers.append((f"{prefix}/" if prefix else "", names, writer))
            sync_directory(directory)
        sync_directory(self.directory)


def remove_part(directory: Path) -> None:
    """Remove a part; wherever this ends, what is left of it counts as nothing written."""
    for name in (SEAL, journal.NAME):
        (directory / name).unlink(missing_ok=True)
    sync_directory(directory)
    shutil.rmtree(directory)


def new_part_name() -> str:
    """Return a name that no other part has and that sorts by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


def header_for(
    features: Mapping[str, FeatureStorageConfig], dims: Mapping[str, tuple[int, ...]], build: int, fingerprint: str
) -> Header:
    """Return the header of a new part whose frames have the shapes `dims`."""
    cut = {name: feature.blocks(dims[name]) for name, feature in features.items()}
    block_rows = {name: (blocks.rows or 0) if blocks else 0 for name, blocks in cut.items()}
    return Header(build, fingerprint, dict(dims), block_rows)


def container_groups(features: Mapping[str, FeatureStorageConfig]) -> list[tuple[str, list[str]]]:
    """Say which features share containers: (directory within the part, names).

    Features with the same backend and the same options of it share. Where one backend has several groups, each has a
    directory of its own, named after its first feature.
    """
    groups: dict[tuple[str, object], list[str]] = {}
    for name, feature in features.items():
        groups.setdefault((feature.backend, feature.make_backend()), []).append(name)
    backends = [backend for backend, _ in groups]
    return [
        (names[0] if backends.count(backend) > 1 else "", names) for (backend, _), names in groups.items()
    ]


def read_part(cache: Path, name: str) -> SealedPart | None:
    """Read what a part says of itself; None if it is not sealed."""
    path = cache / PARTS / name / SEAL
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    content = cast(dict[str, Any], unpack_json(data, repr(str(path))))
    try:
        containers = [[f"{PARTS}/{name}/{file}", size] for file, size in content["containers"]]
        entry = part_from_json(content | {"containers": containers, "digest": digest(data), "name": name})
        digests = {within(file): value for file, value in content["digests"].items()}
        return SealedPart(entry, Header.from_json(content["header"]), digests)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CorruptCacheError(f"{str(path)!r} is damaged: {error!r}") from error


def list_parts(cache: Path) -> Iterator[tuple[str, SealedPart | None]]:
    """Iterate over the parts on disk by name, in that order, None for those that are not sealed."""
    directory = cache / PARTS
    for path in sorted(directory.iterdir()) if directory.exists() else []:
        if PART_NAME.fullmatch(path.name) and path.is_dir():  # anything else is not ours
            yield path.name, read_part(cache, path.name)


def save_stats(stats: Mapping[str, FeatureStats], directory: Path) -> dict[str, str]:
    """Write statistics into a new directory, durably; returns the digest of each file."""
    directory.mkdir()
    for name, value in stats.items():
        with (directory / f"{name}.npz").open("wb") as file:
            value.save(file)
            file.flush()
            os.fsync(file.fileno())
    sync_directory(directory)
    return {f"{name}.npz": digest_file(directory / f"{name}.npz") for name in stats}


def checksum(blocks: tuple[bytes | memoryview, ...]) -> int:
    """Return the xxh3-64 of an array's stored bytes."""
    state = xxhash.xxh3_64()
    for block in blocks:
        state.update(block)
    return state.intdigest()


def _encode(array: Array, spec: FeatureSpec, blocks: Blocks | None) -> EncodedArray:
    rows = len(array)
    if array.size == 0:
        return EncodedArray(rows, ())
    if spec.codec is None or blocks is None:
        return EncodedArray(rows, (array.reshape(-1).view(np.uint8).data,))
    size = blocks.rows or rows
    if blocks.padded and rows % size:
        filling = np.zeros((size - rows % size, *spec.dims), array.dtype)
        array = np.concatenate([array, filling])
    return EncodedArray(rows, tuple(spec.codec.encode(array[i : i + size]) for i in range(0, len(array), size)))

