"""Caches that several users share: modes follow the umask, and who may not write is told what to
do.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from pathlib import Path

import pytest
from store_helpers import make_cache
from store_scripts import run_script

import featcache
from featcache.registry import get_backend

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
BECOME = """
import tempfile
def warm_up(backend="memmap"):
    # the modules of this installation may be root's alone
    features = two_features(backend, backend)
    check_cache(make_cache(Path(tempfile.mkdtemp()), range(3), features), range(3))

def become(user, group):
    os.setgroups([]); os.setgid(group); os.setuid(user)
"""
WRITE = """
features = [FeatureStorageConfig("fbank", backend=sys.argv[2], codec=sys.argv[3], stats=True)]
for umask in sys.argv[4:]:
    os.umask(int(umask))
    home = path / umask
    writer = CacheWriter(home / "cache", features)
    for number in range(20):
        writer.write(f"{number:02}", {"fbank": np.full((30, 4), number, np.float32)})
        if number == 9:
            writer.publish()
    writer.commit()
    modes = {str(each): each.stat().st_mode for each in home.rglob("*")}
    writer.close()
    modes |= {str(each): each.stat().st_mode for each in home.rglob("*")}
    for name, mode in sorted(modes.items()):
        print(umask, mode, name)
"""
CODED = [
    (backend, codec)
    for backend in featcache.registry.backend_names()
    for codec in get_backend(backend).codecs
]


@pytest.mark.parametrize(("backend", "codec"), CODED)
def test_file_modes_follow_the_umask(tmp_path: Path, backend: str, codec: str) -> None:
    umasks = (0o002, 0o022, 0o077)
    done = run_script(WRITE, tmp_path, backend, codec, *umasks)
    assert done.returncode == 0, done.stderr
    seen: Counter[int] = Counter()
    for line in done.stdout.splitlines():
        umask, mode, _ = line.split(maxsplit=2)
        whole = 0o777 if stat.S_ISDIR(int(mode)) else 0o666
        assert stat.S_IMODE(int(mode)) == whole & ~int(umask), line
        seen[int(umask)] += 1
    assert seen.keys() == {*umasks}
    assert min(seen.values()) > 12  # the open part with its journal and locks among them


GO_ON = (
    BECOME
    + """
import stat
group = 4321
warm_up(sys.argv[2])
os.umask(0o002)
shared = path / "shared"
shared.mkdir()
os.chown(shared, 1001, group)
os.chmod(shared, 0o2775)
step = 0
for user, end in ((1001, "close"), (1002, "kill"), (1003, "close"), (1001, "close")):
    step += 1
    child = os.fork()
    if child == 0:
        become(user, group)
        writer = CacheWriter(shared / "cache", two_features(sys.argv[2]), FINGERPRINT)
        write(writer, range(step * 5, step * 5 + 5))
        writer.commit()
        if end == "kill":
            os._exit(0)
        writer.close()
        check_cache(shared / "cache", range(5, step * 5 + 5))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (step, user)
check_cache(shared / "cache", range(5, 25))
"""
)


@ROOT
@pytest.mark.parametrize("backend", ["hdf5", "memmap", "webdataset", "zarr"])
def test_another_user_of_the_group_goes_on(tmp_path: Path, backend: str) -> None:
    open_to_all(tmp_path)
    done = run_script(GO_ON, tmp_path, backend, options=("-W", "ignore::DeprecationWarning"))
    assert done.returncode == 0, done.stderr


def open_to_all(path: Path) -> None:
    """Let everybody reach a directory of pytest's."""
    for each in (path, *path.parents):
        if each.owner() == "root" and stat.S_IMODE(each.stat().st_mode) == 0o700:
            each.chmod(0o755)


READ = (
    BECOME
    + """
warm_up()
become(65534, 65534)
for settings in (
    {}, {"verify": "columns"}, {"verify": "arrays"}, {"check_reads": True}, {"mapped": False}
):
    cache = featcache.open(path, **settings)
    for id in cache:
        cache.read(id, "fbank")
        cache.read(id, "fbank", 0, min(1, cache.lengths("fbank", ids=[id])[0]))
check_cache(path, range(5))
"""
)
REFUSED = (
    BECOME
    + """
warm_up()
become(65534, 65534)
for overwrite in (False, True):
    try:
        CacheWriter(path, two_features(), FINGERPRINT, overwrite=overwrite)
    except featcache.FeatcacheError as error:
        print(type(error).__name__, error)
try:
    PartWriter(path, two_features(), FINGERPRINT).write("a", arrays_of(1))
except featcache.FeatcacheError as error:
    print(type(error).__name__, error)
os._exit(0)
"""
)


@ROOT
def test_a_read_only_cache_is_read_and_verified_and_its_writer_says_what_to_do(
    tmp_path: Path,
) -> None:
    open_to_all(tmp_path)
    path = make_cache(tmp_path / "cache", range(5))
    for each in (path, *path.rglob("*")):
        each.chmod(0o555 if each.is_dir() else 0o444)
    before = {each: each.stat().st_mtime_ns for each in (path, *path.rglob("*"))}
    done = run_script(READ, path)
    assert done.returncode == 0, done.stderr
    done = run_script(REFUSED, path)
    assert done.stdout.count("CacheError") == 3, done.stdout + done.stderr
    for line in done.stdout.splitlines():
        assert str(path) in line
        assert "Permission denied" in line
        assert (
            "get the right to write there (or open the cache with featcache.open to read it)"
            in line
        )
    assert {each: each.stat().st_mtime_ns for each in (path, *path.rglob("*"))} == before


@ROOT
@pytest.mark.parametrize(
    "lost", ["featcache.json", "index-000001*.columns", "parts", "parts/*/fbank.npy", "."]
)
def test_what_may_not_be_read_is_named_with_what_to_do(tmp_path: Path, lost: str) -> None:
    open_to_all(tmp_path)
    path = make_cache(tmp_path / "cache", range(5))
    (hidden,) = [path] if lost == "." else path.glob(lost)
    hidden.chmod(0)
    script = (
        BECOME
        + """
warm_up()
become(65534, 65534)
try:
    cache = featcache.open(path)
    for id in cache:
        cache.read(id, "fbank")
except featcache.errors.CacheError as error:
    print(type(error).__name__, error)
"""
    )
    done = run_script(script, path)
    assert done.stdout.startswith("CacheError"), done.stderr
    assert str(path) in done.stdout
    assert "Permission denied" in done.stdout
    assert "get the right to read it" in done.stdout


@ROOT
@pytest.mark.parametrize("where", ["above", "new"])
def test_a_writer_that_may_not_make_the_directory_says_so(tmp_path: Path, where: str) -> None:
    open_to_all(tmp_path)
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o600 if where == "above" else 0o755)
    script = (
        BECOME
        + """
warm_up()
become(65534, 65534)
try:
    CacheWriter(path, two_features(), FINGERPRINT)
except featcache.errors.CacheError as error:
    print(type(error).__name__, error)
"""
    )
    done = run_script(script, above / "cache")
    assert str(above / "cache") in done.stdout, done.stderr
    assert "get the right to write there" in done.stdout


@ROOT
def test_a_cache_whose_files_may_only_be_read_is_tagged(tmp_path: Path) -> None:
    open_to_all(tmp_path)
    path = make_cache(tmp_path / "cache", range(5))
    for each in (path, *path.rglob("*")):
        each.chmod(0o777 if each.is_dir() else 0o666 if each.suffix == ".lock" else 0o644)
    script = (
        BECOME
        + """
warm_up()
become(65534, 65534)
featcache.open(path).tag("v1")
"""
    )
    done = run_script(script, path)
    assert done.returncode == 0, done.stderr
    assert len(featcache.open(path, version="v1")) == 5
