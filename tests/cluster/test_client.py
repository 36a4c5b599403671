from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

import dask.config
import psutil  # type: ignore[import-untyped]
import pytest
from dask.distributed import Client, KilledWorker

from featcache import ParallelConfig
from featcache.errors import ComputeError, ConfigError, MissingDependencyError
from featcache.workers import get_client, with_worker_env, worker_env
from featcache.workers.environments import SetupFn, WorkerEnv

T = TypeVar("T")
TWO = ParallelConfig("local", 2)
# from Ctrl-C to the end of the process: 5 s where nothing else runs
ENDED_S = 20.0


def build() -> dict[str, object]:
    return {"builder": os.getpid(), "thread": threading.get_ident(), "factor": 10}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        with get_client(TWO, build) as client:
            yield client


def mapped(client: Client, fn: Callable[..., T], data: Collection[object]) -> list[T]:
    results: list[T] = client.gather(client.map(fn, data, pure=False))  # type: ignore[no-untyped-call]
    return results


def workers_of(pid: int) -> list[psutil.Process]:
    """Its child processes, without the one that Python starts for itself and keeps."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def listening(process: psutil.Process) -> list[str]:
    return [
        socket.laddr.ip
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    ]


def where(seconds: float) -> tuple[int, int, int]:
    import torch

    time.sleep(seconds)
    return os.getpid(), threading.get_ident(), torch.get_num_threads()


def test_every_worker_is_a_process_with_one_thread_and_its_share_of_cores(client: Client) -> None:
    places = set(mapped(client, where, [0.05] * 20))
    assert len({pid for pid, _, _ in places} - {os.getpid()}) == 2
    assert len(places) == 2
    assert {torch_threads for _, _, torch_threads in places} == {
        max(1, len(os.sched_getaffinity(0)) // 2)
    }


def test_everything_listens_on_loopback_only(client: Client) -> None:
    processes = [psutil.Process(), *workers_of(os.getpid())]
    addresses = [address for process in processes for address in listening(process)]
    assert len(addresses) >= 4  # the scheduler, the dashboard, two workers
    assert set(addresses) == {"127.0.0.1"}
    assert client.dashboard_link.startswith("http://127.0.0.1:")


def test_the_environment_is_built_once_in_each_process_in_the_thread_of_its_tasks(
    client: Client,
) -> None:
    def look(_: int) -> tuple[int, int, object, object]:
        time.sleep(0.05)
        return os.getpid(), threading.get_ident(), worker_env()["builder"], worker_env()["thread"]

    seen = set(mapped(client, look, range(20)))
    assert len(seen) == 2
    assert all((pid, thread) == (builder, of_builder) for pid, thread, builder, of_builder in seen)


def test_functions_get_entries_of_the_environment_by_name(client: Client) -> None:
    def scaled(x: int, factor: int) -> int:
        return x * factor

    def by_keyword(x: int, *, factor: int, shift: int = 1) -> int:
        return x * factor + shift

    def everything(x: int, **env: object) -> list[str]:
        return sorted(env)

    assert mapped(client, with_worker_env(scaled), [1, 2]) == [10, 20]
    assert client.submit(with_worker_env(by_keyword), 2, shift=3).result() == 23
    assert client.submit(with_worker_env(everything), 0).result() == ["builder", "factor", "thread"]
    assert client.submit(with_worker_env(abs), -1).result() == 1
    assert with_worker_env(scaled).__name__ == "scaled"


@pytest.mark.filterwarnings("default")  # the worker prints the error, too
def test_an_argument_that_the_environment_has_too_is_refused(client: Client) -> None:
    def scaled(factor: int, x: int = 1) -> int:
        return x * factor

    for args, kwargs in (((3,), {}), ((), {"factor": 3})):
        with pytest.raises(
            ConfigError, match="argument 'factor' of 'scaled' is given, and is in the worker's env"
        ):
            client.submit(with_worker_env(scaled), *args, **kwargs).result()


def test_who_maps_decides_about_lost_tasks(client: Client) -> None:
    def die(_: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(KilledWorker):
        client.submit(die, 0).result(timeout=60)
    client.wait_for_workers(2, timeout=60)  # another takes its place, and has its environment
    assert mapped(client, with_worker_env(the_factor), range(20)) == [10] * 20


def the_factor(_: int, factor: int) -> int:
    return factor


def test_the_link_of_the_dashboard_is_printed_and_the_settings_go_with_the_block(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dask.config.get("distributed.scheduler.allowed-failures")
    with get_client() as client:
        assert f"dashboard of 1 local worker: {client.dashboard_link}\n" in capsys.readouterr().err
        assert dask.config.get("distributed.scheduler.allowed-failures") == 0
        assert client.submit(worker_env).result() == {}
        (pid,) = {process.pid for process in workers_of(os.getpid())} & {
            client.submit(os.getpid).result()
        }
    assert not psutil.pid_exists(pid)
    assert dask.config.get("distributed.scheduler.allowed-failures") == before
    assert "OMP_NUM_THREADS" not in os.environ


def test_workers_end_with_an_exception_while_they_compute() -> None:
    before = workers_of(os.getpid())
    with pytest.raises(LookupError):
        leave_while_computing()
    assert workers_of(os.getpid()) == before


def leave_while_computing() -> None:
    with get_client(TWO) as client:
        assert len(client.map(time.sleep, [60, 60])) <= len(workers_of(os.getpid()))
        raise LookupError


def fails() -> dict[str, object]:
    raise LookupError("no model 'hubert.pt'")


def dies() -> dict[str, object]:
    os._exit(1)


def gives_a_list() -> dict[str, object]:
    return ["model"]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("setup_fn", "error", "message"),
    [
        (fails, LookupError, "no model 'hubert.pt'"),
        (dies, ComputeError, r"a worker died while setup_fn 'dies' ran in it \(out of memory\?\)"),
        (
            gives_a_list,
            ConfigError,
            r"setup_fn 'gives_a_list' returns \['model'\], not a dict by name",
        ),
    ],
)
def test_errors_of_the_environment_are_raised_at_once(
    setup_fn: SetupFn, error: type[Exception], message: str
) -> None:
    before = workers_of(os.getpid())
    with pytest.raises(error, match=message) as raised, get_client(TWO, setup_fn):
        pytest.fail("the block was entered")
    if setup_fn is fails:
        assert "fails" in [entry.name for entry in raised.traceback]
        assert "raised by setup_fn 'fails' in worker tcp://127.0.0.1:" in raised.value.__notes__[0]
    assert workers_of(os.getpid()) == before


def test_a_setup_that_cannot_be_pickled_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()
    with (
        pytest.raises(ConfigError, match="cannot be sent to workers: cannot pi"),
        get_client(TWO, lambda: {"": lock}),
    ):
        pytest.fail("the block was entered")


def test_the_environment_of_a_worker_that_joins_late_raises_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    def only_the_first() -> dict[str, object]:
        (tmp_path / "taken").touch(exist_ok=False)
        return {}

    def look(_: int) -> str:
        time.sleep(0.02)
        try:
            return str(worker_env())
        except FileExistsError as error:
            return type(error).__name__

    with get_client(None, only_the_first) as client:
        assert mapped(client, look, [0]) == ["{}"]
        assert client.cluster is not None
        client.cluster.scale(2)
        client.wait_for_workers(2, timeout=60)
        assert set(mapped(client, look, range(20))) == {"{}", "FileExistsError"}


def test_a_worker_that_is_told_twice_builds_its_environment_once(tmp_path: Path) -> None:
    def counted() -> dict[str, object]:
        with (tmp_path / "builds").open("a") as file:
            file.write("built\n")
        return {"count": (tmp_path / "builds").read_text()}

    with get_client() as client:
        # so it goes if it joins while the plugin is being registered
        for plugin in [WorkerEnv(counted)] * 2:
            client.register_plugin(plugin, name="env")
        assert client.submit(worker_env).result() == {"count": "built\n"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"options": {"coers": 1}},
            "env 'local': workers cannot be started with options .*argument 'coers'",
        ),
        (
            {"env": "ssh", "n_workers": 2, "options": {"hosts": ["a", "b"]}},
            "then one for each of 2 workers",
        ),
    ],
)
def test_options_that_the_cluster_does_not_take_are_named(
    config: dict[str, object], message: str
) -> None:
    before = workers_of(os.getpid())
    with pytest.raises(ConfigError, match=message), get_client(config):
        pytest.fail("the block was entered")
    assert workers_of(os.getpid()) == before


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("local_gpu", r"env 'local_gpu' needs 'dask_cuda'.*; try: pip install dask-cuda"),
        ("kube", r"env 'kube' needs 'dask_kubernetes'.*; try: pip install dask-kubernetes"),
        ("ssh", r"env 'ssh' needs 'asyncssh'.*; try: pip install asyncssh"),
        ("pbs", r"env 'pbs' needs 'dask_jobqueue'.*; try: pip install 'featcache\[dask\]'"),
    ],
)
def test_what_is_missing_is_named_with_what_to_install(
    env: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("dask_cuda", "dask_kubernetes", "asyncssh", "dask_jobqueue"):
        monkeypatch.setitem(sys.modules, module, None)
    options = {"hosts": ["scheduler", "worker"]} if env == "ssh" else {}
    with (
        pytest.raises(MissingDependencyError, match=message),
        get_client({"env": env, "options": options}),
    ):
        pytest.fail("the block was entered")


DRIVER = """
    import os, sys, time
    from featcache.workers import get_client

    if __name__ == "__main__":
        with get_client({"n_workers": 2}) as client:
            client.map(time.sleep, [600, 600])
            print(*client.run(os.getpid).values(), flush=True)
            time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_a_driver_that_is_killed(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as driver:
        assert driver.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(workers) == 2
        driver.send_signal(how)
        driver.stdout.read()
        driver.wait(60)
        _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text("from featcache.workers import get_client\nwith get_client():\n    pass\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert (
        "needs `if __name__ == '__main__':` around what starts workers"
        in ended.stderr.splitlines()[-1]
    )


def test_an_interrupt_while_workers_start_leaves_none_behind(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    with subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stderr is not None
        assert driver.stderr.readline().startswith("dashboard")  # printed before they are
        while not (started := workers_of(driver.pid)):
            time.sleep(0.01)
        began = time.monotonic()
        driver.send_signal(signal.SIGINT)
        shown = driver.stderr.read()
        assert time.monotonic() - began < ENDED_S
        assert shown.startswith("Traceback (most recent call last):")  # Dask says nothing of it
        assert shown.endswith("KeyboardInterrupt\n")
        _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []
