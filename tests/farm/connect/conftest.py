"""A network between the tests and a board that loses and delays packets, for real.

Two network namespaces, each with a TUN device; between them a relay of packets that drops some and
holds each back for a while, as `tc netem` does where a kernel has it. TCP, its timeouts and
retransmissions are the kernel's own. Nothing of the machine's network is touched: a namespace
belongs to a thread, and what the thread starts, and ends with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import queue
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
HERE, BOARD = "192.0.2.1", "192.0.2.2"  # RFC 5737: addresses for documentation, nobody's
QUEUE_PACKETS = 500  # more than that on the way are dropped, as by a router

T = TypeVar("T")


class Place:
    """A thread with a network of its own. `do` runs something in it."""

    def __init__(self, address: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self.device = self.do(lambda: self._furnish(address))

    def do(self, job: Callable[[], T], seconds: float = 120.0) -> T:
        results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                results.put((True, job()))
            except BaseException as error:
                results.put((False, error))

        self._jobs.put(run)
        good, value = results.get(timeout=seconds)
        if not good:
            raise value
        return value

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(10)
        os.close(self.device)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _furnish(self, address: str) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"unshare: {os.strerror(number)}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"wire", IFF_TUN | IFF_NO_PI))
        for words in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{address}/24", "dev", "wire"),
            ("link", "set", "wire", "mtu", "1400", "up"),
        ):
            subprocess.run(["ip", *words], check=True)
        return device


class Network:
    """`here` is where the tests' end of connections must be opened, `there` where servers start.

    `loss` is the share of packets that vanish, `delay_s` how long each takes one way; both may be
    changed at any time. `dead`: nothing gets through, and nobody is told.
    """

    def __init__(self, loss: float, delay_s: float) -> None:
        self.loss, self.delay_s, self.dead = loss, delay_s, False
        self.passed = self.lost = 0
        self.here, self.there = Place(HERE), Place(BOARD)
        self._random = random.Random(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self.here.close()
        self.there.close()

    def _carry(self) -> None:
        ends = (self.here.device, self.there.device)
        other = {ends[0]: ends[1], ends[1]: ends[0]}
        poller = select.poll()
        for end in ends:
            poller.register(end, select.POLLIN)
        waiting: list[tuple[float, int, int, bytes]] = []  # (due, order, device, packet)
        count = 0
        while not self._stop.is_set():
            pause = waiting[0][0] - time.monotonic() if waiting else 0.05
            for end, _ in poller.poll(max(0.0, min(pause, 0.05)) * 1000 + 0.5):
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(end, 2048)
                    count += 1
                    full = len(waiting) >= QUEUE_PACKETS
                    if self.dead or full or self._random.random() < self.loss:
                        self.lost += 1
                        continue
                    due = time.monotonic() + self.delay_s
                    heapq.heappush(waiting, (due, count, other[end], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(waiting)
                if self.dead:
                    self.lost += 1
                    continue
                with contextlib.suppress(OSError):  # a device whose queue is full drops it
                    os.write(end, packet)
                    self.passed += 1


@pytest.fixture
def network() -> Iterator[Callable[..., Network]]:
    """Makes networks: `network(loss=0.02, delay_s=0.02)`."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    made: list[Network] = []

    def make(loss: float = 0.0, delay_s: float = 0.0) -> Network:
        try:
            made.append(Network(loss, delay_s))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs network namespaces, TUN devices and the program ip: {error}")
        return made[-1]

    yield make
    for item in made:
        item.close()
