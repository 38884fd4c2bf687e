"""The spool's pieces: lines, numbering, full disks, capped logs, safe names."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.records import Event, RecordError
from engine.spool import (
    LINE_LIMIT,
    CappedLog,
    EnginePipe,
    LineSplitter,
    SpoolError,
    SpoolFull,
    SpoolWriter,
    array_file,
    parse_engine_line,
    save_arrays,
)


def events(folder: Path) -> list[Event]:
    return [Event.from_line(x) for x in (folder / "events.jsonl").read_bytes().splitlines()]


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=8), st.integers(1, 60))
def test_lines_do_not_depend_on_how_the_stream_is_cut(
    data: bytes, cuts: list[int], limit: int
) -> None:
    whole, pieces = LineSplitter(limit), LineSplitter(limit)
    expected = whole.feed(data)
    found, start = [], 0
    for cut in sorted({min(cut, len(data)) for cut in cuts} | {len(data)}):
        found += pieces.feed(data[start:cut])
        start = cut
    assert found == expected
    assert found == [x for x in data.split(b"\n")[:-1] if 0 < len(x) <= limit]
    assert pieces.dropped == whole.dropped
    assert pieces.remainder() == whole.remainder()


@given(st.binary(max_size=200))
def test_any_line_is_an_event_or_a_record_error(line: bytes) -> None:
    try:
        t_ns, kind, data = parse_engine_line(line)
    except RecordError:
        return
    assert isinstance(kind, str)
    assert isinstance(data, dict)
    assert t_ns is None or isinstance(t_ns, int)


def test_a_deeply_nested_line_is_a_record_error() -> None:
    with pytest.raises(RecordError):
        parse_engine_line(b"[" * 100_000)


def test_the_engine_may_not_speak_for_the_supervisor() -> None:
    with pytest.raises(RecordError, match="run-end"):
        parse_engine_line(b'{"kind":"run-end","data":{}}')
    with pytest.raises(RecordError, match="run-end"):
        EnginePipe(1).emit("run-end", {})


def test_a_finding_too_large_for_a_line_is_refused_at_its_source() -> None:
    with pytest.raises(RecordError, match="array"):
        EnginePipe(1).emit("data", {"x": "y" * LINE_LIMIT})


def test_what_the_engine_sends_is_what_the_supervisor_reads() -> None:
    reading, writing = os.pipe()
    EnginePipe(writing).emit("data", {"name": "ä", "value": [1.5, None]})
    (line,) = LineSplitter().feed(os.read(reading, 4096))
    t_ns, kind, data = parse_engine_line(line)
    assert isinstance(t_ns, int)
    assert (kind, data) == ("data", {"name": "ä", "value": [1.5, None]})
    os.close(reading)
    os.close(writing)


def test_events_are_numbered_and_each_is_in_the_file_at_once(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    for number in range(3):
        writer.emit("log", {"message": str(number)})
        assert [event.n for event in events(tmp_path)] == list(range(number + 1))
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl"]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    SpoolWriter(tmp_path).close()
    with pytest.raises(SpoolError, match="already tells a run"):
        SpoolWriter(tmp_path)


def test_a_full_disk_leaves_whole_lines_and_room_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpoolWriter(tmp_path)
    writer.emit("log", {"message": "before"})
    real = os.write

    def full(fd: int, data: memoryview) -> int:
        if (tmp_path / ".reserve").exists():
            real(fd, data[:10])  # some of it still fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SpoolFull, match="full"):
        writer.emit("log", {"message": "does not fit"})
    writer.emit("run-end", {"status": "failed"})
    writer.close()
    assert [(event.n, event.kind) for event in events(tmp_path)] == [(0, "log"), (1, "run-end")]


def test_a_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    log = CappedLog(tmp_path / "log", limit=4000)
    log.write(b"first line\n")
    for number in range(5000):
        log.write(b"line %d\n" % number)
    text = (tmp_path / "log").read_bytes()
    assert len(text) <= 4000
    assert text.startswith(b"first line\n")
    assert text.endswith(b"line 4999\n")
    total = len(b"first line\n") + sum(len(b"line %d\n" % number) for number in range(5000))
    note = text[text.index("\n[…".encode()) : text.index("…]\n".encode()) + len("…]\n".encode())]
    assert log.cut == total - (len(text) - len(note))
    assert str(log.cut).encode() in note


@pytest.mark.parametrize("name", ["", "../x", "a/b", "/etc/passwd", ".x", "a..b", "x" * 200, "a\0"])
def test_array_names_cannot_leave_their_folder(name: str) -> None:
    with pytest.raises(ValueError, match="array name"):
        array_file(name)


def test_arrays_are_written_whole_and_announced_by_hash(tmp_path: Path) -> None:
    data = save_arrays(tmp_path, "L07.ffn.down", {"x": np.arange(6.0).reshape(2, 3)})
    assert json.loads(json.dumps(data)) == data
    assert data["file"] == "arrays/L07.ffn.down.npz"
    path = tmp_path / data["file"]
    assert path.stat().st_size == data["bytes"]
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with np.load(path, allow_pickle=False) as file:
        assert file["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
