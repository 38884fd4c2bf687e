"""Lines of a kernel's log, and of the services that kill, as records. Pure: text in, records out.

A line says something about one process when it names its pid; `of_process` decides that. What a
log does not say proves nothing: lines are rate-limited, and often not readable.

Shapes: arch/x86/kernel/traps.c and arch/x86/mm/fault.c, arch/arm64/kernel/traps.c,
arch/riscv/kernel/traps.c, mm/oom_kill.c, kernel/hung_task.c of Linux; systemd's service.c and
oomd; Android's lowmemorykiller.c and lmkd; Rockchip's rknpu_job.c.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from re import Match

LINES_LIMIT, CHARS_LIMIT = 2000, 2000

_COMM = r"(?P<comm>[^\[\]\n]{1,40}?)"
_MODULE = (
    r"(?: in (?P<module>[^\[\s]{1,200})\[(?:(?P<offset>[0-9a-f]{1,16}),)?(?P<base>[0-9a-f]{1,16})"
    r"\+(?P<size>[0-9a-f]{1,16})\])?"
)


@dataclasses.dataclass(frozen=True)
class Note:
    """One finding in a log. `kind`: trap | oom | killed | unit-oom | policy | npu | hung.

    `detail` says which trap, reason or constraint; `offset` is the place in `module`'s file where
    the kernel tells it.
    """

    kind: str
    line: str
    comm: str = ""
    pid: int | None = None
    detail: str = ""
    pc: int | None = None
    address: int | None = None
    esr: int | None = None
    module: str = ""
    offset: int | None = None
    rss_kb: int | None = None


def parse_lines(lines: Iterable[str]) -> tuple[Note, ...]:
    """The findings in a log, in its order."""
    found = []
    for number, line in enumerate(lines):
        if number >= LINES_LIMIT:
            break
        text = line[:CHARS_LIMIT]
        for pattern, make in _SHAPES:
            match = pattern.search(text)
            if match is not None:
                found.append(make(match, text.strip()))
                break
    return tuple(found)


def of_process(
    notes: Sequence[Note], pids: Collection[int], comm: str = "", *, nested: bool = False
) -> tuple[Note, ...]:
    """Those that name one of `pids`. `nested`: the process has other numbers in the kernel's log (a
    container); then its name must do. Lines about no process at all (an NPU, a unit) count too."""
    return tuple(
        note
        for note in notes
        if note.kind in ("npu", "unit-oom")
        or note.pid in pids
        or (nested and comm and note.comm[:15] == comm[:15])
    )


def _whole(text: str | None, base: int = 16) -> int | None:
    return int(text, base) if text else None


def _groups(match: Match[str]) -> dict[str, str | None]:
    return match.groupdict()


def _trap(match: Match[str], line: str) -> Note:
    part = _groups(match)
    module, pc = part.get("module") or "", _whole(part.get("pc"))
    offset, base = _whole(part.get("offset")), _whole(part.get("base"))
    if offset is None and base is not None and pc is not None:
        offset = pc - base  # older kernels leave the arithmetic to the reader
    return Note(
        "trap",
        line,
        comm=(part.get("comm") or "").strip(),
        pid=_whole(part.get("pid"), 10),
        detail=(part.get("detail") or "").strip(" :,"),
        pc=pc,
        address=_whole(part.get("address")),
        esr=_whole(part.get("esr")),
        module=module,
        offset=offset if offset is None or offset >= 0 else None,
    )


def _riscv(match: Match[str], line: str) -> Note:
    note = _trap(match, line)
    return dataclasses.replace(note, detail=f"signal {match['number']} code {match['code']}")


def _kill(kind: str) -> Callable[[Match[str], str], Note]:
    def make(match: Match[str], line: str) -> Note:
        part = _groups(match)
        return Note(
            kind,
            line,
            comm=(part.get("comm") or "").strip(),
            pid=_whole(part.get("pid"), 10),
            detail=(part.get("detail") or "").strip(" ;,."),
            rss_kb=_whole(part.get("rss"), 10),
        )

    return make


_SHAPES: tuple[tuple[re.Pattern[str], Callable[[Match[str], str], Note]], ...] = (
    (  # x86: "traps: python3[812] trap invalid opcode ip:… sp:… error:0 in x.so[…]"
        re.compile(
            rf"traps: {_COMM}\[(?P<pid>\d{{1,10}})\](?: trap)? (?P<detail>[a-z][a-z ]{{2,60}}?) "
            rf"ip:(?P<pc>[0-9a-f]{{1,16}}) sp:[0-9a-f]{{1,16}} error:[0-9a-f]{{1,8}}{_MODULE}"
        ),
        _trap,
    ),
    (  # x86: "python3[812]: segfault at 0 ip … sp … error 4 in x.so[…]"
        re.compile(
            rf"(?:^|[\s\]]){_COMM}\[(?P<pid>\d{{1,10}})\]: (?P<detail>segfault) at "
            rf"(?P<address>[0-9a-f]{{1,16}}) ip (?P<pc>[0-9a-f]{{1,16}}) sp [0-9a-f]{{1,16}} "
            rf"error [0-9a-f]{{1,8}}{_MODULE}"
        ),
        _trap,
    ),
    (  # arm64, since 4.20: "python3[812]: unhandled exception: DABT (lower EL), ESR 0x…, level 2 …"
        re.compile(
            rf"(?:^|[\s\]]){_COMM}\[(?P<pid>\d{{1,10}})\]: unhandled exception: "
            rf"(?P<detail>[^\n]{{0,80}}?), ESR 0x(?P<esr>[0-9a-f]{{1,16}})[^\n]{{0,120}}?{_MODULE}$"
        ),
        _trap,
    ),
    (  # arm64, before: "python3[812]: undefined instruction: pc=…"
        re.compile(
            rf"(?:^|[\s\]]){_COMM}\[(?P<pid>\d{{1,10}})\]: (?P<detail>undefined instruction): "
            r"pc=(?:0x)?(?P<pc>[0-9a-f]{1,16})"
        ),
        _trap,
    ),
    (  # arm64, before: "python3[812]: unhandled level 2 translation fault (11) at 0x…, esr 0x…"
        re.compile(
            rf"(?:^|[\s\]]){_COMM}\[(?P<pid>\d{{1,10}})\]: unhandled "
            r"(?P<detail>[a-z][a-z0-9 ]{2,60}) \(\d{1,2}\) at 0x(?P<address>[0-9a-f]{1,16}), "
            rf"esr 0x(?P<esr>[0-9a-f]{{1,16}}),?{_MODULE}"
        ),
        _trap,
    ),
    (  # RISC-V: "python3[812]: unhandled signal 4 code 0x1 at 0x… in x.so[…]"
        re.compile(
            rf"(?:^|[\s\]]){_COMM}\[(?P<pid>\d{{1,10}})\]: unhandled signal (?P<number>\d{{1,2}}) "
            rf"code (?P<code>0x[0-9a-f]{{1,8}}) at 0x(?P<pc>[0-9a-f]{{1,16}}){_MODULE}"
        ),
        _riscv,
    ),
    (
        re.compile(
            r"oom-kill:constraint=(?P<detail>[A-Z_]{1,40}),[^\n]*?\btask=(?P<comm>[^,\n]{1,40}),"
            r"pid=(?P<pid>\d{1,10})"
        ),
        _kill("oom"),
    ),
    (  # also "Kill process", as kernels before 5.3 said
        re.compile(
            r"(?P<detail>(?:Memory cgroup )?[Oo]ut of memory): Kill(?:ed)? process "
            r"(?P<pid>\d{1,10}) \((?P<comm>[^)\n]{1,40})\)"
            r"(?:[^\n]*?anon-rss:(?P<rss>\d{1,15})kB)?"
        ),
        _kill("killed"),
    ),
    (
        re.compile(
            r"(?P<detail>Killed process) (?P<pid>\d{1,10}) \((?P<comm>[^)\n]{1,40})\)"
            r"(?:[^\n]*?anon-rss:(?P<rss>\d{1,15})kB)?"
        ),
        _kill("killed"),
    ),
    (
        re.compile(r"(?P<detail>[\w@.\\-]{1,120}): Failed with result 'oom-kill'"),
        _kill("unit-oom"),
    ),
    (
        re.compile(r"systemd-oomd\[\d+\]: Killed (?P<detail>\S{1,200}) due to memory pressure"),
        _kill("unit-oom"),
    ),
    (  # Android: lmkd, then the driver before it
        re.compile(
            r"lowmemorykiller: Kill '(?P<comm>[^'\n]{1,80})' \((?P<pid>\d{1,10})\)"
            r"(?:[^\n]*? free (?P<rss>\d{1,15})kB)?(?:[^\n]*?reason: (?P<detail>[^\n]{1,120}))?"
        ),
        _kill("policy"),
    ),
    (
        re.compile(
            r"lowmemorykiller: Killing '(?P<comm>[^'\n]{1,80})' \((?P<pid>\d{1,10})\)[^\n]*?"
            r"to free (?P<rss>\d{1,15})kB(?:[^\n]*?because (?P<detail>[^\n]{1,120}))?$"
        ),
        _kill("policy"),
    ),
    (
        re.compile(
            r"RKNPU: (?P<detail>failed to wait job[^\n]{0,120}|job timeout[^\n]{0,120}|"
            r"soft reset[^\n]{0,80}|failed to reset[^\n]{0,80})"
        ),
        _kill("npu"),
    ),
    (
        re.compile(
            r"INFO: task (?P<comm>[^\n]{1,40}):(?P<pid>\d{1,10}) blocked for more than "
            r"(?P<detail>\d{1,6} seconds)"
        ),
        _kill("hung"),
    ),
)
