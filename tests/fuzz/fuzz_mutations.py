"""Mutations of bytes, of JSON values and of columns, which may then be sealed anew."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import numpy as np
from fuzz_format import DEEP, Columns, pack_columns, seal, seal_body, unpack_columns, unseal

WRONG: tuple[object, ...] = (
    *(None, True, False, "", [], {}, [[]], {"": {}}, DEEP.strip('"')),
    *(
        -1,
        0,
        1,
        255,
        2**31,
        -(2**31),
        2**32,
        2**53 + 1,
        2**63 - 1,
        2**63,
        -(2**63),
        2**64,
        10**30,
        10**400,
    ),
    *(0.0, -0.5, 1.5, 1e308, -1e-308),
    *(
        "x" * 100_000,
        "../../outside",
        "/etc/passwd",
        "/dev/zero",
        "a\0b",
        ".",
        "..",
        "parts",
        "\ud800",
        "é\n",
    ),
    *(
        "object",
        "<f8",
        "U8",
        "raw",
        "gzip",
        "nan",
        "0" * 16,
        "=" * 7,
        [1] * 10_000,
        ["a"] * 3,
        [-1, 2**63],
        {"a": 1},
    ),
)
WRONG_BODIES = (
    b"",
    b"{",
    b"NaN",
    b"Infinity",
    b'{"a":}',
    b"\xff",
    b'"\\ud800"',
    b"9" * 5000,
    b"[" * 200_000,
)
LIMITS = (0, 1, -1, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63), 255, 4096)


def mutated_bytes(data: bytes, other: bytes, chance: Random) -> bytes:
    """Flip bits, cut, insert, repeat, or splice with `other`."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(len(changed) + 1)
        end = min(at + chance.choice((1, 2, 4, 8, 64)), len(changed))
        match chance.randrange(8):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 2:
                del changed[at:]
            case 3:
                changed[at:end] = chance.randbytes(end - at)
            case 4:
                changed[at:at] = chance.randbytes(chance.choice((1, 2, 8, 512)))
            case 5:
                del changed[at:end]
            case 6 if other:
                changed[at:] = other[chance.randrange(len(other)) :]
            case _:
                changed[at:end] = chance.choice((b"\0", b"\xff", b"\x7f")) * (end - at)
    return bytes(changed)


def mutated_json(content: Any, chance: Random) -> Any:
    """Change a few values anywhere in JSON values."""
    content = copy.deepcopy(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        holders = list(_holders(content))
        if not holders:
            return chance.choice(WRONG)
        holder = chance.choice(holders)
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key] = _other(holder[key], holders, chance)
        match chance.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case 1:
                holder[chance.choice(("", "../x", "new", key + "x"))] = holder.pop(key)
            case 2:
                other = chance.choice(holders)
                if other:
                    other_key = chance.choice(
                        list(other) if isinstance(other, dict) else range(len(other))
                    )
                    holder[key] = copy.deepcopy(other[other_key])
    return content


def mutated_seal(data: bytes, chance: Random) -> bytes | None:
    """Change sealed JSON and seal it again; None for other bytes."""
    content = unseal(data)
    if content is None:
        return None
    if chance.random() < 0.04:
        return seal_body(chance.choice(WRONG_BODIES))
    return seal(chance.choice(WRONG) if chance.random() < 0.02 else mutated_json(content, chance))


def mutated_columns(data: bytes, chance: Random) -> bytes | None:
    """Change the numbers, or the shapes, of columns, with right checksums; None for other bytes."""
    columns = unpack_columns(data)
    if columns is None:
        return None
    for _ in range(chance.choice((1, 1, 2, 3))):
        name = chance.choice(sorted(columns))
        columns[name] = _other_column(columns[name], columns, chance)
    if chance.random() < 0.2:
        return pack_columns(columns, lambda footer: mutated_json(footer, chance))
    return pack_columns(columns)


def _holders(content: Any) -> Any:
    """All lists and dicts that hold something."""
    if isinstance(content, dict | list) and content:
        yield content
        for value in content.values() if isinstance(content, dict) else content:
            yield from _holders(value)


def _other(value: Any, holders: list[Any], chance: Random) -> Any:
    if isinstance(value, int) and chance.random() < 0.5:
        return chance.choice(
            (value + 1, value - 1, -value, value * 1000, value ^ (1 << chance.randrange(70)))
        )
    if isinstance(value, str) and value and chance.random() < 0.4:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice(("", "0", "/", "\0", "x" * 300)) + value[at + 1 :]
    if isinstance(value, list) and chance.random() < 0.4:
        return chance.choice((value[1:], value * 2, value[::-1], [value], {"0": value}))
    return copy.deepcopy(chance.choice(WRONG))


def _other_column(column: Any, columns: Columns, chance: Random) -> Any:
    flat = np.array(column).reshape(-1)
    match chance.randrange(8):
        case 0:
            return flat[: chance.randrange(len(flat) + 1)]
        case 1:
            return np.concatenate([flat, flat])
        case 2:
            with np.errstate(all="ignore"):
                return flat.astype(chance.choice(("<i4", "<i8", "<u8", "|u1", "<f8")))
        case 3:
            return flat[::-1].copy()
        case 4:
            return columns[chance.choice(sorted(columns))]
    wild = flat.copy()
    for _ in range(chance.choice((1, 1, 3)) if len(wild) else 0):
        at, limit = chance.randrange(len(wild)), chance.choice(LIMITS)
        if wild.dtype.kind in "iu":
            bits = np.iinfo(wild.dtype).bits
            wild[at] = np.array([limit % 2**bits], "u8").astype(f"u{bits // 8}").view(wild.dtype)[0]
        else:
            wild[at] = chance.choice((np.nan, np.inf, -np.inf, 1e308, -1.0, 0.0))
    return wild
