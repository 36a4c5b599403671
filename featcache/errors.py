"""Every error that featcache raises on purpose.

::

    FeatcacheError
    ├── ConfigError (ValueError)             a declaration that cannot work
    │   ├── UnknownNameError (KeyError)      no such backend, codec or option
    │   └── StateError                       a state of other data or settings, or none at all
    ├── MissingDependencyError (ImportError) an optional library is not installed
    ├── AdoptionError (ValueError)           a store of others that cannot be adopted as it lies
    ├── FeatureError (ValueError)            an array that cannot be stored as declared
    ├── ClosedError (ValueError)             used after closing, or in another process
    ├── DuplicateIdError (ValueError)        an id given twice in one run
    ├── ComputeError (RuntimeError)          computing the features of an utterance failed
    ├── KeyNotFoundError (KeyError)          no such utterance or feature in a cache
    ├── RowError (IndexError)                no such row
    ├── WindowError (IndexError)             frames outside of an utterance
    ├── CacheError (OSError)                 a cache that cannot be used as asked
    │   ├── NotACacheError                   the path holds no cache
    │   ├── FormatVersionError               written by a newer featcache
    │   ├── CorruptCacheError                bytes are not what was written
    │   ├── StaleCacheError                  made from something else than what is declared now
    │   ├── CacheLockedError                 another writer is at work
    │   ├── StorageFullError                 no space left for what is coming
    │   ├── ReadOnlyError (KeyNotFoundError) what is to be read alone lacks an utterance
    │   └── RemoteError                      a store that does not answer, or refuses
    └── IncompleteError (RuntimeError)       an extraction or a cache that lacks utterances
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class FeatcacheError(Exception):
    """Root of all errors of featcache."""

    def __str__(self) -> str:
        # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class ConfigError(FeatcacheError, ValueError):
    """A declaration that cannot work."""


class UnknownNameError(ConfigError, KeyError):
    """No such backend, codec, option or feature."""


class StateError(ConfigError):
    """The state of a sampler or loader of other data or settings, or something that is no state.

    Caught to begin the epoch anew. A `ConfigError`, because it is the declarations of now and of
    then that do not fit together, and a resumed training often passes the state on as an argument:
    whoever answers wrong arguments in one place answers this one, too.
    """


class MissingDependencyError(FeatcacheError, ImportError):
    """An optional library is not installed."""


class AdoptionError(FeatcacheError, ValueError):
    """A store that others wrote and that cannot be adopted as it lies."""


class FeatureError(FeatcacheError, ValueError):
    """An array that cannot be stored as declared."""


class ClosedError(FeatcacheError, ValueError):
    """Something used after it was closed, or in another process than the one it belongs to.

    No `ConfigError`: no declaration is wrong. Python's closed files raise a `ValueError`, too.
    """


class DuplicateIdError(FeatcacheError, ValueError):
    """An id that was given twice in one run."""


class ComputeError(FeatcacheError, RuntimeError):
    """Computing the features of an utterance failed."""


class KeyNotFoundError(FeatcacheError, KeyError):
    """No such utterance or feature in a cache.

    Args:
        message: what is not there, and where.
        hint: gives the end of the text, such as what is close to it; called when the text is asked
            for, as looking for that takes milliseconds.
    """

    def __init__(self, message: str = "", *, hint: Callable[[], str] | None = None) -> None:
        super().__init__(message)
        self._hint = hint

    def __str__(self) -> str:
        if self._hint is not None:
            try:
                end = self._hint()
            except FeatcacheError as error:  # the index is damaged
                end = str(error)
            self.args, self._hint = (f"{self.args[0]}; {end}",), None
        return super().__str__()

    def __reduce__(self) -> tuple[object, ...]:
        text, notes = str(self), getattr(self, "__notes__", None)
        return type(self), (text,), {} if notes is None else {"__notes__": notes}


class RowError(FeatcacheError, IndexError):
    """No such row."""


class WindowError(FeatcacheError, IndexError):
    """Frames outside of an utterance."""


class CacheError(FeatcacheError, OSError):
    """A cache that cannot be used as asked."""


class NotACacheError(CacheError):
    """The path holds no cache."""


class FormatVersionError(CacheError):
    """The cache was written by a newer featcache."""


class CorruptCacheError(CacheError):
    """Bytes on disk are not what was written."""


class StaleCacheError(CacheError):
    """The cache was made from something else than what is declared now.

    Args:
        message: in what it differs.
        cure: the last line of the text: what to do.
    """

    def __init__(self, message: str = "", *, cure: str = "") -> None:
        super().__init__(f"{message}\n{cure}" if cure else message)
        self.message, self.cure = message, cure


class CacheLockedError(CacheError):
    """Another writer is at work on the cache."""


class StorageFullError(CacheError):
    """No space is left for what is coming."""


class ReadOnlyError(CacheError, KeyNotFoundError):
    """An utterance that is not stored, and that `file_mode="r"` neither computes nor stores.

    An `OSError`, as h5py raises where SpeechBrain's cached items write to a file of mode "r".
    """


class RemoteError(CacheError):
    """An object store that does not answer, refuses, or gives less than was asked for."""


class IncompleteError(FeatcacheError, RuntimeError):
    """An extraction that stopped before its end, or a cache that lacks utterances."""


def describe(error: BaseException) -> str:
    r"""Return an error's class and message, in one line.

    >>> describe(ValueError("no model\n  in 'exp'"))
    "ValueError: no model in 'exp'"
    """
    return " ".join(f"{type(error).__name__}: {error}".split())


def indented(lines: Iterable[object]) -> str:
    r"""Return lines of a message, each on a line of its own below what comes before.

    >>> indented(["rate: was 8", "gain: was 1"])
    '\n  rate: was 8\n  gain: was 1'
    """
    return "".join(f"\n  {line}" for line in lines)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "utterance"), counted(1200, "utterance")
    ('1 utterance', '1,200 utterances')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def bytes_text(count: float) -> str:
    """Return a number of bytes in the unit that fits, in three digits.

    >>> bytes_text(999), bytes_text(18_900_000)
    ('999 B', '18.9 MB')
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.3g} {units[0]}"


def written_out(text: str, but: str = "") -> str:
    r"""Return a stranger's text with its control characters written out, those of `but` kept.

    >>> print(written_out("a\x1b[2Jb\n"), end="")
    a\x1b[2Jb\n
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in but else repr(each)[1:-1] for each in text)


def nearest(name: object, known: Iterable[str]) -> str:
    """Return which known names are close to `name` in any case, or all: a message's end.

    >>> nearest("HDF", ["hdf5", "zarr"])
    "did you mean 'hdf5'?"
    """
    import difflib  # `import featcache` is quick without

    names = sorted(known)
    folded = {known_name.lower(): known_name for known_name in names}
    close = difflib.get_close_matches(str(name).lower(), folded, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(repr(folded[match]) for match in close)}?"
    return f"known: {', '.join(map(repr, names)) or 'none'}"
