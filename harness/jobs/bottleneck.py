"""What limits a token's speed: compute, memory, dispatch, waiting or a slow kernel, in a sentence.

The rules, the first that holds: a fast kernel fell back to a slow one; other processes have the
cores; much of a token lies between ops (dispatch or sync); it reads about as fast as the board was
measured to read (memory); an accelerator or all the engine's threads are busy (compute); neither,
so that somebody waits. A pure function of numbers; what is not known is None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

BETWEEN_OPS = 0.20  # share of a token that no op covers
NEAR_CEILING = 0.65  # of the measured read rate; a real mix of ops hardly gets beyond 0.9
ABOVE = 1.03  # of the ceiling, and no more a matter of rounding
FROM_A_CACHE = 1.15  # times the read rate: then the bytes come from a cache
BUSY, IDLE = 0.85, 0.60  # share of the engine's threads, or of an accelerator
TAKEN = 0.5  # of the time that the engine did not run in which no core was free for it
LINE_BYTES = 64  # that a miss of the last level reads, on all processors with these counters
STALLED = 0.5  # instructions a cycle below which cores mostly wait for data
EXTRA_READS = 1.5  # times what the ops need: their data does not lie as it is read

FALLBACK, DISPATCH, MEMORY, COMPUTE, WAITING, CONTENDED = (
    "fallback", "dispatch", "memory", "compute", "waiting", "contended",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A token at the deep position. Shares are 0 to 1."""

    token_ms: float
    residual_ms: float  # of a traced token: covered by no op
    traced_ms: float
    weight_bytes: int
    kv_bytes: int  # of all cached positions
    ceiling_gb_s: float | None  # measured linear read
    threads: int
    cpu_busy: float | None  # of so many threads
    free_cores: float | None = None  # of those that it may use, those that nobody used
    accelerators: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fallback: tuple[str, str] | None = None  # (what, why)
    largest_op: tuple[str, float] | None = None  # the group of ops with the largest share
    llc_misses: float | None = None  # a token
    instructions_per_cycle: float | None = None

    @property
    def gb_s(self) -> float:
        """What the token reads in its time: weights, keys and values, once each."""
        return (self.weight_bytes + self.kv_bytes) / (self.token_ms * 1e6)

    @property
    def of_ceiling(self) -> float | None:
        return self.gb_s / self.ceiling_gb_s if self.ceiling_gb_s else None

    @property
    def contended(self) -> bool:
        """While it did not run, its cores were mostly not free."""
        if self.cpu_busy is None or self.free_cores is None or self.cpu_busy >= IDLE:
            return False
        return self.free_cores < (1 - TAKEN) * (1 - self.cpu_busy) * self.threads


@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """`sentence` says what limits the speed and by which numbers, `advice` what would help."""

    kind: str
    sentence: str
    advice: str


def bottleneck(seen: Evidence) -> Bottleneck:
    """The verdict."""
    if seen.fallback is not None:
        what, why = seen.fallback
        return Bottleneck(
            FALLBACK,
            f"A slow kernel ran for {what}: {why}.",
            "use a layout and a scheme that the fast kernels take, or another unit",
        )
    if seen.contended:
        return Bottleneck(
            CONTENDED,
            f"Not the engine alone: its {_threads(seen, 'gets', 'get')} {seen.cpu_busy:.0%} of the "
            "time, and other processes have the cores meanwhile.",
            "end what else runs on the board, then profile it again",
        )
    share = seen.residual_ms / seen.traced_ms if seen.traced_ms > 0 else 0.0
    if share >= BETWEEN_OPS:
        return Bottleneck(
            DISPATCH,
            f"Dispatch bound: {share:.0%} of a token ({seen.residual_ms:.2g} ms) lies between its "
            "ops, where they are started and waited for.",
            "use the compiled executor, fuse ops, or run fewer threads",
        )
    near = seen.of_ceiling
    if near is not None and NEAR_CEILING <= near <= FROM_A_CACHE:
        return _memory(seen, near)
    busiest = max(seen.accelerators.items(), key=lambda item: item[1], default=None)
    if busiest is not None and busiest[1] >= BUSY:
        return Bottleneck(
            COMPUTE,
            f"Compute bound: the accelerator {busiest[0]} is {busiest[1]:.0%} busy"
            f"{_reading(seen)}.",
            "use narrower types there, or move ops to a part that idles",
        )
    if seen.cpu_busy is None:
        return Bottleneck(
            WAITING,
            f"Not known: the board tells neither how busy its cores are{_reading(seen, ' nor')}.",
            "look at the op table: the op with the largest share is the first to look into",
        )
    if seen.cpu_busy >= BUSY:
        return _compute(seen, idle=busiest)
    if seen.cpu_busy < IDLE:
        return Bottleneck(
            WAITING,
            f"Waiting: its {_threads(seen, 'is', 'are')} busy for {seen.cpu_busy:.0%} of the time"
            f"{_reading(seen)}, and wait otherwise, for each other or for memory to be mapped.",
            "run fewer threads (harness threads finds how many), and look at page faults and "
            "context switches",
        )
    return Bottleneck(
        COMPUTE,
        f"Mostly compute: its {_threads(seen, 'is', 'are')} busy for {seen.cpu_busy:.0%} of the "
        f"time{_reading(seen)}.{_largest(seen)}",
        "look at the op with the largest share, and at how the threads share its work",
    )


def _memory(seen: Evidence, near: float) -> Bottleneck:
    total = seen.weight_bytes + seen.kv_bytes
    kv = seen.kv_bytes / total if total else 0.0
    what = f"keys and values {kv:.0%} of it" if kv >= 0.1 else "nearly all of it weights"
    advice = (
        "read fewer bytes: keys and values in int8 (--kv int8), or a shorter context"
        if kv > 0.5
        else "read fewer bytes: a finer scheme for the weights"
        + (", keys and values in int8" if kv >= 0.1 else "")
    )
    against = f"{near:.0%} of the {seen.ceiling_gb_s:.3g} GB/s that the board reads at most"
    if near > ABOVE:  # a large cache, or a better moment than that of the ceiling
        against = f"above memory's {seen.ceiling_gb_s:.3g} GB/s: some of it comes from a cache"
    return Bottleneck(
        MEMORY,
        f"Memory bound: a token reads {total / 1e6:.4g} MB at {seen.gb_s:.3g} GB/s, {against}; "
        f"{what}.",
        advice,
    )


def _compute(seen: Evidence, idle: tuple[str, float] | None) -> Bottleneck:
    beside = f", the accelerator {idle[0]} is idle ({idle[1]:.0%})" if idle else ""
    sentence = (
        f"Compute bound: {_threads(seen)} {seen.cpu_busy:.0%} busy{beside}{_reading(seen)}."
        f"{_largest(seen)}"
    )
    needed = seen.weight_bytes + seen.kv_bytes
    fetched = (seen.llc_misses or 0.0) * LINE_BYTES
    if needed and fetched > EXTRA_READS * needed:
        return Bottleneck(
            COMPUTE,
            f"{sentence} The last-level cache misses {fetched / needed:.1f}× the bytes that the "
            "ops need.",
            "change the layout: data is fetched more often than it is used",
        )
    pace = seen.instructions_per_cycle
    if pace is not None and pace < STALLED:
        return Bottleneck(
            COMPUTE,
            f"{sentence} Only {pace:.2f} instructions a cycle: the cores mostly wait for data.",
            "change the layout, so that data is read in the order in which it lies",
        )
    advice = "more cores, a wider instruction set, int8 activations; fewer bytes alone do not help"
    if idle:
        advice = f"move the matrix ops to {idle[0]}, which idles"
    return Bottleneck(COMPUTE, sentence, advice)


def _threads(seen: Evidence, one: str = "", many: str = "") -> str:
    """ "1 thread is", "4 threads are" with these verbs."""
    return (
        f"1 thread {one}".strip() if seen.threads == 1 else f"{seen.threads} threads {many}".strip()
    )


def _reading(seen: Evidence, joined: str = "") -> str:
    """A clause about the read rate."""
    near = seen.of_ceiling
    if near is None:
        return f"{joined} how fast it reads memory" if joined else ""
    if joined:
        return ""
    if near > FROM_A_CACHE:
        return ", and its weights come from a cache, faster than memory"
    return f", and it reads at {near:.0%} of what memory gives"


def _largest(seen: Evidence) -> str:
    if seen.largest_op is None:
        return ""
    name, share = seen.largest_op
    return f" {name} takes {share:.0%} of a token."
