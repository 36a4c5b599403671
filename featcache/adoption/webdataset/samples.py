"""Samples of WebDataset shards: members side by side, by key and field, as webdataset cuts names.

The key is the name up to the first dot of its last step, the field what is behind, in lower case:
`spk.a/utt1.fbank.npy` is the field `fbank.npy` of `spk.a/utt1`. Members of a sample stand side by
side. Names without a dot, or such as `__meta__/...`, are no samples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from featcache.adoptable import Value
from featcache.adoption.webdataset.tar_walk import Member, Window, members
from featcache.errors import AdoptionError, FeatureError
from featcache.store.format.annotations import check_annotations, kind_of, wider_kind

KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
NO_SAMPLE = re.compile(r"__[^/]*__(?:$|/)")
TEXT = frozenset({"txt", "text", "transcript"})  # as webdataset decodes fields by default
NUMBER = frozenset({"cls", "cls2", "class", "count", "index", "inx"})


class Annotations:
    """Values by sample, gathered from members of text, numbers and JSON.

    JSON holds more than annotations can: what is none (objects, lists of text), and names whose
    values are of different kinds, are left out.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[int, Value]] = {}
        self._kinds: dict[str, str | None] = {}

    def add(self, number: int, values: Mapping[str, object]) -> None:
        """Keep the values of a sample."""
        for name, value in values.items():
            try:
                checked = check_annotations("", {name: value})
            except FeatureError:
                continue
            for kept, plain in checked.items():
                if number in self._values.setdefault(kept, {}):
                    continue  # the field of this name came first
                kind = kind_of(plain)
                self._kinds[kept] = wider_kind(self._kinds.setdefault(kept, kind), kind) or ""
                self._values[kept][number] = plain

    def columns(self, count: int) -> dict[str, list[Value]]:
        """Return the values of all samples, by name."""
        return {
            name: [values.get(number) for number in range(count)]
            for name, values in self._values.items()
            if self._kinds[name]
        }


def samples(file: Window) -> Iterator[tuple[str, list[tuple[str, Member]]]]:
    """Go through the samples of a shard: the key, and field and member of each."""
    key = ""
    fields: list[tuple[str, Member]] = []
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


def annotation_of(field: str, member: Member, file: Window, key: str) -> dict[str, object]:
    """Return the values of a member of text, a number or JSON; none of any other."""
    stem, _, suffix = field.rpartition(".")
    if not member.is_plain or suffix not in TEXT | NUMBER | {"json", "jsn"}:
        return {}
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
