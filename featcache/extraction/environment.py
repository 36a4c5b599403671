"""`EnvironmentProvider`: gives each process its data set, its model and what else it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class EnvironmentProvider(ABC):
    """Builds what a process computes with, once: the data set, the model.

    The interface of ESPnet3's class of this name. An environment is a dict by name. Nothing of it
    travels from process to process: each one builds its own, workers as this process does unless
    `build_worker_setup_fn` says otherwise.

    >>> class Provider(EnvironmentProvider):
    ...     def build_env_local(self):
    ...         return {"dataset": [1, 2, 3], "model": abs}
    >>> sorted(Provider().build_env_local())
    ['dataset', 'model']
    """

    @abstractmethod
    def build_env_local(self) -> dict[str, object]:
        """Build the environment of this process."""

    def build_worker_setup_fn(self) -> Callable[[], dict[str, object]]:
        """Return a function that builds the environment of a worker; by default `build_env_local`.

        It is pickled, with the provider where it is a method, and runs once in each worker. It
        should hold no more than what it needs to build: names, paths, settings.
        """
        return self.build_env_local
