"""What a writer is given and a reader asked: bad input is an error that says what and where, and
costs nothing.
"""

from __future__ import annotations

import re
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    check_cache,
    id_of,
    make_cache,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import (
    ClosedError,
    DuplicateIdError,
    FeatureError,
    KeyNotFoundError,
    WindowError,
)

FRAMES = np.zeros((3, 4), np.float32)


def expect_refused(tmp_path: Path, id: Any, arrays: Any, message: str) -> None:
    """Expect a `FeatureError` with `message`, and that the writer goes on as if nothing had been
    given.
    """
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("fbank")]) as writer:
        with pytest.raises(FeatureError, match=message):
            writer.write(id, arrays)
        assert writer.bytes_written == 0
        writer.write("good", {"fbank": np.ones((2, 5), np.float32)})
    assert featcache.open(tmp_path / "cache", verify="arrays").read("good", "fbank").shape == (2, 5)


@pytest.mark.parametrize("id", ["", "a\0b", "\ud800", None, 7, b"utt"])
def test_an_id_that_is_no_text_is_refused(tmp_path: Path, id: object) -> None:
    expect_refused(tmp_path, id, {"fbank": FRAMES}, r"utterance id .*" + re.escape(repr(id)))


@pytest.mark.parametrize(
    "id",
    [
        "a",
        "a/b",
        "a/b/",
        "..",
        "../../x",
        "a.b.c",
        " ",
        "\n",
        "😀",
        "é",
        "e\u0301",
        "ABC",
        "%2F",
        "x" * 70_000,
        ".",
        "a\nb",
    ],
)
def test_any_other_id_is_kept_as_it_is(tmp_path: Path, id: str) -> None:
    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("fbank")]) as writer:
        for other in {"a", "a/b", "é", "e\u0301", "ABC", "abc", id}:
            writer.write(other, {"fbank": np.full((2, 4), len(other), np.float32)})
    cache = featcache.open(tmp_path / "cache", verify="arrays")
    assert cache.read(id, "fbank").tolist() == np.full((2, 4), len(id)).tolist()
    assert id in list(cache)


def test_a_mapping_of_another_kind_is_as_good_as_a_dict(tmp_path: Path) -> None:
    class Listed(UserDict[str, np.ndarray]):
        def keys(self) -> list[str]:  # type: ignore[override]
            return list(self.data)

    with CacheWriter(tmp_path / "cache", [FeatureStorageConfig("fbank")]) as writer:
        writer.write("utt-1", Listed(fbank=FRAMES))
    assert len(featcache.open(tmp_path / "cache")) == 1


@pytest.mark.parametrize("arrays", [FRAMES, [FRAMES], None, "fbank"])
def test_something_else_than_a_dict_is_refused(tmp_path: Path, arrays: object) -> None:
    expect_refused(tmp_path, "utt-1", arrays, r"utterance 'utt-1': a dict .* is needed, not")


def test_a_feature_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    expect_refused(tmp_path, "utt-1", {7: FRAMES}, r"utterance 'utt-1': feature 7 is not declared")


def test_another_feature_dimension_than_before_is_refused_and_named(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        writer.write("utt-1", {"fbank": FRAMES})
        for wrong in (
            np.zeros((3, 5), np.float32),
            np.zeros(4, np.float32),
            np.zeros((3, 4, 1), np.float32),
        ):
            with pytest.raises(
                FeatureError,
                match=r"utterance 'utt-2', feature 'fbank': .*those before have \(4,\)",
            ):
                writer.write("utt-2", {"fbank": wrong})
        writer.write("utt-2", {"fbank": FRAMES})
    assert list(featcache.open(tmp_path)) == ["utt-1", "utt-2"]


def test_the_feature_dimension_of_an_earlier_run_binds_the_next(tmp_path: Path) -> None:
    make_cache(tmp_path, [1])
    with (
        CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer,
        pytest.raises(
            FeatureError, match=r"'fbank': frames have shape \(5,\), those before have \(4,\)"
        ),
    ):
        writer.write("utt-2", {"fbank": np.zeros((3, 5)), "units": np.zeros(1, np.int16)})


def test_a_refused_first_utterance_binds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
            with pytest.raises(featcache.FeatcacheError, match="0 bytes are free"):
                writer.write("utt-1", {"fbank": np.zeros((3, 9), np.float32)})
        writer.write("utt-1", {"fbank": FRAMES})
    assert featcache.open(tmp_path).read("utt-1", "fbank").shape == (3, 4)


def test_an_id_given_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(5))
        with pytest.raises(
            DuplicateIdError, match=rf"{id_of(3)!r} was given twice: as number 3 and as number 5"
        ):
            write(writer, [3])
        writer.publish()
        with pytest.raises(
            DuplicateIdError, match=rf"{id_of(3)!r} was given as number 5 .* stored in .* already"
        ):
            write(writer, [3])
    check_cache(tmp_path, range(5))


def test_an_id_of_an_earlier_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        assert id_of(2) in writer
        assert id_of(3) not in writer
        with pytest.raises(
            DuplicateIdError, match=rf"{id_of(2)!r}.*number 0 .*{re.escape(str(tmp_path))}.*skip it"
        ):
            write(writer, [2])
        write(writer, [3])
    check_cache(tmp_path, range(4))


def test_an_unknown_id_is_answered_with_the_nearest(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(30)))
    for call in (
        lambda: cache.read("spk1/utt-88", "fbank"),
        lambda: cache["spk1/utt-88"],
        lambda: cache.read_batch([id_of(1), "spk1/utt-88"], "fbank"),
        lambda: cache.lengths("fbank", ids=["spk1/utt-88"]),
        lambda: cache.reader("fbank")("spk1/utt-88"),
        lambda: cache.reader("fbank").lengths(["spk1/utt-88"]),
    ):
        with pytest.raises(
            KeyNotFoundError,
            match=rf"no utterance 'spk1/utt-88' in .*; nearest ids: .*{id_of(8)!r}",
        ):
            call()
    assert "spk1/utt-88" not in cache


def test_nearest_ids_are_found_quickly_among_many_long_ones(tmp_path: Path) -> None:
    ids = [f"{'corpus/' * 40}{number:06d}" for number in range(10_500)]
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        for id in ids:
            writer.write(id, {"fbank": np.zeros(0, np.float32)})
    cache = featcache.open(tmp_path)
    with pytest.raises(KeyNotFoundError, match=f"nearest ids: .*{ids[777]!r}"):
        cache.read(ids[777] + "x", "fbank")


def test_an_id_that_is_no_text_is_no_id_of_a_cache(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(3)))
    for id in (7, None, b"a", ("a",)):
        wrong = cast(str, id)
        assert wrong not in cache
        for call in (
            lambda: cache.read(wrong, "fbank"),  # noqa: B023
            lambda: cache.read_batch([wrong], "fbank"),  # noqa: B023
        ):
            with pytest.raises(
                KeyNotFoundError, match=rf"utterance ids are strings, not {re.escape(repr(id))}"
            ):
                call()
    with pytest.raises(KeyNotFoundError, match="no utterance"):
        cache.read("\ud800", "fbank")


def test_an_unknown_feature_is_answered_with_the_nearest(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, range(3)))
    for call in (
        lambda: cache.read(id_of(1), "fbnak"),
        lambda: cache.lengths("fbnak"),
        lambda: cache.stats("fbnak"),
        lambda: cache.dtype("fbnak"),
        lambda: cache.reader("fbnak"),
        lambda: cache.read_batch([], "fbnak"),
        lambda: featcache.FeatureReader(tmp_path, "fbnak")(id_of(1)),
    ):
        with pytest.raises(
            KeyNotFoundError, match=r"no feature 'fbnak' in cache .*did you mean 'fbank'\?"
        ):
            call()


@pytest.mark.parametrize(
    ("start", "stop"), [(-1, 2), (3, 2), (0, 11), (11, None), (None, -1), (0, 2**70)]
)
@pytest.mark.parametrize("mapped", [True, False])
def test_a_window_outside_of_the_utterance_is_refused(
    tmp_path: Path, start: int | None, stop: int | None, mapped: bool
) -> None:
    cache = featcache.open(make_cache(tmp_path, [2]), mapped=mapped)
    with pytest.raises(
        WindowError, match=rf"utterance {id_of(2)!r}, feature 'fbank': frames .* not within 0 to 10"
    ):
        cache.read(id_of(2), "fbank", start, stop)


def test_every_window_of_an_utterance_is_its_slice(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path, [2]))
    whole = arrays_of(2)["fbank"]
    for start in (None, *range(11)):
        for stop in (None, *range(start or 0, 11)):
            np.testing.assert_array_equal(
                cache.read(id_of(2), "fbank", start, stop), whole[start:stop], strict=True
            )


def test_a_closed_writer_refuses_to_go_on(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    write(writer, range(3))
    writer.close()
    expectations = (lambda: writer.expect(["a"]), lambda: writer.expect_more(3))
    for call in (lambda: write(writer, [4]), writer.commit, writer.publish, *expectations):
        with pytest.raises(
            ClosedError, match=rf"the writer of '{re.escape(str(tmp_path))}' is closed"
        ):
            call()
    writer.close()
    writer.close(complete=False)
    writer.abort()
    check_cache(tmp_path, range(3))


def test_an_aborted_writer_publishes_nothing_at_the_end_of_its_block(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    before = featcache.open(tmp_path).generation
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(3, 9))
        writer.abort()
    assert featcache.open(tmp_path).generation == before
    check_cache(tmp_path, range(3))
    assert len(list((tmp_path / "parts").iterdir())) == 1


def test_a_new_cache_of_an_aborted_writer_is_empty_and_incomplete(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(9))
        writer.commit()
        writer.abort()
    cache = featcache.open(tmp_path, verify="arrays")
    assert (len(cache), cache.complete) == (0, False)
    make_cache(tmp_path, range(9))
    check_cache(tmp_path, range(9))


def test_an_error_in_the_block_keeps_what_was_written_as_incomplete(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer,
    ):
        write(writer, range(6))
        raise ZeroDivisionError
    check_cache(tmp_path, range(6), complete=False)
    make_cache(tmp_path, range(6, 8))
    check_cache(tmp_path, range(8))


def test_the_callers_array_may_change_as_soon_as_write_returns(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        for number in range(40):
            arrays = arrays_of(number)
            writer.write(id_of(number), arrays)
            for array in arrays.values():
                array.fill(99)
    check_cache(tmp_path, range(40))
