"""Commands on a virtual board behave as behind a real sshd: streams, statuses, process groups."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import paramiko
import pytest

from harness.boards import virtual
from harness.boards.virtual import processes
from tests.farm.detached import detached

Client = Callable[..., paramiko.SSHClient]


def run(client: paramiko.SSHClient, command: str) -> tuple[int, bytes, bytes]:
    """Status and both outputs, drained side by side."""
    _, out, err = client.exec_command(command, timeout=60)
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda: errors.append(err.read()))
    reader.start()
    data = out.read()
    reader.join()
    return out.channel.recv_exit_status(), data, errors[0]


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def is_gone(pid: int) -> bool:
    return processes.start_of(pid) is None


@pytest.mark.parametrize("status", [0, 1, 7, 255])
def test_exit_status_arrives(plain_client: Client, status: int) -> None:
    assert run(plain_client(), f"exit {status}")[0] == status


def test_exit_status_survives_ten_megabytes_on_both_streams(plain_client: Client) -> None:
    many = 10 << 20
    status, out, err = run(
        plain_client(),
        f"head -c {many} /dev/zero & head -c {many} /dev/zero >&2; wait; exit 23",
    )
    assert (status, len(out), len(err)) == (23, many, many)


def test_death_by_a_signal_is_told_as_a_signal(plain_client: Client) -> None:
    """paramiko reports a missing exit status, as of a command ended by a signal, as -1."""
    assert run(plain_client(), "kill -KILL $$")[0] == -1


def test_input_reaches_the_command_and_its_end_too(plain_client: Client) -> None:
    stdin, out, _ = plain_client().exec_command("cat; echo end")
    data = os.urandom(300_000)
    stdin.write(data)
    stdin.channel.shutdown_write()
    assert out.read() == data + b"end\n"


def test_a_command_that_reads_no_input_ends_all_the_same(plain_client: Client) -> None:
    stdin, out, _ = plain_client().exec_command("exit 4")
    with contextlib.suppress(OSError):  # the channel may be closed before all is written
        stdin.write(b"x" * 200_000)
    assert out.channel.recv_exit_status() == 4


def test_a_foreground_command_is_hung_up_when_its_channel_closes(plain_client: Client) -> None:
    _, out, _ = plain_client().exec_command("echo $$; exec sleep 300")
    pid = int(out.readline())
    assert not is_gone(pid)
    out.channel.close()
    assert wait_until(lambda: is_gone(pid))


def test_a_detached_process_survives_its_channel_and_its_connection(plain_client: Client) -> None:
    client = plain_client()
    assert run(client, detached("echo $$ > pid; exec sleep 300"))[0] == 0
    client.close()
    again = plain_client()
    _, out, _ = run(again, "while [ ! -s pid ]; do sleep 0.1; done; cat pid")
    pid = int(out)
    time.sleep(0.3)
    assert not is_gone(pid)
    run(again, f"kill {pid}")
    assert wait_until(lambda: is_gone(pid))


def test_a_child_that_holds_the_streams_keeps_the_channel_open(plain_client: Client) -> None:
    """As with a real sshd: whoever starts a background process must redirect its streams."""
    _, out, _ = plain_client().exec_command("sleep 1.5 & echo started")
    assert out.readline() == "started\n"
    assert not out.channel.exit_status_ready()
    assert out.channel.recv_exit_status() == 0


def test_an_orphan_that_ends_does_not_stay_a_zombie(plain_client: Client) -> None:
    client = plain_client()
    _, out, _ = run(client, "(sleep 0.2 </dev/null >/dev/null 2>&1 & echo $!)")
    assert wait_until(lambda: processes.entry(int(out)) is None)


def test_nothing_of_the_hosts_environment_reaches_a_command(
    plain_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/agent")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    client = plain_client()
    _, out, _ = run(client, "env")
    names = {line.partition("=")[0] for line in out.decode().splitlines()}
    assert names <= {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "PWD", "SHLVL", "_", "OLDPWD"),
        *(name for name in names if name.startswith(("LC_", "OPENBLAS_", "OMP_"))),
    }
    assert "OPENBLAS_NUM_THREADS" in names
    # The server's own environment, which a command of the same user can read, has it no more.
    server = virtual.running()[0].pid
    assert b"hunter2" not in Path(f"/proc/{server}/environ").read_bytes()


def test_commands_begin_in_the_boards_own_home_with_its_own_python(
    plain_client: Client, home: Path
) -> None:
    _, out, _ = run(
        plain_client(), 'pwd; echo "$HOME"; command -v python3; python3 -c "print(6*7)"'
    )
    own = home / "boards/virt/home"
    assert out.decode().split() == [str(own), str(own), f"{own}/bin/python3", "42"]


def test_only_the_boards_own_key_and_user_are_let_in(plain_client: Client) -> None:
    transport = plain_client().get_transport()
    assert transport is not None
    host, port = transport.getpeername()[:2]
    stranger = paramiko.SSHClient()
    stranger.set_missing_host_key_policy(paramiko.AutoAddPolicy())
    with pytest.raises(paramiko.AuthenticationException):
        stranger.connect(
            host,
            port,
            transport.get_username() or "",
            pkey=paramiko.ECDSAKey.generate(),
            allow_agent=False,
            look_for_keys=False,
        )
    stranger.close()
    assert host == "127.0.0.1"


def test_sftp_begins_in_the_home_folder(plain_client: Client, home: Path) -> None:
    with plain_client().open_sftp() as sftp:
        with sftp.open("note", "wb") as file:
            file.write(b"text")
        assert sftp.normalize(".") == str(home / "boards/virt/home")
    assert (home / "boards/virt/home/note").read_bytes() == b"text"
