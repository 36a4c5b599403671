"""Inputs of the fuzzing, by number: what is mutated, and who has to cope with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random

import numpy as np
from fuzz_caches import HOW, KINDS, edit, is_container, pick, picture, read_all, write_more
from fuzz_children import typed
from fuzz_format import is_journal, read_journal, reseal_parents, seal, unseal
from fuzz_mutations import mutated_bytes, mutated_columns, mutated_json, mutated_seal

from featcache.interface import Codec
from featcache.registry import get_codec

SEED = int(os.environ.get("FEATCACHE_FUZZ_SEED", "0"))
CODECS = ("gzip", "zstd", "blosc", "lilcom")


class Targets:
    """The kinds of inputs; `root` holds the caches of `make_caches`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def readers(self, number: int, directory: Path) -> None:
        """One file of a published cache is mutated, and the cache read."""
        chance, layout = _chance("readers", number), _layout(number)
        base = self._root / "sealed" / layout
        path = directory / str(os.getpid()) / layout
        if not path.exists():
            shutil.copytree(base, path)
        file, other = path / pick(base, chance), base / pick(base, chance)
        before = {each: each.read_bytes() for each in (file, *path.rglob("*.json"))}
        try:
            _mutate(path, file, other.read_bytes(), chance)
            read_all(path, chance.choice(HOW))
        finally:
            for each, data in before.items():
                each.write_bytes(data)

    def writers(self, number: int, directory: Path) -> str | None:
        """Some files of a cache with a dead writer's part are mutated, and another writer comes."""
        chance, layout = _chance("writers", number), _layout(number)
        place = directory / str(os.getpid()) / str(number)
        outside = picture(self._root / "outside")
        base = self._root / "dead" / layout
        path = shutil.copytree(base, place / "train")
        for _ in range(chance.choice((1, 1, 2))):
            _mutate(
                path, path / pick(base, chance), (base / pick(base, chance)).read_bytes(), chance
            )
        try:
            typed(partial(write_more, path, layout, chance.random() < 0.2))
            edit(path)
            read_all(path, chance.choice(HOW))
        finally:
            shutil.rmtree(place)
        return None if picture(self._root / "outside") == outside else "outside: a file was changed"

    def journals(self, number: int, directory: Path) -> None:
        """A journal is mutated, and read."""
        chance = _chance("journals", number)
        base = self._root / "dead" / _layout(number)
        (original,) = base.rglob("parts/*/journal.jsonl")
        part = directory / str(os.getpid()) / "parts" / original.parent.name
        part.mkdir(parents=True, exist_ok=True)
        (part / original.name).write_bytes(_mutated_journal(original.read_bytes(), chance))
        typed(lambda: read_journal(part.parent.parent, f"parts/{part.name}"))

    def codecs(self, number: int, directory: Path) -> None:
        """A block of a codec is mutated, in its header above all, and decoded."""
        chance = _chance("codecs", number)
        codec, dtype, dims, rows, blocks = _blocks(CODECS[number % len(CODECS)])
        block, other = chance.choice(blocks), chance.choice(blocks)
        head = chance.choice((8, 16, 32, len(block)))
        data = mutated_bytes(block[:head], other, chance) + block[head:]
        typed(lambda: codec.decode(memoryview(data), np.dtype(dtype), dims, rows))


def _chance(target: str, number: int) -> Random:
    return Random(f"{SEED} {target} {number}")


def _layout(number: int) -> str:
    return KINDS[number % len(KINDS)]


def _mutate(path: Path, file: Path, other: bytes, chance: Random) -> None:
    """Change a file of a cache, and often the digests by which others name it."""
    data = file.read_bytes()
    changed: bytes | None = None
    if is_journal(file):
        changed = _mutated_journal(data, chance)
    elif not is_container(file) and chance.random() < 0.7:
        changed = mutated_seal(data, chance) or mutated_columns(data, chance)
    changed = mutated_bytes(data, other, chance) if changed is None else changed
    file.write_bytes(changed)
    if chance.random() < 0.7:
        reseal_parents(path, data, changed)


def _mutated_journal(data: bytes, chance: Random) -> bytes:
    """Change lines, mostly so that their seals are right, or the bytes."""
    if chance.random() < 0.2:
        return mutated_bytes(data, data, chance)
    lines = data.splitlines()
    for _ in range(chance.choice((1, 1, 2))):
        at = chance.randrange(len(lines))
        match chance.randrange(8):
            case 0:
                lines.insert(at, lines[chance.randrange(len(lines))])
            case 1 if len(lines) > 1:
                del lines[at]
            case 2:
                record = mutated_json([unseal(line) for line in lines], chance)
                lines = (
                    [seal(each) for each in record]
                    if isinstance(record, list) and record
                    else lines
                )
            case _:
                lines[at] = mutated_seal(lines[at], chance) or b""
    return b"\n".join(lines) + b"\n" * chance.choice((0, 1, 1, 2))


@cache
def _blocks(name: str) -> tuple[Codec, str, tuple[int, ...], int, list[bytes]]:
    """A codec with its dtype, dims, rows of a block, and some blocks that it encoded."""
    codec: Codec = get_codec(name)()
    random = np.random.default_rng(0)
    smooth = np.cumsum(random.standard_normal((64, 8)), axis=0).astype(np.float32)
    arrays = [
        smooth,
        smooth[:5].copy(),
        np.zeros((64, 8), np.float32),
        random.random((64, 8), np.float32),
    ]
    return codec, "<f4", (8,), 64, [bytes(codec.encode(array)) for array in arrays]


Target = Callable[[int, Path], str | None]
