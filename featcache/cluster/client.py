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
from featcache.cluster.launch import (
    THREAD_VARIABLES,
    kill_local_workers,
    make_cluster,
    start_workers,
)
from featcache.cluster.worker_env import SetupFn, WorkerEnv, register

if TYPE_CHECKING:
    from dask.distributed import Client
    from distributed.deploy.cluster import Cluster

_SETTINGS: dict[str, object] = {
    "distributed.scheduler.allowed-failures": 0,  # the driver decides what becomes of lost tasks
    # no task waits on a worker that is busy: it would be blamed, too, when that worker dies
    "distributed.scheduler.worker-saturation": 1.0,
    # a dead process closes its connection; this is for one that hangs, and must outlast a call that
    # holds the GIL
    "distributed.scheduler.worker-ttl": "30 minutes",
    "distributed.comm.timeouts.connect": "60s",
    "distributed.comm.timeouts.tcp": "60s",
}
WANTED: WeakKeyDictionary[Client, int] = WeakKeyDictionary()  # workers of clients of `get_client`
# a worker that dies is started again at once, whereas Dask would give it up after 15 s
_OF_LOCAL: dict[str, object] = {"distributed.deploy.lost-worker-timeout": "1 hour"}


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
    env = None if setup_fn is None else WorkerEnv(setup_fn)
    local = checked.env.startswith("local")
    with ExitStack() as exits:
        exits.enter_context(_quiet())
        exits.enter_context(_share_of_cores(checked.n_workers if local else None))
        exits.enter_context(dask_config.set(_SETTINGS | (_OF_LOCAL if local else {})))
        with _children_ignore_ctrl_c() if local else nullcontext():
            made = make_cluster(checked)
        cluster = exits.enter_context(made)
        client = exits.enter_context(Client(cluster))  # type: ignore[no-untyped-call]
        exits.enter_context(_killed_after_ctrl_c(cluster))
        workers = f"{checked.n_workers} {checked.env} worker{'s' if checked.n_workers > 1 else ''}"
        click.echo(f"dashboard of {workers}: {client.dashboard_link}", err=True)
        start_workers(cluster, checked)
        if not local:
            text = f"waiting for the first of {workers}; if none comes, see the log of its job"
            click.echo(text, err=True)
        client.wait_for_workers(checked.n_workers if local else 1)
        WANTED[client] = checked.n_workers
        if env is not None:
            register(client, env)
        yield client


@contextmanager
def _quiet() -> Iterator[None]:
    """Have Dask log warnings only.

    It logs each connection, which shows where a program logs everything.
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

    Ctrl-C goes to all processes of a terminal. Workers would end with a traceback each, in the
    middle of a batch; it is the driver that asks them to stop.
    """
    # it unblocks SIGINT in the thread that starts it, and would in that of the workers
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _killed_after_ctrl_c(cluster: Cluster) -> Iterator[None]:
    """Kill the local workers of a cluster on Ctrl-C: some may hang, or take long to start."""
    try:
        yield
    except KeyboardInterrupt:
        # of the connections that break now nobody needs to hear
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        kill_local_workers(cluster)
        raise


@contextmanager
def _share_of_cores(n_workers: int | None) -> Iterator[None]:
    """Tell local workers, which inherit environment variables, how many threads to compute with."""
    from dask.system import CPU_COUNT

    before = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    if n_workers is not None:
        threads = str(max(1, CPU_COUNT // n_workers))
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, threads) | before)
    try:
        yield
    finally:  # Dask sets some, too
        for name in THREAD_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)
