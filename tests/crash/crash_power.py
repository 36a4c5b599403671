"""Power cuts: what of a disk is left of the many trees that may be.

A disk writes back in any order. So of each name any version since its directory was synced may be
there, and of each block of a file any version since the file was synced; a file's size is a version
of its own. A block that was never written back is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from crash_disk import ROOT, Directory, Disk, File, Resized, Tree, Written, changed

Version = TypeVar("Version")
SECTOR, PAGE = 512, 4096  # bytes that a disk, or a page cache, writes whole
STYLES = ("synced", "names only", "data only", "mixed", "torn sectors", "torn pages")


class PowerCut:
    """One power cut: how much had been written back, by luck.

    Args:
        style: "synced": what was synced and nothing else; "names only": and all names; "data only":
            and all data; the others: any mix, in which files are whole versions, or torn.
    """

    def __init__(self, disk: Disk, style: str, random: Random) -> None:
        self._disk, self._style, self._random = disk, style, random
        self._luck = random.choice((0.1, 0.5, 0.9))
        self._files: dict[int, bytes] = {}  # one file may have several names

    def tree(self, number: int = ROOT) -> Tree:
        """Return what is left below a directory."""
        names = self._names(self._disk.directory(number))
        return {name: self._below(child) for name, child in sorted(names.items())}

    def _below(self, number: int) -> bytes | Tree:
        inode = self._disk.inodes[number]
        if isinstance(inode, Directory):
            return self.tree(number)
        if number not in self._files:
            self._files[number] = self._data(inode)
        return self._files[number]

    def _names(self, directory: Directory) -> dict[str, int]:
        if not directory.changes or self._style in ("synced", "data only"):
            return directory.durable
        if self._style == "names only":
            return directory.names
        versions: dict[str, list[int | None]] = {}
        for change in directory.changes:
            first = [directory.durable.get(change.name)]
            versions.setdefault(change.name, first).append(change.number)
        chosen = {name: self._version(of_name) for name, of_name in sorted(versions.items())}
        names = directory.durable | chosen
        return {name: number for name, number in names.items() if number is not None}

    def _data(self, file: File) -> bytes:
        if not file.changes or self._style in ("synced", "names only"):
            return file.durable
        if self._style == "data only":
            return file.now()
        if self._style == "mixed":
            count = self._version(range(len(file.changes) + 1))
            return changed(file.durable, file.changes[:count])
        return self._torn(file, SECTOR if self._style == "torn sectors" else PAGE)

    def _torn(self, file: File, block: int) -> bytes:
        blocks: dict[int, list[Written | Resized]] = {}  # the changes of each block
        longest = len(file.durable)
        sizes = [longest]
        for change in file.changes:
            end = end_of(change)
            longest = max(longest, end, sizes[-1])
            sizes.append(end if isinstance(change, Resized) else max(end, sizes[-1]))
            first, last = _span(change, longest)
            for number in range(first // block, (last + block - 1) // block):
                blocks.setdefault(number, []).append(change)
        data = bytearray(changed(file.durable, [Resized(longest)]))
        for number, changes in blocks.items():
            start = number * block
            count = self._version(range(len(changes) + 1))
            piece = data[start : start + block]
            data[start : start + block] = _block(piece, start, changes[:count])
        return changed(bytes(data), [Resized(self._version(sizes))])

    def _version(self, versions: Sequence[Version]) -> Version:
        """Choose, with luck the latest."""
        luck = self._random.random()
        if luck < self._luck / 2:
            return versions[-1]
        return versions[0] if luck > (1 + self._luck) / 2 else self._random.choice(versions)


def end_of(change: Written | Resized) -> int:
    """Return where a change ends in its file."""
    return change.size if isinstance(change, Resized) else change.offset + len(change.data)


def _span(change: Written | Resized, longest: int) -> tuple[int, int]:
    if isinstance(change, Resized):
        return change.size, longest
    return change.offset, end_of(change)


def _block(data: bytearray, start: int, changes: Sequence[Written | Resized]) -> bytes:
    """Return a block, which begins at `start` of its file, after some changes of the file."""
    size = len(data)
    for change in changes:
        if isinstance(change, Resized):
            cut = max(0, min(size, change.size - start))
            data[cut:] = bytes(size - cut)
        else:
            first = max(change.offset, start)
            last = min(end_of(change), start + size)
            piece = change.data[first - change.offset : last - change.offset]
            data[first - start : last - start] = piece
    return bytes(data)
