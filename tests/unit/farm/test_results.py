"""What a campaign's outcomes mean together."""

from __future__ import annotations

import json

import pytest

from harness.farm.results import INTERRUPTED, CampaignResult, StageResult
from harness.verdicts import Check, Outcome, Verdict


def stage(board: str, name: str, outcome: Outcome, kind: str | None = None) -> StageResult:
    verdict = Verdict(outcome=outcome, headline=f"{name} said so")
    return StageResult(board, name, verdict, "run", error_kind=kind)


def campaign(*items: StageResult, interrupted: bool = False) -> CampaignResult:
    results: dict[str, dict[str, StageResult]] = {}
    for item in items:
        results.setdefault(item.board, {})[item.stage] = item
    return CampaignResult("id", results, interrupted, ())


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([Outcome.PASS, Outcome.PASS], 0),
        ([Outcome.PASS, Outcome.WARN], 0),
        ([Outcome.PASS, Outcome.FAIL], 1),
        ([Outcome.FAIL, Outcome.BLOCKED], 1),
        ([Outcome.INVALID], 1),
        ([Outcome.PASS, Outcome.ERROR], 2),
        ([Outcome.FAIL, Outcome.ERROR], 2),
    ],
)
def test_exit_code_tells_findings_from_infrastructure(outcomes: list[Outcome], code: int) -> None:
    items = [stage(f"board-{n}", "tiny", outcome) for n, outcome in enumerate(outcomes)]
    assert campaign(*items).exit_code == code


def test_a_stopped_campaign_is_never_a_success() -> None:
    assert campaign(stage("one", "tiny", Outcome.PASS), interrupted=True).exit_code == 2


def test_a_campaign_without_results_is_not_a_success() -> None:
    assert campaign().exit_code == 2


def test_json_tells_every_stage_with_its_checks() -> None:
    check = Check(
        name="min_cosine",
        outcome=Outcome.FAIL,
        measured=0.9,
        limit=0.99,
        sentence="L07.ffn.down is off",
    )
    verdict = Verdict(
        outcome=Outcome.FAIL, headline="bad op", checks=(check,), culprit="L07.ffn.down"
    )
    result = campaign(StageResult("one", "accuracy", verdict, "run-1", attempts=2))
    told = json.loads(json.dumps(result.as_json()))
    cell = told["boards"]["one"]["accuracy"]
    assert (told["exit_code"], told["outcome"]) == (1, "fail")
    assert (cell["culprit"], cell["run_id"], cell["attempts"]) == ("L07.ffn.down", "run-1", 2)
    assert cell["checks"][0]["measured"] == 0.9


def test_an_explanation_names_kind_checks_culprit_and_remedy() -> None:
    verdict = Verdict(
        outcome=Outcome.ERROR,
        headline="no Python",
        remedy="install one",
        checks=(
            Check(name="good", outcome=Outcome.PASS, measured=1, limit=1, sentence="all well"),
            Check(name="python", outcome=Outcome.ERROR, measured=None, limit=None, sentence="none"),
        ),
    )
    text = "\n".join(StageResult("one", "tiny", verdict, None, error_kind="no-python").explain())
    assert text == "one tiny ERROR (no-python): no Python\n  python: none\n  next: install one"


def test_an_interrupted_stage_is_marked_apart_from_an_invalid_one() -> None:
    assert stage("one", "tiny", Outcome.INVALID, INTERRUPTED).error_kind == "interrupted"
