"""From an address to an authenticated SSH transport: hops, deadlines per phase, bounded retry."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fabric
import paramiko
from paramiko.ssh_exception import IncompatiblePeer

from harness.connect.bounded import bounded
from harness.connect.hostkey import KEY_FAMILIES, PinnedKey, WrongHostKey, fingerprint
from harness.connect.watch import WatchedSocket
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board, Jump

log = logging.getLogger(__name__)
# Otherwise Python prints paramiko's errors on stderr where no logging is set up.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CONNECTS_PER_HOST = 4  # OpenSSH drops unauthenticated connections beyond 10 (MaxStartups)
_slots: dict[tuple[str, int], threading.BoundedSemaphore] = {}
_slots_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds per phase of one attempt, and how often to try."""

    connect_s: float = 10.0
    banner_s: float = 15.0
    handshake_s: float = 20.0
    auth_s: float = 20.0
    attempts: int = 5
    first_pause_s: float = 0.4  # doubled each time, with jitter


@dataclasses.dataclass(frozen=True)
class Target:
    """One server on the way. `title` is what messages call it."""

    board: str
    title: str
    host: str
    port: int
    user: str
    host_key: str | None
    key_file: Path | None
    remedy: str  # for an unexpected host key
    # The environment variable that may hold its password: each server has its own, so that no
    # password is shown to another server on the way.
    secret: str | None = None
    virtual: bool = False

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def error(self, kind: str, found: str, expected: str = "", remedy: str = "") -> BoardError:
        return BoardError(
            self.board, kind, f"{self.title}{found}", expected=expected, remedy=remedy
        )


@dataclasses.dataclass
class Link:
    """An authenticated connection. `below` are the hops it passes through, ours first."""

    connection: fabric.Connection
    transport: paramiko.Transport
    wire: WatchedSocket
    below: tuple[Link, ...] = ()

    def close(self) -> None:
        """Does not block: closing the socket ends paramiko's thread."""
        for link in (self, *reversed(self.below)):
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                link.wire.close()
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                link.transport.close()


class _Transient(Exception):
    """Worth another try: the server may still be starting, or refuses a crowd."""

    def __init__(self, error: BoardError) -> None:
        self.error = error
        super().__init__(str(error))


def way_to(board: Board) -> list[Target]:
    """The hops and the board, the one nearest to us first. Starts a virtual board."""
    pinned: dict[str, Any]
    address: dict[str, Any]
    if board.virtual is not None:
        from harness.boards import virtual  # it imports this package for its own client side

        endpoint = virtual.ensure_running(board)
        pinned = {"host_key": endpoint.host_key, "key_file": endpoint.key_file}
        address = {"host": endpoint.host, "port": endpoint.port, "user": endpoint.user}
    else:
        pinned = {"host_key": board.host_key, "key_file": board.key_file}
        address = {"host": board.host, "port": board.port, "user": board.user}
    remedy = f"run `harness boards enrol {board.name}`"
    secret = password_variable(board.name)
    last = Target(
        board=board.name,
        title="",
        remedy=remedy,
        secret=secret,
        virtual=board.virtual is not None,
        **address,
        **pinned,
    )
    return [*_hops(board.name, board.jump), last]


def _hops(board: str, jump: Jump | None) -> list[Target]:
    if jump is None:
        return []
    remedy = (
        f"run `harness boards enrol {jump.name}`"
        if jump.name
        else "set 'host_key' under 'jump' in devices.yaml"
    )
    title = f"jump host {jump.name or jump.host}: "
    hop = Target(
        board,
        title,
        jump.host,
        jump.port,
        jump.user,
        jump.host_key,
        jump.key_file,
        remedy,
        password_variable(jump.name) if jump.name else None,
    )
    return [*_hops(board, jump.via), hop]


def dial(way: list[Target], deadline: Deadline, limits: Limits) -> Link:
    """Connects along `way`. Raises BoardError (unreachable, host-key, auth, protocol)."""
    below: tuple[Link, ...] = ()
    try:
        for target in way:
            link = _with_retry(target, below, deadline, limits)
            below = (*below, link)
    except BaseException:
        for link in reversed(below):
            link.close()
        raise
    link.below = below[:-1]
    return link


def scan_host_key(
    host: str, port: int, deadline: Deadline, *, jump: Jump | None = None, board: str = ""
) -> str:
    """The fingerprint that a server shows, for enrolment. Sends no credential to it.

    Raises BoardError, of `board` or else of the host.
    """
    way = _hops(board or host, jump)
    target = Target(board or host, "", host, port, "", None, None, "")
    below = (dial(way, deadline, Limits()),) if way else ()
    try:
        wire = _wire(target, below, deadline.within(Limits.connect_s))
        transport = paramiko.Transport(wire)  # type: ignore[arg-type]  # it takes any socket-like
        try:
            bounded(lambda: transport.start_client(timeout=60), deadline, wire.close)
            return fingerprint(transport.get_remote_server_key())
        finally:
            wire.close()
            transport.close()
    except _Transient as error:
        raise error.error from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise target.error(
            "unreachable",
            f"no SSH key exchange with {target.address}: {_reason(error)}",
            "an SSH server",
            "check 'host' and the port",
        ) from error
    finally:
        for link in below:
            link.close()


def _with_retry(
    target: Target, below: tuple[Link, ...], deadline: Deadline, limits: Limits
) -> Link:
    tries = 0
    while True:
        tries += 1
        try:
            return _any_key_family(target, below, deadline, limits)
        except _Transient as transient:
            pause = limits.first_pause_s * 2 ** (tries - 1) * random.uniform(0.5, 1.5)  # noqa: S311 - jitter
            if tries >= limits.attempts or pause >= deadline.remaining:
                error = transient.error
                if tries > 1:
                    error.found += f" ({tries} tries)"
                raise error from transient
            log.info("%s; try %d follows", transient.error, tries + 1)
            threading.Event().wait(pause)


def _any_key_family(
    target: Target, below: tuple[Link, ...], deadline: Deadline, limits: Limits
) -> Link:
    """Asks for other kinds of host key when the first shown is not the pinned one.

    A server has a key of each kind; which one was pinned does not show in a fingerprint.
    """
    shown = ""
    for family in (None, *KEY_FAMILIES) if target.host_key else (None,):
        disabled = [name for other in KEY_FAMILIES if other != family for name in other]
        try:
            return _attempt(target, below, deadline, limits, disabled if family else [])
        except WrongHostKey as error:
            shown = shown or error.found
        except IncompatiblePeer as error:
            if not shown:
                raise target.error(
                    "protocol",
                    f"no common algorithm with {target.address}: {_reason(error)}",
                    "an SSH server with current algorithms",
                    "update the board's SSH server",
                ) from error
    if target.host_key is None:
        raise target.error(
            "host-key",
            f"no host key is pinned for {target.address}, which shows {shown}",
            "'host_key: SHA256:…' in devices.yaml",
            f"compare it with the board's own (`ssh-keygen -lf` on its console), "
            f"then {target.remedy}",
        )
    if target.virtual:
        raise target.error(
            "host-key",
            f"host key {shown}",
            f"{target.host_key}, which the virtual board was given",
            "remove 'host_key_changes' from its entry, if the key is not meant to change",
        )
    raise target.error(
        "host-key",
        f"host key {shown}",
        f"{target.host_key}, pinned in devices.yaml",
        f"if you reflashed it {target.remedy}; otherwise somebody may sit in between",
    )


def _attempt(
    target: Target, below: tuple[Link, ...], deadline: Deadline, limits: Limits, disabled: list[str]
) -> Link:
    with _slot(target, deadline):
        wire = _wire(target, below, deadline.within(limits.connect_s, "TCP connect"))
        try:
            return _log_in(target, wire, deadline, limits, disabled)
        except BaseException:
            wire.close()
            raise


@contextlib.contextmanager
def _slot(target: Target, deadline: Deadline) -> Iterator[None]:
    with _slots_lock:
        slot = _slots.setdefault(
            (target.host, target.port), threading.BoundedSemaphore(CONNECTS_PER_HOST)
        )
    if not slot.acquire(timeout=deadline.remaining):
        raise target.error(
            "timeout",
            f"{CONNECTS_PER_HOST} other connects to {target.address} were still waiting",
            "a free one within the deadline",
        )
    try:
        yield
    finally:
        slot.release()


def _wire(target: Target, below: tuple[Link, ...], deadline: Deadline) -> WatchedSocket:
    """TCP to the target, or a channel through the last hop."""
    check = "check its power, its network and 'host' in devices.yaml"
    try:
        if below:
            channel = below[-1].transport.open_channel(
                "direct-tcpip",
                (target.host, target.port),
                ("127.0.0.1", 0),
                timeout=max(0.1, deadline.remaining),
            )
            return WatchedSocket(channel)
        wire = socket.create_connection(
            (target.host, target.port), timeout=max(0.1, deadline.remaining)
        )
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return WatchedSocket(wire)
    except socket.gaierror as error:
        raise target.error(
            "unreachable",
            f"the name {target.host!r} is unknown ({error.strerror})",
            "a name that resolves",
            "check 'host' in devices.yaml",
        ) from error
    except TimeoutError as error:
        found = f"no answer from {target.address} within the connect deadline"
        raise _Transient(target.error("unreachable", found, remedy=check)) from error
    except ConnectionRefusedError as error:
        found = f"{target.address} refuses connections"
        raise _Transient(
            target.error("unreachable", found, "an SSH server there", check)
        ) from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        found = f"no connection to {target.address}: {_reason(error)}"
        raise _Transient(target.error("unreachable", found, remedy=check)) from error


def _log_in(
    target: Target, wire: WatchedSocket, deadline: Deadline, limits: Limits, disabled: list[str]
) -> Link:
    connection = fabric.Connection(
        target.host,
        user=target.user,
        port=target.port,
        gateway=False,  # hops are ours, with their own pinned keys
        # Only devices.yaml counts: no ~/.ssh/config, no ~/.fabric.yaml.
        config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        connect_kwargs={
            "sock": wire,
            "timeout": limits.handshake_s,
            "banner_timeout": limits.banner_s,
            "auth_timeout": limits.auth_s,
            "disabled_algorithms": {"keys": disabled},
            **_credentials(target),
        },
    )
    connection.client.set_missing_host_key_policy(PinnedKey(target.host_key))
    whole = limits.banner_s + limits.handshake_s + limits.auth_s
    try:
        bounded(connection.open, deadline.within(whole, "SSH log-in"), wire.close)
    except (WrongHostKey, IncompatiblePeer):
        raise
    except paramiko.AuthenticationException as error:
        raise _refused(target, error) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        transport = connection.client.get_transport()
        if str(error) == "No authentication methods available":
            raise _refused(target, error) from error
        keyed = transport is not None and transport.initial_kex_done
        stage = "during log-in" if keyed else "before the SSH key exchange was done"
        raise _Transient(
            target.error(
                "unreachable",
                f"{target.address} gave up {stage}: {_reason(error)}",
                "an SSH server that answers",
                "it may still be starting or be short of memory; try again",
            )
        ) from error
    return Link(connection, connection.transport, wire)


def _credentials(target: Target) -> dict[str, Any]:
    """Keys from the file that devices.yaml names, else the agent's and the user's usual ones."""
    secret = os.environ.get(target.secret) if target.secret else None
    found: dict[str, Any] = {"password": secret} if secret else {}
    if target.key_file is None:
        return found
    try:
        found["pkey"] = _load_key(target.key_file, secret)
    except FileNotFoundError as error:
        raise target.error(
            "auth",
            f"no key file {target.key_file}",
            "a private key",
            "correct 'key_file' in devices.yaml",
        ) from error
    except OSError as error:
        raise target.error(
            "auth", f"key file {target.key_file}: {error.strerror}", "a readable private key"
        ) from error
    except (paramiko.SSHException, ValueError) as error:
        # The library's text is left out: it may quote the file.
        raise target.error(
            "auth",
            f"key file {target.key_file} cannot be used ({type(error).__name__})",
            "a private key without a passphrase, or one that the agent holds",
            "`ssh-add` it and drop 'key_file'"
            + (f", or set {target.secret}" if target.secret else ""),
        ) from error
    return {**found, "allow_agent": False, "look_for_keys": False}


def _load_key(path: Path, secret: str | None) -> paramiko.PKey:
    """Raises OSError, SSHException or ValueError."""
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            return kind.from_private_key_file(str(path), secret)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError) as error:
            last = error
    raise last


def password_variable(board: str) -> str:
    """The environment variable that may hold the board's password."""
    return "HARNESS_SSH_PASSWORD_" + re.sub(r"[^A-Z0-9]", "_", board.upper())


def _refused(target: Target, error: Exception) -> BoardError:
    tried = str(target.key_file) if target.key_file else "the agent's and the user's own keys"
    if target.secret and os.environ.get(target.secret):
        tried += " and the password from the environment"
    takes = ""
    if isinstance(error, paramiko.BadAuthenticationType):
        takes = f"one of {', '.join(error.allowed_types)}"
    return target.error(
        "auth",
        f"{target.address} refuses user {target.user!r} with {tried}",
        takes,
        "add the public key to its authorized_keys, or set 'user' or 'key_file' in devices.yaml"
        + (f", or {target.secret} in the environment" if target.secret else ""),
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, EOFError) and not str(error):
        return "the connection was closed"
    return str(error) or type(error).__name__
