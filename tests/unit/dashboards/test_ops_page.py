"""The Ops page adds up and links its trace; the plan on the Bring-up page has what was measured."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dashboards.charts import Table
from dashboards.pages import bringup, farm, ops
from dashboards.pages.base import Places
from dashboards.pages.planned import section
from dashboards.reading import load
from dashboards.site import table_rows, write_site
from harness.deploy.models import prepare_tiny
from harness.store import Store
from harness.verdicts import Outcome


@pytest.fixture
def profiled(troubled_store: Store) -> Any:
    results = load(troubled_store)
    return next(run for run in results.runs if run.stage == "profile")


def test_tables_add_up_to_the_token(profiled: Any) -> None:
    d = profiled.details
    assert not d.problems
    deep = d["depths"][-1]
    for table, column, scale in ((ops.parts_table(d), 2, 1.0), (ops.groups_table(d), 2, 1e3)):
        *rows, whole = table.rows
        assert sum(row[column] for row in rows) == pytest.approx(whole[column])
        assert whole[column] == pytest.approx(scale * deep.traced_ms)
    shares = ops.share_bars(d).table.rows
    assert sum(row[1] for row in shares) == pytest.approx(deep.traced_ms)
    assert shares[-1][0] == "between ops"


def test_a_long_time_is_written_in_digits() -> None:
    cells = [151234.5, 9999.7, 1234.56, 0.00206737]
    drawn = table_rows(Table("t", ("µs",), tuple((cell,) for cell in cells), digits=4))
    assert re.findall(r">([^<>\n]+)<", drawn) == ["151234", "10000", "1235", "0.002067"]
    assert 'data-value="151234.5"' in drawn


def test_rates_stand_against_the_measured_ceiling(profiled: Any) -> None:
    drawn = ops.rate_bars(profiled.details)
    assert [limit.amount for limit in drawn.limits] == ["11.2 GB/s"]
    assert {"head.logits", "ffn.gate_up"} <= {words for words, _ in drawn.rows}
    assert "embed.tokens" not in {words for words, _ in drawn.rows}  # it reads next to nothing


def test_the_page_names_the_limit_and_links_a_trace_that_is_there(troubled_site: Path) -> None:
    page = next(troubled_site.glob("boards/pi5-03*/ops.html"))
    text = page.read_text()
    assert "Memory bound" in text and "of the 11.2 GB/s" in text
    assert "<span>Noted</span>" in text  # the bottleneck has no limit that it could pass
    link = re.search(r'href="([^"]+-trace\.json)" download', text)
    assert link is not None
    trace = json.loads((page.parent / link[1]).resolve().read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"L00.attn.mix", "head.logits", "process_name", "thread_name"} <= names
    assert trace["otherData"]["board"] == "pi5-03"
    bringup = (page.parent / "index.html").read_text()
    assert "Memory bound: a token reads" in bringup and 'ops.html">Ops page</a>' in bringup


def test_every_chart_has_its_table(troubled_site: Path) -> None:
    text = next(troubled_site.glob("boards/pi5-03*/ops.html")).read_text()
    for figure in re.findall(r'<figure class="(?:chart|bars)".*?</figure>', text, re.S):
        assert "<table" in figure


def test_a_profile_without_some_numbers_still_has_a_page(sample: Any, store: Store) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "profile", kind="profile")
    book.board("odd", host="h")
    verdict = sample.profile_verdict(1)
    for missing in ("depths", "typical", "groups", "cores"):
        partial = {k: v for k, v in verdict.details.items() if k != missing}
        book.run("odd", "profile", verdict.model_copy(update={"details": partial}))
    book.run("odd", "profile", None)
    book.finish(Outcome.PASS)
    for run in load(store).runs:
        d = run.details
        found = (ops.share_bars(d), ops.rate_bars(d), ops.parts_table(d), ops.token_chart(d))
        assert len(found) == 4 and ops.meanwhile(d) is not None


def test_the_plan_has_what_was_measured_beside_it(
    sample: Any, store: Store, tmp_path: Path
) -> None:
    model = prepare_tiny(3)
    facts = {k: v for k, v in sample.facts().items() if k != "sftp"}
    curve = sample.curve_verdict(1)
    book = sample.Recorder(store)
    book.campaign("harness", "bringup")
    book.board("here", host="h", facts=facts)
    run_id = book.run("here", "curve", curve, known=facts)
    assert section(load(store).cases[0]) is None  # the model's shapes are not known
    row = store.run(run_id)
    store.record_model(row.model_hash or "", hyperparameters=model.hyperparameters.to_json())
    case = load(store).cases[0]
    found = section(case)
    assert found is not None
    assert len(found.table.rows) == 12
    engine = {"engine": {"kv": "f32"}}
    ran = dataclasses.replace(
        case, runs={"curve": dataclasses.replace(case.runs["curve"], engine=engine)}
    )
    beside = section(ran)
    assert beside is not None and len(beside.table.rows) == 16  # f32 is what ran
    (row_of_run,) = [one for one in beside.table.rows if one[-1] is not None]
    assert row_of_run[1] == "f32"
    assert row_of_run[-1] == pytest.approx(curve.details["tokens_per_s_end"], abs=0.06)
    assert any("first to try" in str(row[0]) for row in found.table.rows)
    write_site(load(store), tmp_path / "site")
    text = next((tmp_path / "site").glob("boards/here*/index.html")).read_text()
    assert "What would fit, and how fast at most" in text
    assert "7921 MiB" in text


@pytest.mark.parametrize(("speed", "told"), [(1.0, False), (0.5, True)])
def test_a_limit_that_does_not_explain_the_curve_is_told_as_such(
    sample: Any, store: Store, speed: float, told: bool
) -> None:
    book = sample.Recorder(store)
    book.campaign("harness", "demo")
    book.board("one", host="h")
    profile = sample.profile_verdict(1)
    deep = 1e3 / profile.details["depths"][-1]["token_ms"]
    curve = sample.curve_verdict(1)
    details = {**curve.details, "tokens_per_s_end": deep * speed}
    book.run("one", "curve", curve.model_copy(update={"details": details}))
    book.run("one", "profile", profile)
    book.finish(Outcome.PASS)
    results = load(store)
    (row,) = farm.speeds(results, Places(results))
    assert row.why.startswith("Memory bound")
    assert ("something else took time while the curve was measured" in row.why) is told


def test_only_stages_of_one_bring_up_that_come_from_others_are_told(
    sample: Any, store: Store
) -> None:
    book = sample.Recorder(store)
    told = []
    for stage, verdict in (
        ("curve", sample.curve_verdict(1)),
        ("profile", sample.profile_verdict(1)),
        ("tiny", sample.tiny_verdict()),
    ):
        book.campaign("harness", "bringup")
        book.board("one", host="h")
        book.run("one", stage, verdict)
        book.finish(Outcome.PASS)
        (case,) = load(store).cases
        told.append(any("different campaigns" in note for note in bringup.notes(case)))
    assert told == [False, False, True]
