"""Run all benchmarks, one after the other, and print their tables.

python benchmarks/run.py              print
python benchmarks/run.py --publish    and write its sections of RESULTS.md, and its picture
python benchmarks/run.py --publish --only extraction    that section of RESULTS.md
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

HERE = Path(__file__).parent
QUESTIONS = {
    "read": "How long does one random read of a whole utterance take?",
    "held": "How long does a read take whose array is held while others are read?",
    "load": "How fast do padded batches of random utterances come?",
    "steps": "What does a FeatureLoader cost beside a step of training?",
    "layouts": "How fast do batches come in each layout?",
    "packing": "How full are batches without padding?",
    "scale": "What do ten million utterances cost?",
    "views": "What do views of ten million utterances cost?",
    "samplers": "How long do batch samplers take to make?",
    "extraction": "What do several workers gain and cost?",
    "checking": "What do fingerprint and probe cost?",
    "stamps": "What do stamps cost, and how fast is one changed file found?",
    "remote_peers": "How fast do utterances come out of an object store that answers late?",
}


@click.command()
@click.option("--publish", is_flag=True, help="Write its sections of RESULTS.md, and the picture.")
@click.option("--only", type=click.Choice(list(QUESTIONS)), help="One benchmark.")
def main(publish: bool, only: str | None) -> None:
    """Run all benchmarks."""
    started = time.strftime("%Y-%m-%d %H:%M")
    with tempfile.TemporaryDirectory() as directory:
        figures = Path(directory) / "results.json"
        names = [only] if only else list(QUESTIONS)
        tables = {
            name: run(name, *(["--json", str(figures)] if name == "load" else [])) for name in names
        }
        if not publish:
            return
        results = HERE / "RESULTS.md"
        if only:
            write_section(results, only, tables[only], started)
            return
        for name, table in tables.items():
            write_section(results, name, table, started)
        (HERE / "results.json").write_text(figures.read_text())
        command = [
            sys.executable,
            str(HERE / "plot.py"),
            str(HERE / "results.json"),
            str(HERE / "results.png"),
        ]
        subprocess.run(command, check=True)


def write_section(results: Path, name: str, table: str, when: str) -> None:
    """Write the table of one benchmark in place of its last one, or at the end."""
    title = f"\n## {QUESTIONS[name]}\n"
    before, _, old = results.read_text().partition(title)
    after = old.partition("\n## ")[2]
    section = f"{title}\nOn {when}.\n\n```text\n{table.strip()}\n```\n"
    results.write_text(before + section + (f"\n## {after}" if after else ""))


def run(name: str, *arguments: str) -> str:
    """Run one benchmark, show what it prints, and return that."""
    print(f"\n=== {QUESTIONS[name]} ({name}.py)\n", flush=True)
    command = [sys.executable, "-u", str(HERE / f"{name}.py"), *arguments]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for row in process.stdout:
            print(row, end="", flush=True)
            lines.append(row)
    if process.returncode:
        raise SystemExit(f"{name}.py failed with status {process.returncode}")
    return "".join(lines)


if __name__ == "__main__":
    main()
