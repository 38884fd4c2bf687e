"""The framing of commands, against the shells of this machine and any output."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.connect import shell

TOKEN = "0123456789abcdef" * 2
SHELLS = [["dash"], ["bash"], ["busybox", "ash"]]
# A token is random: no output holds it.
BYTES = st.binary(max_size=300).filter(lambda data: TOKEN.encode() not in data)


def begin(pid: int = 7) -> bytes:
    return f"{TOKEN}.b {pid} g\n".encode()


def end(status: int = 0) -> bytes:
    return f"{TOKEN}.e {status}\n".encode()


@given(BYTES, BYTES, BYTES, st.integers(0, 255))
def test_any_payload_is_found_between_any_noise(
    before: bytes, payload: bytes, after: bytes, status: int
) -> None:
    stream = before + begin() + payload + end(status) + after
    found = shell.split(TOKEN, stream)
    assert found == shell.Split(payload, before + after, status, True)
    begun = shell.find_begin(TOKEN, stream)
    assert begun is not None
    assert (begun.pid, begun.mode, stream[begun.start :][: len(payload)]) == (7, "g", payload)


@given(BYTES, BYTES)
def test_without_an_end_marker_there_is_no_status(before: bytes, payload: bytes) -> None:
    found = shell.split(TOKEN, before + begin() + payload)
    assert found == shell.Split(payload, before, None, False)


@given(BYTES, BYTES, st.lists(st.integers(1, 60), max_size=40))
def test_the_end_is_seen_however_the_stream_is_cut(
    before: bytes, after: bytes, cuts: list[int]
) -> None:
    stream = before + begin() + end() + after
    got, seen = b"", False
    for size in [*cuts, len(stream)]:
        since, got = len(got), got + stream[len(got) :][:size]
        seen |= shell.has_end(TOKEN, got, since)
    assert seen
    assert not shell.has_end(TOKEN, before + begin() + after, 0)


@pytest.mark.parametrize("program", SHELLS, ids=lambda words: words[-1])
@settings(max_examples=25)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=80))
def test_any_script_text_reaches_the_shell_unchanged(program: list[str], text: str) -> None:
    if shutil.which(program[0]) is None:
        pytest.skip(f"needs {program[0]}")
    line = shell.encode(text)
    assert b"\n" not in line
    done = subprocess.run(
        [*program, "-c", 'IFS= read -r s; printf %b "$s"'],
        input=line + b"\nrest",
        capture_output=True,
        check=True,
    )
    assert done.stdout == text.encode()


@pytest.mark.parametrize("program", SHELLS, ids=lambda words: words[-1])
def test_what_follows_the_two_lines_is_the_commands_input(program: list[str]) -> None:
    if shutil.which(program[0]) is None:
        pytest.skip(f"needs {program[0]}")
    done = subprocess.run(
        [*program, "-c", shell.BOOT],
        input=shell.frame(TOKEN, "wc -c; cat >&2") + b"x" * 100_000,
        capture_output=True,
        check=True,
    )
    found = shell.split(TOKEN, done.stdout)
    assert (found.payload.strip(), found.status) == (b"100000", 0)


@pytest.mark.parametrize("program", SHELLS, ids=lambda words: words[-1])
def test_a_script_that_arrives_by_half_is_not_run(program: list[str], tmp_path: Path) -> None:
    if shutil.which(program[0]) is None:
        pytest.skip(f"needs {program[0]}")
    mark = tmp_path / "ran"
    whole = shell.frame(TOKEN, f"echo >{mark}\n: and then something else")
    envelope = whole.index(b"\n")
    for cut in (envelope // 2, envelope, envelope + 1, len(whole) - 10, len(whole) - 1):
        done = subprocess.run([*program, "-c", shell.BOOT], input=whole[:cut], capture_output=True)
        assert (done.returncode, done.stdout, mark.exists()) == (255, b"", False)
    subprocess.run([*program, "-c", shell.BOOT], input=whole, capture_output=True, check=True)
    assert mark.exists()


def test_a_nul_character_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        shell.encode("echo \0")
