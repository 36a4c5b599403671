"""Other systems: what only Linux has is taken away, then caches are written and read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import TESTS

from featcache.format import within

MACOS = ("preadv", "posix_fadvise", "memfd_create", "RWF_NOWAIT")
WINDOWS = (
    *MACOS,
    *("pread", "fork", "register_at_fork"),
    *("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"),
)
PROGRAM = """
import os, sys
import numpy, torch  # these know their own ways
import torch.utils.data, multiprocessing.util
import h5py, zarr, lilcom, webdataset, filelock
os.supports_dir_fd -= set(dict(macos=[], windows=os.supports_dir_fd)[sys.argv[1]])
taken = {name: getattr(os, name) for name in sys.argv[4:] if hasattr(os, name)}
for name in taken:
    delattr(os, name)
sys.path.insert(0, sys.argv[3])
if sys.argv[1] == "windows":
    import fcntl

    sys.modules["resource"] = sys.modules["fcntl"] = None
    import featcache.container_files

    # filelock needs these here: on Windows it has another way
    sys.modules["fcntl"] = fcntl
    vars(os).update({name: taken[name] for name in taken if name.startswith("O_")})
import featcache
from store_helpers import arrays_of, check_cache, id_of, make_cache, two_features
from pathlib import Path

for backend in featcache.registry.backend_names():
    path = Path(sys.argv[2]) / backend
    features = two_features(backend, "memmap")
    make_cache(path, range(40), features)
    make_cache(path, range(40, 60), features)
    if backend != "lilcom":
        check_cache(path, range(60))
    for options in ({"verify": "arrays"}, {"check_reads": True}, {"mapped": False}):
        cache = featcache.open(path, **options)
        for number in range(0, 60, 7):
            found = cache.read(id_of(number), "fbank")
            assert backend == "lilcom" or (found == arrays_of(number)["fbank"]).all()
    loader = featcache.FeatureLoader(path, "fbank", batch_size=7, shuffle=True)
    assert sum(len(batch["id"]) for batch in loader) == 60

# a writer that left without a word, its part sealed where it lies
if sys.argv[1] == "macos":
    path = Path(sys.argv[2]) / "left"
    if os.fork() == 0:
        writer = featcache.CacheWriter(path, two_features())
        for number in range(5):
            writer.write(id_of(number), arrays_of(number))
        writer.commit()
        os._exit(0)
    os.wait()
    featcache.CacheWriter(path, two_features()).close()
    assert len(featcache.open(path, verify="arrays")) == 5

# a link that leads out of the cache
part = next(path for path in Path(sys.argv[2]).glob("memmap/parts/*/fbank.npy"))
outside = Path(sys.argv[2]) / "outside.npy"
part.rename(outside)
part.symlink_to(outside)
try:
    featcache.open(Path(sys.argv[2]) / "memmap", verify="arrays")
except featcache.errors.CorruptCacheError as error:
    assert "link" in str(error), error
else:
    raise AssertionError("a link was followed")
print("done")
"""


@pytest.mark.parametrize(("system", "missing"), [("macos", MACOS), ("windows", WINDOWS)])
def test_caches_are_written_and_read_without_what_linux_alone_has(
    tmp_path: Path, system: str, missing: tuple[str, ...]
) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, system, tmp_path, TESTS, *missing],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ended.stdout == "done\n", ended.stderr


def test_a_name_leads_out_on_windows_by_what_that_takes_for_a_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("..\\x", "parts\\x", "C:", "x:stream"):
        assert within(name) == name  # a file of its own here
        with monkeypatch.context() as patch:
            patch.setattr(os, "name", "nt")
            with pytest.raises(ValueError, match="does not lead to a file"):
                within(name)
