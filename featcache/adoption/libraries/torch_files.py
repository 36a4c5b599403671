"""Files of `torch.save` that are not adopted: before torch 1.6, dicts in dicts, parts of tensors.

They are loaded with `weights_only=True`. Keys of dicts in dicts are joined by `/`.
"""

from __future__ import annotations

from pathlib import Path

from featcache.adoption.libraries.named_arrays import FilesOfArrays
from featcache.adoption.libraries.payloads import LoadedArrays, torch_load


def _open(path: Path) -> LoadedArrays:
    return torch_load(path, repr(str(path)))


# what `featcache.adoption.pt` does not adopt
FILES = FilesOfArrays("pt", (".pt", ".pth", ".ckpt"), _open)
