"""Verdicts, exit codes, and what the table and the files say."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench import table
from tests.bench.ratios import Ratio
from tests.bench.results import (
    INVALID,
    MISSED,
    REACHED,
    REPORT,
    SKIPPED,
    TROUBLE,
    Check,
    Row,
    Target,
    exit_code,
    judged,
)

GOOD = Check("ours", 32, 29, 1.0, 0.001)
WRONG = Check("ours", 32, 29, 0.4, 2.0, "golden tokens differ: expected at least 90% of them")


def ratio(value: float) -> Ratio:
    return Ratio(value, value - 0.3, value + 0.4, (value - 0.1, value + 0.1), 11)


@pytest.mark.parametrize(
    ("value", "target", "verdict"),
    [
        (2.0, Target(2.0), REACHED),
        (1.99, Target(2.0), MISSED),
        (1.01, Target(1.01, at_least=False), REACHED),
        (1.02, Target(1.01, at_least=False), MISSED),
        (0.1, None, REPORT),
    ],
)
def test_a_number_is_judged_by_its_median(
    value: float, target: Target | None, verdict: str
) -> None:
    assert judged("b", "n", ratio(value), target=target).verdict == verdict


def test_speed_counts_for_nothing_when_the_golden_tokens_are_wrong() -> None:
    row = judged("b", "n", ratio(9.0), target=Target(2.0), checks=[GOOD, WRONG])
    assert row.verdict == INVALID
    assert "golden tokens differ" in row.notes[0]


def test_a_target_within_the_interval_is_called_close() -> None:
    assert judged("b", "n", ratio(2.05), target=Target(2.0)).close
    assert not judged("b", "n", ratio(2.5), target=Target(2.0)).close
    assert not judged("b", "n", ratio(2.05)).close


@pytest.mark.parametrize(
    ("verdicts", "strict", "code"),
    [
        ([REACHED, REPORT], False, 0),
        ([REACHED, SKIPPED], False, 0),
        ([REACHED, SKIPPED], True, 2),
        ([REACHED, MISSED], False, 1),
        ([REACHED, INVALID], False, 1),
        ([MISSED, TROUBLE], False, 2),
        ([], False, 2),
    ],
)
def test_the_exit_code_tells_a_finding_from_trouble(
    verdicts: list[str], strict: bool, code: int
) -> None:
    rows = [Row("b", "n", verdict) for verdict in verdicts]
    assert exit_code(rows, strict=strict) == code


ROWS = [
    judged(
        "decode",
        "model [x], a|b",
        ratio(2.5),
        target=Target(2.0, aim=2.6),
        checks=[GOOD],
        speeds="180.0 and 72.0 tok/s",
        evidence={"profile": [{"ops": "ffn.down of all layers", "ms": 1.5, "share": 0.25}]},
    ),
    judged("decode", "share", ratio(0.9), unit="%", target=Target(0.82)),
    Row("prefill", "against llama.cpp", SKIPPED, notes=("no compiler",)),
]


def test_the_terminal_shows_result_spread_target_and_reason() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table.as_table(ROWS, "Benchmarks"))
    text = console.export_text()
    for part in ("model [x]", "2.50 ×", "2.20 × … 2.90 ×", "≥ 2.00 ×, aim 2.60 ×", "90.0 %"):
        assert part in text
    assert "no compiler" in text


def test_the_report_holds_table_checks_machine_and_profile() -> None:
    text = table.as_markdown(ROWS, {"started": "now", "governor": "performance"})
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    # A bar inside a cell is escaped: all rows have as many cells as the heading.
    cells = {line.replace("\\|", "").count("|") for line in lines[: len(ROWS) + 3]}
    assert cells == {7}
    assert "- model [x]: ours: 100.0% of 29 clear best tokens" in text
    assert "- **governor**: performance" in text
    assert "| ffn.down of all layers | 1.500 | 25.0% |" in text


def test_the_stored_record_is_json_with_everything(tmp_path: Path) -> None:
    result, report = table.store(tmp_path / "run", ROWS, {"threads": 2})
    record = json.loads(result.read_text("utf-8"))
    assert record["about"] == {"threads": 2}
    assert [row["verdict"] for row in record["rows"]] == [REACHED, REACHED, SKIPPED]
    assert record["rows"][0]["ratio"]["interval"] == [2.4, 2.6]
    assert record["rows"][0]["checks"][0]["agreement"] == 1.0
    assert report.read_text("utf-8").startswith("# Benchmarks")
