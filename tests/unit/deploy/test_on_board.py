"""The script that boards run, tried here: as text through Python's standard input, as there."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from harness.deploy import on_board

SCRIPT = Path(on_board.__file__)
ONE, TWO, THREE = "1" * 64, "2" * 64, "3" * 64
TRIAL = {"argv": ["true"], "environment": {}, "root": "@"}


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """One request as a board answers it."""
    command = [sys.executable, "-S", "-s", "-", json.dumps(request)]
    done = subprocess.run(command, input=SCRIPT.read_bytes(), capture_output=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def needed(digest: str, kind: str = "blobs", size: int = 10) -> dict[str, Any]:
    return {"hash": digest, "kind": kind, "bytes": size}


def survey(*folders: Path, items: list[dict[str, Any]]) -> dict[str, Any]:
    candidates = [str(path) for path in folders]
    return ask({"do": "survey", "candidates": candidates, "needed": items, "trial": TRIAL})


def archive(path: Path, *members: tarfile.TarInfo | tuple[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                entry = tarfile.TarInfo(member[0])
                entry.size = len(member[1])
                tar.addfile(entry, io.BytesIO(member[1]))


def install(root: Path, *parts: str, keep: tuple[str, ...] = (), budget: int = 1 << 40) -> Any:
    request = {"do": "install", "root": str(root), "parts": list(parts), "keep": list(keep)}
    answer = ask({**request, "current": {"bundle": "b"}, "budget": budget, "trial": TRIAL})
    assert answer.pop("trial", None) in (None, {"status": 0, "said": ""})
    return answer


def test_the_script_is_python_3_9() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 9))


def test_the_first_folder_that_works_is_taken_and_asked_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    good = tmp_path / "deep" / "er"
    (good / "parts" / ONE).mkdir(parents=True)
    (good / "blobs").mkdir()
    (good / "blobs" / TWO).write_bytes(b"x")
    items = [needed(ONE, "parts"), needed(TWO, size=1), needed(THREE)]
    answer = survey(file / "below", good, items=items)
    assert answer["root"] == str(good)
    assert answer["have"] == [ONE, TWO]
    assert answer["refused"] == [[str(file / "below"), "Not a directory"]]


def trial(root: Path, script: str, **environment: str) -> dict[str, Any]:
    argv = ["sh", "-c", script]
    return on_board.try_out({"argv": argv, "environment": environment, "root": "@root@"}, root)


def test_a_trial_runs_in_the_work_folder_and_its_environment_names_it(tmp_path: Path) -> None:
    script = 'echo said >&2; echo "$PARTS $(pwd) $HOME" >&2; exit 3'
    answer = trial(tmp_path, script, PARTS="@root@/a:@root@/b")
    said = f"{tmp_path}/a:{tmp_path}/b {tmp_path} {os.environ['HOME']}"
    assert answer == {"status": 3, "said": said}


def test_a_trial_that_a_signal_ends_has_the_status_that_a_shell_would_give(tmp_path: Path) -> None:
    assert trial(tmp_path, "kill -ILL $$") == {"status": 132, "said": ""}
    absent = {"argv": ["/no/such"], "environment": {}, "root": "@"}
    assert on_board.try_out(absent, tmp_path) == {
        "status": 127,
        "said": "No such file or directory",
    }


def test_only_a_board_that_has_everything_is_tried_out_at_once(tmp_path: Path) -> None:
    assert "trial" not in survey(tmp_path, items=[needed(ONE, size=10)])
    (tmp_path / "blobs" / ONE).write_bytes(b"x" * 10)
    assert survey(tmp_path, items=[needed(ONE, size=10)])["trial"] == {"status": 0, "said": ""}


def test_a_folder_too_small_is_told_with_its_numbers_and_left_as_it_was(tmp_path: Path) -> None:
    answer = survey(tmp_path / "a", items=[needed(ONE, size=1 << 60)])
    assert answer["root"] is None
    ((path, free, need),) = answer["short"]
    assert path == str(tmp_path / "a")
    assert free < need
    assert not (tmp_path / "a").exists()


def test_space_is_made_by_removing_what_nothing_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "a"
    on_board._furnish(root)
    for digest in (ONE, TWO):
        (root / "blobs" / digest).write_bytes(b"x" * 5000)
    monkeypatch.setattr(
        on_board,
        "free_bytes",
        lambda path: 10**9 if not (root / "blobs" / TWO).exists() else 0,
    )
    items = [needed(ONE, size=5000), needed(THREE, size=100)]
    request = {"candidates": [str(root)], "needed": items}
    answer = on_board.survey(request)
    assert answer["root"] == str(root)
    assert (root / "blobs" / ONE).exists()


def test_a_file_of_another_size_is_not_taken_for_the_one_that_is_needed(tmp_path: Path) -> None:
    survey(tmp_path, items=[])
    (tmp_path / "blobs" / ONE).write_bytes(b"x" * 9)
    assert survey(tmp_path, items=[needed(ONE, size=10)])["have"] == []
    (tmp_path / "blobs" / ONE).write_bytes(b"x" * 10)
    assert survey(tmp_path, items=[needed(ONE, size=10)])["have"] == [ONE]


def partial(folder: Path, digest: str, size: int) -> Path:
    path = folder / f"{digest}.{digest[:16]}.partial"
    path.write_bytes(b"x" * size)
    return path


def test_an_upload_that_is_resumed_needs_only_the_rest_of_its_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_board._furnish(tmp_path)
    kept = partial(tmp_path / "blobs", ONE, 900)
    monkeypatch.setattr(on_board, "free_bytes", lambda path: on_board.RESERVE_BYTES + 100)
    request = {"candidates": [str(tmp_path)], "needed": [needed(ONE, size=1000)]}
    assert on_board.survey(request)["root"] == str(tmp_path)
    assert kept.stat().st_size == 900
    request["needed"] = [needed(ONE, size=1001)]
    ((_, free, need),) = on_board.survey(request)["short"]
    assert need - free == 1


def test_partial_uploads_that_nobody_goes_on_with_make_room_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_board._furnish(tmp_path)
    old = partial(tmp_path / "blobs", TWO, 900)
    folder = tmp_path / "incoming" / f".{THREE}.unpacked"
    folder.mkdir()
    monkeypatch.setattr(
        on_board, "free_bytes", lambda path: 0 if old.exists() or folder.exists() else 1 << 40
    )
    request = {"candidates": [str(tmp_path)], "needed": [needed(ONE, size=1000)]}
    assert on_board.survey(request)["root"] == str(tmp_path)


def test_content_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_board._furnish(tmp_path)
    archive(tmp_path / "incoming" / ONE, ("a.py", b"x"))
    seen: list[list[str]] = []
    monkeypatch.setattr(
        os, "sync", lambda: seen.append([path.name for path in (tmp_path / "parts").iterdir()])
    )
    request = {"root": str(tmp_path), "parts": [ONE], "keep": [ONE], "current": {}}
    on_board.install({**request, "budget": 1 << 40, "trial": TRIAL})
    assert seen == [[], [ONE]]


def test_parts_are_unpacked_and_noted(tmp_path: Path) -> None:
    survey(tmp_path, items=[])
    archive(tmp_path / "incoming" / ONE, ("engine/__init__.py", b"x = 1\n"), ("top.py", b""))
    assert install(tmp_path, ONE, keep=(ONE,)) == {"pruned": []}
    assert (tmp_path / "parts" / ONE / "engine" / "__init__.py").read_text() == "x = 1\n"
    assert list((tmp_path / "incoming").iterdir()) == []
    assert json.loads((tmp_path / "current.json").read_text()) == {"bundle": "b"}


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


@pytest.mark.parametrize(
    "member",
    [
        ("../evil", b"x"),
        ("/tmp/evil", b"x"),
        ("a/../../evil", b"x"),
        link("a", "/etc"),
        link("a", "../../x", tarfile.LNKTYPE),
        link("a", "", tarfile.FIFOTYPE),
    ],
)
def test_an_archive_that_would_leave_its_folder_is_refused_and_removed(
    tmp_path: Path, member: tarfile.TarInfo | tuple[str, bytes]
) -> None:
    survey(tmp_path, items=[])
    archive(tmp_path / "incoming" / ONE, ("good.py", b""), member)
    assert "not a plain file" in install(tmp_path, ONE)["error"]
    assert not (tmp_path / "parts" / ONE).exists()
    assert [path.name for path in (tmp_path / "incoming").iterdir()] == [ONE]
    ask({"do": "discard", "root": str(tmp_path), "parts": [ONE]})
    assert list((tmp_path / "incoming").iterdir()) == []


def test_a_cut_archive_leaves_no_part(tmp_path: Path) -> None:
    survey(tmp_path, items=[])
    archive(tmp_path / "incoming" / ONE, ("a.py", b"x" * 9000))
    data = (tmp_path / "incoming" / ONE).read_bytes()
    (tmp_path / "incoming" / ONE).write_bytes(data[:5000])
    assert "error" in install(tmp_path, ONE)
    assert list((tmp_path / "parts").iterdir()) == []


def test_the_longest_unused_goes_first_and_what_is_needed_stays(tmp_path: Path) -> None:
    for digest in (ONE, TWO, THREE):  # each of its own deployment, one after the other
        survey(tmp_path, items=[])
        (tmp_path / "blobs" / digest).write_bytes(b"x" * 100_000)
        survey(tmp_path, items=[needed(digest)])
    survey(tmp_path, items=[needed(ONE)])  # used again: now TWO is the oldest
    answer = install(tmp_path, keep=(ONE,), budget=250_000)
    assert answer == {"pruned": [TWO]}
    assert install(tmp_path, keep=(ONE,), budget=0) == {"pruned": [THREE]}
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [ONE]


def test_what_a_run_was_started_with_is_not_pruned(tmp_path: Path) -> None:
    survey(tmp_path, items=[])
    (tmp_path / "blobs" / ONE).write_bytes(b"x")
    (tmp_path / "runs" / "r").mkdir()
    (tmp_path / "runs" / "r" / "deployment.txt").write_text(f"/store/blobs/{ONE}\n")
    assert install(tmp_path, budget=0) == {"pruned": []}
    assert (tmp_path / "blobs" / ONE).exists()


def test_half_sent_files_are_removed_and_whole_ones_kept(tmp_path: Path) -> None:
    survey(tmp_path, items=[])
    (tmp_path / "blobs" / ONE).write_bytes(b"whole")
    (tmp_path / "blobs" / f"{TWO}.abcdef.partial").write_bytes(b"half")
    (tmp_path / "incoming" / THREE).write_bytes(b"half")
    (tmp_path / "parts" / THREE).mkdir()
    answer = ask({"do": "discard", "root": str(tmp_path), "parts": [THREE]})
    assert answer["free"] > 0
    left = [p.name for kind in ("blobs", "incoming", "parts") for p in (tmp_path / kind).iterdir()]
    assert left == [ONE]


def test_a_pid_that_was_used_again_is_not_the_supervisor(tmp_path: Path) -> None:
    ticks = int(on_board.stat_fields(os.getpid())[19])
    record = tmp_path / "supervisor.json"
    record.write_text(json.dumps({"pid": os.getpid(), "start_ticks": ticks}))
    assert on_board.supervisor_pid(tmp_path) == os.getpid()
    record.write_text(json.dumps({"pid": os.getpid(), "start_ticks": ticks - 1}))
    assert on_board.supervisor_pid(tmp_path) is None
    record.write_text(json.dumps({"pid": os.getpid(), "start_ticks": ticks, "boot_id": "other"}))
    assert on_board.supervisor_pid(tmp_path) is None
    record.write_text("{")
    assert on_board.supervisor_pid(tmp_path) is None


def test_cleaning_ends_the_runs_processes_and_no_others(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine = subprocess.Popen(sleep, env={**os.environ, "ENGINE_RUN_ID": "mine"})
    other = subprocess.Popen(sleep, env={**os.environ, "ENGINE_RUN_ID": "mine-too"})
    spool = tmp_path / "runs" / "mine"
    spool.mkdir(parents=True)
    try:
        while not on_board.processes_of("mine", spool):  # until it has become another program
            time.sleep(0.01)
        assert ask({"do": "clean", "spool": str(spool), "run_id": "mine"}) == {"left": []}
        assert mine.wait(timeout=5) == -9
        assert other.poll() is None
        assert not spool.exists()
    finally:
        mine.kill()
        other.kill()
        mine.wait()
        other.wait()


def test_only_runs_with_living_processes_are_told_with_their_age(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    for name in ("alive", "supervised", "ended"):
        (tmp_path / "a" / "runs" / name).mkdir(parents=True)
    (tmp_path / "a" / "runs" / "ended" / "supervisor.json").write_text('{"pid": 999999999}')
    orphan = subprocess.Popen(sleep, env={**os.environ, "ENGINE_RUN_ID": "alive"})
    supervisor = subprocess.Popen(sleep)
    try:
        ticks = int(on_board.stat_fields(supervisor.pid)[19])
        record = {"pid": supervisor.pid, "start_ticks": ticks}
        (tmp_path / "a/runs/supervised/supervisor.json").write_text(json.dumps(record))
        while not on_board.processes_of("alive", tmp_path / "a/runs/alive"):
            time.sleep(0.01)
        roots = [str(tmp_path / "absent"), str(tmp_path / "a")]
        told = {run["run_id"]: run for run in ask({"do": "runs", "roots": roots})["runs"]}
        assert {name: run["pids"] for name, run in told.items()} == {
            "alive": [orphan.pid],
            "supervised": [supervisor.pid],
        }
        assert told["alive"]["spool"] == str(tmp_path / "a/runs/alive")
        assert all(0 <= run["age_s"] < 60 for run in told.values())
    finally:
        for process in (orphan, supervisor):
            process.kill()
            process.wait()
