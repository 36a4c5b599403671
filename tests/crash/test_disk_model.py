"""The disk of the crash tests: what a power cut may leave, and what it may not."""

from __future__ import annotations

from random import Random

from crash_disk import ROOT, Disk, Tree
from crash_power import PAGE, SECTOR, STYLES, PowerCut


def cut(disk: Disk, style: str, tries: int = 300) -> list[Tree]:
    """Return what many power cuts leave."""
    return [PowerCut(disk, style, Random(seed)).tree() for seed in range(tries)]


def disk_with(name: str, data: bytes) -> tuple[Disk, int]:
    """Return a disk with one durable file."""
    disk = Disk()
    number = disk.make_file(ROOT, name)
    disk.write(number, 0, data)
    disk.settle()
    return disk, number


def test_what_is_synced_is_left_in_any_style() -> None:
    disk, number = disk_with("a", b"one")
    disk.write(number, 3, b" two")
    disk.sync(number)
    for style in STYLES:
        assert all(tree == {"a": b"one two"} for tree in cut(disk, style))


def test_a_synced_file_is_lost_with_its_name() -> None:
    disk = Disk()
    number = disk.make_file(ROOT, "a")
    disk.write(number, 0, b"one")
    disk.sync(number)
    assert cut(disk, "synced", 1) == [{}]
    assert {len(tree) for tree in cut(disk, "mixed")} == {0, 1}
    disk.sync(ROOT)
    assert cut(disk, "synced", 1) == [{"a": b"one"}]


def test_a_lost_directory_takes_along_what_was_synced_below() -> None:
    disk = Disk()
    above = disk.make_directory(ROOT, "above")
    disk.make_file(above, "a")
    disk.sync(above)
    assert cut(disk, "synced", 1) == [{}]
    assert cut(disk, "names only", 1) == [{"above": {"a": b""}}]


def test_a_write_is_torn_at_sectors_and_at_pages() -> None:
    disk, number = disk_with("a", bytes(2 * PAGE))
    disk.write(number, 0, b"\1" * 2 * PAGE)
    for style, block in (("torn sectors", SECTOR), ("torn pages", PAGE)):
        left = [tree["a"] for tree in cut(disk, style)]
        assert any(0 < sum(data) < 2 * PAGE for data in left if isinstance(data, bytes))
        for data in left:
            assert isinstance(data, bytes)
            pieces = {data[start : start + block] for start in range(0, 2 * PAGE, block)}
            assert pieces <= {bytes(block), b"\1" * block}


def test_a_later_write_may_be_there_without_an_earlier_one() -> None:
    disk, number = disk_with("a", bytes(2 * SECTOR))
    disk.write(number, 0, b"\1" * SECTOR)
    disk.write(number, SECTOR, b"\2" * SECTOR)
    assert {"a": bytes(SECTOR) + b"\2" * SECTOR} in cut(disk, "torn sectors")


def test_what_a_file_grew_by_may_be_zeros() -> None:
    disk, number = disk_with("a", b"\1" * SECTOR)
    disk.write(number, SECTOR, b"\2" * SECTOR)
    assert {"a": b"\1" * SECTOR + bytes(SECTOR)} in cut(disk, "torn sectors")
    assert {"a": b"\1" * SECTOR} in cut(disk, "torn sectors")


def test_a_file_that_is_cut_keeps_its_size_until_it_is_synced() -> None:
    disk, number = disk_with("a", b"one two")
    disk.resize(number, 3)
    assert disk.tree() == {"a": b"one"}
    assert {str(tree) for tree in cut(disk, "mixed")} == {"{'a': b'one two'}", "{'a': b'one'}"}


def test_a_file_renamed_over_another_leaves_one_of_them() -> None:
    disk, _ = disk_with("a", b"old")
    new = disk.make_file(ROOT, "a.tmp")
    disk.write(new, 0, b"new")
    disk.sync(new)
    disk.sync(ROOT)
    disk.rename(ROOT, "a.tmp", ROOT, "a")
    assert disk.tree() == {"a": b"new"}
    assert cut(disk, "synced", 1) == [{"a": b"old", "a.tmp": b"new"}]
    assert {tree["a"] for tree in cut(disk, "mixed")} == {b"old", b"new"}


def test_a_file_unlinked_while_open_comes_back_as_it_was_synced() -> None:
    disk, number = disk_with("a", b"one")
    disk.name(ROOT, "a", None)
    disk.write(number, 0, b"two")
    assert disk.tree() == {}
    assert cut(disk, "synced", 1) == [{"a": b"one"}]
    disk.sync(ROOT)
    assert all(tree == {} for tree in cut(disk, "mixed"))


def test_a_sync_covers_what_was_there_when_it_began() -> None:
    disk, number = disk_with("a", b"")
    disk.write(number, 0, b"one")
    begun = disk.age(number)
    disk.write(number, 3, b" two")
    disk.sync(number, begun)
    assert cut(disk, "synced", 1) == [{"a": b"one"}]
    disk.sync(number)
    assert cut(disk, "synced", 1) == [{"a": b"one two"}]


def test_two_names_of_one_file_share_its_data() -> None:
    disk, number = disk_with("a", bytes(4 * SECTOR))
    disk.name(ROOT, "b", number)
    disk.sync(ROOT)
    disk.write(number, 0, b"\1" * 4 * SECTOR)
    assert all(tree["a"] == tree["b"] for tree in cut(disk, "torn sectors"))
