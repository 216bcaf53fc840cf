"""docs/collectives.html in a browser: the slider is dragged, keys are pressed, and the elements are where they belong.

What they hold at the end is held against NumPy; half-way each one has to lie between where it comes from and where it
goes. Skipped where there is no Chromium, in one line that says how to get one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import explained
import pytest
from browser import Browser, Page, find_browser

from pynccl.tools.explain.execute import ranks_of_this_process, run
from pynccl.tools.explain.operations import variants
from pynccl.tools.explain.page import page

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "collectives.html"
CHROMIUM = find_browser()
slow = pytest.mark.slow


# Everything that is drawn, as the browser has laid it out.
SCENE = """(() => {
  const place = (one) => { const r = one.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; };
  const cells = [...document.querySelectorAll(".cell:not(.flyer)")].map((one) => ({
    area: +one.dataset.area, rank: +one.dataset.rank, at: +one.dataset.at, place: place(one),
    value: one.childNodes.length ? one.firstChild.textContent : "", kind: one.className }));
  const flyers = [...document.querySelectorAll(".flyer")].filter((one) => one.style.display !== "none").map((one) => ({
    source: +one.dataset.source, at: +one.dataset.at, target: +one.dataset.target,
    to: +one.dataset.to, place: place(one), value: one.textContent }));
  const slider = document.getElementById("slider");
  return { cells, flyers, now: +slider.value, steps: +slider.max, title: document.getElementById("title").textContent,
    caption: document.getElementById("caption").textContent };
})()"""


# What sticks out: of the window, of the stage, of its own box.
TOO_WIDE = """(() => {
  const stage = document.getElementById("stage").getBoundingClientRect(), found = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page");
  for (const one of document.querySelectorAll(".cell")) {
    const place = one.getBoundingClientRect();
    if (one.style.display === "none") continue;
    if (place.left < stage.left || place.right > stage.right + 0.5 || one.scrollWidth > one.clientWidth + 1)
      found.push(one.textContent);
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as found:
        yield found


@pytest.fixture
def opened(browser: Browser) -> Iterator[Page]:
    found = browser.open(FILE.as_uri() + "#reduce_scatter::4:forward:0.01")
    yield found
    assert found.errors() == []
    assert found.requests() == []
    found.close()


def show(tab: Page, name: str, grad: str, ranks: int, direction: str, at: float = 0) -> dict[str, Any]:
    tab.run(
        "new Promise((done) => { addEventListener('hashchange', done, {once: true});"
        f"location.hash = '{name}:{grad}:{ranks}:{direction}:{at}'; }})"
    )
    scene = dict(tab.run(SCENE))
    assert scene["title"] == name
    return scene


def move_to(tab: Page, at: float) -> dict[str, Any]:
    """Set the slider as the browser does while it is dragged."""
    tab.run(f"slider.value = {at}; slider.dispatchEvent(new Event('input'))")
    return dict(tab.run(SCENE))


def slide(tab: Page, part: float) -> dict[str, Any]:
    """Take the slider's thumb where it is, and drag it to this part of its way."""
    x, y, width, height = tab.box("#slider")
    now = tab.run("slider.value / slider.max")
    thumb = 16.0

    def spot(value: float) -> tuple[float, float]:
        return x + thumb / 2 + value * (width - thumb), y + height / 2

    tab.drag(spot(now), spot((now + part) / 2), spot(part))
    return dict(tab.run(SCENE))


def values_of(scene: dict[str, Any], area: int, ranks: int) -> list[list[int]]:
    own: list[list[int]] = [[] for _ in range(ranks)]
    for cell in scene["cells"]:
        if cell["area"] == area:
            assert cell["value"], (scene["title"], cell)
            own[cell["rank"]].append(int(cell["value"]))
    return own


def cell_of(scene: dict[str, Any], area: int, rank: int, at: int) -> dict[str, Any]:
    return next(one for one in scene["cells"] if (one["area"], one["rank"], one["at"]) == (area, rank, at))


def test_the_page_is_the_same_each_time_and_current() -> None:
    assert page() == FILE.read_text(encoding="utf-8"), "run `make collectives`"


def test_the_page_needs_nothing_from_outside() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not [word for word in ("http://", "https://", "@import", "url(") if word in text]
    assert not re.search(r"<[^>]*\ssrc=", text)


@slow
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("direction", ["forward", "adjoint"])
def test_elements_move_from_where_they_are_to_where_numpy_has_them(opened: Page, ranks: int, direction: str) -> None:
    """Every operation and convention: at the beginning, in the middle of each step, at the end."""
    with ranks_of_this_process(ranks) as comms:
        runs = [run(comms, name, grad) for name, grad in variants()]
    for found in runs:
        name, grad, x, g = found.name, found.grad, found.forward.before, found.adjoint.before
        start = show(opened, name, grad, ranks, direction)
        given = x if direction == "forward" else g
        expected = explained.outputs(name, x) if direction == "forward" else explained.gradients(name, grad, x, g)
        assert not start["flyers"]
        assert values_of(start, 0, ranks) == given
        assert not any(cell["value"] for cell in start["cells"] if cell["area"])
        flown = 0
        for step in range(start["steps"]):
            scene = move_to(opened, step + 0.5)
            assert scene["flyers"]
            flown += len(scene["flyers"])
            for flyer in scene["flyers"]:
                check_between(scene, flyer)
        end = move_to(opened, start["steps"])
        assert not end["flyers"] and flown >= len([cell for cell in end["cells"] if "none" not in cell["kind"]]) - sum(
            map(len, given)
        )
        assert values_of(end, 1, ranks) == [one.tolist() for one in expected], (name, grad, direction)


def check_between(scene: dict[str, Any], flyer: dict[str, Any]) -> None:
    source = cell_of(scene, 0, flyer["source"], flyer["at"])
    target = cell_of(scene, 1, flyer["target"], flyer["to"])
    assert flyer["value"] == source["value"]
    for axis in (0, 1):
        low, high = sorted((source["place"][axis], target["place"][axis]))
        if low == high:
            assert flyer["place"][axis] == pytest.approx(low, abs=0.5)
        else:
            assert low < flyer["place"][axis] < high
    assert flyer["place"][2:] == pytest.approx(source["place"][2:], abs=0.5)


@slow
def test_dragging_the_slider_moves_the_elements_there_and_back(opened: Page) -> None:
    half = slide(opened, 0.5)
    assert half["now"] == pytest.approx(2.0, abs=0.1)
    quarter = slide(opened, 0.375)  # in the middle of the second of four steps
    assert quarter["now"] == pytest.approx(1.5, abs=0.1)
    assert values_of(quarter, 1, 4) == [[1], [12], [23], [34]]  # each rank's own part
    assert sorted(flyer["value"] for flyer in quarter["flyers"]) == ["13", "2", "24", "31"]
    for flyer in quarter["flyers"]:
        check_between(quarter, flyer)
    end = slide(opened, 1.0)
    assert values_of(end, 1, 4) == [[64], [68], [72], [76]] and not end["flyers"]
    assert end["caption"].endswith("y is complete")
    back = slide(opened, 0.375)
    assert back["now"] == pytest.approx(quarter["now"], abs=0.1)
    assert values_of(back, 1, 4) == values_of(quarter, 1, 4)
    begin = slide(opened, 0.0)
    assert begin["now"] == 0 and not any(cell["value"] for cell in begin["cells"] if cell["area"])


@slow
def test_the_adjoint_goes_up_where_the_forward_goes_down(opened: Page) -> None:
    down = show(opened, "reduce_scatter", "", 4, "forward")
    up = show(opened, "reduce_scatter", "", 4, "adjoint")
    for rank in range(4):
        assert cell_of(down, 1, rank, 0)["place"] == cell_of(up, 0, rank, 0)["place"]  # y and its cotangent
        for i in range(4):
            assert cell_of(down, 0, rank, i)["place"] == cell_of(up, 1, rank, i)["place"]  # x and its gradient
    assert cell_of(up, 1, 0, 0)["place"][1] < cell_of(up, 0, 0, 0)["place"][1]


@slow
def test_buttons(opened: Page) -> None:
    opened.click("#operations [data-value='all_reduce']")
    opened.click("#ranks [data-value='3']")
    opened.click("#grad [data-value='replicated']")
    scene = opened.run(SCENE)
    assert scene["title"] == "all_reduce" and max(cell["rank"] for cell in scene["cells"]) == 2
    assert opened.run("location.hash") == "#all_reduce:replicated:3:adjoint"
    opened.click("#direction [data-value='forward']")
    opened.click("#play")  # pauses what began to play
    assert opened.run("document.getElementById('play').getAttribute('aria-label')") == "play"
    opened.click("#slider")
    opened.press("End")
    assert values_of(opened.run(SCENE), 1, 3) == [[33, 36, 39]] * 3
    opened.click("#back")
    assert opened.run(SCENE)["now"] == 2
    opened.click("#slider")
    opened.press("Home")
    assert opened.run(SCENE)["now"] == 0
    opened.click("#next")
    assert opened.run(SCENE)["now"] == 1


@slow
def test_playing_goes_on_by_itself_and_stops_at_the_end(opened: Page) -> None:
    show(opened, "permute", "", 2, "forward")
    opened.click("#play")
    opened.until(lambda: opened.run(SCENE)["now"] > 0)
    opened.until(lambda: opened.run("document.getElementById('play').getAttribute('aria-label')") == "play")
    assert opened.run("slider.value === slider.max")
    show(opened, "all_gather", "sum", 8, "forward")
    opened.click("#play")
    opened.until(lambda: opened.run(SCENE)["now"] > 0.3)
    opened.click("#play")
    now = opened.run(SCENE)["now"]
    opened.frame()
    opened.frame()
    assert opened.run(SCENE)["now"] == now < 8


@slow
def test_who_wants_little_motion_gets_nothing_by_itself(browser: Browser) -> None:
    tab = browser.open(FILE.as_uri(), prefers_reduced_motion="reduce")
    tab.click("#operations [data-value='gather']")
    for _ in range(5):
        tab.frame()
    assert tab.run(SCENE)["now"] == 0
    tab.close()


@slow
@pytest.mark.parametrize("width", [320, 760])
def test_nothing_is_wider_than_the_window(browser: Browser, width: int) -> None:
    tab = browser.open(FILE.as_uri() + "#split::8:forward:0", width, 800)
    for name, grad in variants():
        for direction in ("forward", "adjoint"):
            show(tab, name, grad, 8, direction, 1)
            assert tab.run(TOO_WIDE) == [], (name, grad, direction)
    assert tab.errors() == []
    tab.close()


@slow
def test_a_window_that_changes_its_width_is_laid_out_anew(opened: Page) -> None:
    show(opened, "reduce_scatter", "", 8, "forward", 1.5)
    for width in (330, 1200):
        opened.resize(width, 800)
        opened.until(lambda width=width: opened.run("innerWidth") == width)  # type: ignore[misc]
        opened.until(lambda: opened.run(TOO_WIDE) == [])
        opened.frame()  # in which what flies follows
        scene = opened.run(SCENE)
        assert scene["now"] == 1.5 and len(scene["flyers"]) == 8
        for flyer in scene["flyers"]:
            check_between(scene, flyer)


@slow
def test_light_and_dark_can_be_read(browser: Browser) -> None:
    """The contrast of numbers with the ground of each rank's elements, as WCAG 2.2 counts it: at least 4.5."""
    for scheme in ("light", "dark"):
        tab = browser.open(FILE.as_uri() + "#all_gather:sum:8:forward:8", prefers_color_scheme=scheme)
        found = tab.run(
            "[...document.querySelectorAll('.cell[data-area=\"0\"]:not(.flyer)')].map((one) => getComputedStyle(one))"
            ".map((style) => [style.color, style.backgroundImage])"
        )
        assert len(found) == 8
        for ink, ground in found:
            assert contrast(colours(ink)[0], colours(ground)[0]) >= 4.5, (scheme, ink, ground)
        body = tab.run("getComputedStyle(document.body).backgroundColor")
        assert (brightness(colours(body)[0]) > 0.5) == (scheme == "light")
        tab.close()


def colours(text: str) -> list[list[float]]:
    """Parts from 0 to 255; browsers write a mixed colour in parts from 0 to 1."""
    plain = [[float(one) for one in found.split(",")] for found in re.findall(r"rgb\(([^)]*)\)", text)]
    mixed = [[255 * float(one) for one in found.split()] for found in re.findall(r"color\(srgb ([^)]*)\)", text)]
    return plain + mixed


def brightness(colour: list[float]) -> float:
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (part / 255 for part in colour)]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


@slow
def test_an_address_that_means_nothing_shows_reduce_scatter(browser: Browser) -> None:
    for mark in ("#nonsense", "#all_reduce:foo:99:sideways:x", "#"):
        tab = browser.open(FILE.as_uri() + mark)
        assert tab.run(SCENE)["title"] == ("all_reduce" if "all_reduce" in mark else "reduce_scatter")
        assert tab.errors() == []
        tab.close()


def test_html_of_the_command_is_that_page(tmp_path: Path) -> None:
    from pynccl.__main__ import main

    file = tmp_path / "page.html"
    assert main(["explain", "gather", "--ranks", "3", "--html", str(file)]) == 0
    assert file.read_bytes() == FILE.read_bytes()
