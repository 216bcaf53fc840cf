"""docs/collectives.html in a browser: dragging the slider and pressing keys moves the elements correctly.

The final values are compared with NumPy; half-way, each element must be between its source and its target. Skipped
without Chromium, with a line that says how to install it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import explain_reference
import pytest
from browser import Browser, Page, find_browser

from pynccl.tools.explain.execute import ranks_of_this_process, run
from pynccl.tools.explain.operations import variants

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "collectives.html"
CHROMIUM = find_browser()
slow = pytest.mark.slow


# All drawn elements with their layout in the browser.
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
    """Set the slider as dragging does."""
    tab.run(f"slider.value = {at}; slider.dispatchEvent(new Event('input'))")
    return dict(tab.run(SCENE))


def slide(tab: Page, fraction: float) -> dict[str, Any]:
    """Drag the slider's thumb to this fraction of its range."""
    x, y, width, height = tab.box("#slider")
    now = tab.run("slider.value / slider.max")
    thumb = 16.0

    def spot(value: float) -> tuple[float, float]:
        return x + thumb / 2 + value * (width - thumb), y + height / 2

    tab.drag(spot(now), spot((now + fraction) / 2), spot(fraction))
    return dict(tab.run(SCENE))


def values_of(scene: dict[str, Any], area: int, ranks: int) -> list[list[int]]:
    values: list[list[int]] = [[] for _ in range(ranks)]
    for cell in scene["cells"]:
        if cell["area"] == area:
            assert cell["value"], (scene["title"], cell)
            values[cell["rank"]].append(int(cell["value"]))
    return values


def cell_of(scene: dict[str, Any], area: int, rank: int, at: int) -> dict[str, Any]:
    return next(cell for cell in scene["cells"] if (cell["area"], cell["rank"], cell["at"]) == (area, rank, at))


@slow
@pytest.mark.parametrize(("ranks", "direction"), [(8, "forward"), (3, "adjoint")])
def test_elements_move_from_source_to_target_as_in_numpy(opened: Page, ranks: int, direction: str) -> None:
    """Check every operation and convention at the beginning, in the middle of each step and at the end."""
    with ranks_of_this_process(ranks) as comms:
        runs = [run(comms, name, grad) for name, grad in variants()]
    for found in runs:
        name, grad, x, g = found.name, found.grad, found.forward.before, found.adjoint.before
        start = show(opened, name, grad, ranks, direction)
        before = x if direction == "forward" else g
        expected = (
            explain_reference.outputs(name, x)
            if direction == "forward"
            else explain_reference.gradients(name, grad, x, g)
        )
        assert not start["flyers"]
        assert values_of(start, 0, ranks) == before
        assert not any(cell["value"] for cell in start["cells"] if cell["area"])
        moved = 0
        for step in range(start["steps"]):
            scene = move_to(opened, step + 0.5)
            assert scene["flyers"]
            moved += len(scene["flyers"])
            for flyer in scene["flyers"]:
                check_between(scene, flyer)
        end = move_to(opened, start["steps"])
        assert not end["flyers"] and moved >= len([cell for cell in end["cells"] if "none" not in cell["kind"]]) - sum(
            map(len, before)
        )
        assert values_of(end, 1, ranks) == [values.tolist() for values in expected], (name, grad, direction)


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


def test_the_page_has_no_character_that_a_font_may_lack() -> None:
    assert FILE.read_text(encoding="utf-8").isascii()


@slow
def test_buttons_have_icons(opened: Page) -> None:
    """Whatever the fonts; that of the play button shows what it does."""
    opened.click("#direction [data-value='forward']")  # plays
    drawn = "document.querySelector('#play path').getAttribute('d')"
    pause = opened.run(drawn)
    opened.click("#play")
    assert pause and opened.run(drawn) not in ("", pause)
    for name in ("#play", "#back", "#next", ".between"):
        assert min(opened.box(f"{name} path")[2:]) > 4, name


@slow
def test_dragging_the_slider_moves_the_elements_forward_and_back(opened: Page) -> None:
    half = slide(opened, 0.5)
    assert half["now"] == pytest.approx(2.0, abs=0.1)
    quarter = slide(opened, 0.375)  # in the middle of the second of four steps
    assert quarter["now"] == pytest.approx(1.5, abs=0.1)
    assert values_of(quarter, 1, 4) == [[1], [12], [23], [34]]  # each rank's own shard
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
def test_buttons_keys_and_playing_to_the_end(opened: Page) -> None:
    opened.click("#operations [data-value='all_reduce']")
    opened.click("#ranks [data-value='3']")
    opened.click("#grad [data-value='replicated']")
    scene = opened.run(SCENE)
    assert scene["title"] == "all_reduce" and max(cell["rank"] for cell in scene["cells"]) == 2
    assert opened.run("location.hash") == "#all_reduce:replicated:3:adjoint"
    opened.click("#direction [data-value='forward']")
    opened.click("#play")  # pauses the animation
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
    opened.click("#play")
    opened.until(lambda: opened.run("slider.value === slider.max"))
    opened.until(lambda: opened.run("document.getElementById('play').getAttribute('aria-label')") == "play")
