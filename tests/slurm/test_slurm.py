"""Workers as jobs of a real SLURM of one node on this machine; see `conftest.py`."""

from __future__ import annotations

import os
import subprocess

import pytest
from dask.distributed import Client, KilledWorker, wait

from featcache import ParallelConfig
from featcache.errors import ConfigError
from featcache.workers import get_client, worker_env
from featcache.workers.client import names_of, replace_workers

from .queue_helpers import comes_true, squeue, the_queue_empties


def jobs_at_work(client: Client, tasks: int) -> list[str]:
    """Compute on the workers, and return in which job each task ran."""

    def task(_: int) -> str:  # nested, with its imports: jobs cannot import this module
        import os
        import time

        time.sleep(0.2)
        return os.environ["SLURM_JOB_ID"]

    jobs: list[str] = client.gather(client.map(task, range(tasks), pure=False))  # type: ignore[no-untyped-call]
    return jobs


def test_two_jobs_share_the_work_and_one_goes_on_without_the_other(
    options: dict[str, object],
) -> None:
    with get_client(ParallelConfig("slurm", 2, options | {"walltime": 600})) as client:
        client.wait_for_workers(2, timeout=60)
        jobs = set(jobs_at_work(client, 10))
        assert jobs == set(squeue())
        assert len(jobs) == 2

        def cancel_its_own_job() -> None:
            import os
            import subprocess
            import time

            subprocess.run(["scancel", "--signal=KILL", os.environ["SLURM_JOB_ID"]], check=True)
            time.sleep(60)

        lost = client.submit(cancel_its_own_job)
        wait(lost, timeout=60)  # type: ignore[no-untyped-call]
        with pytest.raises(KilledWorker):
            lost.result()
        assert len(set(jobs_at_work(client, 4)) & jobs) == 1
    assert the_queue_empties()


def test_a_worker_computes_one_task_at_a_time_with_all_of_its_cores(
    options: dict[str, object],
) -> None:
    def setup() -> dict[str, object]:
        import os

        return {"threads": os.environ["OMP_NUM_THREADS"], "job": os.environ["SLURM_JOB_ID"]}

    cores = len(os.sched_getaffinity(0))
    wanted = options | {
        "cores": cores,
        "processes": None,
        "job_script_prologue": ["export OF_THE_USER=1"],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        with get_client({"env": "slurm", "n_workers": 1, "options": wanted}, setup) as client:
            env = client.submit(worker_env).result()
            assert env == {"threads": str(cores), "job": squeue()[0]}
            assert client.submit(os.getenv, "OF_THE_USER").result() == "1"
            assert [
                worker["nthreads"] for worker in client.scheduler_info()["workers"].values()
            ] == [1]
    assert the_queue_empties()


def test_a_lost_job_of_several_workers_is_replaced_once(options: dict[str, object]) -> None:
    with get_client(ParallelConfig("slurm", 2, options | {"cores": 2, "processes": 2})) as client:
        client.wait_for_workers(2, timeout=60)
        cluster = client.cluster
        assert cluster is not None
        seen, (lost,) = names_of(cluster), squeue()
        subprocess.run(["scancel", "--signal=KILL", lost], check=True)
        assert comes_true(lambda: not names_of(cluster) and not squeue(), 30)
        replace_workers(cluster, seen, 2)
        assert comes_true(lambda: len(squeue()) == 1, 30)
        (job,) = squeue()
        replace_workers(cluster, seen, 2)  # it has not started yet
        client.wait_for_workers(2, timeout=60)
        assert set(jobs_at_work(client, 4)) == {job} == set(squeue())
    assert the_queue_empties()


def test_a_job_that_is_refused_is_an_error_with_what_slurm_says(options: dict[str, object]) -> None:
    message = r"env 'slurm': workers cannot be started(.|\n)*invalid partition specified: none"
    with (
        pytest.raises(ConfigError, match=message),
        get_client(ParallelConfig("slurm", 2, options | {"queue": "none"})),
    ):
        pytest.fail("the block was entered")
    assert the_queue_empties()


def test_an_error_of_the_environment_is_raised_and_cancels_the_jobs(
    options: dict[str, object],
) -> None:
    def fails() -> dict[str, object]:
        raise LookupError("no model 'hubert.pt'")

    with (
        pytest.raises(LookupError, match=r"no model 'hubert.pt'"),
        get_client(ParallelConfig("slurm", 2, options), fails),
    ):
        pytest.fail("the block was entered")
    assert the_queue_empties()
