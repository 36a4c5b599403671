"""Dask's clusters, one for each `env`, and their workers."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from featcache.cluster.config import QUEUES, ParallelConfig
from featcache.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from distributed.deploy.cluster import Cluster
    from distributed.deploy.spec import SpecCluster

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


def need(module: str, env: str) -> Any:
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


def _job(env: str, options: Mapping[str, Any]) -> dict[str, Any]:
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


def _ssh_cluster(n_workers: int, options: dict[str, Any]) -> Any:
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
