"""Runs the command of an SSH channel, as sshd would: streams, exit status, signals, process groups.

asyncssh can redirect a process by itself, but then loses the exit status under heavy output; here
the three streams are pumped by tasks of our own, each waiting where its reader is slow, and the
status is sent when both outputs have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import asyncssh

from harness.boards.virtual.home import NOISE
from harness.boards.virtual.options import Options

log = logging.getLogger(__name__)

CHUNK = 65536

# Limits come from a shell in front of the command: the alternative, code between fork and exec, is
# not safe in a process that has threads.
LIMITER = 'ulimit -d "$1" || exit 126; shift; exec "$@"'


def limited(argv: Sequence[str], options: Options) -> list[str]:
    """`argv` under the board's memory limit.

    RLIMIT_DATA, since Linux 4.7, counts what a process can write and shares with nobody: heap,
    anonymous maps, thread stacks. That is what a board runs out of. RLIMIT_AS would also count
    weights that are mapped read-only from a file, which cost no memory that cannot be taken back;
    RLIMIT_RSS does nothing on Linux; a cgroup would count the whole board, but needs root.
    """
    if options.memory_mb is None:
        return list(argv)
    return ["/bin/sh", "-c", LIMITER, "sh", str(options.memory_mb * 1024), *argv]


class Commands:
    """Starts what channels ask for. One per board."""

    def __init__(
        self, options: Options, environment: Mapping[str, str], *, folder: Path | None = None
    ) -> None:
        """`folder` is where commands begin; None: where this process stands."""
        self.options, self.folder = options, folder
        self.environment = dict(environment)
        self.shell = self.environment["SHELL"]
        self.children: set[int] = set()  # pids that asyncio waits for itself
        self.starting = 0  # commands whose pid is not in `children` yet
        self.open = 0

    async def serve(self, channel: asyncssh.SSHServerProcess[bytes]) -> None:
        """From the start of the command until its status is sent or the channel is gone."""
        self.open += 1
        try:
            await self._serve(channel)
        except (OSError, asyncssh.Error) as error:
            log.info("channel ended: %r", error)
            with contextlib.suppress(OSError):
                channel.exit(255)
        finally:
            self.open -= 1

    async def _serve(self, channel: asyncssh.SSHServerProcess[bytes]) -> None:
        argv = [self.shell] if channel.command is None else [self.shell, "-c", channel.command]
        asked = {
            name: value
            for name, value in channel.env.items()
            if name == "LANG" or name.startswith("LC_")  # what sshd accepts by default on Debian
        }
        if self.options.noisy_shell:
            channel.stdout.write(NOISE)
            channel.stderr.write(b"bash: warning: setlocale: LC_ALL: cannot change locale\n")
        self.starting += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *limited(argv, self.options),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**self.environment, **asked},
                cwd=self.folder,
                start_new_session=True,
            )
            self.children.add(process.pid)
        finally:
            self.starting -= 1
        log.info("start %d: %.200r", process.pid, channel.command)
        try:
            await self._attend(channel, process)
        finally:
            self.children.discard(process.pid)

    async def _attend(
        self, channel: asyncssh.SSHServerProcess[bytes], process: asyncio.subprocess.Process
    ) -> None:
        feeding = asyncio.create_task(_feed(channel, process))
        closed = asyncio.create_task(channel.channel.wait_closed())
        ended = asyncio.create_task(_finish(channel, process))
        try:
            await asyncio.wait({ended, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() or ended.exception() is not None:
                # The peer is gone. A foreground process is told, as at the end of a terminal;
                # what left its group (setsid, a job of its own) or ignores HUP lives on.
                log.info("hang up %d", process.pid)
                _signal_group(process.pid, signal.SIGHUP)
                ended.cancel()
                # Nobody reads any more: the next write of a survivor is its SIGPIPE.
                _close_pipes(process)
                await process.wait()
                return
            # A child that holds the pipes keeps `ended` waiting, like the channel of a real sshd.
            status = ended.result()
            log.info("end %d: %d", process.pid, status)
            if status < 0:
                channel.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
            else:
                channel.exit(status)
        finally:
            feeding.cancel()
            closed.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, asyncssh.Error):
                await ended


async def _drain(source: asyncio.StreamReader, target: asyncssh.SSHWriter[bytes]) -> None:
    """Until the end of `source`. A closed target leaves the rest unread."""
    while data := await source.read(CHUNK):
        target.write(data)
        await target.drain()


async def _finish(
    channel: asyncssh.SSHServerProcess[bytes], process: asyncio.subprocess.Process
) -> int:
    """The wait status, once both outputs have ended and the process too."""
    assert process.stdout is not None
    assert process.stderr is not None
    out = asyncio.create_task(_drain(process.stdout, channel.stdout))
    try:
        await _drain(process.stderr, channel.stderr)
        await out
    finally:
        out.cancel()
    return await process.wait()


async def _feed(
    channel: asyncssh.SSHServerProcess[bytes], process: asyncio.subprocess.Process
) -> None:
    """The client's input; also its signals, which arrive in the same stream."""
    target = process.stdin
    assert target is not None
    while True:
        try:
            data = await channel.stdin.read(CHUNK)
        except asyncssh.SignalReceived as received:
            number = getattr(signal, f"SIG{received.signal}", None)
            if number is not None:
                _signal_group(process.pid, number)
            continue
        except (asyncssh.BreakReceived, asyncssh.TerminalSizeChanged):
            continue
        if not data:
            break
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it reads no input
            target.write(data)
            await target.drain()
    target.close()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _close_pipes(process: asyncio.subprocess.Process) -> None:
    transport = process._transport  # type: ignore[attr-defined]  # asyncio offers no other way
    for descriptor in (0, 1, 2):
        pipe = transport.get_pipe_transport(descriptor)
        if pipe is not None:
            pipe.close()
