"""The dashboard in a real browser: from disk and served, wide and narrow, light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

Open = Callable[..., Page]

# Pairs of texts of one drawing that lie over each other.
COLLISIONS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll(".chart > svg")) {
    const texts = [...svg.querySelectorAll("text")]
      .filter((one) => getComputedStyle(one).display !== "none" && one.textContent.trim())
      .map((one) => [one.textContent, one.getBoundingClientRect()])
      .filter(([, box]) => box.width > 0);
    texts.forEach(([a, p], index) => {
      for (const [b, q] of texts.slice(index + 1)) {
        const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
        const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
        if (across > 1 && down > 2.5) found.push(`${svg.parentElement.id}: ${a} / ${b}`);
      }
    });
  }
  return found;
}"""

# Texts whose contrast with what they stand on is below WCAG AA, as "ratio text".
FAINT = """() => {
  const channel = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) =>
    0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const ground = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !one.getClientRects().length || one.closest(".skip, .off")) continue;
    const style = getComputedStyle(one);
    const colour = parse(one instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(colour), light(ground(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) found.push(`${ratio.toFixed(2)} ${one.textContent.trim()}`);
  }
  return [...new Set(found)];
}"""


def watch(page: Page) -> list[str]:
    """What goes wrong on a page, as it happens: errors, and requests."""
    trouble: list[str] = []
    page.on("console", lambda m: trouble.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    # A request that is given up because the page is left (its icon, its question whether it was
    # rebuilt) is no trouble; one that the policy refuses is.
    page.on(
        "requestfailed",
        lambda request: (
            None if request.failure == "net::ERR_ABORTED" else trouble.append(request.url)
        ),
    )
    return trouble


def test_every_page_opens_from_disk_without_errors_requests_or_overflow(
    open_page: Open, site: Any
) -> None:
    page = open_page(viewport={"width": 390, "height": 844})
    trouble = watch(page)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for path in site.pages:
        page.goto(f"file://{site.root}/{path}")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, f"{path} is {wide} pixels wide on a screen of 390"
        assert page.locator("h1").count() == 1
        assert page.evaluate("getComputedStyle(document.body).margin") == "0px", "no style sheet"
        if not path.endswith("/report.html"):  # which is for a mail, and has no script at all
            assert page.locator("button.theme").count() == 1, "no script"
    assert trouble == []
    assert all(url.startswith(f"file://{site.root}/") for url in requests)


def test_one_page_of_each_kind_works_when_served(open_page: Open, site: Any, address: str) -> None:
    page = open_page()
    trouble = watch(page)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for path in site.by_name.values():
        page.goto(address + path)
        assert page.locator("button.theme").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert trouble == []
    assert all(url.startswith(address) for url in requests)


@pytest.mark.parametrize("width", [1280, 390])
def test_no_labels_of_a_chart_lie_over_each_other(open_page: Open, site: Any, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 900})
    for path in site.pages:
        if path.startswith(("boards/", "searches/")):
            page.goto(f"file://{site.root}/{path}")
            assert page.evaluate(COLLISIONS) == [], path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(open_page: Open, site: Any, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    for path in site.by_name.values():
        page.goto(f"file://{site.root}/{path}")
        assert page.evaluate(FAINT) == [], path


def test_an_injected_script_does_not_run(open_page: Open, site: Any, tmp_path: Path) -> None:
    root = tmp_path / "site"
    shutil.copytree(site.root, root)
    index = root / "index.html"
    injected = (
        "<script>window.owned = 'inline'</script>"
        "<img src=x onerror=\"window.owned = 'handler'\">"
        "<script src='data:text/javascript,window.owned=1'></script>"
        "<style>body { margin: 99px }</style><p style='position:fixed'>x</p>"
    )
    index.write_text(index.read_text().replace("</main>", injected + "</main>"))
    page = open_page()
    trouble = watch(page)
    page.goto(f"file://{index}")
    assert page.evaluate("window.owned") is None
    assert page.evaluate("getComputedStyle(document.body).margin") == "0px"
    refused = [text for text in trouble if "Content Security Policy" in text]
    assert len(refused) >= 4


def test_a_page_can_ask_nobody_but_its_own_server(open_page: Open, site: Any, address: str) -> None:
    page = open_page()
    trouble = watch(page)
    page.goto(address)
    ask = "url => fetch(url, {mode: 'no-cors'}).then(() => 'answered', () => 'refused')"
    assert page.evaluate(ask, address + "index.html") == "answered"
    assert trouble == []
    assert page.evaluate(ask, address.replace("127.0.0.1", "localhost")) == "refused"
    assert any("connect-src" in text for text in trouble)


def test_what_a_hostile_board_sends_is_text(open_page: Open, site: Any, sample: Any) -> None:
    page = open_page(f"file://{site.root}/{site.by_name['hostile']}")
    assert page.title() == f"Alignment · {sample.HOSTILE} · decode harness"
    assert page.locator("main img, main script").count() == 0
    body = page.locator("main").inner_text()
    assert sample.HOSTILE in body
    assert "<script>document.title='owned'</script>" in body
    assert '"><img src=x onerror=alert(1)>' in body
    assert "⟨U+202E⟩" in body
    assert "\u202e" not in page.content()


def test_the_page_follows_the_system_theme_and_the_button_overrides_it(
    open_page: Open, site: Any
) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    url = f"file://{site.root}/index.html"
    light = open_page(url, color_scheme="light").evaluate(background)
    page = open_page(url, color_scheme="dark")
    dark = page.evaluate(background)
    assert light != dark
    page.get_by_role("button", name="Light").click()
    assert page.evaluate(background) == light
    page.goto(f"file://{site.root}/{site.by_name['curve']}")
    assert page.evaluate(background) == light, "the choice is kept on the next page"


def test_everything_can_be_read_without_javascript(open_page: Open, site: Any) -> None:
    page = open_page(f"file://{site.root}/index.html", java_script_enabled=False)
    alert = page.locator(".alert", has_text="rk3588-01")
    expect(alert).to_contain_text("L07.ffn.down is off by 2 %")
    expect(alert).to_contain_text("look at the kernel and the packed scales")
    alert.get_by_role("link", name="See the evidence").click()
    expect(page.locator("h1")).to_have_text("rk3588-01")
    maps = page.locator("#chart-map-rel_l2-local svg")
    expect(maps).to_be_visible()
    page.locator("label", has_text="Max-abs").click()
    expect(maps).to_be_hidden()
    expect(page.locator("#chart-map-max_abs-free svg")).to_be_visible()
    page.get_by_text("Every op as a table").click()
    expect(page.locator("details[open] table")).to_be_visible()
    page.goto(f"file://{site.root}/{site.by_name['stress']}")
    expect(page.locator("#chart-stress .line").first).to_be_visible()
    expect(page.locator("button")).to_have_count(0)


def test_the_first_bad_op_is_ringed_in_the_map(open_page: Open, site: Any) -> None:
    page = open_page(f"file://{site.root}/{site.by_name['alignment']}")
    drawing = page.locator("#chart-map-rel_l2-local")
    expect(drawing.locator(".ring")).to_be_visible()
    expect(drawing.locator(".ring-label")).to_have_text("L07.ffn.down")


def test_a_column_sorts_by_number_both_ways(open_page: Open, site: Any) -> None:
    page = open_page(f"file://{site.root}/{site.by_name['run']}")
    table = page.locator("table.sortable").first
    header = table.get_by_role("button", name="cached")
    cells = table.locator("tbody tr td:nth-child(6)")
    header.click()
    rising = [int(text) for text in cells.all_inner_texts()]
    assert rising == sorted(rising)
    header.click()
    falling = [int(text) for text in cells.all_inner_texts()]
    assert falling == sorted(falling, reverse=True)


def test_the_pointer_reads_values_off_the_chart(open_page: Open, site: Any) -> None:
    page = open_page(f"file://{site.root}/{site.by_name['stress']}")
    chart = page.locator("#chart-stress > svg")
    chart.hover(position={"x": 300, "y": 120})
    expect(page.locator("#chart-stress .readout")).to_contain_text("tok/s")
    page.mouse.move(2, 2)
    expect(page.locator("#chart-stress .readout")).to_have_text("")


def test_a_printed_page_shows_every_map_and_no_buttons(open_page: Open, site: Any) -> None:
    page = open_page(f"file://{site.root}/{site.by_name['alignment']}")
    page.emulate_media(media="print")
    for metric in ("rel_l2", "cosine", "max_abs"):
        expect(page.locator(f"#chart-map-{metric}-local svg")).to_be_visible()
    expect(page.locator("button.theme")).to_be_hidden()


def test_a_served_page_reloads_when_it_was_rebuilt(
    open_page: Open, site: Any, tmp_path: Path
) -> None:
    from dashboards.serve import serving

    root = tmp_path / "site"
    shutil.copytree(site.root, root)
    with serving(root, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        page = open_page()
        with page.expect_response(lambda answer: answer.request.method == "HEAD"):
            page.goto(url)
        index = root / "index.html"
        index.write_text(index.read_text().replace("Boards and stages", "Boards and more stages"))
        expect(page.locator("#matrix")).to_have_text("Boards and more stages", timeout=20_000)
        page.close()
