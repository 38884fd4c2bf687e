"""Each fault of a virtual board, as its users meet it: through `harness.connect` and the probe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import paramiko
import pytest

from harness.boards import virtual
from harness.boards.probe import probe
from harness.boards.virtual import home as home_module
from harness.boards.virtual import processes
from harness.boards.virtual.options import Options
from harness.boards.virtual.server import cores
from harness.connect import BoardSession, Limits, Watch, open_session
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board
from tests.farm.detached import detached

Connect = Callable[..., BoardSession]
Make = Callable[..., Board]


LATER = 3600  # seconds: a fault that comes when the test provokes it, on a machine of any speed


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(seconds)


def lost(session: BoardSession, board: Board) -> str:
    """What becomes of a command in which the board's fault comes."""
    threading.Timer(0.3, virtual.provoke, [board.name]).start()
    with pytest.raises(BoardError) as caught:
        session.run("sleep 20", deadline=soon())
    return caught.value.kind


def test_refuse_always_is_a_refused_connection(make_board: Make) -> None:
    with pytest.raises(BoardError, match="refuses connections") as caught:
        open_session(make_board(refuse="always"), deadline=soon(), limits=Limits(attempts=2))
    assert caught.value.kind == "unreachable"


def test_the_first_connections_are_refused_and_a_retry_comes_in(connect: Connect) -> None:
    assert connect(refuse=2).run("echo in", deadline=soon()).stdout == b"in\n"


def test_a_frozen_board_answers_nothing_until_it_is_restarted(make_board: Make) -> None:
    board = make_board(freeze_after=LATER)
    watch = Watch(period_s=0.3, limit_s=1.0)
    session = open_session(board, deadline=soon(), watch=watch)
    assert lost(session, board) == "board-lost"
    session.close()
    state = virtual.running()[0]
    virtual.ensure_running(board)
    assert virtual.running()[0].pid == state.pid, "a frozen board must not heal by being looked at"
    below = processes.descendants(state.pid)
    assert virtual.stop(board)
    assert all(processes.start_of(item.pid) is None for item in below)


def test_a_dropped_link_leaves_detached_work_running_and_lets_the_next_session_in(
    make_board: Make,
) -> None:
    board = make_board(drop_link_at=LATER)
    session = open_session(board, deadline=soon())
    # Until the work has a session of its own the end of the link may end it, as on any board.
    session.run(detached("sleep 1.5; echo done > mark"), deadline=soon())
    assert lost(session, board) == "board-lost"
    session.close()
    with open_session(board, deadline=soon()) as again:
        script = (
            "i=0; while [ ! -s mark ] && [ $i -lt 100 ]; do i=$((i+1)); sleep 0.1; done; cat mark"
        )
        assert again.run(script, deadline=soon()).stdout == b"done\n"
        time.sleep(1)
        assert again.run("echo still here", deadline=soon()).stdout == b"still here\n"


def test_a_slow_link_carries_no_more_than_its_rate(connect: Connect) -> None:
    session = connect(slow_kbps=800)  # 100 kB/s
    begin = time.monotonic()
    data = session.run("head -c 200000 /dev/zero", deadline=soon()).stdout
    assert len(data) == 200_000
    assert time.monotonic() - begin > 1.6  # a floor that the limit makes, not a speed we hope for


def test_a_changed_host_key_is_refused_with_both_fingerprints(make_board: Make) -> None:
    board = make_board(host_key_changes=True)
    pinned = virtual.ensure_running(board).host_key
    with pytest.raises(BoardError, match="SHA256:") as caught:
        open_session(board, deadline=soon())
    assert caught.value.kind == "host-key"
    assert pinned in str(caught.value)
    assert str(caught.value).count("SHA256:") == 2
    # It has no entry to enrol: the fault that was asked for is named instead.
    assert "enrol" not in str(caught.value)
    assert "'host_key_changes'" in str(caught.value)


def test_a_reboot_ends_all_processes_and_changes_the_boot_id(make_board: Make) -> None:
    board = make_board(reboot_at=LATER)
    with open_session(board, deadline=soon()) as session:
        before = session.run("cat /proc/sys/kernel/random/boot_id", deadline=soon()).stdout
        session.run(detached("exec sleep 300"), deadline=soon())
        below = processes.descendants(virtual.running()[0].pid)
        assert any(item.state != "Z" for item in below)
        assert lost(session, board) == "board-lost"
    with open_session(board, deadline=soon(), limits=Limits(attempts=8)) as again:
        after = again.run("cat /proc/sys/kernel/random/boot_id", deadline=soon()).stdout
    assert len(after) == len(before) == 37
    assert after != before
    assert all(processes.start_of(item.pid) is None for item in below)


def test_a_full_disk_refuses_data_in_shell_and_sftp_and_the_probe_sees_it(
    connect: Connect, tmp_path: Path
) -> None:
    session = connect(full_disk=True)
    result = session.run("head -c 5000000 /dev/zero > big", deadline=soon())
    assert result.status != 0
    assert b"No space left" in result.stderr
    session.run("rm big", deadline=soon())
    with pytest.raises(BoardError):
        session.push_bytes(b"x" * 5_000_000, "big", deadline=soon())
    assert b"big" not in session.run("ls -a", deadline=soon()).stdout
    facts = probe(session, deadline=soon())
    assert [folder.free_mb for folder in facts.folders] == [2, 2, 2]


def test_a_read_only_root_leaves_tmp_and_the_probe_says_why_not_the_others(
    connect: Connect,
) -> None:
    facts = probe(connect(readonly_root=True), deadline=soon())
    reasons = [folder.reason for folder in facts.folders]
    assert "Read-only file system" in reasons[0]
    assert "Read-only file system" in reasons[1]
    assert [folder.path for folder in facts.usable_folders] == ["/tmp/decode-harness"]


def test_noexec_is_found_by_running_a_program_there(connect: Connect, home: Path) -> None:
    facts = probe(connect(noexec_tmp=True), deadline=soon())
    assert [folder.usable for folder in facts.folders] == [True, False, False]
    assert "programs may not run there (Permission denied)" in facts.folders[1].reason
    assert facts.folders[2].writable
    assert not facts.folders[2].executable


def test_read_only_and_noexec_together_leave_no_folder_each_with_its_reason(
    connect: Connect,
) -> None:
    facts = probe(connect(readonly_root=True, noexec_tmp=True), deadline=soon())
    assert facts.usable_folders == ()
    why = facts.why_no_folder()
    assert why.count(";") == 2
    assert "/tmp/decode-harness: programs may not run there" in why


def test_the_hosts_own_folders_are_as_before_while_a_board_shows_disk_faults(
    connect: Connect,
) -> None:
    connect(full_disk=True, noexec_tmp=True)
    mounts = Path("/proc/self/mounts").read_text()
    assert "full " not in mounts
    assert "volatile " not in mounts


def test_a_clock_at_1970_shows_as_an_offset(connect: Connect) -> None:
    facts = probe(connect(clock=1970), deadline=soon())
    assert facts.clock_s is not None
    assert facts.clock_s < 1000
    assert facts.clock_offset_s is not None
    assert facts.clock_offset_s < -50 * 365 * 86400


def test_a_right_clock_has_an_offset_of_seconds(connect: Connect) -> None:
    facts = probe(connect(), deadline=soon())
    assert facts.clock_offset_s is not None
    assert abs(facts.clock_offset_s) < 5


def test_a_noisy_shell_reaches_nobodys_payload_and_is_noted(connect: Connect) -> None:
    session = connect(noisy_shell=True)
    result = session.run("printf payload", deadline=soon())
    assert result.stdout == b"payload"
    assert b"Last login" in result.noise
    assert probe(session, deadline=soon()).noise


def test_without_sftp_files_still_travel(connect: Connect, home: Path) -> None:
    session = connect(no_sftp=True)
    session.push_bytes(b"through cat", "note", deadline=soon())
    assert session.read_from("note", 8, 10, deadline=soon()) == b"cat"
    with pytest.raises(paramiko.SSHException):
        session.transport.open_session().invoke_subsystem("sftp")


def test_no_python_is_none_with_a_reason_for_each_one_tried(connect: Connect) -> None:
    facts = probe(connect(no_python=True), deadline=soon())
    assert facts.python is None
    if Path("/usr/bin/python3").exists():
        assert "/usr/bin/python3: does not start" in facts.why_no_python()


@pytest.mark.parametrize("shell", ["sh", "fish", "csh", "ash"])
def test_login_shells_differ_and_results_do_not(connect: Connect, shell: str) -> None:
    try:
        home_module.login_shell(Options(shell=shell))
    except home_module.MissingShell:
        pytest.skip(f"needs {shell}")
    session = connect(shell=shell)
    awkward = 'it\'s $HOME "quoted" !! `x` \\ * ? [a] ~ # % \n second line'
    assert session.run(["printf", "%s", awkward], deadline=soon()).stdout == awkward.encode()
    assert (
        session.run("echo $SHELL", deadline=soon())
        .stdout.decode()
        .endswith({"sh": "/sh\n", "fish": "/fish\n", "csh": "csh\n", "ash": "/ash\n"}[shell])
    )
    assert probe(session, deadline=soon()).python is not None


def test_memory_limit_is_real_and_shows_in_the_facts(connect: Connect) -> None:
    session = connect(memory_mb=200)
    result = session.run(["python3", "-c", "bytearray(300 << 20)"], deadline=soon())
    assert result.status == 1
    assert b"MemoryError" in result.stderr
    assert session.run(["python3", "-c", "bytearray(100 << 20)"], deadline=soon()).status == 0
    facts = probe(session, deadline=soon())
    assert (facts.memory_mb, facts.memory_limit) == (200, "ulimit -d")


def test_a_file_mapped_read_only_does_not_count_towards_the_memory_limit(connect: Connect) -> None:
    code = (
        "import mmap; f = open('big', 'w+b'); f.truncate(300 << 20);"
        "print(len(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)))"
    )
    result = connect(memory_mb=200).run(["python3", "-c", code], deadline=soon())
    assert result.stdout == f"{300 << 20}\n".encode()


def test_cores_are_limited_and_the_facts_name_the_allowed_ones(connect: Connect) -> None:
    facts = probe(connect(cpus=1), deadline=soon())
    assert len(facts.allowed_cpus) == 1
    assert {facts.allowed_cpus[0].number} == cores("virt", 1)
    assert facts.features


def test_boards_of_different_names_are_spread_over_the_cores() -> None:
    every = cores("x", 10**6)
    assert len({frozenset(cores(name, 1)) for name in "abcdefghijklmnopqrstuvwxyz"}) == len(every)
    # Numbered boards take turns: as many as there are cores share none.
    assert set().union(*(cores(f"virt-{n + 1}", 1) for n in range(len(every)))) == every


def test_the_probe_leaves_nothing_on_the_board(connect: Connect, home: Path) -> None:
    session = connect()
    before = session.run("ls -aR . | sort", deadline=soon()).stdout
    facts = probe(session, deadline=soon())
    assert session.run("ls -aR . | sort", deadline=soon()).stdout == before
    assert facts.usable_folders
    assert facts.boot_id == processes.boot_id()
    assert facts.python is not None
    assert facts.python.path == str(home / "boards/virt/home/bin/python3")


def test_a_fault_comes_by_itself_at_its_time(make_board: Make) -> None:
    session = open_session(make_board(drop_link_at=0.5), deadline=soon())
    with pytest.raises(BoardError) as caught:
        session.run("sleep 20", deadline=soon())
    assert caught.value.kind == "board-lost"
    session.close()
