"""Utterances in parts that no generation names yet, as other processes see them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from store_helpers import FINGERPRINT, arrays_of, id_of, make_cache, two_features, write

from featcache import CacheWriter
from featcache.format import JOURNAL, PARTS, read_manifest
from featcache.reading import Unpublished
from featcache.writing.part_writer import PartWriter
from featcache.writing.session import publish_sealed

FEATURES = {feature.name: feature for feature in two_features()}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache", range(3))


def writer_of(cache: Path) -> PartWriter:
    return PartWriter(cache, two_features(), FINGERPRINT)


def view_of(cache: Path) -> Unpublished:
    view = Unpublished(cache, FEATURES)
    view.look(read_manifest(cache))
    return view


def assert_reads(view: Unpublished, number: int) -> None:
    found = view.read(id_of(number))
    assert found is not None
    for name, array in arrays_of(number).items():
        np.testing.assert_array_equal(found[name], array)


def shown(writer: PartWriter, cache: Path) -> Path:
    """Have others see what was written, and return the directory of the part."""
    writer.commit()
    (journal,) = (cache / PARTS).glob(f"*/{JOURNAL}")
    return journal.parent


def test_what_is_written_is_seen_before_it_is_durable_and_read_on_as_it_grows(cache: Path) -> None:
    with writer_of(cache) as writer:
        view = view_of(cache)
        for number in range(3, 30):
            write(writer, [number])
            writer.show()
        while id_of(29) not in view:
            view.look(read_manifest(cache))
        for number in range(3, 30):
            assert_reads(view, number)
        assert view.read(id_of(1)) is None  # it is published
        assert view.read("unknown") is None
    view.look(read_manifest(cache))
    assert_reads(view, 29)  # sealed meanwhile
    assert_reads(view_of(cache), 29)  # sealed before


def test_what_is_published_is_no_more_beside_it(cache: Path) -> None:
    with writer_of(cache) as writer:
        write(writer, [5])
        view = view_of(cache)
    assert publish_sealed(cache)
    view.look(read_manifest(cache))
    assert view.read(id_of(5)) is None
    assert not view.parts


def test_a_dead_part_is_read_and_after_its_recovery_too(cache: Path) -> None:
    child = os.fork()
    if child == 0:
        writer = writer_of(cache)
        write(writer, [5])
        writer.commit()
        os._exit(0)
    os.waitpid(child, 0)
    assert_reads(view_of(cache), 5)
    assert publish_sealed(cache)
    with CacheWriter(cache, two_features(), FINGERPRINT) as next_one:
        assert id_of(5) in next_one


def test_what_a_dead_writer_had_not_committed_is_not_given_and_may_be_written_again(
    cache: Path,
) -> None:
    child = os.fork()
    if child == 0:
        writer = writer_of(cache)
        write(writer, [5])
        writer.commit()
        write(writer, [6])
        writer.show()
        while id_of(6) not in view_of(cache):
            pass
        assert_reads(view_of(cache), 6)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    view = view_of(cache)
    assert_reads(view, 5)
    assert view.read(id_of(6)) is None
    with writer_of(cache) as writer:
        write(writer, [6])
        writer.commit()
        view.look(read_manifest(cache))
        assert_reads(view, 6)


def test_bytes_that_are_not_what_was_noted_are_not_given(cache: Path) -> None:
    with writer_of(cache) as writer:
        write(writer, [7])
        file = shown(writer, cache) / "fbank.npy"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert view_of(cache).read(id_of(7)) is None
        data[-1] ^= 1
        file.write_bytes(data[:-1])
        assert view_of(cache).read(id_of(7)) is None
        file.write_bytes(data)
        assert_reads(view_of(cache), 7)


def test_a_link_in_a_part_is_not_followed(cache: Path, tmp_path: Path) -> None:
    with writer_of(cache) as writer:
        write(writer, [7])
        part = shown(writer, cache)
        secret = tmp_path / "secret"
        (part / "fbank.npy").rename(secret)
        (part / "fbank.npy").symlink_to(secret)
        assert view_of(cache).read(id_of(7)) is None
        (part / "fbank.npy").unlink()
        secret.rename(part / "fbank.npy")


def test_lines_that_do_not_check_are_passed_over(cache: Path) -> None:
    with writer_of(cache) as writer:
        write(writer, [7])
        journal = shown(writer, cache) / JOURNAL
        with journal.open("ab") as file:
            file.write(b'["0000000000000000",{"utterances":[]}]\nno JSON at all\n\n\x00\n["')
        view = view_of(cache)
        assert_reads(view, 7)


def test_a_part_of_another_build_is_not_seen(cache: Path) -> None:
    with writer_of(cache) as writer:
        write(writer, [7])
        writer.commit()
        other = Unpublished(cache, FEATURES)
        manifest = read_manifest(cache)
        other.look(type(manifest)(manifest.fingerprint, building=2, building_fingerprint="x"))
        assert other.read(id_of(7)) is None


def test_publishing_passes_live_parts_over_and_waits_for_nobody(cache: Path) -> None:
    with writer_of(cache) as live, writer_of(cache) as other:
        write(live, [7])
        write(other, [8])
        live.commit()
        other.close()
        assert publish_sealed(cache)
        assert id_of(8) in view_of_ids(cache)
        assert id_of(7) not in view_of_ids(cache)
        write(live, [9])  # it goes on
    assert publish_sealed(cache)
    assert {id_of(7), id_of(9)} <= view_of_ids(cache)
    with CacheWriter(cache, two_features(), FINGERPRINT):
        assert not publish_sealed(cache)


def view_of_ids(cache: Path) -> set[str]:
    import featcache

    return {*featcache.open(cache).ids}
