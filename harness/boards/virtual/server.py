"""The process of one virtual board: an SSH and SFTP server on loopback; ends by itself when idle.

It is the init process of its board: what its commands leave behind becomes its child (a subreaper,
prctl(2)), so that it knows whether the board is still busy, collects zombies, and can end them all
at a reboot or when it is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import getpass
import logging
import os
import re
import shutil
import signal
import socket
import time
import uuid
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

import asyncssh

from harness.boards.virtual import home, namespace, processes
from harness.boards.virtual.commands import Commands
from harness.boards.virtual.emulation import Emulation
from harness.boards.virtual.link import BadLink
from harness.boards.virtual.options import Options
from harness.boards.virtual.state import CLIENT_KEY, HOME, HOST_KEY, STATE, State

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PR_SET_CHILD_SUBREAPER = 36
BOOT_SECONDS = 2.0  # how long a rebooting board answers nothing
IDLE_CHECK_SECONDS = 2.0
SERVER_VERSION = "virtual_board"


@dataclasses.dataclass
class Setting:
    """What the process was started with.

    keep: folders that disk faults must not hide. userland: the root of the emulated programs, for
    a board that has some.
    """

    name: str
    folder: Path
    options: Options
    idle_s: float
    keep: tuple[Path, ...]
    userland: Path | None = None


class Board:
    """One life of a virtual board, from `run` until idle, stopped or frozen to death."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.options = setting, setting.options
        self.folder, self.home = setting.folder, setting.folder / HOME
        self.folder_descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.boot_id_file = self.folder / "boot_id"
        self.user = getpass.getuser()
        self.ended = asyncio.Event()
        self.links: set[asyncssh.SSHServerConnection] = set()
        self.refusals_left = self.options.refuse if isinstance(self.options.refuse, int) else 0
        self.faults_armed = False
        self._provoked = asyncio.Event()
        self.last_busy = time.monotonic()
        self.port = 0
        self._listener: asyncssh.SSHAcceptor | asyncio.Server | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._bad_link: BadLink | None = None

    async def run(self) -> None:
        """Starts, serves and ends. Raises OSError or LookupError when it cannot start."""
        self._prepare()
        self.commands = Commands(
            self.options, home.environment(self.home, self.options, self.user, os.environ)
        )
        os.chdir(self.home)  # where SFTP paths and commands begin
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ended.set)
        loop.add_signal_handler(signal.SIGUSR1, self._provoked.set)
        await self._listen()
        state = State(
            name=self.setting.name,
            pid=os.getpid(),
            start=self._start,
            host=LOOPBACK,
            port=self.port,
            user=self.user,
            host_key=self._shown_host_key,
            options=self.options.digest,
        )
        state.write(self.folder_descriptor)
        log.info("board %s listens on port %d", self.setting.name, self.port)
        self._spawn(self._watch_idle())
        self._spawn(self._reap())
        await self.ended.wait()
        log.info("board %s ends", self.setting.name)
        await self._hush()
        processes.kill_tree(os.getpid())
        if self._is_known():
            os.unlink(STATE, dir_fd=self.folder_descriptor)

    def _prepare(self) -> None:
        self._start = processes.start_of(os.getpid()) or ""
        home.login_shell(self.options)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if self.options.cpus is not None:
            os.sched_setaffinity(0, cores(self.setting.name, self.options.cpus))
        pinned = asyncssh.read_private_key(self.folder / HOST_KEY)
        self._shown_host_key = pinned.get_fingerprint()
        self._host_key = pinned
        if self.options.host_key_changes:
            self._host_key = asyncssh.generate_private_key("ssh-ed25519")
        self._client_keys = str(self.folder / f"{CLIENT_KEY}.pub")
        self._authorized = asyncssh.read_authorized_keys(self._client_keys)
        self.home.mkdir(mode=0o700, exist_ok=True)
        self.boot_id_file.write_text(f"{uuid.uuid4()}\n")
        self._boot_id = os.open(self.boot_id_file, os.O_WRONLY | os.O_CLOEXEC)
        keep = (*self.setting.keep, self.home)
        emulation = None
        if self.options.isa and self.setting.userland is not None:
            emulation = Emulation.of(self.options.isa, self.setting.userland)
            keep = (*keep, self.setting.userland)
        mounts = namespace.Mounts(keep) if self.options.needs_namespace else None
        if mounts and emulation:
            self._show_processors(mounts, emulation)
        if mounts and self.options.shows_boot_id:
            mounts.show_boot_id(self.boot_id_file)
        if mounts and self.options.full_disk:
            mounts.fill_disks(self.home)
        home.furnish(self.home, self.options, emulation)
        if mounts and self.options.readonly_root:
            mounts.make_root_read_only()
        if mounts and self.options.noexec_tmp:
            mounts.forbid_programs_in_tmp()

    def _show_processors(self, mounts: namespace.Mounts, emulation: Emulation) -> None:
        place = self.folder / "processors"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o755)
        mounts.show_processors(*emulation.write_facts(place))
        emulation.check_shown()

    # connections

    async def _listen(self) -> None:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        previous = State.read(self.folder)
        wanted = self.port or (previous.port if previous else 0)
        try:
            listening.bind((LOOPBACK, wanted))
        except OSError:
            listening.bind((LOOPBACK, 0))
        self.port = listening.getsockname()[1]
        if self.options.refuse == "always":
            self._bound_only = listening  # bound, so that nobody else takes the port; not listening
            return
        server = asyncssh.SSHServerConnectionOptions(
            server_factory=lambda: Gate(self),
            server_host_keys=[self._host_key],
            server_version=SERVER_VERSION,
            process_factory=self.commands.serve,
            sftp_factory=None if self.options.no_sftp else asyncssh.SFTPServer,
            encoding=None,
            allow_scp=False,
            allow_pty=False,
            line_editor=False,
            agent_forwarding=False,
            authorized_client_keys=self._authorized,
            login_timeout=30,
        )
        if self.options.slow_kbps or self.options.drop_link_at_byte:

            async def serve(end: socket.socket) -> None:
                link = await asyncssh.run_server(end, options=server)
                await link.wait_closed()

            if self._bad_link is None:  # a board that comes back after a reboot was cut already
                self._bad_link = BadLink(
                    serve,
                    kbps=self.options.slow_kbps,
                    cut_at=self.options.drop_link_at_byte,
                    on_cut=self._cut,
                )
            self._listener = await asyncio.start_server(self._bad_link.accept, sock=listening)
        else:
            self._listener = await asyncssh.listen(sock=listening, options=server)

    def logged_in(self) -> None:
        """Faults that count from the first session begin to count."""
        if self.faults_armed:
            return
        self.faults_armed = True
        for after, act in (
            (self.options.freeze_after, self._freeze),
            (self.options.drop_link_at, self._drop),
            (self.options.reboot_at, self._reboot),
        ):
            if after:
                self._spawn(self._later(after, act))

    async def _later(self, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        """Or at once, when somebody provokes it (manage.provoke)."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._provoked.wait(), seconds)
        await act()

    async def _hush(self) -> None:
        """No connection, and nothing that accepts one."""
        if self._listener is not None:
            self._listener.close()
        for link in list(self.links):
            link.abort()

    # faults

    async def _drop(self) -> None:
        self._cut()

    def _cut(self) -> None:
        log.info("fault: the link drops")
        for link in list(self.links):
            link.abort()

    async def _freeze(self) -> None:
        """Nothing runs any more; the kernel still accepts connections, as that of a real one."""
        log.info("fault: the board freezes")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        processes.send(signal.SIGSTOP, processes.descendants(os.getpid()))
        time.sleep(self.setting.idle_s)  # the event loop must not turn
        processes.kill_tree(os.getpid())
        with contextlib.suppress(OSError):
            os.unlink(STATE, dir_fd=self.folder_descriptor)
        os._exit(0)

    async def _reboot(self) -> None:
        log.info("fault: the board reboots")
        await self._hush()
        processes.kill_tree(os.getpid())
        os.pwrite(self._boot_id, f"{uuid.uuid4()}\n".encode(), 0)
        await asyncio.sleep(BOOT_SECONDS)
        await self._listen()
        log.info("the board is back")

    # housekeeping

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_known(self) -> bool:
        """Whether the state file names this process; who deletes its folder ends a board."""
        try:
            descriptor = os.open(STATE, os.O_RDONLY, dir_fd=self.folder_descriptor)
        except OSError:
            return False
        with os.fdopen(descriptor, "rb") as file:
            return f'"pid": {os.getpid()},'.encode() in file.read()

    async def _watch_idle(self) -> None:
        """Ends the board when it was unused for long, or can be found by nobody."""
        while time.monotonic() - self.last_busy < self.setting.idle_s:
            await asyncio.sleep(min(IDLE_CHECK_SECONDS, self.setting.idle_s / 4))
            living = [item for item in processes.descendants(os.getpid()) if item.state != "Z"]
            if self.links or self.commands.open or living:
                self.last_busy = time.monotonic()
            if not self._is_known():
                log.info("the state file is gone or another's: nobody can find this board")
                break
        else:
            log.info("idle for %.0f s", self.setting.idle_s)
        self.ended.set()

    async def _reap(self) -> None:
        """Collects the dead that were left to us, as init does; never those asyncio waits for."""
        died = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, died.set)
        while True:
            await died.wait()
            died.clear()
            await asyncio.sleep(0.02)  # several die at once
            if self.commands.starting:
                died.set()
                continue
            for item in processes.table().values():
                if item.parent == os.getpid() and item.state == "Z":
                    if item.pid in self.commands.children:
                        continue
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(item.pid, os.WNOHANG)


class Gate(asyncssh.SSHServer):
    """Who may come in: the user of this board with its client key; and where they may go on to."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._link: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        if self._board.refusals_left > 0:
            self._board.refusals_left -= 1
            conn.abort()
            return
        self._link = conn
        self._board.links.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._link is not None:
            self._board.links.discard(self._link)
        self._board.last_busy = time.monotonic()

    def begin_auth(self, username: str) -> bool:
        return True

    def auth_completed(self) -> None:
        self._board.logged_in()

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> bool:
        """As a jump host it leads to other boards of this machine, and nowhere else."""
        return dest_host in (LOOPBACK, "localhost", "::1")


def cores(name: str, count: int) -> set[int]:
    """`count` of the cores this process may use, spread over boards by their names.

    Boards that are numbered take turns, so that two of them share a core only when they must.
    """
    allowed = sorted(os.sched_getaffinity(0))
    number = re.search(r"(\d{1,9})$", name)
    first = (int(number[1]) if number else zlib.crc32(name.encode())) % len(allowed)
    return {allowed[(first + step) % len(allowed)] for step in range(min(count, len(allowed)))}
