"""`ParallelConfig`: on how many workers to compute, and where they run."""

from __future__ import annotations

import dataclasses
import operator
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from featcache._checks import named_settings
from featcache.errors import ConfigError, UnknownNameError, nearest

if TYPE_CHECKING:
    from dask.distributed import Client

# the class in dask_jobqueue for each job queue
QUEUES = {
    "slurm": "SLURMCluster",
    "pbs": "PBSCluster",
    "sge": "SGECluster",
    "lsf": "LSFCluster",
    "htcondor": "HTCondorCluster",
    "oar": "OARCluster",
    "moab": "MoabCluster",
}
ENVS = ("local", "local_gpu", *QUEUES, "ssh", "kube")
_FIELDS = ("env", "n_workers", "options")


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
        object.__setattr__(self, "n_workers", _positive(n_workers))
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
                f"a parallel configuration is a mapping with {', '.join(_FIELDS)}, not {config!r}"
            )
        for key in config:
            if key not in _FIELDS:
                raise UnknownNameError(
                    f"a parallel configuration has no setting {key!r}; {nearest(key, _FIELDS)}"
                )
        return cls(**cast(dict[str, Any], dict(config)))


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


def _positive(n_workers: object) -> int:
    try:
        number = operator.index(n_workers)  # type: ignore[arg-type]  # whatever is no integer raises
    except TypeError:
        number = 0
    if number < 1 or isinstance(n_workers, bool):
        raise ConfigError(f"n_workers is a number of processes, 1 or more, not {n_workers!r}")
    return number


def _options(env: str, options: object) -> dict[str, object]:
    """Return a copy of the options in plain dicts and lists."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"options of env {env!r} are a mapping by name, not {options!r}")
    copied: dict[str, object] = {}
    for name, value in options.items():
        if not isinstance(name, str):
            raise ConfigError(f"options of env {env!r} have names, {name!r} is none")
        if name == "n_workers":
            raise ConfigError(
                f"options of env {env!r}: n_workers stands beside 'options', not in it"
            )
        copied[name] = _plain(value)
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
    if isinstance(walltime, int) and not isinstance(walltime, bool):
        # YAML 1.1 reads 30:00 to base 60, as 1800: https://yaml.org/type/int.html
        if walltime < 60:
            raise ConfigError(
                f"options of env {env!r}: walltime {walltime!r} is a number of seconds, under a "
                "minute; write it as text: '01:30:00' is an hour and a half"
            )
        if env == "lsf":
            return f"{walltime // 60:02}:{walltime % 60:02}"
        return f"{walltime // 3600:02}:{walltime // 60 % 60:02}:{walltime % 60:02}"
    if not isinstance(walltime, str):
        raise ConfigError(
            f"options of env {env!r}: walltime is text such as '01:30:00', not {walltime!r}"
        )
    match = re.fullmatch(r"(\d+):(\d\d)", walltime)
    if match and env != "lsf":  # OAR would read it as hours and minutes
        return _walltime(env, int(match[1]) * 60 + int(match[2]))
    return walltime
