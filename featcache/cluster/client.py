"""`get_client`: a Dask client with workers of its own, which end with it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import click

from featcache.cluster.config import ParallelConfig
from featcache.cluster.launch import THREAD_VARIABLES, make_cluster, start_workers, threads
from featcache.cluster.worker_env import OWN, SetupFn, WorkerEnv, register

if TYPE_CHECKING:
    from dask.distributed import Client

_SETTINGS = {
    "distributed.scheduler.allowed-failures": 0,  # who lost a task decides what becomes of it
    # no task waits on a worker that is busy: it would be blamed, too, when that one dies
    "distributed.scheduler.worker-saturation": 1.0,
    # a dead process closes its connection; this is for one that hangs, and must outlast a call that
    # holds the GIL
    "distributed.scheduler.worker-ttl": "30 minutes",
    "distributed.comm.timeouts.connect": "60s",
    "distributed.comm.timeouts.tcp": "60s",
}


@contextmanager
def get_client(
    config: ParallelConfig | Mapping[str, object] | None = None, setup_fn: SetupFn | None = None
) -> Iterator[Client]:
    """Give a Dask client with the workers that `config` declares.

    They end with the `with` block, however it ends.

    Local workers are processes that listen on the loopback interface only. Those of a job queue are
    waited for until the first is there; others join when their jobs start. The link of the
    dashboard is printed on standard error.

    Args:
        config: a `ParallelConfig`, or a mapping of that form; None is one local worker.
        setup_fn: builds the environment of a worker, a dict by name, once in each worker process.
            What runs there finds it by `worker_env()`, or gets its entries as arguments:
            `client.map(with_worker_env(fn), data)`.

    A script that uses local workers needs `if __name__ == "__main__":`, since each of them imports
    it.

    Raises `ConfigError` if the workers cannot be started, `MissingDependencyError` if a library is
    not installed, and what `setup_fn` raises in a worker.

    >>> with get_client({"env": "local", "n_workers": 1}) as client:
    ...     client.gather(client.map(abs, [-1, 2]))
    [1, 2]
    """
    from dask import config as dask_config
    from dask.distributed import Client

    checked = ParallelConfig.of(config)
    plugin = None if setup_fn is None else WorkerEnv(setup_fn)
    local = checked.env.startswith("local")
    with ExitStack() as exits:
        exits.enter_context(_quiet())
        exits.enter_context(_same_environment(THREAD_VARIABLES))
        exits.enter_context(dask_config.set(_settings(checked)))
        with _children_ignore_ctrl_c() if local else nullcontext():
            made = make_cluster(checked)
        cluster = exits.enter_context(made)
        client = exits.enter_context(Client(cluster))  # type: ignore[no-untyped-call]
        workers = f"{checked.n_workers} {checked.env} worker{'s' if checked.n_workers > 1 else ''}"
        click.echo(f"dashboard of {workers}: {client.dashboard_link}", err=True)
        start_workers(cluster, checked)
        if not local:
            click.echo(
                f"waiting for the first of {workers}; if none comes, see the log of its job",
                err=True,
            )
        client.wait_for_workers(checked.n_workers if local else 1)
        _WANTED[client] = checked.n_workers
        if plugin is not None:
            register(client, plugin, OWN)
        yield client


def _settings(config: ParallelConfig) -> dict[str, object]:
    settings: dict[str, object] = dict(_SETTINGS)
    if config.env.startswith("local"):
        # one that dies is started again at once, whereas Dask would give it up after 15 s
        settings["distributed.deploy.lost-worker-timeout"] = "1 hour"
        for name, number in threads(config).items():
            settings[f"distributed.nanny.pre-spawn-environ.{name}"] = number
    return settings


def wanted_workers(client: Client) -> int | None:
    """Return how many workers a client of `get_client` is to have; None for another client."""
    return _WANTED.get(client)


_WANTED: WeakKeyDictionary[Client, int] = WeakKeyDictionary()


@contextmanager
def _quiet() -> Iterator[None]:
    """Let Dask tell warnings only.

    Where a program shows all that is told, it tells of every connection.
    """
    logger = logging.getLogger("distributed")
    level = logger.level
    if level in (logging.NOTSET, logging.INFO):  # another one was chosen by the user
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _children_ignore_ctrl_c() -> Iterator[None]:
    """Block SIGINT in the threads made meanwhile, and in the processes that these start.

    Ctrl-C goes to all processes of a terminal. Workers would end with a traceback each, amid a
    batch; it is the driver that asks them to stop.
    """
    # it unblocks SIGINT in the thread that starts it, and would in that of the workers
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _same_environment(names: tuple[str, ...]) -> Iterator[None]:
    """Put environment variables back.

    Dask sets those for its workers in this process, and leaves them there.
    """
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
