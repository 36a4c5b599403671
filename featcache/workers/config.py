"""`ParallelConfig`: on how many workers to compute, and where they run."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from featcache._checks import errors_about, named_settings, whole_number
from featcache.errors import ConfigError, UnknownNameError, nearest

if TYPE_CHECKING:
    from dask.distributed import Client

# the class in dask_jobqueue for each job queue
_CLASSES = ("SLURM", "PBS", "SGE", "LSF", "HTCondor", "OAR", "Moab")
QUEUES = {name.lower(): f"{name}Cluster" for name in _CLASSES}
ENVS = ("local", "local_gpu", *QUEUES, "ssh", "kube")


@dataclass(frozen=True, init=False)
class ParallelConfig:
    """Declare on how many workers to compute, and where they run: the `parallel:` block of ESPnet3.

    Args:
        env: "local" (processes of this machine), "local_gpu" (one for each GPU), a job queue
            ("slurm", "pbs", "sge", "lsf", "htcondor", "oar", "moab"), "ssh" or "kube".
        n_workers: how many worker processes.
        options: arguments of Dask's cluster class for `env`: of `LocalCluster`, `SLURMCluster`, ...

    The option `walltime` may be a number of seconds: that is what YAML makes of an unquoted
    `30:00`. Two numbers are minutes and seconds, three are hours, minutes and seconds; only for
    "lsf" it is hours and minutes, as LSF has it.

    Raises `ConfigError` if the declaration cannot work, `UnknownNameError` for an unknown `env` or
    setting.

    >>> ParallelConfig("slurm", 8, {"queue": "gpu", "walltime": 1800}).options
    {'queue': 'gpu', 'walltime': '00:30:00'}
    """

    env: str
    n_workers: int
    options: Mapping[str, object] = dataclasses.field(hash=False)

    @named_settings("a parallel configuration")
    def __init__(
        self, env: str = "local", n_workers: int = 1, options: Mapping[str, object] | None = None
    ) -> None:
        if env not in ENVS:
            raise UnknownNameError(f"no parallel env {env!r}; {nearest(env, ENVS)}")
        object.__setattr__(self, "env", str(env))
        object.__setattr__(self, "n_workers", whole_number("n_workers", n_workers, 1))
        with errors_about(f"options of env {env!r}"):
            object.__setattr__(self, "options", _options(env, options))

    @classmethod
    def of(cls, config: ParallelConfig | Mapping[str, object] | None) -> ParallelConfig:
        """Make one of a mapping, such as a block of YAML or OmegaConf's; None is one local worker.

        >>> ParallelConfig.of({"env": "local", "n_workers": 2})
        ParallelConfig(env='local', n_workers=2, options={})
        """
        if config is None:
            return cls()
        if isinstance(config, ParallelConfig):
            return config
        if not isinstance(config, Mapping):
            raise ConfigError(
                "a parallel configuration is a mapping with env, n_workers, options, "
                f"not {config!r}"
            )
        settings: dict[str, Any] = {str(name): value for name, value in config.items()}
        return cls(**settings)


def config_or_client(
    parallel: ParallelConfig | Mapping[str, object] | Client,
) -> ParallelConfig | Client:
    """Return a client of Dask as it is, and else a checked configuration."""
    distributed = sys.modules.get("distributed")  # a client can only come from there
    if distributed is not None and isinstance(parallel, distributed.Client):
        if parallel.asynchronous or parallel.status != "running":
            kind = "asynchronous" if parallel.asynchronous else parallel.status
            raise ConfigError(
                f"parallel is a client that is {kind}; give one that runs and waits for its answers"
            )
        return cast("Client", parallel)
    return ParallelConfig.of(cast(Mapping[str, object], parallel))


def _options(env: str, options: Mapping[str, object] | None) -> dict[str, object]:
    """Return a copy of the options in plain dicts and lists."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ConfigError(f"give a mapping by name, not {options!r}")
    if "n_workers" in options:
        raise ConfigError("n_workers stands beside 'options', not in it")
    copied = {name: _plain(value) for name, value in options.items()}
    if copied.get("walltime") is not None:
        copied["walltime"] = _walltime(env, copied["walltime"])
    return copied


def _plain(value: object) -> object:
    """Copy a value, OmegaConf's mappings and lists as dicts and lists, which Dask can handle."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple):
        return [_plain(inner) for inner in value]
    return value


def _walltime(env: str, walltime: object) -> str:
    """Write a job's time limit as its queue reads it; see `ParallelConfig`."""
    if isinstance(walltime, str):
        match = re.fullmatch(r"(\d+):(\d\d)", walltime)
        if match is None or env == "lsf":
            return walltime
        walltime = int(match[1]) * 60 + int(match[2])  # OAR would read it as hours and minutes
    if not isinstance(walltime, int) or isinstance(walltime, bool):
        raise ConfigError(f"walltime is text such as '01:30:00', not {walltime!r}")
    # YAML 1.1 reads 30:00 to base 60, as 1800: https://yaml.org/type/int.html
    minutes, seconds = divmod(walltime, 60)
    if not minutes:
        raise ConfigError(
            f"walltime {walltime!r} is a number of seconds, under a minute; write it as text: "
            "'01:30:00' is an hour and a half"
        )
    if env == "lsf":
        return f"{minutes:02}:{seconds:02}"
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
