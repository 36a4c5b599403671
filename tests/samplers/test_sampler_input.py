"""What is given to the builders of samplers: arrays, caches, files that do not fit each other,
mistakes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import id_of, make_cache

import featcache
from featcache.errors import ConfigError
from featcache.espnet import build_batch_sampler, build_category_batch_sampler
from featcache.tables.table import FeatureTable

LENGTHS = [30, 10, 20, 50, 0]


@pytest.fixture
def cache(tmp_path: Path) -> featcache.Cache:
    return featcache.open(make_cache(tmp_path / "cache", range(12)))


def files(folder: Path, **texts: str) -> dict[str, str]:
    paths = {name: folder / name for name in texts}
    for name, path in paths.items():
        path.write_text(texts[name])
    return {name: str(path) for name, path in paths.items()}


def test_a_cache_counts_each_feature_with_a_time_axis_as_a_shape_file(
    cache: featcache.Cache,
) -> None:
    fbank, units = (cache.lengths(name) for name in ("fbank", "units"))
    args: dict[str, Any] = {"type": "numel", "batch_bins": 150, "sort_in_batch": "ascending"}
    expected = list(
        build_batch_sampler(**args, lengths=[np.column_stack([fbank, np.full(12, 4)]), units])
    )
    table = FeatureTable.of(cache)
    for source in (cache, table, featcache.FeatureDataset(table)):
        batches = build_batch_sampler(**args, lengths=source)
        assert list(batches) == expected
    assert sorted(row for batch in expected for row in batch) == list(range(12))


def test_a_data_set_counts_the_features_that_it_reads(cache: featcache.Cache) -> None:
    lengths = cache.lengths("fbank")
    for sampler, bins in (("length", 60), ("sorted", None)):
        found = build_batch_sampler(
            sampler, 4, bins, lengths=featcache.FeatureDataset(cache, "fbank")
        )
        assert list(found) == list(build_batch_sampler(sampler, 4, bins, lengths=lengths))
    units = build_batch_sampler(
        "length", batch_bins=60, lengths=featcache.FeatureDataset(cache, "units")
    )
    assert list(units) == list(
        build_batch_sampler("length", batch_bins=60, lengths=cache.lengths("units"))
    )


def test_category_files_name_the_ids_of_a_cache(cache: featcache.Cache, tmp_path: Path) -> None:
    ids = list(cache)
    labels = [number % 3 for number in range(12)]
    by_label = [
        " ".join(id for id, label in zip(ids, labels, strict=True) if label == wanted)
        for wanted in range(3)
    ]
    paths = files(
        tmp_path,
        category2utt="".join(f"c{label} {members}\n" for label, members in enumerate(by_label)),
        dataset2utt="".join(f"d{label} {members}\n" for label, members in enumerate(by_label))
        + "d3 stranger\n",
        utt2category="".join(f"{id} c{label}\n" for id, label in zip(ids, labels, strict=True)),
    )
    args: dict[str, Any] = {"lengths": cache, "batch_size": 3, "batch_bins": 20}
    for type in ("catbel", "catpow", "catpow_balance_dataset"):
        named: dict[str, Any] = {"category2utt_file": paths["category2utt"]}
        labelled: dict[str, Any] = {"categories": labels}
        if type == "catpow_balance_dataset":
            named["dataset2utt_parent_dir"] = str(tmp_path)
            labelled["datasets"] = labels
        from_files, _ = build_category_batch_sampler(type, **args, **named)
        from_labels, _ = build_category_batch_sampler(type, **args, **labelled)
        assert list(from_files) == list(from_labels)
    folded: dict[str, Any] = {
        "type": "folded",
        "fold_lengths": [10, 10],
        "lengths": cache,
        "batch_size": 3,
    }
    assert list(build_batch_sampler(**folded, utt2category_file=paths["utt2category"])) == list(
        build_batch_sampler(**folded, categories=np.array(labels))
    )


@pytest.mark.parametrize(
    "labels", [["x", "y", "x", "z", "y"], [7, 7000000, 7, -3, 7000000], np.array(list("xyxzy"))]
)
def test_labels_are_strings_or_integers_in_the_order_that_they_come_in(labels: Any) -> None:
    batches = build_batch_sampler("unsorted", batch_size=2, lengths=LENGTHS, categories=labels)
    assert list(batches) == [[0, 2], [1, 4], [3]]


def test_an_epoch_is_drawn_the_same_again_from_the_arguments_that_come_back() -> None:
    labels = [number % 4 for number in range(40)]
    lengths = np.arange(40)
    for type in ("catbel", "catpow", "catpow_balance_dataset"):
        batches, arguments = build_category_batch_sampler(
            type, 4, 60, lengths=lengths, categories=labels, datasets=labels, epoch=3, num_batches=5
        )
        assert list(build_category_batch_sampler(type, **arguments)[0]) == list(batches)  # type: ignore[arg-type]
        other, _ = build_category_batch_sampler(type, **arguments | {"epoch": 4})  # type: ignore[arg-type]
        assert list(other) != list(batches)
        assert (arguments["num_batches"], arguments["distributed"]) == (5, False)


def test_a_batch_of_length_zero_does_not_end() -> None:
    batches = build_batch_sampler(
        "length", batch_bins=1, lengths=[0, 0, 0, 2, 2], sort_in_batch="ascending"
    )
    assert list(batches) == [[0, 1, 2, 3], [4]]


def test_a_minimum_over_all_gives_one_batch() -> None:
    assert len(build_batch_sampler("length", batch_bins=1, min_batch_size=99, lengths=LENGTHS)) == 1
    assert (
        len(
            build_batch_sampler(
                "folded", batch_size=1, min_batch_size=99, fold_lengths=[1], lengths=LENGTHS
            )
        )
        == 1
    )


def test_a_rest_larger_than_the_batches_before_it_is_shared_all_around() -> None:
    # a batch of 8, then a rest of 5, where ESPnet's index runs out of its list
    batches = build_batch_sampler(
        "folded", 8, fold_lengths=[100], min_batch_size=6, lengths=np.ones(13, np.int64)
    )
    assert batches.sizes.tolist() == [13]


def test_numbers_may_come_from_yaml_as_floats() -> None:
    args: dict[str, Any] = {"type": "length", "lengths": LENGTHS}
    assert list(build_batch_sampler(**args | {"batch_bins": 1e2})) == list(
        build_batch_sampler(batch_bins=100, **args)
    )


def test_columns_of_other_files_may_be_in_another_order(tmp_path: Path) -> None:
    paths = files(tmp_path, speech="a 10\nb 20\nc 30\n", text="c 3\na 1\nb 2\n")
    batches = build_batch_sampler(
        "length", batch_bins=40, shape_files=[paths["speech"], paths["text"]]
    )
    assert list(batches) == [["b", "a"], ["c"]]


@pytest.mark.parametrize(
    ("texts", "args", "message"),
    [
        (
            {"a": "u 1\nv 2\n", "b": "u 1\nw 2\n"},
            {"type": "length"},
            r"'.*/a' has 1 utterances that are not in .*/b', such as 'v' \(line 2\)",
        ),
        (
            {"a": "u 1\n", "b": "u 1\nw 2\n"},
            {"type": "length"},
            r"'.*/b' has 1 utterances that are not in .*/a', such as 'w' \(line 2\)",
        ),
        (
            {"a": "u 1,2\nv 1,3\n"},
            {"type": "numel"},
            r"one shape: shape file '.*a' has \(2,\) .* \(3,\) for number 2; try padding=False",
        ),
        (
            {"a": "u 1\n"},
            {"type": "folded", "fold_lengths": [1, 2]},
            r"2 fold_lengths for 1 lengths",
        ),
        (
            {"a": "u 1\n"},
            {"type": "folded", "fold_lengths": 800},
            r"fold_lengths is a list, .*, not 800",
        ),
        (
            {"a": "u 1\n", "c": "v x\n"},
            {"type": "folded", "fold_lengths": [1]},
            r"file '.*/c' names 1 utterances .* such as 'v' \(line 1\)",
        ),
        (
            {"a": "u 1\nv 1\n", "c": "v x\n"},
            {"type": "folded", "fold_lengths": [1]},
            r"no category for 1 utterances, such as 'u'",
        ),
        (
            {"a": "u 1\n", "m": "x u\ny u v\n"},
            {"type": "catpow"},
            r"file '.*/m' names 1 utterances that are not in .*/a', such as 'v' \(line 2\)",
        ),
        (
            {"a": "u 5,80\n", "m": "x u\n"},
            {"type": "catpow"},
            r"line 1: '5,80' after 'u'; this sampler needs one length",
        ),
        (
            {"a": "u 0\n", "m": "x u\n"},
            {"type": "catpow"},
            r"all utterances of the categories have length 0",
        ),
        (
            {"a": "u 5\n", "b": "u 5\n", "m": "x u\n"},
            {"type": "catpow"},
            r"'catpow' takes the lengths of one",
        ),
        (
            {"a": "u 5\n", "m": "x u\n", "dataset2utt": "d v\n"},
            {"type": "catpow_balance_dataset"},
            r"no utterance is both",
        ),
        (
            {"a": "u 5\n", "m": "x u\n"},
            {"type": "catpow_balance_dataset"},
            r"cannot read '.*/dataset2utt'",
        ),
        (
            {"m": "x u\n"},
            {"type": "catbel", "batch_size": 2},
            r"no batch of 2 utterances \(batch_size\) can be filled",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_with_what_is_missing(
    tmp_path: Path, texts: dict[str, str], args: dict[str, Any], message: str
) -> None:
    paths = files(tmp_path, **texts)
    args = {"batch_bins": 100, "batch_size": 8} | args
    shapes = [paths[name] for name in ("a", "b") if name in paths]
    build: Callable[..., object] = build_batch_sampler
    args |= {"shape_files": shapes, "utt2category_file": paths.get("c")}
    if args["type"].startswith("cat"):
        build = build_category_batch_sampler
        args["category2utt_file"] = paths["m"]
        del args["utt2category_file"]
        args["dataset2utt_parent_dir"] = (
            str(tmp_path) if args["type"] == "catpow_balance_dataset" else None
        )
    with pytest.raises(ConfigError, match=message):
        build(**args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"type": "sortd"}, r"no batch sampler 'sortd'; did you mean 'sorted' or 'unsorted'\?"),
        ({"type": "catpow"}, r"'catpow' are made by build_category_batch_sampler"),
        ({"lengths": None}, r"give either shape_files=\[...\] or lengths="),
        ({"shape_files": ["x"]}, r"not both"),
        (
            {"lengths": None, "shape_files": "x"},
            r"shape_files is a list of one or more files, not 'x'",
        ),
        (
            {"lengths": None, "shape_files": []},
            r"shape_files is a list of one or more files, not \[\]",
        ),
        ({"lengths": []}, r"lengths is empty"),
        ({"lengths": [1.5, 2]}, r"lengths are frames .*, integers .*, not float64 of shape \(2,\)"),
        ({"lengths": [3, -1]}, r"lengths cannot be negative: row 1 has -1"),
        ({"lengths": [np.ones(2, int), np.ones(3, int)]}, r"lengths for \[2, 3\] utterances"),
        ({"batch_size": None}, r"batch_size is needed"),
        ({"batch_size": 0}, r"batch_size is an integer from 1 on, not 0"),
        ({"batch_size": float("inf")}, r"batch_size is an integer from 1 on, not inf"),
        ({"batch_size": 2.5}, r"batch_size is an integer from 1 on, not 2.5"),
        ({"type": "length", "batch_bins": 0}, r"batch_bins is an integer from 1 on, not 0"),
        (
            {"type": "length", "batch_bins": 5, "min_batch_size": 0},
            r"min_batch_size is an integer from 1 on, not 0",
        ),
        ({"sort_in_batch": "up"}, r"sort_in_batch is 'ascending' or 'descending', not 'up'"),
        ({"sort_batch": "up"}, r"sort_batch is 'ascending' or 'descending', not 'up'"),
        ({"type": "folded", "fold_lengths": [0]}, r"fold_lengths are greater than 0, not \[0\]"),
        (
            {"type": "folded", "fold_lengths": [9], "utt2category_file": "x"},
            r"'x' names utterances, but lengths has no ids",
        ),
        ({"categories": [1, 2, 3, 4, 5]}, r"made by 'unsorted' and 'folded', not by 'sorted'"),
        ({"type": "unsorted", "categories": [1, 2]}, r"categories has 2 labels for 5 utterances"),
        (
            {"type": "numel", "batch_bins": 5, "lengths": np.array([[2**40, 2**30]])},
            r"too many to count in 64 bits",
        ),
    ],
)
def test_mistakes_are_named(
    args: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").write_text("a 1\n")
    given: dict[str, Any] = {"type": "sorted", "batch_size": 2, "lengths": LENGTHS}
    with pytest.raises(ConfigError, match=message):
        build_batch_sampler(**given | args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"type": "catpw"}, r"no batch sampler 'catpw'; did you mean 'catpow'"),
        ({"type": "numel"}, r"'numel' are made by build_batch_sampler"),
        ({"categories": None}, r"give either category2utt_file or categories, none is given"),
        ({"type": "catbel", "lengths": None, "categories": []}, r"categories is empty"),
        ({"category2utt_file": "x"}, r"give either category2utt_file or categories, not both"),
        (
            {"type": "catpow_balance_dataset"},
            r"give either dataset2utt_parent_dir or datasets, none is given",
        ),
        (
            {"type": "catpow", "categories": None, "category2utt_file": "x"},
            r"'x' names utterances, but lengths has no ids",
        ),
        ({"type": "catbel", "batch_size": None}, r"batch_size is needed"),
        ({"batch_bins": None}, r"batch_bins is needed"),
        ({"epoch": -1}, r"epoch is an integer from 0 to 2\*\*32 - 1, not -1"),
        ({"dataset_scaling_factor": 0.9}, r"dataset_scaling_factor is a number from 1 on, not 0.9"),
        ({"upsampling_factor": -1.0}, r"upsampling_factor is a number from 0 on, not -1.0"),
        ({"max_batch_size": 0}, r"max_batch_size is an integer from 1 on, not 0"),
        (
            {"min_batch_size": 100},
            r"no batch could be made: fewer than 100 utterances \(min_batch_size\)",
        ),
        (
            {"batch_bins": 10**9, "drop_last": True},
            r"none was larger than 1000000000 frames \(batch_bins\)",
        ),
    ],
)
def test_mistakes_with_categories_are_named(
    args: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").write_text("a 1\n")
    given: dict[str, Any] = {
        "type": "catpow",
        "batch_size": 2,
        "batch_bins": 9,
        "lengths": LENGTHS,
        "categories": [0, 0, 1, 1, 2],
    }
    with pytest.raises(ConfigError, match=message):
        build_category_batch_sampler(**given | args)


def test_a_cache_without_a_time_axis_has_no_lengths(tmp_path: Path) -> None:
    config = featcache.FeatureStorageConfig("speaker", time_axis=None)
    with featcache.CacheWriter(tmp_path / "cache", [config]) as writer:
        for number in range(4):
            writer.write(id_of(number), {"speaker": np.zeros(3, np.float32)})
    cache = featcache.open(tmp_path / "cache")
    assert len(build_batch_sampler("unsorted", batch_size=2, lengths=cache)) == 2
    with pytest.raises(ConfigError, match="no feature with a time axis"):
        build_batch_sampler("sorted", batch_size=2, lengths=cache)


def test_samplers_need_no_torch() -> None:
    code = "import sys, featcache.samplers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
