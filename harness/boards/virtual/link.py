"""A bad link: a relay between the board's port and its SSH server, late or cut at a byte."""

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


class BadLink:
    """Accepts connections and hands their other ends to `serve`.

    kbps: kilobits of 1000 bits per second, for each direction of each connection; None: unhindered.
    cut_at: how many bytes the board receives, over all connections, until `on_cut` is called, once.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket], Awaitable[None]],
        *,
        kbps: float | None = None,
        cut_at: int | None = None,
        on_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self._serve = serve
        self._rate = None if kbps is None else kbps * 1000 / 8
        self._left = cut_at
        self._on_cut = on_cut

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside, outside = socket.socketpair()
        inside.setblocking(False)
        outside.setblocking(False)
        serving = asyncio.ensure_future(self._serve(inside))
        far_reader, far_writer = await asyncio.open_connection(sock=outside)
        try:
            await asyncio.gather(
                self._pass(reader, far_writer, to_board=True),
                self._pass(far_reader, writer, to_board=False),
                return_exceptions=True,
            )
        finally:
            for end in (writer, far_writer):
                end.close()
            with contextlib.suppress(Exception):  # its log has said why it ended
                await serving

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, to_board: bool
    ) -> None:
        throttle = None if self._rate is None else Throttle(self._rate)
        try:
            while data := await source.read(PIECE):
                if throttle is not None:
                    await throttle.wait(len(data))
                cut = to_board and self._left is not None and len(data) >= self._left
                if cut:
                    data = data[: self._left]
                target.write(data)
                await target.drain()
                if cut:
                    self._left = None
                    self._on_cut()
                    return
                if to_board and self._left is not None:
                    self._left -= len(data)
        finally:
            # SSH knows no half-open connection: the end of one direction is the end of both.
            target.close()
