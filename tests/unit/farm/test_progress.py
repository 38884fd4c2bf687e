"""What people are told while a campaign runs."""

from __future__ import annotations

import io

from rich.console import Console

from harness.farm.progress import LiveTable, PlainLines, reporter_for
from harness.verdicts import Outcome, Verdict

PASSED = Verdict(outcome=Outcome.PASS, headline="48 tokens equal")
FAILED = Verdict(outcome=Outcome.FAIL, headline="first wrong op L07.ffn.down [red]")


def plain(quiet_s: float = 60.0) -> tuple[PlainLines, io.StringIO]:
    output = io.StringIO()
    reporter = PlainLines(Console(file=output, width=200), quiet_s=quiet_s)
    reporter.begin(["virt-1", "b"], ["tiny", "accuracy"])
    return reporter, output


def test_plain_lines_tell_a_stage_once_and_its_outcome_at_once() -> None:
    reporter, output = plain()
    for done in range(50):
        reporter.activity("b", "tiny", f"token {done}", done / 50)
    reporter.finished("b", "tiny", PASSED, reused=False)
    lines = output.getvalue().splitlines()[1:]
    assert lines == ["b       tiny        0%  token 0", "b       tiny      PASS: 48 tokens equal"]


def test_plain_lines_tell_each_new_stage() -> None:
    reporter, output = plain()
    for stage in ("", "tiny", "accuracy"):
        reporter.activity("b", stage, "working")
    assert output.getvalue().count("working") == 3


def test_a_reused_result_says_so() -> None:
    reporter, output = plain()
    reporter.finished("b", "tiny", PASSED, reused=True)
    assert "PASS (from the interrupted run): 48 tokens equal" in output.getvalue()


def test_text_of_a_board_cannot_steer_the_terminal_or_the_markup() -> None:
    reporter, output = plain()
    reporter.activity("b", "tiny", "\x1b[2Jgone [bold]\x07")
    assert "\x1b" not in output.getvalue()
    assert r"\x1b[2Jgone [bold]\x07" in output.getvalue()


def test_the_live_table_shows_outcomes_percent_and_activity() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, color_system=None)
    table = LiveTable(console)
    table.begin(["virt-1", "virt-2"], ["tiny", "accuracy"])
    table.finished("virt-1", "tiny", PASSED, reused=False)
    table.activity("virt-1", "accuracy", "layer 7 of 30", 0.25)
    table.finished("virt-2", "tiny", FAILED, reused=False)
    console.print(table._table())
    table.end()
    shown = output.getvalue()
    for text in ("pass", "25%", "layer 7 of 30", "fail", "virt-2 tiny FAIL: first wrong op"):
        assert text in shown
    assert "L07.ffn.down [red]" in shown


def test_a_terminal_gets_the_table_and_a_pipe_gets_lines() -> None:
    assert isinstance(reporter_for(Console(file=io.StringIO(), force_terminal=True)), LiveTable)
    assert isinstance(reporter_for(Console(file=io.StringIO())), PlainLines)


def test_one_board_is_not_called_boards() -> None:
    output = io.StringIO()
    PlainLines(Console(file=output, width=200)).begin(["v"], ["tiny"])
    assert output.getvalue() == "1 board: v; stages: tiny\n"
