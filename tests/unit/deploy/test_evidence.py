"""What the supervisor gathers of an engine that ended badly: bounded, and there whatever is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import crashing, evidence
from engine.evidence import LINE_CHARS, LINES, Evidence, KernelLog, fields, largest, lean, limits
from engine.spool import LINE_LIMIT


def test_a_process_is_known_after_it_has_gone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = Evidence(tmp_path)
    found.begin(process.pid)
    found.look()
    process.kill()
    process.wait()
    found.look()  # nothing to see: what was seen before stays
    (tmp_path / crashing.record_name(3)).write_bytes(b"crash-record 1\nsignal 4\n\xff")
    told = lean(found.collect(3))
    found.close()
    assert told["pid"] == process.pid
    assert told["process"]["status"]["VmRSS"] > 0
    assert told["process"]["maps"]["count"] > 3
    assert told["meminfo"]["MemTotal"] > 0
    assert told["record"].startswith("crash-record 1\nsignal 4")
    assert len(json.dumps(told)) < LINE_LIMIT


def test_what_a_board_has_not_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_read", lambda path: "")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Evidence(tmp_path)
    found.begin(1)
    found.look()
    told = lean(found.collect(0))
    assert "record" not in told and "process" not in told
    assert told["journal"]["why"] == "neither journalctl nor logcat is there"


def test_lines_of_a_log_are_the_newest_and_of_bounded_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "dmesg"
    program.write_text(
        "#!/bin/sh\necho '[    1.000000] before'\ni=0\n"
        f"while [ $i -lt {LINES + 50} ]; do\n"
        'echo "[99999999.000000] line $i"; i=$((i+1)); done\n'
        f"printf '[99999999.500000] '; head -c {3 * LINE_CHARS} /dev/zero | tr '\\0' x; echo\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(KernelLog, "_fd", None, raising=False)
    log = KernelLog()
    log.close()  # as where /dev/kmsg may not be read
    told = log.since()
    assert (told["source"], len(told["lines"]), told["left_out"]) == ("dmesg", LINES, 51)
    assert "before" not in " ".join(told["lines"])
    assert len(told["lines"][-1]) == LINE_CHARS


def test_a_command_that_does_not_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "journalctl"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(evidence, "ASK_S", 0.2)
    told = evidence.journal(0.0)
    assert told["lines"] == [] and "timed out" in told["why"]


def test_numbers_are_read_from_what_proc_prints() -> None:
    assert fields("VmRSS:\t  1234 kB\nState:\tS (sleeping)\noom_kill 2\n", ()) == {
        "VmRSS": 1234,
        "oom_kill": 2,
    }
    assert limits(
        "Max address space         unlimited            unlimited            bytes\n"
    ) == {"Max address space": "unlimited"}
    maps = ["1000-3000 r-xp 0 0:0 1 /a", "5000-5010 rw-p 0 0:0 2 ", "junk"]
    assert largest(maps)["largest"][0] == "8 kB 1000-3000 r-xp 0 0:0 1 /a"
