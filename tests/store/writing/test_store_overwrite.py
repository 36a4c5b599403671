"""Overwriting builds aside: the old cache stays good until the new one is, whatever comes in
between.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    assert_holds,
    check_cache,
    id_of,
    make_cache,
    oracle,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter
from featcache.errors import CacheError, CorruptCacheError, StaleCacheError

OTHER = {"model": "hubert"}


def stop_while_overwriting(path: Path, numbers: range, fingerprint: Mapping[str, object]) -> None:
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        CacheWriter(path, two_features(), fingerprint, overwrite=True) as writer,
    ):
        write(writer, numbers)
        raise KeyboardInterrupt


def models(path: Path) -> object:
    return featcache.open(path).fingerprint["model"]


def test_the_old_cache_is_read_until_the_new_one_is_published(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    with CacheWriter(tmp_path, two_features(), OTHER, overwrite=True) as writer:
        check_cache(tmp_path, range(5))
        assert id_of(1) not in writer
        write(writer, range(3, 9))
        writer.commit()
        check_cache(tmp_path, range(5))
        assert models(tmp_path) == "wavlm"
    check_cache(tmp_path, range(3, 9))
    assert models(tmp_path) == "hubert"
    assert len(list((tmp_path / "parts").iterdir())) == 1


def test_the_same_fingerprint_can_be_overwritten(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    make_cache(tmp_path, range(2), overwrite=True)
    check_cache(tmp_path, range(2))


def test_an_interrupted_overwrite_keeps_the_old_cache_and_what_it_has_done(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    stop_while_overwriting(tmp_path, range(10, 13), OTHER)
    check_cache(tmp_path, range(5))
    assert models(tmp_path) == "wavlm"
    with CacheWriter(tmp_path, two_features(), OTHER, overwrite=True) as writer:
        assert [number for number in range(20) if id_of(number) in writer] == [10, 11, 12]
        write(writer, range(13, 15))
    check_cache(tmp_path, range(10, 15))
    assert models(tmp_path) == "hubert"


def test_an_overwrite_given_up_for_another_one_leaves_nothing(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    stop_while_overwriting(tmp_path, range(10, 13), OTHER)
    with CacheWriter(tmp_path, two_features(), {"model": "third"}, overwrite=True) as writer:
        assert id_of(10) not in writer
        write(writer, range(20, 22))
    check_cache(tmp_path, range(20, 22))
    assert models(tmp_path) == "third"
    assert len(list((tmp_path / "parts").iterdir())) == 1


def test_an_overwrite_given_up_for_the_old_cache_can_be_taken_up_again(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    stop_while_overwriting(tmp_path, range(10, 13), OTHER)
    make_cache(tmp_path, range(5, 7))
    check_cache(tmp_path, range(7))
    with CacheWriter(tmp_path, two_features(), OTHER, overwrite=True) as writer:
        assert id_of(12) in writer
    check_cache(tmp_path, range(10, 13))
    assert len(list((tmp_path / "parts").iterdir())) == 1


def test_a_given_up_overwrite_is_removed_by_the_one_that_takes_its_place(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    stop_while_overwriting(tmp_path, range(10, 13), OTHER)
    make_cache(tmp_path, range(5, 7))  # gives it up: the next overwrite has the same number
    make_cache(tmp_path, range(20, 22), fingerprint={"model": "third"}, overwrite=True)
    check_cache(tmp_path, range(20, 22))
    assert len(list((tmp_path / "parts").iterdir())) == 1


def test_without_overwrite_an_interrupted_one_is_stale(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    stop_while_overwriting(tmp_path, range(10, 13), OTHER)
    with pytest.raises(StaleCacheError, match='model: was "wavlm", now "hubert"'):
        CacheWriter(tmp_path, two_features(), OTHER)
    check_cache(tmp_path, range(5))


def test_overwriting_nothing_resumes_what_is_there(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT, overwrite=True) as writer:
        write(writer, range(3))
        writer._parts.seal()
        manifest = (tmp_path / "featcache.json").read_bytes()
    (tmp_path / "featcache.json").write_bytes(manifest)  # as if killed just before it was published
    with CacheWriter(tmp_path, two_features(), FINGERPRINT, overwrite=True) as writer:
        assert id_of(2) in writer
    check_cache(tmp_path, range(3))


def test_an_overwrite_may_have_other_features_of_other_dimensions(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    with CacheWriter(tmp_path, two_features()[:1], OTHER, overwrite=True) as writer:
        writer.write("u", {"fbank": np.ones((3, 7), np.float32)})
    assert featcache.open(tmp_path, verify="arrays").read("u", "fbank").shape == (3, 7)


def test_a_reader_of_the_overwritten_generation_reads_what_it_has_open_or_says_what_to_do(
    tmp_path: Path,
) -> None:
    make_cache(tmp_path, range(1, 6))
    warm, cold, streaming = (
        featcache.open(tmp_path),
        featcache.open(tmp_path),
        featcache.open(tmp_path, mapped=False),
    )
    for cache in (warm, streaming):
        assert_holds(cache, oracle(range(1, 6)))
    make_cache(tmp_path, range(20, 25), fingerprint=OTHER, overwrite=True)
    for cache in (warm, streaming):
        for number in range(1, 6):
            assert (
                cache.read(id_of(number), "fbank").tolist() == arrays_of(number)["fbank"].tolist()
            )
    with pytest.raises(
        CorruptCacheError, match=r"is missing; was the cache overwritten.*open it again"
    ):
        cold.read(id_of(1), "fbank")
    assert list(cold) == list(warm)
    make_cache(tmp_path, range(25, 27), fingerprint=OTHER)  # the columns of the first are gone now
    for cache in (warm, cold, streaming):
        assert cache.stats("fbank").count == sum(
            len(arrays_of(number)["fbank"]) for number in range(1, 6)
        )
    assert warm.lengths("fbank").tolist() == [
        len(arrays_of(number)["fbank"]) for number in range(1, 6)
    ]


def test_a_polling_reader_sees_whole_generations_only(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    stop = threading.Event()
    seen: set[int] = set()
    errors: list[BaseException] = []

    def poll() -> None:
        try:
            while not stop.is_set():
                cache = featcache.open(tmp_path)
                assert_holds_prefix(cache)
                seen.add(len(cache))
        except BaseException as error:
            errors.append(error)

    pollers = [threading.Thread(target=poll) for _ in range(2)]
    for poller in pollers:
        poller.start()
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        for number in range(3, 30):
            write(writer, [number])
            writer.publish()
    stop.set()
    for poller in pollers:
        poller.join()
    assert not errors, errors
    assert len(seen) > 1
    check_cache(tmp_path, range(30))


def assert_holds_prefix(cache: featcache.Cache) -> None:
    """Utterances come one after the other: of n, there must be the first n."""
    numbers = range(len(cache))
    assert list(cache) == sorted((id_of(number) for number in numbers), key=str.encode)
    assert cache.lengths("fbank", ids=[id_of(number) for number in numbers]).tolist() == [
        len(arrays_of(number)["fbank"]) for number in numbers
    ]
    last = len(cache) - 1
    assert cache.read(id_of(last), "fbank").tolist() == arrays_of(last)["fbank"].tolist()
    try:
        assert cache.stats("fbank").count == int(cache.lengths("fbank").sum())
    except CacheError as error:
        assert "open it again" in str(error)  # noqa: PT017 - two generations have come since
