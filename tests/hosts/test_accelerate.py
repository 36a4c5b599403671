"""accelerate on two processes: each utterance once per epoch, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_helpers import assert_each_once, make_host_cache, run_two, seen_in

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = """
import sys
from itertools import islice
from pathlib import Path
sys.path[:0] = {paths!r}
import accelerate
from torch.utils.data import DataLoader
import featcache
from featcache.errors import ConfigError
from featcache.samplers import BucketBatchSampler
from host_helpers import note

folder = Path(sys.argv[1])
cache = featcache.open(folder / "cache")
dataset = featcache.FeatureDataset(cache)


def bucket(**place):
    return BucketBatchSampler(cache, max_frames=90, **place)


def data_loader(sampler, **options):
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate, **options)


def train(name, loader, epochs=range(3), most=None):
    for epoch in epochs:
        for batch in islice(loader, most):
            note(folder / name, accelerator.process_index, epoch, batch["id"])


accelerator = accelerate.Accelerator(cpu=True)
for name in ("loader", "resumed", "sampler", "all", "refused"):
    (folder / name).mkdir(exist_ok=True)

train("loader", accelerator.prepare(featcache.FeatureLoader(cache, batch_sampler=bucket())))

loader = accelerator.prepare(featcache.FeatureLoader(cache, batch_size=5, shuffle=True))
train("resumed", loader, range(1))
train("resumed", loader, range(1, 2), most=2)
again = accelerator.prepare(featcache.FeatureLoader(cache, batch_size=5, shuffle=True))
again.load_state_dict({{**loader.state_dict()}})
train("resumed", again, range(1, 3))

train("sampler", data_loader(bucket(), num_workers=1))  # left out of prepare: the sampler shares

# its own sharing: batches of the beginning come twice to make up the number, which is accelerate's
# rule
train("all", accelerator.prepare(data_loader(bucket(rank=0, world_size=1))))

for sampler in (bucket(), bucket(rank=accelerator.process_index, world_size=2)):
    for workers in (0, 1):
        loader = accelerator.prepare(data_loader(sampler, num_workers=workers))
        for refused in (loader, accelerate.skip_first_batches(loader, 1)):
            try:
                next(iter(refused))
            except ConfigError as error:
                note(folder / "refused", accelerator.process_index, 0, [str(error)])
"""


def test_every_utterance_comes_once_or_the_loader_is_refused(tmp_path: Path) -> None:
    make_host_cache(tmp_path / "cache")
    here = Path(__file__).parent
    run_two(SCRIPT.format(paths=[str(here.parent), str(here)]), tmp_path)
    for name in ("loader", "resumed", "sampler"):
        assert_each_once(seen_in(tmp_path / name), epochs=3, ranks=2)
    for shares in seen_in(tmp_path / "all").values():
        assert len({id for share in shares for id in share}) == 61
    refused = seen_in(tmp_path / "refused")[0]
    assert [len(errors) for errors in refused] == [8, 8]
    for error in (error for errors in refused for error in errors):
        assert "would share the batches out over 2 processes" in error
        assert "leave the loader out of accelerate's prepare(), or use a FeatureLoader" in error
