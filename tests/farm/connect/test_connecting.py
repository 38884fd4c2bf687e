"""Reaching a board: host keys, log-in, retry, jump hosts, and what each refusal says."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest

from harness.connect import BoardSession, Limits, open_session, scan_host_key
from harness.connect.dial import password_variable
from harness.connect.hostkey import fingerprint
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board, Jump

OTHER_KEY = "SHA256:" + "A" * 43
Connect = Callable[..., BoardSession]


def soon(seconds: float = 20) -> Deadline:
    return Deadline.after(seconds)


def refusal(board: Board, seconds: float = 20, limits: Limits | None = None) -> BoardError:
    with pytest.raises(BoardError) as caught:
        open_session(board, deadline=soon(seconds), limits=limits)
    return caught.value


@contextlib.contextmanager
def tcp_server(greeting: bytes, *, close: bool) -> Iterator[int]:
    """Accepts connections, says `greeting`, then closes or stays silent."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    kept.append(peer)
                    peer.sendall(greeting)
                    if close:
                        peer.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for peer in kept:
        peer.close()


def test_another_host_key_is_refused_with_both_fingerprints_and_the_remedy(servers) -> None:
    server = servers.sshd()
    error = refusal(server.board.model_copy(update={"host_key": OTHER_KEY}))
    assert error.kind == "host-key"
    for part in (str(server.board.host_key), OTHER_KEY, "harness boards enrol real-1", "reflashed"):
        assert part in str(error)


def test_a_host_key_that_changed_since_the_last_session_is_refused(
    servers, connect: Connect
) -> None:
    server = servers.sshd()
    connect(server.board).close()
    servers.stop(server)
    again = servers.sshd(port=server.board.port)
    error = refusal(server.board.model_copy(update={"key_file": again.board.key_file}))
    assert error.kind == "host-key"
    assert str(again.board.host_key) in str(error)


def test_an_unpinned_host_is_refused_with_its_fingerprint(servers) -> None:
    server = servers.sshd()
    error = refusal(server.board.model_copy(update={"host_key": None}))
    assert error.kind == "host-key"
    assert f"shows {server.board.host_key}" in str(error)
    assert "harness boards enrol real-1" in str(error)


def test_no_credential_is_offered_to_a_wrong_host(servers) -> None:
    server = servers.sshd("LogLevel DEBUG1")
    refusal(server.board.model_copy(update={"host_key": OTHER_KEY}))
    assert "userauth" not in (server.folder / "log").read_text()


def test_any_of_a_servers_host_keys_may_be_the_pinned_one(servers, connect: Connect) -> None:
    server = servers.sshd(kinds=("rsa", "ecdsa", "ed25519"))
    listed = subprocess.run(
        ["ssh-keygen", "-lf", str(server.folder / "host_rsa.pub")],
        check=True,
        capture_output=True,
        text=True,
    )
    board = server.board.model_copy(update={"host_key": listed.stdout.split()[1]})
    assert connect(board).run(["echo", "hi"], deadline=soon()).stdout == b"hi\n"


def test_enrolment_reads_the_fingerprint_that_is_then_accepted(servers, connect: Connect) -> None:
    server = servers.sshd(kinds=("rsa", "ed25519"))
    found = scan_host_key("127.0.0.1", server.board.port, soon())
    assert connect(server.board.model_copy(update={"host_key": found})).alive


def test_enrolment_of_nothing_says_so() -> None:
    with (
        tcp_server(b"HTTP/1.1 400 Bad Request\r\n", close=True) as port,
        pytest.raises(BoardError, match="no SSH key exchange") as caught,
    ):
        scan_host_key("127.0.0.1", port, soon())
    assert caught.value.kind == "unreachable"


def test_a_board_that_is_down_is_unreachable_after_a_few_tries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    board = Board(name="down-1", host="127.0.0.1", port=port, host_key=OTHER_KEY)
    error = refusal(board, limits=Limits(attempts=3, first_pause_s=0.05))
    assert error.kind == "unreachable"
    assert "refuses connections (3 tries)" in str(error)


def test_an_unknown_name_is_not_tried_again() -> None:
    board = Board(name="x", host="no-such-host.invalid", host_key=OTHER_KEY)
    error = refusal(board)
    assert error.kind == "unreachable"
    assert "tries" not in str(error)


def test_a_board_that_is_still_booting_is_waited_for(servers, connect: Connect) -> None:
    first = servers.sshd()
    servers.stop(first)
    opened: list[BoardSession] = []
    key = first.folder / "host_ed25519"
    thread = threading.Thread(target=lambda: opened.append(connect(first.board)))
    thread.start()
    time.sleep(0.3)
    servers.sshd(
        authorized_keys=first.folder / "authorized_keys", port=first.board.port, host_key=key
    )
    thread.join(20)
    assert opened[0].run(["echo", "up"], deadline=soon()).stdout == b"up\n"


def test_a_port_that_accepts_but_never_speaks_ends_by_the_banner_deadline() -> None:
    with tcp_server(b"", close=False) as port:
        board = Board(name="mute-1", host="127.0.0.1", port=port, host_key=OTHER_KEY)
        error = refusal(board, limits=Limits(banner_s=0.3, handshake_s=0.6, attempts=2))
    assert error.kind == "unreachable"
    assert "before the SSH key exchange was done" in str(error)


def test_a_server_that_stops_in_the_key_exchange_ends_by_the_whole_deadline() -> None:
    with tcp_server(b"SSH-2.0-OpenSSH_9.9\r\n", close=False) as port:
        board = Board(name="stuck-1", host="127.0.0.1", port=port, host_key=OTHER_KEY)
        started = time.monotonic()
        error = refusal(board, seconds=1.0)
        assert time.monotonic() - started < 10
    assert error.kind == "unreachable"


def test_a_crowd_gets_in_without_a_retry_although_the_server_drops_crowds(servers) -> None:
    server = servers.sshd("MaxStartups 8:100:8")

    def join_in(_: int) -> bool:
        once = Limits(attempts=1)
        with open_session(server.board, deadline=soon(60), limits=once) as session:
            return session.alive

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(join_in, range(24)))


def test_a_refused_user_is_told_what_was_tried_and_no_secret(
    servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = servers.sshd()
    monkeypatch.setenv(password_variable("real-1"), "hunter2-hunter2")
    (server.folder / "authorized_keys").write_text("")
    error = refusal(server.board)
    assert error.kind == "auth"
    assert str(server.board.key_file) in str(error)
    assert "HARNESS_SSH_PASSWORD_REAL_1" in str(error)
    assert "hunter2" not in str(error)


def test_a_missing_key_file_is_named(servers) -> None:
    board = servers.sshd().board.model_copy(update={"key_file": Path("/none/id")})
    error = refusal(board)
    assert (error.kind, "/none/id" in str(error)) == ("auth", True)


def test_an_encrypted_key_is_opened_by_the_environments_secret_only(
    servers, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = servers.sshd()
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "open sesame", "-f", str(server.folder / "id")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    error = refusal(server.board)
    assert error.kind == "auth"
    assert "ssh-add" in str(error)
    monkeypatch.setenv(password_variable("real-1"), "open sesame")
    assert connect(server.board).alive


def test_a_key_of_the_agent_is_used(
    servers, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = servers.sshd()
    agent = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.DEVNULL
    )
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        while not (tmp_path / "agent").exists():
            time.sleep(0.02)
        subprocess.run(["ssh-add", "-q", str(server.folder / "id")], check=True)
        assert connect(server.board.model_copy(update={"key_file": None})).alive
    finally:
        agent.kill()
        agent.wait()


def test_a_board_behind_two_jump_hosts_is_reached(servers, connect: Connect) -> None:
    outer, inner, board = servers.sshd(), servers.sshd(), servers.sshd().board
    way = Jump(**jump_to(inner.board), via=Jump(**jump_to(outer.board)))
    session = connect(board.model_copy(update={"jump": way}))
    assert session.run(["echo", "far"], deadline=soon()).stdout == b"far\n"
    servers.stop(outer)
    with pytest.raises(BoardError) as caught:
        session.run("sleep 20", deadline=soon())
    assert caught.value.kind == "board-lost"


def test_a_jump_hosts_key_is_checked_too(servers) -> None:
    hop, board = servers.sshd().board, servers.sshd().board
    way = Jump(**{**jump_to(hop), "host_key": OTHER_KEY, "name": "bastion"})
    error = refusal(board.model_copy(update={"jump": way}))
    assert error.kind == "host-key"
    assert "jump host bastion: host key" in str(error)
    assert "enrol bastion" in str(error)


class Listening(paramiko.ServerInterface):
    """An SSH server that lets nobody in and notes the passwords that it is offered."""

    def __init__(self) -> None:
        self.offered: list[str] = []

    def get_allowed_auths(self, username: str) -> str:
        return "publickey,password"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.common.AUTH_FAILED

    def check_auth_password(self, username: str, password: str) -> int:
        self.offered.append(password)
        return paramiko.common.AUTH_FAILED


@pytest.mark.parametrize(("name", "offered"), [("", []), ("bastion", ["of-bastion"])])
def test_a_jump_host_is_offered_its_own_password_and_never_the_boards(
    servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, offered: list[str]
) -> None:
    board = servers.sshd().board
    monkeypatch.setenv(password_variable("real-1"), "of-board")
    monkeypatch.setenv(password_variable("bastion"), "of-bastion")
    host_key = paramiko.ECDSAKey.generate()
    server = Listening()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            transport = paramiko.Transport(listener.accept()[0])
            transport.add_server_key(host_key)
            transport.start_server(server=server)
            transport.join(20)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        hop = Jump(
            name=name,
            host="127.0.0.1",
            port=listener.getsockname()[1],
            host_key=fingerprint(host_key),
            key_file=board.key_file,
        )
        error = refusal(board.model_copy(update={"jump": hop}))
        thread.join(20)
    assert error.kind == "auth"
    assert server.offered == offered
    assert (password_variable("bastion") in str(error)) == (name == "bastion")


def test_nothing_of_the_ssh_library_appears_on_stderr(servers) -> None:
    board = servers.sshd().board.model_copy(update={"host_key": OTHER_KEY})
    program = (
        "import sys\n"
        "from harness.connect import open_session\n"
        "from harness.deadline import Deadline\n"
        "from harness.errors import BoardError\n"
        "from harness.inventory import Board\n"
        "board = Board.model_validate_json(sys.stdin.read())\n"
        "try:\n    open_session(board, deadline=Deadline.after(20))\n"
        "except BoardError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=board.model_dump_json(exclude_unset=True),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "host key" in done.stdout
    assert done.stderr == ""


def jump_to(board: Board) -> dict[str, object]:
    return {
        "host": board.host,
        "port": board.port,
        "user": board.user,
        "host_key": board.host_key,
        "key_file": board.key_file,
    }
