"""`.npy` files that hold all utterances, with arrays beside them that say how to cut them.

On disk, in one folder (`flat_arrays` has what they mean)::

    <feature>.npy    all frames of the utterances, one after the other: (all frames, *dims); or
                     padded: (utterances, frames, *dims); or a row an utterance: (utterances, *dims)
    lengths.npy      integers, the number of frames of each utterance; or
    offsets.npy      integers, the first frame of each, and maybe the end; of rows, neither
    ids.npy          their ids, an array of text; or ids.txt, one a line; else they are numbers;
                     also called utt_ids, utts, keys or names

fairseq's text files of lengths are another kind, `fairseq`.
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

from featcache.adoptable import Found, Options, Place
from featcache.adoptable.flat_arrays import IDS, FlatNames, cuts, flat_names, ids_in
from featcache.adoptable.placed_arrays import ArrayColumns
from featcache.adoption.npy_files import check_in_rows, npy_header_of
from featcache.adoption.place import is_pattern
from featcache.adoption.scp import read_text
from featcache.errors import AdoptionError, describe

NPY, TXT = ".npy", ".txt"
MOST_BYTES = 1 << 32  # of offsets, lengths or ids


class FlatKind:
    """Flat arrays of frames, with their offsets or lengths."""

    name = "flat_npy"

    def recognises(self, place: Place, what: str) -> bool:
        """Whether arrays of offsets, lengths or ids lie beside others in a folder."""
        return _names(place, what) is not None

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Cut the arrays where offsets or lengths say."""
        names = _names(place, what)
        if names is None:
            raise AdoptionError(f"{place.name!r} has no array beside offsets, lengths or ids")
        folder = _folder(what)
        paths = [f"{folder}{name}{NPY}" for name in names.frames]
        headers = [npy_header_of(place, path, "all") for path in paths]
        for path, header in zip(paths, headers, strict=True):
            check_in_rows(path, header)
        cut = cuts(
            place.name,
            {name: header.shape for name, header in zip(names.frames, headers, strict=True)},
            names,
            lambda name: _loaded(place, f"{folder}{name}{NPY}"),
            lambda name: _ids(place, folder, name),
            options.time_axis,
        )
        features = {}
        for number, (name, header) in enumerate(zip(names.frames, headers, strict=True)):
            feature = options.feature if len(paths) == 1 else name
            columns = ArrayColumns(feature, cut.time_axis)
            placed = header.placed()
            for each in cut.each():
                columns.add(each.id, number, placed.cut(each.row), each.window)
            features[feature] = columns.found(cut.ids)
        return Found(paths, cut.ids, features)


KIND = FlatKind()


def _folder(what: str) -> str:
    folder = what.rpartition("/")[0]
    return f"{folder}/" if folder else ""


def _names(place: Place, what: str) -> FlatNames | None:
    """Return the arrays of the folder, or the one that the user named, and what cuts them."""
    if is_pattern(place.name) or (what and not what.endswith(NPY)):
        return None
    folder = _folder(what)
    there = place.names(folder)
    arrays = [name.removesuffix(NPY) for name in there if name.endswith(NPY)]
    texts = (name for name in there if name.lower().removesuffix(TXT) in IDS)
    listed = next((name for name in texts if name.endswith(TXT)), None)
    names = flat_names(arrays) or (listed and flat_names([*arrays, listed.removesuffix(TXT)]))
    if not names:
        return None
    if what:
        names = names._replace(frames=[what.rpartition("/")[2].removesuffix(NPY)])
    if listed and f"{names.ids}{NPY}" not in there:
        names = names._replace(ids=listed)
    if names.offsets is None and names.lengths is None and names.ids is not None:
        listed_ids = {id.removesuffix(NPY) for id in _ids(place, folder, names.ids)}
        if {*names.frames} & listed_ids:  # a list of files, of an utterance each
            return None
    return names


def _loaded(place: Place, path: str) -> NDArray[np.generic]:
    with place.open(path) as source:
        if source.size > MOST_BYTES:
            raise AdoptionError(f"{path!r} has {source.size:,} bytes, too many for a list of these")
        try:
            found: NDArray[np.generic] = np.load(
                io.BytesIO(source.read(0, source.size)), allow_pickle=False
            )
        except Exception as error:  # whatever a damaged header makes NumPy raise
            raise AdoptionError(
                f"{path!r} is no .npy file of numbers or text: {describe(error)}"
            ) from error
        return found


def _ids(place: Place, folder: str, name: str) -> list[str]:
    if name.endswith(TXT):
        with place.open(folder + name) as source:
            lines = read_text(source).removesuffix(b"\n").split(b"\n")
        try:
            return [line.removesuffix(b"\r").decode() for line in lines]
        except UnicodeDecodeError as error:
            raise AdoptionError(f"{folder + name!r} is not in UTF-8: {error.reason}") from None
    return ids_in(place.name, name, _loaded(place, f"{folder}{name}{NPY}"))
