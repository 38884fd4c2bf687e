"""What `harness align` and `harness bisect options` print."""

from __future__ import annotations

from typing import Any

from harness.bisect.option_verdicts import Culprits, Outcome, Verdict
from harness.bisect.ranking import Effect, Ranked
from harness.bisect.trials import Result, Trial
from harness.cli.bisect_options import lines, told
from harness.farm.alignment_report import report, worst_ops
from harness.farm.option_search import Progress, Report
from harness.farm.results import CampaignResult, StageResult
from harness.verdicts import Check
from harness.verdicts import Outcome as StageOutcome
from harness.verdicts import Verdict as StageVerdict
from tests.planted.simulated_options import space


def op(name: str, outcome: str, error: float | None, **more: Any) -> dict[str, Any]:
    return {
        "op": name,
        "mode": "local",
        "cosine": 0.99999,
        "rel_l2": error,
        "base_rel_l2": 1e-7,
        "worst_row_rel_l2": error,
        "int8_steps": 0.4,
        "outcome": outcome,
        **more,
    }


def result() -> CampaignResult:
    checks = (
        Check(name="text", outcome=StageOutcome.PASS, measured=1, limit=1, sentence="Same text."),
        Check(name="ops_local", outcome=StageOutcome.FAIL, measured=1, limit=0, sentence="One is."),
        Check(name="repeatable", outcome=StageOutcome.PASS, measured=1, limit=1, sentence="Same."),
    )
    verdict = StageVerdict(
        outcome=StageOutcome.FAIL,
        headline="L01.ffn.down is the first op that goes wrong: off by 0.02",
        checks=checks,
        culprit="L01.ffn.down",
        remedy="compare it with its definition",
        details={
            "ops": [
                op("L00.attn.q", "pass", 1e-6),
                op("L01.ffn.down", "fail", 0.02),
                op("L01.ffn.up", "pass", 1e-5),
                op("head.logits", "fail", None, cosine=None, rel_l2=None),
            ],
            "logits": {"positions": 96, "p99_kl": 0.1, "p99_kl_low": 0.05, "p99_kl_high": 0.2},
            "text": {"tokens": 300, "repetition_rate": 0.25},
        },
    )
    stage = StageResult("rk-01", "accuracy", verdict, "run-1")
    return CampaignResult("c", {"rk-01": {"accuracy": stage}}, False, ())


def test_the_verdict_comes_first_and_then_what_it_rests_on_in_the_order_of_the_algorithm() -> None:
    found = list(report(result()))
    assert found[0].startswith("rk-01 FAIL: L01.ffn.down is the first op that goes wrong")
    assert [line.split()[0] for line in found[1:4]] == ["repeats", "local", "text"]
    assert "! One is." in found[2]
    assert "99th percentile of KL 0.1 (0.05 to 0.2); 25% of the text's" in found[4]
    assert found[-1] == "  next: compare it with its definition"
    assert result().details()["rk-01"]["text"]["tokens"] == 300


def test_the_worst_ops_are_those_that_failed_and_then_those_with_the_largest_error() -> None:
    ops = result().results["rk-01"]["accuracy"].verdict.details["ops"]
    names = [found["op"] for found in worst_ops(ops, 3)]
    assert names == ["head.logits", "L01.ffn.down", "L01.ffn.up"]
    table = list(report(result(), worst=3))[-4:]
    assert table[0].split()[:3] == ["op", "mode", "cosine"]
    assert table[0].endswith("worst row  int8 steps  outcome")
    assert "–" in table[1]
    assert table[2].endswith("fail")


def test_a_search_is_told_with_what_to_switch_off_and_commands_to_see_it() -> None:
    found = Culprits(("fusion.qkv", "kv"), ("kv_layout",), (), 0.995)
    verdict = Verdict(Outcome.NAMED, "fusion.qkv with kv make it fail", (found,), ("kv",), 0.995)
    shown = Report("abcdef123456", "rk-01", verdict, 31, space(2), None, "harness a", "harness b")
    text = "\n".join(lines(shown))
    assert text.startswith("rk-01 NAMED: fusion.qkv with kv make it fail\n")
    assert "to blame      kv: keys and values f32 → f16" in text
    assert "which need    kv_layout" in text
    assert "switch off    kv" in text
    assert "fails         harness a\n  passes        harness b" in text
    assert shown.exit_code == 0


def test_a_graded_loss_is_told_as_a_table_and_is_no_name() -> None:
    ranked = Ranked(0.0, 0.4, (Effect("int8.L01", 0.1, 0.1), Effect("kv", None, None)))
    verdict = Verdict(Outcome.GRADED, "many of them", suspects=("int8.L01",))
    shown = Report("abcdef123456", "rk-01", verdict, 31, space(2), ranked, "", "")
    text = "\n".join(lines(shown))
    assert "int8.L01" in text
    assert "25%" in text
    assert shown.exit_code == 1
    asked = Report("a", "b", verdict, 31, space(2), ranked, "", "", asked=Outcome.GRADED)
    assert asked.exit_code == 0


def test_a_trial_is_told_in_one_line() -> None:
    trial = Trial("ranking", {"on": ["kv"]}, Result.PASS, value=0.0123)
    assert told(Progress(3, trial, None, 20)) == (
        "trial 3 of 20, ranking: 1 options on, pass, KL 0.012"
    )
