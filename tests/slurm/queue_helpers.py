"""What is in SLURM's queue."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable


def squeue() -> list[str]:
    """The jobs that wait or run."""
    listed = subprocess.run(
        ["squeue", "--noheader", "--format=%i"], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()


def the_queue_empties() -> bool:
    return comes_true(lambda: not squeue(), 20)


def comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; False if it does not hold in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
