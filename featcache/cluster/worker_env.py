"""The environment of a worker process: `setup_fn` builds it once, and functions get it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from featcache.cluster.answers import R, answers_within
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
OWN = "env"  # name of the plugin of the client's own environment
FORGETTING_S = 10.0  # for workers to let go of an environment; one that hangs does not


@contextmanager
def run_env(client: Client, setup_fn: SetupFn) -> Iterator[str]:
    """Build an environment in each worker that lasts as long as the block.

    Workers that join later get it, too.

    Gives the name by which `env_of` finds it; a client's own, and those of other runs, stay beside
    it.
    """
    plugin = WorkerEnv(setup_fn)
    name = f"featcache-{plugin.token}"
    register(client, plugin, name)
    try:
        yield name
    finally:

        def forget() -> None:
            client.unregister_worker_plugin(name)  # type: ignore[no-untyped-call]
            client.run(_forget, plugin.token, on_error="ignore")

        # fails if the connection is lost, and the environment with it
        answers_within(FORGETTING_S, {name: forget})


def register(client: Client, plugin: WorkerEnv, name: str) -> None:
    """Build an environment in all workers, those that join later included.

    Raises what `setup_fn` raises there.
    """
    try:
        client.register_plugin(plugin, name=name)
    except CommClosedError as error:
        raise ComputeError(
            f"a worker died while {plugin.name} ran in it (out of memory?); its log may say why"
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
    plugin = worker.plugins.get(name)
    return plugin.env() if isinstance(plugin, WorkerEnv) else {}


def with_worker_env(fn: Callable[..., R]) -> Callable[..., R]:
    """Let a function that runs in workers get entries of their environment as arguments.

    They are passed by the names of these.

    One that takes `**kwargs` gets all of them. Raises `ConfigError` in the worker if an argument is
    given both ways.

    >>> from featcache import get_client
    >>> def double(x, factor):
    ...     return x * factor
    >>> with get_client(setup_fn=lambda: {"factor": 2}) as client:
    ...     client.gather(client.map(with_worker_env(double), [1, 2]))
    [2, 4]
    """

    @functools.wraps(fn)
    def with_env(*args: object, **kwargs: object) -> R:
        return fn(*args, **kwargs, **_wanted(fn, args, kwargs, worker_env()))

    return with_env


def _wanted(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    env: Mapping[str, object],
) -> dict[str, object]:
    """Return the entries of an environment that a function asks for."""
    signature = inspect.signature(fn)
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = set(env)
    else:
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = {parameter.name for parameter in parameters if parameter.kind in named} & set(env)
    given = {*signature.bind_partial(*args).arguments, *kwargs}
    for name in sorted(names & given):
        raise ConfigError(
            f"argument {name!r} of {getattr(fn, '__name__', fn)!r} is given, and is in the "
            "worker's environment, too; rename one of them"
        )
    return {name: env[name] for name in names}


class WorkerEnv(WorkerPlugin):
    """Builds the environment of a worker when the worker joins."""

    def __init__(self, setup_fn: SetupFn) -> None:
        self._setup_fn = setup_fn
        self.token = uuid.uuid4().hex
        self._outcome: Mapping[str, object] | Exception = ConfigError(
            "the environment is not built yet; ask in a task"
        )
        self.name = f"setup_fn {getattr(setup_fn, '__qualname__', setup_fn)!r}"
        try:
            cloudpickle.dumps(self)
        except Exception as error:  # whatever the objects in it raise
            raise ConfigError(
                f"{self.name} cannot be sent to workers: {error}; let it hold names and paths, and "
                "build the rest there"
            ) from error

    async def setup(self, worker: Worker) -> None:
        """Build the environment in a worker that joins."""
        # in the thread of the tasks, to which a GPU or torch's settings may belong; meanwhile the
        # worker stays in touch
        await asyncio.get_running_loop().run_in_executor(
            worker.executors["default"], self._set_up, worker
        )
        self.env()

    def env(self) -> Mapping[str, object]:
        """Return what was built; raises what `setup_fn` raised."""
        # of a worker that joins late, Dask tells nobody of it
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def _set_up(self, worker: Worker) -> None:
        with _BUILDING:
            built = _BUILT.setdefault(worker, {})
            if self.token not in built:
                built[self.token] = self._build(worker.address)
            self._outcome = built[self.token]

    def _build(self, address: str) -> Mapping[str, object] | Exception:
        try:
            env = self._setup_fn()
            if not isinstance(env, Mapping) or not all(isinstance(name, str) for name in env):
                raise ConfigError(f"{self.name} returns {env!r}, not a dict by name")
        except Exception as error:
            error.add_note(f"raised by {self.name} in worker {address}")
            return error
        return env


# a worker that joins while the plugin is registered may be given it twice, and builds once
_BUILT: WeakKeyDictionary[Worker, dict[str, Mapping[str, object] | Exception]] = WeakKeyDictionary()


_BUILDING = threading.Lock()


def _forget(token: str, dask_worker: Worker) -> None:
    _BUILT.get(dask_worker, {}).pop(token, None)
