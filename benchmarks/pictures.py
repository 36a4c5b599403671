"""The pictures of the README: `featcache` in a terminal as SVG, and a report as PNG.

All of them show a cache that is there: the spoken digits, as `make demo` leaves them. Run it again
where the command line or the page of a report looks different; needs `make look`, for Chromium.

    python benchmarks/pictures.py [recipes/digits/results/1]
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

import click

import featcache

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
COMMANDS = (
    "featcache info features",
    "featcache show features/train 6_alan_19 --feature fbank",
    "featcache ls features/train --where 'fbank>60' --where id~ella --sort -fbank -n 3",
)
WIDTH = 8.0  # pixels of a character
LINE, MARGIN = 18, 16
SEQUENCE = re.compile(r"\x1b\[([\d;]*)m")
CLASSES = {"1": "b", "2": "d", "31": "r", "32": "g", "33": "y", "36": "c"}
STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: var(--ink); white-space: pre }
svg { --back: #ffffff; --edge: #c5ced7; --ink: #1c2329; --soft: #5a6672; --red: #b3261e; --green: #1a6b34; --yellow: #7d5200; --cyan: #0b6470 }
@media (prefers-color-scheme: dark) { svg { --back: #0f151a; --edge: #3a4651; --ink: #e8edf1; --soft: #a9b5bf; --red: #ff8a80;
  --green: #7bd88f; --yellow: #e5c07b; --cyan: #6fd3df } }
.back { fill: var(--back); stroke: var(--edge) } .b { font-weight: 600 } .d { fill: var(--soft) } .r { fill: var(--red) }
.g { fill: var(--green) } .y { fill: var(--yellow) } .c { fill: var(--cyan) }
"""  # noqa: E501
WIDE, HIGH = 1100, 1080  # a window, in pixels
LEFT_OUT = "#origin { display: none }"  # it names a directory of this machine
PICTURE_ROWS = 450  # pixels of those of odd utterances


@click.command()
@click.argument("digits", default="recipes/digits/results/1", type=click.Path(path_type=Path))
def main(digits: Path) -> None:
    """Draw the pictures anew."""
    told = [(command, printed(command, digits)) for command in COMMANDS]
    (PICTURES / "terminal.svg").write_text(terminal(told))
    photograph(digits)
    for file in sorted(PICTURES.iterdir()):
        print(f"{file.name}  {file.stat().st_size / 1e3:.0f} kB")


def printed(command: str, folder: Path) -> list[str]:
    """Return the lines that a command writes to a terminal in colour."""
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=folder, env=os.environ | {"FORCE_COLOR": "1"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return (done.stdout + done.stderr).rstrip("\n").split("\n")


def terminal(told: list[tuple[str, list[str]]]) -> str:
    """Return commands and what they wrote as an SVG that asks nobody for fonts."""
    lines: list[Iterator[str]] = []
    for command, written in told:
        lines += [iter(())] * bool(lines)
        lines.append(runs(f"\x1b[2m$ \x1b[0m\x1b[1m{command}\x1b[0m"))
        lines += [runs(line) for line in written]
    longest = max(len(SEQUENCE.sub("", line)) for _, written in told for line in written)
    width, height = round(longest * WIDTH) + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    names = ", ".join(f"'{command}'" for command, _ in told)
    texts = (
        f'<text y="{MARGIN + LINE * place + 13}">{"".join(line)}</text>'
        for place, line in enumerate(lines)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">',
            f'<title id="title">{escape(names)} in a terminal</title>',
            f"<style>{STYLE}</style>",
            f'<rect class="back" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *texts,
            "</svg>\n",
        ]
    )


def runs(line: str) -> Iterator[str]:
    """Yield the pieces of a line that look alike, each where a terminal has it."""
    column, looks = 0, set[str]()
    for place, piece in enumerate(SEQUENCE.split(line)):
        if place % 2:
            codes = piece.split(";")
            looks = set() if codes in (["0"], [""]) else looks | {CLASSES[code] for code in codes}
        else:
            for word in re.finditer(r"\S+(?: \S+)*", piece):
                x, size = MARGIN + (column + word.start()) * WIDTH, len(word[0]) * WIDTH
                style = f' class="{" ".join(sorted(looks))}"' if looks else ""
                yield (
                    f'<tspan{style} x="{x:g}" textLength="{size:g}" '
                    f'lengthAdjust="spacingAndGlyphs">{escape(word[0])}</tspan>'
                )
            column += len(piece)


def photograph(digits: Path) -> None:
    """Write a report of the digits, and photograph its beginning and pictures of odd utterances."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started, tempfile.TemporaryDirectory() as folder:
        page_file = Path(folder) / "report.html"
        featcache.inspect.report(digits / "features" / "train", page_file)
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("chromium-headless-shell"),
            args=["--no-sandbox"],
        )
        for scheme in ("light", "dark"):
            page = browser.new_page(
                color_scheme=scheme, viewport={"width": WIDE, "height": HIGH}, offline=True
            )
            page.goto(page_file.as_uri())
            page.locator("html.js").wait_for()
            page.add_style_tag(content=LEFT_OUT)
            page.screenshot(path=PICTURES / f"report-{scheme}.png")
            box = page.locator(".gallery").bounding_box()
            assert box is not None
            page.screenshot(
                path=PICTURES / f"report-odd-{scheme}.png",
                full_page=True,
                clip={"x": 0, "y": box["y"], "width": WIDE, "height": PICTURE_ROWS},
            )
        browser.close()


if __name__ == "__main__":
    main()
