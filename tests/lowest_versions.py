"""Constraints for `make floor`: the library's lowest versions, the pinned ones of test tools.

torch is pinned, too: earlier wheels of it bring several gigabytes of CUDA.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from itertools import chain

from places import ROOT

BOUND = re.compile(r"^([\w.-]+)>=([\w.]+)", re.MULTILINE)
OURS = {"testing", "bench", "dev"}  # extras for work on featcache itself


def bounds(requirements: Iterable[str]) -> dict[str, str]:
    """Return the lower bound of each package, by its name."""
    return dict(BOUND.findall("\n".join(requirements)))


def lowest_versions() -> dict[str, str]:
    """Return the version of each direct dependency that `make floor` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_users = chain.from_iterable(extras[name] for name in extras.keys() - OURS)
    lowest = bounds(chain(project["dependencies"], of_users))
    tools = bounds(chain.from_iterable(extras[name] for name in OURS)).keys() - lowest.keys()
    pins = pinned_versions()
    return lowest | {name: pins[name] for name in tools | {"torch"}}


def pinned_versions() -> dict[str, str]:
    """Return the version of each package that `make setup` installs."""
    text = (ROOT / "constraints.txt").read_text()
    return dict(re.findall(r"^(\S+)==(\S+)", text, re.MULTILINE))


if __name__ == "__main__":
    for name, version in sorted(lowest_versions().items()):
        print(f"{name}=={version}")
