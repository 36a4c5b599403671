"""Pages of reports in Chromium: seen by axe-core, used by keyboard, printed, without script."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from report_caches import HOSTILE, report, utterances, with_faults, write

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell"))), None)
CASES = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; `make look` installs it"
)
if BROWSER is None:
    pytest.skip("no Chromium is found; `make look` installs it", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of caches of every sort."""
    folder = tmp_path_factory.mktemp("pages")
    made = with_faults()
    hostile = dict(zip(HOSTILE, utterances().values(), strict=False))
    caches = {
        "faults": [write(folder / "a", made)],
        "none": [write(folder / "b", {})],
        "one": [write(folder / "c", dict([*made.items()][:1]))],
        "hostile": [write(folder / "d", hostile, {HOSTILE[0]: HOSTILE})],
    }
    caches["two"] = [*caches["faults"], write(folder / "e", utterances(), {"gain": 4})]
    caches["sampled"] = caches["faults"]
    found = {}
    for name, each in caches.items():
        found[name] = folder / f"{name}.html"
        report(found[name], *each, sample=40 if name == "sampled" else None)
    return found


@contextmanager
def opened(browser: Any, path: Path, complaints: list[str], **settings: Any) -> Iterator[Any]:
    """Open a page, and note what its console and its network say."""
    given = {"viewport": {"width": 1280, "height": 900}, "offline": True, **settings}
    context = browser.new_context(**given)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.resolve().as_uri())
    yield page
    complaints += [f"request: {url}" for url in asked[1:] if not url.startswith("data:")]
    context.close()


def faults_of(page: Any) -> list[str]:
    """The rules of axe-core that a page breaks seriously."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [each["id"] for each in found if each["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("name", ["faults", "none", "one", "hostile", "two", "sampled"])
@pytest.mark.parametrize(("scheme", "width"), CASES)
def test_a_page_can_be_read_by_everybody(
    browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    complaints: list[str] = []
    size = {"width": width, "height": 900}
    with opened(browser, pages[name], complaints, color_scheme=scheme, viewport=size) as page:
        page.locator("html.js").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for details in page.locator("details").all():
            details.evaluate("each => { each.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert faults_of(page) == []
        assert page.evaluate("window.hacked") is None
    assert complaints == []


def test_a_page_with_faults_fails(browser: Any, tmp_path: Path) -> None:
    """The control of the tests above."""
    page_file = tmp_path / "page.html"
    page_file.write_text(
        "<!doctype html><html><head><title>t</title></head><body><img src='data:,'>"
        "<p style='color:#bbb;background:#fff'>pale</p><button></button><input>"
        "<div style='width:3000px'>wide</div><script>console.log('said'); missing()</script>"
        "<img alt='' src='https://example.org/a.png'></body></html>"
    )
    complaints: list[str] = []
    with opened(browser, page_file, complaints) as page:
        assert {"button-name", "color-contrast", "html-has-lang", "image-alt", "label"} <= {
            *faults_of(page)
        }
        assert not page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for what in ("console", "error", "request"):
        assert any(each.startswith(what) for each in complaints)


def test_charts_and_numbers_are_there_without_script(browser: Any, pages: dict[str, Path]) -> None:
    complaints: list[str] = []
    with opened(browser, pages["faults"], complaints, java_script_enabled=False) as page:
        assert page.locator("svg[role=img]").count() >= 5
        assert page.locator(".pictures img:visible").count() > 10
        assert page.locator(".script:visible").count() == 0
        assert page.locator("[aria-label='padding of fbank'] table").is_visible()
        summary = page.locator("summary").first
        summary.focus()
        page.keyboard.press("Enter")
        assert page.locator("details").first.get_attribute("open") is not None
        # another scale needs no script either
        page.locator(".own-scale").first.focus()
        page.keyboard.press("Space")
        assert page.locator(".pictures .of-own:visible").count() > 10
        assert page.locator(".pictures .of-cache:visible").count() == 0
    assert complaints == []


@pytest.fixture
def use(browser: Any, pages: dict[str, Path]) -> Iterator[Callable[[str], Any]]:
    """Open a page that must not complain until the test is over."""
    complaints: list[str] = []
    stack: list[Any] = []

    def open_page(name: str) -> Any:
        manager = opened(browser, pages[name], complaints)
        stack.append(manager)
        return manager.__enter__()

    yield open_page
    for each in stack:
        each.__exit__(None, None, None)
    assert complaints == []


def test_a_table_is_sorted_by_keyboard(use: Callable[[str], Any]) -> None:
    page = use("faults")
    table = page.locator("[aria-label='odd utterances'] table")
    table.locator("th", has_text="frames").locator("button").focus()
    page.keyboard.press("Enter")
    values = "all => all.map(each => Number(each.value))"
    frames = table.locator("td:nth-child(2) data").evaluate_all(values)
    assert frames == sorted(frames)
    assert table.locator("th[aria-sort=ascending]").inner_text().startswith("frames")
    page.keyboard.press("Enter")
    assert table.locator("td:nth-child(2) data").first.get_attribute("value") == "900"


def test_ids_are_found_by_keyboard(use: Callable[[str], Any]) -> None:
    page = use("faults")
    page.locator("input[type=search]").focus()
    page.keyboard.type("UTT-1")
    page.locator(".hits li").first.wait_for()
    assert page.locator(".search output").inner_text() == "10 matches"
    hits = page.locator(".hits li").all_inner_texts()
    assert len(hits) == 10
    assert any("utt-19" in hit and "900 frames" in hit and "length" in hit for hit in hits)
    link = page.locator(".hits a").first
    link.focus()
    page.keyboard.press("Enter")
    place = str(link.get_attribute("href"))
    assert page.locator(place).is_visible()


def test_hostile_ids_are_found_as_they_are(use: Callable[[str], Any]) -> None:
    page = use("hostile")
    page.locator("input[type=search]").fill("script")
    page.locator(".hits li").first.wait_for()
    found = page.locator(".hits code").all_inner_texts()
    assert {*found} == {id for id in HOSTILE if "script" in id}


def test_the_cut_answers_as_the_table_does(use: Callable[[str], Any]) -> None:
    page = use("faults")
    form = page.locator("form.cut").first
    lengths = [len(each.fbank) for each in with_faults().values()]
    told = form.locator("output").inner_text()
    assert f"keeps {len(lengths)} of {len(lengths)} utterances, 100 % of all frames" in told
    for buckets in ("1", "2", "4", "8", "16", "32"):
        form.locator("[name=buckets]").fill(buckets)
        told = form.locator("output").inner_text()
        named = page.locator(f"data[data-of='fbank padding {buckets}']").inner_text()
        assert f"padding {named} with {buckets} bucket" in told
    form.locator("[name=most]").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("50")
    kept = [length for length in lengths if length <= 50]
    share = 100 * sum(kept) / sum(lengths)
    told = form.locator("output").inner_text()
    assert f"keeps {len(kept)} of {len(lengths)} utterances, {share:.0f} % of all frames" in told
    assert "cache.filter(fbank=(0, 50))" in form.locator(".python code").inner_text()


def test_light_and_dark_are_switched_by_keyboard(use: Callable[[str], Any]) -> None:
    page = use("faults")
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate(colour) != before
    page.keyboard.press("Enter")
    assert page.evaluate(colour) == before


def test_a_line_of_python_is_copied(use: Callable[[str], Any]) -> None:
    page = use("faults")
    button = page.locator(".python button").first
    button.focus()
    page.keyboard.press("Enter")
    button.get_by_text("copied").or_(button.get_by_text("selected")).wait_for()


def test_every_control_is_reached_by_tabs(use: Callable[[str], Any]) -> None:
    page = use("faults")
    controls = page.locator(
        "main a:visible, main button:visible, main input:visible, main summary:visible"
    ).count()
    reached = set()
    for _ in range(controls + 60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(
            "[...document.querySelectorAll('a, button, input, summary')]"
            ".indexOf(document.activeElement)"
        ))  # fmt: skip
    assert len(reached - {-1}) >= controls


def test_print_is_light_and_opens_what_is_folded(
    browser: Any, pages: dict[str, Path], tmp_path: Path
) -> None:
    complaints: list[str] = []
    with opened(browser, pages["faults"], complaints, color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )
        assert page.locator(".script:visible").count() == 0
        data = page.pdf(path=tmp_path / "page.pdf", print_background=True)
        assert data.startswith(b"%PDF")
        folded = page.locator("details table").first
        assert folded.evaluate("each => each.getClientRects().length") > 0
    assert complaints == []
