"""One cache on disk."""

from featcache.errors import MissingDependencyError

try:
    import resource  # noqa: F401
except ImportError as error:  # Windows; the rest of the package is there to be looked at
    raise MissingDependencyError("featcache needs a POSIX system (Linux or macOS)") from error
