"""`BackendContract`: the suite that tells whether a backend keeps its word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

import featcache
from featcache.errors import MissingDependencyError
from featcache.testing.backend_under_test import Storage
from featcache.testing.decoding import Decoding
from featcache.testing.durability import Durability
from featcache.testing.editing import Editing
from featcache.testing.finishing import Finishing
from featcache.testing.native import NativeFiles
from featcache.testing.promises import Seam, append_all
from featcache.testing.reads import Reading
from featcache.testing.round_trips import RoundTrips
from featcache.testing.writes import Writing


class BackendContract(
    RoundTrips, Reading, Writing, Editing, Seam, Decoding, Durability, Finishing, NativeFiles
):
    """Test a backend with each of its codecs; inherit from it and name the backend.

    A backend whose library is not installed is skipped.

    Attributes:
        backend: as it is registered; None: all that are installed.
        options: options of the backend and its codecs to test with, e.g. a size of files that a
            test exceeds.
        tolerance: for lossy codecs, by name, how far a number within -100 to 100 may move; a lossy
            codec that is not listed may return any numbers, but always the same.
        examples: how many caches hypothesis tries for each property.
    """

    backend: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, object]] = {}
    tolerance: ClassVar[Mapping[str, float]] = {}
    examples: ClassVar[int] = 10

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test with every codec."""
        if "storage" not in metafunc.fixturenames:
            return
        backends = featcache.registry.backend_names() if self.backend is None else [self.backend]
        storages = [
            Storage(backend, codec, self.options, self.tolerance.get(codec))
            for backend in backends
            for codec in featcache.registry.get_backend(backend).codecs
        ]
        metafunc.parametrize("storage", storages, ids=str, indirect=True, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def storage(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Storage:
        """The backend and the codec to test."""
        storage: Storage = request.param
        try:
            append_all(storage, tmp_path_factory.mktemp("installed"))[0].close()
        except MissingDependencyError as error:
            pytest.skip(str(error))
        return storage
