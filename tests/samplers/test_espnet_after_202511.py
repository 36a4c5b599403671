"""Samplers that ESPnet has since release 202511: its batches, id for id, as they were recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from espnet_batches import (
    CHUNKS,
    RECORDED,
    SHAPES,
    cases,
    chunks_of,
    in_folder,
    source_batches,
    utterances,
    write_inputs,
)

from featcache import CacheWriter, FeatureDataset, FeatureStorageConfig
from featcache.errors import ConfigError
from featcache.espnet import (
    CategoryChunkIterFactory,
    ChunkIterFactory,
    CommonCollateFn,
    build_batch_sampler,
)
from featcache.espnet.dataset_input import batch_list

CASES = cases()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("espnet")
    write_inputs(made)
    return made


def arguments(folder: Path, **changed: Any) -> dict[str, Any]:
    given = {"batch_size": 4, "batch_bins": 90, "shape_files": SHAPES, **changed}
    return in_folder(given, folder)


def test_every_case_was_recorded() -> None:
    named = {json.dumps(case) for case in CASES} | {*CHUNKS}
    assert named == set(json.loads(RECORDED.read_text()))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_batches_are_those_of_espnet(folder: Path, number: int) -> None:
    case = CASES[number]
    for epoch, recorded in enumerate(json.loads(RECORDED.read_text())[json.dumps(case)], 1):
        batches = build_batch_sampler(**in_folder(case, folder), epoch=epoch)
        assert [" ".join(map(str, batch)) for batch in batches] == recorded.split("|")


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_of_release_202611_hold_no_padding(folder: Path, name: str) -> None:
    collate = CommonCollateFn(int_pad_value=0)
    given: Any = {"batches": source_batches(folder), "collate_fn": collate, **CHUNKS[name]}
    factory = CategoryChunkIterFactory(utterances(folder), 3, release="202611", **given)
    for epoch, recorded in enumerate(json.loads(RECORDED.read_text())[name], 1):
        assert chunks_of(factory.build_iter(epoch)) == recorded
    before = CategoryChunkIterFactory(utterances(folder), 3, **given)
    assert chunks_of(before.build_iter(1)) != chunks_of(factory.build_iter(1))


def test_names_that_a_pattern_excludes_are_given_whole() -> None:
    data = {"u": ("u", {"speech": np.arange(8), "enroll_a": np.arange(3)})}
    given: Any = {"batches": [["u"]], "chunk_length": 4}
    factory = ChunkIterFactory(data, 3, excluded_key_pattern="(enroll_.)|(utt2fs)", **given)
    ((_, batch),) = factory.build_iter(1)
    assert batch["enroll_a"].tolist() == [[0, 1, 2]] * 3
    assert (
        ChunkIterFactory(data, 3, excluded_key_prefixes=["enroll_"], **given).excluded_key_pattern
        == "(enroll_[0-9]*)|(utt2category[0-9]*)|(utt2fs[0-9]*)"
    )
    wrongs: list[Any] = [{"excluded_key_prefixes": ["b"]}, {}]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="excluded_key_pattern"):
            ChunkIterFactory(data, 3, **given, **wrong, excluded_key_pattern="(")


def test_a_cache_gives_the_batches_of_its_shape_files(folder: Path, tmp_path: Path) -> None:
    for name in SHAPES:
        lines = sorted((folder / name).read_text().splitlines())
        (tmp_path / name).write_text("\n".join(lines))
    shapes = [
        dict(line.split() for line in (folder / name).read_text().splitlines()) for name in SHAPES
    ]
    features = [FeatureStorageConfig("feats"), FeatureStorageConfig("text", dtype="int16")]
    with CacheWriter(tmp_path / "cache", features) as writer:
        for id, shape in shapes[0].items():
            frames = int(shape.split(",")[0])
            text = np.zeros(int(shapes[1][id]), np.int16)
            writer.write(id, {"feats": np.zeros((frames, 2), np.float32), "text": text})
    dataset = FeatureDataset(tmp_path / "cache")
    for type in ("weighted", "length_weighted", "length", "sorted", "unsorted", "folded"):
        files = {"utt2weight_file": "utt2weight", "filtered_key_file": "filtered"}
        args = arguments(folder, type=type, **files, fold_lengths=[12, 4])
        # rows are in the order of their ids, and so are ties
        args["shape_files"] = [str(tmp_path / name) for name in SHAPES]
        named = [*build_batch_sampler(**args)]
        del args["shape_files"]
        rows = batch_list(args, dataset)
        assert [[dataset.table.id(int(row)) for row in batch] for batch in rows] == named, type
        assert not {"u03", "u05", "u17"} & {str(id) for batch in named for id in batch}


def test_weights_of_rows_are_drawn_by() -> None:
    batches = build_batch_sampler(
        "length_weighted", batch_bins=20, lengths=[5, 7, 9, 4], weights=[0, 1, 1, 0]
    )
    assert {row for batch in batches for row in batch} <= {1, 2}
    again = build_batch_sampler(
        "weighted", batch_size=3, lengths=[5, 7, 9, 4], weights=[1, 1, 1, 1], epoch=2
    )
    assert [len(batch) for batch in again] == [3, 1]


@pytest.mark.parametrize(
    ("changed", "lines", "message"),
    [
        ({"type": "sorted", "filtered_key_file": "feats_shape"}, None, "none is left"),
        ({"type": "weighted"}, None, "utt2weight_file or weights"),
        ({"type": "weighted", "utt2weight_file": "w"}, "u00 0\n", "a finite sum above 0"),
        ({"type": "weighted", "utt2weight_file": "w"}, "u00 -1\nu01 3\n", "numbers from 0 on"),
        ({"type": "weighted", "utt2weight_file": "w"}, "u00 a\n", "line 1: a number .* 'u00'"),
        ({"type": "length_weighted", "utt2weight_file": "w"}, "u00 1\n", "of 1 of 23 utterances"),
        ({"type": "length_weighted", "utt2weight_file": "w"}, "x 1\n", "such as 'x'"),
        ({"type": "sorted", "weights": [1.0]}, None, "'weighted' and 'length_weighted'"),
        ({"type": "folded", "release": "2026"}, None, "202511, 202611"),
        ({"type": "weighted", "weights": [1.0], "epoch": 0}, None, "epoch"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    folder: Path, tmp_path: Path, changed: dict[str, Any], lines: str | None, message: str
) -> None:
    args = arguments(folder, **changed)
    if lines is not None:
        (tmp_path / "w").write_text(lines)
        args["utt2weight_file"] = str(tmp_path / "w")
    with pytest.raises(ConfigError, match=message):
        build_batch_sampler(**args)
