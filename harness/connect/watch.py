"""Notices a board that stopped answering while its connection looks alive.

Paramiko's own keepalive sends without waiting for an answer, so a frozen board goes unnoticed, and
its `global_request` waits without a limit. Here the request asks for a reply, and any byte that
arrives counts as one: a reply may queue behind megabytes of output on a slow line.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable

import paramiko

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Watch:
    """Seconds. A silent board is given up `period_s` · 2 + `limit_s` after its last byte."""

    period_s: float = 5.0  # of silence before it is asked
    limit_s: float = 15.0  # for an answer


class WatchedSocket:
    """A socket or channel, as paramiko's transport uses one, that notes when bytes arrive."""

    def __init__(self, inner: socket.socket | paramiko.Channel) -> None:
        self._inner = inner
        self._closed = False  # read by paramiko.Transport.stop_thread
        self.last_heard = time.monotonic()
        self.heard = threading.Event()

    def settimeout(self, seconds: float | None) -> None:
        self._inner.settimeout(seconds)

    def recv(self, count: int) -> bytes:
        data = self._inner.recv(count)
        if data:
            self.last_heard = time.monotonic()
            self.heard.set()
        return data

    def send(self, data: bytes) -> int:
        return self._inner.send(data)

    def getpeername(self) -> object:
        return self._inner.getpeername()

    def fileno(self) -> int:
        return self._inner.fileno()

    def close(self) -> None:
        """Also ends a receive that another thread is blocked in."""
        self._closed = True
        if isinstance(self._inner, socket.socket):
            try:
                self._inner.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("shutdown of a closed connection: %s", error)
        self._inner.close()


class Watchdog:
    """One thread per session. Sets `verdict` and calls `on_lost` once when the board is gone."""

    def __init__(
        self,
        transport: paramiko.Transport,
        wire: WatchedSocket,
        watch: Watch,
        name: str,
        on_lost: Callable[[], object],
    ) -> None:
        self.verdict = ""
        self._transport, self._wire, self._watch = transport, wire, watch
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"watchdog {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wire.heard.set()

    def _run(self) -> None:
        asking: threading.Thread | None = None
        while not self._stop.wait(self._watch.period_s) and self._transport.is_active():
            if time.monotonic() - self._wire.last_heard < self._watch.period_s:
                continue
            self._wire.heard.clear()
            if asking is None or not asking.is_alive():
                asking = threading.Thread(
                    target=self._ask, name=f"keepalive {self._name}", daemon=True
                )
                asking.start()
            if not self._wire.heard.wait(self._watch.limit_s) and not self._stop.is_set():
                silent = time.monotonic() - self._wire.last_heard
                self.verdict = f"it has been silent for {silent:.1f} s and answered no keepalive"
                log.warning("board %s: %s", self._name, self.verdict)
                self._on_lost()
                return

    def _ask(self) -> None:
        """Blocks until the reply or the end of the transport; hence a thread of its own."""
        try:
            self._transport.global_request("keepalive@openssh.com", wait=True)
        except (paramiko.SSHException, OSError, EOFError) as error:
            log.debug("board %s: keepalive: %s", self._name, error)
