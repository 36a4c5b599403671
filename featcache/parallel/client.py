"""`get_client`: a Dask client with workers of its own, which end with it, and the environment of each worker."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import click

from featcache.errors import ComputeError, ConfigError, MissingDependencyError
from featcache.parallel.clusters import THREAD_VARIABLES, make_cluster, start_workers, threads
from featcache.parallel.config import ParallelConfig

try:
    import cloudpickle  # type: ignore[import-untyped]
    from distributed import Worker, WorkerPlugin, get_worker
    from distributed.comm.core import CommClosedError
except ImportError as error:
    raise MissingDependencyError(
        f"several workers need 'distributed', which does not load: {error}; try: pip install 'featcache[dask]'"
    ) from error

if TYPE_CHECKING:
    from dask.distributed import Client

R = TypeVar("R")
SetupFn = Callable[[], Mapping[str, object]]
_PLUGIN = "env"
FORGETTING_S = 10.0  # for workers to let go of an environment; one that hangs does not
_SETTINGS = {
    "distributed.scheduler.allowed-failures": 0,  # who lost a task decides what becomes of it
    # no task waits on a worker that is busy: it would be blamed, too, when that one dies
    "distributed.scheduler.worker-saturation": 1.0,
    # a dead process closes its connection; this is for one that hangs, and must outlast a call that holds the GIL
    "distributed.scheduler.worker-ttl": "30 minutes",
    "distributed.comm.timeouts.connect": "60s",
    "distributed.comm.timeouts.tcp": "60s",
}


@contextmanager
def get_client(
    config: ParallelConfig | Mapping[str, object] | None = None, setup_fn: SetupFn | None = None
) -> Iterator[Client]:
    """Give a Dask client with the workers that `config` declares; they end with the `with` block, however it ends.

    Local workers are processes that listen on the loopback interface only. Those of a job queue are waited for until
    the first is there; others join when their jobs start. The link of the dashboard is printed on standard error.

    Args:
        config: a `ParallelConfig`, or a mapping of that form; None is one local worker.
        setup_fn: builds the environment of a worker, a dict by name, once in each worker process. What runs there
            finds it by `worker_env()`, or gets its entries as arguments: `client.map(with_worker_env(fn), data)`.

    A script that uses local workers needs `if __name__ == "__main__":`, since each of them imports it.

    Raises `ConfigError` if the workers cannot be started, `MissingDependencyError` if a library is not installed, and
    what `setup_fn` raises in a worker.

    >>> with get_client({"env": "local", "n_workers": 1}) as client:
    ...     client.gather(client.map(abs, [-1, 2]))
    [1, 2]
    """
    from dask import config as dask_config
    from dask.distributed import Client

    checked = ParallelConfig.of(config)
    plugin = None if setup_fn is None else _WorkerEnv(setup_fn)
    settings: dict[str, object] = dict(_SETTINGS)
    local = checked.env.startswith("local")
    if local:
        # a local worker that dies is started again at once, whereas Dask would give it up after 15 s
        settings["distributed.deploy.lost-worker-timeout"] = "1 hour"
        settings.update({f"distributed.nanny.pre-spawn-environ.{name}": n for name, n in threads(checked).items()})
    with ExitStack() as exits:
        exits.enter_context(_quiet())
        exits.enter_context(_same_environment(THREAD_VARIABLES))
        exits.enter_context(dask_config.set(settings))
        cluster = exits.enter_context(make_cluster(checked))
        client = exits.enter_context(Client(cluster))  # type: ignore[no-untyped-call]
        workers = f"{checked.n_workers} {checked.env} worker{'s' if checked.n_workers > 1 else ''}"
        click.echo(f"dashboard of {workers}: {client.dashboard_link}", err=True)
        start_workers(cluster, checked)
        if not local:
            click.echo(f"waiting for the first of {workers}; if none comes, see the log of its job", err=True)
        client.wait_for_workers(checked.n_workers if local else 1)
        _WANTED[client] = checked.n_workers
        if plugin is not None:
            _register(client, plugin, _PLUGIN)
        yield client


def wanted_workers(client: Client) -> int | None:
    """Return how many workers a client of `get_client` is to have; None for another client."""
    return _WANTED.get(client)


@contextmanager
def run_env(client: Client, setup_fn: SetupFn) -> Iterator[str]:
    """Build an environment in each worker, those that join later included, that lasts as long as the block.

    Gives the name by which `env_of` finds it; a client's own, and those of other runs, stay beside it.
    """
    plugin = _WorkerEnv(setup_fn)
    name = f"featcache-{plugin.token}"
    _register(client, plugin, name)
    try:
        yield name
    finally:

        def forget() -> None:
            client.unregister_worker_plugin(name)  # type: ignore[no-untyped-call]
            client.run(_forget, plugin.token, on_error="ignore")

        answers_within(FORGETTING_S, {name: forget})  # fails if the connection is lost, and the environment with it


def answers_within(seconds: float, calls: Mapping[str, Callable[[], R]]) -> dict[str, R | Exception]:
    """Make calls side by side that may never come back, and return what those returned or raised that did in time."""
    answers: queue.SimpleQueue[tuple[str, R | Exception]] = queue.SimpleQueue()

    def call(name: str) -> None:
        try:
            answers.put((name, calls[name]()))
        except Exception as error:
            answers.put((name, error))

    for name in calls:
        threading.Thread(target=call, args=(name,), name=f"featcache-{name}", daemon=True).start()
    until, found = time.monotonic() + seconds, dict[str, R | Exception]()
    with suppress(queue.Empty):
        while len(found) < len(calls):
            found.update([answers.get(timeout=max(until - time.monotonic(), 0))])
    return found


def _register(client: Client, plugin: _WorkerEnv, name: str) -> None:
    try:
        client.register_plugin(plugin, name=name)
    except CommClosedError as error:
        raise ComputeError(
            f"a worker died while {plugin.name} ran in it (out of memory?); its log may say why"
        ) from error


def worker_env() -> Mapping[str, object]:
    """Return what `setup_fn` built in this worker process; empty if there is none. For functions that run in workers.

    Raises what `setup_fn` raised, if it failed.
    """
    return env_of(get_worker(), _PLUGIN)


def env_of(worker: Worker, name: str) -> Mapping[str, object]:
    """Return the environment of a worker that has some name; empty if there is none.

    Raises what the `setup_fn` raised, if it failed.
    """
    plugin = worker.plugins.get(name)
    return plugin.env() if isinstance(plugin, _WorkerEnv) else {}


def with_worker_env(fn: Callable[..., R]) -> Callable[..., R]:
    """Let a function that runs in workers get entries of their environment as arguments, by the names of these.

    One that takes `**kwargs` gets all of them. Raises `ConfigError` in the worker if an argument is given both ways.

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
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], env: Mapping[str, object]
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
            f"argument {name!r} of {getattr(fn, '__name__', fn)!r} is given, and is in the worker's environment, too; "
            "rename one of them"
        )
    return {name: env[name] for name in names}


class _WorkerEnv(WorkerPlugin):
    """Builds the environment of a worker when the worker joins."""

    def __init__(self, setup_fn: SetupFn) -> None:
        self._setup_fn = setup_fn
        self.token = uuid.uuid4().hex
        self._outcome: Mapping[str, object] | Exception = ConfigError("the environment is not built yet; ask in a task")
        self.name = f"setup_fn {getattr(setup_fn, '__qualname__', setup_fn)!r}"
        try:
            cloudpickle.dumps(self)
        except Exception as error:  # whatever the objects in it raise
            raise ConfigError(
                f"{self.name} cannot be sent to workers: {error}; let it hold names and paths, and build the rest there"
            ) from error

    async def setup(self, worker: Worker) -> None:
        # in the thread of the tasks, to which a GPU or torch's settings may belong; meanwhile the worker stays in touch
        await asyncio.get_running_loop().run_in_executor(worker.executors["default"], self._set_up, worker)
        self.env()

    def env(self) -> Mapping[str, object]:
        if isinstance(self._outcome, Exception):  # of a worker that joins late, Dask tells nobody of it
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


# a worker that joins while the plugin is registered may be given it twice, and builds once all the same
_BUILT: WeakKeyDictionary[Worker, dict[str, Mapping[str, object] | Exception]] = WeakKeyDictionary()
_BUILDING = threading.Lock()
_WANTED: WeakKeyDictionary[Client, int] = WeakKeyDictionary()


def _forget(token: str, dask_worker: Worker) -> None:
    _BUILT.get(dask_worker, {}).pop(token, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let Dask tell warnings only: where a program shows all that is told, it tells of every connection."""
    logger = logging.getLogger("distributed")
    level = logger.level
    if level in (logging.NOTSET, logging.INFO):  # another one was chosen by the user
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _same_environment(names: tuple[str, ...]) -> Iterator[None]:
    """Put environment variables back: Dask sets those for its workers in this process, and leaves them there."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
