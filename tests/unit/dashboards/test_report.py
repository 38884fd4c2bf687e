"""The acceptance report: what is accepted, and one file that holds all."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dashboards.acceptance import (
    FAIL,
    INVALID,
    MISSING,
    PASS,
    STAGES,
    Acceptance,
    Line,
    accept,
    as_json,
)
from dashboards.data import Board, Campaign, Case, CrashGroup, Details, Results, Run
from dashboards.pages import report
from dashboards.pages.base import Places
from dashboards.site import POLICY, make_environment, render
from harness.cli.report import app, choose
from harness.errors import HarnessError
from harness.store import Store
from harness.verdicts import Check, Outcome

BUDGET = {
    "memory_mb": 600.0,
    "min_tokens_per_s": 8.0,
    "max_ttft_s": 2.0,
    "min_cosine": 0.99,
    "max_kl": 0.05,
    "min_end_of_context_ratio": 0.5,
}
MEASURED: dict[str, dict[str, float | str]] = {
    "tiny": {"tokens_equal": 256, "memory_stable": 0.1},
    "accuracy": {
        "ops_local": 0,
        "min_cosine": 0.9999,
        "mean_kl": 0.003,
        "top1": 0.97,
        "text": "identical",
    },
    "ladder": {"ladder": 14.0},
    "curve": {
        "right_at_depth": 0.4,
        "kernels": "fast",
        "clocks": "valid",
        "ttft_s": 1.0,
        "tokens_per_s_at_end": 12.0,
        "end_of_context_ratio": 0.9,
        "engine_steps": 0,
    },
    "stress": {
        "memory_mb": 300.0,
        "leak": "none",
        "sustained_ratio": 0.99,
        "throttled": 0,
        "restart": 1,
        "cancelled": 3,
        "context_limit": 4,
        "golden_same": "77aa",
    },
}
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def campaign(number: int) -> Campaign:
    return Campaign(f"c{number}", "bringup", "harness bringup -b b1", "pass", START, START)


def stage_run(stage: str, number: int = 2, **changes: Any) -> Run:
    checks = tuple(
        Check(name=name, outcome=Outcome.PASS, measured=value, limit=None, sentence="As measured.")
        for name, value in MEASURED[stage].items()
    )
    raw = {"ceiling_tokens_per_s": 40.0, "bandwidth_gb_s": 9.4} if stage == "curve" else None
    run = Run(
        id=f"{stage}-{number}",
        campaign=campaign(number),
        board=Board("b1", budget=BUDGET),
        model="m",
        scheme="q4",
        stage=stage,
        state="judged",
        outcome=Outcome.PASS,
        headline="fine",
        culprit=None,
        remedy=None,
        error_kind=None,
        checks=checks,
        details=Details(stage, raw),
        started_at=START + datetime.timedelta(hours=number),
        finished_at=None,
        engine_hash="e1" * 32,
    )
    return dataclasses.replace(run, **changes)


def good_case(**changes: Run) -> Case:
    """Everything was measured and is good, twice; `changes` replace runs of stages."""
    runs = {stage: stage_run(stage) for stage in MEASURED} | changes
    earlier = {stage: stage_run(stage, 1) for stage in MEASURED}
    history = (*runs.values(), *earlier.values())
    return Case(Board("b1", budget=BUDGET), "m", "q4", "4d" * 32, runs, earlier, history)


def with_check(stage: str, which: str, **changes: Any) -> Run:
    run = stage_run(stage)
    checks = tuple(
        check.model_copy(update=changes) if check.name == which else check for check in run.checks
    )
    return dataclasses.replace(run, checks=checks)


def line(found: Acceptance, id: str) -> Line:
    return next(one for one in found.lines if one.id == id)


def test_a_board_is_accepted_when_every_line_is() -> None:
    found = accept(good_case())
    assert [one for one in found.lines if one.verdict != PASS] == []
    assert found.accepted
    assert [step.name for step in found.steps] == [
        "Targets and baseline",
        "Compression",
        "Runtime tuning",
        "Integration and stress",
        "Rollout",
    ]
    assert line(found, "speed").target == "at least 8"
    assert line(found, "speed").run == "curve-2"


def test_what_was_not_measured_is_never_accepted() -> None:
    nothing = Case(Board("b1", budget=BUDGET), "m", "q4", "", {}, {}, ())
    found = accept(nothing)
    assert not found.accepted
    assert {one.verdict for one in found.lines if one.id != "targets"} == {MISSING}
    for stage in MEASURED:
        case = good_case()
        runs = {name: run for name, run in case.runs.items() if name != stage}
        assert not accept(dataclasses.replace(case, runs=runs)).accepted, stage
    for stage, names in MEASURED.items():
        for name in names:
            bare = with_check(stage, name, name="other")
            assert not accept(good_case(**{stage: bare})).accepted, name


@pytest.mark.parametrize(
    ("stage", "name", "measured"),
    [
        ("stress", "leak", "too short to tell"),
        ("stress", "sustained_ratio", None),
        ("stress", "throttled", "clocks unknown"),
        ("curve", "clocks", "unknown: this board does not expose them"),
    ],
)
def test_what_a_run_could_not_tell_is_missing_though_its_check_passed(
    stage: str, name: str, measured: object
) -> None:
    found = accept(good_case(**{stage: with_check(stage, name, measured=measured)}))
    assert [one.verdict for one in found.lines if one.verdict != PASS] == [MISSING]


def test_a_line_is_judged_by_the_targets_of_today() -> None:
    found = accept(good_case(), {**BUDGET, "min_tokens_per_s": 20.0})
    assert line(found, "speed").verdict == FAIL
    assert line(found, "ceiling").verdict == PASS
    assert (
        line(accept(good_case(), {**BUDGET, "min_tokens_per_s": 50.0}), "ceiling").verdict == FAIL
    )
    assert line(accept(good_case(), {**BUDGET, "max_ttft_s": None}), "ttft").verdict == MISSING


def test_a_number_that_must_not_be_judged_stays_so_whatever_the_target() -> None:
    run = with_check("curve", "tokens_per_s_at_end", outcome=Outcome.INVALID)
    assert line(accept(good_case(curve=run)), "speed").verdict == INVALID


def test_a_stage_that_did_not_end_is_not_measured_and_says_why() -> None:
    lost = stage_run("stress", outcome=Outcome.ERROR, checks=(), headline="the link was lost")
    found = line(accept(good_case(stress=lost)), "memory")
    assert found.verdict == MISSING
    assert "the link was lost" in found.sentence


def test_a_mix_of_engines_a_planted_fault_and_a_crash_are_no_rollout() -> None:
    assert (
        line(accept(good_case(stress=stage_run("stress", engine_hash="f0"))), "build").verdict
        == FAIL
    )
    fault = stage_run("accuracy", engine={"fault": "scale:1.02@L07"})
    assert line(accept(good_case(accuracy=fault)), "fault").verdict == FAIL
    worse = good_case()
    earlier = {**worse.earlier, "curve": stage_run("curve", 1, outcome=Outcome.FAIL)}
    assert line(accept(dataclasses.replace(worse, earlier=earlier)), "again").verdict == FAIL
    seen = CrashGroup.Seen("stress-2", "b1", "stress", START)
    group = CrashGroup("h", "crash", "s", "it crashed", "", "", "", (), (seen,))
    assert line(accept(good_case(), None, [group]), "crashes").verdict == FAIL


def html_of(case: Case) -> str:
    places = Places(Results((case,), (), case.history))
    return render(make_environment(), report.page(case, places), places)


class Sources(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(tag, name, value or "") for name, value in attrs]
        if tag in ("script", "iframe", "object", "embed", "form", "base"):
            self.found.append((tag, "", ""))


def test_the_file_needs_nothing_but_itself() -> None:
    text = html_of(good_case())
    for tag, name, value in Sources(text).found:
        assert tag not in ("script", "iframe", "object", "embed", "form", "base")
        assert not name.startswith("on")
        assert name != "style"
        if name in ("href", "src"):
            assert value.startswith(("#", "data:,")), value
    assert "url(" not in text
    assert "@import" not in text


def test_its_policy_allows_its_own_style_by_hash_and_nothing_else() -> None:
    text = html_of(good_case())
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    policy = policy.replace("&#39;", "'")
    assert f"style-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src" not in policy
    assert f"'sha256-{digest}'" in POLICY  # or a served site would refuse it


def test_what_a_board_says_is_text_in_the_report() -> None:
    text = "<script>alert(1)</script>\u202e"
    case = good_case(stress=with_check("stress", "leak", sentence=text, measured=text))
    html = html_of(case)
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "\u202e" not in html


def test_the_report_as_json_has_every_line_with_its_run() -> None:
    told = json.loads(json.dumps(as_json(good_case(), accept(good_case()))))
    assert told["accepted"] is True
    lines = [one for step in told["steps"] for one in step["lines"]]
    assert {one["verdict"] for one in lines} == {"pass"}
    speed = next(one for one in lines if one["id"] == "speed")
    assert (speed["run"], speed["measured"]) == ("curve-2", "12")


def test_a_board_of_several_models_wants_one_named() -> None:
    other = dataclasses.replace(good_case(), model="llama-1b")
    results = Results((good_case(), other), (), ())
    with pytest.raises(HarnessError, match="ran 2 models; expected --model with one of"):
        choose(results, "b1", None)
    assert choose(results, "b1", "llama").model == "llama-1b"
    with pytest.raises(HarnessError, match="no results of the model 'qwen'"):
        choose(results, "b1", "qwen")


def test_the_command_writes_the_file_and_tells_by_its_exit_code(
    store: Store, sample: Any, tmp_path: Path
) -> None:
    sample.record_passing(store)
    path = str(store.database.label)
    out = tmp_path / "report.html"
    runner = CliRunner()
    answer = runner.invoke(app, ["-b", "pi5-03", "--store", path, "--out", str(out), "--json"])
    assert answer.exit_code == 1  # the sample's runs do not have every line
    assert json.loads(answer.stdout)["board"] == "pi5-03"
    assert "Acceptance report" in out.read_text()
    assert runner.invoke(app, ["-b", "nobody", "--store", path]).exit_code == 2
    assert set(STAGES) <= set(MEASURED)
