"""Names of a source's arrays: their meaning by a pattern, and names that look like features."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache.adoptable import CONVERT, Options
from featcache.adoptable.flat_arrays import IDS, LENGTHS, OFFSETS
from featcache.errors import AdoptionError, ConfigError
from featcache.interface import Ints

EACH = "{id}"  # each name is an utterance
MOST_FEATURES = 8  # of names that look so; speakers are more
FEWEST = 2  # utterances, or nothing tells
SHARE = 0.9  # of the utterances that have each feature, and go together
MOST_STATISTICS = 8  # arrays called so beside the utterances
_WHOLE = frozenset(
    ("feats", "feat", "features", "embeddings", "embedding", "embeds", "embs", "emb", "x", "data",
     "mels", "fbanks", "mfccs", "xvectors", "vectors", "codes", "tokens", "units"),
)  # fmt: skip
MOST_SPLITS = 12  # arrays called so, maybe beside others of each split
_SPLITS = (
    *("train", "training", "dev", "devel", "development", "valid", "validation", "val"),
    *("test", "testing", "eval", "evaluation"),
)
_LETTERS = re.compile(r"[^\W\d_]{2}|^[fF]0$")
_STATISTICS = ("mean", "means", "std", "stds", "var", "variance", "stats", "statistics", "cmvn")


class Names:
    """Meaning of the names of arrays: an id, and maybe a feature.

    A feature that stands twice in a pattern is the same both times; `*` is anything but a slash.

    Args:
        options: with a pattern, which may lack; then each name is an id.
    """

    def __init__(self, options: Options) -> None:
        self.pattern = options.pattern or EACH
        self.is_given = options.pattern is not None
        self.feature = options.feature
        parts = re.split(r"(\{id\}|\{feature\}|\*)", self.pattern.strip("/"))
        if parts.count("{id}") != 1:
            raise ConfigError(
                f"pattern {self.pattern!r} must have one {{id}}, such as '{{feature}}/{{id}}'"
            )
        self.has_feature = "{feature}" in parts
        groups = {"{id}": "(?P<id>.+)", "*": "[^/]*"}
        for place, part in enumerate(parts):
            if part == "{feature}":
                again = "(?P<feature>[^/]+?)" in parts[:place]
                parts[place] = "(?P=feature)" if again else "(?P<feature>[^/]+?)"
            else:
                parts[place] = groups.get(part, re.escape(part))
        self._regex = re.compile("".join(parts), re.S)

    def match(self, name: str) -> tuple[str, str] | None:
        """Return the feature and the id of a name, None if the pattern is another.

        >>> Names(Options(pattern="{id}_{feature}")).match("spk1/utt_1_mel")
        ('mel', 'spk1/utt_1')
        >>> Names(Options(pattern="{feature}/*-{feature}-{id}")).match("mel/anna-mel-utt_1")
        ('mel', 'utt_1')
        """
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        return found.groupdict().get("feature") or self.feature, found["id"]

    def by_feature(
        self, names: Sequence[str], source: str, paths: Sequence[str] = ()
    ) -> dict[str, dict[str, int]]:
        """Return the place of each name by feature and id; those of other names are left out.

        `paths` are those of the files, for messages, where names lack a suffix.

        Raises `AdoptionError` unless each id has each feature, once.
        """
        found: dict[str, dict[str, int]] = {}
        for place, name in enumerate(names):
            if matched := self.match(name):
                known = found.setdefault(matched[0], {})
                if (first := known.setdefault(matched[1], place)) != place:
                    one, other = ((paths or names)[each] for each in (first, place))
                    raise AdoptionError(
                        f"{source!r}: by pattern={self.pattern!r} there is utterance "
                        f"{matched[1]!r}, feature {matched[0]!r} twice: {one!r} and {other!r}; "
                        "take one away"
                    )
        if not found:
            raise AdoptionError(
                f"{source!r} has no array called like {self.pattern!r}{self._bare(names)}"
            )
        ids = next(iter(found.values())).keys()
        for feature, known in found.items():
            for id in ids ^ known.keys():
                raise AdoptionError(
                    f"{source!r}: utterance {id!r} has not all features, as {feature!r}; "
                    f"{one_by_one(self.pattern, feature)}"
                )
        return found

    def _bare(self, names: Sequence[str]) -> str:
        """Return the end of a message where the pattern has a suffix, which names lack."""
        bare = re.sub(r"\.\w+$", "", self.pattern)
        if bare == self.pattern or not any(map(Names(Options(self.feature, bare)).match, names)):
            return ""
        return f"; names are those of files without their suffix: pattern={bare!r}"


def match_in_groups(names: Names, name: str, source: str) -> tuple[str, str] | None:
    """Return the feature and the id of an array that may lie in a group, as `Names.match`.

    Raises `AdoptionError` for one in a group, where no pattern says what that means.
    """
    if not names.is_given and "/" in name:
        raise AdoptionError(
            f"{source!r}: {name!r} lies in a group; say what names mean, such as "
            "pattern='{feature}/{id}' or '{id}/{feature}', or pattern='{id}' where ids have slashes"
        )
    return names.match(name)


def refuse_features(source: str, names: Sequence[str], rows: Ints | None) -> None:
    """Raise `AdoptionError` for names that look like several features of the same utterances.

    Such as `mel/u1` and `pitch/u1`, or `u1_mel` and `u1_pitch`, if they are as long as each other,
    or longer by the same factor.

    Args:
        source: its name.
        names: of the arrays, without a suffix.
        rows: their lengths; None where the arrays do not go together as one feature anyway.
    """
    refuse_splits(source, names, go_together=rows is not None)
    if rows is None and (statistics := named_as_statistics(names)):
        raise AdoptionError(
            f"{source!r}: {', '.join(map(repr, statistics))} among {len(names):,} arrays may be "
            "statistics, by their names, and do not go with the others; move them elsewhere, or "
            "name the others by a pattern"
        )
    found = [each for each in _guesses(names) if rows is None or _go_together(each, rows)]
    if rows is None:
        found += _grid(names)
    if not found and rows is None:
        _refuse_folders(source, names)
    if not found:
        return
    guess = min(found, key=lambda each: sum(map(len, each.places)))  # "mel" rather than "mel-utt"
    way = f"give pattern={guess.pattern!r}" if guess.pattern else CONVERT
    raise AdoptionError(
        f"{source!r}: by their names, such as {names[0]!r}, arrays are the features "
        f"{', '.join(map(repr, guess.places))} of the same utterances; if they are, {way}; if each "
        f"is an utterance, give pattern={EACH!r}"
    )


def _refuse_folders(source: str, names: Sequence[str]) -> None:
    """Raise `AdoptionError` for folders of the same ids, in each of which names end otherwise.

    Such as `3_feature768/u1` and `2a_f0/u1.wav`.
    """
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, slash, rest = name.partition("/")
        if not slash:
            return
        folders.setdefault(folder, []).append(rest)
    if not 1 < len(folders) <= MOST_FEATURES:
        return
    ends = {folder: _end_of(rests) for folder, rests in folders.items()}
    ids = [{rest.removesuffix(ends[each]) for rest in rests} for each, rests in folders.items()]
    if len(set.intersection(*ids)) < max(FEWEST, SHARE * max(map(len, ids))):
        return
    calls: list[str] = []
    for folder, end in ends.items():
        feature = re.sub(r"^[^a-zA-Z]+|[^\w-]", "", folder) or f"feature{len(calls)}"
        settings = f"feature={feature!r}, pattern={f'{folder}/{{id}}{end}'!r}"
        calls.append(f"featcache.adopt({source!r}, 'features', {settings})")
    raise AdoptionError(
        f"{source!r}: folders such as {', '.join(map(repr, folders))} have arrays of the same "
        f"utterances; take them one by one: {', '.join(calls)}"
    )


def _end_of(names: Sequence[str]) -> str:
    """Return what all names end with from a point on, as `.wav`."""
    ends = {name[name.rfind(".") :] if "." in name else "" for name in names}
    return ends.pop() if len(ends) == 1 else ""


def refuse_splits(source: str, names: Sequence[str], *, go_together: bool = True) -> None:
    """Raise `AdoptionError` for arrays that are all called like splits, of at least two of these.

    Such as `train`, `dev` and `test`: each may hold many utterances; must, unless they
    `go_together` as one feature.

    >>> refuse_splits("a", ["test_1", "test_2"])
    """
    words = [{*re.split("[_.-]", name.rpartition("/")[2].lower())} for name in names]
    found = [each.intersection(_SPLITS) for each in words]
    if len(names) > MOST_SPLITS or not all(found) or len(set().union(*found)) < 2:
        return
    rows = ""
    with suppress(OSError, EOFError, ValueError, LookupError, SyntaxError, TypeError, MemoryError):
        rows = _rows_of(Path(source), names)
    many = f"as by featcache.convert({{f'{{n:08d}}': a for n, a in enumerate({rows})}}, 'features')"
    alone = f"if each is an utterance, give pattern={EACH!r}; " if go_together else ""
    many = many if rows else "and give featcache.convert({id: array, ...}, 'features')"
    raise AdoptionError(
        f"{source!r}: {', '.join(map(repr, names))} are called like splits, and a cache is one "
        f"split; {alone}if they hold many, load those of one yourself, {many}"
    )


def refuse_whole(source: str, names: Sequence[str]) -> None:
    """Raise `AdoptionError` for one array that is called like those of all utterances.

    Such as `embeddings`, or the `lengths` of others.
    """
    last = names[0].rpartition("/")[2].lower() if len(names) == 1 else ""
    if last not in _WHOLE and re.split("[_.-]", last)[-1] not in OFFSETS | LENGTHS | IDS:
        return
    path, rows = Path(source) / f"{names[0]}.npy", "and give featcache.convert({id: array, ...}"
    if path.is_file():
        load = f"enumerate(numpy.load({str(path)!r}))"
        rows = f"as by featcache.convert({{f'{{n:08d}}': a for n, a in {load}}}"
    raise AdoptionError(
        f"{source!r}: {names[0]!r} alone is called like an array of all utterances; if it is one "
        f"utterance, give pattern={EACH!r}; if each row is one, load it yourself, {rows}, "
        "'features'); if there are ids, put them beside it, as ids.txt or an array ids"
    )


def _rows_of(folder: Path, names: Sequence[str]) -> str:
    """Return an expression for the utterances in the first array of a folder; "" for none known."""
    path = folder / f"{names[0]}.npy"
    array, load = np.load(path, mmap_mode="r"), f"numpy.load({str(path)!r})"
    beside = next((each for each in names[1:] if re.match(f"{re.escape(names[0])}[_.-]", each)), "")
    if array.ndim > 2:
        return load
    if not beside:
        return ""
    cut = f"numpy.load({str(folder / f'{beside}.npy')!r})"
    found = np.load(folder / f"{beside}.npy", mmap_mode="r")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        return ""
    if int(found.sum()) == len(array):  # lengths
        return f"numpy.split({load}, {cut}.cumsum()[:-1])"
    ends = "-1" if int(found[-1]) == len(array) else ""
    return f"numpy.split({load}, {cut}[1:{ends}])" if int(found[0]) == 0 else ""


def named_as_statistics(names: Sequence[str]) -> list[str]:
    """Return the few names that are those of statistics, such as `mean`, among names of others.

    >>> named_as_statistics(["u1", "u2", "mean", "mel_stats"]), named_as_statistics(["u1_mean"])
    (['mean', 'mel_stats'], [])
    """
    ends = (name for name in names if name.lower().endswith(_STATISTICS))
    found = [name for name in ends if re.split("[/_.-]", name)[-1].lower() in _STATISTICS]
    return found if len(found) <= min(MOST_STATISTICS, len(names) - 1) else []


def one_by_one(pattern: str, feature: str) -> str:
    """Return how features are adopted that do not come together, as the end of a message."""
    alone = pattern.replace("{feature}", feature)
    return (
        f"adopt them one by one into one cache, as with pattern={alone!r} and feature={feature!r}: "
        "it has the utterances that have all of them"
    )


class _Guess(NamedTuple):
    pattern: str  # "" if none says it
    places: Mapping[str, Mapping[str, int]]  # of names, by feature and what is left of the name


def _guesses(names: Sequence[str]) -> Iterator[_Guess]:
    """Yield the ways in which a part of each name may be a feature."""
    if len(names) < 2 * FEWEST:
        return
    depth = min(name.count("/") for name in names)
    for number in range(depth):
        pattern = _pattern_of(names) if number == 0 else ""
        yield from _guess(names, pattern, [_folder(name, number) for name in names])
    for sign in "_-.":
        if not all(sign in name.rpartition("/")[2] for name in names):
            continue
        ends = (name.rpartition(sign)[::-2] for name in names)
        yield from _guess(names, f"{{id}}{sign}{{feature}}", ends)
        if not any("/" in name for name in names):
            begins = (name.partition(sign)[::2] for name in names)
            yield from _guess(names, f"{{feature}}{sign}{{id}}", begins)


def _grid(names: Sequence[str]) -> Iterator[_Guess]:
    """Yield what names in groups mean, where groups have the same: the fewer are features."""
    pairs = [(name.rpartition("/")[0], name.rpartition("/")[2]) for name in names]
    groups, lasts = {group for group, _ in pairs}, {last for _, last in pairs}
    if (
        min(len(groups), len(lasts)) < 2
        or "" in groups
        or len({*pairs}) != len(names)
        or len(groups) * len(lasts) != len(names)
    ):
        return
    named = [(last, group) for group, last in pairs] if len(lasts) <= len(groups) else pairs
    places: dict[str, dict[str, int]] = {}
    for place, (feature, id) in enumerate(named):
        places.setdefault(feature, {})[id] = place
    yield _Guess("{id}/{feature}" if len(lasts) <= len(groups) else "{feature}/{id}", places)


def _pattern_of(names: Sequence[str]) -> str:
    """Return the pattern by which all names, whose first folder is the feature, give the same ids.

    The feature may stand once more in the file's name, as FastSpeech2 has it; "" if none fits.
    """
    again = [
        f"{{feature}}/{name}"
        for sign in "-_."
        for name in (
            f"*{sign}{{feature}}{sign}{{id}}",
            f"{{feature}}{sign}{{id}}",
            f"{{id}}{sign}{{feature}}",
        )
    ]
    for pattern in ("{feature}/{id}", *again):
        by_pattern = Names(Options(pattern=pattern))
        found: dict[str, set[str]] = {}
        for feature, id in filter(None, map(by_pattern.match, names)):
            found.setdefault(feature, set()).add(id)
        ids = [*found.values()]
        if sum(map(len, ids)) == len(names) and set.intersection(*ids):
            return pattern
    return ""


def _folder(name: str, number: int) -> tuple[str, str]:
    """Return a folder of a path and the rest, in which the folder's name may stand once more."""
    parts = name.split("/")
    label = parts.pop(number)
    return label, "/".join(parts).replace(label, "")


def _guess(
    names: Sequence[str], pattern: str, split: Iterable[tuple[str, str]]
) -> Iterator[_Guess]:
    """Yield a guess, if few features go with nearly the same of many names."""
    places: dict[str, dict[str, int]] = {}
    for place, (feature, rest) in enumerate(split):
        known = places.setdefault(feature, {})
        if len(places) > MOST_FEATURES or known.setdefault(rest, place) != place:
            return
    rests = {rest for known in places.values() for rest in known}
    if len(places) < 2 or len(rests) < FEWEST or not all(map(_LETTERS.search, places)):
        return
    if len(names) >= SHARE * len(places) * len(rests):
        yield _Guess(pattern, places)


def _go_together(guess: _Guess, rows: Ints) -> bool:
    """Whether the lengths of a feature are those of another one, times a factor."""
    first, *others = guess.places.values()
    for known in others:
        both = [rest for rest in first if rest in known]
        a = rows[[first[rest] for rest in both]].astype(np.float64)
        b = rows[[known[rest] for rest in both]].astype(np.float64)
        some = a > 0
        factor = float(np.median(b[some] / a[some])) if some.any() else 1.0
        off = np.abs(b - factor * a)
        if np.mean(off <= 2 * max(factor, 1.0) + 0.02 * b) < SHARE:
            return False
    return True
