"""Data sets by number before a cache: in whatever order and choice, each item is the right one."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset as Table
from speechbrain.dataio.dataset import DynamicItemDataset
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

import featcache

Files = Sequence[tuple[str, int]]  # name and value of each item
SEVEN: Files = [(f"rec-{number}.wav", 10 * number) for number in range(7)]


class Named(Dataset[Any]):
    """Values of files, known by a list of names."""

    def __init__(self, files: Files, gain: int = 1) -> None:
        self.names = [name for name, _ in files]
        self.gain = gain

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Any:
        return torch.tensor([dict(SEVEN)[self.names[number]] * self.gain])


class Rows(Dataset[Any]):
    """Rows of a list of dicts beside labels."""

    def __init__(self, files: Files) -> None:
        self.rows: list[dict[str, Any]] = [{"wav": name, "value": value} for name, value in files]
        self.labels = [value % 4 for _, value in files]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return torch.tensor([int(self.rows[number]["value"])])


class Framed(Dataset[Any]):
    """Rows of a table of pandas."""

    def __init__(self, files: Files) -> None:
        self.table = pandas.DataFrame({"wav": [n for n, _ in files], "v": [v for _, v in files]})

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> Any:
        return torch.tensor([int(self.table.iloc[number]["v"])])


class WithIds(Dataset[Any]):
    """Values in memory, and ids."""

    def __init__(self, files: Files) -> None:
        self.values = torch.tensor([value for _, value in files])
        self.ids = [name for name, _ in files]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> Any:
        return self.values[number : number + 1]


class Numbers(Dataset[Any]):
    """Values in memory, and nothing that names them."""

    def __init__(self, files: Files) -> None:
        self.values = [value for _, value in files]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> Any:
        return torch.tensor([self.values[number]])


class Ordered(Named):
    """Names that are read in another order."""

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self.order = random.Random(len(files)).sample(range(len(files)), len(files))

    def __getitem__(self, number: int) -> Any:
        return super().__getitem__(self.order[number])


class OwnSubset(Dataset[Any]):
    """Items of another data set, by places."""

    def __init__(self, files: Files) -> None:
        self.places = [SEVEN.index(file) for file in files]
        self.whole = Named(SEVEN)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> Any:
        return self.whole[self.places[number]]


def table(files: Files) -> Any:
    found = Table.from_dict({"wav": [n for n, _ in files], "value": [v for _, v in files]})
    return found.with_transform(value_of_table)


def table_with_ids(files: Files) -> Any:
    found = Table.from_dict({"id": [n for n, _ in files], "value": [v for _, v in files]})
    return found.with_transform(value_of_table)


def value_of_table(rows: Any) -> Any:
    return {"x": [torch.tensor([value]) for value in rows["value"]]}


def dynamic(files: Files) -> Any:
    dataset = DynamicItemDataset({name: {"value": value} for name, value in files})
    dataset.add_dynamic_item(lambda value: torch.tensor([value]), takes="value", provides="x")
    dataset.set_output_keys(["x"])
    return dataset


def places(files: Files) -> list[int]:
    return [SEVEN.index(file) for file in files]


KNOWN: dict[str, Callable[[Files], Any]] = {
    "names": Named,
    "rows": Rows,
    "table of pandas": Framed,
    "ids": WithIds,
    "datasets": table,
    "datasets with ids": table_with_ids,
    "speechbrain": dynamic,
    "list": lambda files: [torch.tensor([value]) for _, value in files],
    "subset": lambda files: Subset(Named(SEVEN), places(files)),
    "subset of a subset": lambda files: Subset(
        Subset(Named(SEVEN), list(range(6, -1, -1))), [6 - place for place in places(files)]
    ),
    "subset with ids": lambda files: Subset(WithIds(SEVEN), places(files)),
    "concatenation": lambda files: ConcatDataset([Named(files[:2]), Named(files[2:])]),
    "concatenation of kinds": lambda files: ConcatDataset([Rows(files[:1]), Named(files[1:])]),
    "subset of a concatenation": lambda files: Subset(
        ConcatDataset([Named(SEVEN[:3]), Named(SEVEN[3:])]), places(files)
    ),
    "concatenation of subsets": lambda files: ConcatDataset(
        [Subset(WithIds(SEVEN), places(files)[:1]), Subset(WithIds(SEVEN), places(files)[1:])]
    ),
}
UNKNOWN: dict[str, Callable[[Files], Any]] = {
    "numbers": Numbers,
    "order": Ordered,
    "places": OwnSubset,
    "tensors": lambda files: TensorDataset(torch.tensor([value for _, value in files])),
    "subset of numbers": lambda files: Subset(Numbers(SEVEN), places(files)),
}


def value(item: Any) -> int:
    return int(item["x"] if isinstance(item, dict) else item)


@pytest.mark.parametrize("kind", KNOWN)
def test_another_choice_in_another_order_gives_the_right_items(tmp_path: Path, kind: str) -> None:
    rng = random.Random(kind)
    for number in range(6):
        files = rng.sample(SEVEN, rng.randrange(3, 8)) if number else SEVEN[:-1]
        with featcache.through(tmp_path / "cache", KNOWN[kind](files)) as cached:
            assert [value(cached[n]) for n in range(len(files))] == [v for _, v in files]


def test_another_random_split_gives_the_right_items(tmp_path: Path) -> None:
    for seed in range(4):
        part, _ = random_split(Named(SEVEN), [3, 4], torch.Generator().manual_seed(seed))
        with featcache.through(tmp_path / "cache", part) as cached:
            assert [value(cached[n]) for n in range(3)] == [SEVEN[n][1] for n in part.indices]


@pytest.mark.parametrize("kind", UNKNOWN)
def test_items_that_nothing_names_need_ids(tmp_path: Path, kind: str) -> None:
    dataset = UNKNOWN[kind](SEVEN[1:])
    with pytest.raises(featcache.errors.ConfigError, match=r"nothing says which items of .*ids="):
        featcache.through(tmp_path / "cache", dataset)
    ids = [name for name, _ in SEVEN[1:]]
    with featcache.through(tmp_path / "cache", dataset, ids=ids) as cached:
        assert torch.equal(first_of(cached[2]), first_of(dataset[2]))
        assert torch.equal(first_of(cached[2]), first_of(dataset[2]))


def first_of(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) else item


def test_two_items_of_one_name_need_ids(tmp_path: Path) -> None:
    dataset: Any
    for dataset in (Named([*SEVEN, SEVEN[2]]), ConcatDataset([Named(SEVEN[:3]), Named(SEVEN[2:])])):
        with pytest.raises(
            featcache.errors.ConfigError, match=r"items 2 and \d .*'rec-2.wav'.*ids="
        ):
            featcache.through(tmp_path / "cache", dataset)


def test_parts_that_compute_otherwise_do_not_share_their_items(tmp_path: Path) -> None:
    one, three = Named(SEVEN[:3]), Named(SEVEN[:3], gain=3)
    with featcache.through(tmp_path / "cache", ConcatDataset([one, three])) as cached:
        assert [value(cached[n]) for n in range(6)] == [0, 10, 20, 0, 30, 60]
    with (
        featcache.through(tmp_path / "cache", ConcatDataset([three, one])) as cached,
        pytest.raises(featcache.StaleCacheError),
    ):
        cached[0]


SOURCE = """
import torch
from speechbrain.dataio.dataset import DynamicItemDataset
from torch.utils.data import ConcatDataset, Dataset, Subset
import datasets

class Waves(Dataset):
    def __init__(self):
        self.names = ["a.wav", "b.wav"]
    def __len__(self):
        return 2
    def __getitem__(self, number):
        return torch.full((2,), VALUE)

def value(id):
    return torch.full((2,), VALUE)

def transformed(rows):
    return {"x": [value(id) for id in rows["id"]]}

def dynamic():
    dataset = DynamicItemDataset({"a": {}, "b": {}})
    dataset.add_dynamic_item(value, takes="id", provides="x")
    dataset.set_output_keys(["x"])
    return dataset

KINDS = {
    "own class": Waves,
    "subset": lambda: Subset(Waves(), [1]),
    "concatenation": lambda: ConcatDataset([Waves()]),
    "speechbrain": dynamic,
    "subset of speechbrain": lambda: Subset(dynamic(), [0]),
    "datasets": lambda: datasets.Dataset.from_dict({"id": ["a"]}).with_transform(transformed),
}
"""


@pytest.mark.parametrize(
    "kind",
    ["own class", "subset", "concatenation", "speechbrain", "subset of speechbrain", "datasets"],
)
def test_the_code_of_the_items_counts_wherever_it_is(tmp_path: Path, kind: str) -> None:
    sys.path.insert(0, str(tmp_path))
    try:
        for number in (1.5, 2.5):
            name = f"kinds_{abs(hash(tmp_path))}_{int(number)}"
            (tmp_path / f"{name}.py").write_text(SOURCE.replace("VALUE", str(number)))
            cached = featcache.through(tmp_path / "cache", __import__(name).KINDS[kind]())
            if number == 1.5:
                cached[0]
                cached.close()
                continue
            with pytest.raises(featcache.StaleCacheError, match="source"):
                cached[0]
    finally:
        sys.path.remove(str(tmp_path))


def test_what_a_data_set_holds_counts_for_the_item_or_for_all(tmp_path: Path) -> None:
    class Scaled(Named):
        def __init__(self, scale: Any) -> None:
            super().__init__(SEVEN)
            self.scale = scale

        def __getitem__(self, number: int) -> Any:
            return super().__getitem__(number) * float(np.sum(self.scale))

    with featcache.through(tmp_path / "cache", Scaled([0.5] * 7)) as cached:
        cached[1]
    for scale in ([0.5] * 6 + [0.25], np.full((7, 2), 0.5), 2.0):
        with (
            featcache.through(tmp_path / "cache", Scaled(scale)) as cached,
            pytest.raises(featcache.StaleCacheError),
        ):
            cached[1]


def reversed_paths(dataset: Any, subset: Any) -> None:
    dataset.names = dataset.names[::-1]


def other_indices(dataset: Any, subset: Any) -> None:
    subset.indices = [6, 5, 4]


@pytest.mark.parametrize("change", [reversed_paths, other_indices])
def test_another_order_after_the_call_is_refused(tmp_path: Path, change: Any) -> None:
    dataset = Named(SEVEN)
    subset = Subset(dataset, [1, 2, 3])
    with featcache.through(tmp_path / "cache", subset) as cached:
        assert value(cached[0]) == value(dataset[1])
        change(dataset, subset)
        with pytest.raises(featcache.StaleCacheError, match="call it again after a change"):
            cached[1]
