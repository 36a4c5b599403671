"""The block of `docs/guides/cluster.md` that says where workers run is read as it is printed."""

from __future__ import annotations

import re

from hyperpyyaml import load_hyperpyyaml
from places import ROOT

from featcache import ParallelConfig

PAGE = ROOT / "docs" / "guides" / "cluster.md"


def test_the_block_is_a_cluster_of_eight_workers() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = ParallelConfig.of(load_hyperpyyaml(block)["parallel"])
    assert (found.env, found.n_workers) == ("slurm", 8)
    for env in re.findall(r"# or (.*)", block)[0].split(", "):
        assert ParallelConfig.of({"env": env, "n_workers": 8, "options": {}}).env == env
