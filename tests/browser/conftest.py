"""One Chromium for all tests of a session, and a site that shows everything there is to show."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from dashboards.reading import load
from dashboards.serve import serving
from dashboards.site import write_site
from harness.store import Store

# No sandbox: tests often run as root in a container. The rest keeps the browser off the network.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclasses.dataclass(frozen=True)
class Site:
    """`pages` holds every page found on disk, of the data pages one for each stage and outcome."""

    root: Path
    pages: tuple[str, ...]
    by_name: dict[str, str]  # short names of one page of each kind

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """One page of each kind, the longest. A page of a new kind is among them by itself."""
        longest: dict[str, tuple[int, str]] = {}
        for path in self.pages:
            text = (self.root / path).read_text()
            kind = re.search(r'<p class="eyebrow">(.*?)</p>', text)
            title = re.search(r"<h1>(\w*)", text)  # of a run its stage
            key = f"{kind[1] if kind else path} {title[1] if title and 'runs/' in path else ''}"
            longest[key] = max(longest.get(key, (0, "")), (len(text), path))
        return tuple(path for _, path in longest.values())


@pytest.fixture(scope="session")
def site(sample: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    root = tmp_path_factory.mktemp("browser") / "site"
    with Store.open(root.parent / "results.sqlite") as store:
        sample.record_noted_nights(store)
        sample.record_crashes(store)
        sample.record_all(store)
        searches = sample.record_searches(store)
        results = load(store)
    write_site(results, root)
    runs = {}
    for run in results.runs:
        runs.setdefault((run.stage, run.status), f"runs/{run.id}.html")
    others = {f"runs/{run.id}.html" for run in results.runs} - set(runs.values())
    boards = sorted(path.relative_to(root).as_posix() for path in root.glob("boards/*/*.html"))

    def page(board: str, name: str) -> str:
        return next(path for path in boards if f"/{board}" in path and path.endswith(f"/{name}"))

    by_name = {
        "farm": "index.html",
        "bringup": page("pi5-03", "index.html"),
        "ops": page("pi5-03", "ops.html"),
        "alignment": page("rk3588-01", "alignment.html"),
        "curve": page("pi5-03", "curve.html"),
        "stress": page("pi5-03", "stress.html"),
        "hostile": page("evil", "alignment.html"),
        "run": runs["stress", "warn"],
        **{f"search {kind}": f"searches/{search}.html" for kind, search in searches.items()},
    }
    found = sorted({path.relative_to(root).as_posix() for path in root.rglob("*.html")} - others)
    return Site(root, tuple(found), by_name)


@pytest.fixture(scope="session")
def address(site: Site) -> Iterator[str]:
    """The URL of the same site, served on loopback."""
    with serving(site.root, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if path is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page in a context of its own: `open_page(url, color_scheme="dark")`."""
    contexts: list[BrowserContext] = []

    def open_one(url: str | None = None, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        if url is not None:
            page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
