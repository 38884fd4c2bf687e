"""The site as files: links, escaping, policy, determinism."""

from __future__ import annotations

import csv
import datetime
import io
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from dashboards import files, parts
from dashboards.charts import Table
from dashboards.data import Board, Campaign, Details, Glance, Results, Run, cases_of
from dashboards.pages import farm
from dashboards.pages.base import Places
from dashboards.reading import load
from dashboards.site import (
    POLICY,
    build,
    build_site,
    check_name,
    csv_bytes,
    files_of,
    prose,
    write_site,
)
from harness.store import Store
from harness.verdicts import Check, Outcome, Verdict

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """Tags with their attributes, ids, text, and whether tags were closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data

    def attributes(self, name: str) -> list[str]:
        return [str(found[name]) for _, found in self.tags if found.get(name) is not None]


@pytest.fixture(scope="module")
def pages(troubled_site: Path) -> dict[str, Page]:
    return {
        path.relative_to(troubled_site).as_posix(): Page(path)
        for path in troubled_site.rglob("*.html")
    }


def page_of(pages: dict[str, Page], board: str, name: str) -> Page:
    return next(page for path, page in pages.items() if f"/{board}--" in path and name in path)


def test_every_link_leads_to_a_file_and_a_place_that_exist(
    pages: dict[str, Page], troubled_site: Path
) -> None:
    for page in pages.values():
        for link in [*page.attributes("href"), *page.attributes("src")]:
            if link == "data:,":  # no icon, where a file must stand alone
                continue
            parts = urlsplit(link)
            assert not parts.scheme, link
            assert not parts.netloc, link
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            assert target.is_file(), f"{page.path}: {link}"
            assert target.is_relative_to(troubled_site)
            if parts.fragment and target.suffix == ".html":
                name = target.relative_to(troubled_site).as_posix()
                assert parts.fragment in pages[name].ids, f"{page.path}: {link}"


def test_every_page_is_well_formed_with_unique_ids(pages: dict[str, Page]) -> None:
    for page in pages.values():
        assert page.unbalanced == [], page.path
        assert len(page.ids) == len(set(page.ids)), page.path


def test_no_page_has_inline_style_script_or_handlers(pages: dict[str, Page]) -> None:
    for page in pages.values():
        if page.path.name == "report.html":  # to be mailed, so all is in it: see test_report
            continue
        for tag, found in page.tags:
            assert tag not in ("style", "iframe", "object", "embed", "base", "form")
            assert "style" not in found, page.path
            assert not any(name.startswith("on") for name in found), page.path
            if tag == "script":
                assert str(found["src"]).endswith("static/page.js")
        policies = [
            found["content"]
            for tag, found in page.tags
            if tag == "meta" and found.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policies == [POLICY]


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere() -> None:
    assert POLICY.startswith("default-src 'none'")
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


def test_the_farm_page_tells_board_stage_reason_and_remedy_without_a_click(
    pages: dict[str, Page], sample: Any
) -> None:
    text = pages["index.html"].text
    for part in (
        "rk3588-01",
        "L07.ffn.down is off by 2 %",
        "L07.ffn.down",
        "look at the kernel and the packed scales of ffn.down in layer 7",
        "host key SHA256:Hn1v2q8fT0aWkz",
        "harness boards enrol orin-nano-02",
        "the clock fell by 20 %",
        f"fault planted: {sample.FAULT}",
        "--tag nightly --stress-minutes 30",
    ):
        assert part in text


def test_every_outcome_has_its_own_icon_and_word(pages: dict[str, Page]) -> None:
    raw = pages["index.html"].path.read_text()
    icons = {}
    for word in ("Pass", "Warning", "Fail", "Invalid", "Error", "Blocked"):
        name = raw[: raw.index(f'"/></svg><span>{word}</span>')].rpartition('href="#')[2]
        icons[word] = raw.split(f'<symbol id="{name}"')[1].split("</symbol>")[0]
    assert len(set(icons.values())) == len(icons)


def test_hostile_text_of_a_board_is_text(pages: dict[str, Page], sample: Any) -> None:
    for name in ("index.html", "alignment.html"):
        page = next(
            page
            for path, page in pages.items()
            if path.endswith(name) and ("evil" in path or path == name)
        )
        assert sample.HOSTILE in page.text
        assert not any(tag == "img" for tag, _ in page.tags)
        assert "\x1b" not in page.path.read_text()
        assert "\u202e" not in page.path.read_text()
        assert "⟨U+202E⟩" in page.text
        assert '"><img src=x onerror=alert(1)>' in page.text


def test_a_divergence_is_told_with_the_limit_that_it_was_judged_by(
    pages: dict[str, Page],
) -> None:
    page = next(p for path, p in pages.items() if "rk3588" in path and "alignment" in path)
    # The sample's noise is 0.004 logits: two tokens may each be off by that much.
    assert "the reference prefers its own token by 0.83 logits, limit 0.008." in page.text


def test_what_can_be_read_of_partial_details_is_shown_and_the_rest_named(
    pages: dict[str, Page],
) -> None:
    page = next(p for path, p in pages.items() if "evil" in path and "alignment" in path)
    assert "logits.positions: input should be a valid integer" in page.text
    assert "Every op of every layer" in page.text
    assert "Top-1 agreement" not in page.text


def test_every_chart_has_its_data_as_a_table(pages: dict[str, Page]) -> None:
    for name in ("curve.html", "stress.html", "index.html"):
        page = page_of(pages, "pi5-03", name)
        raw = page.path.read_text()
        figures = raw.split("<figure")[1:]
        assert figures
        for figure in figures:
            body = figure.split("</figure>")[0]
            assert "<details" in body or 'class="chart heat"' in figure[:30]
    maps = page_of(pages, "rk3588-01", "alignment.html").path.read_text()
    assert "Every op as a table" in maps


def test_every_run_has_a_data_page_with_all_rows_as_csv(
    troubled_store: Store, troubled_site: Path
) -> None:
    results = load(troubled_store)
    run = next(r for r in results.runs if r.board.name == "pi5-03" and r.details["samples"])
    rows = list(csv.reader(io.StringIO((troubled_site / f"runs/{run.id}-samples.csv").read_text())))
    assert len(rows) == 1 + len(run.details["samples"])
    assert float(rows[5][rows[0].index("RSS MiB")]) == run.details["samples"][4].rss_mb
    for one in results.runs:
        assert (troubled_site / "runs" / f"{one.id}.html").is_file()


def test_a_text_that_a_spreadsheet_would_run_is_defused() -> None:
    table = Table("t", ("a", "b"), (("=cmd|'/c calc'!A1", -1.5), ('x,"y"', None)))
    assert csv_bytes(table) == b'a,b\r\n\'=cmd|\'/c calc\'!A1,-1.5\r\n"x,""y""",\r\n'


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mean_kl", "Mean KL"),
        ("ttft_s", "TTFT"),
        ("memory_mb", "Memory"),
        ("tokens_per_s_at_end", "Tokens per second at end"),
        ("top1", "Top-1"),
        ("s", "S"),
    ],
)
def test_a_check_is_named_in_words(name: str, words: str) -> None:
    check = Check(name=name, outcome=Outcome.PASS, measured=1, limit=None, sentence="")
    assert check_name(check) == words


def test_backticks_mark_code_and_never_markup() -> None:
    assert prose("run `a <b>` now") == "run <code>a &lt;b&gt;</code> now"
    assert prose("a stray ` and <i>") == "a stray ` and &lt;i&gt;"


def test_the_same_results_give_the_same_bytes_and_nothing_is_rewritten(
    troubled_store: Store, troubled_site: Path, tmp_path: Path
) -> None:
    second = write_site(load(troubled_store), tmp_path / "again")
    for path in troubled_site.rglob("*"):
        if path.is_file():
            twin = tmp_path / "again" / path.relative_to(troubled_site)
            assert twin.read_bytes() == path.read_bytes()
    third = write_site(load(troubled_store), tmp_path / "again")
    assert (third.written, third.removed) == (0, 0)
    assert third.unchanged == second.written


def test_new_results_rewrite_only_the_pages_they_touch(
    store: Store, sample: Any, tmp_path: Path
) -> None:
    out = tmp_path / "site"
    sample.record_passing(store)
    build(store, out)
    other = next(out.glob("boards/pi5-03*/index.html"))
    before = other.stat().st_mtime_ns
    book = sample.Recorder(store)
    book.campaign("harness", "bringup", "--board", "rk3588-01")
    book.run("rk3588-01", "tiny", Verdict(outcome=Outcome.FAIL, headline="token 5 differs"))
    report = build(store, out)
    assert report.written == 4  # farm, bring-up and report of the board, data page of the run
    assert other.stat().st_mtime_ns == before
    assert "token 5 differs" in (out / "index.html").read_text()


def test_a_page_is_read_from_the_store_again_only_when_its_board_has_results(
    store: Store, sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[set[str]] = []
    real = parts.whole_runs

    def noted(opened: Store, ids: set[str]) -> dict[str, dict[str, Any]]:
        read.append(ids)
        return real(opened, ids)

    monkeypatch.setattr(parts, "whole_runs", noted)
    out = tmp_path / "site"
    sample.record_passing(store)
    build(store, out)
    assert len(read) == 3
    before = (out / "index.html").read_bytes()
    build(store, out)
    assert len(read) == 3
    assert (out / "index.html").read_bytes() == before
    next(out.glob("boards/pi5-03*/curve.html")).unlink()  # by somebody
    build(store, out)
    assert len(read) == 4
    assert next(out.glob("boards/pi5-03*/curve.html")).is_file()


def test_a_build_that_was_killed_is_taken_up_where_it_was(
    store: Store, sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "site"
    sample.record_passing(store)
    build(store, tmp_path / "whole")
    calls = []

    def killed(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) == 20:
            raise KeyboardInterrupt
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    with monkeypatch.context() as patched:
        patched.setattr(files, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            build(store, out)
    assert not (out / "index.html").exists()
    build(store, out)
    whole, mended = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.*") if path.is_file()}
        for root in (tmp_path / "whole", out)
    )
    assert mended == whole


def test_processes_side_by_side_make_the_same_pages(
    store: Store, sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample.record_passing(store)
    build(store, tmp_path / "one")
    monkeypatch.setattr(parts, "_processes", lambda count: 2)
    build(store, tmp_path / "two")
    for path in (tmp_path / "one").rglob("*.html"):
        assert (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes() == (
            path.read_bytes()
        )


def test_a_farm_of_hundreds_of_boards_fits_into_half_a_megabyte() -> None:
    def run(name: str, stage: str, outcome: Outcome) -> Run:
        return Run(
            id=f"{name}-{stage}",
            campaign=Campaign("c", "nightly", "harness nightly", "fail", START, START),
            board=Board(name),
            model="SmolLM2-135M-Instruct",
            scheme="W4A16 (Q4_1)",
            stage=stage,
            state="judged",
            outcome=outcome,
            headline="24.3 → 14.4 tok/s over 2,048 positions",
            culprit=None,
            remedy="look at the board",
            error_kind=None,
            checks=(),
            details=Details(stage, None),
            started_at=START,
            finished_at=START,
            glance=Glance("24.3 → 14.4 tok/s", None, True, ("The clock fell by 20 %.",)),
        )

    runs = [
        run(f"board-{number:03}", stage, Outcome.FAIL if number % 2 else Outcome.WARN)
        for number in range(200)
        for stage in ("tiny", "accuracy", "ladder", "curve", "stress")
    ]
    results = Results(cases_of(runs), (runs[0].campaign,), ())
    places = Places(results)
    (index,) = files_of([farm.page(results, places)], places).values()
    assert len(index) < 500_000
    assert index.count(b"<tr>") > 200


def test_an_empty_store_gives_a_page_that_says_how_to_begin(store: Store, tmp_path: Path) -> None:
    index = build_site(store, tmp_path / "site")
    text = Page(index).text
    assert "Nothing has run yet" in text
    assert "harness demo" in text
    assert [path.name for path in (tmp_path / "site").glob("*.html")] == ["index.html"]


def test_a_run_in_progress_is_shown_as_running(store: Store, sample: Any, tmp_path: Path) -> None:
    sample.record_unfinished(store)
    text = Page(build_site(store, tmp_path / "site")).text
    assert "a53-04 is running" in text
    assert "Running" in text


def test_boards_that_could_not_be_reached_at_all_still_have_pages(
    store: Store, sample: Any, tmp_path: Path
) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    error = Verdict(outcome=Outcome.ERROR, headline="no route to 10.0.0.9", remedy="is it on?")
    book.run("gone-01", "tiny", error, error_kind="unreachable")
    book.blocked("gone-01", "tiny", "accuracy", "curve", "stress")
    book.finish(Outcome.ERROR)
    out = tmp_path / "site"
    build(store, out)
    for path in out.rglob("*.html"):
        Page(path)
    (bringup,) = out.glob("boards/gone-01*/index.html")
    text = Page(bringup).text
    assert "no route to 10.0.0.9" in text
    assert "is it on?" in text
    (curve,) = out.glob("boards/gone-01*/curve.html")
    assert "This stage did not run" in Page(curve).text
