"""The command as a process: what it imports, pipes, interrupts, encodings, completion."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_runs import COMMAND, make, run
from command_runs import stored as stored

from featcache.cli import VERBS

LOADED = """
import json, sys
from featcache.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words, prog_name="featcache")
    except SystemExit as end:
        assert not end.code, (words, end.code)
print(*sys.modules, file=sys.stderr)
"""


def loaded_by(*commands: list[str]) -> set[str]:
    script = [sys.executable, "-c", LOADED, json.dumps(commands)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    return {*done.stderr.split()}


def test_verbs_that_look_import_nothing_that_writes(stored: Path) -> None:
    cache = str(stored)
    loaded = loaded_by(
        ["info", cache], ["ls", cache, "-q"], ["show", cache, "anna-0", "-q"], ["stats", cache],
        ["made-from", cache],
    )  # fmt: skip
    heavy = {"filelock", "torch", "tqdm", "rich", "featcache.writing", "importlib.metadata"}
    assert not loaded & heavy
    assert not [name for name in loaded if name.startswith("featcache.writing.")]


def test_help_imports_no_verb_and_no_numpy() -> None:
    loaded = loaded_by(["--help"])
    assert "numpy" not in loaded
    assert not [name for name in loaded if name.startswith("featcache.cli.")]


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_has_help_and_its_line(name: str) -> None:
    found = run(name, "--help", width=80)
    assert found.code == 0
    assert "--json" in found.out
    assert "--color" in found.out
    assert "--debug" in found.out
    assert "-q" in found.out
    assert max(map(len, found.out.splitlines())) <= 80
    assert VERBS[name][1] in run("--help", width=120).out


def test_an_unknown_verb_is_told_its_nearest() -> None:
    found = run("estimat")
    assert found.code == 2
    assert "did you mean 'estimate' or" in found.err


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    cache = make(tmp_path / "train", 3000)
    for words in (["ls"], ["ls", "--json"]):
        with subprocess.Popen(
            [*COMMAND, words[0], str(cache), *words[1:], "-n", "3000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 141


SLOW = """
import sys, time
import featcache.reading
from featcache.cli import main

def damage_of(*args, **kwargs):
    print("begun", flush=True)
    time.sleep(60)
    yield ""

featcache.reading.damage_of = damage_of
main(sys.argv[1:], prog_name="featcache")
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_an_interrupt_ends_a_long_verb(stored: Path) -> None:
    script = [sys.executable, "-c", SLOW, "verify", str(stored)]
    with subprocess.Popen(
        script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 130


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs_options_and_paths(shell: str) -> None:
    script = run(environment={"_FEATCACHE_COMPLETE": f"{shell}_source"}).out
    assert "_FEATCACHE_COMPLETE" in script
    for typed, expected in (
        ("featcache sh", "show"), ("featcache ls --wh", "--where"), ("featcache ls tra", "dir"),
        ("featcache diff a b", "dir"), ("featcache adopt kal", "file"),
    ):  # fmt: skip
        words, last = typed, typed.split()[-1]
        cursor = last if shell == "fish" else str(len(words.split()) - 1)
        asked = {"_FEATCACHE_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
        assert expected in run(environment={**asked, "COMP_CWORD": cursor}).out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_what_is_typed(stored: Path, tmp_path: Path) -> None:
    command = tmp_path / "featcache"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m featcache "$@"\n')
    command.chmod(0o755)
    typed = """
eval "$(_FEATCACHE_COMPLETE=bash_source featcache)"
COMP_WORDS=(featcache made); COMP_CWORD=1; _featcache_completion featcache; echo "${COMPREPLY[@]}"
"""
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", typed], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["made-from"]


def test_colours_are_for_terminals_or_where_they_are_asked_for(stored: Path) -> None:
    assert "\x1b[" in run("info", stored, width=120).out
    assert "\x1b[" not in run("info", stored).out
    assert "\x1b[" not in run("info", stored, width=120, environment={"NO_COLOR": "1"}).out
    assert "\x1b[" in run("info", stored, environment={"FORCE_COLOR": "1"}).out
    assert "\x1b[" in run("info", stored, "--color", "always").out
    assert "\x1b[" not in run("info", stored, "--color", "never", width=120).out
    assert "\x1b[" not in run("info", stored, "--json", "--color", "always").out


def test_quiet_verbs_answer_by_exit_code(stored: Path) -> None:
    assert run("info", stored, "-q") == (0, "", "")
    assert run("ls", stored, "-q", "--where", "fbank>9999") == (1, "", "")
    found = run("info", stored / "nothing", "-q")
    assert (found.code, found.out) == (2, "")
    assert found.err


def test_debug_shows_where_an_error_came_from(stored: Path) -> None:
    found = run("show", stored, "nobody", "--debug")
    assert found.code == 2
    assert "Traceback" in found.err
    assert found.err.endswith("\n")
    assert "Traceback" not in run("show", stored, "nobody").err


def test_an_error_of_our_own_is_not_the_answer_no(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> object:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("featcache.inspect.info", broken)
    found = run("info", stored, "--json")
    assert found.code == 2
    assert found.json["error"] == {
        "type": "ZeroDivisionError",
        "message": "ZeroDivisionError: of all things; an error of featcache's own, see --debug",
    }


def test_wrong_usage_is_one_document_too(stored: Path) -> None:
    found = run("ls", stored, "--where", "nonsense", "--json")
    assert found.code == 2
    assert found.json["error"]["type"] == "UsageError"
    assert run("info").code == 2
    assert run("info", stored, "--nothing").code == 2
