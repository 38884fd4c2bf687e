"""Lines of logs and reports of sanitisers, as boards print them, and any garbage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.triage.kernel import Note, of_process, parse_lines
from harness.triage.output import parse_fatal, parse_sanitizer, parse_threads
from harness.triage.record import code_name, parse_record
from harness.triage.waiting import states

DATA = Path(__file__).with_name("data")
LINES = sorted(path for path in DATA.glob("*.txt") if not path.name.startswith("output-"))
OUTPUTS = sorted(DATA.glob("output-*.txt"))


def golden(path: Path) -> tuple[Any, str]:
    """(what is expected, the text as a board printed it)."""
    head, _, text = path.read_text().partition("\n")
    return json.loads(head.removeprefix("# expect: ")), text


@pytest.mark.parametrize("path", LINES, ids=lambda path: path.stem)
def test_a_line_of_a_log_is_read_as_what_it_says(path: Path) -> None:
    expected, text = golden(path)
    notes = parse_lines(text.splitlines())
    if expected is None:
        assert notes == ()
        return
    (note,) = notes
    assert {name: getattr(note, name) for name in expected} == expected
    assert note.line == text.strip()


@pytest.mark.parametrize("path", OUTPUTS, ids=lambda path: path.stem)
def test_what_an_engine_printed_is_read_as_what_it_says(path: Path) -> None:
    expected, text = golden(path)
    if "fatal" in expected:
        fatal = parse_fatal(text)
        assert fatal is not None
        (current,) = [thread for thread in fatal.threads if thread.current]
        assert fatal.what == expected["fatal"]
        assert len(fatal.threads) == expected["threads"]
        frames = list(map(str, current.frames))
        assert frames[: len(expected["current"])] == expected["current"]
        return
    report = parse_sanitizer(text)
    assert report is not None
    found: dict[str, Any] = {"tool": report.tool, "what": report.what, "region": report.region}
    access = report.accesses[0] if report.accesses else None
    if access is not None:
        found |= {"access": access.kind, "size": access.size}
    found["frame"] = str((access.frames if access is not None else report.frames)[0])
    assert {name: found[name] for name in expected} == expected


def test_a_race_is_told_with_both_its_sides() -> None:
    report = parse_sanitizer(golden(DATA / "output-tsan-data-race.txt")[1])
    assert report is not None
    assert [(side.kind, side.previous) for side in report.accesses] == [
        ("write", False),
        ("read", True),
    ]
    assert [str(side.frames[0]) for side in report.accesses] == [
        "append (kernels_attention.h:40)",
        "attend (kernels_attention.h:96)",
    ]


def test_lines_count_for_the_process_that_they_name() -> None:
    lines = [golden(DATA / f"{name}.txt")[1] for name in ("kernel-oom-global", "rknpu-soft-reset")]
    notes = parse_lines(lines)
    assert [note.kind for note in of_process(notes, {4212})] == ["oom", "npu"]
    assert [note.kind for note in of_process(notes, {99}, "python3")] == ["npu"]
    # in a container the kernel knows it by another number
    assert [note.kind for note in of_process(notes, {99}, "python3", nested=True)] == ["oom", "npu"]


@settings(max_examples=200)
@given(st.lists(st.text(max_size=200), max_size=6))
@example(["traps: " * 400])
@example(["x[1]: segfault at " + "f" * 3000])
@example(["INFO: task " + "a:" * 900 + "1 blocked for more than 9 seconds"])
def test_any_lines_are_notes_or_nothing(lines: list[str]) -> None:
    for note in parse_lines(lines):
        assert isinstance(note, Note)


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from([*"#0 xF:()+=\n", *"WT", "WRITE of size 4 at 0x1", "==1==ERROR: "])
    ).map("".join)
)
@example("==1==ERROR: AddressSanitizer: ")
@example("==1==ERROR: AddressSanitizer: x\n" + "    #0 " * 500)
@example("Fatal Python error: x\n" + "Current thread 0x1 (most recent call first):\n" + "  " * 4000)
@example("thread 1 (a): state S, 0.00 of 0.30 s on a CPU, waits in " + "f" * 500)
def test_any_output_is_a_report_or_nothing(text: str) -> None:
    parse_fatal(text)
    parse_sanitizer(text)
    parse_threads(text)
    states(text)


RECORD = """crash-record 1
machine aarch64
build 0123456789abcdef0123456789abcdef
anchor dn_isas 0xffff9c2c1000
signal 4
code 1
address 0xffff9c2d1a40
process 812
thread 815
op L00.attn.qkv
register x0 0x7
register sp 0xffffe0001000
pc 0xffff9c2d1a40
sp 0xffffe0001000
esr 0x2000000
before 0xffff9c2d1a3c 1f2003d5
at 0xffff9c2d1a40 0094824e1f2003d5
maps
ffff9c2c0000-ffff9c2dd000 r-xp 00000000 b3:02 1234                       /board/libdecode_native.so
ffffe0000000-ffffe0021000 rw-p 00000000 00:00 0                          [stack]
stack 0xffffe0001000 00010203
end
"""


def test_a_crash_record_is_read_whole() -> None:
    record = parse_record(RECORD)
    assert record is not None and record.whole
    assert (record.signal, record.op, record.pc) == (4, "L00.attn.qkv", 0xFFFF9C2D1A40)
    assert record.at.startswith(bytes.fromhex("0094824e"))
    region = record.region(record.pc)
    assert region is not None and region.executable and region.module == "libdecode_native.so"
    assert record.registers["x0"] == 7
    assert record.stack == bytes(range(4))
    assert code_name(record.signal, record.code) == "ILL_ILLOPC"


def test_a_record_that_was_cut_tells_what_was_written() -> None:
    cut = parse_record(RECORD[: RECORD.index("pc 0x")])
    assert cut is not None and not cut.whole
    assert (cut.signal, cut.pc, cut.at) == (4, None, b"")


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_record_is_read_or_refused(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(RECORD)))
    text = (
        RECORD[:at] + data.draw(st.text(max_size=40)) + RECORD[at + data.draw(st.integers(0, 60)) :]
    )
    record = parse_record(text)
    if record is not None:
        assert 0 < record.signal < 65
        assert re.fullmatch(r"[A-Za-z0-9._+-]*", record.op)
        record.region(0)
