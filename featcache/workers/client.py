"""Dask's clients: clusters that are launched as configured, or that somebody else has launched."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import click

from featcache.errors import ConfigError, MissingDependencyError
from featcache.workers.config import QUEUES, ParallelConfig
from featcache.workers.environments import SetupFn, WorkerEnv, register

if TYPE_CHECKING:
    from dask.distributed import Client
    from distributed.deploy.cluster import Cluster
    from distributed.deploy.spec import SpecCluster


# Dask's clusters, one for each `env`, and their workers.

# read when a process loads its mathematical libraries, torch's among them
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
KILLED_S = 5.0  # how long a killed process may take to end
_EXTRA = "'featcache[dask]'"
_TO_INSTALL = {"distributed": _EXTRA, "dask_jobqueue": _EXTRA}  # others bear the module's name


def make_cluster(config: ParallelConfig) -> Cluster:
    """Start the scheduler of a cluster, and with "ssh" and "local_gpu" its workers.

    `start_workers` starts the workers of others, which have one thread each unless options say
    otherwise: the environment of a process is not made for several.

    Raises `MissingDependencyError` if a library is not installed, `ConfigError` if it does not take
    the options.
    """
    env, options = config.env, dict(config.options)
    # port 0 is any free one; a memory limit is the user's to set
    loopback = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    local = {**loopback, "threads_per_worker": 1, "memory_limit": None, **options}
    with _explained(config, "no cluster"):
        if env in QUEUES:
            made = getattr(need("dask_jobqueue", env), QUEUES[env])(**_job(env, options))
        elif env == "kube":
            need("dask_kubernetes", env)
            operator = import_module("dask_kubernetes.operator")
            made = operator.KubeCluster(**{"n_workers": 0, **options})
        elif env == "ssh":
            made = _ssh_cluster(config.n_workers, options)
        elif env == "local_gpu":
            # it gives each worker a GPU of its own, and cannot be made without workers
            made = need("dask_cuda", env).LocalCUDACluster(n_workers=config.n_workers, **local)
        else:
            made = need("distributed", env).LocalCluster(n_workers=0, **local)
    return cast("Cluster", made)


@contextmanager
def _explained(config: ParallelConfig, problem: str) -> Iterator[None]:
    """Raise `ConfigError` in place of the errors of Dask's clusters."""
    try:
        yield
    except ConfigError:
        raise
    except (RuntimeError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"env {config.env!r}: {problem} with options {dict(config.options)!r}: {_reason(error)}"
        ) from error


def start_workers(cluster: Cluster, config: ParallelConfig) -> None:
    """Start the workers, or submit their jobs.

    Raises `ConfigError` with what the queue says if it refuses a job.
    """
    from distributed.core import Status
    from distributed.deploy.spec import SpecCluster

    if not isinstance(cluster, SpecCluster):
        cluster.scale(config.n_workers)
        return
    # not scale(): it would start them in the background, where a refused job is no more than a line
    # in the log
    while len(cluster.plan) < config.n_workers:
        cluster.worker_spec.update(cluster.new_worker_spec())  # type: ignore[no-untyped-call]
    with _explained(config, "workers cannot be started"):
        try:
            cluster.sync(_started, cluster)  # type: ignore[no-untyped-call]
        except Exception:
            for worker in cluster.workers.values():
                # a cluster with workers that never ran could not be closed
                worker.status = Status.failed
            raise


async def _started(cluster: SpecCluster) -> None:
    """Wait for workers; Ctrl-C does not end the start, since a cluster only closes started ones."""
    starting = asyncio.ensure_future(cluster)
    # after Ctrl-C nobody asks for the error; asyncio would tell of it
    starting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.shield(starting)


def kill_local_workers(cluster: Cluster) -> None:
    """Kill the worker processes that were started here, and wait until they have ended."""
    from distributed import Nanny
    from distributed.core import Status

    # those that start now included
    made = [one for one in getattr(cluster, "_created", ()) if isinstance(one, Nanny)]
    until = time.monotonic() + KILLED_S
    while time.monotonic() < until and made:
        for nanny in made:
            if nanny.status == Status.running:
                nanny.close_gracefully()  # it starts no other worker then
            if (pid := nanny.pid) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        made = [nanny for nanny in made if nanny.status not in (Status.closed, Status.failed)]
        time.sleep(0.02)


def names_of(cluster: Cluster) -> set[str]:
    """Return the names of the workers that are there."""
    return {str(worker["name"]) for worker in list(cluster.scheduler_info["workers"].values())}


def replace_workers(cluster: Cluster, seen: set[str], n_workers: int) -> None:
    """Ask for workers in place of those whose names are `seen`; they are forgotten."""
    from distributed.deploy.spec import SpecCluster

    there = names_of(cluster)
    if isinstance(cluster, SpecCluster):
        for name, spec in cluster.worker_spec.items():
            # that a job of several is lost Dask does not notice: it looks for a job with the name
            # of the worker
            names = {f"{name}{suffix}" for suffix in spec.get("group", ())}
            if names & seen and not names & there and name in cluster.workers:
                cluster.sync(cluster.workers.pop(name).close)  # type: ignore[no-untyped-call]
                seen -= names
    cluster.scale(n_workers)


def _reason(error: BaseException) -> str:
    if error.__cause__ is not None:
        return _reason(error.__cause__)
    if "failed to start worker process" in str(error):  # it died before it could say why
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script is not None and not Path(script).exists():
            return f"{error}; workers import the script, which is no file: save {script!r} as one"
        return (
            f"{error}; a script needs `if __name__ == '__main__':` around what starts workers, "
            "since they import it; or one was killed as it began"
        )
    if multiprocessing.current_process().daemon:
        return "this is a worker itself, which may not start processes"
    # the command of a job queue
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return (
            f"there is no command {error.filename!r} here; run this on a machine of the cluster, "
            "or take env 'local'"
        )
    return str(error)


def need(module: str, env: str) -> ModuleType:
    """Import a library, or say what to install for `env`."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"env {env!r} needs {module!r}, which does not load: {error}; try: pip install "
            f"{_TO_INSTALL.get(module, module.replace('_', '-'))}"
        ) from error
    finally:
        # with dask_jobqueue 0.9.0 Ctrl-C would be a silent end with status 0:
        # dask/dask-jobqueue#696
        if on_ctrl_c is not None and signal.getsignal(signal.SIGINT) is not on_ctrl_c:
            signal.signal(signal.SIGINT, on_ctrl_c)


def _job(env: str, options: Mapping[str, object]) -> dict[str, object]:
    """Add what gives a job's workers one thread for tasks, and their share of its cores."""
    from dask import config

    def setting(name: str) -> Any:  # of the options, else of dask_jobqueue's own files
        return options.get(name) or config.get(f"jobqueue.{env}.{name.replace('_', '-')}", None)

    processes = int(setting("processes") or 1)  # dask_jobqueue would have several from two cores on
    share = max(1, math.floor(int(setting("cores") or 1) / processes))
    arguments = _texts(setting("worker_extra_args"))
    if not any(argument.startswith("--nthreads") for argument in arguments):
        # dask_jobqueue gives the number of cores, the last one counts
        arguments = [*arguments, "--nthreads", "1"]
    exports = [f"export {name}=${{{name}:-{share}}}" for name in THREAD_VARIABLES]
    return {
        **options,
        "processes": processes,
        "worker_extra_args": arguments,
        "job_script_prologue": [*exports, *_texts(setting("job_script_prologue"))],
        "scheduler_options": _filled(options, "scheduler_options", dashboard_address=":0"),
    }


def _texts(values: Iterable[object] | None) -> list[str]:
    return [str(value) for value in values or ()]


def _ssh_cluster(n_workers: int, options: dict[str, object]) -> object:
    hosts = options.get("hosts")
    if not isinstance(hosts, list) or len(hosts) != n_workers + 1:
        raise ConfigError(
            "env 'ssh': options need 'hosts', that of the scheduler, then one for each of "
            f"{n_workers} workers (a host may be named again), not {hosts!r}"
        )
    need("asyncssh", "ssh")
    options["worker_options"] = _filled(options, "worker_options", nthreads=1)
    options["scheduler_options"] = _filled(options, "scheduler_options", dashboard_address=":0")
    return need("distributed", "ssh").SSHCluster(**options)


def _filled(options: Mapping[str, Any], name: str, **defaults: object) -> dict[str, object]:
    """Return the mapping that one of the options is, with defaults for what it leaves out."""
    return {**defaults, **(options.get(name) or {})}


# `get_client`: a Dask client with workers of its own, which end with it.

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
    """Yield a Dask client with the workers that `config` declares.

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
    """Make Dask log warnings only.

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
    """Set how many threads local workers, which inherit the environment, compute with."""
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
