"""Readers that demand a fingerprint, and what is said of caches that nobody compared."""

from __future__ import annotations

import copy
import logging
import os
import pickle
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import arrays_of, id_of, make_cache, two_features

import featcache
from featcache import CacheWriter, FeatureStorage, FeatureStorageConfig
from featcache.errors import CacheError, ConfigError, StaleCacheError
from featcache.format import program
from featcache.reading import stale

STALE: dict[str, object] = {"gain": 3, "model": {"layer": 9}}
MADE_FROM: dict[str, object] = {"gain": 1, "model": {"layer": 9}, "stage": "TRAIN"}


@pytest.fixture(autouse=True)
def nothing_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be as a new process, in which nothing was compared."""
    monkeypatch.setattr(stale, "_compared", {})
    monkeypatch.setattr(stale, "_told", {})


@pytest.fixture
def storage(tmp_path: Path) -> FeatureStorage:
    make_cache(tmp_path / "train", range(5), fingerprint=MADE_FROM)
    return FeatureStorage(tmp_path, two_features())


class Dataset:
    """Takes what `attach` gives it."""

    data_ids = (id_of(1), id_of(2))

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}

    def add_dynamic_item(self, func: Any, takes: object = None, provides: Any = None) -> None:
        self.items[provides] = func


def attached(storage: FeatureStorage, **settings: Any) -> Any:
    dataset = Dataset()
    storage.attach(dataset, "train", **settings)
    return dataset.items["fbank"](id_of(1))


OPENS: list[Callable[..., Any]] = [
    lambda storage, **expect: featcache.open(storage.path("train"), **expect),
    lambda storage, **expect: featcache.open(storage.path("train"), **expect),
    lambda storage, **expect: storage.cache("train", **expect),
    attached,
    lambda storage, **expect: storage.reader("train", "fbank", **expect)(id_of(1)),
    lambda storage, **expect: featcache.FeatureReader(storage.path("train"), "fbank", **expect)(
        id_of(1)
    ),
]
every_way_to_open = pytest.mark.parametrize(
    "opens", OPENS, ids=["open", "Cache", "cache", "attach", "reader", "FeatureReader"]
)


@every_way_to_open
def test_a_cache_made_from_something_else_is_refused_with_the_differences(
    storage: FeatureStorage, opens: Callable[..., Any]
) -> None:
    with pytest.raises(StaleCacheError) as caught:
        opens(storage, expect=STALE)
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == ["  gain: was 1, now 3"]
    made = f"made less than a minute ago by {program()}, was made from something else than is expec"
    assert made in lines[0]
    assert "overwrite=True" in lines[-1]
    assert opens(storage, expect={"gain": 1}) is not None
    assert opens(storage, expect={"model": {"layer": 9}, "stage": "TRAIN"}) is not None


@every_way_to_open
@pytest.mark.parametrize(
    ("expect", "line"),
    [
        ({"rate": 16000}, "rate: was (absent), now 16000"),
        ({"model": {"layer": 9, "norm": True}}, "model.norm: was (absent), now true"),
        ({"model": {}}, "model.layer: was 9, now (absent)"),
        ({"gain": "1"}, 'gain: was 1, now "1"'),
        ({"features": {"fbank": 1}}, "features.fbank: was {"),
        ({"features": {"other": {}}}, "features.other: was (absent), now {}"),
    ],
)
def test_each_key_that_is_expected_must_be_there(
    storage: FeatureStorage,
    opens: Callable[..., Any],
    expect: dict[str, object],
    line: str,
) -> None:
    with pytest.raises(StaleCacheError) as caught:
        opens(storage, expect=expect)
    assert line in str(caught.value)


@every_way_to_open
@pytest.mark.parametrize("expect", [5, "gain", [("gain", 1)], {"gain": object()}])
def test_an_expectation_that_is_no_fingerprint_is_refused(
    storage: FeatureStorage, opens: Callable[..., Any], expect: Any
) -> None:
    with pytest.raises(ConfigError, match=r"expect is a fingerprint|made of JSON values: gain"):
        opens(storage, expect=expect)


def test_the_fingerprint_of_another_cache_is_an_expectation(storage: FeatureStorage) -> None:
    same = make_cache(storage.root / "same", range(2), fingerprint=MADE_FROM)
    with CacheWriter(storage.root / "other", [two_features()[0]], MADE_FROM) as writer:
        writer.write("u", {"fbank": np.zeros((3, 4))})
    expect = storage.cache("train").fingerprint
    assert featcache.open(same, expect=expect).complete
    with pytest.raises(StaleCacheError, match=r"features\.units: was \(absent\)"):
        featcache.open(storage.root / "other", expect=expect)


def test_a_tuple_and_numbers_as_keys_are_what_json_makes_of_them(tmp_path: Path) -> None:
    made_from = {"layers": (3, 6), "scale": {1: 0.5}}
    path = make_cache(tmp_path / "train", range(2), fingerprint=made_from)
    assert featcache.open(path, expect=made_from).complete


def test_a_reader_compares_declarations_when_it_opens(storage: FeatureStorage) -> None:
    changed = FeatureStorage(
        storage.root, [FeatureStorageConfig("fbank", dtype="float16"), two_features()[1]]
    )
    reader = changed.reader("train", "fbank")
    with pytest.raises(StaleCacheError, match=r'features.fbank.dtype: was "float32", now "float1'):
        reader(id_of(1))
    assert changed.reader("train", "units")(id_of(1)).tolist() == arrays_of(1)["units"].tolist()


# Copies and pickles


def overwritten(path: Path, gain: int) -> None:
    """Make a cache anew as another process does: nothing in this one has compared it."""
    compared = dict(stale._compared)
    make_cache(path, range(5), fingerprint={**MADE_FROM, "gain": gain}, overwrite=True)
    stale._compared.clear()
    stale._compared.update(compared)


@pytest.mark.parametrize(
    "make",
    [
        lambda cache: cache,
        lambda cache: featcache.concat(cache),
        lambda cache: featcache.FeatureDataset(cache),
        lambda cache: featcache.FeatureLoader(cache, batch_size=2),
    ],
    ids=["Cache", "table", "dataset", "loader"],
)
def test_what_reads_a_cache_refuses_another_in_its_place_when_it_opens_again(
    storage: FeatureStorage, make: Callable[[featcache.Cache], object]
) -> None:
    holder = make(storage.cache("train"))
    pickled = pickle.dumps(holder)
    assert type(pickle.loads(pickled)) is type(holder)  # noqa: S301
    overwritten(storage.path("train"), gain=3)
    with pytest.raises(StaleCacheError, match=r"made anew from something else since it was opened"):
        pickle.loads(pickled)  # noqa: S301
    with pytest.raises(StaleCacheError, match=r"made anew from something else"):
        copy.deepcopy(holder)


def test_a_cache_made_anew_from_the_same_is_opened_again(storage: FeatureStorage) -> None:
    cache = storage.cache("train")
    pickled = pickle.dumps([cache, cache.reader("fbank")])
    overwritten(storage.path("train"), gain=1)
    again, reader = pickle.loads(pickled)  # noqa: S301
    assert again.generation > cache.generation
    assert reader(id_of(1)).tolist() == again.read(id_of(1), "fbank").tolist()


def test_a_pickled_cache_keeps_its_settings(storage: FeatureStorage) -> None:
    cache = featcache.open(storage.path("train"), check_reads=True, mapped=False)
    for other in (copy.copy(cache), pickle.loads(pickle.dumps(cache))):  # noqa: S301
        assert other.opened.settings[:2] == (False, True)
        assert other.path == cache.path
        assert other.opened is not cache.opened


@pytest.mark.parametrize(
    "make",
    [
        lambda storage: storage.reader("train", "fbank"),
        lambda storage: featcache.FeatureReader(storage.path("train"), "fbank"),
        lambda storage: storage.cache("train").reader("fbank"),
    ],
    ids=["storage.reader", "FeatureReader", "cache.reader"],
)
def test_a_reader_that_opens_late_refuses_what_was_made_from_something_else_meanwhile(
    storage: FeatureStorage, make: Callable[[FeatureStorage], featcache.FeatureReader]
) -> None:
    readers = [make(storage), copy.copy(make(storage)), pickle.loads(pickle.dumps(make(storage)))]  # noqa: S301
    early = make(storage)
    early(id_of(1))
    overwritten(storage.path("train"), gain=3)
    for reader in [*readers, copy.copy(early), pickle.loads(pickle.dumps(early))]:  # noqa: S301
        with pytest.raises(StaleCacheError, match=r"made anew from something else since"):
            reader(id_of(1))
    assert make(storage)(id_of(1)).tolist() == arrays_of(1)["fbank"].tolist()


def read_first(reader: featcache.FeatureReader) -> object:
    try:
        return reader(id_of(1)).tolist()
    except StaleCacheError as error:
        return str(error)


def test_a_worker_is_not_given_other_features_than_its_run_began_with(
    storage: FeatureStorage,
) -> None:
    dataset = Dataset()
    storage.attach(dataset, "train")
    reader = dataset.items["fbank"]
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply(read_first, [reader]) == arrays_of(1)["fbank"].tolist()
        overwritten(storage.path("train"), gain=3)
        assert "made anew from something else" in str(pool.apply(read_first, [reader]))


def test_a_cache_that_is_open_gives_no_features_of_another(storage: FeatureStorage) -> None:
    cache, unread = storage.cache("train"), storage.cache("train")
    array = cache.read(id_of(1), "fbank")
    overwritten(storage.path("train"), gain=3)
    assert cache.read(id_of(1), "fbank").tolist() == array.tolist()
    with pytest.raises(CacheError):
        unread.read(id_of(1), "fbank")


def test_a_writer_of_another_fingerprint_or_of_none_is_refused(storage: FeatureStorage) -> None:
    for fingerprint in (None, STALE):
        with pytest.raises(StaleCacheError, match=r"gain: was 1, now "):
            storage.writer("train", fingerprint)


def test_a_reader_may_be_made_before_its_cache(tmp_path: Path) -> None:
    reader = featcache.FeatureReader(tmp_path / "train", "fbank")
    make_cache(tmp_path / "train", range(3), fingerprint=MADE_FROM)
    assert reader(id_of(1)).tolist() == arrays_of(1)["fbank"].tolist()


def test_a_reader_takes_what_its_own_process_made_anew(storage: FeatureStorage) -> None:
    reader, sent = (featcache.FeatureReader(storage.path("train"), "fbank") for _ in range(2))
    make_cache(storage.path("train"), range(2), fingerprint=STALE, overwrite=True)
    assert reader(id_of(1)).tolist() == arrays_of(1)["fbank"].tolist()
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply(read_first, [sent]) == arrays_of(1)["fbank"].tolist()


# What is said of caches that nobody compared


@every_way_to_open
def test_a_cache_that_nobody_compared_is_told_of_once(
    storage: FeatureStorage,
    opens: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget(monkeypatch)
    caplog.set_level(logging.INFO, "featcache")
    a_day = storage.path("train").stat().st_mtime - 86400 * 3.5
    os.utime(storage.path("train") / "featcache.json", (a_day, a_day))
    for _ in range(2):
        opens(storage)
    assert [record.getMessage() for record in caplog.records] == [
        f"cache {str(storage.path('train'))!r}: made 3 days ago by {program()}, not checked: give "
        "expect= when you open it, brain.expectation() or the fingerprint that it should have"
    ]
    assert caplog.records[0].levelno == logging.INFO  # nothing speaks against it


@every_way_to_open
def test_nothing_is_said_where_something_is_expected(
    storage: FeatureStorage,
    opens: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget(monkeypatch)
    opens(storage, expect={"gain": 1})
    opens(storage)
    assert caplog.records == []


def test_nothing_is_said_of_a_cache_that_this_process_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_cache(tmp_path, range(1, 3), fingerprint=MADE_FROM)
    featcache.open(path)
    assert caplog.records == []


def test_declarations_alone_are_nothing_to_compare(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_cache(tmp_path, range(1, 3), fingerprint={})
    forget(monkeypatch)
    featcache.open(path)
    assert caplog.records == []


def test_an_expectation_of_declarations_alone_compares_nothing_else(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "featcache")
    forget(monkeypatch)
    featcache.open(storage.path("train"), expect={"features": {"fbank": declared("fbank")}})
    assert len(caplog.records) == 1


def declared(feature: str) -> object:
    return {each.name: each.to_json() for each in two_features()}[feature]


def test_a_cache_made_anew_by_others_is_told_of_again(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "featcache")
    storage.cache("train", expect={"gain": 1})
    overwritten(storage.path("train"), gain=3)
    storage.cache("train")
    assert caplog.text.count("not checked") == 1


def test_copies_are_not_told_of(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = pickle.dumps([storage.cache("train"), storage.cache("train").reader("fbank")])
    forget(monkeypatch)
    pickle.loads(pickled)[1](id_of(1))  # noqa: S301
    assert caplog.records == []


def test_another_split_that_an_extraction_looks_at_is_not_told_of(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(monkeypatch)

    class Provider(featcache.EnvironmentProvider):
        def build_env_local(self) -> dict[str, Any]:
            return {"dataset": [70, 71], "ids": ["a", "b"], "compute_features": compute}

    path = storage.path("valid")
    featcache.extract(Provider(), path, two_features(), progressbar=False)
    featcache.extract(Provider(), path, two_features(), progressbar=False)
    assert caplog.records == []


def compute(numbers: list[int]) -> list[dict[str, Any]]:
    return [{"id": "ab"[number - 70], **arrays_of(number, 4)} for number in numbers]


def test_a_pickled_cache_is_small_whatever_it_was_made_from(tmp_path: Path) -> None:
    settings = {f"module.{number}": {"p": number, "kind": "Linear"} for number in range(650)}
    with CacheWriter(tmp_path, [FeatureStorageConfig("x")], {"modules": settings}) as writer:
        writer.write("u", {"x": np.zeros((3, 2))})
    pickled = pickle.dumps(featcache.open(tmp_path))
    assert len(pickled) < 1000
