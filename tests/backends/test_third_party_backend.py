from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from third_party_install import SOURCE, install, install_flat

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ConfigError, UnknownNameError
from featcache.interface import Array
from featcache.registry import BACKENDS, CODECS, codec_names, get_codec

THREE_LINES = """
from featcache.testing import BackendContract
class TestFlat(BackendContract):
    backend = "flat"
"""

# asks the format's own library, too
NATIVE = """
from pathlib import Path
import numpy as np
from featcache.testing import BackendContract

class FlatContract(BackendContract):
    def read_natively(self, directory, feature, extents):
        from flat_format import read_flat
        arrays = {}
        for id, (rows, blocks) in read_flat(directory / f"{feature.name}.flat").items():
            if feature.codec is not None:
                dtype, dims = feature.storage_dtype, feature.dims
                blocks = [
                    feature.codec.decode(memoryview(block), dtype, dims, 100).tobytes()
                    for block in blocks
                ]
            numbers = np.frombuffer(b"".join(blocks), feature.storage_dtype)
            arrays[id] = numbers.reshape(feature.shape(rows))
        return arrays
"""

RIGHT_CLOSE = """        self._file.append(tail(self._table))
"""
FINISHED = "test_finished_files_are_those_of_a_closed_writer"
RIGHT_FINISH = "            with open_left(directory, path, end) as file:\n"
APPENDED = "extents = tuple(self._append(block) for block in array.blocks)\n"
BOUNDED = """            octets = stream.decompress(data, most + 1)
            if len(octets) > most or not stream.eof:
"""
NATIVELY = "test_the_formats_own_library_reads_it"
FLUSHED = "test_what_was_flushed_survives_a_power_cut"
CLOSED = "test_what_was_closed_survives_a_power_cut"
LONG_IDS = "test_an_id_that_the_format_cannot_hold_is_refused_before"

# what a backend could do wrong: the right code, the wrong one, tests that must notice
MISTAKES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "Shifted": (
        "self._file.append(block), len(block)",
        "self._file.append(block) + 1, len(block)",
        (
            "test_every_dtype_is_read_back_bit_for_bit",
            "test_extents_hold_the_written_bytes",
            NATIVELY,
        ),
    ),
    "Unflushed": ("        self._file.flush()\n", "        pass\n", (FLUSHED,)),
    "Unclosed": ("        self._file.close()\n", "        self._file.abort()\n", (CLOSED,)),
    "Unnamed": (
        """        self._name = f"{name}.flat"\n""",
        """        self._name = f"flat/{name}.flat"; (directory / "flat").mkdir(exist_ok=True)\n""",
        (FLUSHED, CLOSED),
    ),
    "Unfinished": (RIGHT_CLOSE, "", (NATIVELY,)),
    "Misshapen": ("entry(array.rows, ", "entry(array.rows + 1, ", (NATIVELY,)),
    "Uncut": ("end_file(file, end, ", "end_file(file, file.seek(0, 2), ", (FINISHED,)),
    "Unsynced": (
        "end_file(file, end, tail(table))",
        "file.seek(end); file.write(tail(table)); file.truncate()",
        ("test_finished_files_survive_a_power_cut",),
    ),
    "Following": (
        "open_left(directory, path, end)",
        "(directory / path).open('r+b', buffering=0)",
        ("test_finishing_changes_nothing_outside_of_its_directory",),
    ),
    "Credulous": (
        "raise misplaced(id)",
        "pass",
        ("test_files_that_are_not_those_of_the_writer_are_refused",),
    ),
    "Destructive": (
        RIGHT_FINISH,
        f"            data = (directory / path).read_bytes()\n{RIGHT_FINISH}"
        "                file.truncate(0); file.write(data)\n",
        ("test_finishing_goes_on_wherever_it_was_interrupted",),
    ),
    "Colliding": ("self._table[id]", "self._table[id.casefold()]", (NATIVELY,)),
    "Stumbling": (APPENDED, f"assert len(id) < 1 << 16\n        {APPENDED}", (LONG_IDS,)),
    "Cutting": ("self._table[id]", "self._table[id[:10_000]]", (LONG_IDS,)),
    "Paging": (
        "self._file.pages}",
        "self._file.pages + 1}",
        ("test_pages_are_those_of_the_files",),
    ),
    "Overlapping": (
        "self._file.append(block), len(block)",
        "self._file.append(block) // 2, len(block)",
        ("test_every_rank_is_read_back", "test_extents_do_not_overlap"),
    ),
    "FilePerId": (
        APPENDED,
        "extents = ()\n        Path(self._file._file.name).with_name(id).write_bytes(b'')\n",
        ("test_ids_are_any_text",),
    ),
    "Thawed": (
        "@dataclass(frozen=True)\nclass FlatBackend",
        "@dataclass\nclass FlatBackend",
        ("test_a_backend_is_made_of_its_options",),
    ),
    "Raising": (
        "        self._file.abort()\n",
        "        self._file.flush()\n",
        ("test_abort_never_raises",),
    ),
    "Wiping": (
        "        self._file.abort()\n",
        "        self._file._file.truncate(0)\n        self._file.abort()\n",
        ("test_an_aborted_writer_leaves_flushed_bytes_in_place",),
    ),
    "Impatient": (
        RIGHT_CLOSE,
        f"        assert self._table\n{RIGHT_CLOSE}",
        ("test_a_writer_without_arrays_closes_and_aborts",),
    ),
    "Meddling": (
        "return zlib.compress(block.tobytes(), self.level)",
        "block[:1] = 1; return zlib.compress(block.tobytes(), self.level)",
        ("test_a_codec_leaves_its_input_alone",),
    ),
    "Rounding": (
        "return zlib.compress(block.tobytes(), self.level)",
        "return zlib.compress(np.where(block > 3, block, 0).astype(block.dtype).tobytes(), "
        "self.level)",
        ("test_every_dtype_is_read_back_bit_for_bit",),
    ),
    "Moody": (
        "return zlib.compress(block.tobytes(), self.level)",
        "return zlib.compress(block.tobytes() + np.random.bytes(4), self.level)",
        ("test_the_same_block_gives_the_same_bytes",),
    ),
    "Trusting": (
        BOUNDED,
        "            octets = stream.decompress(data)\n            if not stream.eof:\n",
        (
            "test_a_block_holds_up_to_the_rows_that_it_may",
            "test_a_block_of_too_many_rows_takes_no_memory",
        ),
    ),
    "Late": (
        BOUNDED,
        BOUNDED.replace("data, most + 1", "data"),
        ("test_a_block_of_too_many_rows_takes_no_memory",),
    ),
    "Careless": (
        BOUNDED,
        BOUNDED.replace(" or not stream.eof", ""),
        ("test_bytes_of_anything_else_are_refused",),
    ),
    "Untyped": (
        "except (zlib.error, ValueError)",
        "except ZeroDivisionError",
        (
            "test_bytes_of_anything_else_are_refused",
            "test_a_damaged_block_is_refused_or_within_its_bounds",
        ),
    ),
    "Sharing": (
        "    alignment: int = 1\n",
        "    alignment: int = 1\n    level: int = 1\n",
        ("test_no_option_is_one_of_the_backend_too",),
    ),
}

WANTED = {f"Test{name}::{test}" for name, (_, _, tests) in MISTAKES.items() for test in tests}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines of a run of the contract: of a backend as a stranger tests it, of all mistakes."""
    site = tmp_path_factory.mktemp("site")
    install_flat(site)
    lines = [THREE_LINES, NATIVE, "class TestAsked(FlatContract):", "    backend = 'flat'"]
    for name, (right, wrong, _) in MISTAKES.items():
        assert SOURCE.count(right) == 1, name
        install_flat(site, name.lower(), SOURCE.replace(right, wrong))
        lines += [f"class Test{name}(FlatContract):", f"    backend = {name.lower()!r}"]
    (site / "test_flat.py").write_text("\n".join(lines))
    selected = (
        "TestFlat",
        f"TestAsked and {NATIVELY}",
        *(each.replace("::", " and ") for each in WANTED),
    )
    options = ["-q", "-rpfE", "--tb=line", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "test_flat.py", *options]
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    ended = subprocess.run(
        [*command, "-k", " or ".join(f"({each})" for each in selected)],
        cwd=site,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "500"},
        stdout=subprocess.PIPE,
        text=True,
    )
    return ended.stdout.splitlines()


def names_of(outcome: str, told: list[str]) -> Counter[str]:
    """Tests of this outcome, without their parameters: how many."""
    found = (re.match(rf"(?:{outcome}) test_flat\.py::(\w+::\w+)", line) for line in told)
    return Counter(each[1] for each in found if each)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_third_partys_backend_is_used_like_ours(site: Path) -> None:
    install_flat(site)
    assert "flat" in featcache.registry.backend_names()
    assert featcache.registry.get_backend("flat").codecs == ("raw", "squeeze")
    fbank = FeatureStorageConfig("fbank", backend="flat", options={"alignment": 64})
    tokens = FeatureStorageConfig(
        "tokens", "int64", backend="flat", codec="squeeze", options={"level": 9}
    )
    arrays: dict[str, Array] = {"fbank": np.ones((250, 3), np.float32), "tokens": np.arange(250)}
    with CacheWriter(site / "cache", [fbank, tokens]) as writer:
        writer.write("a/b", arrays)
    read = featcache.open(site / "cache")["a/b"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array, strict=True)


def test_declarations_with_a_third_partys_backend_are_checked_like_ours(site: Path) -> None:
    install_flat(site)
    with pytest.raises(
        UnknownNameError,
        match=r"backend 'flat' has no option 'alignmnet'; did you mean 'alignment'\?",
    ):
        FeatureStorageConfig("fbank", backend="flat", options={"alignmnet": 64})
    with pytest.raises(UnknownNameError, match="backend 'flat' has no codec 'lilcom'"):
        FeatureStorageConfig("fbank", backend="flat", codec="lilcom")


def test_three_lines_test_a_third_partys_backend(told: list[str]) -> None:
    passed, failed = names_of("PASSED", told), names_of("FAILED|ERROR", told)
    assert sum(name.startswith("TestFlat::") for name in passed) > 40, told
    assert not [name for name in failed if name.startswith("TestFlat::")], told


def test_the_formats_own_library_can_be_asked(told: list[str]) -> None:
    assert names_of("PASSED", told)[f"TestAsked::{NATIVELY}"] == 2
    assert f"TestAsked::{NATIVELY}" not in names_of("FAILED|ERROR", told)


def test_the_contract_notices_mistakes(told: list[str]) -> None:
    assert set(names_of("FAILED|ERROR", told)) == WANTED, told


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere_format:FlatBackend", "No module named 'nowhere_format'"),
        ("broken_format:BlatFackend", "has no attribute 'BlatFackend'"),
        ("unimportable_format:FlatBackend", "No module named 'libflat'"),
        ("failing_format:FlatBackend", "ZeroDivisionError"),
    ],
)
def test_a_broken_entry_point_is_named(site: Path, target: str, reason: str) -> None:
    broken = {
        "broken_format": SOURCE,
        "unimportable_format": "import libflat",
        "failing_format": "1 / 0",
    }
    install(site, "acme", {BACKENDS: {"acme": target}}, **broken)
    with pytest.raises(
        ConfigError, match=f"backend 'acme' is registered as '{target}', .* not load: .*{reason}"
    ):
        FeatureStorageConfig("fbank", backend="acme")
    assert FeatureStorageConfig("fbank", backend="memmap").codec == "raw"


DATACLASS = "import dataclasses\n@dataclasses.dataclass\nclass"


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("number", "FlatBackend = 3", "it lacks codecs, open_writer"),
        ("plain", "class FlatBackend: codecs = ('raw',); open_writer = None", "a frozen dataclass"),
        ("empty", f"{DATACLASS} FlatBackend: codecs = (); open_writer = None", "no codecs"),
    ],
)
def test_an_entry_point_to_something_else_is_named(
    site: Path, module: str, source: str, reason: str
) -> None:
    install(
        site,
        "acme",
        {BACKENDS: {"acme": f"{module}_format:FlatBackend"}},
        **{f"{module}_format": source},
    )
    with pytest.raises(ConfigError, match=f"backend 'acme' .*{reason}"):
        FeatureStorageConfig("fbank", backend="acme")


@pytest.mark.parametrize("group", [BACKENDS, CODECS])
def test_a_name_that_two_packages_register_is_an_error_that_names_both(
    site: Path, group: str
) -> None:
    for package in ("acme", "zenith"):
        install(site, package, {group: {"flat": f"{package}_format:Flat"}})
    assert "flat" in (featcache.registry.backend_names() if group == BACKENDS else codec_names())
    with pytest.raises(
        ConfigError,
        match=r"several packages register .* 'flat': acme_format:Flat, zenith_format:Flat",
    ):
        featcache.registry.get_backend("flat") if group == BACKENDS else get_codec("flat")
    assert FeatureStorageConfig("fbank", backend="memmap").codec == "raw"  # the others work


def test_a_package_that_is_found_twice_is_one(site: Path) -> None:
    for package in ("acme", "acme_again"):
        install(site, package, {BACKENDS: {"flat": "acme_format:FlatBackend"}}, acme_format=SOURCE)
    assert featcache.registry.get_backend("flat").__name__ == "FlatBackend"
