"""Claims on utterances: who has one, who gets it next, and what is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from featcache.errors import CorruptCacheError
from featcache.lazy.share import HOME, Claims


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Claims, Claims]]:
    one, other = Claims(tmp_path), Claims(tmp_path)
    yield one, other
    one.close()
    other.close()


def test_the_first_one_has_it_and_the_other_is_told_whose_it_is(
    pair: tuple[Claims, Claims],
) -> None:
    one, other = pair
    assert one.take("utt-1") is None
    assert one.take("utt-1") is None
    assert other.take("utt-1") is not None
    assert other.take("utt-2") is None
    assert one.take("utt-2") is not None


def test_what_is_given_up_goes_to_the_next_who_asks(pair: tuple[Claims, Claims]) -> None:
    one, other = pair
    assert one.take("utt-1") is None
    one.give_up("utt-1")
    assert other.take("utt-1") is None
    assert one.take("utt-1") is not None


def test_who_is_waited_for_no_more_has_nothing(pair: tuple[Claims, Claims]) -> None:
    one, other = pair
    assert one.take("utt-1") is None
    holder = other.take("utt-1")
    assert holder is not None
    other.wait_no_more(holder)
    assert other.take("utt-1") is None


def test_closing_gives_up_all_and_the_last_one_leaves_nothing(tmp_path: Path) -> None:
    one, other = Claims(tmp_path), Claims(tmp_path)
    assert one.take("utt-1") is None
    one.close()
    assert other.take("utt-1") is None
    other.close()
    assert not [*tmp_path.iterdir()]


def test_a_record_cut_short_or_senseless_is_passed_over(tmp_path: Path) -> None:
    one = Claims(tmp_path)
    assert one.take("utt-1") is None
    with (tmp_path / HOME / "claims").open("ab") as file:
        file.write(os.urandom(16 * 7 + 5))
    other = Claims(tmp_path)
    assert other.take("utt-2") is None
    other.close()
    one.close()


def test_others_files_are_never_removed_and_links_not_followed(tmp_path: Path) -> None:
    cache, theirs = tmp_path / "cache", tmp_path / "theirs"
    (theirs / "0123456789abcdef").mkdir(parents=True)
    (theirs / "notes.txt").write_text("mine")
    cache.mkdir()
    (cache / HOME).symlink_to(theirs)
    with pytest.raises(CorruptCacheError, match="is a link or no directory"):
        Claims(cache)
    (cache / HOME).unlink()
    claims = Claims(cache)
    (cache / HOME / "notes.txt").write_text("mine")
    (cache / HOME / "0123456789abcdef").symlink_to(theirs)
    claims.close()
    assert sorted(path.name for path in theirs.iterdir()) == ["0123456789abcdef", "notes.txt"]
    assert (cache / HOME / "notes.txt").read_text() == "mine"
