"""Pages for everybody: with a screen reader, with a keyboard, on paper, on screens of any width."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

Open = Callable[..., Page]

# What a keyboard has to reach, each with a name for a message. Of radio buttons of one name the
# chosen one alone is reached by Tab, and an element inside of closed details is not there.
FOCUSABLE = """() => {
  const all = document.querySelectorAll(
    "a[href], button, input:not([type=radio]), input[type=radio]:checked, select, textarea," +
    "summary, [tabindex='0']");
  let count = 0;
  for (const one of all) {
    const seen = one.checkVisibility({ checkVisibilityCSS: true });
    if (!seen && !one.matches(".switch > input")) continue;
    one.dataset.reach = String(count++);
  }
  return count;
}"""

# The focused element: which one it is, and whether it can be seen that it is focused.
FOCUSED = """() => {
  const one = document.activeElement;
  if (one === document.body) return null;
  const ringed = (it) => {
    const style = getComputedStyle(it);
    return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  };
  const label = one.labels && one.labels[0];
  const box = (label || one).getBoundingClientRect();
  return {
    reach: one.dataset.reach ?? "",
    words: one.outerHTML.slice(0, 120),
    seen: (ringed(one) || (!!label && ringed(label))) && box.width > 0 && box.right > 0,
  };
}"""

SKIPPED_LEVELS = """() => {
  const found = [];
  let before = 0;
  for (const one of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    if (!one.checkVisibility()) continue;
    const level = Number(one.tagName[1]);
    if (level > before + 1) found.push(`h${before} then ${one.outerHTML.slice(0, 80)}`);
    before = level;
  }
  return found;
}"""

# Boxes with text that is wider than they are and cannot be scrolled to.
CUT_OFF = """() => [...document.querySelectorAll("body *")]
  .filter((one) => {
    const style = getComputedStyle(one);
    return ["hidden", "clip"].includes(style.overflowX) && one.scrollWidth > one.clientWidth + 1 &&
      one.clientWidth > 1 && !one.closest("svg, thead");
  })
  .map((one) => one.outerHTML.slice(0, 120))"""

# Words of prose that stand on two lines: their box is narrower than a word.
BROKEN_WORDS = r"""() => {
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const box = node.parentElement;
    if (!box.checkVisibility({ checkVisibilityCSS: true })) continue;
    if (box.closest("svg, thead, .scroll")) continue;
    for (const word of node.data.matchAll(/(?<![^\s(])[A-Za-z]{2,14}(?=[\s,.;:)]|$)/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map((it) => Math.round(it.top)));
      if (lines.size > 1) found.push(`${word[0]} in ${box.outerHTML.slice(0, 100)}`);
    }
  }
  return found.slice(0, 5);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_any_kind_of_page(
    open_page: Open, site: Any, scheme: str
) -> None:
    page = open_page(color_scheme=scheme)
    axe = Axe()
    rules: dict[str, object] = {"resultTypes": ["violations"]}
    if scheme == "dark":  # the same elements in other colours
        rules["runOnly"] = ["color-contrast"]
    found = []
    for path in site.kinds:
        page.goto(f"file://{site.root}/{path}")
        for one in axe.run(page, options=rules).response["violations"]:
            if one["impact"] in ("serious", "critical"):
                where = [node["target"] for node in one["nodes"]][:3]
                found.append(f"{path}: {one['id']}: {one['help']}: {where}")
    assert found == []


def test_a_keyboard_reaches_everything_and_shows_where_it_is(open_page: Open, site: Any) -> None:
    page = open_page()
    for path in site.kinds:
        page.goto(f"file://{site.root}/{path}")
        count = page.evaluate(FOCUSABLE)
        reached = set()
        for _ in range(count + 1):
            page.keyboard.press("Tab")
            at = page.evaluate(FOCUSED)
            if at is None:
                break
            assert at["seen"], f"{path}: it cannot be seen that this is focused: {at['words']}"
            reached.add(at["reach"])
        missed = {str(number) for number in range(count)} - reached
        assert not missed, f"{path}: not reached: " + "; ".join(
            page.locator(f"[data-reach='{number}']").evaluate("it => it.outerHTML.slice(0, 120)")
            for number in sorted(missed)[:3]
        )


def test_the_first_key_leads_past_the_head_of_the_page(open_page: Open, site: Any) -> None:
    page = open_page()
    for path in site.kinds:
        page.goto(f"file://{site.root}/{path}")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.matches('a.skip')"), path
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        inside = "document.activeElement.closest('main, footer') || document.activeElement.tagName"
        assert page.evaluate(f"!!({inside})"), path
        assert page.evaluate("!document.activeElement.closest('header.top')"), path


def test_headings_are_in_order_and_every_page_has_its_landmarks(open_page: Open, site: Any) -> None:
    page = open_page()
    for path in site.kinds:
        page.goto(f"file://{site.root}/{path}")
        assert page.evaluate(SKIPPED_LEVELS) == [], path
        assert page.locator("main").count() == 1
        assert page.locator("html[lang]").count() == 1


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off_or_overflows(open_page: Open, site: Any, width: int) -> None:
    """With SCREENSHOTS=folder the pages are also kept there as they look."""
    page = open_page(viewport={"width": width, "height": 900})
    keep = os.environ.get("SCREENSHOTS")
    for path in site.kinds:
        page.goto(f"file://{site.root}/{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate(CUT_OFF) == [], path
        assert page.evaluate(BROKEN_WORDS) == [], path
        if keep:
            name = re.sub(r"[^\w.-]+", "-", path.removesuffix(".html"))
            page.screenshot(path=str(Path(keep) / f"{name}-{width}.png"), full_page=True)


def test_paper_gets_all_of_a_page_and_nothing_to_press(open_page: Open, site: Any) -> None:
    page = open_page()
    page.emulate_media(media="print")
    for path in site.kinds:
        page.goto(f"file://{site.root}/{path}")
        assert page.evaluate("document.querySelector('main').innerText.length") > 100
        shown = page.locator("button:visible").all_inner_texts()
        assert not set(shown) & {"Light", "Dark", "Copy"}, path
