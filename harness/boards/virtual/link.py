"""A slow link: a relay between the board's port and its SSH server that lets bytes through late."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

PIECE = 2048  # bytes at once; small, so that a slow link is even and not a row of bursts


class Throttle:
    """Lets `rate` bytes per second pass, in order. A burst of one piece is free."""

    def __init__(self, rate: float) -> None:
        self._seconds_per_byte = 1.0 / rate
        self._free_at = 0.0

    async def wait(self, count: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + count * self._seconds_per_byte
        await asyncio.sleep(max(0.0, self._free_at - now))


class SlowLink:
    """Accepts connections and hands their other ends to `serve`.

    kbps: kilobits of 1000 bits per second, for each direction of each connection.
    """

    def __init__(self, kbps: float, serve: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._rate = kbps * 1000 / 8
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside, outside = socket.socketpair()
        inside.setblocking(False)
        outside.setblocking(False)
        serving = asyncio.ensure_future(self._serve(inside))
        far_reader, far_writer = await asyncio.open_connection(sock=outside)
        try:
            await asyncio.gather(
                self._pass(reader, far_writer),
                self._pass(far_reader, writer),
                return_exceptions=True,
            )
        finally:
            for end in (writer, far_writer):
                end.close()
            with contextlib.suppress(Exception):  # its log has said why it ended
                await serving

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        throttle = Throttle(self._rate)
        try:
            while data := await source.read(PIECE):
                await throttle.wait(len(data))
                target.write(data)
                await target.drain()
        finally:
            # SSH knows no half-open connection: the end of one direction is the end of both.
            target.close()
