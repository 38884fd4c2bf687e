"""Runs one framed command on a channel: both streams drained, output bounded, deadline enforced."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import select
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NoReturn, Protocol

import paramiko

from harness.connect import shell
from harness.connect.bounded import bounded, is_gone
from harness.deadline import Deadline
from harness.errors import BoardError

log = logging.getLogger(__name__)

CHUNK = 1 << 15  # bytes; a channel packet
GRACE_S = 2.0  # for the rest of the output after the shell itself ended without its end marker
CLEAN_UP_S = 10.0
OPEN_ATTEMPTS = 4


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """`noise` is what surrounded the command's own output: start files, message of the day."""

    status: int
    stdout: bytes
    stderr: bytes
    seconds: float
    noise: bytes = b""


class Wire(Protocol):
    """What a command needs of its session."""

    @property
    def transport(self) -> paramiko.Transport: ...
    def error(
        self, kind: str, found: str, *, expected: str = "", remedy: str = ""
    ) -> BoardError: ...
    def lost(self, doing: str) -> BoardError: ...


def execute(
    wire: Wire,
    script: str,
    *,
    deadline: Deadline,
    feed: bytes | Iterable[bytes] = b"",
    limit_bytes: int,
    title: str,
) -> CommandResult:
    """Raises BoardError: board-lost, timeout (after the remote processes were ended), protocol."""
    call = _Call(wire, script, deadline, feed, limit_bytes, title)
    try:
        return call.run()
    except BoardError:
        raise
    except (paramiko.SSHException, EOFError, OSError) as error:
        if is_gone(wire.transport):
            raise wire.lost(title) from error
        raise wire.error(
            "protocol", f"{title}: the server would not run it: {error or type(error).__name__}"
        ) from error
    except BaseException:  # the user's Ctrl-C too must not leave a process behind
        call.end_remote()
        raise
    finally:
        call.close()


def _chunks(data: bytes) -> Iterator[bytes]:
    return (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))


class _Answer(threading.Event):
    """What a channel waits on for an answer. TimeoutError when the deadline passes first."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline

    def wait(self, timeout: float | None = None) -> bool:
        left = self.deadline.remaining
        if not super().wait(left if timeout is None else min(left, timeout)) and timeout is None:
            raise TimeoutError(f"{self.deadline.label} did not end in time")
        return self.is_set()


class _Call:
    def __init__(
        self,
        wire: Wire,
        script: str,
        deadline: Deadline,
        feed: bytes | Iterable[bytes],
        limit_bytes: int,
        title: str,
    ) -> None:
        self.wire, self.deadline, self.title, self.limit = wire, deadline, title, limit_bytes
        self.token = secrets.token_hex(16)
        self.head = shell.frame(self.token, script)
        self.feed = _chunks(feed) if isinstance(feed, bytes) else feed
        self.input_bytes = len(self.head) + len(feed) if isinstance(feed, bytes) else None
        self.writer: threading.Thread | None = None
        self.feed_error: BaseException | None = None
        self.channel: paramiko.Channel | None = None
        self.begun: shell.Begun | None = None
        self.stdout, self.stderr = bytearray(), bytearray()
        self.ended = [False, False]  # whether the end marker was seen on stdout, on stderr
        self.started = time.monotonic()

    def run(self) -> CommandResult:
        channel = self.open()
        if self.input_bytes is not None and self.input_bytes <= channel.out_window_size:
            channel.settimeout(max(0.1, self.deadline.remaining))
            self.send(channel)  # no wait for the board, and no thread: a farm has many boards
        else:  # the board may not read its input before its output was taken
            self.writer = threading.Thread(target=self.write, args=(channel,), daemon=True)
            self.writer.start()
        self.pump(channel)
        seconds = time.monotonic() - self.started
        out, err = shell.split(self.token, self.stdout), shell.split(self.token, self.stderr)
        noise = out.noise + err.noise
        if noise.strip():
            log.info("%s: noise around the output: %r", self.title, bytes(noise[:500]))
        if out.status is None:
            if is_gone(self.wire.transport):
                raise self.wire.lost(self.title)
            raise self.no_end(out, noise, channel)
        return CommandResult(out.status, out.payload, err.payload, seconds, noise)

    def open(self) -> paramiko.Channel:
        """A channel on which the server runs `BOOT`.

        Tried again when the server closes it unasked, as dropbear does when a child of another
        channel ends at that moment: the script was not sent yet, so nothing can run twice.
        """
        for attempt in range(OPEN_ATTEMPTS):
            try:
                return self.start()
            except (TimeoutError, paramiko.SSHException) as error:
                if self.deadline.expired:
                    if is_gone(self.wire.transport, 0):
                        raise self.wire.lost(self.title) from error
                    raise self.wire.error(
                        "timeout",
                        f"{self.title}: no channel was opened in time",
                        expected="an answer",
                    ) from error
                last = attempt == OPEN_ATTEMPTS - 1
                if last or is_gone(self.wire.transport, 0.1):
                    raise
                log.info("%s: channel refused (%s), trying again", self.title, error)
                self.close()
                threading.Event().wait(0.05 * 4**attempt)
        raise AssertionError("the last attempt returns or raises")

    def start(self) -> paramiko.Channel:
        channel = self.wire.transport.open_session(timeout=max(0.1, self.deadline.remaining))
        self.channel = channel
        channel.event = _Answer(self.deadline)  # paramiko itself would wait for it without end
        channel.exec_command(shell.BOOT)
        return channel

    def write(self, channel: paramiko.Channel) -> None:
        """`send` on a thread of its own; what it raises is raised by the pump."""
        try:
            self.send(channel)
        except BaseException as error:
            self.feed_error = error

    def send(self, channel: paramiko.Channel) -> None:
        """All input, and its end. What is not taken shows by what the command does then."""
        try:
            channel.sendall(self.head)
            for chunk in self.feed:
                channel.sendall(chunk)
            channel.shutdown_write()
        except (OSError, EOFError, paramiko.SSHException) as error:
            log.debug("%s: input not taken: %r", self.title, error)

    def pump(self, channel: paramiko.Channel) -> None:
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLIN)
        ended_at: float | None = None
        while True:
            sizes = len(self.stdout), len(self.stderr)
            self.drain(channel)
            if len(self.stdout) + len(self.stderr) > self.limit:
                self.stop("protocol", f"printed more than {self.limit} bytes")
            if self.begun is None:
                self.begun = shell.find_begin(self.token, self.stdout)
            for at, stream in enumerate((self.stdout, self.stderr)):
                self.ended[at] |= shell.has_end(self.token, stream, sizes[at])
            if all(self.ended):
                return  # children that keep the streams open are not waited for
            if self.feed_error is not None:
                self.end_remote()
                raise self.feed_error
            if not self.wire.transport.is_active():
                raise self.wire.lost(self.title)
            if channel.exit_status_ready():
                ended_at = ended_at or time.monotonic()
                if channel.eof_received or time.monotonic() - ended_at > GRACE_S:
                    self.drain(channel)
                    return
            if self.deadline.expired:
                took = time.monotonic() - self.started
                self.stop("timeout", f"did not end within {took:.1f} s")
            pause = min(self.deadline.remaining, 0.5)
            if channel.eof_received:
                channel.status_event.wait(min(pause, 0.05))  # the pipe below stays readable now
            else:
                poller.poll(pause * 1000 + 1)

    def drain(self, channel: paramiko.Channel) -> None:
        while channel.recv_ready():
            self.stdout += channel.recv(1 << 20)
            if len(self.stdout) > self.limit:
                return
        while channel.recv_stderr_ready():
            self.stderr += channel.recv_stderr(1 << 20)
            if len(self.stderr) > self.limit:
                return

    def stop(self, kind: str, what: str) -> NoReturn:
        """Ends the remote processes, then raises."""
        became = self.end_remote()
        raise self.wire.error(kind, f"{self.title} {what}; its processes on the board {became}")

    def end_remote(self) -> str:
        """What became of the command's processes, for people."""
        begun = self.begun or shell.find_begin(self.token, self.stdout)
        if begun is None:
            return "are unknown: the login shell had not started it"
        if not self.wire.transport.is_active():
            return "are unknown: the connection is gone"
        try:
            result = execute(
                self.wire,
                shell.end_processes(begun.pid, begun.mode),
                deadline=Deadline.after(CLEAN_UP_S, "ending remote processes"),
                limit_bytes=1 << 16,
                title="clean-up",
            )
        except BoardError as error:
            return f"are unknown: {error.found}"
        said = result.stdout.decode(errors="replace").strip()
        return "were ended" if said == "gone" else f"could not be ended: {said}"

    def no_end(self, out: shell.Split, noise: bytes, channel: paramiko.Channel) -> BoardError:
        status = channel.recv_exit_status() if channel.exit_status_ready() else None
        said = noise.decode(errors="replace").strip()[-300:]
        if self.begun is None and not out.complete:
            return self.wire.error(
                "protocol",
                f"{self.title}: the login shell ended with status {status} and ran no command"
                + (f"; it said {said!r}" if said else ""),
                expected="a login shell that runs `sh`",
                remedy="check the user's shell and start files on the board",
            )
        how = "was killed" if status in (None, -1) else f"ended with status {status}"
        return self.wire.error(
            "protocol",
            f"{self.title}: the shell on the board {how} before the command ended",
            remedy="look for memory pressure or a reboot in the board's kernel log",
        )

    def close(self) -> None:
        channel = self.channel
        if channel is None:
            return
        try:
            if self.writer is not None:  # a board that takes no input may hold up this message too
                bounded(channel.close, Deadline.after(2.0, "closing a channel"))
            else:
                channel.close()
        except (OSError, EOFError, paramiko.SSHException) as error:
            log.debug("%s: closing its channel: %r", self.title, error)
