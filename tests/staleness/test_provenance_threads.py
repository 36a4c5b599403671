"""Reading the code of a `compute_features` while other threads do what they like."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest

from featcache.staleness import code
from featcache.staleness.code import PARSE_TRIES
from featcache.staleness.provenance import Provenance, provenance

PARSE = ast.parse
MISMATCH = "AST constructor recursion depth mismatch (before=45, after=51)"  # CPython's text


class Extractor:
    modules = MappingProxyType[str, Any]({})

    def compute_features(self, batch: Any, stage: Any) -> Any:
        return [batch, stage]


def found_in(extractor: Any) -> Provenance:
    code._on_disk.cache_clear()  # read the file again
    return provenance(extractor.compute_features, extractor)


def constants(found: Provenance) -> Any:
    held = found.fingerprint({}).get("constants", {})
    assert isinstance(held, dict)
    return {name: value for values in held.values() for name, value in values.items()}


def failing(times: int, text: str) -> Any:
    """A parser that fails so many times."""
    left = iter(range(times))

    def parse(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is not None:
            raise SystemError(text)
        return PARSE(*args, **kwargs)

    return parse


def test_a_parse_that_another_thread_has_spoilt_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = found_in(Extractor()).source
    monkeypatch.setattr(ast, "parse", failing(3, MISMATCH))
    assert found_in(Extractor()).source == before


@pytest.mark.parametrize(("times", "text"), [(PARSE_TRIES, MISMATCH), (1, "something else")])
def test_another_error_of_the_parser_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, times: int, text: str
) -> None:
    monkeypatch.setattr(ast, "parse", failing(times, text))
    with pytest.raises(SystemError, match=text[:20]):
        found_in(Extractor())


@pytest.fixture
def parsing_threads() -> Iterator[None]:
    """Threads of another library, which parse all the time."""
    stop = threading.Event()

    def parse() -> None:
        while not stop.is_set():
            try:
                PARSE("x = [((((((1,),),),),),)]\n" * 20)
            except SystemError:  # theirs to mend
                continue

    threads = [threading.Thread(target=parse) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("parsing_threads")
def test_the_source_is_the_same_whatever_other_threads_parse() -> None:
    assert len({found_in(Extractor()).source["Extractor.compute_features"] for _ in range(40)}) == 1


def test_a_variable_that_is_not_bound_yet_is_passed_over() -> None:
    def make() -> Any:
        class Early:
            modules = MappingProxyType[str, Any]({})

            def compute_features(self, batch: Any, stage: Any) -> Any:
                return gain * batch

        found = found_in(Early())
        gain = 2
        assert constants(found_in(Early())) == {"gain": gain}
        return found

    assert constants(make()) == {}
