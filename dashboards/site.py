"""The whole site: results → page models → files."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from dashboards import plain
from dashboards.charts import Table
from dashboards.data import STAGE_TITLES, Results
from dashboards.files import Folder
from dashboards.pages import (
    alignment,
    bisect,
    bringup,
    compare,
    crash,
    curve,
    farm,
    health,
    history,
    ops,
    run,
    stress,
)
from dashboards.pages.base import MEANINGS, PAGE_OF_STAGE, WORDS, Page, Places
from dashboards.reading import load
from harness.paths import state_dir
from harness.store import Store
from harness.verdicts import Check

HERE = Path(__file__).parent
STAGE_PAGES = {
    "accuracy": alignment.page,
    "curve": curve.page,
    "stress": stress.page,
    "profile": ops.page,
}

# Only files of the site itself, nothing inline. `connect-src` lets a served page ask whether it
# has been rebuilt.
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """What a build did. `pages` counts HTML files; the other counts are of all files."""

    index: Path
    pages: int
    written: int
    unchanged: int
    removed: int


def default_folder() -> Path:
    return state_dir() / "dashboard"


def build_site(store: Store, out: Path, *, incremental: bool = True) -> Path:
    """Renders the store's results into `out` and returns the Farm page's path.

    The same results give the same bytes. Raises HarnessError: `out` holds other files or cannot
    be written.
    """
    return build(store, out, incremental=incremental).index


def build(store: Store, out: Path, *, incremental: bool = True) -> SiteReport:
    """As `build_site`, and tells what was written."""
    return write_site(load(store), out, incremental=incremental)


def write_site(results: Results, out: Path, *, incremental: bool = True) -> SiteReport:
    """Renders `results`; the Farm page is written last, when all that it links to is there."""
    folder = Folder.open(out, incremental=incremental)
    environment = make_environment()
    places = Places(results)
    found = list(pages(results, places))
    texts = {page.path: render(environment, page, places) for page in found}
    files = {path: text.encode() for path, text in texts.items()}
    for page in found:
        for table in page.values.get("tables", ()):
            files[table.csv] = csv_bytes(table.whole)
        files.update(page.values.get("files", {}))
    for path in sorted((HERE / "static").iterdir()):
        files[f"static/{path.name}"] = path.read_bytes()
    folder.expect(files)
    for name in sorted(files, key=lambda name: (name == "index.html", name)):
        folder.put(name, files[name])
    folder.finish()
    return SiteReport(
        out / "index.html", len(texts), folder.written, folder.unchanged, folder.removed
    )


def pages(results: Results, places: Places) -> Iterator[Page]:
    yield farm.page(results, places)
    yield from crash.pages(results, places)
    for case in results.cases:
        yield bringup.page(case, places)
        for stage, make in STAGE_PAGES.items():
            if stage in case.runs:
                yield make(case, case.runs[stage], places)
    for one in results.runs:
        yield run.page(one, places)
    for search in results.searches:
        yield (compare if search.kind == compare.KIND else bisect).page(search, places)
    yield from history.pages(results, places)
    yield from health.pages(results, places)


def render(environment: jinja2.Environment, page: Page, places: Places) -> str:
    return environment.get_template(page.template).render(
        **page.values, root=page.root, path=page.path, places=places
    )


def make_environment() -> jinja2.Environment:
    """Jinja with escaping everywhere, no undefined names, and hidden characters made visible."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        number=plain.number,
        cosine=plain.cosine,
        seconds=plain.seconds,
        mebibytes=plain.mebibytes,
        slug=plain.slug,
        when=when,
        iso=iso,
        table_rows=table_rows,
        check_name=check_name,
        prose=prose,
    )
    environment.globals.update(
        policy=POLICY,
        words=WORDS,
        meanings=MEANINGS,
        stage_titles=STAGE_TITLES,
        page_of_stage=PAGE_OF_STAGE,
    )
    return environment


def _finalize(value: Any) -> Any:
    """Applied to every expression that a template prints."""
    return plain.visible(value) if type(value) is str else value


def when(value: datetime.datetime | None) -> str:
    return "–" if value is None else value.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def iso(value: datetime.datetime) -> str:
    return value.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def prose(text: str) -> Markup:
    """A sentence in which `backticks` mark code."""
    parts = plain.visible(text).split("`")
    if len(parts) % 2 == 0:  # a stray one: leave all as they are
        return escape("`".join(parts))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part)
        for index, part in enumerate(parts)
    )


# Words of a check's id that people write otherwise.
_SPELLED = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "kl": "KL", "kv": "KV", "top1": "top-1"}


def check_name(check: Check) -> str:
    """`mean_kl` → `Mean KL`; a unit at the end of the id stands beside the numbers already."""
    words = check.name.split("_")
    if len(words) > 1 and words[-1] in ("s", "ms", "mb"):
        words = words[:-1]
    name = " ".join(_SPELLED.get(word, word) for word in words).replace(" per s", " per second")
    return name[:1].upper() + name[1:]


def table_rows(table: Table) -> Markup:
    """The rows of a data table. Written here and not in the template: there are thousands."""
    numeric = table.numeric
    rows = ("".join(map(_cell, row, numeric)) for row in table.rows)
    return Markup("\n".join(f"<tr>{row}</tr>" for row in rows))  # noqa: S704 - cells are escaped


def _cell(value: object, right: bool) -> str:
    """Plain digits that can be copied; numbers also as they are, for sorting."""
    if value is None:
        return '<td class="num">–</td>' if right else "<td>–</td>"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, int):
            text = str(value)
        else:  # six digits, but 0.99999999 must not read as 1
            text = f"{value:.10g}" if 0.99 < abs(value) < 1 else f"{value:.6g}"
        return f'<td class="num" data-value="{value!r}">{text}</td>'
    return f"<td>{escape(plain.visible(str(value)))}</td>"


def csv_bytes(table: Table) -> bytes:
    """RFC 4180, UTF-8. A text that a spreadsheet would run as a formula is led by an apostrophe."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\r\n")
    writer.writerow(table.columns)
    writer.writerows([_csv_cell(value) for value in row] for row in table.rows)
    return target.getvalue().encode("utf-8", errors="replace")


def _csv_cell(value: object) -> object:
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def as_json(report: SiteReport) -> Mapping[str, object]:
    """The report for programs."""
    return {**dataclasses.asdict(report), "index": str(report.index)}
