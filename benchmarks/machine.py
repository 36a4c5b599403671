"""What every table says above itself: machine, versions, and how calm the machine is."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe(directory: Path, *packages: str) -> str:
    """Return two lines about the machine, the disk below `directory`, and the versions of Python
    and packages.
    """
    versions = [
        f"Python {platform.python_version()}",
        *(f"{name} {version(name)}" for name in packages),
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_cpu()}, {os.cpu_count()} cores, {memory:.0f} GiB RAM, {disk(directory)}, "
        f"load {os.getloadavg()[0]:.1f} before\n{', '.join(versions)}"
    )


def disk(directory: Path) -> str:
    """Name the file system and the device that a directory is on."""
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        fields, _, source = line.partition(" - ")
        kind, device = source.split()[:2]
        if directory.resolve().is_relative_to(fields.split()[4]):
            break
    block = Path("/sys/class/block") / Path(device).name
    if not block.exists():
        return f"{kind} ({device})"
    virtual = "virtual " if Path(device).name.startswith(("vd", "xvd")) else ""
    return f"{kind} on a {virtual}disk ({device})"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
