"""The site of `make docs`: each public name has its docstring, pages look as on GitHub, nothing comes from outside."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pages
import pytest
from browser import Browser, find_browser
from pages import PAGES, ROOT

sys.path.append(str(ROOT / "scripts" / "docs"))
import api_pages

slow = pytest.mark.slow
OF_THE_THEME = ("article", "a", "div", "span")  # which it adds to what a page has


class Html(HTMLParser):
    """The ids and references of a page; the tags and the text of its article."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.headings, self.refs = list[str](), set[str](), list[tuple[str, str]]()
        self.tags, self.text, self.skipped, self.inside = Counter[str](), "", False, False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids += [found["id"]] if "id" in found else []
        self.refs += [(tag, found[name]) for name in ("href", "src") if name in found]
        self.skipped |= found.get("class") == "headerlink"
        self.inside |= tag == "article"
        if self.inside and tag not in OF_THE_THEME:
            self.tags[tag] += 1
            self.headings |= {found.get("id", "")} if re.match(r"h\d", tag) else set()

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag != "article"
        self.skipped &= tag != "a"

    def handle_data(self, data: str) -> None:
        if self.inside and not self.skipped:
            self.text += "".join(data.split())


def build(site: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_public_name_has_one_heading_and_its_docstring() -> None:
    text = "\n".join(api_pages.pages().values())
    anchors = Counter(re.findall(r'^<h\d markdown="span" id="(.+?)"', text, re.MULTILINE))
    names = [re.split(r"[ (]", row)[1] for row in (ROOT / "tests/tools/public_api.txt").read_text().splitlines()]
    full = [re.sub("^Communicator", "pynccl.Communicator", name) for name in names]
    assert len(full) > 200 and [name for name in full if anchors[name] != 1] == []
    assert [name for name, times in anchors.items() if times > 1] == []
    for name in full:
        place = max((module for module in api_pages.MODULES if name.startswith(f"{module}.")), key=len)
        value = pkgutil.resolve_name(f"{place}:{name.removeprefix(place)[1:]}")
        own = "" if isinstance(value, dict) or not value.__doc__ else inspect.cleandoc(value.__doc__)
        assert own in text, name


@slow
def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    parsed = {path: Html(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(parsed) > 40
    wrong = []
    for path, page in parsed.items():
        for tag, ref in page.refs:
            file, _, fragment = unquote(ref).partition("#")
            there = (path.parent / file).resolve() if file else path
            if re.match(r"\w+:|//", ref):
                good = tag == "a" or ref.startswith("data:")
            else:
                good = there.is_file() and (not fragment or there not in parsed or fragment in parsed[there].ids)
            wrong += [] if good else [f"{path.name}: {tag} {ref}"]
    styles = {path: path.read_text() for path in site.rglob("*.css")}
    assert (
        wrong
        == [str(path) for path, text in styles.items() if re.search(r"(@import|url\()[\"' ]*(http|//)", text)]
        == []
    )


@slow
def test_pages_have_the_structure_text_and_anchors_that_github_shows(site: Path) -> None:
    """Python-Markdown builds the site; markdown-it reads pages as GitHub does."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        name = "index.html" if page.name == "README.md" else f"{page.relative_to(ROOT)}".removeprefix("docs/")
        here = Html((site / name).with_suffix(".html").read_text())
        there = Html(f"<article>{markdown.render(page.read_text())}</article>")
        assert (here.tags, here.text) == (there.tags, there.text), page.name
        assert here.headings == pages.anchors(page), page.name


@slow
def test_a_page_without_a_place_in_the_navigation_fails(site: Path, tmp_path: Path) -> None:
    text = re.sub(r"\b(scripts/docs\S*|docs$)", rf"{ROOT}/\1", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(re.sub(r"\n.*: glossary\.md", "", text))
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode == 1 and 'not included in the "nav"' in done.stderr and "glossary.md" in done.stderr


@slow
@pytest.mark.skipif(find_browser() is None, reason="no Chromium: apt install chromium")
def test_search_finds_a_method_when_the_site_is_opened_from_disk(site: Path) -> None:
    with Browser(str(find_browser())) as browser:
        page = browser.open((site / "results" / "cpu.html").as_uri())
        page.click(".md-search__input")
        page.ask("Input.insertText", text="communicator.reduce_scatte")
        page.press("r")
        page.until(lambda: bool(page.run("document.querySelectorAll('.md-search-result__link').length")))
        first = page.run("document.querySelector('.md-search-result__item').innerHTML")
        assert '/api/pynccl.html?h=communicator+reduce_scatter#pynccl.Communicator.reduce_scatter"' in first
        assert page.errors() == [] and [one for one in page.requests() if not one.startswith(("file:", "data:"))] == []
