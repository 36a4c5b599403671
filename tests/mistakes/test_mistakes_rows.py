"""Each of the 135 mistakes has a test, or a reason why it has none.

A test covers the rows of the table whose numbers begin its name (`test_17_18_...`,
`test_92_to_96_...`) or one of its ids (`"17-a-feature-called-id"`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
ROWS = 135
NUMBERS = re.compile(r"(?:test_)?(\d{2,3}(?:(?:_to_|[-_])\d{2,3})*)[-_ ][a-zA-Z]")

ELSEWHERE = {  # what takes processes, jobs, small disks or time: the tests that do it
    73: (
        "store/writing/test_unclosed_writers.py::"
        "test_a_script_that_forgets_to_close_has_stored_everything"
    ),
    80: "store/writing/test_forked_writers.py::test_a_pool_of_forked_children_is_refused",
    81: (
        "store/writing/test_forked_writers.py::"
        "test_a_cache_writer_refuses_in_a_forked_child_and_goes_on_in_its_own_process"
    ),
    88: "store/writing/test_store_full_disk.py::test_what_is_committed_survives_a_full_disk",
    89: "store/test_store_kill.py::test_a_killed_writer_goes_on_where_it_was",
    91: "extraction/test_parallel_stopping.py::test_ctrl_c_ends_workers_that_hang",
    110: "extraction/test_parallel_faults.py::test_an_utterance_that_kills_its_worker_is_set_aside",
    114: "cluster/test_client.py::test_a_script_without_a_guard_is_told_so",
    135: (
        "store/test_other_systems.py::test_caches_are_written_and_read_without_what_linux_alone_has"
    ),
}
WITHOUT = dict.fromkeys(range(117, 123), "changes that are not noticed yet: an issue of their own")


def rows_of(text: str) -> Iterator[int]:
    """Iterate over the rows that begin a name or an id."""
    found = NUMBERS.match(text)
    for part in re.split(r"(?<!to)[-_](?!to)", found[1]) if found else ():
        first, _, last = part.partition("_to_")
        yield from range(int(first), int(last or first) + 1)


def names_and_ids(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name
        elif isinstance(node, ast.Tuple) and node.elts:
            yield from _text(node.elts[0])
        elif isinstance(node, ast.keyword) and node.arg == "id":
            yield from _text(node.value)


def _text(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def test_rows_are_read_off_names_and_ids() -> None:
    assert list(rows_of("test_17_18_names")) == [17, 18]
    assert list(rows_of("test_92_to_94_results")) == [92, 93, 94]
    assert list(rows_of("40-batch-axis")) == list(rows_of("40 batch axis")) == [40]
    assert list(rows_of("test_names_of_3_rows")) == list(rows_of("2026-11-22")) == []


def test_each_row_has_a_test_or_a_reason() -> None:
    texts = [text for path in HERE.glob("test_*.py") for text in names_and_ids(path)]
    covered = {row for text in texts for row in rows_of(text)}
    assert covered <= set(range(1, ROWS + 1))
    missing = set(range(1, ROWS + 1)) - covered - ELSEWHERE.keys() - WITHOUT.keys()
    assert not missing, sorted(missing)
    assert not covered & WITHOUT.keys()


@pytest.mark.parametrize("row", ELSEWHERE)
def test_the_tests_elsewhere_are_there(row: int) -> None:
    path, _, name = ELSEWHERE[row].partition("::")
    assert f"def {name}(" in (TESTS / path).read_text()
