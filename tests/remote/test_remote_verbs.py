"""Verbs on a URL: a look, a report and verification do what they do on a disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from range_server import Handler, RangeServer, serving

import featcache
from featcache import CacheWriter, FeatureStorageConfig, inspect
from featcache.cli import main
from featcache.errors import ConfigError, CorruptCacheError, RemoteError, StorageFullError
from featcache.extraction.conversion_source import table_of
from featcache.remote import RemoteOptions, requests_to

pytest.importorskip("obstore")
FEATURES = [FeatureStorageConfig("fbank"), FeatureStorageConfig("ssl", backend="hdf5")]


def write(path: Path, ids: range = range(12), scale: float = 1.0) -> None:
    rng = np.random.default_rng(0)
    with CacheWriter(path, FEATURES, {"scale": scale}) as writer:
        for number in ids:
            arrays = {
                each.name: scale * rng.normal(size=(60 + number, 80)).astype(np.float32)
                for each in FEATURES
            }
            writer.write(f"utt-{number:02d}", arrays, annotations={"speaker": str(number % 3)})


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A cache that was written, added to and edited, and another one."""
    write(tmp_path / "bucket" / "a", range(8))
    write(tmp_path / "bucket" / "a", range(8, 12))
    with featcache.open(tmp_path / "bucket" / "a") as cache:
        cache.tag("paper")
        cache.delete(["utt-03"])
    write(tmp_path / "bucket" / "b", scale=2.0)
    return tmp_path / "bucket"


@pytest.fixture
def server(bucket: Path) -> Iterator[RangeServer]:
    with serving(bucket) as state:
        yield state
        requests_to.cache_clear()


def options(tmp_path: Path, **more: object) -> RemoteOptions:
    return RemoteOptions(pages=tmp_path / "pages", retry_s=0.3, timeout_s=0.5, **more)  # type: ignore[arg-type]


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


LOOKS = (
    ["info", "{}", "--json"],
    ["ls", "{}", "--where", "speaker=1", "--json"],
    ["stats", "{}", "--json"],
    ["show", "{}", "utt-04"],
    ["made-from", "{}", "--json"],
    ["diff", "{}", "{other}", "--values", "--json"],
    ["verify", "{}", "--json"],
    ["verify", "{}", "--columns", "--json"],
    ["verify", "{}", "--sample", "5", "--json"],
    ["verify", "{}@paper", "--json"],
    ["ls", "{}@paper", "--json"],
)


@pytest.mark.parametrize("words", LOOKS, ids=lambda words: "-".join(words[::2]).replace("{}", ""))
def test_a_look_at_a_url_is_that_at_the_directory(
    words: list[str], bucket: Path, server: RangeServer
) -> None:
    def at(root: str) -> tuple[int, str]:
        given = [each.format(f"{root}/a", other=f"{root}/b") for each in words]
        code, said = run(*given)
        return code, said.replace(root, "")

    here, there = at(str(bucket)), at(server.url)
    assert here[0] == there[0]
    if words[-1] != "--json":
        assert here == there
        return
    for mine, others in zip(here[1].splitlines(), there[1].splitlines(), strict=True):
        told, wanted = json.loads(others), json.loads(mine)
        for each in (told, wanted):
            for one in each.get("caches", [each]):
                one.pop("seconds", None)
                one.pop("made", None)  # where nothing was recorded, the time of the file
                one.pop("bytes", None)
        assert told == wanted


def test_estimates_and_reports_read_a_url(server: RangeServer, tmp_path: Path) -> None:
    url = f"{server.url}/a"
    page = tmp_path / "report.html"
    assert run("report", url, "-o", str(page), "--pictures", "2")[0] == 0
    assert url in page.read_text()
    assert "featcache-pages-" not in page.read_text()
    assert len(table_of(url)) == 11  # as estimate reads it
    assert inspect.info(url)["path"] == inspect.made_from(url)["path"] == url
    assert url in repr(featcache.open(url))


@pytest.mark.parametrize(
    "words",
    [["delete", "{}", "utt-01", "--yes"], ["tag", "{}", "x"], ["compact", "{}"], ["collect", "{}"],
     ["recover", "{}"], ["repair", "{}"]],
)  # fmt: skip
def test_an_edit_of_a_url_says_where_it_is_done(words: list[str], server: RangeServer) -> None:
    code, said = run(*(each.format(f"{server.url}/a") for each in words))
    assert code == 2
    assert "push" in said
    assert "where it was made" in said


def test_a_user_in_a_url_is_not_taken_for_the_rest_of_a_tag() -> None:
    for verb in ("info", "ls", "verify"):
        code, said = run(verb, "s3://key:hush@bucket")
        assert code == 2
        assert "hush" not in said


def test_verification_of_a_url_reads_each_byte_and_the_whole_is_whole(
    bucket: Path, server: RangeServer, tmp_path: Path
) -> None:
    for level in ("columns", "arrays"):
        featcache.open(f"{server.url}/a", remote=options(tmp_path / level), verify=level)
    containers = [each for each in bucket.glob("a/parts/*/*") if each.suffix in (".npy", ".h5")]
    for each in containers:
        name = each.relative_to(bucket).as_posix()
        assert sum(nbytes for _, _, nbytes in server.of(name)) >= each.stat().st_size


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "an array": ("parts/*/fbank.npy", lambda path: _flip(path, 300)),
    "the index": ("index-*.columns", lambda path: _flip(path, 200)),
    "a lost container": ("parts/*/ssl.h5", Path.unlink),
    "a cut container": ("parts/*/ssl.h5", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "the index of a part": ("parts/*/index.columns", lambda path: _flip(path, 200)),
    "a lost seal": ("parts/*/part.json", Path.unlink),
    "tombstones": ("parts/*/tombstones-*", lambda path: _flip(path, 70)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_in_a_store_is_found_with_its_url(
    name: str, bucket: Path, server: RangeServer, tmp_path: Path
) -> None:
    pattern, damage = DAMAGE[name]
    file = max(bucket.glob(f"a/{pattern}"))
    damage(file)
    with pytest.raises(CorruptCacheError) as raised:
        featcache.open(f"{server.url}/a", remote=options(tmp_path), verify="arrays")
    assert f"{server.url}/a/{file.relative_to(bucket / 'a').as_posix()}" in str(raised.value)
    assert str(tmp_path / "pages") not in str(raised.value)
    if name == "an array":
        assert "'utt-0" in str(raised.value)
        code, said = run("verify", f"{server.url}/a")
        assert (code, "DAMAGED" in said, "push" in said) == (1, True, True)


@pytest.mark.parametrize("suffix", ["fbank.npy", "part.json", ".columns"])
def test_a_fault_is_no_damage_and_no_wholeness(
    suffix: str, server: RangeServer, tmp_path: Path
) -> None:
    def fault(handler: Handler, _data: bytes, _status: int) -> bool:
        if handler.path.endswith(suffix):
            handler.answer(503, b"")
        return handler.path.endswith(suffix)

    server.fault = fault
    with pytest.raises(RemoteError, match=server.url):
        featcache.open(f"{server.url}/a", remote=options(tmp_path), verify="arrays")
    server.fault = None
    featcache.open(f"{server.url}/a", remote=options(tmp_path), verify="arrays")


def test_a_disk_here_without_room_is_no_damage_of_a_store(
    server: RangeServer, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # of a file: none for pages
    try:
        with pytest.raises(StorageFullError, match="no room for pages"):
            featcache.open(f"{server.url}/a", remote=options(tmp_path), verify="arrays")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    featcache.open(f"{server.url}/a", remote=options(tmp_path), verify="arrays")


def test_feature_sets_behind_a_url_are_verified(
    bucket: Path, server: RangeServer, tmp_path: Path
) -> None:
    with CacheWriter(bucket / "b", [FeatureStorageConfig("tokens", dtype="int64")]) as writer:
        for number in range(12):
            writer.write(f"utt-{number:02d}", {"tokens": np.arange(number + 1)})
    url = f"{server.url}/b"
    assert len(featcache.open(url, remote=options(tmp_path), verify="arrays")) == 12
    (file,) = bucket.glob("b/sets/*/parts/*/tokens.npy")
    _flip(file, file.stat().st_size - 1)
    with pytest.raises(CorruptCacheError, match=r"tokens\.npy"):
        featcache.open(url, remote=options(tmp_path / "others"), verify="arrays")


def test_a_path_that_must_be_a_directory_says_what_a_url_is_for(server: RangeServer) -> None:
    with pytest.raises(ConfigError, match="pushed again"):
        featcache.store.repair(f"{server.url}/a")


def test_other_toolkits_are_given_no_cache_behind_a_url(
    server: RangeServer, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    cache = featcache.open(f"{server.url}/a", remote=options(tmp_path))
    with pytest.raises(ConfigError, match=f"{server.url}/a is behind a URL.*pull it"):
        cache.to_hf_dataset()
