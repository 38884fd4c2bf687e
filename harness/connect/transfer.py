"""Files to and from a board: SFTP where the server has it, else `cat`; verified either way."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NoReturn, Protocol

import paramiko

from harness.connect.bounded import bounded, is_gone
from harness.connect.command import CommandResult
from harness.connect.shell import number
from harness.deadline import Deadline
from harness.errors import BoardError

log = logging.getLogger(__name__)

CHUNK = 1 << 15  # bytes; one SFTP request
ONE_COMMAND_BYTES = 1 << 20  # up to here a file travels in one command instead of several requests
PULL_CHUNK = 1 << 20  # bytes; what a lost link costs of a file on its way here
SFTP_START_S = 15.0
ANSWER_BYTES = 1 << 20  # of what the shell says beside the file

# Brings a complete upload to the disk, then to its place. Prints `ok`, or what its SHA-256 is.
_PUBLISH = """
if command -v sha256sum >/dev/null 2>&1; then sum=$(sha256sum <"$p")
elif command -v shasum >/dev/null 2>&1; then sum=$(shasum -a 256 <"$p")
elif command -v openssl >/dev/null 2>&1; then sum=$(openssl dgst -sha256 -r <"$p")
else
  for python in python3 python; do
    sum=$({ cd / && "$python" -c 'import hashlib, sys
h = hashlib.sha256()
for b in iter(lambda: sys.stdin.buffer.read(1 << 20), b""): h.update(b)
print(h.hexdigest())'; } <"$p" 2>/dev/null) && break
  done
fi
sum=${sum%% *}
if [ -z "$sum" ]; then echo tool; exit 0; fi
if [ "$sum" != "$want" ]; then echo "$sum"; exit 0; fi
if [ -d "$r" ]; then echo "$r is a folder" >&2; exit 1; fi
# Power may fail at any time, and a name can reach the disk before its content.
sync "$p" 2>/dev/null || sync 2>/dev/null
chmod "$mode" "$p" && mv -f "$p" "$r" && echo ok
"""


class Carrier(Protocol):
    """What a transfer needs of its session."""

    @property
    def transport(self) -> paramiko.Transport: ...
    def execute(
        self,
        script: str,
        *,
        deadline: Deadline,
        feed: bytes | Iterable[bytes] = b"",
        limit_bytes: int = ...,
        title: str = "",
    ) -> CommandResult: ...
    def error(
        self, kind: str, found: str, *, expected: str = "", remedy: str = ""
    ) -> BoardError: ...
    def lost(self, doing: str) -> BoardError: ...


class Transfer:
    """SFTP clients are not shared: each thread that moves files has its own."""

    def __init__(self, session: Carrier) -> None:
        self._session = session
        self._mine = threading.local()
        self._clients: list[paramiko.SFTPClient] = []
        self._lock = threading.Lock()
        self.no_sftp = ""  # why the server's SFTP is not used

    def push(
        self,
        source: IO[bytes],
        remote: str,
        deadline: Deadline,
        mode: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        upload = _Upload(self, self._session, source, _path(remote), deadline, mode, on_progress)
        try:
            upload.run()
        except BoardError as error:
            if error.kind != "board-lost":  # what a lost link leaves is resumed next time
                upload.remove(error)
            raise
        except BaseException:
            upload.remove(None)
            raise

    def read_from(self, remote: str, offset: int, limit: int, deadline: Deadline) -> bytes:
        if offset < 0 or limit < 0:
            raise ValueError(f"offset {offset} and limit {limit} cannot be negative")
        path = _path(remote)
        client = self.client(deadline)
        if client is None:
            script = (
                f'p={shlex.quote(path)}\n[ -f "$p" ] || exit 44\n'
                f'tail -c +{offset + 1} <"$p" | head -c {limit}'
            )
            result = self._session.execute(
                script,
                deadline=deadline,
                limit_bytes=limit + (1 << 20),
                title=f"reading {path}",
            )
            if result.status == 44:
                raise self._session.error("transfer", f"no file {path}", expected="a file")
            if result.status != 0 or (result.stderr and not result.stdout):
                self.failed("reading", path, result.stderr.decode(errors="replace").strip())
            return result.stdout
        with self.errors("reading", path, client):
            get = client.get_channel()
            if get is not None:
                get.settimeout(max(0.1, deadline.remaining))
            with client.open(path, "rb") as handle:
                handle.seek(offset)
                return bytes(handle.read(limit))

    def pull(
        self,
        remote: str,
        local: Path,
        deadline: Deadline,
        limit_bytes: int,
        sha256: str | None = None,
    ) -> None:
        mark = f".{sha256[:16]}" if sha256 else ""
        partial = local.with_name(f"{local.name}{mark}.partial")
        resumable = False
        try:
            with partial.open("ab" if sha256 else "wb") as sink:
                done = sink.tell()
                if done > limit_bytes:
                    done = sink.truncate(0)
                while piece := self.read_from(
                    remote, done, min(PULL_CHUNK, limit_bytes + 1 - done), deadline
                ):
                    done += len(piece)
                    if done > limit_bytes:
                        raise self._session.error(
                            "transfer",
                            f"{remote} is larger than {limit_bytes} bytes",
                            expected="a smaller file",
                        )
                    sink.write(piece)
            if sha256:
                self._verify(remote, partial, sha256)
            partial.replace(local)
        except BoardError as error:
            resumable = sha256 is not None and error.kind in ("board-lost", "timeout")
            raise
        finally:
            if not resumable:
                partial.unlink(missing_ok=True)

    def _verify(self, remote: str, local: Path, sha256: str) -> None:
        with local.open("rb") as file:
            found = _sha256(file)
        if found != sha256:
            raise self._session.error(
                "transfer",
                f"{remote} arrived with SHA-256 {found}",
                expected=sha256,
                remedy="try again; if it stays, check the board's storage and memory",
            )

    def client(self, deadline: Deadline) -> paramiko.SFTPClient | None:
        """This thread's SFTP client; None where the server has no SFTP."""
        if self.no_sftp:
            return None
        mine: paramiko.SFTPClient | None = getattr(self._mine, "client", None)
        if mine is not None:
            channel = mine.get_channel()
            if channel is not None and not channel.closed:
                return mine
        opened: list[paramiko.Channel] = []

        def start() -> paramiko.SFTPClient:
            seconds = max(0.1, deadline.within(SFTP_START_S).remaining)
            channel = self._session.transport.open_session(timeout=seconds)
            opened.append(channel)
            # A start file that prints garbles the protocol: the answer never becomes complete.
            channel.settimeout(seconds)
            channel.invoke_subsystem("sftp")
            return paramiko.SFTPClient(channel)

        try:
            mine = bounded(start, deadline.within(SFTP_START_S, "starting SFTP"))
        except (OSError, EOFError, paramiko.SSHException, paramiko.SFTPError) as error:
            for channel in opened:
                _close(channel)
            if is_gone(self._session.transport, 0.2):
                raise self._session.lost("starting SFTP") from error
            if deadline.expired:
                raise self._session.error("timeout", "SFTP did not start in time") from error
            self.no_sftp = str(error) or type(error).__name__
            log.info("no SFTP (%s): files travel through `cat`", self.no_sftp)
            return None
        self._mine.client = mine
        with self._lock:
            self._clients.append(mine)
        return mine

    @contextlib.contextmanager
    def errors(self, doing: str, path: str, client: paramiko.SFTPClient) -> Iterator[None]:
        """Turns what paramiko raises into a BoardError."""
        try:
            yield
        except TimeoutError as error:
            self.drop(client)
            if not self._session.transport.is_active():
                raise self._session.lost(f"{doing} {path}") from error
            raise self._session.error(
                "timeout", f"{doing} {path} did not end in time", expected="an end in time"
            ) from error
        except (OSError, EOFError, paramiko.SSHException, paramiko.SFTPError) as error:
            # With an error number it is the server's answer, otherwise trouble with the channel.
            if not isinstance(error, OSError) or error.errno is None:
                if is_gone(self._session.transport, 0.5):
                    raise self._session.lost(f"{doing} {path}") from error
                self.drop(client)
            if isinstance(error, FileNotFoundError):
                raise self._session.error("transfer", f"{doing} {path}: no such file") from error
            self.failed(doing, path, str(error) or type(error).__name__, error)

    def failed(
        self, doing: str, path: str, why: str, cause: BaseException | None = None
    ) -> NoReturn:
        full = "no space" in why.lower() or "disk full" in why.lower() or "quota" in why.lower()
        raise self._session.error(
            "no-space" if full else "transfer",
            f"{doing} {path}: {why or 'failed without a message'}",
            remedy="free some space there" if full else "",
        ) from cause

    def drop(self, client: paramiko.SFTPClient) -> None:
        """A client whose answers may be out of step is not used again."""
        self._mine.client = None
        with self._lock:
            if client in self._clients:
                self._clients.remove(client)
        _close(client)

    def close(self) -> None:
        with self._lock:
            clients, self._clients = self._clients, []
        for client in clients:
            _close(client)


class _Upload:
    """One file on its way. Its temporary name holds the content's hash, so what is resumed fits."""

    def __init__(
        self,
        transfer: Transfer,
        session: Carrier,
        source: IO[bytes],
        remote: str,
        deadline: Deadline,
        mode: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.transfer, self.session, self.source, self.remote = transfer, session, source, remote
        self.deadline, self.mode, self.on_progress = deadline, mode, on_progress
        self.total = source.seek(0, os.SEEK_END)
        self.sha256 = _sha256(source)
        self.partial = f"{remote}.{self.sha256[:16]}.partial"

    def run(self) -> None:
        if self.total <= ONE_COMMAND_BYTES:
            self.through_cat(0)
            return
        have = self.there()
        said = self.send(have)
        if said != "ok" and have:
            log.info("%s: what was there before does not fit, sending all of it", self.remote)
            said = self.send(0)
        if said != "ok":
            self.refuse(said)

    def send(self, have: int) -> str:
        client = self.transfer.client(self.deadline)
        if client is None:
            return self.cat(have)
        with self.transfer.errors("writing", self.partial, client):
            channel = client.get_channel()
            with client.open(self.partial, "r+b" if have else "wb") as handle:
                handle.set_pipelined(True)
                handle.seek(have)
                for chunk in self.chunks(have):
                    if channel is not None:
                        channel.settimeout(max(0.1, self.deadline.remaining))
                    handle.write(chunk)
        return self.said(self.execute(self.script("") + _PUBLISH))

    def through_cat(self, have: int) -> None:
        said = self.cat(have)
        if said != "ok":
            self.refuse(said)

    def cat(self, have: int) -> str:
        append = 'cat >>"$p" || exit 1' if have else 'cat >"$p" || exit 1'
        return self.said(self.execute(self.script(append) + _PUBLISH, self.chunks(have)))

    def execute(self, script: str, feed: bytes | Iterable[bytes] = b"") -> CommandResult:
        return self.session.execute(
            script,
            deadline=self.deadline,
            feed=feed,
            limit_bytes=ANSWER_BYTES,
            title=f"writing {self.remote}",
        )

    def script(self, first: str) -> str:
        return (
            f"LC_ALL=C; export LC_ALL; p={shlex.quote(self.partial)} r={shlex.quote(self.remote)}"
            f" want={self.sha256} mode={self.mode:o}\n{first}\n"
        )

    def said(self, result: CommandResult) -> str:
        answer = result.stdout.decode(errors="replace").strip()
        if result.status != 0 or not answer:
            why = result.stderr.decode(errors="replace").strip()[-300:]
            self.transfer.failed("writing", self.remote, why)
        return answer

    def refuse(self, said: str) -> NoReturn:
        if said == "tool":
            raise self.session.error(
                "transfer",
                f"{self.remote} cannot be verified: no sha256sum, shasum, openssl or python3",
                expected="one of them on the board",
            )
        raise self.session.error(
            "transfer",
            f"{self.remote} arrived with SHA-256 {said}",
            expected=self.sha256,
            remedy="try again; if it stays, check the board's storage and memory",
        )

    def there(self) -> int:
        """Bytes of this very content that an earlier, interrupted push left."""
        script = self.script('if [ -f "$p" ]; then wc -c <"$p"; else echo 0; fi')
        have = number(self.execute(script).stdout) or 0
        return have if have <= self.total else 0

    def chunks(self, have: int) -> Iterator[bytes]:
        self.source.seek(have)
        done = have
        while chunk := self.source.read(CHUNK):
            if self.deadline.expired:
                raise self.session.error(
                    "timeout",
                    f"writing {self.remote}: {done} of {self.total} bytes in time",
                    expected="all of them",
                )
            yield chunk
            done += len(chunk)
            if self.on_progress is not None:
                self.on_progress(done, self.total)

    def remove(self, error: BoardError | None) -> None:
        """Leaves nothing half-written; tells a full disk from other trouble."""
        script = self.script(
            "case $p in */*) d=${p%/*};; *) d=.;; esac\n"
            'df -Pk "${d:-/}" 2>/dev/null | tail -n 1\nrm -f "$p"'
        )
        try:
            result = self.session.execute(
                script,
                deadline=Deadline.after(10, "removing a partial upload"),
                limit_bytes=ANSWER_BYTES,
                title=f"removing {self.partial}",
            )
        except BoardError as trouble:
            log.warning("%s may still be there: %s", self.partial, trouble)
            return
        fields = result.stdout.decode(errors="replace").split()
        free_kb = number(fields[3]) if len(fields) >= 6 else None
        if error is not None and error.kind == "transfer" and free_kb == 0:
            error.kind, error.remedy = "no-space", "free some space there"


def _sha256(source: IO[bytes]) -> str:
    source.seek(0)
    digest = hashlib.sha256()
    while chunk := source.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _path(remote: str) -> str:
    """A path that neither the shell nor SFTP reads as anything else."""
    if not remote or "\0" in remote:
        raise ValueError(f"{remote!r} is no path")
    if remote == "~" or remote.startswith("~/"):
        raise ValueError(f"{remote!r}: SFTP does not expand '~'; give an absolute path")
    return "./" + remote if remote.startswith("-") else remote


def _close(what: paramiko.SFTPClient | paramiko.Channel) -> None:
    try:
        bounded(what.close, Deadline.after(2.0, "closing a file channel"))
    except (OSError, EOFError, paramiko.SSHException, paramiko.SFTPError) as error:
        log.debug("closing a file channel: %r", error)
