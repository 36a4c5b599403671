"""Samples of a shard: members side by side, by key and field, as webdataset cuts names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import unquote

from featcache.adoptable import CONVERT
from featcache.adoption.place import Window
from featcache.adoption.webdataset.tar_walk import TarMember, members
from featcache.errors import AdoptionError

KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
NO_SAMPLE = re.compile(r"__[^/]*__(?:$|/)")
MOST_BYTES = 1 << 22  # of a field that is read
TEXT = frozenset({"txt", "text", "transcript"})  # as webdataset decodes fields by default
NUMBER = frozenset({"cls", "cls2", "class", "count", "index", "inx"})


def samples(file: Window) -> Iterator[tuple[str, list[tuple[str, TarMember]]]]:
    """Go through the samples of a shard: the key, and field and member of each."""
    key = ""
    fields: list[tuple[str, TarMember]] = []
    for member in members(file):
        match = KEY.fullmatch(member.name)
        if match is None or NO_SAMPLE.match(member.name):
            continue
        if match[1] != key and fields:
            yield key, fields
            fields = []
        key = match[1]
        fields.append((match[2].lower(), member))
    if fields:
        yield key, fields


def annotation_of(field: str, member: TarMember, file: Window, key: str) -> dict[str, object]:
    """Return the values of a member of text, a number or JSON; none of any other."""
    stem, _, suffix = field.rpartition(".")
    if not member.is_plain or suffix not in TEXT | NUMBER | {"json", "jsn"}:
        return {}
    if member.nbytes > MOST_BYTES:
        raise AdoptionError(
            f"sample {key!r} of {file.path!r}: its field {field!r} has {member.nbytes:,} bytes, "
            f"which is more than an annotation may have; {CONVERT}"
        )
    data = file.read(member.offset, member.nbytes)
    try:
        if suffix in TEXT:
            return {stem or "text": data.decode()}
        if suffix in NUMBER:
            return {stem or suffix: int(data)}
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdoptionError(
            f"sample {key!r} of {file.path!r}: its field {field!r} cannot be read: {error}"
        ) from None
    return found if isinstance(found, dict) else {}


def id_of(key: str, said: object) -> str:
    """Return the id of a sample: its key, or what its JSON calls its id if that is the key encoded.

    featcache's own shards have percent-encoded keys, and the id beside them.

    >>> id_of("a%2Eb", "a.b"), id_of("a%2Eb", "utt-7")
    ('a.b', 'a%2Eb')
    """
    return said if isinstance(said, str) and said and unquote(key) == said else key
