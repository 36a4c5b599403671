"""The environment of a worker process: `setup_fn` builds it once, and functions get it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from featcache.errors import ComputeError, ConfigError, MissingDependencyError

try:
    import cloudpickle  # type: ignore[import-untyped]
    from distributed import Worker, WorkerPlugin, get_worker
    from distributed.comm.core import CommClosedError
except ImportError as error:
    raise MissingDependencyError(
        f"several workers need 'distributed', which does not load: {error}; try: pip install "
        "'featcache[dask]'"
    ) from error

if TYPE_CHECKING:
    from dask.distributed import Client


SetupFn = Callable[[], Mapping[str, object]]
R = TypeVar("R")
OWN = "env"  # name of the client's own environment


def register(client: Client, env: WorkerEnv) -> None:
    """Build an environment in all workers, in those that join later, too.

    Raises what `setup_fn` raises there.
    """
    try:
        client.register_plugin(env, name=env.name)
    except CommClosedError as error:
        raise ComputeError(
            f"a worker died while {env.title} ran in it (out of memory?); its log may say why"
        ) from error


def worker_env() -> Mapping[str, object]:
    """Return what `setup_fn` built in this worker process.

    Empty if there is none. For functions that run in workers.

    Raises what `setup_fn` raised, if it failed.
    """
    return env_of(get_worker(), OWN)


def env_of(worker: Worker, name: str) -> Mapping[str, object]:
    """Return the environment of a worker that has some name; empty if there is none.

    Raises what the `setup_fn` raised, if it failed.
    """
    built = _BUILT.get(worker, {}).get(name)
    if built is None and name in worker.plugins:
        raise ConfigError("the environment is not built yet; ask in a task")
    # of a worker that joins late, Dask tells nobody of an error
    if isinstance(built, Exception):
        raise built
    return built or {}


def with_worker_env(fn: Callable[..., R]) -> Callable[..., R]:
    """Return a function that runs in workers entries of their environment as arguments, by name.

    One that takes `**kwargs` gets all of them. Raises `ConfigError` in the worker if an argument is
    given both ways.

    >>> from featcache.workers import get_client
    >>> def double(x, factor):
    ...     return x * factor
    >>> with get_client(setup_fn=lambda: {"factor": 2}) as client:
    ...     client.gather(client.map(with_worker_env(double), [1, 2]))
    [2, 4]
    """

    @wraps(fn)
    def with_env(*args: object, **kwargs: object) -> R:
        env, signature = worker_env(), inspect.signature(fn)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        wanted = {name: env[name] for name in env if takes_all or kinds.get(name) in by_name}
        for name in sorted(wanted.keys() & {*signature.bind_partial(*args).arguments, *kwargs}):
            raise ConfigError(
                f"argument {name!r} of {getattr(fn, '__name__', fn)!r} is given, and is in the "
                "worker's environment, too; rename one of them"
            )
        return fn(*args, **kwargs, **wanted)

    return with_env


class WorkerEnv(WorkerPlugin):
    """Builds the environment of a worker when the worker joins.

    Args:
        setup_fn: builds it.
        name: by which `env_of` finds it.
    """

    def __init__(self, setup_fn: SetupFn, name: str = OWN) -> None:
        self._setup_fn, self.name = setup_fn, name
        function = setup_fn.func if isinstance(setup_fn, partial) else setup_fn
        self.title = f"setup_fn {getattr(function, '__qualname__', function)!r}"
        try:
            cloudpickle.dumps(self)
        except Exception as error:  # whatever the objects in it raise
            raise ConfigError(
                f"{self.title} cannot be sent to workers: {error}; let it hold names and paths, "
                "and build the rest there"
            ) from error

    async def setup(self, worker: Worker) -> None:
        """Build the environment in a worker that joins."""
        # in the thread of the tasks, to which a GPU or torch's settings may belong; meanwhile the
        # worker stays in touch
        await asyncio.get_running_loop().run_in_executor(
            worker.executors["default"], self._build_once, worker
        )
        env_of(worker, self.name)

    def _build_once(self, worker: Worker) -> None:
        with _BUILDING:
            built = _BUILT.setdefault(worker, {})
            if self.name in built:
                return
            try:
                env = self._setup_fn()
                if not isinstance(env, Mapping) or not all(isinstance(name, str) for name in env):
                    raise ConfigError(f"{self.title} returns {env!r}, not a dict by name")
                built[self.name] = env
            except Exception as error:
                error.add_note(f"raised by {self.title} in worker {worker.address}")
                built[self.name] = error


# by name, of each worker in this process; one that joins while an environment is registered may be
# given it twice, and builds it once
_BUILT: WeakKeyDictionary[Worker, dict[str, Mapping[str, object] | Exception]] = WeakKeyDictionary()
_BUILDING = threading.Lock()


def forget(name: str, dask_worker: Worker) -> None:
    """Release an environment in a worker."""
    _BUILT.get(dask_worker, {}).pop(name, None)
