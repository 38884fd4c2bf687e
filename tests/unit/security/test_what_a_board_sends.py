"""Whatever a board sends is read as what it should be, or refused: no crash, no flood, no code."""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.records import DEPTH_LIMIT, EVENT_KINDS, Event, RecordError
from harness.arrays import BYTES_LIMIT, read_npz
from harness.boards.facts import Facts, platform_tags
from harness.boards.parse import ProbeError, parse_probe
from harness.connect import shell
from harness.deploy import on_board
from harness.deploy.answers import ANSWERS, parse_answer
from harness.errors import HarnessError
from harness.jobs import runlog
from harness.jobs.runlog import EventTail

TOKEN = "0123456789abcdef" * 2
IN_A_FOLDER = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


def line_of(**fields: Any) -> bytes:
    record = {"v": 1, "n": 1, "t_ns": 1, "kind": "log", "data": {}, **fields}
    return json.dumps(record).encode()


def texts(value: Any) -> list[str]:
    """Every text in a JSON value, names of fields included."""
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


# --- events --------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(["v", "n", "t_ns", "kind", "data", "x"]), json_values))
@example({"v": 1, "n": 0, "t_ns": 10**19, "kind": "log", "data": {}})
@example({"v": 1, "n": 0, "t_ns": 0, "kind": ["log"], "data": {}})
@example({"v": 1, "n": 0, "t_ns": 0, "kind": "log", "data": {"x": 10**400}})
@example({"v": 1, "n": 0, "t_ns": 0, "kind": "log", "data": {"x": "\ud800 and \0"}})
def test_any_object_is_an_event_that_can_be_stored_or_a_record_error(raw: dict[str, Any]) -> None:
    try:
        event = Event.from_line(json.dumps(raw).encode())
    except RecordError:
        return
    assert event.kind in EVENT_KINDS
    float(event.t_ns - 1) / 1e9  # what every duration is made of
    json.dumps(event.data, ensure_ascii=False).encode()  # no half pair, no recursion
    assert not any("\0" in text for text in texts(event.data))


@settings(max_examples=200)
@given(st.text(alphabet=[*'\\ud8Dc0aF"n/', "é", "😀"], max_size=30))
def test_text_that_can_be_stored_is_left_as_it_is(text: str) -> None:
    for ascii_only in (True, False):
        line = json.dumps(
            {"v": 1, "n": 0, "t_ns": 0, "kind": "log", "data": {"message": text}},
            ensure_ascii=ascii_only,
        )
        assert Event.from_line(line.encode()).data["message"] == text


def test_a_line_deeper_than_any_finding_is_a_record_error() -> None:
    for depth in (DEPTH_LIMIT + 1, 900, 100_000):
        nested = b"[" * depth + b"]" * depth
        with pytest.raises(RecordError):
            Event.from_line(line_of().replace(b"{}", b'{"x":' + nested + b"}"))
    flat = b"[" + b",".join([b"[]"] * 1000) + b"]"  # wide is not deep
    assert len(Event.from_line(line_of().replace(b"{}", b'{"x":' + flat + b"}")).data["x"]) == 1000


def test_a_board_cannot_fill_the_hosts_disk_one_allowed_array_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def announce(tail: EventTail, n: int, size: int) -> None:
        data = {"name": f"x{n}", "file": f"arrays/x{n}.npz", "sha256": "0" * 64, "bytes": size}
        tail.feed(Event(n, n, "array", data).to_line())

    for name, size, count in (("many", 0, 5), ("large", runlog.ARRAY_BYTES_LIMIT, 8)):
        monkeypatch.setattr(runlog, "ARRAYS_LIMIT", 5 if name == "many" else 100)
        tail = EventTail(tmp_path / name / "events.jsonl", "r")
        tail.feed(Event(0, 0, "run-start", {"run_id": "r"}).to_line())
        for n in range(1, count + 1):
            announce(tail, n, size)
        with pytest.raises(RecordError, match="arrays of"):
            announce(tail, count + 1, max(size, 1))


def test_a_board_cannot_fill_the_hosts_memory_with_small_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlog, "EVENTS_NUMBER_LIMIT", 3)
    tail = EventTail(tmp_path / "events.jsonl", "r")
    tail.feed(Event(0, 0, "run-start", {"run_id": "r"}).to_line())
    tail.feed(b"".join(Event(n, n, "log", {}).to_line() for n in (1, 2)))
    with pytest.raises(RecordError, match="more than 3 events"):
        tail.feed(Event(3, 3, "log", {}).to_line())


# --- arrays --------------------------------------------------------------------------------------


def npz(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + data


def test_arrays_come_back_as_the_engine_saved_them(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "number": np.float64(2.5),
        "none": np.zeros((0, 4), np.int8),
        "words": np.array(["a", "größer"]),
        "flags": np.array([True, False]),
    }
    np.savez(tmp_path / "a.npz", **saved)
    found = read_npz(tmp_path / "a.npz")
    assert list(found) == list(saved)
    for name, array in saved.items():
        assert found[name].dtype == np.asarray(array).dtype
        assert np.array_equal(found[name], array)
        assert found[name].shape == np.shape(array)
        assert found[name].flags.writeable


class _Planted:
    """What a pickle would do."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, ("raise SystemExit('code of a board was run')",)


def _pickled() -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.array([_Planted()], dtype=object), allow_pickle=True)
    return file.getvalue()


HEADER = "{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n"


@pytest.mark.parametrize(
    "members",
    [
        {"x.npy": _pickled()},
        {"x.npy": pickle.dumps(_Planted())},
        {"x.npy": npy(HEADER.format(descr="'|O'", shape="(1,)"), b"x" * 8)},
        {"x.npy": npy(HEADER.format(descr="'<f8'", shape="(1 << 60,)"))},
        {"x.npy": npy(HEADER.format(descr="'<f8'", shape="(1152921504606846976,)"))},
        {"x.npy": npy(HEADER.format(descr="'|S0'", shape="(1152921504606846976,)"))},
        {"x.npy": npy(HEADER.format(descr="'<f8'", shape="(-1, -1)"), b"x" * 8)},
        {"x.npy": npy(HEADER.format(descr="'<f8'", shape="(2,)"), b"x" * 8)},
        {"x.npy": npy(HEADER.format(descr="'<f8'", shape="(1,)"), b"x" * 9)},
        {"x.npy": npy("(" * 5000)},
        {"x.npy": npy("__import__('os').abort()")},
        {"x.npy": npy(HEADER.format(descr="'<f8'", shape="(1,)"), b"x" * 8, b"\x09\x00")},
        {"x.npy": b""},
        {f"{number}.npy": b"" for number in range(10_001)},
    ],
)
def test_an_array_that_is_none_is_refused_without_running_or_reserving_anything(
    tmp_path: Path, members: dict[str, bytes]
) -> None:
    with pytest.raises(HarnessError, match="no arrays that can be read"):
        read_npz(npz(tmp_path / "x.npz", members))


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused_unread(tmp_path: Path) -> None:
    data = npy(HEADER.format(descr="'|u1'", shape="(4000000,)"), bytes(4_000_000))
    path = npz(tmp_path / "x.npz", {"x.npy": data}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10_000
    assert len(read_npz(path)["x"]) == 4_000_000
    # The directory of the archive is what says how much it is.
    raw = path.read_bytes()
    size = struct.pack("<I", len(data))
    path.write_bytes(raw.replace(size, struct.pack("<I", BYTES_LIMIT + 1)))
    with pytest.raises(HarnessError, match="at most"):
        read_npz(path)


@IN_A_FOLDER
@given(at=st.integers(0, 900), garbage=st.binary(min_size=1, max_size=30), cut=st.integers(0, 900))
def test_any_damage_gives_arrays_or_one_kind_of_error(
    tmp_path: Path, at: int, garbage: bytes, cut: int
) -> None:
    file = io.BytesIO()
    np.savez(file, a=np.arange(10), b=np.ones((2, 3), np.float32))
    raw = file.getvalue()
    path = tmp_path / "x.npz"
    path.write_bytes((raw[:at] + garbage + raw[at + len(garbage) :])[: len(raw) - cut])
    try:
        found = read_npz(path)
    except HarnessError:
        return
    assert sum(array.nbytes for array in found.values()) <= len(raw)


# --- answers, output, facts ----------------------------------------------------------------------


def test_every_request_to_a_board_has_its_form_of_answer() -> None:
    assert set(ANSWERS) == set(on_board.REQUESTS)


def test_what_the_script_answers_is_taken_as_it_is(tmp_path: Path) -> None:
    needed = [{"hash": "1" * 64, "kind": "blobs", "bytes": 5}, {**_HUGE}]
    trial = {
        "argv": [sys.executable, "-c", "import os; os.abort()"],
        "environment": {},
        "root": "x",
    }
    for request in (
        {"do": "survey", "candidates": ["/proc/x", str(tmp_path)], "needed": needed[:1]},
        {"do": "survey", "candidates": [str(tmp_path)], "needed": needed},
        {"do": "survey", "candidates": [str(tmp_path)], "needed": [], "trial": trial},
        {"do": "discard", "root": str(tmp_path), "parts": []},
        {"do": "runs", "roots": [str(tmp_path)]},
        {"do": "stop", "spool": str(tmp_path)},
        {"do": "clean", "spool": str(tmp_path / "none"), "run_id": "none"},
    ):
        answer = on_board.REQUESTS[str(request["do"])](request)
        told = json.dumps(answer).encode()
        assert parse_answer(str(request["do"]), told) == json.loads(told)


_HUGE = {"hash": "2" * 64, "kind": "blobs", "bytes": 1 << 60}


@settings(max_examples=300)
@given(st.sampled_from(sorted(ANSWERS)), json_values | st.binary(max_size=60))
@example("survey", {"root": 5, "have": [], "refused": [], "short": []})
@example("survey", {"root": "/x", "have": [{}], "refused": [], "short": []})
@example("discard", {"free": "12"})
@example("discard", {"free": float("inf")})
@example("clean", {"left": "process 1"})
@example("runs", {"runs": [{"run_id": "x", "spool": "/x", "pids": [-1], "age_s": None}]})
@example("stop", {"alive": 1})
def test_any_answer_is_of_its_form_or_a_value_error(do: str, answer: Any) -> None:
    raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    try:
        parsed = parse_answer(do, raw)
    except ValueError:
        return
    assert set(parsed) <= set(ANSWERS[do].model_fields)
    assert json.loads(raw) == parsed


def test_an_answer_nested_without_end_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_answer("stop", b"[" * 100_000)


@settings(max_examples=300)
@given(st.lists(st.sampled_from([b"M.b", b"M.e", b" ", b"\n", b"9" * 5000, b"7", b" g", b"x"])))
def test_no_output_of_a_command_confuses_its_framing(pieces: list[bytes]) -> None:
    raw = b"".join(pieces).replace(b"M", TOKEN.encode())
    begun = shell.find_begin(TOKEN, raw)
    assert begun is None or begun.pid < 10**18
    found = shell.split(TOKEN, raw)
    assert found.status is None or found.status < 10**18
    assert len(found.payload) + len(found.noise) <= len(raw)


@pytest.mark.parametrize(
    ("text", "value"),
    [(b" 12\n", 12), ("7", 7), (b"9" * 5000, None), ("²", None), ("٣", None), (b"-1", None)],
)
def test_numbers_of_a_board_are_short_and_decimal(text: bytes | str, value: int | None) -> None:
    assert shell.number(text) == value


GOLDEN = sorted((Path(__file__).parents[1] / "boards" / "data").glob("*.probe"))


@settings(max_examples=200)
@given(
    name=st.sampled_from(range(len(GOLDEN))),
    lines=st.lists(st.tuples(st.integers(0, 400), st.text(max_size=40)), max_size=6),
)
@example(name=0, lines=[(n, f"glibc {'9' * 5000}.1") for n in range(12)])
@example(
    name=0, lines=[(n, "candidate /p|ok|/p|3." + "9" * 5000 + ".1|64|cpython|x||") for n in (150,)]
)
def test_facts_of_any_lines_can_be_used_and_stored(name: int, lines: list[tuple[int, str]]) -> None:
    raw = GOLDEN[name].read_bytes().partition(b"---\n")[2].split(b"\n")
    for at, text in lines:
        raw.insert(min(at, len(raw)), text.encode(errors="replace"))
    try:
        facts = parse_probe(b"\n".join(raw))
    except ProbeError:
        return
    assert Facts.model_validate_json(facts.model_dump_json()) == facts
    assert len(platform_tags(facts.machine, facts.libc)) < 500
    assert len(facts.model_dump_json()) < 1 << 20
    assert facts.python is None or facts.python.version_pair >= (0, 0)


@pytest.mark.parametrize("libc", ["glibc " + "9" * 5000 + ".1", "glibc ².1", "musl 1.٣", "glibc"])
def test_a_libc_of_nonsense_has_no_wheels(libc: str) -> None:
    assert platform_tags("aarch64", libc) == ()
