"""Views: some rows of a table, in any order, which answer as a cache of them would."""

from __future__ import annotations

import multiprocessing
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import id_of, make_cache, oracle
from test_feature_table import write_one

import featcache
from featcache import FeatureStorageConfig, FeatureTable
from featcache.errors import ConfigError, KeyNotFoundError, RowError, StaleCacheError
from featcache.format import SharedArray, Strings, columns
from featcache.tables import Cuts, RowMap, Selection


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    return featcache.open(make_cache(tmp_path_factory.mktemp("cache"), range(30)))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> FeatureTable:
    home = tmp_path_factory.mktemp("several")
    numbers = (range(9), range(9, 10), range(10, 30))
    return featcache.concat(*(make_cache(home / str(n), part) for n, part in enumerate(numbers)))


def assert_is(table: FeatureTable, ids: list[str]) -> None:
    """A table holds these utterances in this order, and all ways of reading it agree."""
    expected = oracle(range(30))
    assert list(table) == list(table.ids) == [table.id(row) for row in range(len(table))] == ids
    assert table.rows(ids).tolist() == list(range(len(ids)))
    for feature in table.features:
        arrays = [expected[id][feature] for id in ids]
        lengths = table.lengths(feature)
        assert lengths.tolist() == [len(array) for array in arrays]
        assert not lengths.flags.writeable
        assert table.lengths(feature, rows=np.arange(len(ids))).tolist() == lengths.tolist()
        assert table.lengths(feature, ids=ids[::-1]).tolist() == lengths[::-1].tolist()
        batch = table.read_batch(ids, feature)
        assert batch.lengths.tolist() == lengths.tolist()
        for id, array, padded in zip(ids, arrays, batch.data, strict=True):
            np.testing.assert_array_equal(padded[: len(array)], array)
            assert not padded[len(array) :].any()
            np.testing.assert_array_equal(table.read(id, feature), array)
            start = min(1, len(array))
            np.testing.assert_array_equal(table.read(id, feature, start), array[start:])
            np.testing.assert_array_equal(table[id][feature], array)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), depth=st.integers(1, 3), of_several=st.booleans(), by_id=st.booleans())
def test_a_view_of_views_holds_what_was_chosen_in_its_order(
    cache: featcache.Cache,
    several: FeatureTable,
    data: st.DataObject,
    depth: int,
    of_several: bool,
    by_id: bool,
) -> None:
    table = several if of_several else cache.table
    ids = list(table)
    for _ in range(depth):
        rows = data.draw(st.lists(st.integers(0, max(len(ids) - 1, 0)), unique=True))
        rows = rows if ids else []
        ids = [ids[row] for row in rows]
        table = table.select(ids if by_id else rows)
    assert_is(table, ids)
    assert table.selection.blocks is (
        several.selection.blocks if of_several else table.selection.blocks
    )


def test_a_view_refuses_what_it_does_not_hold(cache: featcache.Cache) -> None:
    view = cache.table.select([id_of(3), id_of(7)])
    assert id_of(3) in view
    assert id_of(4) not in view
    assert "nobody" not in view
    with pytest.raises(KeyNotFoundError, match=r"'.*utt-4' in this view of 2 .*; '.*' has it"):
        view[id_of(4)]
    with pytest.raises(KeyNotFoundError, match=r"no utterance 'nobody' in this view of 2 .* of '"):
        view.read("nobody", "fbank")
    with pytest.raises(
        KeyNotFoundError, match=r"no feature 'fbnk' in cache .*; did you mean 'fbank'"
    ):
        view.read(id_of(3), "fbnk")
    assert view.find([id_of(4), id_of(7), "nobody"]).tolist() == [-1, 1, -1]


def test_only_rows_that_are_there_are_chosen_and_each_once(cache: featcache.Cache) -> None:
    table = cache.table
    with pytest.raises(ConfigError, match=f"'{id_of(7)}' is chosen twice"):
        table.select([id_of(7), id_of(3), id_of(7)])
    with pytest.raises(ConfigError, match="by a list of ids or rows, not by 'spk"):
        table.select(id_of(7))
    for rows in ([0, 30], [-1], np.array([30]), range(31)):
        with pytest.raises(RowError, match="there are 30 utterances"):
            table.select(rows)
    with pytest.raises(RowError, match=r"not by bool of shape \(30,\); give np.flatnonzero"):
        table.select(table.lengths("fbank") > 3)
    with pytest.raises(RowError, match=r"not by 1\.5"):
        table.select([1.5])  # type: ignore[arg-type]
    with pytest.raises(KeyNotFoundError, match="no utterance 'nobody'"):
        table.select(["nobody"])
    keys: Any
    for keys in (iter([2, 1]), np.array([2, 1], np.uint8), np.array([table.id(2), table.id(1)])):
        assert list(table.select(keys)) == [table.id(2), table.id(1)]
    assert list(table.select([])) == []


def test_the_path_of_the_cache_below_is_there_where_it_is_one(
    cache: featcache.Cache, several: FeatureTable
) -> None:
    assert cache.table.select([1]).path == cache.path
    assert cache.table.select([1]).complete
    with pytest.raises(ConfigError, match=r"made of several caches: '.*0', '.*1', '.*2'"):
        several.select([1]).path  # noqa: B018


def test_views_of_other_rows_have_other_digests(cache: featcache.Cache) -> None:
    table = cache.table
    rows = [[0, 1, 2], [0, 2, 1], [0, 1], []]
    digests = {table.select(some).digest for some in rows} | {table.digest}
    assert len(digests) == 5
    assert table.select([0, 1, 2]).digest == table.select([2, 1, 0]).select([2, 1, 0]).digest


def test_a_pickled_view_is_refused_once_its_generation_is_gone(tmp_path: Path) -> None:
    view = FeatureTable.of(make_cache(tmp_path, range(9))).select([3, 1])
    pickled, ids = pickle.dumps(view), list(view)
    assert list(pickle.loads(pickled)) == ids  # noqa: S301
    make_cache(tmp_path, range(9, 12))
    assert list(pickle.loads(pickled)) == ids  # noqa: S301 (it is still there)
    make_cache(tmp_path, range(12, 15))
    with pytest.raises(StaleCacheError, match="rows have other numbers now"):
        pickle.loads(pickled)  # noqa: S301


def seen_in_a_worker(shared: SharedArray[np.int64], answers: Any) -> None:
    mapped = not isinstance(shared.values.base, bytes)
    answers.put((shared.values.tolist(), mapped, shared.values.flags.writeable))


@pytest.mark.parametrize("start", ["spawn", "forkserver", "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_spawned_process_maps_the_numbers_of_this_one(
    start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PICKLED_BYTES", 8)
    shared = SharedArray(np.arange(7)[::-1].copy())
    assert len(pickle.dumps(shared)) > 7 * 8  # by value, wherever that is read
    processes: Any = multiprocessing.get_context(start)
    answers = processes.SimpleQueue()
    for _ in range(2):
        process = processes.Process(target=seen_in_a_worker, args=(shared, answers))
        process.start()
        assert answers.get() == (list(range(6, -1, -1)), True, False)
        process.join()
        process.close()
    answers.close()
    assert shared.values.tolist() == list(range(6, -1, -1))


def test_a_row_map_finds_back_in_any_order() -> None:
    for below in ([], [4], [1, 4, 6], [6, 1, 4]):
        rows = RowMap(np.array(below, np.int64))
        expected = [below.index(row) if row in below else -1 for row in range(-1, 9)]
        assert rows.find(np.arange(-1, 9)).tolist() == expected


def test_cut_rows_have_ids_and_frames_of_their_own(cache: featcache.Cache) -> None:
    table = cache.table
    ids = Strings.of(["b", "a", "ccc"])
    starts, lengths = np.array([1, 0, 2]), np.array([2, 1, 1])
    rows = table.rows([id_of(9), id_of(9), id_of(8)])
    cut = FeatureTable(
        Selection(
            table.selection.blocks, RowMap(rows), Cuts.of(ids, {"fbank": (starts, lengths)}, {})
        )
    )
    arrays = oracle([8, 9])
    for view in (
        cut,
        cut.select(["a", "ccc", "b"]).select([2, 0, 1]),
        pickle.loads(pickle.dumps(cut)),  # noqa: S301
    ):
        assert list(view) == ["b", "a", "ccc"]
        assert view.lengths("fbank").tolist() == [2, 1, 1]
        assert view.find(["ccc", id_of(9)]).tolist() == [2, -1]
        np.testing.assert_array_equal(view.read("b", "fbank"), arrays[id_of(9)]["fbank"][1:3])
        np.testing.assert_array_equal(view.read("b", "fbank", 1), arrays[id_of(9)]["fbank"][2:3])
        with pytest.raises(ConfigError, match="feature 'units' cannot be cut in seconds"):
            view.read("ccc", "units")
        batch = view.read_batch(["a", "b"], "fbank")
        np.testing.assert_array_equal(batch.data[1], arrays[id_of(9)]["fbank"][1:3])
        with pytest.raises(
            featcache.errors.WindowError, match=r"'b', .* frames 1 to 3 are not within"
        ):
            view.read("b", "fbank", 1, 3)
        assert view.digest == cut.digest != table.select(rows[1:]).digest
    with pytest.raises(KeyNotFoundError, match=f"'{id_of(9)}' in this view of 3"):
        cut.read(id_of(9), "fbank")
    with pytest.raises(ConfigError, match="join takes no segments"):
        featcache.join(cut)


def test_views_are_joined_by_id_and_keep_the_order_of_the_first(tmp_path: Path) -> None:
    ids = [f"{'u' * (n % 4 + 1)}{n}" for n in range(12)]
    caches = [
        write_one(tmp_path / name, order, FeatureStorageConfig(name), width)
        for name, order, width in (("x", ids, 3), ("y", ids[::-1], 2))
    ]
    x, y = map(FeatureTable.of, caches)
    halves = featcache.concat(
        write_one(tmp_path / "z1", ids[:7], FeatureStorageConfig("z")),
        write_one(tmp_path / "z2", ids[7:], FeatureStorageConfig("z")),
    )
    joined = featcache.join(x, y)
    assert joined.selection.row_map is None
    assert all(member.rows is None for member in joined.selection.blocks.blocks[0].members)
    for first, others, order in (
        (x.select(ids[3:]), [y.select(ids[:2:-1])], ids[3:]),
        (y.select(ids[::-1]), [x, halves], ids[::-1]),
        (halves.select(ids[5:9]), [x.select(ids[5:9]), y.select(ids[8:4:-1])], ids[5:9]),
        (halves.select([]), [x.select([])], []),
    ):
        table = featcache.join(first, *others)
        assert list(table) == order
        for id in order:
            for name, array in table[id].items():
                np.testing.assert_array_equal(array, len(id), err_msg=name)
                assert len(array) == len(id)
        assert table.rows(order).tolist() == list(range(len(order)))
        assert [table.lengths(name).tolist() for name in table.features] == [
            [len(id) for id in order]
        ] * len(table.features)
    with pytest.raises(ConfigError, match=r"need the same ids, but 'u0' is in '.*y' \(12 .*\(11\)"):
        featcache.join(x.select(ids[1:]), y)
    with pytest.raises(ConfigError, match=r"'uu1' is in '.*x' \(1 utterances\) and not in '.*y'"):
        featcache.join(x.select(["uu1"]), y.select(["u0"]))


def test_views_are_concatenated_unless_they_share_an_id(
    cache: featcache.Cache, several: FeatureTable
) -> None:
    table = cache.table
    ids = list(cache)
    again = featcache.concat(table.select(ids[20:]), table.select(ids[:3]), table.select([7, 5]))
    assert_is(again, [*ids[20:], *ids[:3], ids[7], ids[5]])
    assert len(again.selection.blocks.blocks) == 1
    mixed = featcache.concat(table.select([id_of(20)]), several.select([id_of(9), id_of(3)]))
    assert_is(mixed, [id_of(20), id_of(9), id_of(3)])
    assert len(mixed.selection.blocks.blocks) == 4
    with pytest.raises(ConfigError, match=f"'{id_of(3)}' is in '.*' and in '.*'"):
        featcache.concat(table.select([id_of(3)]), several)
    with pytest.raises(ConfigError, match="is in"):
        featcache.concat(cache, cache)


def test_a_cache_with_views_closes_itself(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(5)))
    opened = weakref.ref(cache.opened)
    view = cache.table.select([1])
    assert view.ids == [cache.table.id(1)]
    del cache, view
    assert opened() is None


@pytest.mark.parametrize("view", [False, True])
def test_a_table_stays_as_it_is_when_its_cache_is_refreshed(tmp_path: Path, view: bool) -> None:
    cache = featcache.open(make_cache(tmp_path / "cache", range(30)))
    ids = list(cache)
    table = cache.table.select(ids[::-1]) if view else cache.table
    ids = list(table)
    stats = [cache.table.stats("fbank"), cache.table.select(ids[:9]).stats("fbank")]
    cache.delete([min(ids), id_of(13)])
    cache.annotate({id_of(5): {"speaker": "anna"}})
    make_cache(tmp_path / "cache", range(30, 40))
    cache.refresh()
    assert table.path == cache.path
    assert len(cache) == 38
    assert not table.annotations
    assert table.find([min(ids), id_of(30)]).tolist() == [ids.index(min(ids)), -1]
    assert_is(table, ids)
    assert_is(featcache.concat(table.select(ids[:9]), table.select(ids[9:])), ids)
    for found, expected in zip((table, table.select(ids[:9])), stats, strict=True):
        assert found.stats("fbank").count == expected.count
    assert cache.table.annotation("speaker")[cache.table.rows([id_of(5)])[0]] == "anna"


def test_a_table_of_a_refreshed_cache_is_pickled_as_it_is(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path / "cache", range(30)))
    table = cache.table
    ids = list(table)
    cache.delete([id_of(13)])
    cache.refresh()
    assert_is(pickle.loads(pickle.dumps(table)), ids)  # noqa: S301
