"""Scripts run by `torchrun` on several ranks, whose errors are shown when one of them fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# A process that ends while its group is still there may end in `std::terminate`, in a thread of
# gloo's that sees the connection of another rank close.
LEAVE = """
import torch.distributed
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def run_ranks(
    script: str,
    folder: Path,
    *arguments: object,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `script`, written to `folder`, on `ranks` ranks that leave their group together."""
    path = folder / "script.py"
    path.write_text(script + LEAVE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={ranks}", str(path), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-12000:]
