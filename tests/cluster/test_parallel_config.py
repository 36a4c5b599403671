from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
import ruamel.yaml
import yaml
from hypothesis import given
from hypothesis import strategies as st

from featcache import ParallelConfig
from featcache.errors import ConfigError, UnknownNameError
from featcache.workers import get_client
from featcache.workers.config import ENVS

BLOCK = """
env: slurm
n_workers: 8
options:
  queue: gpu
  cores: 8
  processes: 1
  memory: 16GB
  walltime: 30:00
  job_extra_directives:
    - "--gres=gpu:1"
"""


def load_with_ruamel(text: str) -> Mapping[str, object]:
    loaded: Mapping[str, object] = ruamel.yaml.YAML().load(io.StringIO(text))
    return loaded


def load_with_hyperpyyaml(text: str) -> Mapping[str, object]:
    hyperpyyaml = pytest.importorskip("hyperpyyaml")
    loaded: Mapping[str, object] = hyperpyyaml.load_hyperpyyaml(text)
    return loaded


def load_with_omegaconf(text: str) -> Mapping[str, object]:
    omegaconf = pytest.importorskip("omegaconf")
    loaded: Mapping[str, object] = omegaconf.OmegaConf.create(text)
    return loaded


@pytest.mark.parametrize(
    "load", [yaml.safe_load, load_with_ruamel, load_with_hyperpyyaml, load_with_omegaconf]
)
def test_espnets_block_means_the_same_whoever_reads_it(load: object) -> None:
    assert callable(load)
    config = ParallelConfig.of(load(BLOCK))
    assert (config.env, config.n_workers) == ("slurm", 8)
    assert config.options == {
        "queue": "gpu",
        "cores": 8,
        "processes": 1,
        "memory": "16GB",
        "walltime": "00:30:00",
        "job_extra_directives": ["--gres=gpu:1"],
    }
    assert type(config.options["job_extra_directives"]) is list


def test_nothing_declared_is_one_local_worker() -> None:
    assert (
        ParallelConfig.of(None)
        == ParallelConfig.of({})
        == ParallelConfig()
        == ParallelConfig("local", 1, {})
    )


def test_any_mapping_will_do_and_one_of_ours_stays_itself() -> None:
    config = ParallelConfig.of(MappingProxyType({"n_workers": np.int64(3), "options": None}))
    assert config == ParallelConfig("local", 3)
    assert type(config.n_workers) is int
    assert ParallelConfig.of(config) is config


def test_options_are_copied_whole() -> None:
    nested = {"worker_options": {"nthreads": 2}}
    config = ParallelConfig("ssh", 1, nested)
    nested["worker_options"]["nthreads"] = 99
    assert config.options == {"worker_options": {"nthreads": 2}}


def test_it_can_be_pickled_and_hashed() -> None:
    config = ParallelConfig("slurm", 2, {"cores": 1})
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
    assert hash(config) == hash(ParallelConfig("slurm", 2))


@pytest.mark.parametrize("env", ENVS)
def test_every_env_can_be_declared(env: str) -> None:
    assert ParallelConfig(env).env == env


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"env": "slrum"}, r"no parallel env 'slrum'; did you mean 'slurm'\?"),
        ({"env": None}, r"no parallel env None; .*'local'"),
        ({"env": ["slurm"]}, r"no parallel env \['slurm'\]"),
        ({"workers": 3}, r"no setting 'workers'; did you mean 'n_workers'\?"),
        ({1: 3}, "no setting '1'; known"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(
    config: Mapping[str, object], message: str
) -> None:
    with pytest.raises(UnknownNameError, match=message):
        ParallelConfig.of(config)


def test_unknown_arguments_are_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"no setting 'worker'; did you mean 'n_workers'\?"):
        ParallelConfig(worker=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("n_workers", [0, -1, 2.0, "2", True, None])
def test_numbers_of_workers_are_whole_and_positive(n_workers: object) -> None:
    with pytest.raises(ConfigError, match="n_workers must be an integer of at least 1, not "):
        ParallelConfig.of({"n_workers": n_workers})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([("cores", 1)], r"options of env 'slurm': give a mapping by name, not \["),
        ("cores=1", "give a mapping by name, not 'cores=1'"),
        ({1: 2}, "give a mapping by name, not {1: 2}"),
        ({"n_workers": 2}, "n_workers stands beside 'options'"),
        ({"walltime": 1.5}, "walltime is text such as '01:30:00', not 1.5"),
        ({"walltime": True}, "walltime is text such as '01:30:00', not True"),
        ({"walltime": 30}, "30 is a number of seconds, under a minute"),
        ({"walltime": "0:59"}, "59 is a number of seconds, under a minute"),
    ],
)
def test_options_that_cannot_work_are_refused(options: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig.of({"env": "slurm", "options": options})


def test_a_list_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match="a mapping with env, n_workers, options, not 'slurm'"):
        ParallelConfig.of("slurm")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("env", "written", "meant"),
    [
        ("slurm", "30:00", "00:30:00"),
        ("slurm", "1:30:00", "01:30:00"),
        ("slurm", "90:00", "01:30:00"),
        ("oar", "30:00", "00:30:00"),  # OAR alone would take it for hours and minutes
        ("slurm", "'30:00'", "00:30:00"),
        ("slurm", "00:30:00", "00:30:00"),
        ("slurm", "48:00:00", "48:00:00"),
        ("slurm", "2-12:00:00", "2-12:00:00"),
        ("slurm", "1-00", "1-00"),
        ("lsf", "1:30", "01:30"),  # of an hour and a half
        ("lsf", "00:30", "00:30"),
        ("lsf", "'1:30'", "1:30"),
    ],
)
def test_time_limits_mean_the_same_as_text_and_as_yamls_number(
    env: str, written: str, meant: str
) -> None:
    options = yaml.safe_load(f"walltime: {written}")
    assert ParallelConfig(env, 1, options).options == {"walltime": meant}


@given(st.integers(60, 10**7))
def test_a_number_of_seconds_becomes_hours_minutes_and_seconds(seconds: int) -> None:
    walltime = ParallelConfig("slurm", 1, {"walltime": seconds}).options["walltime"]
    assert isinstance(walltime, str)
    hours, minutes, rest = map(int, walltime.split(":"))
    assert hours * 3600 + minutes * 60 + rest == seconds
    assert max(minutes, rest) < 60


def test_declaring_loads_neither_dask_nor_torch() -> None:
    code = (
        "import sys, featcache.workers.config; "
        "print({'dask', 'distributed', 'torch', 'numpy'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def start_workers_here() -> str:
    """Runs in a worker."""
    try:
        with get_client():
            return "started"
    except ConfigError as error:
        return str(error)


def test_workers_that_cannot_be_started_say_why() -> None:
    with (
        pytest.raises(
            ConfigError,
            match=r"env 'local': no cluster with options {'processes': False}: .*unpack",
        ),
        get_client({"env": "local", "options": {"processes": False}}),
    ):
        pytest.fail("the block was entered")
    with get_client() as client:
        assert (
            "this is a worker itself, which may not start processes"
            in client.submit(start_workers_here).result()
        )
    call = "with featcache.workers.get_client(): pass"
    script = f"import featcache\nif __name__ == '__main__':\n    {call}\n"
    ran = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60, check=False
    )
    assert "workers import the script, which is no file: save" in ran.stderr
    assert "<stdin>" in ran.stderr
