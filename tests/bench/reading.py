"""How fast this machine reads memory: plainly, and in the best way found.

The plain read is one stream a thread, small pages, no prefetch. The best is searched among streams,
prefetch distances and huge pages. Both read a block at least twice the last-level cache, where a
model does not fit that cache, or a block as large as the model, where it does: a claim says which.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from .machine import last_level_cache
from .protocol import Worker

LARGE = 1 << 30
PASSES = 3  # of one measurement; their median counts, as that of a turn's tokens does


@dataclasses.dataclass(frozen=True)
class Read:
    streams: int = 1  # of each thread
    prefetch: int = 0  # bytes ahead
    huge: bool = False

    def __str__(self) -> str:
        if self == PLAIN:
            return "linear read"
        parts = [f"{self.streams} stream{'s' if self.streams > 1 else ''} a thread"]
        parts += [f"prefetch {self.prefetch} B"] if self.prefetch else []
        return ", ".join([*parts, "huge pages" if self.huge else "4 KiB pages"])


PLAIN = Read()


def beyond_caches() -> int:
    """Bytes of a block that no cache holds."""
    return max(LARGE, 2 * last_level_cache())


def seconds_per_byte(worker: Worker, threads: int, size: int, read: Read) -> Callable[[], float]:
    """A phase for a race: its cost is the time of one byte."""

    def phase() -> float:
        told = worker.ask(
            "bandwidth",
            threads=threads,
            size=size,
            streams=read.streams,
            prefetch=read.prefetch,
            huge=read.huge,
            passes=PASSES,
        )
        return 1 / float(told["bytes_per_s"])

    return phase


def best_read(worker: Worker, threads: int, size: int, *, quick: bool = False) -> Read:
    """The fastest way found, by one measurement each and a second one of the four best."""
    streams = (1, 4) if quick else (1, 2, 3, 4, 6)
    prefetch = (0, 512) if quick else (0, 512, 1024, 2048)
    ways = [Read(*parts) for parts in itertools.product(streams, prefetch, (False, True))]
    first = {read: seconds_per_byte(worker, threads, size, read)() for read in ways}
    near = sorted(ways, key=lambda read: first[read])[:4]
    again = {
        read: min(first[read], seconds_per_byte(worker, threads, size, read)()) for read in near
    }
    return min(near, key=lambda read: again[read])
