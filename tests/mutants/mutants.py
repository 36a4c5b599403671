"""Mutants: small mistakes put into the library, one at a time, to see whether a test notices.

`mutants.py map MAP` runs tests once and notes which of them execute each line. `mutants.py run MAP
LIST` draws mutants by a seed and gives each to the fastest tests that execute its line, in a fork
in which one function has other code: what runs in new interpreters is not asked. Further arguments
are pytest's. The list has a line a mutant: place, mistake, and what became of it; those that a list
of before calls killed are not asked again.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("format", "reading", "writing", "tables", "extraction", "staleness", "store.py")
SEED, COUNT = 24, int(os.environ.get("FEATCACHE_MUTANTS", "300"))
TESTS, TESTS_S, LIMIT_S = 120, 10.0, 40.0  # for one mutant: tests, their seconds, the end

SWAPS: list[tuple[type[ast.AST], type[ast.AST]]]
SWAPS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)]
SWAPS += [(ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or)]
SWAPS += [(ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr)]
OTHER: dict[type[ast.AST], type[ast.AST]] = {a: b for pair in SWAPS for a, b in (pair, pair[::-1])}
OTHER |= {ast.Div: ast.Mult, ast.Mod: ast.Add}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One mistake: where it is, in words, and the source of the file with it."""

    file: str
    line: int
    function: str
    words: str
    source: bytes


def other(op: ast.AST) -> Any:
    return OTHER[type(op)]()


def expressions(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name of each mistake in an expression, and the text with it."""
    match node:
        case ast.Compare(left, [op, *ops], right) if type(op) in OTHER:
            yield "comparison", ast.unparse(ast.Compare(left, [other(op), *ops], right))
        case ast.BoolOp(op, values):
            yield "boolean", ast.unparse(ast.BoolOp(other(op), values))
        case ast.BinOp(left, op, right) if type(op) in OTHER:
            yield "arithmetic", ast.unparse(ast.BinOp(left, other(op), right))
        case ast.Constant(bool() as value):
            yield "constant", str(not value)
        case ast.Constant(int() | float() as value):
            yield "constant", str(value + 1)
            yield "constant", str(value - 1)
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", ast.unparse(operand)
        case ast.Name(name, ast.Load()) if name in NAMES:
            yield "name", NAMES[name]


def mistakes(node: ast.AST) -> Iterator[tuple[Any, str, str]]:
    """Yield each mistake in a node: what it replaces, its name, the text in its place."""
    yield from ((node, name, f"({text})") for name, text in expressions(node))
    match node:
        case ast.If(test) | ast.IfExp(test) if not isinstance(test, ast.Constant):
            yield test, "condition", "(True)"
            yield test, "condition", "(False)"
        case ast.comprehension(ifs=[test]):
            yield test, "condition", "(True)"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield node, "statement", "pass"
        case ast.Return(value) if value and ast.unparse(value) not in {"None", "False"}:
            yield node, "return", "return None"


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function does: no annotations, decorators or texts."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in {"annotation", "returns", "decorator_list"} or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from inside(child)


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield within + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{within}{node.name}.")


def mutants_of(file: str) -> Iterator[Mutant]:
    source = (ROOT / file).read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    for function, tree in functions(ast.parse(source)):
        for place, kind, text in (found for node in inside(tree) for found in mistakes(node)):
            begin = begins[place.lineno - 1] + place.col_offset
            end = begins[place.end_lineno - 1] + place.end_col_offset
            was = " ".join(source[begin:end].decode().split())
            words = f"{file}:{place.lineno}:{place.col_offset} {kind}: {was} -> {text}"
            changed = source[:begin] + text.encode() + source[end:]
            yield Mutant(file, place.lineno, function, words, changed)


def draw(seed: int = SEED, count: int = COUNT) -> list[Mutant]:
    """Draw of all mutants; more of them begin with the same ones."""
    house = ROOT / "featcache"
    files = (sorted(house.glob(f"{place}/*.py")) or [house / place] for place in PLACES)
    paths = [str(path.relative_to(ROOT)) for group in files for path in group]
    every = [mutant for path in paths for mutant in mutants_of(path)]
    random.Random(seed).shuffle(every)
    return every[:count]


class Map:
    """A plugin: which tests that pass execute each line, and how long each takes."""

    def __init__(self, path: Path) -> None:
        import coverage

        house = str(ROOT / "featcache" / "*")
        self.cov = coverage.Coverage(data_file=None, config_file=False, include=[house])
        self.path, self.seconds = path, dict[str, float]()
        self.cov.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.cov.switch_context(item.nodeid)
        begin, self.seconds[item.nodeid] = time.monotonic(), 0.0
        result = yield
        if item.nodeid in self.seconds:
            self.seconds[item.nodeid] = time.monotonic() - begin
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.seconds.pop(report.nodeid, None)

    def pytest_sessionfinish(self) -> None:
        self.cov.stop()
        data, numbers = self.cov.get_data(), {name: n for n, name in enumerate(self.seconds)}
        lines = {
            str(Path(file).relative_to(ROOT)): {
                line: [numbers[test] for test in tests if test in numbers]
                for line, tests in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        self.path.write_text(json.dumps({"tests": list(self.seconds.items()), "lines": lines}))


class Run:
    """A plugin: the tests that are collected meet the mutants, instead of the library."""

    def __init__(self, path: Path, list: Path) -> None:
        self.list = list
        self.maps = [json.loads(each.read_text()) for each in path.parent.glob(path.name)]
        self.failed = ""

    def tests(self, mutant: Mutant, items: dict[str, pytest.Item]) -> list[pytest.Item]:
        """List the tests of a line: each function once before one twice, the fast ones first."""
        found = {
            name: seconds
            for each in self.maps
            for number in each["lines"].get(mutant.file, {}).get(str(mutant.line), [])
            for name, seconds in [each["tests"][number]]
            if name in items
        }
        times: Counter[str] = Counter()
        ranked = []
        for name, seconds in sorted(found.items(), key=lambda pair: pair[::-1]):
            times[name.partition("[")[0]] += 1
            ranked.append((times[name.partition("[")[0]], seconds, name))
        chosen, total = list[pytest.Item](), 0.0
        for _, seconds, name in sorted(ranked)[:TESTS]:
            if not chosen or total + seconds <= TESTS_S:
                chosen.append(items[name])
                total += seconds
        return chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        mutants, items = draw(), {item.nodeid: item for item in session.items}
        for file in {mutant.file for mutant in mutants}:
            import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        known = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is types.FunctionType:
                known[each.__code__.co_filename, each.__code__.co_qualname].append(each)
        before = self.list.read_text().splitlines() if self.list.exists() else []
        killed = dict(line.rsplit(" | ", 1) for line in before if " | killed" in line)
        counts: Counter[str] = Counter()
        with self.list.open("w") as lines:
            for mutant in mutants:
                tests = self.tests(mutant, items)
                found = known[str(ROOT / mutant.file), mutant.function]
                if not (became := killed.get(mutant.words, "")):
                    became = self.outcome(mutant, found, tests) if tests and found else "unreached"
                counts[became.split()[0].strip(":")] += 1
                print(f"{mutant.words} | {became}", file=lines, flush=True)
        print(*(f"{count} {became}" for became, count in counts.items()), sep=", ")
        return True

    def outcome(self, mutant: Mutant, found: list[Any], tests: list[pytest.Item]) -> str:
        """Run tests against a mutant in a fork: what became of it, and the test that noticed."""
        folder = Path(tempfile.mkdtemp())
        if not (child := os.fork()):
            try:
                self.in_child(folder, mutant, found, tests)
            except Exception as error:  # as of a function that cannot have this code
                (folder / "said").write_text(f"unreached: {error!r}")
            finally:
                os._exit(0)
        end = time.monotonic() + LIMIT_S
        while not (done := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < end:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not done:
            os.waitpid(child, 0)
        said = (folder / "said").read_text() if (folder / "said").exists() else "killed the process"
        shutil.rmtree(folder, ignore_errors=True)
        return said if done else "killed after its time"

    def in_child(
        self, folder: Path, mutant: Mutant, found: list[Any], tests: list[pytest.Item]
    ) -> None:
        os.setsid()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        path = str(ROOT / mutant.file)
        codes = [compile(mutant.source, path, "exec", dont_inherit=True)]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        same = [each for each in codes if each.co_qualname == mutant.function]  # overloads, setters
        above = [each for each in same if each.co_firstlineno <= mutant.line]
        code = max(above, key=lambda each: each.co_firstlineno)
        for function in found:
            if function.__code__.co_firstlineno == code.co_firstlineno:
                function.__code__ = code
        for item in tests:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failed:
                break
        (folder / "said").write_text(f"killed by {self.failed}" if self.failed else "survived")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background of a shell
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of torch do not outlive a fork
    verb, file, *arguments = sys.argv[1:]
    plugin = Map(Path(file)) if verb == "map" else Run(Path(file), Path(arguments.pop(0)))
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[plugin]))
