"""Batches and chunks of ESPnet after release 202511, and the script that records them.

    PYTHONPATH=<a checkout of ESPnet> python tests/espnet_batches.py

records the cases whose sampler that checkout has: `release` of espnet 202611 from PyPI,
`utt2weight_file` of github.com/espnet/espnet at 4b679c2f, `filtered_key_file` of its pull request
4944 (github.com/kamo-naoyuki/espnet at 1835a92a).
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "samplers" / "espnet_after_202511.json"
SHAPES = ["feats_shape", "text_shape"]
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"sort_in_batch": "ascending"},
    {"sort_batch": "descending", "drop_last": True},
)
SIZES = {"batch_size": 4, "batch_bins": 90, "shape_files": SHAPES}


def write_inputs(folder: Path) -> None:
    """Write the files of 23 utterances: shapes with ties, categories, weights, ids to leave out."""
    draw = random.Random(5)
    ids = [f"u{number:02d}" for number in range(23)]
    draw.shuffle(ids)
    files: dict[str, list[str]] = {
        "feats_shape": [f"{id} {draw.randrange(3, 40)},2" for id in ids],
        "text_shape": [f"{id} {draw.randrange(1, 9)}" for id in sorted(ids)],
        "utt2category": [f"{id} c{draw.randrange(3)}" for id in ids],
        "utt2weight": [f"{id} {draw.choice([0, 0.25, 1, 3.5])}" for id in ids],
        "filtered": ["u03", "u17 too long", "u05", "u03", "unknown"],
        "nothing": [],
    }
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))


def cases() -> list[dict[str, Any]]:
    """Arguments of `build_batch_sampler`, with names of the files."""
    found: list[dict[str, Any]] = []
    for way in WAYS:
        folded = {"type": "folded", **SIZES, **way, "fold_lengths": [12, 4]}
        for category in (None, "utt2category"):
            for least, size in ((1, 4), (3, 8), (4, 11)):
                more = {"utt2category_file": category, "min_batch_size": least}
                found.append({**folded, **more, "batch_size": size, "release": "202611"})
        for file in ("filtered", "nothing"):
            for type in ("unsorted", "sorted", "length", "numel"):
                one = SHAPES[:1] if type == "numel" else SHAPES
                found.append({"type": type, **SIZES, **way, "shape_files": one})
                found[-1]["filtered_key_file"] = file
            found.append({**folded, "min_batch_size": 1, "filtered_key_file": file})
            found[-1]["utt2category_file"] = "utt2category"
        for padding in (True, False):
            more = {"padding": padding, "min_batch_size": 2, "utt2weight_file": "utt2weight"}
            found.append({"type": "length_weighted", **SIZES, **way, **more})
    found.append({"type": "weighted", **SIZES, "utt2weight_file": "utt2weight"})
    return found


CHUNKS: dict[str, dict[str, Any]] = {
    "shuffled": {"chunk_length": "4-6,9", "shuffle": True, "seed": 3},
    "kept": {"chunk_length": 12, "discard_short_samples": False, "chunk_shift_ratio": 0.4},
}


def utterances(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Utterances whose values are the numbers of their frames from 1 on, by id."""
    shapes = [line.split() for line in (folder / "feats_shape").read_text().splitlines()]
    lengths = {id: int(shape.split(",")[0]) for id, shape in shapes}
    return {id: (id, {"speech": np.arange(1, n + 1)}) for id, n in lengths.items()}


def source_batches(folder: Path) -> list[list[str]]:
    """Return batches of five utterances of several lengths."""
    ids = list(utterances(folder))
    return [ids[start : start + 5] for start in range(0, len(ids), 5)]


def chunks_of(batches: Any) -> str:
    """Write chunks as `id:first frame:frames`, batches apart by bars."""
    return "|".join(
        " ".join(
            f"{id}:{int(chunk[0])}:{int((chunk > 0).sum())}"
            for id, chunk in zip(ids, batch["speech"], strict=True)
        )
        for ids, batch in batches
    )


def in_folder(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return arguments with the paths of their files."""
    return {
        name: [str(folder / file) for file in value]
        if name == "shape_files"
        else str(folder / value)
        if name.endswith("_file") and value
        else value
        for name, value in case.items()
    }


def _record() -> None:
    from espnet2.samplers.build_batch_sampler import (  # type: ignore[import-not-found]
        build_batch_sampler,
    )

    known = build_batch_sampler.__code__.co_varnames
    fixed = "batch_sizes[-(i % len(batch_sizes)) - 1]" in _source()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    with tempfile.TemporaryDirectory() as made:
        write_inputs(Path(made))
        for case in cases():
            args = in_folder(case, Path(made))
            if (args.pop("release", None) and not fixed) or not set(args) <= set(known):
                continue
            sampler = build_batch_sampler(**args)
            drawn = "utt2weight_file" in args
            recorded[json.dumps(case)] = [
                "|".join(map(" ".join, sampler)) for _ in range(2 if drawn else 1)
            ]
        if fixed:
            recorded |= _record_chunks(Path(made))
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(recorded[key])}" for key in recorded)
    RECORDED.write_text(f"{{\n{lines}\n}}\n")


def _record_chunks(folder: Path) -> dict[str, list[str]]:
    from espnet2.iterators.category_chunk_iter_factory import (  # type: ignore[import-not-found]
        CategoryChunkIterFactory,
    )
    from espnet2.train.collate_fn import CommonCollateFn  # type: ignore[import-not-found]

    data, recorded, batches = utterances(folder), {}, source_batches(folder)
    for name, more in CHUNKS.items():
        collate = CommonCollateFn(int_pad_value=0)
        made = CategoryChunkIterFactory(data, 3, batches, collate_fn=collate, **more)
        recorded[name] = [chunks_of(made.build_iter(epoch)) for epoch in (1, 2)]
    return recorded


def _source() -> str:
    from espnet2.samplers import folded_batch_sampler  # type: ignore[import-not-found]

    return Path(folded_batch_sampler.__file__).read_text()


if __name__ == "__main__":
    _record()
