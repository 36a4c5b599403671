"""Dask's clusters, one for each `env`, and their workers."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import signal
import sys
from collections.abc import Iterable, Mapping
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
_TO_INSTALL = {
    "distributed": "'featcache[dask]'",
    "dask_jobqueue": "'featcache[dask]'",
    "dask_cuda": "dask-cuda",
    "dask_kubernetes": "dask-kubernetes",
    "asyncssh": "asyncssh",
}


def make_cluster(config: ParallelConfig) -> Cluster:
    """Start the scheduler of a cluster, and with "ssh" and "local_gpu" its workers.

    Others `start_workers` starts.

    Workers have one thread each, since the environment of a process is not made for several;
    options may say otherwise.

    Raises `MissingDependencyError` if a library is not installed, `ConfigError` if it does not take
    the options.
    """
    try:
        return _make(config, dict(config.options))
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"env {config.env!r}: no cluster with options {dict(config.options)!r}: "
            f"{_reason(error)}"
        ) from error


def _make(config: ParallelConfig, options: dict[str, Any]) -> Cluster:
    if config.env in QUEUES:
        queue = getattr(need("dask_jobqueue", config.env), QUEUES[config.env])
        return cast("Cluster", queue(**_job(config.env, options)))
    if config.env == "kube":
        need("dask_kubernetes", config.env)
        operator = import_module("dask_kubernetes.operator")
        return cast("Cluster", operator.KubeCluster(**{"n_workers": 0, **options}))
    if config.env == "ssh":
        return _ssh_cluster(config.n_workers, options)
    # port 0 is any free one; a memory limit is the user's to set
    loopback = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    options = {**loopback, "threads_per_worker": 1, "memory_limit": None, **options}
    if config.env == "local_gpu":
        cuda = need("dask_cuda", config.env)
        # it gives each worker a GPU of its own, and cannot be made without workers
        return cast("Cluster", cuda.LocalCUDACluster(n_workers=config.n_workers, **options))
    distributed = need("distributed", config.env)
    return cast("Cluster", distributed.LocalCluster(n_workers=0, **options))


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
    try:
        cluster.sync(_started, cluster)  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError, TypeError, ValueError) as error:
        for worker in cluster.workers.values():
            # a cluster with workers that never ran could not be closed
            worker.status = Status.failed
        raise ConfigError(
            f"env {config.env!r}: workers cannot be started with options {dict(config.options)!r}: "
            f"{_reason(error)}"
        ) from error


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


async def _started(cluster: SpecCluster) -> None:
    # shielded from Ctrl-C: a cluster can only close workers that it has started
    await asyncio.shield(asyncio.ensure_future(cluster))


def need(module: str, env: str) -> Any:
    """Import a library, or say what to install for `env`."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"env {env!r} needs {module!r}, which does not load: {error}; try: pip install "
            f"{_TO_INSTALL[module]}"
        ) from error
    finally:
        # with dask_jobqueue 0.9.0 Ctrl-C would be a silent end with status 0:
        # dask/dask-jobqueue#696
        if on_ctrl_c is not None and signal.getsignal(signal.SIGINT) is not on_ctrl_c:
            signal.signal(signal.SIGINT, on_ctrl_c)


def threads(config: ParallelConfig) -> dict[str, int]:
    """Share the cores of this machine out among local workers.

    Returns values of the environment variables of threads.
    """
    from dask.system import CPU_COUNT

    return dict.fromkeys(THREAD_VARIABLES, max(1, CPU_COUNT // config.n_workers))


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
        "scheduler_options": {
            "dashboard_address": ":0",
            **dict(options.get("scheduler_options") or {}),
        },
    }


def _texts(values: Iterable[object] | None) -> list[str]:
    return [str(value) for value in values or ()]


def _ssh_cluster(n_workers: int, options: dict[str, Any]) -> Cluster:
    hosts = options.get("hosts")
    if not isinstance(hosts, list) or len(hosts) != n_workers + 1:
        raise ConfigError(
            "env 'ssh': options need 'hosts', that of the scheduler, then one for each of "
            f"{n_workers} workers (a host may be named again), not {hosts!r}"
        )
    need("asyncssh", "ssh")
    options["worker_options"] = {"nthreads": 1, **dict(options.get("worker_options") or {})}
    options["scheduler_options"] = {
        "dashboard_address": ":0",
        **dict(options.get("scheduler_options") or {}),
    }
    return cast("Cluster", need("distributed", "ssh").SSHCluster(**options))
