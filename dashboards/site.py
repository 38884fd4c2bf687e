"""The whole site: results → page models → files."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import functools
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from dashboards import parts, plain
from dashboards.charts import Cell, Heat, Table
from dashboards.data import STAGE_TITLES, Case, Results
from dashboards.files import Folder, Part
from dashboards.nights import Health
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
    report,
    run,
    stress,
)
from dashboards.pages.base import MEANINGS, PAGE_OF_STAGE, WORDS, Page, Places, tint
from dashboards.reading import outline
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

# Only files of the site itself; nothing inline but the report's own style, by its hash.
# `connect-src` lets a served page ask whether it has been rebuilt.
POLICY = (
    f"default-src 'none'; style-src 'self' {report.style_source()}; script-src 'self'; "
    "img-src 'self' data:; "
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


def build(
    store: Store,
    out: Path,
    *,
    incremental: bool = True,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> SiteReport:
    """As `build_site`, and tells what was written. Pages of a board whose results did not change
    are left as they are. `told` hears how many boards of how many are done."""
    target = store.database.url.render_as_string(hide_password=False)
    return _write(outline(store), out, incremental, target, told)


def write_site(results: Results, out: Path, *, incremental: bool = True) -> SiteReport:
    """Renders `results`, which hold the long fields of all runs that keep a page."""
    return _write(results, out, incremental, None, lambda done, total: None)


def _write(
    results: Results,
    out: Path,
    incremental: bool,
    target: str | None,
    told: Callable[[int, int], None],
) -> SiteReport:
    """The Farm page is written last, when all that it links to is there."""
    folder = Folder.open(out, incremental=incremental)
    places = Places(results)
    job = parts.Job(out, incremental, results, target, case_files, nights_files)
    made: dict[str, Part] = {}
    stale = []
    for unit in parts.units(results, places):
        kept = folder.keep(unit.name, unit.of) if target is not None else None
        if kept is None:
            stale.append(unit)
        else:
            made[unit.name] = kept
    folder.begin({unit.name: unit.beginnings for unit in stale})
    for done, (unit, part, written) in enumerate(parts.make_all(job, places, stale), 1):
        folder.take(unit.name, part, written)
        made[unit.name] = part
        told(done, len(stale))
    notes = {name: note for part in made.values() for name, note in part.note.items()}
    if target is not None:
        results = parts.with_noise(parts.with_glances(results, notes), notes)
    floors = {one.board: str(notes[one.board]["floor"]) for one in results.nights.health}
    files = files_of(farm_pages(results, places, floors), places)
    for path in sorted((HERE / "static").iterdir()):
        files[f"static/{path.name}"] = path.read_bytes()
    folder.expect(files)
    for name in sorted(files, key=lambda name: (name == "index.html", name)):
        folder.put(name, files[name])
    folder.finish()
    pages = sum(_html(part.files) for part in made.values()) + _html(files)
    return SiteReport(out / "index.html", pages, folder.written, folder.unchanged, folder.removed)


def _html(files: Iterable[str]) -> int:
    return sum(path.endswith(".html") for path in files)


def farm_pages(
    results: Results, places: Places, floors: Mapping[str, str] | None = None
) -> Iterator[Page]:
    """The pages of the whole farm. They must do with `Run.glance`, and with the noise `floors` of
    boards: the long fields of runs (checks, details, facts) and series of nights are not there."""
    yield farm.page(results, places)
    yield from crash.pages(results, places)
    for search in results.searches:
        yield (compare if search.kind == compare.KIND else bisect).page(search, places)
    if results.nights.health:
        yield health.overview(results, places, floors or {})


def nights_pages(one: Health, results: Results, places: Places) -> Iterator[Page]:
    """The health of a board, and the history of its models. What they show must be of the board:
    see `parts.inputs_of_nights`."""
    yield health.page(one, results, places)
    yield from history.pages(results, places, one)


def nights_files(one: Health, results: Results, places: Places) -> dict[str, bytes]:
    return files_of(nights_pages(one, results, places), places)


def case_pages(case: Case, places: Places) -> Iterator[Page]:
    """The pages of one board and model. What they show must be of the case: it is what decides
    whether they are made again (see `parts.inputs`)."""
    yield bringup.page(case, places)
    yield report.page(case, places)
    for stage, make in STAGE_PAGES.items():
        if stage in case.runs:
            yield make(case, case.runs[stage], places)
    for one in case.history:
        if places.has_run(one):
            yield run.page(one, places)


def case_files(case: Case, places: Places) -> dict[str, bytes]:
    return files_of(case_pages(case, places), places)


def files_of(pages: Iterable[Page], places: Places) -> dict[str, bytes]:
    """Pages as files, with the tables that belong to them."""
    environment = make_environment()
    files = {}
    for page in pages:
        files[page.path] = render(environment, page, places).encode()
        for table in page.values.get("tables", ()):
            files[table.csv] = csv_bytes(table.whole)
        files.update(page.values.get("files", {}))
    return files


def render(environment: jinja2.Environment, page: Page, places: Places) -> str:
    return environment.get_template(page.template).render(
        **page.values, root=page.root, path=page.path, places=places
    )


@functools.cache
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
        heat_cells=heat_cells,
        check_name=check_name,
        prose=prose,
        css=css,
    )
    environment.globals.update(
        policy=POLICY,
        words=WORDS,
        tint_of=tint,
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


def css(text: str) -> Markup:
    """A style sheet of ours inside of a page, which nothing in it may end."""
    if "<" in text:
        raise ValueError("a style sheet inside of a page must not hold '<'")
    return Markup(text)  # noqa: S704 - a file of this package


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
    digits = itertools.repeat(table.digits)
    rows = ("".join(map(_cell, row, numeric, digits)) for row in table.rows)
    return Markup("\n".join(f"<tr>{row}</tr>" for row in rows))  # noqa: S704 - cells are escaped


def heat_cells(heat: Heat) -> Markup:
    """The cells of a map, what is not finite crossed out, what fails spotted. Written here as
    `table_rows` are: a deep model has thousands."""
    return Markup("\n".join(map(_heat_cell, heat.cells)))  # noqa: S704 - titles are escaped


def _heat_cell(cell: Cell) -> str:
    x, y, width, height = cell.x, cell.y, cell.width, cell.height
    drawn = (
        f'<rect class="cell {cell.style}" x="{x}" y="{y}" width="{width}" height="{height}" '
        f'rx="2"><title>{escape(plain.visible(cell.title))}</title></rect>'
    )
    if "nonfinite" in cell.style:
        left, right, top, bottom = x + 3, x + width - 3, y + 3, y + height - 3
        lines = f"M{left} {top}L{right} {bottom}M{right} {top}L{left} {bottom}"
        drawn += f'<path class="cross" d="{lines}"/>'
    elif "bad" in cell.style:
        drawn += f'<circle class="spot" cx="{x + width / 2}" cy="{y + height / 2}" r="3"/>'
    return drawn


def _cell(value: object, right: bool, digits: int) -> str:
    """Plain digits that can be copied; numbers also as they are, for sorting."""
    if isinstance(value, float):  # 0.99999999 must not read as 1
        text = f"{value:.10g}" if 0.99 < abs(value) < 1 else f"{value:.{digits}g}"
        if 10**digits - 0.5 <= abs(value) < 1e15:  # no exponent for a time of a long token
            text = f"{value:.0f}"
        return f'<td class="num" data-value="{value!r}">{text}</td>'
    if value is None:
        return '<td class="num">–</td>' if right else "<td>–</td>"
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td class="num" data-value="{value}">{value}</td>'
    return _text_cell(str(value))


@functools.lru_cache(maxsize=4096)  # outcomes, ops and modes recur
def _text_cell(text: str) -> str:
    return f"<td>{escape(plain.visible(text))}</td>"


def csv_bytes(table: Table) -> bytes:
    """RFC 4180, UTF-8. A text that a spreadsheet would run as a formula is led by an apostrophe."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\r\n")
    writer.writerow(table.columns)
    if all(table.numeric):
        writer.writerows(table.rows)
    else:
        writer.writerows([_csv_cell(value) for value in row] for row in table.rows)
    return target.getvalue().encode("utf-8", errors="replace")


def _csv_cell(value: object) -> object:
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def as_json(report: SiteReport) -> Mapping[str, object]:
    """The report for programs."""
    return {**dataclasses.asdict(report), "index": str(report.index)}
