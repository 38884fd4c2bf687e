"""The host's copy of a spool: only the next, whole, well-formed events of the run get in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.records import Event, RecordError
from harness.errors import HarnessError
from harness.jobs.runlog import EventTail, RunLog

HASH = "0" * 64


def told(count: int, *, end: bool = False) -> bytes:
    lines = [Event(0, 5, "run-start", {"run_id": "r"}).to_line()]
    lines += [Event(n, 5 + n, "data", {"name": "a", "value": n}).to_line() for n in range(1, count)]
    if end:
        lines.append(Event(count, 99, "run-end", {"status": "finished", "reason": ""}).to_line())
    return b"".join(lines)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 2000), max_size=10))
def test_the_copy_is_the_same_however_it_arrives(tmp_path: Path, cuts: list[int]) -> None:
    data = told(12, end=True)
    path = tmp_path / "events.jsonl"
    path.unlink(missing_ok=True)
    tail, start = EventTail(path, "r"), 0
    for cut in sorted({min(cut, len(data)) for cut in cuts} | {len(data)}):
        assert tail.offset == start
        tail.feed(data[start:cut])
        start = cut
    assert path.read_bytes() == data
    assert tail.ended
    assert [event.n for event in tail.events] == list(range(13))


def test_it_goes_on_after_the_last_whole_line_that_is_there(tmp_path: Path) -> None:
    data = told(5)
    path = tmp_path / "events.jsonl"
    path.write_bytes(data + b'{"v":1,"n":5,"t')
    tail = EventTail(path, "r")
    assert tail.offset == len(data)
    assert path.read_bytes() == data
    assert len(tail.events) == 5
    tail.feed(told(7)[tail.offset :])
    assert len(tail.events) == 7


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_any_bytes_are_events_or_a_record_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(told(2))
    tail = EventTail(path, "r")
    try:
        new = tail.feed(data)
    except RecordError:
        return
    assert new == []  # hypothesis does not guess an event


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (told(3)[len(told(1)) :], "expected 0"),
        (told(2).replace(b'"r"', b'"other"'), "run 'other'"),
        (told(1) + told(1), "expected 1"),
        (told(2, end=True) + Event(3, 1, "log", {}).to_line(), "after the end"),
    ],
)
def test_events_that_are_not_the_next_of_this_run_are_refused(
    tmp_path: Path, data: bytes, complaint: str
) -> None:
    tail = EventTail(tmp_path / "events.jsonl", "r")
    with pytest.raises(RecordError, match=complaint):
        tail.feed(data)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "../x", "file": "../x"},
        {"name": "x", "file": "arrays/../../x.npz"},
        {"name": "x", "sha256": "zz"},
        {"name": "x", "bytes": 1 << 40},
        {"name": "x", "bytes": -1},
        {"name": "x", "bytes": True},
        {"name": None},
    ],
)
def test_an_array_event_that_could_harm_the_host_is_refused(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    tail = EventTail(tmp_path / "events.jsonl", "r")
    tail.feed(told(1))
    data = {"name": "x", "file": "arrays/x.npz", "sha256": HASH, "bytes": 1, **fields}
    with pytest.raises(RecordError):
        tail.feed(Event(1, 1, "array", data).to_line())


def test_an_array_that_was_changed_on_the_host_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays" / "x.npz").write_bytes(b"something else")
    data = {"name": "x", "file": "arrays/x.npz", "sha256": HASH, "bytes": 14}
    log = RunLog("r", [Event(0, 1, "array", data)], tmp_path, "finished", "")
    with pytest.raises(HarnessError, match="differs"):
        log.arrays("x")
