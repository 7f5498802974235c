"""The page that a person reads: what is in it, that nothing of a user's is taken for HTML, and that it works."""

import base64
import hashlib
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from task.report import main
from tests.result_folders import write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ALONE = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
EVIL = '<img src=x onerror="document.title=1">&amp;"\''


class Tags(HTMLParser):
    """All start tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page of two methods, two settings and two seeds, with holes."""
    folder = tmp_path_factory.mktemp("study")
    level = 0.5
    for algorithm in ("fedtgp", "local"):
        for alpha in (0.1, 1):
            for seed in (0, 1):
                level += 0.04
                rule = "head" if algorithm == "local" else "prototype"
                name = f"{algorithm}-a{alpha}-s{seed}"
                write_run(folder / name, algorithm=algorithm, alpha=alpha, seed=seed, level=level, rule=rule,
                          prototypes=rule == "prototype", rounds=3)  # fmt: skip
    (folder / "local-a1-s1" / "summary.json").write_text('{"status": "failed", "reason": "boom", "seed": 1}')
    (folder / "fedtgp-a1-s0" / "confusion.csv").write_text("true,0,1,2\n0,5,1,0\n1,0,7,0\n2,3,0,2\n")
    assert main([str(folder), "--title", f"Two methods {EVIL}"]) == 0
    return folder / "report" / "report.html"


def test_the_page_needs_no_network_and_allows_none(page: Path) -> None:
    text = page.read_text()
    tags = Tags(text)
    addresses = [each[key] for _, each in tags.found for key in ("src", "href") if each.get(key)]
    assert all(address and address.startswith(("data:", "#")) for address in addresses)
    (policy,) = [each["content"] for each in tags.of("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    for tag in ("style", "script"):
        content = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r"(https?:)?//(?!www\.w3\.org)[a-z]", text.split("<style>")[0])


def test_names_of_users_are_text(page: Path) -> None:
    text = page.read_text()
    assert EVIL not in text
    assert "&lt;img src=x onerror=" in text
    assert all("onerror" not in each for _, each in Tags(text).found)


def test_every_figure_says_in_words_what_it_shows(page: Path) -> None:
    images = [each for each in Tags(page.read_text()).of("img") if each.get("src")]
    names = {path.stem for path in page.parent.glob("*.png")}
    assert len(images) == len(names) >= 10
    assert all(len(each["alt"] or "") > 30 for each in images)
    words = " ".join(each["alt"] or "" for each in images)
    assert "alpha=0.1: fedtgp ends at 56.0 % after round 3" in words
    assert "fedtgp: 56.0 % at 0.1, 64.0 % at 1." in words
    assert "class 2 for class 0 (3 images); class 0 for class 1 (1 images)" in words


def test_holes_settings_command_and_versions_are_there(page: Path) -> None:
    text = page.read_text()
    assert "local, alpha=1: seed 1 failed" in text
    assert "7 of 8" in text
    assert "Points above local" in text
    assert "protofed-report" in text
    assert "partition.alpha" in text
    assert "<code>data.name=fashion_small</code>" in text


def test_a_users_own_page_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", rounds=1, prototypes=False)
    (tmp_path / "report.html").write_text("mine")
    assert main([str(run), "--output", str(tmp_path)]) == 1
    assert (tmp_path / "report.html").read_text() == "mine"
    assert "report.html: exists and was not written by protofed-report" in capsys.readouterr().err


def test_too_many_figures_of_a_kind_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for alpha in (1, 2, 3):
        write_run(tmp_path / "in" / str(alpha), alpha=alpha, prototypes=False, rounds=2)
    assert main([str(tmp_path / "in"), "--most", "1"]) == 0
    assert "2 of 3 figures of accuracy by client are left out (--most)" in capsys.readouterr().out
    folder = tmp_path / "in" / "report"
    assert len(list(folder.glob("accuracy-by-client*.png"))) == 1
    assert "2 of 3 figures of classes by client are left out" in (folder / "report.html").read_text()


def test_one_malformed_file_costs_one_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", rounds=2)
    (run / "confusion.csv").write_text("nonsense")
    (run / "prototypes").mkdir()
    (run / "prototypes" / "round-00001.npz").write_text("nonsense")
    assert main([str(run)]) == 1
    errors = capsys.readouterr().err
    assert "confusion.csv: not a confusion matrix" in errors
    assert "round-00001.npz: not a prototype file" in errors
    assert (run / "report" / "report.html").exists()
    assert (run / "report" / "accuracy-by-round.png").exists()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ALONE)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[tuple[Any, list[str]]]:
    view = browser.new_page(viewport={"width": 1280, "height": 900})
    wrong: list[str] = []
    view.on("console", lambda message: wrong.append(message.text))
    view.on("pageerror", lambda error: wrong.append(str(error)))
    view.on("request", lambda request: request.url.startswith(("file:", "data:")) or wrong.append(request.url))
    view.goto(page.as_uri())
    yield view, wrong
    view.close()


@pytest.mark.browser
def test_the_page_opens_without_an_error_and_shows_every_figure(opened: tuple[Any, list[str]]) -> None:
    view, wrong = opened
    view.wait_for_load_state("load")
    assert view.locator("figure img").count() >= 10
    assert view.evaluate("Promise.all([...document.querySelectorAll('figure img')].map(i => i.decode())).then(() => 1)")
    assert view.eval_on_selector_all("figure img", "images => images.every(i => i.naturalWidth > 200 && i.alt)")
    assert view.title().startswith("Two methods <img")
    # No part of the page is wider than the window.
    assert view.evaluate("document.documentElement.scrollWidth") == 1280
    assert wrong == []


@pytest.mark.browser
def test_tables_are_sorted_by_mouse_and_keyboard(opened: tuple[Any, list[str]]) -> None:
    view, wrong = opened
    table = view.locator("section[aria-labelledby=table-numbers]")
    head = table.get_by_role("button", name="last accuracy (%)")
    column = table.locator("thead th").nth(4)

    def shown() -> list[float]:
        cells = table.locator("tbody tr").evaluate_all("(rows, i) => rows.map(r => r.cells[i].textContent)", arg=4)
        return [float(text.split()[0]) for text in cells]

    assert column.inner_text().startswith("last accuracy")
    head.click()
    assert shown() == sorted(shown(), reverse=True)
    assert column.get_attribute("aria-sort") == "descending"
    head.press("Enter")
    assert shown() == sorted(shown())
    assert column.get_attribute("aria-sort") == "ascending"
    # Another column takes over, and a cell that says nothing comes last both ways.
    other = table.get_by_role("button", name="over local")
    for _ in range(2):
        other.focus()
        view.keyboard.press("Space")
        methods = table.locator("tbody tr td:first-child").all_inner_texts()
        assert methods == ["fedtgp", "fedtgp", "local", "local"]
    assert column.get_attribute("aria-sort") is None
    assert wrong == []


@pytest.mark.browser
def test_a_table_can_be_taken_along(opened: tuple[Any, list[str]]) -> None:
    view, wrong = opened
    with view.expect_download() as waiting:
        view.locator("section[aria-labelledby=table-accuracy]").get_by_role("link", name="CSV").click()
    assert waiting.value.suggested_filename == "accuracy.csv"
    assert Path(waiting.value.path()).read_text().startswith("method,alpha=0.1,alpha=1\nfedtgp,")
    assert wrong == []


@pytest.mark.browser
def test_a_figure_opens_in_large_and_closes(opened: tuple[Any, list[str]]) -> None:
    view, wrong = opened
    button = view.locator(".zoom").first
    button.press("Enter")
    assert view.locator("dialog").is_visible()
    assert view.locator("dialog img").get_attribute("alt") == button.locator("img").get_attribute("alt")
    view.keyboard.press("Escape")
    assert not view.locator("dialog").is_visible()
    assert wrong == []


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes_and_on_a_phone(browser: Any, page: Path, scheme: str) -> None:
    view = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    view.goto(page.as_uri())
    light = """selector => {
      const style = getComputedStyle(document.querySelector(selector));
      const value = text => text.match(/[0-9.]+/g).slice(0, 3).map(Number).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const [a, b] = [value(style.color), value(getComputedStyle(document.body).backgroundColor)];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    }"""
    for selector in ("body", ".note", "figcaption", "nav a", "small", ".missing, .partial small"):
        assert view.evaluate(light, selector) >= 4.5, selector
    assert view.evaluate("document.documentElement.scrollWidth") == 390
    view.close()
