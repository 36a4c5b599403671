"""LMDB environments: keys are ids, values the bytes of `numpy.save`, `numpy.savez` or `torch.save`.

Keys that begin with `__` (`__len__`, `__keys__`) are of whoever wrote it, and left out. Each named
database is a feature: keys are then called `<database>/<key>`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from featcache.adoptable import COPY, Found, Options, Place, Readable, frames_first
from featcache.adoptable.names import EACH
from featcache.adoption.libraries.named_arrays import Arranged, Content
from featcache.adoption.libraries.payloads import LOAD_IT, LoadedArrays, NpzFile, payload, told
from featcache.errors import AdoptionError, MissingDependencyError
from featcache.interface import Array

DATA = "data.mdb"
SUFFIXES = (".mdb", ".lmdb")
NAMED_BYTES = 48  # of the value that a named database has
MOST_NAMED = 256  # databases
TRIAL_S = 300.0  # of reading all values, where pages lack


class LmdbStore:
    """An environment of LMDB, in a folder or a file."""

    name = "lmdb"
    takes_pattern = True

    def recognises(self, place: Place, what: str) -> bool:
        """Whether it is an environment, by the names of its files."""
        return what.endswith(SUFFIXES) if what else DATA in place.names("")

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Raise `AdoptionError`: values are written anew by whoever writes to it."""
        raise AdoptionError(f"{place.name!r} is not read where it lies; {COPY}")

    @contextmanager
    def readable(self, place: Place, what: str, options: Options) -> Iterator[Readable]:
        """Read the values of all keys by LMDB."""
        path = what or DATA
        with values_of(place.local(path)) as values:
            keys, contents = [], []
            for database, key, value in values.items():
                if key.startswith(b"__"):
                    continue
                id = _text(database + b"/" + key if database else key, place.name)
                held = _held(value, id, place.name)
                contents.append(Content(id, path, held.arrays(), held.values()))
                keys.append((database, key))
                held.close()
            names = {database for database, _ in keys}
            if len(names) > 1 and b"" in names:
                raise AdoptionError(
                    f"{place.name!r} has values beside named databases; read one of the two "
                    f"yourself: {LOAD_IT}"
                )
            pattern = options.pattern or ("{feature}/{id}" if names - {b""} else EACH)
            named = Options(options.feature, pattern, options.time_axis)
            arranged = Arranged.of(place.name, contents, named, one=False)
            if options.pattern is None:
                arranged.refuse_features(place.name)

            def read(number: int) -> dict[str, Array]:
                found = {}
                for name, places in arranged.features.items():
                    each = places[number]
                    held = _held(values.get(*keys[each.file]), arranged.ids[number], place.name)
                    array = held.read(each.key)
                    held.close()
                    found[name] = array.transpose(frames_first(array.shape, options.time_axis))
                return found

            features = arranged.stored(options)
            yield Readable([path], arranged.ids, features, read, arranged.annotations, pattern)


KIND = LmdbStore()


class LmdbValues:
    """The values of an open environment, and of the databases that it names."""

    def __init__(self, environment: Any, transaction: Any, where: str) -> None:
        self._environment, self._transaction, self._where = environment, transaction, where
        self._databases: dict[bytes, Any] = {b"": None}

    def items(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Go through databases, keys and values; b"" is the database without a name."""
        with told(self._where):
            for key, value in self._transaction.cursor():
                if len(value) == NAMED_BYTES and self._is_database(key):
                    for each in self._transaction.cursor(self._databases[key]):
                        yield key, *each
                else:
                    yield b"", key, value

    def _is_database(self, key: bytes) -> bool:
        import lmdb

        try:
            opened = self._environment.open_db(key, txn=self._transaction, create=False)
        except lmdb.IncompatibleError:
            return False
        self._databases[key] = opened
        return True

    def has(self, key: bytes) -> bool:
        """Whether the database without a name has a key."""
        with told(self._where):
            return self._transaction.get(key) is not None

    def get(self, database: bytes, key: bytes) -> bytes:
        """Return a value; raises `AdoptionError` where it has gone meanwhile."""
        with told(self._where):
            found = self._transaction.get(key, db=self._databases[database])
        if found is None:
            raise AdoptionError(f"{self._where} lacks key {key!r} now: it is being written")
        return bytes(found)


@contextmanager
def values_of(path: Path) -> Iterator[LmdbValues]:
    """Open the values of a file; raises `AdoptionError` for one that is damaged, or cut short."""
    with _opened(path) as opened:
        _refuse_cut(opened, path)
        with opened.begin() as transaction:
            yield LmdbValues(opened, transaction, _where(path))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import lmdb
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "kind 'lmdb' needs 'lmdb'; try: pip install 'featcache[lmdb]'"
        ) from error
    in_folder = path.name == DATA
    try:
        # without a lock file, since nothing is written beside what others own
        opened = lmdb.open(
            str(path.parent if in_folder else path),
            subdir=in_folder, readonly=True, lock=False, create=False, readahead=False,
            max_dbs=MOST_NAMED,
        )  # fmt: skip
    except lmdb.Error as error:
        raise AdoptionError(f"{_where(path)} cannot be read: {error}") from error
    with opened:
        yield opened


def _where(path: Path) -> str:
    return repr(str(path.parent if path.name == DATA else path))


def _refuse_cut(opened: Any, path: Path) -> None:
    """Raise `AdoptionError` for a file that is cut short, where the system would end the process.

    A whole one may lack pages at its end, too, which were never written: whether any of those in
    use lies there is tried in a process of its own.
    """
    size, page = path.stat().st_size, opened.stat()["psize"]
    whole = page * (opened.info()["last_pgno"] + 1)
    if size % page == 0 and size >= whole:
        return
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; "  # where the same modules are found
        f"from {__name__} import touch_all; import pathlib; touch_all(pathlib.Path({str(path)!r}))"
    )
    code = 2 if size % page else None
    try:
        code = code or subprocess.run([sys.executable, "-c", program], timeout=TRIAL_S).returncode
    except subprocess.TimeoutExpired:
        raise AdoptionError(
            f"{_where(path)} may be cut short: it has {size:,} bytes, of {whole:,}, and whether a "
            f"value lies behind them was not known after {TRIAL_S:.0f} s; `mdb_copy -c` of LMDB "
            "makes a whole one"
        ) from None
    if code not in (0, 1):
        raise AdoptionError(
            f"{_where(path)} is cut short: it has {size:,} bytes, of {whole:,}; copy it again"
        )


def touch_all(path: Path) -> None:
    """Read the last byte of each value."""
    with _opened(path) as opened, opened.begin(buffers=True) as transaction:
        for *_, value in LmdbValues(opened, transaction, _where(path)).items():
            bytes(value[-1:])


def _held(value: bytes, id: str, source: str) -> LoadedArrays | NpzFile:
    return payload(value, f"utterance {id!r} of {source!r}")


def _text(key: bytes, source: str) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise AdoptionError(f"{source!r} has key {key!r}, which is no text: {error}") from error
