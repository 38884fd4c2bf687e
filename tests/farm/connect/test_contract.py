"""What every server and login shell must give alike: OpenSSH, dropbear, virtual boards, odd shells.

Output and deadlines, fish, csh and ash as login shells, boards with busybox alone or without
SFTP, and start files that print.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.boards import virtual
from harness.connect import BoardSession, open_session
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board, Virtual

FISH = """#!/bin/sh
export XDG_CONFIG_HOME={folder}/config HOME={folder}
exec fish -c "$SSH_ORIGINAL_COMMAND"
"""
CSH = """#!/bin/sh
export HOME={folder}
exec csh -c "$SSH_ORIGINAL_COMMAND"
"""
BASH = """#!/bin/sh
export BASH_ENV={folder}/bashrc
exec bash -c "$SSH_ORIGINAL_COMMAND"
"""
BUSYBOX = """#!/bin/sh
export PATH={folder}/bin
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""
# What a small busybox has; setsid, timeout and sftp-server are not among it.
APPLETS = (
    *("sh", "ash", "echo", "printf", "kill", "sleep", "cat", "head", "tail", "wc"),
    *("ls", "mv", "rm", "chmod", "mkdir", "df", "sha256sum"),
)
NOISE = "\\033[31mWelcome\\033[0m `$(\\\\"
KINDS = (
    "openssh",
    "openssh without sftp",
    "openssh, garbled sftp",
    "dropbear",
    "fish",
    "csh",
    "noisy bash",
    "busybox only",
    "virtual",
    "virtual without sftp",
)


def shell_server(servers, kind: str, folder: Path) -> Board:
    """A board whose login shell is `kind`."""
    folder.mkdir()
    if kind == "fish":
        (folder / "config" / "fish").mkdir(parents=True)
        (folder / "config" / "fish" / "config.fish").write_text(
            f"printf '{NOISE}'; echo grumble >&2; set -x NOISE 1\n"
        )
        force = FISH
    elif kind == "csh":
        (folder / ".cshrc").write_text("echo 'csh says hello; # `x'\nalias printf false\n")
        force = CSH
    elif kind == "noisy bash":
        (folder / "bashrc").write_text(f"printf '{NOISE}'; echo grumble >&2; set -x\n")
        force = BASH
    else:
        (folder / "bin").mkdir()
        busybox = shutil.which("busybox")
        for applet in APPLETS:
            (folder / "bin" / applet).symlink_to(str(busybox))
        force = BUSYBOX
    program = {"noisy bash": "bash", "busybox only": "busybox"}.get(kind, kind)
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    return servers.sshd(force=force.format(folder=folder), sftp=None).board


@pytest.fixture(scope="module", params=KINDS)
def session(
    request: pytest.FixtureRequest, module_servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BoardSession]:
    kind: str = request.param
    folder = tmp_path_factory.mktemp("shell") / "home"
    if kind.startswith("virtual"):
        board = Board(
            name="contract", virtual=Virtual(no_sftp=kind.endswith("sftp"), noisy_shell=True)
        )
    elif kind == "openssh":
        board = module_servers.sshd().board
    elif kind == "openssh without sftp":
        board = module_servers.sshd(sftp=None).board
    elif kind == "openssh, garbled sftp":
        board = module_servers.sshd(sftp="/bin/echo Welcome to this board, dear user").board
    elif kind == "dropbear":
        board = module_servers.dropbear().board
    else:
        board = shell_server(module_servers, kind, folder)
    opened = open_session(board, deadline=Deadline.after(60))
    yield opened
    opened.close()
    if board.virtual is not None:
        virtual.stop(board)


@pytest.fixture
def place(session: BoardSession, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty folder on the board, whose path is awkward."""
    path = session.run("pwd", deadline=soon()).stdout.decode().strip()
    path = f'{path}/it\'s "here" $HOME é {os.getpid()}-{abs(hash(request.node.name))}'
    session.run(["mkdir", path], deadline=soon(), check=True)
    yield path
    session.run(["rm", "-rf", path], deadline=soon())


def soon(seconds: float = 30) -> Deadline:
    return Deadline.after(seconds)


def test_status_and_both_streams_come_back_apart(session: BoardSession) -> None:
    result = session.run("echo out; echo err >&2; exit 7", deadline=soon())
    assert (result.status, result.stdout, result.stderr) == (7, b"out\n", b"err\n")


def test_arguments_arrive_as_they_were_given(session: BoardSession) -> None:
    words = ["a'b", 'c "d"', "$HOME `id` $(id)", "!x ~ * ?", "tab\tnew\nline", "\\n\\0", "%s", ""]
    result = session.run(["printf", "<%s>", *words], deadline=soon())
    assert result.stdout.decode() == "".join(f"<{word}>" for word in words)
    assert result.stderr == b""


def test_standard_input_arrives_to_the_last_byte(session: BoardSession) -> None:
    data = bytes(range(256)) * 2048
    assert session.run(["cat"], deadline=soon(), stdin=data).stdout == data


def test_without_input_a_reading_command_ends(session: BoardSession) -> None:
    assert session.run(["cat"], deadline=soon()).stdout == b""


def test_output_without_a_last_newline_stays_without(session: BoardSession) -> None:
    assert session.run("printf abc; printf def >&2", deadline=soon()).stdout == b"abc"


def test_ten_megabytes_on_both_streams_are_drained_and_the_status_kept(
    session: BoardSession,
) -> None:
    script = "head -c 10000000 /dev/zero & head -c 10000000 /dev/zero >&2; wait; exit 5"
    result = session.run(script, deadline=soon(60))
    assert (len(result.stdout), len(result.stderr), result.status) == (10_000_000, 10_000_000, 5)


def test_a_broken_script_is_an_ordinary_failure(session: BoardSession) -> None:
    result = session.run("if then (", deadline=soon())
    assert result.status != 0
    assert result.stderr != b""


def test_check_turns_a_failure_into_an_error_with_its_message(session: BoardSession) -> None:
    with pytest.raises(BoardError, match="status 4: went wrong"):
        session.run("echo went wrong >&2; exit 4", deadline=soon(), check=True)


def test_the_deadline_ends_the_remote_group(session: BoardSession) -> None:
    nap = f"{86_000 + os.getpid() % 1000}.{abs(hash(session.board.name)) % 997}"
    script = f"echo ready; sleep {nap} & (sleep {nap}); wait"
    if b"timeout" in session.run("command -v timeout", deadline=soon()).stdout:
        script = f"timeout 2d sleep {nap} & {script}"  # it makes a process group of its own
    with pytest.raises(BoardError, match="its processes on the board were ended") as caught:
        session.run(script, deadline=soon(1.5))
    assert caught.value.kind == "timeout"
    assert running_with(nap) == []


def test_a_background_child_holding_the_streams_is_not_waited_for(session: BoardSession) -> None:
    started = time.monotonic()
    result = session.run("sleep 20 & echo $!", deadline=soon(19))
    pid = int(result.stdout)
    session.run(["kill", str(pid)], deadline=soon())
    assert time.monotonic() - started < 19


def test_more_output_than_allowed_ends_the_command(session: BoardSession) -> None:
    with pytest.raises(BoardError, match=r"printed more than 1000000 bytes.*were ended"):
        session.run("while :; do echo yyyyyyyyyyyyyyy; done", deadline=soon(), limit_bytes=10**6)


def test_two_threads_share_a_session(session: BoardSession) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        results = pool.map(
            lambda n: session.run(f"sleep 0.1; echo {n}", deadline=soon()).stdout, range(8)
        )
    assert list(results) == [b"%d\n" % n for n in range(8)]


@pytest.mark.parametrize("size", [0, 1, 100_000, 3_000_001])
def test_a_file_arrives_whole_with_its_mode_and_comes_back(
    session: BoardSession, place: str, tmp_path: Path, size: int
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(size))
    seen: list[tuple[int, int]] = []
    name = f"{place}/-na'me \\ \n;$(touch x) !é"
    session.push_file(
        source, name, deadline=soon(), mode=0o755, on_progress=lambda *at: seen.append(at)
    )
    assert size == 0 or seen[-1] == (size, size)
    listed = session.run(["ls", "-l", place], deadline=soon()).stdout
    assert b"-rwxr-xr-x" in listed
    assert b"partial" not in listed
    session.pull_file(name, tmp_path / "back", deadline=soon())
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert stat.S_IMODE((tmp_path / "back").stat().st_mode) & 0o111 == 0


def test_bytes_replace_what_was_there(session: BoardSession, place: str) -> None:
    for data in (b"first", b"second, longer", b"3"):
        session.push_bytes(data, f"{place}/file", deadline=soon())
        assert session.read_from(f"{place}/file", 0, 1000, deadline=soon()) == data


def test_a_growing_file_is_read_from_an_offset(session: BoardSession, place: str) -> None:
    path = f"{place}/log"
    session.push_bytes(b"one\ntwo\n", path, deadline=soon())
    assert session.read_from(path, 4, 3, deadline=soon()) == b"two"
    assert session.read_from(path, 8, 100, deadline=soon()) == b""
    session.run(["sh", "-c", 'echo three >>"$1"', "sh", path], deadline=soon(), check=True)
    assert session.read_from(path, 8, 100, deadline=soon()) == b"three\n"


def test_a_missing_file_is_named(session: BoardSession, place: str, tmp_path: Path) -> None:
    for read in (
        lambda: session.read_from(f"{place}/none", 0, 10, deadline=soon()),
        lambda: session.pull_file(f"{place}/none", tmp_path / "x", deadline=soon()),
    ):
        with pytest.raises(BoardError, match="none") as caught:
            read()
        assert caught.value.kind == "transfer"
    assert list(tmp_path.iterdir()) == []


def test_a_file_above_the_limit_is_refused_and_leaves_nothing(
    session: BoardSession, place: str, tmp_path: Path
) -> None:
    session.push_bytes(b"x" * 2000, f"{place}/big", deadline=soon())
    with pytest.raises(BoardError, match="larger than 1999 bytes"):
        session.pull_file(f"{place}/big", tmp_path / "big", deadline=soon(), limit_bytes=1999)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [10, 2_000_000])
def test_a_push_that_cannot_be_placed_leaves_nothing(
    session: BoardSession, place: str, tmp_path: Path, size: int
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * size)
    session.run(["mkdir", f"{place}/taken"], deadline=soon(), check=True)
    with pytest.raises(BoardError) as caught:
        session.push_file(source, f"{place}/taken", deadline=soon())
    assert caught.value.kind == "transfer"
    assert session.run(["ls", place], deadline=soon()).stdout == b"taken\n"


def test_noise_is_logged_and_kept_apart(
    session: BoardSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="harness.connect")
    result = session.run("echo payload", deadline=soon())
    assert result.stdout == b"payload\n"
    if result.noise.strip():
        assert "noise around the output" in caplog.text


def running_with(word: str) -> list[str]:
    """Command lines of live processes of this machine that hold `word`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if word in line and state != "Z":
            found.append(line)
    return found


@pytest.mark.parametrize("kind", ["fish", "csh", "noisy bash"])
def test_start_files_that_print_end_up_as_noise(
    kind: str, servers, connect: Callable[..., BoardSession], tmp_path: Path
) -> None:
    session = connect(shell_server(servers, kind, tmp_path / "home"))
    result = session.run("echo payload", deadline=soon())
    assert result.stdout == b"payload\n"
    assert {"fish": b"grumble", "csh": b"csh says", "noisy bash": b"Welcome"}[kind] in result.noise
