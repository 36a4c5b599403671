"""Tests that every storage format has to pass, ours and others'; needs `pytest` and `hypothesis`.

A test module of three lines tests a backend, entered under the entry point group
`featcache.backends`, with all its codecs::

    from featcache.testing import BackendContract
    class TestMyBackend(BackendContract):
        backend = "mine"

Give it a method `read_natively`, too, and the format's own library is asked whether it reads the
files.
"""

from __future__ import annotations

from featcache.errors import MissingDependencyError

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as error:
    raise MissingDependencyError(
        f"featcache.testing needs {error.name!r}, which does not load: {error}; "
        "try: pip install 'featcache[testing]'"
    ) from error

# before the import below: failures shall show the values
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{name}"
        for name in ("backend_under_test", "contract", "promises", "round_trips")
    )
)

from featcache.testing.contract import BackendContract  # noqa: E402

__all__ = ["BackendContract"]
