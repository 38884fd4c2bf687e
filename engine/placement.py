"""Which cores a decoder may run on, and in how many threads it is worth trying.

Boards mix cores: pinning "from core 0" picks the small ones of most of them. The kernel tells
each core's strength as `cpu_capacity` (1024 for the strongest; sched-capacity.rst in the
Documentation/scheduler of the Linux tree) or at least its highest clock, and which hardware
threads share a core.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

CPUS = Path("sys/devices/system/cpu")
# Files of a core's folder there, in the order in which `collect` lists them.
FILES = ("cpu_capacity", "cpufreq/cpuinfo_max_freq", "topology/thread_siblings_list")
ALIKE = 0.9  # of the strongest: boards bin cores of one kind by clock
_LINE = re.compile(r"cpu(\d+)/(\S+) (\S+)")


@dataclasses.dataclass(frozen=True)
class Core:
    """One hardware thread as the kernel numbers it. None: the kernel does not tell."""

    number: int
    capacity: int | None = None
    max_khz: int | None = None
    siblings: tuple[int, ...] = ()  # hardware threads of the same core, itself included


@dataclasses.dataclass(frozen=True)
class Placement:
    """So many threads on some cores; `cpus` None means all that are allowed."""

    threads: int
    cpus: tuple[int, ...] | None

    def __str__(self) -> str:
        count = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return count if self.cpus is None else f"{count} on cores {ranges(self.cpus)}"


def collect(root: Path = Path("/")) -> str:
    """What this computer tells of its cores, one `cpuN/FILE VALUE` a line."""
    lines = []
    folders = [path for path in (root / CPUS).glob("cpu[0-9]*") if path.name[3:].isdigit()]
    for folder in sorted(folders, key=lambda path: int(path.name[3:])):
        for name in FILES:
            try:
                value = (folder / name).read_text().strip()
            except OSError:
                continue
            if value and " " not in value:
                lines.append(f"{folder.name}/{name} {value}\n")
    return "".join(lines)


def parse_cores(text: str) -> tuple[Core, ...]:
    """The cores of what `collect` wrote, by number; lines of another form are left out."""
    found: dict[int, dict[str, str]] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match:
            found.setdefault(int(match[1]), {})[match[2]] = match[3]
    return tuple(
        Core(
            number,
            _whole(files.get(FILES[0])),
            _whole(files.get(FILES[1])),
            parse_list(files.get(FILES[2], "")) or (number,),
        )
        for number, files in sorted(found.items())
    )


def parse_list(text: str) -> tuple[int, ...]:
    """Numbers of a kernel list such as "0-3,8"; () for what is none."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if not match:
            return ()
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(numbers)


def ranges(numbers: Iterable[int]) -> str:
    """ "4-7, 9" for 4, 5, 6, 7 and 9."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def classes(cores: Sequence[Core], allowed: Collection[int]) -> list[tuple[int, ...]]:
    """The allowed cores grouped by strength, the strongest group first.

    By capacity where every one tells it, else by highest clock; one group where neither is known.
    """
    here = [core for core in cores if core.number in allowed]
    unknown = sorted(set(allowed) - {core.number for core in here})
    if unknown:  # a core without a folder: nothing may be concluded
        return [tuple(sorted(allowed))]
    by_capacity = {core.number: core.capacity for core in here}
    by_clock = {core.number: core.max_khz for core in here}
    for strength in (by_capacity, by_clock):
        known = {number: value for number, value in strength.items() if value}
        if known and len(known) == len(here):
            return _grouped(known)
    return [tuple(sorted(allowed))] if allowed else []


def _grouped(strength: dict[int, int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    left = dict(strength)
    while left:
        best = max(left.values())
        group = tuple(sorted(number for number in left if left[number] >= ALIKE * best))
        found.append(group)
        for number in group:
            del left[number]
    return found


def big_cores(cores: Sequence[Core], allowed: Collection[int]) -> tuple[int, ...]:
    """The strongest of the allowed cores; all of them where nothing is known."""
    groups = classes(cores, allowed)
    return groups[0] if groups else ()


def candidates(cores: Sequence[Core], allowed: Collection[int]) -> list[Placement]:
    """What a ladder tries, from few threads to many.

    The strongest cores first, then weaker ones with them; a weaker group is worth trying only with
    more threads than the stronger ones hold. Of a core with several hardware threads one is used,
    and all of them only where every core has a thread already.
    """
    whole = tuple(sorted(allowed))
    first = _one_each(cores, whole)
    found: list[Placement] = []
    taken: list[int] = []
    held = 0
    for group in classes(cores, allowed):
        taken += [number for number in group if number in first]
        mask = tuple(sorted(taken))
        for count in counts(len(mask)):
            if count > held:
                found.append(Placement(count, None if mask == whole else mask))
        held = max(held, len(mask))
    found += [Placement(count, None) for count in counts(len(whole)) if count > held]
    return found


def _one_each(cores: Sequence[Core], allowed: Sequence[int]) -> set[int]:
    """The first allowed hardware thread of each core."""
    by_number = {core.number: core for core in cores}
    seen: set[int] = set()
    kept: set[int] = set()
    for number in allowed:
        core = by_number.get(number)
        siblings = set(core.siblings) if core is not None else {number}
        if not siblings & seen:
            kept.add(number)
        seen |= siblings | {number}
    return kept


def counts(most: int) -> list[int]:
    """Numbers of threads worth trying up to `most`: 1, 2, 3, 4, 6, 8, 12, 16, …, and `most`."""
    found = [count for count in (1, 2, 3) if count <= most]
    step = 4
    while step <= most:
        found += [count for count in (step, step + step // 2) if count <= most]
        step *= 2
    return sorted({*found, most}) if most > 0 else []


def allowed_here() -> tuple[int, ...]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,12}", text) else None
