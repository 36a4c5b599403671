"""What is given to the builders of samplers: arrays, caches, files that do not fit each other,
mistakes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import check_refused, refusals
from store_helpers import id_of, make_cache

import featcache
from featcache import FeatureTable
from featcache.errors import ConfigError
from featcache.espnet import build_batch_sampler, build_category_batch_sampler

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


def of_files(path: Path, texts: dict[str, str], **args: Any) -> object:
    """Make a sampler of the shape files `a` and `b` and of the categories of `c` or `m`."""
    paths = files(path, **texts)
    args = {"batch_bins": 100, "batch_size": 8} | args
    args["shape_files"] = [paths[name] for name in ("a", "b") if name in paths]
    if not args["type"].startswith("cat"):
        return build_batch_sampler(**args, utt2category_file=paths.get("c"))
    if args["type"] == "catpow_balance_dataset":
        args["dataset2utt_parent_dir"] = str(path)
    return build_category_batch_sampler(**args, category2utt_file=paths["m"])


def sampler(path: Path, **args: Any) -> object:
    given: dict[str, Any] = {"type": "sorted", "batch_size": 2, "lengths": LENGTHS}
    return build_batch_sampler(**given | args)


def category_sampler(path: Path, **args: Any) -> object:
    given = {"batch_size": 2, "batch_bins": 9, "lengths": LENGTHS, "categories": [0, 0, 1, 1, 2]}
    return build_category_batch_sampler(**{"type": "catpow"} | given | args)  # type: ignore[arg-type]


@refusals(Path(__file__).with_name("refused.txt"))
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("a 1\n")
    check_refused(mistake, tmp_path, globals())


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
