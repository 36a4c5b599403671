"""`.npz` files of `numpy.savez`: an utterance each, with an array a feature; or one of many ids.

A zip of `.npy` members, as fairseq's of speech to text, is one, too.
"""

from __future__ import annotations

from pathlib import Path

from featcache.adoption.libraries.named_arrays import FilesOfArrays
from featcache.adoption.libraries.payloads import NpzFile


def _open(path: Path) -> NpzFile:
    return NpzFile(path, repr(str(path)))


KIND = FilesOfArrays("npz", (".npz", ".zip"), _open)
